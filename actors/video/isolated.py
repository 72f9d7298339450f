"""Each item in a process of its own (isolation "process"): what the video process asks of a decoder, and what a decoder does.

A decoder gets plans and the bytes of its item, and sends rows and results; it has nothing of the run, and nobody else's bytes. The
video process copies the rows into the pages of the plan, whose sizes it checks.

Protocol of the socket: a length and a ``Command``, with the item's bytes behind the first; back a length and a ``Reply``, with its rows
behind each ``Rows``.
"""

import io
import logging
import math
import signal
import socket
import struct
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...runtime.bus.messages import Analysed, Died, Done, ItemError, Overran, Result
from ...runtime.bus.plans import Analyse, Plan, PreprocessSegment, decode_plan
from ...runtime.bus.wire import checked, encode
from ...shm.pool import PagePool
from .sandbox import allow_cpu_time
from .template import Decoder, Template

log = logging.getLogger(__name__)

MAX_KILLED = 3  # decoders of one plan, from outside or for lack of memory
MAX_KEPT = 8  # decoders with an open item that wait for its next plan
MAX_REPLY_BYTES = 16 << 20  # of a result: an hour of video takes some hundred KB
Key = tuple[int, int, int]  # row, row generation, item
_LENGTH = struct.Struct("=I")


class Command(msgspec.Struct, frozen=True, array_like=True):
    """A plan for a decoder. ``num_bytes`` of its item follow, if that is new; the rest is as in ``VideoWorker`` and the sandbox."""

    plan: bytes
    num_bytes: int
    yields: bool
    alone: bool
    cpu_s: float


