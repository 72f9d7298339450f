"""Files with secrets that the gateway reads again when they change: who may read them, and whether they have changed."""

import os
import stat
from pathlib import Path

from ....runtime.errors import ConfigError

LOOK_S = 1.0  # between looks at the files


def read_secret(path: Path, setting: str, max_bytes: int) -> bytes:
    """Return the contents of a file that nobody else may read.

    Its owner is this user or root. No other user may read it, and its group only if it is root's.

    Raises: ConfigError naming ``setting``, the file and the limit that it breaks.
    """
    where = f"{setting} = {str(path)!r}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        raise ConfigError(f"{where} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{where} is not a regular file")
        if found.st_uid not in (os.geteuid(), 0):
            raise ConfigError(f"{where} belongs to user {found.st_uid}, expected {os.geteuid()} or root")
        if found.st_mode & (0o077 if found.st_uid == os.geteuid() else 0o037):
            raise ConfigError(f"{where} has mode {stat.S_IMODE(found.st_mode):04o}, others may use it: expected 0600 (chmod 600)")
        if found.st_size > max_bytes:
            raise ConfigError(f"{where} has {found.st_size} bytes, the limit is {max_bytes}")
        with open(fd, "rb", closefd=False) as file:
            return file.read(max_bytes)
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}") from None
    finally:
        os.close(fd)


class FileWatch:
    """Notices when files are written, replaced, or change their mode; from its creation on."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._seen = self._look()

    def has_changed(self) -> bool:
        """Return whether one of them is another than at the last call. Call it before they are read."""
        seen, self._seen = self._seen, self._look()
        return seen != self._seen

    def _look(self) -> list[tuple[int, ...]]:
        return [_identity(path) for path in self._paths]


def _identity(path: Path) -> tuple[int, ...]:
    """Return what tells one state of a file from another; nothing where there is none."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
