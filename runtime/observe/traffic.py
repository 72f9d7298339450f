"""What the requests of a run asked for, as lines of a trace: times, lengths and which beginnings and media were alike (pure).

Made from flight records. No text, no token and no pixel is in a line. Hashes of contents become numbers in order of their first
appearance, as in Mooncake's traces, whose fields these lines have.
"""

from collections.abc import Iterator

import msgspec

from ...schema.media import MediaKind
from ..bus.request_keys import gateway_of
from .flight import FlightRecord, Kind, unpack_item, unpack_pair
from .trace_requests import RequestSpan, RequestSpans

WANTED = (
    Kind.RECEIVED,
    Kind.SUBMITTED,
    Kind.PREPARED,
    Kind.CACHED,
    Kind.ITEM,
    Kind.BLOCKS,
    Kind.FAILED,
    Kind.FIRST_TEXT,
    Kind.SENT,
    Kind.OVER,
    Kind.ENDED,
)
_FIRST = (Kind.RECEIVED, Kind.SUBMITTED)
_UNSAID_NS = 5_000_000_000  # after its end in the controller, or its gateway's, nobody waits longer for the gateway's word


class TrafficMedium(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``id``: equal ones have the same contents. ``width`` and ``height``: in pixels, as the model saw it; 0: not known, or a sound.
    ``seconds``: of a video or a sound; 0: not known."""

    type: MediaKind
    id: int
    tokens: int
    width: int = 0
    height: int = 0
    seconds: float = 0.0


class TrafficRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request. ``timestamp``: its arrival, in ms since the recording began. Lengths are in tokens, with those of media and template.
    ``hash_ids``: of each 512 tokens of the prompt; equal ones stand for all that comes before, too. ``cached_length``: tokens of the
    prompt that were in the prefix cache. ``ttft_ms``: as the client waited. ``status``: of its error."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    media: list[TrafficMedium] = []
    cached_length: int = 0
    ttft_ms: float = 0.0
    status: int = 0


class Traffic:
    """The requests that came since ``began_ns`` (CLOCK_MONOTONIC). ``patch_size``: of the model's pictures, in pixels; 0: not known.
    ``mel_rate``: mel frames per second of sound; 0: the model hears none."""

    def __init__(self, began_ns: int, patch_size: int = 0, mel_rate: float = 0.0) -> None:
        self._began_ns, self._patch_size, self._mel_rate = began_ns, patch_size, mel_rate
        self._requests = RequestSpans()
        self._blocks: dict[int, list[int]] = {}
        self._media: dict[int, list[FlightRecord]] = {}
        self._numbers: dict[Kind, dict[int, int]] = {Kind.BLOCKS: {}, Kind.ITEM: {}}
        self._generations: dict[str, int] = {}  # of gateways
        self.num_unread = 0  # over before their prompt's length was known: refused, or lost with their gateway

    @property
    def num_open(self) -> int:
        """Requests that are not over."""
        return len(self._requests.spans)

    def add(self, record: FlightRecord) -> None:
        """Take a record; they come in order of time."""
        if record.key not in self._requests.spans and (record.kind not in _FIRST or record.time_ns < self._began_ns):
            return  # of a request that came before
        if record.kind is Kind.BLOCKS:
            self._blocks.setdefault(record.key, []).extend(filter(None, (record.a, record.b, record.c)))
        elif record.kind is Kind.ITEM:
            self._media.setdefault(record.key, []).append(record)
        else:
            if record.kind is Kind.RECEIVED:
                gateway = gateway_of(record.key)
                self._generations[gateway] = max(self._generations.get(gateway, 0), record.generation)
            elif record.kind is Kind.PREPARED:  # a new controller, or a request that was put off, says all of it again
                self._blocks.pop(record.key, None)
                self._media.pop(record.key, None)
            self._requests.add(record)

    def rows(self, now_ns: int) -> Iterator[TrafficRow]:
        """Yield the requests that are over, in order of arrival, and forget them: up to the first that is not."""
        spans = self._requests.spans
        for span in sorted(spans.values(), key=lambda found: found.begin_ns):
            if not span.is_over and not self._is_left(span, now_ns):
                return
            yield from self._row(spans.pop(span.key))

    def rest(self) -> Iterator[TrafficRow]:
        """Yield the requests that are over, although earlier ones are not."""
        spans = self._requests.spans
        for span in sorted(spans.values(), key=lambda found: found.begin_ns):
            if span.is_over or span.end_ns:
                yield from self._row(spans.pop(span.key))

    def forget(self) -> None:
        """Forget the requests that are not over: records are missing, of the ends of some maybe."""
        for key in list(self._requests.spans):
            for found in (self._requests.spans, self._blocks, self._media):
                found.pop(key, None)

    def _is_left(self, span: RequestSpan, now_ns: int) -> bool:
        """Return whether no gateway tells of its end: it has ended without, or its gateway did before the controller knew it."""
        is_old = span.gateway_generation < self._generations.get(gateway_of(span.key), 0)
        is_lost = is_old and all(stage.name == "submitted" for stage in span.stages)
        ended_ns = span.begin_ns if is_lost else span.end_ns
        return 0 < ended_ns < now_ns - _UNSAID_NS

    def _row(self, span: RequestSpan) -> Iterator[TrafficRow]:
        blocks, media = self._blocks.pop(span.key, []), self._media.pop(span.key, [])
        if not span.num_prompt_tokens:
            self.num_unread += 1
            return
        first_ns = next((at_ns for event, at_ns in span.marks if event == "first text"), 0)
        yield TrafficRow(
            timestamp=round((span.begin_ns - self._began_ns) / 1e6, 3),
            input_length=span.num_prompt_tokens,
            output_length=span.num_sent,
            hash_ids=[self._number(Kind.BLOCKS, block) for block in blocks],
            media=[self._medium(record) for record in media],
            cached_length=span.num_cached_tokens,
            ttft_ms=round((first_ns - span.begin_ns) / 1e6, 3) if first_ns else 0.0,
            status=span.status,
        )

    def _medium(self, record: FlightRecord) -> TrafficMedium:
        kind, length, num_tokens = unpack_item(record.a)
        rate = {"video": 1000.0, "audio": self._mel_rate}.get(kind, 0.0)
        height, width = unpack_pair(record.b)
        return TrafficMedium(
            type=kind,
            id=self._number(Kind.ITEM, record.c),
            tokens=num_tokens,
            width=width * self._patch_size,
            height=height * self._patch_size,
            seconds=round(length / rate, 3) if rate else 0.0,
        )

    def _number(self, kind: Kind, found: int) -> int:
        numbers = self._numbers[kind]
        return numbers.setdefault(found, len(numbers))
