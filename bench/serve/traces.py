"""Published request traces, read for their arrivals and lengths (notes of the field: Mooncake, Azure 2023, Azure multimodal 2024).

Called by ``serve``. Pure except for reading the file. Traces are given by path; none of them is part of mmrt.
"""

import csv
import datetime
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

_MOST, _MOST_MEDIA = 1 << 20, 1 << 12  # tokens and media of a request
_MOST_SIDE, _MOST_S = 1 << 16, 1 << 20
BLOCK_TOKENS = 512
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


Medium = Literal["image", "video", "audio"]
MEDIA: tuple[Medium, ...] = get_args(Medium)


class TraceMedium(msgspec.Struct, frozen=True):
    """A medium of a request. ``id``: equal ones are the same file; -1: it is alone. ``tokens``: its own, of the prompt. Sizes in
    pixels, ``seconds`` of a video or a sound; 0: not known."""

    type: Medium
    id: Annotated[int, Meta(ge=-1)] = -1
    tokens: Annotated[int, Meta(ge=0)] = 0
    width: Annotated[int, Meta(ge=0, le=_MOST_SIDE)] = 0
    height: Annotated[int, Meta(ge=0, le=_MOST_SIDE)] = 0
    seconds: Annotated[float, Meta(ge=0, le=_MOST_S)] = 0.0


class TraceRow(msgspec.Struct, frozen=True):
    """One request of a trace. ``arrival_s`` counts from the trace's first request. ``blocks``: of each ``BLOCK_TOKENS`` of the prompt,
    if the trace has them; equal numbers stand for equal prompts up to there."""

    arrival_s: float
    num_input_tokens: int
    num_output_tokens: int
    media: tuple[TraceMedium, ...] = ()
    blocks: tuple[int, ...] = ()


class _MooncakeRow(msgspec.Struct, frozen=True):
    """Mooncake's fields, and those that ``mmrt record`` adds."""

    timestamp: float
    input_length: float
    output_length: float
    hash_ids: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    media: tuple[TraceMedium, ...] = ()


_MOONCAKE = msgspec.json.Decoder(_MooncakeRow)


def load_trace(path: Path) -> list[TraceRow]:
    """Read a Mooncake ``.jsonl`` (timestamp in ms, input_length, output_length, hash_ids; of ``mmrt record`` media, too) or an Azure
    ``.csv`` (TIMESTAMP, ContextTokens, GeneratedTokens and, in the multimodal one, NumImages), with arrivals from 0 on.

    Raises: OSError; ValueError naming the file and line: of missing columns, sizes that are negative or above 2^20, and
    arrivals before the line above.
    """
    rows: list[TraceRow] = []
    try:
        with path.open(newline="", encoding="utf-8") as lines:
            for number, row in _azure(path, lines) if path.suffix.lower() == ".csv" else _mooncake(path, lines):
                _check(f"{path}:{number}", row, rows[-1].arrival_s if rows else row.arrival_s)
                rows.append(row)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error.reason} {error.object[error.start]:#04x}") from None
    if not rows:
        raise ValueError(f"{path} holds no requests")
    first_s = rows[0].arrival_s
    return [msgspec.structs.replace(row, arrival_s=row.arrival_s - first_s) for row in rows]


def _check(place: str, row: TraceRow, before_s: float) -> None:
    """Raises: ValueError naming the place."""
    sizes = {"input tokens": row.num_input_tokens, "output tokens": row.num_output_tokens}
    for name, count in sizes.items():
        if count < 0:
            raise ValueError(f"{place}: {count} {name}, the least is 0")
        if count > _MOST:
            raise ValueError(f"{place}: {count:.7g} {name}, the most is {_MOST}")
    if not math.isfinite(row.arrival_s):
        raise ValueError(f"{place}: arrival at {row.arrival_s} s, it must be finite")
    if row.arrival_s < before_s:
        raise ValueError(f"{place}: arrives {before_s - row.arrival_s:g} s before the line above; time must not run backwards")


def scale_to_rate(rows: Sequence[TraceRow], rate: float) -> list[TraceRow]:
    """Stretch time linearly so that the rows arrive at ``rate`` requests per second on average; the bursts keep their shape.

    Raises: ValueError for a rate that is not positive.
    """
    if rate <= 0:
        raise ValueError(f"rate {rate} must be above 0")
    duration_s = rows[-1].arrival_s
    factor = (len(rows) - 1) / rate / duration_s if duration_s > 0 else 1.0
    return [msgspec.structs.replace(row, arrival_s=row.arrival_s * factor) for row in rows]


def _mooncake(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, TraceRow]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = _MOONCAKE.decode(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not a Mooncake request: {error}") from None
        num_input, num_output = int(fields.input_length), int(fields.output_length)
        yield number, TraceRow(fields.timestamp / 1000, num_input, num_output, fields.media, fields.hash_ids)


def _azure(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, TraceRow]]:
    reader = csv.DictReader(lines)
    columns = reader.fieldnames or ()
    if missing := [name for name in _AZURE_COLUMNS if name not in columns]:
        raise ValueError(f"{path}:1: no column {' and '.join(missing)}; there are {', '.join(columns) or 'none'}")
    for fields in reader:
        try:
            arrival = datetime.datetime.fromisoformat(fields["TIMESTAMP"])
            if arrival.tzinfo is None:
                arrival = arrival.replace(tzinfo=datetime.UTC)
            num_images = int(fields.get("NumImages") or 0)
            if not 0 <= num_images <= _MOST_MEDIA:
                raise ValueError(f"{num_images} images, there can be 0 to {_MOST_MEDIA}")
            media = (TraceMedium("image"),) * num_images
            yield reader.line_num, TraceRow(arrival.timestamp(), int(fields["ContextTokens"]), int(fields["GeneratedTokens"]), media)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"{path}:{reader.line_num}: not an Azure request: {error!r}") from None
