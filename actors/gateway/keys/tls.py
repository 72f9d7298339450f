"""TLS: the certificate and key of the server (``server.tls_cert``, ``server.tls_key``), read again when they change.

Each handshake uses the newest pair that belongs together; open connections keep theirs.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable
from pathlib import Path

from ....runtime.config.sections import ServerSection
from ....runtime.errors import ConfigError
from .secret_files import LOOK_S, FileWatch, read_secret

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 20
HANDSHAKE_S = 10.0  # from accepting a connection to the end of its handshake


def make_context(cert: Path, key: Path) -> ssl.SSLContext:
    """Return a server's context with this chain of certificates, the server's own first, and its key, which nobody else may read.
    TLS 1.2 and newer.

    Raises: ConfigError if a file cannot be used, or the key is another certificate's.
    """
    chain = _read_chain(cert)
    secret = read_secret(key, "server.tls_key", MAX_FILE_BYTES)
    if b"PRIVATE KEY-----" not in secret:
        raise ConfigError(f"server.tls_key = {str(key)!r} has no private key in PEM (-----BEGIN PRIVATE KEY-----)")
    if b"ENCRYPTED" in secret:
        raise ConfigError(f"server.tls_key = {str(key)!r} is encrypted, and nobody is there to give its password: expected a plain key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=chain)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"server.tls_cert = {str(cert)!r} is no certificate in PEM: {_reason(error)}") from None
    try:
        context.load_cert_chain(cert, key)
    except ssl.SSLError as error:
        if error.reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED"):  # the last: of another type
            raise ConfigError(f"server.tls_key = {str(key)!r} is not the key of server.tls_cert = {str(cert)!r}") from None
        raise ConfigError(
            f"server.tls_cert = {str(cert)!r} and server.tls_key = {str(key)!r} cannot be used: {_reason(error)}"
        ) from None
    except OSError as error:
        raise ConfigError(f"server.tls_cert = {str(cert)!r} cannot be read: {error.strerror}") from None
    return context


def _read_chain(cert: Path) -> str:
    try:
        with open(cert, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"server.tls_cert = {str(cert)!r} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"server.tls_cert = {str(cert)!r} is larger than {MAX_FILE_BYTES} bytes")
    if b"-----BEGIN CERTIFICATE-----" not in data:
        raise ConfigError(f"server.tls_cert = {str(cert)!r} has no certificate in PEM (-----BEGIN CERTIFICATE-----)")
    return data.decode("ascii", "replace")


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error).lower().replace("_", " ")


class Certificate:
    """The certificate of a server, if it has one. ``fault``: what is wrong with its files, "" if nothing is. ``report`` is called when
    that changes."""

    def __init__(self, server: ServerSection, report: Callable[[], None]) -> None:
        """Raises: ConfigError if the files cannot be used."""
        self._report = report
        self.fault = ""
        self.context: ssl.SSLContext | None = None
        if not server.tls_cert:
            return
        self._files = Path(server.tls_cert), Path(server.tls_key)
        self._watch = FileWatch(*self._files)
        self._newest = self.context = make_context(*self._files)
        # A context that got a second key of another type would serve both.
        self.context.sni_callback = self._take_newest

    def _take_newest(self, connection: ssl.SSLObject, *_: object) -> None:
        connection.context = self._newest

    async def follow(self) -> None:
        """Follow changes of the files until cancelled."""
        while self.context is not None:
            if self._watch.has_changed() or self.fault:  # which may pass without a change: too many open files
                await self._reread()
            await asyncio.sleep(LOOK_S)

    async def _reread(self) -> None:
        try:
            self._newest = await asyncio.to_thread(make_context, *self._files)
        except ConfigError as error:
            fault = f"{error}; the certificate read before stays in use"
            if self.fault == fault:
                return
            self.fault = fault
            log.error("%s", fault)
        else:
            self.fault = ""
            log.info("%s: a new certificate is in use", self._files[0])
        self._report()
