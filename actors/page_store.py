"""Cached pages that outlive the run (``cache.dir``): written behind while it goes on, and found again by the next one.

Nothing is read at the start but the heads of the files. The controller knows from them which pages there are
(``controller/saved_files``), and encoder and prefill load those that a request needs (``host/page_loader``).

The directory has a secret and, for each model and setting that determines what pages hold, one file per pool (``shm/page_file``); the
KV pools of all devices share one.
The keys of pages depend on the secret and on those settings: a page of another model is never found. Whatever is wrong with the
directory is logged, and the run goes on without it.
"""

import errno
import logging
import os
import re
import stat
import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Self

import msgspec
import numpy as np

from .. import __version__
from ..models.checkpoint.files import ADAPTER, files_of_tensors
from ..runtime.config.fetch import FetchSection
from ..runtime.config.runtime_config import RuntimeConfig
from ..runtime.pools import kind_of_pool
from ..runtime.process.memory_layout import MemoryLayout
from ..runtime.process.saved_pages import SavedFiles, SavedPages, cache_directory, write_saved_files
from ..shm.page_file import PageFile, bytes_of_slots, remove_unused
from ..shm.page_secret import SECRET_BYTES, kept_secret, page_secret
from ..shm.pool import PagePool
from ..shm.run_directory import RunDirectory
from .host.loaded_code import loaded_code
from .weights_digest import weights_digests

log = logging.getLogger(__name__)

SHARES = {"kv": 7 / 8, "embedding": 1 / 8}  # of the bytes allowed
STATE_SHARES = {"kv": 4 / 8, "state": 3 / 8, "embedding": 1 / 8}  # of a model with recurrent states
KINDS = ("kv", "window", "state", "embedding")
STATE_REST_S = 10.0  # before a state is saved: it is large, and of a conversation that goes on at once another one soon follows
SAVE_S = 1.0  # between looks at the pools
KEEP_S = 30.0  # between marks of the pages that the pools still have, which are overwritten last
LAST_SAVE_S = 2.0  # at the end of the run, at most
NUM_KINDS = 4  # models or settings whose files are kept
_NICE = 19
_SLOW_WRITE_S = 1.0  # of one page
_FILE = re.compile(f"([0-9a-f]{{16}})-(({'|'.join(KINDS)})[.]pages|pages[.]era)")


