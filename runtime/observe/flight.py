"""The meaning of flight records: kinds, and their numbers. Actors write them (``actors/*/*flight.py``), trace and inspect read.

Numbers ``key``, ``a``, ``b``, ``c`` of a record are 64 bits and unsigned. A *request key* is the gateway's name of a request, a
*row* its place in the sequence table.
"""

import enum
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from ...schema.media import MediaKind
from ...shm.flight_recorder import generation_of, kind_of
from ..bus.plan_base import PlanKind
from ..pools import pools_of
from ..stage_table import MAX_INSTANCES, STAGES, SUPERVISOR, stage_of

POOL_NAMES = pools_of(MAX_INSTANCES, has_states=True, has_windows=True)
"""By the numbers of pools in records, the same in every run."""

_MASK_28 = (1 << 28) - 1
_MASK_32 = (1 << 32) - 1
_MASK_64 = (1 << 64) - 1
_MEDIA_KINDS: tuple[MediaKind, ...] = get_args(MediaKind)
_ID_PREFIXES = ("chatcmpl-", "cmpl-")
_ID_DIGITS = 24


class Kind(enum.IntEnum):
    """Kinds of records, by writer. Numbers not mentioned are 0."""

    # every actor
    ACTIVE = 1  # this generation serves: key pid, a started_ns, b standby_ns (warm, waiting for the role)
    STOPPING = 2  # this generation ends in an orderly way. key pid, a 1 if it was told to

    # video, encoder, prefill, decode
    PLAN = 10  # slice. key plan id, a see ``pack_plan``, b units (bytes, rows or tokens), c ns in the actor's queue

    # prefill
    FIRST_TOKEN = 15  # slice: an answer's first token was drawn and committed. key row, a row generation

    # decode
    STEP = 20  # slice. key step, a rows, b ``pack_pair`` of rows that ended in it and tokens, c rows that are members
    COPY = 22  # slice: KV pages of another device were copied, between two steps. key plan id, a bytes
    ROW_ENDED = 21  # key row, a row generation, b end code

    # detokenizer
    TEXT = 30  # slice: text was made and pushed

    # controller
    SUBMITTED = 40  # journaled. key request key, a prompt ids, b media items, c arrival
    ROW = 41  # admitted. key request key, a row, b row generation
    FILLED = 42  # the media are in their pages. key request key
    PREPARED = 43  # analysed, and it fits. key request key, a prompt tokens, b companion tokens, c max new tokens
    PHASE = 44  # key request key, a row, b row generation, c phase
    FAILED = 45  # key request key, a status
    ENDED = 46  # journaled. key request key
    ISSUED = 47  # a plan was written. key plan id, a index of the actor, b plan kind, c requests
    PLAN_REQUEST = 48  # key request key, a plan id, b ``pack_pair`` of the plan's share for the row
    ACKNOWLEDGED = 49  # a plan's result has come. key plan id
    POOL = 50  # a index of the pool, b pages used, c pages, key pages that the cache alone holds
    QUEUES = 51  # a waiting, b preparing, c running requests, key plans
    BUDGETS = 52  # a prefill tokens, b encode rows, c ns between tokens as measured
    TICK = 53  # slice. a effects
    UNSENT = 54  # a message did not leave: receiver absent, or its queue full. a index of the actor
    CACHED = 55  # KV pages of a prompt's beginning were found in the cache. key request key, a prompt tokens in them
    ITEM = 56  # a medium, in the prompt's order. key request key, a ``pack_item``, b ``pack_pair`` of sides in patches, c its contents
    BLOCKS = 57  # key request key, a to c ``prompt_blocks.block_hashes`` of the next three blocks, 0 behind the last

    # gateway
    RECEIVED = 60  # a request was sent to the controller. key request key, a and b its id, c bytes of media
    WRITTEN = 61  # slice: media were written into their pages. key request key, c bytes
    FIRST_TEXT = 62  # key request key
    SENT = 63  # the client has been sent so much, now and then. key request key, a tokens
    OVER = 64  # key request key, a tokens, b status of its error or 0

    # supervisor
    EXIT = 70  # a process has ended. key pid, a index of the actor, b generation, c exit status (see ``signed``)


PLAN_NAMES = {
    PlanKind.ANALYSE: "analyse",
    PlanKind.PREPROCESS: "preprocess",
    PlanKind.ENCODE: "encode",
    PlanKind.PREFILL: "prefill",
    PlanKind.LOAD: "load",
    PlanKind.LOAD_SEGMENTS: "load_segments",
    PlanKind.TRANSFER: "transfer",
}


