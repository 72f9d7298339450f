"""Requests of a data set's own file, with its texts and media (US14, RS8, TI17). Called by ``planned``.

A file is a JSON array, or JSON lines, of records in one of the forms that data sets are published in:

* ``messages``, as the API has them, alone or in the ``body`` of a batch file. Media can be paths;
* ``conversations`` of ``from`` and ``value`` (ShareGPT, LLaVA), with ``<image>`` where a medium belongs;
* ``prompt`` or ``question``.

The last two have media in ``image``, ``video`` or ``audio``: a path, a URL, or several. Paths are relative to the file, and lead to
nothing outside its folder. A request ends before the first recorded answer, which says how long the answer is to be, unless
``max_tokens`` does.
"""

import base64
import io
import json
import mimetypes
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image, UnidentifiedImageError

from .traces import MEDIA, Medium, TraceMedium
from .workload import Message, RequestPlan

TOKENS_PER_WORD = 4 / 3  # of English, with common tokenizers
MOST_TOKENS = 1 << 20  # of an answer
_MARK = re.compile("|".join(f"<{kind}>" for kind in MEDIA))
_ROLES = {"human": "user", "user": "user", "system": "system", "gpt": "assistant", "assistant": "assistant"}


class _Record(NamedTuple):
    """``place``: file and number, for errors."""

    place: str
    fields: Mapping[str, Any]


def plan_dataset(path: Path, num_requests: int | None, seed: int, max_tokens: int, own_output: bool) -> list[RequestPlan]:
    """Requests drawn from the file by ``seed``, all at time 0; None: all of it, in its order. Those that are more than it has are
    drawn ones again, which caches may find. The group of a request is the kinds of its media. ``max_tokens``: of an answer where no
    record says how long it is, or of all if they are the user's ``own_output``.

    Raises: OSError; ValueError naming the file and the record: for forms other than these, files that are no pictures, and paths out
    of the folder.
    """
    records = list(_read(path))
    if not records:
        raise ValueError(f"{path} holds no requests")
    if num_requests is not None:
        drawn = random.Random(f"{seed}/dataset").sample(records, len(records))
        records = list(islice(cycle(drawn), num_requests))
    plans = []
    for index, record in enumerate(records):
        try:
            plans.append(_plan(record.fields, index, path.parent, max_tokens, own_output))
        except (ValueError, OSError) as error:
            raise ValueError(f"{record.place}: {error}") from None
    return plans


def _read(path: Path) -> Iterator[_Record]:
    text = path.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        try:
            values: Iterable[tuple[int, Any]] = enumerate(json.loads(text), 1)
        except ValueError as error:
            raise ValueError(f"{path}: not JSON: {error}") from None
    else:
        values = _lines(path, text)
    for number, value in values:
        if not isinstance(value, dict):
            raise ValueError(f"{path}:{number}: a record is an object, this is {type(value).__name__}")
        yield _Record(f"{path}:{number}", value)


def _lines(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: not JSON: {error}") from None


def _plan(fields: Mapping[str, Any], index: int, folder: Path, max_tokens: int, own_output: bool) -> RequestPlan:
    fields = fields["body"] if isinstance(fields.get("body"), dict) else fields
    media: list[TraceMedium] = []
    waiting = list(_given_media(fields, folder))
    messages, answer = _conversation(fields, folder, waiting, media)
    if waiting:
        raise ValueError(f"{len(waiting)} media have no place in the texts")
    if not any(message["role"] == "user" for message in messages):
        raise ValueError("no question of a user before the first answer")
    if not own_output:
        max_tokens = _answer_tokens(fields, answer) or max_tokens
    kinds: tuple[Medium, ...] = tuple(medium.type for medium in media)
    num_words = sum(len(text.split()) for message in messages for text in _texts(message["content"]))
    return RequestPlan(
        index=index,
        seed=f"dataset/{index}",
        group="+".join(dict.fromkeys(kinds)) or "text",
        media=kinds,
        num_input_tokens=max(1, round(num_words * TOKENS_PER_WORD)),
        max_tokens=max_tokens,
        traced=tuple(media),
        messages=tuple(messages),
    )


def _answer_tokens(fields: Mapping[str, Any], answer: str) -> int:
    """The tokens that a record's answer is to have; 0 if it does not say."""
    asked = fields.get("max_tokens", fields.get("max_completion_tokens"))
    if asked is None:
        return round(len(answer.split()) * TOKENS_PER_WORD)
    if not isinstance(asked, int) or isinstance(asked, bool) or not 1 <= asked <= MOST_TOKENS:
        raise ValueError(f"max_tokens {asked!r} must be a whole number from 1 to {MOST_TOKENS}")
    return asked


def _conversation(
    fields: Mapping[str, Any], folder: Path, waiting: list[tuple[Message, TraceMedium]], media: list[TraceMedium]
) -> tuple[list[Message], str]:
    """The messages up to the first answer, and that answer, "" if there is none. Their media, those that waited for them among these,
    are added to ``media``."""
    if "messages" in fields:
        turns = [(turn.get("role"), turn.get("content")) for turn in _objects(fields["messages"], "messages")]
    elif "conversations" in fields:
        said = _objects(fields["conversations"], "conversations")
        turns = [(turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))) for turn in said]
    elif (prompt := fields.get("prompt", fields.get("question"))) is not None:
        turns = [("user", prompt)]
    else:
        raise ValueError(f"no messages, conversations, prompt or question; there are {', '.join(fields) or 'no fields'}")
    messages: list[Message] = []
    for role, content in turns:
        name = _ROLES.get(role) if isinstance(role, str) else None
        if name is None:
            raise ValueError(f"the role {role!r}, it must be one of {', '.join(_ROLES)}")
        if name == "assistant":
            return messages, " ".join(_texts(content))
        messages.append({"role": name, "content": _content(content, folder, waiting if name == "user" else [], media)})
    return messages, ""