class PageStore:
    """The files of one run's pools, which this process writes.

    ``open`` comes before the layout is published; ``start`` afterwards, ``close`` at the end.
    """

    def __init__(self, secret: bytes, files: dict[str, PageFile], pools: dict[str, list[PagePool]]) -> None:
        """Use ``open``. ``secret``: of the run, for the keys of its pages. ``pools``: those of each file."""
        self.secret = secret
        self._files = files
        self._pools = pools
        self._named_s: dict[tuple[str, int], tuple[int, float]] = {}  # states that rest: when they were first seen, by pool and page
        self._seen = {name: [np.zeros(pool.num_pages, np.uint64) for pool in of_kind] for name, of_kind in pools.items()}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._save_until_ended, name="mmrt-pages", daemon=True)

    @classmethod
    def open(
        cls, run: RunDirectory, config: RuntimeConfig, layout: MemoryLayout, model: Path, go_on: Callable[[], None] = lambda: None
    ) -> Self | None:
        """Open the files of the run's pools, and make its secret; None, and a line in the log, where they cannot be used. ``go_on`` is
        called every now and then while the weights are read. Raises: what it raises."""
        directory = cache_directory(config)
        files: dict[str, PageFile] = {}
        saved: dict[str, SavedPages] = {}
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            secret = _secret_of(directory)  # which also checks that nobody else may write there
            kind = _fingerprint(config, layout, model, directory, go_on)
            secret = _derive(secret, kind)
            for name, max_bytes in _most_bytes(layout, int(config.cache.max_mib * (1 << 20))).items():
                path = directory / f"{kind.hex()[:16]}-{name}.pages"
                files[name] = PageFile.open(path, _derive(secret, b"file"), layout.pools[name].page_bytes, max_bytes)
                if not files[name].num_slots:
                    share = max_bytes / (config.cache.max_mib * (1 << 20))
                    room = f"cache.max_mib is {config.cache.max_mib}, of which {name} pages get {share:.0%}"
                    log.warning("cache.dir: %s: one needs %.1f MiB, and none is saved", room, files[name].page_bytes / (1 << 20))
                if files[name].was_foreign:
                    log.warning("cache.dir: emptied %s: it had other pages or another secret", path)
                saved[name] = SavedPages(str(path), _derive(secret, b"file"), files[name].page_bytes)
            _remove_old(directory, kind.hex()[:16])
            if page_secret(run.path, secret) != secret:  # pages of this run, and the files that they come from, are of another kind
                raise FileExistsError(errno.EEXIST, "the model, the settings or the code have changed since the run began")
            write_saved_files(run.path, SavedFiles(saved, str(directory / f"{kind.hex()[:16]}-pages.era")))
        except OSError as error:
            for file in files.values():
                file.close()
            why = "another run has it" if isinstance(error, BlockingIOError) else error.strerror or error
            log.warning("cache.dir %s is not used: %s", directory, why)
            return None
        log.info("cache.dir: there are %s", " and ".join(f"{len(file)} {name} pages" for name, file in files.items()))
        pools = {kind: [PagePool.attach(run, name, "read") for name in layout.pools if kind_of_pool(name) == kind] for kind in files}
        return cls(secret, files, pools)

    def start(self) -> None:
        """Write pages behind from now on."""
        self._thread.start()

    def close(self) -> None:
        """Write what is left, as far as time allows, and end. The controller has ended."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(LAST_SAVE_S + _SLOW_WRITE_S)
        if not self._thread.is_alive():
            for file in self._files.values():
                file.close()

    def _save_until_ended(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        keep_at_s = time.monotonic() + KEEP_S
        try:
            while not self._ended.wait(SAVE_S):
                self._save()
                if time.monotonic() >= keep_at_s:
                    self._keep()
                    keep_at_s = time.monotonic() + KEEP_S
            self._keep()
            self._save(time.monotonic() + LAST_SAVE_S)
        except OSError as error:
            why = "there is no room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
            log.warning("cache.dir: pages are no longer saved: %s", why)
        except Exception:
            log.exception("cache.dir: pages are no longer saved")

    def _save(self, until_s: float | None = None) -> None:
        """Save the pages that have got keys since the last time; without ``until_s`` until the end is near. Raises: OSError."""
        for name, file in self._files.items():
            for pool, seen in zip(self._pools[name], self._seen[name], strict=True):
                for page, generation, key, depth in pool.named_since(seen):
                    if self._ended.is_set() if until_s is None else time.monotonic() > until_s:
                        return
                    if name == "state" and until_s is None and not self._has_rested(pool, page, generation):
                        continue
                    if key not in file or file.read(key) is None:  # damaged: it could not be loaded, and has been made anew
                        contents = pool.copy(page, generation)
                        if contents is None:
                            continue
                        file.write(key, contents, depth if name in SHARES else 0)  # others are of use without those before them
                    seen[page] = generation

    def _has_rested(self, pool: PagePool, page: int, generation: int) -> bool:
        """Return whether a page got its key some time ago."""
        place, now = (pool.name, page), time.monotonic()
        if place not in self._named_s or self._named_s[place][0] != generation:
            self._named_s[place] = generation, now
        return now - self._named_s[place][1] >= STATE_REST_S

    def _keep(self) -> None:
        """Mark the pages that the pools still have, and save again those that a full file has lost. Raises: OSError."""
        for name, file in self._files.items():
            pools = self._pools[name]
            named = [pool.named_since(np.zeros(pool.num_pages, np.uint64)) for pool in pools]
            file.keep(key for of_pool in named for _, _, key, _ in of_pool)
            if file.num_slots >= sum(pool.num_pages for pool in pools):  # else they would push each other out for ever
                for of_pool, seen in zip(named, self._seen[name], strict=True):
                    for page, _, key, _ in of_pool:
                        if key not in file:
                            seen[page] = 0


def _fingerprint(config: RuntimeConfig, layout: MemoryLayout, model: Path, directory: Path, go_on: Callable[[], None]) -> bytes:
    """Return a digest of what determines the contents of pages, besides what their keys name. ``directory``: of pages, where the
    digests of weights are kept. Raises: OSError."""
    weights = files_of_tensors(model)
    patterns = ("*config.json", "*.safetensors.index.json", f"{ADAPTER}/*config.json")
    configs = sorted(file for pattern in patterns for file in model.glob(pattern))
    facts = {
        "version": (__version__, loaded_code()),
        "files": list(zip([path.name for path in weights], weights_digests(weights, directory, go_on), strict=True)),
        "configs": [(path.name, path.read_bytes()) for path in configs],
        "media": msgspec.structs.replace(config.media, fetch=FetchSection()),  # wherever they come from
        "dtypes": (layout.dtype, layout.weights, layout.kv_dtype, layout.kv_page_tokens, layout.device),
        "transfer": config.memory.kv_transfer_dtype,  # pages that were packed on their way differ from others
        "pages": [(name, layout.pools[name].page_bytes) for name in _most_bytes(layout, 0)],
    }
    return blake2b(msgspec.msgpack.encode(facts), digest_size=32).digest()


def _derive(secret: bytes, purpose: bytes) -> bytes:
    return blake2b(purpose, digest_size=SECRET_BYTES, key=secret).digest()


def _remove_old(directory: Path, kind: str) -> None:
    """Remove the files of the models and settings used longest ago, beyond ``NUM_KINDS``, as far as that is possible."""
    kinds: dict[str, list[tuple[float, Path]]] = {}
    for path in directory.iterdir():
        if (ours := _FILE.fullmatch(path.name)) is not None and ours[1] != kind:
            with suppress(OSError):
                if stat.S_ISREG((found := path.lstat()).st_mode):
                    kinds.setdefault(ours[1], []).append((found.st_mtime, path))
    for files in sorted(kinds.values(), key=max, reverse=True)[NUM_KINDS - 1 :]:
        with suppress(OSError):  # another run removes it, for example
            paths = sorted([path for _, path in files], key=lambda path: (path.suffix == ".era", path))
            all(map(remove_unused, paths))  # up to the first that a run uses; the era is the last


def _most_bytes(layout: MemoryLayout, num_bytes: int) -> dict[str, int]:
    """Return the sizes of the pools' files, of ``num_bytes`` together. States, or pages of windows, as many as KV pages, come behind
    the KV pages under them, which are of no use alone."""
    if not layout.has_windows:
        shares = STATE_SHARES if layout.has_states else SHARES
        return {name: int(share * num_bytes) for name, share in shares.items()}
    both, pages = int(SHARES["kv"] * num_bytes), [layout.pools[name].page_bytes for name in ("kv", "window")]

    def of_files(num_slots: int) -> int:
        return sum(bytes_of_slots(num_slots, page_bytes) for page_bytes in pages)

    num_slots = max(0, bisect_right(range(both // sum(pages) + 1), both, key=of_files) - 1)
    kv = min(both, bytes_of_slots(num_slots, pages[0]))
    return {"kv": kv, "window": both - kv, "embedding": int(SHARES["embedding"] * num_bytes)}


def _secret_of(directory: Path) -> bytes:
    """Return the directory's secret, made at its first use. Raises: OSError, PermissionError if others could know it."""
    found = directory.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(errno.EPERM, f"{directory} must belong to this user, and be writable by no other")
    path = directory / "secret"
    secret = kept_secret(path)
    found = path.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(errno.EPERM, f"{path} must belong to this user, and be readable by no other")
    if len(secret) != SECRET_BYTES:
        raise OSError(errno.EINVAL, f"{path} has {len(secret)} bytes, not {SECRET_BYTES}: remove it, and the pages beside it are lost")
    return secret
