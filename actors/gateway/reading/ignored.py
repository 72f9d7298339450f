"""Parts of a request without effect: its readers ``note`` them, and the answer names them in the header ``x-mmrt-ignored``.

A reader says it where it reads; the names reach the answer by a context variable, also from threads that parse bodies. Outside a
request a note is dropped. With ``server.strict_fields`` what ``tolerate`` would take is refused.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from urllib.parse import quote

from ....runtime.errors import RequestError

log = logging.getLogger(__name__)

HEADER = "X-Mmrt-Ignored"
MAX_HEADER_CHARS = 1024
MAX_NAME_CHARS = 128
MAX_NAMES = 64  # of one request
MAX_LOGGED = 512  # different names in the life of a process
_INDEX = re.compile(r"\[[0-9]+\]")
_MORE = "..."

_logged = set[str]()


class Ignored:
    """Names of what one request says without effect, such as ``messages[].reasoning_content``. ``is_strict``: refuse instead of
    ``tolerate``."""

    def __init__(self, is_strict: bool = False) -> None:
        self.is_strict = is_strict
        self.reasons: dict[str, str] = {}  # by name, in the order of the request

    def add(self, path: str, reason: str) -> None:
        """Add a field or a part. Entries of arrays count as one."""
        name = quote(_INDEX.sub("[]", path), safe="[].")[:MAX_NAME_CHARS]
        if name in self.reasons or len(self.reasons) == MAX_NAMES:
            return
        self.reasons[name] = reason
        if name not in _logged and len(_logged) < MAX_LOGGED:
            _logged.add(name)
            log.info("%s has no effect: %s (not said again)", name, ascii(reason)[1:-1])

    @property
    def header(self) -> str:
        """The names, with commas between them; "..." at the end if there are more than a header should have."""
        text = ", ".join(self.reasons)
        if len(text) <= MAX_HEADER_CHARS:
            return text
        return text[: text.rindex(",", 0, MAX_HEADER_CHARS - len(_MORE)) + 2] + _MORE


_of_request: ContextVar[Ignored | None] = ContextVar("ignored", default=None)


@contextmanager
def collecting(is_strict: bool = False) -> Iterator[Ignored]:
    """Collect what readers say within, in this task and in threads that have a copy of its context."""
    found = Ignored(is_strict)
    token = _of_request.set(found)
    try:
        yield found
    finally:
        _of_request.reset(token)


def is_strict() -> bool:
    """Return whether what would be tolerated is refused."""
    found = _of_request.get()
    return found is not None and found.is_strict


def note(path: str, reason: str) -> None:
    """Say that the field or the part at ``path`` is taken without effect, with strict fields as well."""
    if (found := _of_request.get()) is not None:
        found.add(path, reason)


def tolerate(path: str, problem: str) -> None:
    """Say that what stands at ``path`` is taken without effect. ``problem`` says why it has none, as an error would.

    Raises:
        RequestError: about the problem, with strict fields.
    """
    if is_strict():
        raise RequestError(f"{path}: {problem}", param=path)
    note(path, problem)
