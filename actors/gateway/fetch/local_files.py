"""Read a medium from a file under ``media.fetch.allowed_roots``. Runs in a thread of the fetch process.

Links are resolved first, then the path is walked from its root without following any: a link that is put there meanwhile is refused.
A file is opened for reading only once it is known to be regular, since to open a pipe or a device can already do something.
"""

import os
import stat
from collections.abc import Sequence

from ..reading.url_rules import FetchError

# The same words for a file that does not exist, one outside the roots, and one that may not be read.
NO_FILE = "is no file that may be read (media.fetch.allowed_roots)"
_CHUNK_BYTES = 1 << 20
_KERNELS = ("/proc", "/sys", "/dev")  # file systems of the kernel, wherever their files are met


def read_file(path: str, roots: Sequence[str], max_bytes: int) -> bytearray:
    """Return the bytes of a regular file. Raises: FetchError: 413 for more than ``max_bytes``, else 422."""
    try:
        real = os.path.realpath(path)
        for root in map(os.path.realpath, roots):
            if real.startswith(f"{root}/"):
                return _read(root, real[len(root) + 1 :].split("/"), max_bytes)
    except (OSError, ValueError) as error:
        if isinstance(error, FetchError):
            raise
    raise FetchError(NO_FILE)


def _read(root: str, names: Sequence[str], max_bytes: int) -> bytearray:
    place = _walk(root, names)
    try:
        found = os.fstat(place)
        if not stat.S_ISREG(found.st_mode) or _is_of_kernel(found.st_dev):
            raise FetchError(NO_FILE)
        if found.st_size > max_bytes:
            raise FetchError(f"has {found.st_size} bytes, the limit is {max_bytes} (media.max_item_mib)", 413)
        with open(f"/proc/self/fd/{place}", "rb") as file:
            data = bytearray()
            while chunk := file.read(min(_CHUNK_BYTES, max_bytes + 1 - len(data))):  # a read allocates what it may return
                data += chunk
    finally:
        os.close(place)
    if not 0 < len(data) <= max_bytes:
        raise FetchError(
            "is empty" if not data else f"has more than {max_bytes} bytes, the limit (media.max_item_mib)", 413 if data else 422
        )
    return data


def _walk(root: str, names: Sequence[str]) -> int:
    """Return a descriptor of the file's place, which does not open it. Raises: OSError, also for a link on the way."""
    at = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    for index, name in enumerate(names):
        is_last = index == len(names) - 1
        try:
            below = os.open(name, os.O_PATH | os.O_NOFOLLOW | (0 if is_last else os.O_DIRECTORY), dir_fd=at)
        finally:
            os.close(at)
        at = below
    return at


def _is_of_kernel(device: int) -> bool:
    """Return whether a device is that of one of the kernel's file systems. Where none is mounted, the root's is found in its place."""
    return device != _device_of("/") and device in map(_device_of, _KERNELS)


def _device_of(path: str) -> int:
    try:
        return os.stat(path).st_dev
    except OSError:
        return -1
