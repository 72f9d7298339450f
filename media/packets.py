"""The compressed bytes of one video, read by several threads: containers over one reader, and a cursor that demuxes the file once, and
skips what nobody wants (FC4).

Called by ``engines`` and ``decoding``.
"""

import io
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from .animation import CODECS
from .container import BrokenData, can_seek, demux, ffmpeg, open_video
from .limits import MediaLimits, Reader, TimeBudget
from .segments import Group
from .video_info import PacketIndex, VideoInfo

LEAST_SKIPPED = 64
"""Packets that are skipped rather than read: a seek takes as long as reading 10 of 2 kB (0.03 ms)."""


@dataclass(frozen=True, eq=False)
class Bitstream:
    """A video that has been analysed: its bytes and what is in them. ``reader`` belongs to it from here on."""

    reader: Reader
    info: VideoInfo
    limits: MediaLimits
    budget: TimeBudget
    _reading: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @contextmanager
    def opened(self) -> Iterator[tuple[Any, Any]]:
        """An open container and its video stream, with a position of its own. Its decoder outlives it. Any thread.

        Raises: MediaError as ``open_video`` does.
        """
        container, stream = open_video(_SharedReader(self.reader, self._reading), self.limits, self.budget)
        with closing(container):
            yield container, stream

    def read_all(self) -> bytes:
        """The file. Any thread."""
        return _SharedReader(self.reader, self._reading).read()


class _SharedReader(io.RawIOBase):
    """One of several positions in the same bytes."""

    def __init__(self, reader: Reader, reading: threading.Lock) -> None:
        super().__init__()
        self._reader = reader
        self._reading = reading
        self._position = 0

    def read(self, size: int = -1, /) -> bytes:
        with self._reading:
            self._reader.seek(self._position)
            data = self._reader.read(size) or b""
        self._position += len(data)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if whence == io.SEEK_END:
            with self._reading:
                self._position = self._reader.seek(offset, whence)
        else:
            self._position = offset + (self._position if whence == io.SEEK_CUR else 0)
        return self._position

    def tell(self) -> int:
        return self._position


class PacketReader:
    """The packets of one video from any key frame on. Any thread, one at a time. Raises: MediaError as ``open_video`` does."""

    def __init__(self, bitstream: Bitstream) -> None:
        self._bitstream = bitstream
        self._opened = ExitStack()
        self._container: Any = None
        if bitstream.info.codec in CODECS:
            self._packets: Iterator[Any] = iter(range(bitstream.info.num_frames))
        else:
            self._container, self._stream = self._opened.enter_context(bitstream.opened())
            self._packets = self._demuxed()
        self.can_seek = self._container is not None and can_seek(self._container)

    def _demuxed(self) -> Iterator[Any]:
        return demux(self._container, self._stream, self._bitstream.limits, self._bitstream.budget)

    def read(self) -> Any | None:
        """The next packet in file order; of an animated WebP or AVIF the number of its frame. None at the end. Raises: MediaError."""
        return next(self._packets, None)

    def seek(self, pts: int) -> Any | None:
        """Go to the key frame shown at this time, or to one before it. Returns the packet there; None where the file does not say."""
        try:
            ffmpeg(self._container.seek, pts, stream=self._stream, backward=True)
        except BrokenData:
            return None
        self._packets = self._demuxed()
        return self.read()

    def close(self) -> None:
        self._opened.close()


class PacketCursor:
    """The packets of several groups, demuxed once and forward only, whichever group's engine asks next. What lies between groups is
    skipped by seeking, where that leads to the very packet that the index has there.

    Packets read on the way to a requested one are kept for the groups that they belong to, for as long as those are
    awaited: memory holds only packets of groups under way, and of those that such a group reaches into (open GOP). Any thread may
    call any method; one thread at a time may take the packets of a group.
    """

    def __init__(self, bitstream: Bitstream, index: PacketIndex | None, groups: Sequence[Group]) -> None:
        self._bitstream = bitstream
        self._index = index
        self._held: dict[Group, deque[tuple[Any, bool]]] = {group: deque() for group in groups}
        self._wanted: dict[Group, frozenset[int]] = {group: frozenset(group.pts) for group in groups}
        self._lock = threading.Lock()
        self._reader: PacketReader | None = None
        self._next = 0
        self._found: Any = None  # the packet ``_next``, after a seek
        self._sought = 0  # the last packet that was sought

    def packets(self, group: Group) -> Iterator[tuple[Any, bool]]:
        """(packet, True if its own frame is wanted) in decode order, omitting packets that no wanted frame needs.

        Raises: MediaError (400) for limits.
        """
        while True:
            self._bitstream.budget.check()  # also where all packets have been read for another group
            with self._lock:
                held = self._held.get(group)
                while held is not None and not held and self._next <= group.last and self._read():
                    pass
                if not held:
                    return
                item = held.popleft()
            yield item

    def holds(self, group: Group) -> bool:
        """True if the group is not yet forgotten."""
        with self._lock:
            return group in self._held

    def forget(self, group: Group) -> None:
        """Drop this group's packets. The container is closed with the last group."""
        with self._lock:
            self._held.pop(group, None)
            if not self._held and self._reader is not None:
                self._reader.close()

    def _skip(self, reader: PacketReader) -> PacketReader:
        """Go to the next packet that a group needs, if that is far. Returns the reader to go on with."""
        target = next((group.first for group in self._held if group.last >= self._next), self._next)
        if self._index is None or not reader.can_seek or target == self._sought or target - self._next < LEAST_SKIPPED:
            return reader
        self._sought = target
        packet = reader.seek(int(self._index.pts[target]))
        number = -1 if packet is None or packet.pts is None else self._index.number_of(packet.pts, packet.size)
        if self._next <= number <= target:
            self._next, self._found = number, packet
            return reader
        reader.close()
        reader = PacketReader(self._bitstream)
        reader.can_seek = False
        for _ in range(self._next):
            reader.read()
        return reader

    def _read(self) -> bool:
        """Take one packet from the file. Returns False at its end."""
        self._reader = self._skip(self._reader or PacketReader(self._bitstream))
        packet, self._found = self._reader.read() if self._found is None else self._found, None
        if packet is None:
            return False
        number = self._next
        self._next += 1
        for group, held in self._held.items():
            if group.first > number:
                break  # groups ascend
            if number <= group.last and (is_wanted := self._is_wanted(group, number)) is not None:
                held.append((packet, is_wanted))
        return True

    def _is_wanted(self, group: Group, number: int) -> bool | None:
        """None if the packet need not be fed."""
        if self._index is None:
            return True
        is_wanted = int(self._index.pts[number]) in self._wanted[group]
        return None if self._index.is_disposable[number] and not is_wanted else is_wanted