UNIT_NAMES = {
    PlanKind.ANALYSE: "bytes",
    PlanKind.PREPROCESS: "rows",
    PlanKind.ENCODE: "rows",
    PlanKind.PREFILL: "tokens",
    PlanKind.LOAD: "tokens",
    PlanKind.LOAD_SEGMENTS: "tokens",
    PlanKind.TRANSFER: "bytes",
}


def pack_plan(kind: PlanKind, status: int, num_queued: int) -> int:
    """Pack ``a`` of PLAN: its kind, the HTTP status of its error or 0, and how many plans wait behind it."""
    return kind | status << 8 | num_queued << 24


def unpack_plan(a: int) -> tuple[PlanKind, int, int]:
    """Return (kind, status, plans behind it)."""
    return PlanKind(a & 0xFF), a >> 8 & 0xFFFF, a >> 24


def pack_item(kind: MediaKind, length: int, num_tokens: int) -> int:
    """Pack ``a`` of ITEM: its kind, its length (a video's in ms, a sound's in mel frames), and its tokens in the prompt."""
    return _MEDIA_KINDS.index(kind) << 60 | min(length, _MASK_28) << 32 | num_tokens & _MASK_32


def unpack_item(a: int) -> tuple[MediaKind, int, int]:
    """Return (kind, length, tokens)."""
    return _MEDIA_KINDS[a >> 60], a >> 32 & _MASK_28, a & _MASK_32


def pack_pair(first: int, last: int) -> int:
    """Pack two numbers of 32 bits into one: ``b`` of PLAN_REQUEST and STEP."""
    return first << 32 | last & _MASK_32


def unpack_pair(value: int) -> tuple[int, int]:
    """Return the two halves of first << 32 | last."""
    return value >> 32, value & _MASK_32


def pack_id(request_id: str) -> tuple[int, int]:
    """Pack a completion id into two numbers, (0, 0) if it is not one of the gateway's."""
    kind = next((n for n, prefix in enumerate(_ID_PREFIXES) if request_id.startswith(prefix)), 0)
    digits = request_id.removeprefix(_ID_PREFIXES[kind])
    if len(digits) != _ID_DIGITS:
        return 0, 0
    try:
        value = int(digits, 16)
    except ValueError:
        return 0, 0
    return value >> 32, kind << 32 | value & _MASK_32


def unpack_id(high: int, low: int) -> str:
    """Return the completion id, "" for (0, 0)."""
    prefix = _ID_PREFIXES[low >> 32 & 1]
    return f"{prefix}{high << 32 | low & _MASK_32:0{_ID_DIGITS}x}" if high or low else ""


def unsigned(value: int) -> int:
    """Convert a number that may be negative to a record's unsigned form."""
    return value & _MASK_64


def signed(value: int) -> int:
    """Convert back: the inverse of ``unsigned``."""
    return value - (1 << 64) if value >> 63 else value


class FlightRecord(NamedTuple):
    """A decoded record. Times are CLOCK_MONOTONIC nanoseconds."""

    actor: str
    generation: int
    kind: Kind
    time_ns: int
    duration_ns: int
    key: int
    a: int
    b: int
    c: int

    @property
    def end_ns(self) -> int:
        return self.time_ns + self.duration_ns


def merge(recorders: Mapping[str, NDArray[Any]], since_ns: int = 0) -> list[FlightRecord]:
    """Merge the records of all recorders that end at ``since_ns`` or later, in order of time.

    Kinds and recorders of later versions are left out.
    """
    records: list[FlightRecord] = []
    known = {int(kind): kind for kind in Kind}
    for actor, found in recorders.items():
        if actor != SUPERVISOR and stage_of(actor) not in STAGES:
            continue
        recent = found[found["time_ns"] + found["duration_ns"] >= np.uint64(max(0, since_ns))]
        kinds, generations = kind_of(recent).tolist(), generation_of(recent).tolist()
        names = ("time_ns", "duration_ns", "key", "a", "b", "c")
        columns = [recent[name].tolist() for name in names]
        for kind, generation, *numbers in zip(kinds, generations, *columns, strict=True):
            if kind in known:
                records.append(FlightRecord(actor, generation, known[kind], *numbers))
    records.sort(key=lambda record: record.time_ns)
    return records


def complete_since_ns(recorders: Mapping[str, NDArray[Any]]) -> int:
    """The time since which no recorder has lost a record to newer ones; 0 if none has lost any."""
    return max((int(found["time_ns"][0]) for found in recorders.values() if len(found) and found["mark"][0] > 1), default=0)
