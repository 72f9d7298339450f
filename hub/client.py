"""Ask a hub over HTTP: what a repository has, and ranges of its files. Every answer is bounded.

The token goes to the hub itself and to nobody that it redirects to. What is fetched is checked by its caller (``fetch``).
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self
from urllib.parse import quote

import aiohttp
from yarl import URL

from .. import __version__
from .errors import HubError, ModelNotFoundError
from .names import HubName
from .repository import MAX_ANSWER_BYTES, RemoteFile, Repository, parse_repository

NETWORK_ERRORS = (aiohttp.ClientError, TimeoutError, ConnectionError)
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=20, sock_read=60)
_MAX_REDIRECTS = 10
_MAX_PARTS = 8  # ranges and files asked for at once
_TRIES = 3
PAUSE_S = 1.0  # before a failed question is asked again; then twice as long
_PIECE_BYTES = 1 << 20


class InterruptedFetchError(Exception):
    """The hub did not answer, or stopped in the middle: to be tried again. The message has no name of a file."""


class Hub:
    """A session with the hub of the environment (HF_ENDPOINT, HF_TOKEN). An async context manager."""

    def __init__(self) -> None:
        """Raises: HubError if the environment forbids questions, or names no hub."""
        from huggingface_hub import constants, get_token

        self.endpoint = constants.ENDPOINT.rstrip("/")
        self.shown = _shown(self.endpoint)
        if constants.HF_HUB_OFFLINE:
            raise HubError("HF_HUB_OFFLINE is set, so no hub is asked: unset it to fetch a model")
        try:
            self._origin = URL(self.endpoint).origin()
        except ValueError:
            raise HubError(f"HF_ENDPOINT = {self.shown!r} is not the address of a hub, as https://huggingface.co") from None
        self._token = get_token()
        if self._token and URL(self.endpoint).user is not None:  # one header has either
            raise HubError(
                f"HF_ENDPOINT has a password for {self.shown}, and there is a token (HF_TOKEN, hf auth login): leave one of them out"
            )
        self._parts = asyncio.Semaphore(_MAX_PARTS)

    async def __aenter__(self) -> Self:
        headers = {"User-Agent": f"mmrt/{__version__}", "Accept-Encoding": "identity"}
        self._session = aiohttp.ClientSession(headers=headers, timeout=_TIMEOUT, trust_env=True, auto_decompress=False)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        await self._session.close()

    async def repository(self, name: HubName) -> Repository:
        """Ask what a repository has at a revision. Raises: HubError."""
        revision = f"/revision/{quote(name.revision, safe='')}" if name.revision else ""
        url = f"{self.endpoint}/api/models/{name.repo}{revision}?blobs=true"
        body = await self._read(name, url, {}, MAX_ANSWER_BYTES + 1)
        if len(body) > MAX_ANSWER_BYTES:
            raise HubError(f"{name.repo}: the hub's answer has more than {MAX_ANSWER_BYTES} bytes")
        return parse_repository(name.repo, body)

    async def read(self, repository: Repository, file: RemoteFile, start: int, num_bytes: int) -> bytes:
        """Return these bytes of a file, or fewer where it ends. Raises: HubError."""
        end = min(start + num_bytes, file.num_bytes)
        if start >= end:
            return b""
        url, headers = self._url(repository, file), {"Range": f"bytes={start}-{end - 1}"}
        return await self._read(HubName(repository.name), url, headers, end - start, start)

    @asynccontextmanager
    async def open(self, repository: Repository, file: RemoteFile, start: int) -> AsyncIterator[AsyncIterator[bytes]]:
        """Give a file's bytes from ``start`` on, as they come. Raises: HubError, InterruptedFetchError."""
        url, headers = self._url(repository, file), {"Range": f"bytes={start}-"} if start else {}
        try:
            async with self._parts, self._get(HubName(repository.name), url, headers) as response:
                yield _from(response, start, file.name)
        except NETWORK_ERRORS as error:
            raise InterruptedFetchError(_told(error)) from None

    def _url(self, repository: Repository, file: RemoteFile) -> str:
        return f"{self.endpoint}/{repository.name}/resolve/{repository.commit}/{quote(file.name)}"

    async def _read(self, name: HubName, url: str, headers: Mapping[str, str], num_bytes: int, start: int = 0) -> bytes:
        """Read so many bytes of an answer, in a few tries."""
        problem = ""
        for at in range(_TRIES):
            if at:
                await asyncio.sleep(PAUSE_S * 2 ** (at - 1))
            found = bytearray()
            try:
                async with self._parts, self._get(name, url, headers) as response:
                    async for piece in _from(response, start, name.repo):
                        found += piece[: num_bytes - len(found)]
                        if len(found) == num_bytes:
                            response.close()
                            break
                return bytes(found)
            except (InterruptedFetchError, *NETWORK_ERRORS) as error:
                problem = _told(error)
        raise self.unreachable(name, problem)

    def unreachable(self, name: HubName, problem: str) -> HubError:
        """The error about a hub that does not answer."""
        mirror = "" if "huggingface.co" in self.endpoint else " (HF_ENDPOINT)"
        return HubError(f"{name}: {self.shown}{mirror} does not answer: {problem}; what has come is kept, try again")

    @asynccontextmanager
    async def _get(self, name: HubName, url: str, headers: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        """Follow redirects to an answer. Raises: HubError, InterruptedFetchError, NETWORK_ERRORS."""
        target = URL(url, encoded=True)
        for _ in range(_MAX_REDIRECTS + 1):
            is_own = target.origin() == self._origin
            own = {"Authorization": f"Bearer {self._token}"} if self._token and is_own else {}
            async with self._session.get(target, headers={**headers, **own}, allow_redirects=False) as response:
                if response.status not in (301, 302, 303, 307, 308):
                    self._check(name, response)
                    yield response
                    return
                target = _redirected(name, target, response.headers.get("Location", ""))
        raise HubError(f"{name}: {self.shown} redirects more than {_MAX_REDIRECTS} times")

    def _check(self, name: HubName, response: aiohttp.ClientResponse) -> None:
        """Raise what a status means: HubError where a person has to act, InterruptedFetchError where time helps."""
        status, code = response.status, response.headers.get("X-Error-Code", "")
        if status in (200, 206):
            return
        page = f"{self.shown}/{name.repo}"
        has_token = "the token (HF_TOKEN, hf auth login) does not open it" if self._token else "then set HF_TOKEN, or `hf auth login`"
        if code == "GatedRepo":
            raise HubError(f"{name.repo} is gated: accept its terms at {page}; {has_token}")
        if code == "RevisionNotFound":
            raise ModelNotFoundError(f"{name.repo} has no revision {name.revision or 'main'!r}: {page}/tree/main lists them")
        if code == "EntryNotFound":
            raise HubError(f"{name.repo}: the hub lists a file that it does not have ({response.url.path[-80:]})")
        if status == 401 and self._token and code != "RepoNotFound":
            raise HubError(f"{name.repo}: {self.shown} does not accept the token: make another, and set HF_TOKEN or `hf auth login`")
        if code == "RepoNotFound" or status in (401, 404):
            private = "its token may not read it" if self._token else "needs HF_TOKEN, or `hf auth login`"
            raise ModelNotFoundError(f"{self.shown} has no model {name.repo}, or it is private and {private}")
        if status in (403, 451):
            raise HubError(f"{name.repo}: {self.shown} refuses access (status {status}): see {page}")
        if status in (408, 429) or status >= 500:
            raise InterruptedFetchError(f"status {status}" + (", too many requests: wait some minutes" if status == 429 else ""))
        raise HubError(f"{name.repo}: {self.shown} answers with status {status}, expected 200")


def _shown(endpoint: str) -> str:
    """A hub's address as messages have it: without the password that a mirror's may hold."""
    scheme, mark, rest = endpoint.rpartition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2]}"


