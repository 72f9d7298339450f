"""Cutting and decoding the segments of one request. Called by ``decoding``, from the threads of all engines."""

from collections import defaultdict, deque
from collections.abc import Generator, Sequence

from .engines import CPU, Convert, Decoder, Engine, Output, decode_in_full, decode_in_sequence, decode_segment
from .packets import Bitstream, PacketCursor
from .segments import Segment, full_segment, plan_groups, plan_segments, sequential_segment, share_engines
from .video_info import PacketIndex

Outputs = Generator[tuple[int, Output], None, None]
"""(position among the wanted, converted frame) of one segment, ascending. It holds a decoder until its end, or until it is closed."""


class Job:
    """The decoding of a request's segments, as engines need it. Any thread may call its methods."""

    def __init__(
        self,
        bitstream: Bitstream,
        wanted: Sequence[int],
        convert: Convert,
        temporal_patch_size: int,
        packets_per_segment: int,
    ) -> None:
        self._bitstream = bitstream
        self._wanted = wanted
        self._convert = convert
        self._temporal_patch_size = temporal_patch_size
        self._packets_per_segment = packets_per_segment
        self._cursors: dict[Segment, PacketCursor] = {}
        self._idle: dict[str, deque[Decoder]] = defaultdict(deque)  # by kind of engine

    @property
    def bitstream(self) -> Bitstream:
        """The video to decode."""
        return self._bitstream

    def plan(self, start: int, num_engines: int) -> list[Segment]:
        """Segments for all wanted frames from ``start`` on."""
        index = self._bitstream.info.index
        if index is None:
            segments = [sequential_segment(start, len(self._wanted))] if start < len(self._wanted) else []
            return self._with_cursor(segments, None)
        num_packets = sum(group.last + 1 - group.first for group in plan_groups(index, self._wanted, start))
        segments = self._segments(index, start, max(num_engines, num_packets // self._packets_per_segment))
        return self._with_cursor(share_engines(segments, num_engines), index)

    def plan_in_full(self, start: int) -> list[Segment]:
        """As ``plan``, for broken data and files with no usable later key frame: all packets from the first on, on one thread."""
        index = self._bitstream.info.index
        assert index is not None
        return self._with_cursor([full_segment(index, self._wanted, start)], None)

    def _segments(self, index: PacketIndex, start: int, num_parts: int) -> list[Segment]:
        patch = self._temporal_patch_size
        return plan_segments(index, self._wanted, num_parts=num_parts, temporal_patch_size=patch, start=start)

    def _with_cursor(self, segments: list[Segment], index: PacketIndex | None) -> list[Segment]:
        cursor = PacketCursor(self._bitstream, index, [group for segment in segments for group in segment.groups])
        self._cursors.update(dict.fromkeys(segments, cursor))
        return segments

    def outputs(self, engine: Engine, segment: Segment) -> Outputs:
        """(position, converted frame) of one segment, as it is decoded. Raises: as ``decode_segment``."""
        cursor = self._cursors[segment]
        num_threads = segment.num_threads if engine.kind == CPU else 1
        # What a decoder makes of broken data depends on all that it has decoded: a full segment gets a new one.
        decoder = engine.open(self._bitstream) if segment.is_full else self._decoder(engine, num_threads)
        is_done = False
        try:
            if self._bitstream.info.index is None:
                frames = decode_in_sequence(decoder, cursor, segment, self._wanted)
            elif segment.is_full:
                frames = decode_in_full(decoder, cursor, segment)
            else:
                frames = decode_segment(decoder, cursor, segment)
            for position, frame in frames:
                self._bitstream.budget.check()
                yield position, self._convert(frame, decoder.reformatter)
            is_done = True
        finally:
            if is_done and decoder.is_sound and num_threads == 1:
                self._idle[engine.kind].append(decoder)
            else:
                decoder.close()

    def _decoder(self, engine: Engine, num_threads: int) -> Decoder:
        """A used decoder, or a new one; a used one that has too few threads is replaced."""
        try:
            decoder = self._idle[engine.kind].pop()
        except IndexError:
            return engine.open(self._bitstream, num_threads)
        if num_threads == 1:
            return decoder
        decoder.close()
        return engine.open(self._bitstream, num_threads)

    def forget(self, segment: Segment) -> None:
        """Give this segment no more packets, and free those that wait."""
        for group in segment.groups:
            self._cursors[segment].forget(group)

    def close(self) -> None:
        """Close the decoders. Call it once nothing runs any more."""
        for idle in self._idle.values():
            while idle:
                idle.pop().close()
