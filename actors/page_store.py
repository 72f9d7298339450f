"""Cached pages that outlive the run (``cache.dir``): loaded before there is a controller, and written behind while one works.

The directory has a secret and, for each model and setting that determines what pages hold, one file per pool (``shm/page_file``).
The keys of pages depend on the secret and on those settings: a page of another model is never found. Whatever is wrong with the
directory is logged, and the run goes on without it.
"""

import errno
import logging
import os
import threading
import time
from hashlib import blake2b
from pathlib import Path
from typing import Self

import msgspec
import numpy as np

from .. import __version__
from ..runtime.config import RuntimeConfig
from ..runtime.process.memory_layout import MemoryLayout
from ..shm.page_file import PageFile, lock_is_free
from ..shm.page_secret import SECRET_BYTES, kept_secret
from ..shm.pool import PagePool
from ..shm.run_directory import RunDirectory
from .host.loaded_code import loaded_code

log = logging.getLogger(__name__)

SHARES = {"kv": 7 / 8, "embedding": 1 / 8}  # of the bytes allowed
LOAD_S = 3.0  # of a start, at most
SAVE_S = 1.0  # between looks at the pools
KEEP_S = 30.0  # between marks of the pages that the pools still have, which are overwritten last
LAST_SAVE_S = 2.0  # at the end of the run, at most
NUM_KINDS = 4  # models or settings whose files are kept
_NICE = 19
_GROUP = 64  # pages that are loaded with one generation: of groups the older is evicted first, within one the last page