def _redirected(name: HubName, source: URL, location: str) -> URL:
    try:
        is_encoded = location.isascii() and location.isprintable() and " " not in location
        target = source.join(URL(location, encoded=is_encoded)) if location else URL()  # signed, so left as it is
        target.origin()
    except ValueError:
        target = URL()
    if target.scheme not in ("http", "https") or source.scheme == "https" != target.scheme:
        raise HubError(f"{name.repo}: the hub redirects to {location[:80]!r}, which is no address to fetch from")
    return target


async def _from(response: aiohttp.ClientResponse, start: int, what: str) -> AsyncIterator[bytes]:
    """A file's bytes from ``start`` on, also of a server that sends all of it."""
    skip = start
    if response.status == 206:
        begins = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("-")[0]
        if begins != str(start):
            raise HubError(f"{what}: the hub sends bytes from {begins[:20]!r}, asked for {start}")
        skip = 0
    async for piece in response.content.iter_chunked(_PIECE_BYTES):
        if skip < len(piece):
            yield piece[skip:] if skip else piece
        skip = max(0, skip - len(piece))


def _told(error: Exception) -> str:
    """An error of the network in one line, without the addresses that it may hold."""
    if isinstance(error, TimeoutError):
        return "no bytes for a minute"
    text = str(error.strerror if isinstance(error, OSError) and error.strerror else error) or type(error).__name__
    return text.splitlines()[0][:200]
