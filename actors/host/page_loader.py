"""prefill's side of saved KV pages (``cache.dir``): reads them from the file that ``memory`` writes into the pages of a row."""

import logging
import time
from pathlib import Path

from ...runtime.bus.messages import Loaded
from ...runtime.bus.plans import Load, LoadChunk
from ...runtime.process.saved_pages import read_saved_pages
from ...shm.page_file import PageFileReader
from ...shm.pool import PagePool
from ...shm.run_directory import RunDirectory
from ...shm.sequence_table import SequenceTable

log = logging.getLogger(__name__)

LOAD_S = 0.5  # for one chunk, at most: other prompts wait
LEAST_PAGES = 4  # in that time: a slower disk is asked for no more


class PageLoader:
    """Opens the file when it is first asked. A file that cannot be read has no pages."""

    def __init__(self, run: RunDirectory, kv: PagePool, table: SequenceTable) -> None:
        self._run = run
        self._kv = kv
        self._table = table
        self._reader: PageFileReader | None = None

    def execute(self, plan: Load) -> Loaded:
        """Load the pages of each chunk."""
        loaded = [self._load(chunk) for chunk in plan.chunks]
        return Loaded([end for end, _ in loaded], any(more for _, more in loaded))

    def _load(self, chunk: LoadChunk) -> tuple[int, bool]:
        """Write the chunk's leading pages that the file has, as far as time allows. Returns the token up to which that is done, and
        whether the file may have more."""
        page_tokens = (chunk.end - chunk.start) // len(chunk.keys)
        pages = self._table.pages(chunk.row, chunk.member)[chunk.start // page_tokens : chunk.end // page_tokens].tolist()
        until_s = time.monotonic() + LOAD_S
        num_loaded, more = 0, False
        try:
            if (reader := self._open()) is None:
                return chunk.start, False
            for page, key in zip(pages, chunk.keys, strict=True):
                now_s = time.monotonic()
                if now_s >= until_s:
                    more = num_loaded >= LEAST_PAGES
                    break
                if (contents := reader.read(key, now_s)) is None:
                    break
                self._kv.write_bytes([page], contents)
                num_loaded += 1
            else:
                more = True
        except (OSError, ValueError) as error:
            log.warning("cache.dir: saved pages cannot be read: %s", error)
        return chunk.start + num_loaded * page_tokens, more

    def _open(self) -> PageFileReader | None:
        if self._reader is None and (saved := read_saved_pages(self._run.path)) is not None:
            self._reader = PageFileReader.open(Path(saved.path), saved.secret, saved.page_bytes)
        return self._reader