class PageStore:
    """The files of one run's pools. ``load`` comes before the layout is published; ``start`` afterwards, ``close`` at the end."""

    def __init__(self, secret: bytes, files: dict[str, PageFile], pools: dict[str, PagePool]) -> None:
        """Use ``open``. ``secret``: of the run, for the keys of its pages."""
        self.secret = secret
        self._files = files
        self._pools = pools
        self._seen = {name: np.zeros(pool.num_pages, np.uint64) for name, pool in pools.items()}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._save_until_ended, name="mmrt-pages", daemon=True)

    @classmethod
    def open(cls, run: RunDirectory, config: RuntimeConfig, layout: MemoryLayout, model: Path) -> Self | None:
        """Open the files of the run's pools; None, and a line in the log, where they cannot be used."""
        directory = Path(config.cache.dir).expanduser().absolute()
        files: dict[str, PageFile] = {}
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            kind = _fingerprint(config, layout, model)
            secret = _derive(_secret_of(directory), kind)
            for name, share in SHARES.items():
                path = directory / f"{kind.hex()[:16]}-{name}.pages"
                max_bytes = int(share * config.cache.max_mib * (1 << 20))
                files[name] = PageFile.open(path, _derive(secret, b"file"), layout.pools[name].page_bytes, max_bytes)
                if files[name].was_foreign:
                    log.warning("cache.dir: emptied %s: it had other pages, or another secret", path)
            _remove_old(directory, kind.hex()[:16])
        except OSError as error:
            for file in files.values():
                file.close()
            why = "another run has it" if isinstance(error, BlockingIOError) else error.strerror or error
            log.warning("cache.dir %s is not used: %s", directory, why)
            return None
        return cls(secret, files, {name: PagePool.attach(run, name) for name in SHARES})

    def load(self) -> None:
        """Fill the pools, which are empty, with the pages written last, and name them."""
        began_s = time.monotonic()
        for name, file in self._files.items():
            num_loaded, num_damaged = self._load_pool(name, file, began_s + LOAD_S)
            log.info("cache.dir: loaded %d %s pages of %d", num_loaded, name, len(file) + num_damaged)
            if num_damaged:
                log.warning("cache.dir: ignored %d %s pages that are not as they were written", num_damaged, name)

    def _load_pool(self, name: str, file: PageFile, until_s: float) -> tuple[int, int]:
        """Return how many pages were loaded and how many are damaged. Groups of the newest pages come first, in case time is short."""
        pool, num_loaded, num_damaged = self._pools[name], 0, 0
        keys = file.keys()[-pool.num_pages :]
        for first in reversed(range(0, len(keys), _GROUP)):
            for page, key in enumerate(keys[first : first + _GROUP], first):
                if time.monotonic() > until_s:
                    return num_loaded, num_damaged
                try:
                    contents = file.read(key)
                except OSError as error:
                    log.warning("cache.dir: the %s pages cannot be read: %s", name, error.strerror)
                    return num_loaded, num_damaged
                if contents is None:
                    num_damaged += 1
                    continue
                generation = 1 + first // _GROUP
                pool.write_bytes([page], contents)
                pool.generations[page] = generation
                pool.write_keys([page], [generation], [key])
                num_loaded += 1
        return num_loaded, num_damaged

    def start(self) -> None:
        """Write pages behind from now on."""
        self._thread.start()

    def close(self) -> None:
        """Write what is left, as far as time allows, and end. The controller has ended."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(LAST_SAVE_S + SAVE_S)
        if not self._thread.is_alive():
            for file in self._files.values():
                file.close()

    def _save_until_ended(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        keep_at_s = time.monotonic() + KEEP_S
        try:
            while not self._ended.wait(SAVE_S):
                self._save(float("inf"))
                if time.monotonic() >= keep_at_s:
                    self._keep()
                    keep_at_s = time.monotonic() + KEEP_S
            self._save(time.monotonic() + LAST_SAVE_S)
            self._keep()
        except OSError as error:
            why = "there is no room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
            log.warning("cache.dir: pages are no longer saved: %s", why)
        except Exception:
            log.exception("cache.dir: pages are no longer saved")

    def _save(self, until_s: float) -> None:
        """Save the pages that have got keys since the last time. Raises: OSError."""
        for name, file in self._files.items():
            pool, seen = self._pools[name], self._seen[name]
            for page, generation, key in pool.named_since(seen):
                if time.monotonic() > until_s:
                    return
                if key not in file:
                    contents = pool.copy(page, generation)
                    if contents is None:
                        continue
                    file.write(key, contents)
                seen[page] = generation

    def _keep(self) -> None:
        """Mark the pages that the pools still have, and save again those that a full file has lost. Raises: OSError."""
        for name, file in self._files.items():
            pool, seen = self._pools[name], self._seen[name]
            named = pool.named_since(np.zeros(pool.num_pages, np.uint64))
            file.keep(key for _, _, key in named)
            if file.num_slots >= pool.num_pages:  # else they would push each other out for ever
                for page, _, key in named:
                    if key not in file:
                        seen[page] = 0


def _fingerprint(config: RuntimeConfig, layout: MemoryLayout, model: Path) -> bytes:
    """Return a digest of what determines the contents of pages, besides what their keys name. Raises: OSError."""
    weights = sorted(model.glob("*.safetensors"))
    facts = {
        "version": (__version__, loaded_code()),
        "files": [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in weights],
        "configs": [(path.name, path.read_bytes()) for path in sorted(model.glob("*config.json"))],
        "media": config.media,
        "dtypes": (layout.dtype, layout.kv_dtype, layout.kv_page_tokens, layout.device),
        "pages": [(name, layout.pools[name].page_bytes) for name in SHARES],
    }
    return blake2b(msgspec.msgpack.encode(facts), digest_size=32).digest()


def _derive(secret: bytes, purpose: bytes) -> bytes:
    return blake2b(purpose, digest_size=SECRET_BYTES, key=secret).digest()


def _remove_old(directory: Path, kind: str) -> None:
    """Remove the files of the models and settings used longest ago, beyond ``NUM_KINDS``. Raises: OSError."""
    used_s: dict[str, float] = {}
    for path in directory.glob("*.pages"):
        name = path.name.partition("-")[0]
        used_s[name] = max(used_s.get(name, 0.0), path.stat().st_mtime)
    for name in sorted({*used_s} - {kind}, key=used_s.__getitem__, reverse=True)[NUM_KINDS - 1 :]:
        for path in directory.glob(f"{name}-*.pages"):
            if lock_is_free(path):
                path.unlink(missing_ok=True)


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
