"""Forms, bodies of type multipart/form-data: their fields and files, from a body that has been received whole.

aiohttp's reader takes them apart; it is given no more than the body, which ``bodies`` has bounded. Runs in the gateway's event loop.
"""

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

from aiohttp import BodyPartReader, MultipartReader, StreamReader
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError

from ...runtime.errors import RequestError
from .fields import refuse, show

FORM = "multipart/form-data"
MAX_PARTS = 64
MAX_TEXT_BYTES = 64 * 1024
_CHUNK_BYTES = 1 << 20  # between which other tasks run
_PLAIN = ("binary", "8bit", "7bit")


class FormFile(NamedTuple):
    """A file. ``mime``: its type as stated, "" if none is."""

    name: str
    mime: str
    data: bytes


Form = dict[str, str | FormFile | list[str]]
"""By name; a name that ends in [] is a list's, without these signs."""


async def read_form(headers: Mapping[str, str], body: bytearray) -> Form:
    """Take a form apart, of a request with these headers. Raises: RequestError 400."""
    loop = asyncio.get_running_loop()
    content = StreamReader(BaseProtocol(loop), max(1, len(body)), loop=loop)  # of no connection, and never full
    content.feed_data(bytes(body))
    content.feed_eof()
    form: Form = {}
    try:
        async for part in MultipartReader(headers, content):
            await _read_part(part, form)
    except RequestError:
        raise
    except (ValueError, HttpProcessingError, AssertionError) as error:
        raise RequestError(f"the body is not valid {FORM}: {str(error)[:200]}") from None
    return form


async def _read_part(part: MultipartReader | BodyPartReader | None, form: Form) -> None:
    if not isinstance(part, BodyPartReader) or not part.name:
        raise RequestError(f"a part of the {FORM} is no field: it has no name, or parts itself")
    name = part.name
    if len(form) >= MAX_PARTS:
        raise RequestError(f"the form has more than {MAX_PARTS} fields")
    if (coding := part.headers.get("Content-Transfer-Encoding", "binary")).lower() not in _PLAIN:
        raise refuse(name[:60], f"has the Content-Transfer-Encoding {show(coding)}, allowed are {', '.join(_PLAIN)}")
    data = bytearray()
    while chunk := await part.read_chunk(_CHUNK_BYTES):
        data += chunk
        if part.filename is None and len(data) > MAX_TEXT_BYTES:
            raise refuse(name[:60], f"has more than {MAX_TEXT_BYTES} bytes, the limit of a text in a form")
        await asyncio.sleep(0)
    if part.filename is not None:
        _put(form, name, FormFile(part.filename, part.headers.get("Content-Type", ""), bytes(data)))
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


def _put(form: Form, name: str, value: str | FormFile) -> None:
    if name in form:
        raise refuse(name[:60], "is given twice")
    form[name] = value
