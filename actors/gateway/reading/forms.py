"""Forms, bodies of type multipart/form-data: their fields and files, from a body that has been received whole.

aiohttp's reader takes them apart; it is given no more than the body, which ``bodies`` has bounded. Runs in the gateway's event loop.
"""

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

from aiohttp import BodyPartReader, MultipartReader, StreamReader
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError

from ....runtime.errors import RequestError
from ....shm.spool import AnyBytes, SpooledBytes, pieces_of
from .fields import refuse, show

FORM = "multipart/form-data"
MAX_PARTS = 64
MAX_LINES = 16 * MAX_PARTS  # boundaries, headers of parts, and what stands before them
MAX_TEXT_BYTES = 64 * 1024
_CHUNK_BYTES = 1 << 20  # between which other tasks run
_PLAIN = ("binary", "8bit", "7bit")


class FormFile(NamedTuple):
    """A file. ``mime``: its type as stated, "" if none is."""

    name: str
    mime: str
    data: AnyBytes


Form = dict[str, str | FormFile | list[str]]
"""By name; a name that ends in [] is a list's, without these signs."""


class _Content(StreamReader):
    """A body that is there whole, of no connection. aiohttp reads line after line without letting other tasks run, so lines are
    bounded."""

    def __init__(self, body: AnyBytes) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(BaseProtocol(loop), max(1, len(body)), loop=loop)  # never full
        self._num_lines = 0
        self._pieces = pieces_of(body)

    async def readline(self, *, max_line_length: int | None = None) -> bytes:
        self._num_lines += 1
        if self._num_lines > MAX_LINES:
            raise ValueError(f"more than {MAX_LINES} lines outside of its fields")
        return await super().readline(max_line_length=max_line_length)

    async def _wait(self, func_name: str) -> None:
        """Give the next piece to who waits for more."""
        if (piece := next(self._pieces, None)) is None:
            self.feed_eof()
        else:
            self.feed_data(piece)


async def read_form(headers: Mapping[str, str], body: bytearray | SpooledBytes) -> Form:
    """Take a form apart, of a request with these headers. Files of one in a spool are there too. Raises: RequestError 400."""
    form: Form = {}
    num_parts = 0
    try:
        async for part in MultipartReader(headers, _Content(body if isinstance(body, SpooledBytes) else bytes(body))):
            num_parts += 1
            if num_parts > MAX_PARTS:
                raise RequestError(f"the form has more than {MAX_PARTS} fields")
            await _read_part(part, form, body)
    except RequestError:
        raise
    except (ValueError, HttpProcessingError, AssertionError, RuntimeError) as error:
        raise RequestError(f"the body is not valid {FORM}: {str(error)[:200]}") from None
    return form


async def _read_part(part: MultipartReader | BodyPartReader | None, form: Form, body: bytearray | SpooledBytes) -> None:
    if not isinstance(part, BodyPartReader) or not part.name:
        raise RequestError(f"a part of the {FORM} is no field: it has no name, or parts itself")
    name, mime = part.name, part.headers.get("Content-Type", "")
    if not _is_text(name) or not _is_text(mime):
        raise RequestError(f"a header of a part of the {FORM} is not UTF-8")
    if (coding := part.headers.get("Content-Transfer-Encoding", "binary")).lower() not in _PLAIN:
        raise refuse(name[:60], f"has the Content-Transfer-Encoding {show(coding)}, allowed are {', '.join(_PLAIN)}")
    data = bytearray()
    file = body.beside() if isinstance(body, SpooledBytes) and part.filename is not None else None
    while chunk := await part.read_chunk(_CHUNK_BYTES):
        (data.extend if file is None else file.append)(chunk)
        if part.filename is None and len(data) > MAX_TEXT_BYTES:
            raise refuse(name[:60], f"has more than {MAX_TEXT_BYTES} bytes, the limit of a text in a form")
        await asyncio.sleep(0)
    if part.filename is not None:
        _put(form, name, FormFile(part.filename, mime, bytes(data) if file is None else file))
        return
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise refuse(name[:60], f"is not UTF-8: {error.reason}") from None
    if not name.endswith("[]"):
        _put(form, name, text)
    elif isinstance(texts := form.setdefault(name[:-2], []), list):
        texts.append(text)
    else:
        raise refuse(name[:60], "is given twice")


def _is_text(header: str) -> bool:
    """Return whether a header can be encoded: bytes that are not UTF-8 come as lone surrogates."""
    return not any("\ud800" <= sign <= "\udfff" for sign in header)


def _put(form: Form, name: str, value: str | FormFile) -> None:
    if name in form:
        raise refuse(name[:60], "is given twice")
    form[name] = value