class Rows(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Rows [first, first + count) of the plan's segment, of ``row_bytes`` each; they follow."""

    first: int
    count: int
    row_bytes: int


class Outcome(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A plan's result, and the memory that the item takes now."""

    result: Analysed | Done | ItemError | Overran
    num_bytes: Annotated[int, msgspec.Meta(ge=0)]


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The plan raised what is no medium's fault. ``text``: with its traceback."""

    text: str


Reply = Rows | Outcome | Failed
_decode_command = msgspec.msgpack.Decoder(Command).decode
_decode_reply = checked(msgspec.msgpack.Decoder(Reply).decode)


def key_of(plan: Analyse | PreprocessSegment) -> Key:
    return plan.row, plan.row_generation, plan.item


class DecoderError(Exception):
    """A decoder failed, by our fault: its own traceback is the message."""


class _Lost(Exception):
    """A decoder ended, hangs, or talks nonsense."""


# ---------------------------------------------------------------------------------------------------- in the decoder


class ItemWorker(Protocol):
    """A worker in a decoder: ``VideoWorker``. ``num_bytes``: the memory that its items take."""

    @property
    def num_bytes(self) -> int: ...
    def execute(self, plan: Plan, alone: bool = False) -> Result: ...


class ItemBytes:
    """In the place of the media pool: the item's own bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def check(self, pages: Sequence[int], generations: Sequence[int]) -> None:
        pass

    def reader(self, pages: Sequence[int], num_bytes: int) -> io.BytesIO:
        del pages, num_bytes
        return io.BytesIO(self._data)


class RowSender:
    """In the place of the patch pool: sends rows to the video process."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def check(self, pages: Sequence[int], generations: Sequence[int]) -> None:
        pass

    def scatter_rows(self, pages: Sequence[int], rows: NDArray[Any], first_row: int = 0) -> None:
        del pages
        if len(rows):
            source = np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)
            _send(self._channel, encode(Rows(first_row, len(source), source.shape[1])))
            self._channel.sendall(source.data)


class NoRows:
    """In the place of the patch pool: for a rehearsal."""

    def check(self, pages: Sequence[int], generations: Sequence[int]) -> None:
        pass

    def scatter_rows(self, pages: Sequence[int], rows: NDArray[Any], first_row: int = 0) -> None:
        pass


def serve_item(
    channel: socket.socket, make_worker: Callable[[ItemBytes, RowSender, bool], ItemWorker], rehearse: Callable[[], object]
) -> None:
    """Do the plans of one item, in its decoder, until the video process wants no more. Raises: EOFError then, or OSError.

    ``make_worker`` gets what takes the places of the pools, and whether it gives up work that is not small. ``rehearse`` comes first: a
    process that was forked has no memory of its own until it writes.
    """
    rehearse()
    worker: ItemWorker | None = None
    while True:
        command = _decode_command(_receive(channel, MAX_REPLY_BYTES))
        if worker is None:
            data = bytearray(command.num_bytes)
            _fill(channel, memoryview(data))
            worker = make_worker(ItemBytes(bytes(data)), RowSender(channel), command.yields)
            del data
        allow_cpu_time(command.cpu_s)
        reply: Reply
        try:
            result = worker.execute(decode_plan(command.plan), command.alone)
            assert isinstance(result, Analysed | Done | ItemError | Overran)
            reply = Outcome(result, worker.num_bytes)
        except OSError:
            raise
        except Exception:  # ours: the video process tells its client
            reply = Failed(traceback.format_exc())
        _send(channel, encode(reply))


# ----------------------------------------------------------------------------------------------- in the video process


@dataclass
class _Kept:
    decoder: Decoder
    plan: Analyse | PreprocessSegment  # the last
    num_bytes: int = 0
    is_new: bool = True


class IsolatedWorker:
    """In the place of a ``VideoWorker``: has decoders do the plans, and keeps those with an open item. For one thread."""

    def __init__(
        self,
        template: Template,
        media: PagePool,
        patches: PagePool,
        cache_bytes: int,
        yields: bool,
        limit_s: float,
        cpu_s: float,
        max_kept: int = MAX_KEPT,
    ) -> None:
        """``limit_s``: what a plan may take: a decoder that has not answered then is ended. ``cpu_s``: of processors, for a plan.

        ``max_kept``: decoders that wait for their next plans.
        """
        self._template = template
        self._media = media
        self._patches = patches
        self._cache_bytes = cache_bytes
        self._yields = yields
        self._limit_s = limit_s
        self._cpu_s = cpu_s
        self._max_kept = max_kept
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()

    def close(self) -> None:
        for key in list(self._kept):
            self._end(key)

    def close_unwanted(self, is_unwanted: Callable[[Plan], bool]) -> None:
        """End decoders whose plans are no longer wanted."""
        for key in [key for key, kept in self._kept.items() if is_unwanted(kept.plan)]:
            self._end(key)

    def execute(self, plan: Plan, alone: bool = False) -> Result:
        """Have the item's decoder do the plan. One that is killed from outside is followed by another, up to ``MAX_KILLED``; where it
        ends of its work, or hangs, the plan has Died. All of them together have the plan's time.

        Raises: DecoderError; StalePage; ValueError if the pages are too few; OSError if no process can be forked.
        """
        assert isinstance(plan, Analyse | PreprocessSegment)
        until_s = time.monotonic() + self._limit_s
        for _ in range(MAX_KILLED):
            try:
                return self._execute(plan, alone, until_s)
            except _Lost as loss:
                status = self._template.judge(self._kept.pop(key_of(plan)).decoder)
                log.error("the decoder of %s %s%s", plan.media.path, _explain(status), f": {loss}" if str(loss) else "")
                if status != -signal.SIGKILL or str(loss):
                    break
        return Died()

    def _execute(self, plan: Analyse | PreprocessSegment, alone: bool, until_s: float) -> Result:
        """Raises: _Lost, and what ``execute`` raises."""
        key = key_of(plan)
        if isinstance(plan, PreprocessSegment):
            self._patches.check(plan.target.pages, plan.target.generations)
        if key not in self._kept:
            self._media.check(plan.source.pages, plan.source.generations)
            self._media.reader(plan.source.pages, plan.media.num_bytes)  # raises where they are too few
            self._kept[key] = _Kept(self._template.fork(), plan)
        self._kept.move_to_end(key)
        kept = self._kept[key]
        kept.plan = plan
        try:
            outcome = self._ask(kept, plan, alone, until_s)
        except _Lost:
            raise
        except Exception:  # more of its replies may be on the way
            self._end(key)
            raise
        is_last = isinstance(plan, PreprocessSegment) and plan.segment == len(plan.shape.segments) - 1
        kept.num_bytes = outcome.num_bytes
        if alone or is_last or not isinstance(outcome.result, Analysed | Done):
            self._end(key)
        self._evict()
        return outcome.result

    def _ask(self, kept: _Kept, plan: Analyse | PreprocessSegment, alone: bool, until_s: float) -> Outcome:
        channel = kept.decoder.channel
        try:
            num_bytes = plan.media.num_bytes if kept.is_new else 0
            _wait_until(channel, until_s)
            _send(channel, encode(Command(encode(plan), num_bytes, self._yields, alone, self._cpu_s)))
            if kept.is_new:
                self._send_item(channel, plan, until_s)
            kept.is_new = False
            num_rows = 0
            while isinstance(reply := _decode_reply(_receive(channel, MAX_REPLY_BYTES, until_s)), Rows):
                num_rows += self._take(channel, plan, reply, num_rows, until_s)
        except TimeoutError:
            raise _Lost("it hangs, and is ended") from None
        except (OSError, EOFError):
            raise _Lost from None
        except msgspec.MsgspecError as error:
            raise _Lost(f"it sends no reply: {error}") from None
        if isinstance(reply, Failed):
            raise DecoderError(reply.text)
        self._check(plan, reply.result, num_rows)
        assert isinstance(reply, Outcome)
        return reply

    def _send_item(self, channel: socket.socket, plan: Analyse | PreprocessSegment, until_s: float) -> None:
        left = plan.media.num_bytes
        for page in plan.source.pages:
            _wait_until(channel, until_s)
            channel.sendall(self._media.page(page)[:left])
            left -= min(left, self._media.page_bytes)

    def _take(self, channel: socket.socket, plan: Analyse | PreprocessSegment, rows: Rows, due: int, until_s: float) -> int:
        """Copy the next rows into the plan's pages, whose others are of earlier requests. Raises: _Lost if they are not the plan's."""
        part = plan.shape.segments[plan.segment] if isinstance(plan, PreprocessSegment) else None
        if part is None or rows.row_bytes != part.row_bytes or rows.first != due or not 0 < rows.count <= part.num_rows - due:
            raise _Lost(f"it sends rows that are not its plan's: {rows}")
        assert isinstance(plan, PreprocessSegment)
        data = np.empty((rows.count, rows.row_bytes), np.uint8)
        _fill(channel, data.data.cast("B"), until_s)
        self._patches.scatter_rows(plan.target.pages, data, rows.first)
        return rows.count

    def _check(self, plan: Analyse | PreprocessSegment, result: Result, num_rows: int) -> None:
        """Raises: _Lost if a result is not one of such a plan."""
        right = Analysed if isinstance(plan, Analyse) else Done
        is_wrong = isinstance(result, Analysed | Done) and not isinstance(result, right)
        if is_wrong or (isinstance(result, Overran) and not self._yields):
            raise _Lost(f"it sends a {type(result).__name__} for a {type(plan).__name__}")
        if isinstance(plan, PreprocessSegment) and isinstance(result, Done):
            if num_rows != (expected := plan.shape.segments[plan.segment].num_rows):
                raise _Lost(f"it sends {num_rows} rows of {expected}")

    def _evict(self) -> None:
        """End decoders that wait, the least recently used first, while they are many or take much."""
        while len(self._kept) > 1 and (
            len(self._kept) > self._max_kept or sum(kept.num_bytes for kept in self._kept.values()) > self._cache_bytes
        ):
            self._end(next(iter(self._kept)))

    def _end(self, key: Key) -> None:
        self._template.end(self._kept.pop(key).decoder)


def _explain(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-status).name}"
    return f"was ended by signal {-status}"


