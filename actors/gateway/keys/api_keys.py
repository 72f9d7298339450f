"""The API keys that open the server: ``server.api_key``, and those of ``server.api_keys_file``, which is read again when it changes.

Keys are compared by their sha-256, each with all, in constant time. Names stand in logs and metrics, keys nowhere. The sha-256s of the
last good file lie in the run directory, for a gateway that starts while the file is broken.
"""

import asyncio
import contextlib
import hmac
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from aiohttp import web
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from ....runtime.config.sections import ServerSection
from ....runtime.errors import ConfigError
from ..answers.choices import Usage
from ..reading.cache_keys import key_salt, tenant_salt
from .key_file import ApiKey, digest_of, read_keys
from .quotas import Counts, Quota, own_counts
from .secret_files import LOOK_S, FileWatch

log = logging.getLogger(__name__)

CONFIGURED = "server.api_key"  # the name of that key; those of the file have no dots
KEPT_NAME = "api_keys"  # in the run directory


class Client:
    """The owner of a key: its rights and its use."""

    def __init__(self, key: ApiKey, counts: Counts) -> None:
        self.key = key
        self.quota = Quota(key, time.monotonic(), counts)


CLIENT = web.RequestKey("client", Client)  # whose key a request has; none where the server has no keys


def salt_of(http: web.Request, cache_salt: str | None) -> bytes:
    """Return the salt of a request, from its own ``cache_salt`` and that of its key; empty without either."""
    return tenant_salt(cache_salt, http[CLIENT].key.salt if CLIENT in http else b"")


def spend_tokens(http: web.Request, usage: Usage) -> None:
    """Count the tokens of a request that has ended."""
    if CLIENT in http:
        http[CLIENT].quota.spend(usage.prompt_tokens, usage.completion_tokens, time.monotonic())


_decode_kept = msgspec.msgpack.Decoder(tuple[ApiKey, ...]).decode


class ApiKeys:
    """The keys of a server. ``fault``: what is wrong with the file, "" if nothing is. ``report`` is called when that changes.
    ``of_front``: of several models; it counts requests of all, and each run the tokens of its own. ``counts_of``: a key's name."""

    def __init__(
        self,
        server: ServerSection,
        run: Path,
        report: Callable[[], None],
        *,
        of_front: bool = False,
        counts_of: Callable[[str], Counts] = own_counts,
    ) -> None:
        """Read the file, or what is kept of the last good one. Raises: ConfigError if there is neither."""
        self._report = report
        self._counts_of = counts_of
        self._of_front = of_front
        self._kept = run / KEPT_NAME
        self._file = Path(server.api_keys_file) if server.api_keys_file else None
        self._watch = FileWatch() if self._file is None else FileWatch(self._file)
        digest = digest_of(server.api_key)
        own = ApiKey(name=CONFIGURED, digest=digest, salt=key_salt(digest), may_command=True)
        self._configured = (own,) if server.api_key else ()
        self._clients: dict[str, Client] = {}
        self.is_needed = server.needs_key
        self.fault = ""
        self._adopt(self._read() if self._file is not None else ())

    @property
    def clients(self) -> tuple[Client, ...]:
        return tuple(self._clients.values())

    def find(self, *given: str) -> Client | None:
        """Return the owner of one of these keys. It takes equally long whichever fits, if any."""
        found = None
        for digest in map(digest_of, given):
            for client in self._clients.values():
                if hmac.compare_digest(digest, client.key.digest):
                    found = client
        return found

    def look(self) -> None:
        """Read the file again now, if it has changed."""
        if self._file is not None and self._is_due:
            with self._kept_on_fault():
                self._change(self._file, read_keys(self._file))

    async def follow(self) -> None:
        """Follow changes of the file until cancelled."""
        while self._file is not None:
            if self._is_due:
                with self._kept_on_fault():
                    self._change(self._file, await asyncio.to_thread(read_keys, self._file))
            await asyncio.sleep(LOOK_S)

    @property
    def _is_due(self) -> bool:
        return self._watch.has_changed() or bool(self.fault)  # which may pass without a change: too many open files

    @contextlib.contextmanager
    def _kept_on_fault(self) -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            if self._fail(error, "the keys read before stay valid"):
                self._report()

    def _change(self, file: Path, keys: tuple[ApiKey, ...]) -> None:
        self._adopt(keys)
        self._keep(keys)
        self.fault = ""
        log.info("%s: %d API keys: %s", file, len(keys), ", ".join(key.name for key in keys))
        self._report()

    def _read(self) -> tuple[ApiKey, ...]:
        assert self._file is not None
        try:
            keys = read_keys(self._file)
        except ConfigError as error:
            try:
                keys = _decode_kept(self._kept.read_bytes())
            except (OSError, msgspec.MsgspecError):
                raise error from None
            self._fail(error, "the keys that the last gateway had read stay valid")
            return keys
        self._keep(keys)
        return keys

    def _fail(self, error: ConfigError, what_holds: str) -> bool:
        """Note and log a fault; return whether it is another than before."""
        if self.fault.startswith(f"{error}; "):
            return False
        self.fault = f"{error}; {what_holds}"
        log.error("%s", self.fault)
        return True

    def _adopt(self, keys: tuple[ApiKey, ...]) -> None:
        """Take these keys. Requests of a key that is gone go on; what a name has used stays used."""
        now_s = time.monotonic()
        before, self._clients = self._clients, {}
        for key in (*self._configured, *keys):
            client = self._clients[key.name] = before.get(key.name) or Client(key, self._counts_of(key.name))
            client.key = key
            client.quota.limit(msgspec.structs.replace(key, tokens_per_minute=0) if self._of_front else key, now_s)

    def _keep(self, keys: tuple[ApiKey, ...]) -> None:
        part = self._kept.with_name(f".{KEPT_NAME}.{os.getpid()}")
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(msgspec.msgpack.encode(keys))
            os.replace(part, self._kept)
        except OSError as error:
            log.warning("%s is not written, a later gateway depends on the file of keys: %s", self._kept, error)
            part.unlink(missing_ok=True)


class KeyMetrics(Collector):
    """Return the use of each key, by its name."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    def collect(self) -> Iterator[Metric]:
        answers = CounterMetricFamily("mmrt_api_key_requests", "Answers to requests of a key.", labels=["key", "status"])
        refused = CounterMetricFamily("mmrt_api_key_refusals", "Requests beyond a limit of a key.", labels=["key", "limit"])
        tokens = CounterMetricFamily("mmrt_api_key_tokens", "Tokens of requests of a key.", labels=["key", "kind"])
        for client in self._keys.clients:
            name, quota = client.key.name, client.quota
            for hundreds, number in sorted(quota.answers.items()):
                answers.add_metric([name, f"{hundreds}xx"], number)
            for limit, number in sorted(quota.refused.items()):
                refused.add_metric([name, limit], number)
            tokens.add_metric([name, "prompt"], quota.prompt_tokens)
            tokens.add_metric([name, "completion"], quota.completion_tokens)
        yield from (answers, refused, tokens)