def _objects(value: Any, name: str) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise ValueError(f"{name} must be a list of objects")
    return value


def _given_media(fields: Mapping[str, Any], folder: Path) -> Iterator[tuple[Message, TraceMedium]]:
    """The parts of a record's ``image``, ``images`` and so on, in this order."""
    for kind in MEDIA:
        for name in (kind, f"{kind}s"):
            given = fields.get(name)
            for reference in given if isinstance(given, list) else [given] if given else []:
                yield _part(kind, reference, folder)


def _content(content: Any, folder: Path, waiting: list[tuple[Message, TraceMedium]], media: list[TraceMedium]) -> object:
    """A message's content, with the media that wait for their marks in its text. Those without marks stand before it."""
    if isinstance(content, list):
        return [_own_part(part, folder, media) for part in _objects(content, "content")]
    if not isinstance(content, str):
        raise ValueError(f"content {content!r} must be a text or a list of parts")
    if not waiting:
        return content
    texts = _MARK.split(content)
    if len(texts) - 1 > len(waiting):
        raise ValueError(f"{len(texts) - 1} marks of media, and {len(waiting)} media")
    num_before = len(waiting) if len(texts) == 1 else 0
    parts: list[object] = []
    for number, text in enumerate(texts):
        for _ in range(num_before if number == 0 else 1):
            part, medium = waiting.pop(0)
            parts.append(part)
            media.append(medium)
        if text.strip():
            parts.append({"type": "text", "text": text})
    return parts


def _own_part(part: Mapping[str, Any], folder: Path, media: list[TraceMedium]) -> object:
    """A content part of the API; its medium may be a path."""
    kind = next((kind for kind in MEDIA if part.get("type") in (kind, f"{kind}_url")), None)
    if kind is None:
        if part.get("type") == "input_audio":
            media.append(TraceMedium("audio"))
        return part
    given = part.get(f"{kind}_url", part.get(kind))
    made, medium = _part(kind, given.get("url") if isinstance(given, dict) else given, folder)
    media.append(medium)
    return made


def _part(kind: Medium, reference: Any, folder: Path) -> tuple[Message, TraceMedium]:
    """The content part of a medium: a URL as it is, a file as data."""
    if not isinstance(reference, str) or not reference:
        raise ValueError(f"the {kind} {reference!r} is neither a path nor a URL")
    if reference.startswith(("http://", "https://", "data:")):
        return _url_part(kind, reference), TraceMedium(kind)
    path = (folder / reference).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(f"the {kind} {reference!r} is outside of the data set's folder")
    data = path.read_bytes()
    width, height = _size(reference, data) if kind == "image" else (0, 0)
    mime = mimetypes.guess_type(path.name)[0] or f"{kind}/{path.suffix[1:] or 'octet-stream'}"
    return _url_part(kind, f"data:{mime};base64,{base64.b64encode(data).decode()}"), TraceMedium(kind, width=width, height=height)


def _url_part(kind: Medium, url: str) -> Message:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def _size(reference: str, data: bytes) -> tuple[int, int]:
    """Width and height of a picture, in pixels."""
    try:
        with Image.open(io.BytesIO(data)) as picture:
            return picture.size
    except (UnidentifiedImageError, Image.DecompressionBombError):
        raise ValueError(f"{reference!r} is no picture that can be read") from None


def _texts(content: object) -> Sequence[str]:
    if isinstance(content, list):
        return [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return [content] if isinstance(content, str) else []
