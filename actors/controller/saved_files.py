"""Looks into the files of ``cache.dir`` for the pages that they have, as ``memory`` goes on writing them (controller process)."""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from ...runtime.pools import PoolName
from ...runtime.process.saved_pages import read_saved_pages
from ...shm.page_file import PageFileReader

log = logging.getLogger(__name__)

LOOK_S = 1.0  # between looks, at least
_BUSY_SHARE = 0.02  # of the time, at most

Slots = dict[PoolName, dict[bytes, int]]
"""Of pages, by pool and key."""


class SavedFiles:
    """The files of a run, opened at the first look."""

    def __init__(self, run: Path, cache: Path) -> None:
        """``cache``: where the configuration has the files."""
        self._run = run
        self._cache = cache
        self._readers: dict[PoolName, PageFileReader] = {}
        self._seen_ns: dict[PoolName, int] = {}
        self._failure = ""
        self._pause_s = LOOK_S

    def look(self) -> Slots:
        """Return the slots of all pages of the files that have changed since the last look: some milliseconds for 10,000 pages."""
        began_s = time.monotonic()
        found: Slots = {}
        try:
            if not self._readers:
                saved = read_saved_pages(self._run, self._cache)
                self._readers = {
                    pool: PageFileReader.open(Path(of_pool.path), of_pool.secret, of_pool.page_bytes) for pool, of_pool in saved.items()
                }
            for pool, reader in self._readers.items():
                written_ns = reader.written_ns()
                if written_ns != self._seen_ns.get(pool):
                    found[pool] = reader.slots()
                    self._seen_ns[pool] = written_ns
        except (OSError, ValueError) as error:
            if str(error) != self._failure:
                self._failure = str(error)
                log.warning("cache.dir: saved pages cannot be found: %s", error)
        self._pause_s = max(LOOK_S, (time.monotonic() - began_s) / _BUSY_SHARE)
        return found

    async def follow(self, on_change: Callable[[Slots], object]) -> None:
        """Look again and again, in another thread, until cancelled. A run without files at the first look gets none."""
        while self._readers:
            await asyncio.sleep(self._pause_s)
            if found := await asyncio.to_thread(self.look):
                on_change(found)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
