"""The run directory: its live processes, the right to sweep it, the generation of an actor that may write, and all paths.

``mmrt up`` (or the first process to start) creates it, every process of the run attaches. All locks are flock(2) on descriptors that
are closed on exec, so the kernel gives them up with their holder, however it dies.
"""

import json
import os
import secrets
import shutil
import stat
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from .errors import BusyError, MissingError, ShmError
from .file_lock import EXCLUSIVE, SHARED, holders, is_current, open_lock, try_lock
from .role_lock import RoleLock, next_generation

__all__ = ["RoleLock", "RunDirectory", "next_generation", "sweep_dead_run", "sweep_dead_runs"]

ENVIRONMENT = "MMRT_RUN_DIR"
MAX_SOCKET_PATH = 107  # bytes of sockaddr_un.sun_path, less the closing zero
_LONGEST_SOCKET_NAME = 32
_SHARED_MEMORY = "/dev/shm"
_LOCK = "LOCK"
_MARKER = b"mmrt run directory\n"  # nothing is ever swept that does not carry it
_INFO = "run.json"
NOTES = "notes"  # what is written to actors
_live: "weakref.WeakSet[RunDirectory]" = weakref.WeakSet()
_RETRY_S = 0.01
_BUSY_RETRY_S = 0.3  # a mere probe holds the lock for microseconds


def _parents() -> list[Path]:
    """The directories for runs, the best first. Raises: ShmError if there is none."""
    found = []
    for candidate in (_SHARED_MEMORY, os.environ.get("XDG_RUNTIME_DIR", "")):
        if candidate and os.access(candidate, os.W_OK | os.X_OK):
            parent = Path(candidate) / f"mmrt-{os.getuid()}"
            if not _is_foreign(parent):
                found.append(parent)
    if not found:
        foreign = foreign_parent()
        why = f"{_SHARED_MEMORY} is not writable" if foreign is None else f"{foreign} is not a directory of user {os.geteuid()}"
        raise ShmError(f"{why}, nor does XDG_RUNTIME_DIR name a directory; set {ENVIRONMENT} to a directory on a tmpfs")
    return found


def foreign_parent() -> Path | None:
    """The directory for runs in shared memory, if another user has made it: any user may, and then we cannot use it."""
    parent = Path(_SHARED_MEMORY) / f"mmrt-{os.getuid()}"
    return parent if _is_foreign(parent) else None


def _is_foreign(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid()


def _is_own_parent(path: Path) -> bool:
    """Return whether it is the directory of all runs of this user, which is made and removed with them."""
    return path.name == f"mmrt-{os.getuid()}"


def _make_private(path: Path) -> None:
    """Make a directory of mode 0700, or check that the existing one is ours alone."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ShmError(f"{path} cannot be made: {error.strerror}") from None
    if _is_foreign(path):
        raise ShmError(f"{path} is not a directory of user {os.geteuid()}")
    if path.lstat().st_mode & 0o077:
        path.chmod(0o700)


def _is_ours(lock_fd: int, path: Path) -> bool:
    """Return whether a directory with a lock file is a run's: it says so, or holds nothing else."""
    return os.pread(lock_fd, len(_MARKER), 0) == _MARKER or os.listdir(path) == [_LOCK]


def _busy(path: Path) -> BusyError:
    pids = holders(path / _LOCK)
    known = f" (pid {', '.join(map(str, pids))})" if pids else ""
    return BusyError(f"run directory {path} is in use by a live run{known}", pids)


def _remove_contents(path: Path) -> None:
    """Remove everything in a directory except the lock. The caller holds it exclusively."""
    for entry in path.iterdir():
        if entry.name == _LOCK:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)


def _remove(path: Path) -> None:
    """Remove a run directory whose lock the caller holds exclusively, and its parent if that is mmrt's own and empty.

    The lock goes last: a process killed half-way leaves a dead run, which can be swept again.
    """
    _remove_contents(path)
    os.unlink(path / _LOCK)
    with suppress(OSError):  # another process may be making a run here, or in the parent, right now
        path.rmdir()
        if _is_own_parent(path.parent):
            path.parent.rmdir()