def _send(channel: socket.socket, data: bytes) -> None:
    channel.sendall(_LENGTH.pack(len(data)) + data)


def _receive(channel: socket.socket, most: int, until_s: float = math.inf) -> bytes:
    """Raises: EOFError at the end; msgspec.ValidationError for more bytes than that."""
    head = bytearray(_LENGTH.size)
    _fill(channel, memoryview(head), until_s)
    (num_bytes,) = _LENGTH.unpack(head)
    if num_bytes > most:
        raise msgspec.ValidationError(f"{num_bytes} bytes, at most {most}")
    data = bytearray(num_bytes)
    _fill(channel, memoryview(data), until_s)
    return bytes(data)


def _fill(channel: socket.socket, target: memoryview, until_s: float = math.inf) -> None:
    """Raises: EOFError if the other end has closed before; TimeoutError."""
    while len(target):
        _wait_until(channel, until_s)
        count = channel.recv_into(target)
        if not count:
            raise EOFError
        target = target[count:]


def _wait_until(channel: socket.socket, until_s: float) -> None:
    """Let the next call wait so long. Raises: TimeoutError if that is over, though there may be something to read."""
    if until_s < math.inf:
        if (left_s := until_s - time.monotonic()) <= 0:
            raise TimeoutError
        channel.settimeout(left_s)
