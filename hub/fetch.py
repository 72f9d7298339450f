"""Fetch a model's files into the cache. An earlier try is resumed, and a digest is checked before a file has its name there."""

import asyncio
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, BinaryIO, TypeVar

from . import client
from .cache import RepositoryCache
from .client import Hub, InterruptedFetchError
from .errors import HubError
from .names import HubName
from .repository import RemoteFile, Repository

_SPARE_BYTES = 1 << 30  # of the disk, which stay free
_TRIES = 5  # in sequence that bring nothing
_FILES_AT_ONCE = 4
_HASHED_BYTES = 1 << 22

T = TypeVar("T")
Progress = Callable[[int], None]
"""Called with the number of bytes that came, or were there."""


def check_disk(cache: RepositoryCache, files: list[RemoteFile]) -> None:
    """Check that there is room for what is missing of these files. Raises: HubError."""
    place = next(path for path in (cache.folder, *cache.folder.parents) if path.exists())
    missing, free = cache.missing_bytes(files), shutil.disk_usage(place).free
    if missing and missing + _SPARE_BYTES > free:
        need = f"{missing / 1e9:.1f} GB are to be fetched and 1 GiB has to stay free"
        raise HubError(f"{need}, {place} has {free / 1e9:.1f} GB free: make room (mmrt model list), or set HF_HOME")


async def fetch_files(
    hub: Hub, repository: Repository, files: Sequence[RemoteFile], cache: RepositoryCache, progress: Progress
) -> None:
    """Bring files into the cache, and link them into the commit's snapshot. Raises: HubError."""
    turns = asyncio.Semaphore(_FILES_AT_ONCE)

    async def one(file: RemoteFile) -> None:
        async with turns:
            await _fetch(hub, repository, file, cache, progress)

    try:
        cache.snapshot(repository.commit).mkdir(parents=True, exist_ok=True)
        (cache.folder / "blobs").mkdir(exist_ok=True)
        await together(one(file) for file in {file.digest: file for file in files}.values())  # of equal files one
        for file in files:
            cache.link(repository.commit, file)
    except OSError as error:
        raise HubError(f"{repository.name}: {error.filename or cache.folder} cannot be written: {error.strerror}") from None


async def together(jobs: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Do jobs at once; the first that fails ends all of them."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _fetch(hub: Hub, repository: Repository, file: RemoteFile, cache: RepositoryCache, progress: Progress) -> None:
    if cache.has(file):
        progress(file.num_bytes)
        return
    partial = cache.partial(file)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(partial, flags, 0o644), "r+b") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HubError(f"{repository.name}: another mmrt fetches {file.name}: wait for it") from None
        if cache.has(file):  # another has just ended it; this file is its, or an empty one
            partial.unlink(missing_ok=True)
            progress(file.num_bytes)
            return
        await _Download(hub, repository, file, stream, progress).run()
        await asyncio.to_thread(os.fsync, stream.fileno())  # gigabytes that are not on the disk yet
        os.replace(partial, cache.blob(file))


class _Download:
    """Of one file, into a stream that may have its beginning."""

    def __init__(self, hub: Hub, repository: Repository, file: RemoteFile, stream: BinaryIO, progress: Progress) -> None:
        self._hub, self._repository, self._file, self._stream, self._progress = hub, repository, file, stream, progress
        self._digest = hashlib.sha256() if len(file.digest) == 64 else hashlib.sha1(f"blob {file.num_bytes}\0".encode())
        self._at = 0

    async def run(self) -> None:
        """Raises: HubError; what has come stays in the stream, unless its contents are wrong."""
        await self._read_beginning()
        failures, problem = 0, "it sends nothing"
        while self._at < self._file.num_bytes:
            if failures == _TRIES:
                raise self._hub.unreachable(HubName(self._repository.name), problem)
            if failures:
                await asyncio.sleep(client.PAUSE_S * min(8, 2 ** (failures - 1)))
            before = self._at
            try:
                await self._receive()
            except InterruptedFetchError as error:
                problem = str(error)
            failures = 0 if self._at > before else failures + 1
        if self._digest.hexdigest() != self._file.digest:
            self._stream.truncate(0)
            raise HubError(
                f"{self._repository.name}: {self._file.name} is not the file of commit {self._repository.commit[:12]}: "
                f"its digest is {self._digest.hexdigest()[:12]}, expected {self._file.digest[:12]}; fetch it again, or from elsewhere"
            )

    async def _read_beginning(self) -> None:
        """Take what an earlier try has left. Other files, and Ctrl-C, get their turn meanwhile."""
        while piece := self._stream.read(_HASHED_BYTES):
            self._take(piece)
            if self._at > self._file.num_bytes:  # nobody writes so much; begin anew
                raise self._too_long()
            await asyncio.sleep(0)

    async def _receive(self) -> None:
        async with self._hub.open(self._repository, self._file, self._at) as pieces:
            async for piece in pieces:
                if self._at + len(piece) > self._file.num_bytes:
                    raise self._too_long()
                self._stream.write(piece)
                self._take(piece)

    def _take(self, piece: bytes) -> None:
        self._digest.update(piece)
        self._at += len(piece)
        self._progress(len(piece))

    def _too_long(self) -> HubError:
        self._stream.truncate(0)
        return HubError(
            f"{self._repository.name}: {self._file.name} has more than the {self._file.num_bytes} bytes that the hub tells of"
        )