class RunDirectory:
    """A run that this process belongs to: it holds a shared lock until ``close``, ``leave``, ``destroy``, or its death.

    Forked children do not belong, and must attach: their copy is closed, or it would block every ``leave``.
    ``info`` is the creator's, plus ``run_id``, ``created_s`` (wall clock) and ``creator_pid``.
    """

    def __init__(self, path: Path, lock_fd: int, info: dict[str, Any]) -> None:
        """Use ``create`` or ``attach``."""
        self.path = path
        self.info = info
        self.run_id: str = info["run_id"]
        self._lock_fd = lock_fd
        _live.add(self)

    @staticmethod
    def default_path(name: str | None = None) -> Path:
        """/dev/shm/mmrt-<uid>/<name>. Without a name ``$MMRT_RUN_DIR`` if set, else that of "default".

        In ``$XDG_RUNTIME_DIR`` instead where the former cannot be used, or where a run of that name is.

        Raises: ShmError if there is neither.
        """
        if name is None and (override := os.environ.get(ENVIRONMENT)):
            return Path(override).absolute()
        paths = [parent / (name or "default") for parent in _parents()]
        return next((path for path in paths if (path / _LOCK).exists()), paths[0])

    @classmethod
    def create(cls, path: Path, run_json: dict[str, Any], files: Mapping[str, bytes] = MappingProxyType({})) -> Self:
        """Start a run here: sweep what a dead one left, write ``files`` and ``run.json``, hold the shared lock.

        Raises: BusyError if a run is alive here; ShmError if the directory holds something else, or its path is too long.
        """
        path = Path(os.path.abspath(path))
        cls.check_place(path)
        fd = cls._lock_exclusively(path)
        try:
            _remove_contents(path)
            os.pwrite(fd, _MARKER, 0)
            run_id = secrets.token_hex(6)
            info = {**run_json, "run_id": run_id, "created_s": time.time(), "creator_pid": os.getpid()}
            (path / NOTES).mkdir(mode=0o700)
            for name, data in files.items():
                _write_whole(path / name, data)
            _write_whole(path / _INFO, json.dumps(info, indent=1).encode())
            # Between the two locks another process may have held the exclusive one, and swept this run.
            written = _read_info(path) if try_lock(fd, SHARED) and is_current(fd, path / _LOCK) else None
            if written is None or written["run_id"] != run_id:
                raise _busy(path)
            return cls(path, fd, written)
        except BaseException:
            os.close(fd)
            raise

    def rewrite(self, run_json: dict[str, Any]) -> None:
        """Replace the creator's part of ``run.json``, for processes that attach from now on. Raises OSError."""
        own = {name: self.info[name] for name in ("run_id", "created_s", "creator_pid")}
        info = {**run_json, **own}
        _write_whole(self.path / _INFO, json.dumps(info, indent=1).encode())
        self.info = info

    @staticmethod
    def check_place(path: Path) -> None:
        """Check that a directory of this absolute path could be made. Raises: ShmError if its name is too long; MissingError if
        there is no directory to make it in."""
        if len(os.fsencode(path)) + 1 + _LONGEST_SOCKET_NAME > MAX_SOCKET_PATH:
            limit = MAX_SOCKET_PATH - _LONGEST_SOCKET_NAME - 1
            raise ShmError(f"run directory {path} has {len(os.fsencode(path))} bytes in its name; sockets allow {limit}")
        base = path.parent.parent if _is_own_parent(path.parent) else path.parent
        if not base.exists():
            raise MissingError(f"no directory {base} to make {path} in")

    @classmethod
    def _lock_exclusively(cls, path: Path) -> int:
        deadline = time.monotonic() + _BUSY_RETRY_S
        while True:
            try:
                if _is_own_parent(path.parent):
                    _make_private(path.parent)
                _make_private(path)
                names = os.listdir(path)
                if names and _LOCK not in names:
                    raise ShmError(f"{path} is not empty and not a run directory")
                fd = open_lock(path / _LOCK)  # for writing: it says whose directory this is
            except FileNotFoundError:
                cls.check_place(path)
                continue  # another process destroyed the directory at this moment
            if try_lock(fd, EXCLUSIVE) and is_current(fd, path / _LOCK):
                if _is_ours(fd, path):
                    return fd
                os.close(fd)
                raise ShmError(f"{path} is not empty and not a run directory")
            os.close(fd)
            if time.monotonic() > deadline:
                raise _busy(path)
            time.sleep(_RETRY_S)

    @classmethod
    def attach(cls, path: Path, timeout_s: float = 5.0) -> Self:
        """Join the run here, waiting up to ``timeout_s`` for one that is just being created.

        Raises: MissingError if there is none.
        """
        path = Path(os.path.abspath(path))
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fd = open_lock(path / _LOCK, create=False)
            except (FileNotFoundError, NotADirectoryError):
                raise MissingError(f"no run in {path}") from None
            if try_lock(fd, SHARED) and is_current(fd, path / _LOCK):
                info = _read_info(path)
                if info is not None:
                    return cls(path, fd, info)
            os.close(fd)
            if time.monotonic() > deadline:
                raise MissingError(f"the run in {path} was not complete within {timeout_s} s")
            time.sleep(_RETRY_S)

    @staticmethod
    def is_alive(path: Path) -> bool:
        """Return whether any process belongs to a run in ``path``. The caller itself counts, if it does."""
        try:
            fd = open_lock(path / _LOCK, create=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise ShmError(f"{path} cannot be used: {error.strerror}") from None
        try:
            return not try_lock(fd, EXCLUSIVE)
        finally:
            os.close(fd)

    def segment_path(self, name: str) -> Path:
        """The path of the segment ``name`` of this run."""
        return self.path / f"{name}.{self.run_id}"

    def pids(self) -> tuple[int, ...]:
        """The processes that belong to the run, as far as the kernel tells; this one included."""
        return holders(self.path / _LOCK)

    def destroy(self, timeout_s: float = 2.0) -> None:
        """Remove the directory and all in it, once every other process has left.

        Raises: BusyError if others are still there after ``timeout_s``; the run then goes on.
        """
        deadline = time.monotonic() + timeout_s
        while not try_lock(self._lock_fd, EXCLUSIVE):
            try_lock(self._lock_fd, SHARED)
            if time.monotonic() > deadline:
                raise _busy(self.path)
            time.sleep(_RETRY_S)
        if is_current(self._lock_fd, self.path / _LOCK):
            _remove(self.path)
        self.close()

    def leave(self, last_words: Callable[[], object] | None = None, patience_s: float = 0.0) -> bool:
        """Release the lock; the last to leave removes everything. True if that was this process; it calls ``last_words`` before.

        For actors that end because their supervisor is gone. Several may leave at once: a failed upgrade has given up the shared
        lock, so that exactly one of them finds no other. One that waits for others, up to ``patience_s``, holds no lock meanwhile.
        """
        deadline = time.monotonic() + patience_s
        while not (alone := try_lock(self._lock_fd, EXCLUSIVE)) and is_current(self._lock_fd, self.path / _LOCK):
            if time.monotonic() >= deadline:
                break
            time.sleep(_RETRY_S)
        last = alone and is_current(self._lock_fd, self.path / _LOCK)
        if last:
            if last_words is not None:
                last_words()
            _remove(self.path)
        self.close()
        return last

    def close(self) -> None:
        """Release the lock and leave the directory as it is."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def sweep_dead_run(path: Path) -> bool:
    """Remove a run directory that no process belongs to. True if that was done; anything else is left alone."""
    try:
        fd = open_lock(path / _LOCK, create=False)
    except FileNotFoundError:
        with suppress(OSError):
            path.rmdir()  # only if it is empty: a sweeper died between its last two steps
            return True
        return False
    except OSError:
        return False
    try:
        if not try_lock(fd, EXCLUSIVE) or not is_current(fd, path / _LOCK) or not _is_ours(fd, path):
            return False
        _remove(path)
        return True
    finally:
        os.close(fd)


def sweep_dead_runs(parent: Path | None = None) -> list[Path]:
    """Remove every dead run directory in ``parent`` (default: mmrt's own). Returns what was removed."""
    parent = _parents()[0] if parent is None else parent
    try:
        candidates = sorted(entry for entry in parent.iterdir() if entry.is_dir() and not entry.is_symlink())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [path for path in candidates if sweep_dead_run(path)]


def _close_inherited() -> None:
    for run in list(_live):
        run.close()


os.register_at_fork(after_in_child=_close_inherited)


def _write_whole(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)
    os.replace(temporary, path)


def _read_info(path: Path) -> dict[str, Any] | None:
    try:
        info: dict[str, Any] = json.loads((path / _INFO).read_bytes())
    except FileNotFoundError:
        return None
    return info
