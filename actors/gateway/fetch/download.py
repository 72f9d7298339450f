"""Download a medium by HTTP from a server that may be hostile, or read it from a file. Runs in the fetch process.

aiohttp connects to what ``_Resolver`` returns: each name is resolved once for each connection, all its addresses are checked, and
those are used, so that a second answer of the name server is never asked for (DNS rebinding). Host and SNI keep the name. The socket's
own address is checked once more, which covers addresses in URLs. Nothing comes from the environment: no proxy, no .netrc.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from ....runtime.config.fetch import FetchSection
from ..reading.url_rules import FetchError, check_characters, check_file_url, check_url, is_file_url, may_connect
from .local_files import read_file

log = logging.getLogger(__name__)

MAX_HELD_BYTES = 256 << 20  # of all media under way
_NUM_FILE_THREADS = 4
_REDIRECTS = (301, 302, 303, 307, 308)
# The same words for a name that does not exist, an address that is refused, and one where nobody answers: else requests could map
# the network that the server is in.
UNREACHABLE = "its host cannot be reached, or may not be"
_HEADERS = {"User-Agent": "mmrt", "Accept": "*/*", "Accept-Encoding": "identity"}

AddressesOf = Callable[[str], Awaitable[list[str]]]


class Refused(OSError):
    """An address that may not be connected to."""


class SystemNames:
    """The system's name resolution. A slow name server takes one of ``num_threads``."""

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="resolve")

    async def addresses_of(self, name: str) -> list[str]:
        """Raises: OSError."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._threads, lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class Downloader:
    """Downloads within the rules; made in the event loop. ``addresses_of``: all addresses of a name."""

    def __init__(self, rules: FetchSection, addresses_of: AddressesOf, tls: ssl.SSLContext | None = None) -> None:
        self._rules = rules
        self._num_bytes = 0
        self._threads = ThreadPoolExecutor(_NUM_FILE_THREADS, thread_name_prefix="files")
        connector = aiohttp.TCPConnector(
            resolver=_Resolver(addresses_of, rules),
            socket_factory=self._socket,
            ssl=tls or ssl.create_default_context(),
            use_dns_cache=False,
            force_close=True,
            limit=0,
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=_HEADERS,
            auto_decompress=False,
            trust_env=False,
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def download(self, text: str, max_bytes: int) -> bytearray:
        """Return the bytes that a URL names. They count as held until ``release``.

        Raises: FetchError: 400 for a URL that is not allowed, 413 for more than ``max_bytes``, 503 if memory is short, else 422.
        """
        rules, has_answered = self._rules, is_file_url(text)
        try:
            async with asyncio.timeout(rules.timeout_s):
                if is_file_url(text):
                    return await self._read_file(check_file_url(text), max_bytes)
                url = check_url(text, rules)
                for _ in range(rules.max_redirects + 1):
                    async with self._session.get(url, allow_redirects=False) as response:
                        has_answered = True
                        if response.status not in _REDIRECTS:
                            return await self._read(response, max_bytes)
                        url = _target(url, response.headers.get("Location", ""), rules)
                        has_answered = False
        except TimeoutError:
            late = f"did not arrive within {rules.timeout_s:g} s (media.fetch.timeout_s)"
            raise FetchError(late if has_answered else UNREACHABLE) from None
        except (OSError, aiohttp.ClientError, ValueError) as error:
            if isinstance(error, FetchError):
                raise
            log.info("%s: %r", url.host, error)
            raise FetchError("its server broke the answer off, or sent no valid HTTP" if has_answered else UNREACHABLE) from None
        raise FetchError(f"is redirected more than {rules.max_redirects} times (media.fetch.max_redirects)")

    def release(self, num_bytes: int) -> None:
        """Forget so many bytes of media."""
        self._num_bytes -= num_bytes

    async def close(self) -> None:
        await self._session.close()

    def _socket(self, address: tuple[object, ...]) -> socket.socket:
        """Make the socket for an address: the last place before bytes leave the machine."""
        family, kind, protocol, _, place = address
        assert isinstance(family, int) and isinstance(kind, int) and isinstance(protocol, int) and isinstance(place, tuple)
        if not may_connect(str(place[0]), self._rules.allowed_networks):
            raise Refused(f"{place[0]} is not public, nor in media.fetch.allowed_networks")
        return socket.socket(family, kind, protocol)

    async def _read_file(self, path: str, max_bytes: int) -> bytearray:
        read = partial(read_file, path, self._rules.allowed_roots, max_bytes)
        data = await asyncio.get_running_loop().run_in_executor(self._threads, read)
        try:
            self._hold(len(data))
        except FetchError:
            self.release(len(data))
            raise
        return data

    def _hold(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes > MAX_HELD_BYTES:
            raise FetchError("too many large media are being fetched", 503)

    async def _read(self, response: aiohttp.ClientResponse, max_bytes: int) -> bytearray:
        if response.status != 200:
            raise FetchError(f"its server answers with status {response.status}")
        packing = response.headers.get("Content-Encoding", "identity").lower()
        if packing != "identity":
            raise FetchError(f"its server sends Content-Encoding {packing[:40]!r}, which was not asked for")
        if (response.content_length or 0) > max_bytes:
            raise FetchError(f"has {response.content_length} bytes, the limit is {max_bytes} (media.max_item_mib)", 413)
        data = bytearray()
        try:
            async for chunk in response.content.iter_any():
                data += chunk
                self._hold(len(chunk))
                if len(data) > max_bytes:
                    raise FetchError(f"has more than {max_bytes} bytes, the limit (media.max_item_mib)", 413)
            if not data:
                raise FetchError("is empty")
        except BaseException:
            self.release(len(data))
            raise
        return data


class _Resolver(AbstractResolver):
    """Gives aiohttp the addresses of a name, if it may connect to all of them."""

    def __init__(self, addresses_of: AddressesOf, rules: FetchSection) -> None:
        self._addresses_of = addresses_of
        self._rules = rules

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC) -> list[ResolveResult]:
        addresses = await self._addresses_of(host)
        for address in addresses:
            if not may_connect(address, self._rules.allowed_networks):
                raise Refused(f"{host} has the address {address}, not public, nor in media.fetch.allowed_networks")
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in addresses
        ]

    async def close(self) -> None:
        pass


def _target(url: URL, location: str, rules: FetchSection) -> URL:
    """Return where a redirect leads. Raises: FetchError, which does not say where: the answer may come from within a network."""
    try:
        check_characters(location)
        if location:
            return check_url(str(url.join(URL(location))), rules)
    except ValueError:
        pass
    raise FetchError("is redirected to a URL that may not be fetched")
