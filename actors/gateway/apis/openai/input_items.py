"""The items that a kept response was made of: ``GET /v1/responses/{id}/input_items`` lists them, page by page.

They are kept as JSON without the contents of their media, which the conversation has once for all who need it.
"""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import pybase64

from .....media.frames import read_frames
from .....shm.spool import whole
from ...reading.field_rules import settle
from ...reading.field_table.responses import PAGE
from ...reading.fields import STRING, Fields, Schema, refuse, show
from ...reading.media import FRAMES_MIME, INLINE_PARTS, Medium
from ...reading.tool_messages import MAX_ID_CHARS

MAX_LIMIT = 100
_LIMIT = 20
_ORDERS = ("asc", "desc")
# What may be asked for besides: an item has it anyway, or no served model makes any.
_INCLUDES = ("message.input_image.image_url", "reasoning.encrypted_content")
QUERY: Mapping[str, Schema] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": _LIMIT},
    "order": {"enum": list(_ORDERS), "default": "desc"},
    "after": STRING,
    "include[]": {"type": "array", "items": {"enum": list(_INCLUDES)}},
}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
_CONTENTS = {"message": "content", "function_call_output": "output"}  # the field with text or parts
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class Item(NamedTuple):
    """An item. ``id``: "" until it has one. ``shown``: its JSON, without its id and the contents of its media."""

    id: str
    shown: bytes


def item_of(value: Mapping[str, Any]) -> Item:
    """Return a valid item of an input. What is no id, or too long for one, is none."""
    kind = value.get("type") or "message"
    shown = {"status": "completed", **{name: one for name, one in value.items() if one is not None}, "type": kind}
    if (name := _CONTENTS.get(kind)) is not None:
        shown[name] = _without_media(value.get(name) or "", value.get("role"))
    id = shown.pop("id", "")
    is_id = isinstance(id, str) and len(id) <= MAX_ID_CHARS
    return Item(id if is_id else "", _encode(shown))


def item_of_text(text: str) -> Item:
    """Return the item that an input stands for which is a text alone."""
    return item_of({"role": "user", "content": text})


def _without_media(content: Any, role: Any) -> Any:
    if isinstance(content, str):
        if role is None:  # the result of a call
            return content
        content = [{"type": "output_text", "text": content, "annotations": []} if role == "assistant" else _text_part(content)]
    return [_filled(part, "") if _is_medium(part) else part for part in content]


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "input_text", "text": text}


def with_ids(items: Iterable[Item], suffix: str) -> tuple[Item, ...]:
    """Return the items, each with an id of its own. An id that is made ends with ``suffix`` and the item's number."""
    found, known = list[Item](), set[str]()
    for at, item in enumerate(items):
        if not item.id or item.id in known:
            kind = _decode(item.shown)["type"]
            item = item._replace(id=f"{_PREFIXES[kind]}_{suffix}_in{at}")
        known.add(item.id)
        found.append(item)
    return tuple(found)


class Page(NamedTuple):
    """The part of a list that is asked for."""

    limit: int
    is_ascending: bool
    after: str | None

    def of(self, items: Sequence[Item], media: Sequence[Medium]) -> bytes:
        """Return the answer's body. It takes long where there are large ``media``, those of all items. Raises: RequestError."""
        numbers = {item.id: number for number, item in enumerate(items)}
        if self.after is not None and self.after not in numbers:
            raise refuse("after", f"is {show(self.after)}, which is the id of no input item of this response")
        order = range(len(items)) if self.is_ascending else range(len(items) - 1, -1, -1)
        left = order if self.after is None else order[order.index(numbers[self.after]) + 1 :]
        data = _shown(items, media, left[: self.limit])
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
        return _encode({"object": "list", "data": data, **ends, "has_more": len(left) > self.limit})


def read_page(query: Fields) -> Page:
    """Validate the parameters of a URL. Raises: RequestError."""
    limit, order, after = query.take_str("limit"), query.take_str("order"), query.take_str("after")
    include = query.take("include")
    settle(query, PAGE._replace(known=f"the parameters are {', '.join(QUERY)}"))
    if limit is not None and not (limit.isascii() and limit.isdigit() and len(limit) < 10 and 1 <= int(limit) <= MAX_LIMIT):
        raise refuse("limit", f"is {show(limit)}, allowed are 1 to {MAX_LIMIT}")
    if order not in (None, *_ORDERS):
        raise refuse("order", f"is {show(order)}, allowed are {', '.join(_ORDERS)}")
    if isinstance(include, str):
        raise refuse("include", f"expected an array (include[]=…), got {show(include)}")
    if (other := next((one for one in include or () if one not in _INCLUDES), None)) is not None:
        raise refuse("include", f"has {show(other)}, allowed are {', '.join(_INCLUDES)}")
    return Page(int(limit or _LIMIT), order == "asc", after)


def _shown(items: Sequence[Item], media: Sequence[Medium], wanted: Sequence[int]) -> list[dict[str, Any]]:
    """Return the items of these numbers, with their media."""
    left, found = iter(media), dict[int, dict[str, Any]]()
    for number, item in enumerate(items):
        is_wanted, value = number in wanted, _decode(item.shown)
        if (name := _CONTENTS.get(value["type"])) is not None and not isinstance(value[name], str):
            value[name] = list(_with_media(value[name], left, is_wanted))
        if is_wanted:
            found[number] = {"id": item.id, **value}
    return [found[number] for number in wanted]


def _with_media(parts: Iterable[Any], left: Iterator[Medium], is_wanted: bool) -> Iterator[Any]:
    for part in parts:
        medium = next(left) if _is_medium(part) else None
        if medium is None or not is_wanted:
            yield part
        else:
            rate = {"sample_fps": medium.rate} if medium.rate else {}  # wherever it was said
            yield {**_filled(part, _content_of(medium, part["type"])), **rate}


def _content_of(medium: Medium, kind: str) -> str:
    """Return a medium as a part of this kind has it."""
    if medium.urls:
        return medium.urls[0]
    content = whole(medium.data)
    if (frames := read_frames(reader := io.BytesIO(content))) is not None:
        pictures = (frames.picture(reader, number) for number in range(len(frames.places)))
        return f"data:{FRAMES_MIME};base64,{','.join(map(pybase64.b64encode_as_string, pictures))}"
    data = pybase64.b64encode_as_string(content)
    return data if kind in INLINE_PARTS else f"data:{medium.mime};base64,{data}"


def _is_medium(part: Mapping[str, Any]) -> bool:
    return part["type"] == "input_image" or part["type"] in INLINE_PARTS


def _filled(part: Mapping[str, Any], content: str) -> dict[str, Any]:
    """Return the part of a medium with this content: its URL, or its base64."""
    kind = part["type"]
    return {**part, kind: {**part[kind], "data": content}} if kind in INLINE_PARTS else {**part, "image_url": content}
