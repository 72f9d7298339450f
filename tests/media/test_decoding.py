"""A pool gives bit for bit what decoding in sequence gives, to any number of takers, whatever fails and however it ends."""

import gc
import itertools
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from mmrt.media.decoding import BYTES_AHEAD, DecodingPool
from mmrt.media.engines import CPU, CpuDecoder, CpuEngine, EngineError, choose_kind, decoder_bytes
from mmrt.media.errors import MediaError
from mmrt.media.limits import TimeBudget
from mmrt.media.packets import Bitstream, PacketCursor
from mmrt.media.segments import plan_groups, plan_segments
from mmrt.tests.media.conftest import WAIT_S, Frames, assert_frames, bitstream_of, decode_all, encode_video, outputs

CASES: dict[str, dict] = {
    "closed GOP": {},
    "B-frames": {"options": {"bf": "3", "preset": "veryfast"}},
    "open GOP": {"options": {"x264-params": "open-gop=1:keyint=12:min-keyint=12:bframes=3:scenecut=0"}},
    "one GOP": {"gop": 300},
    "missing time stamps": {"container": "h264"},
    "intra refresh": {"options": {"x264-params": "intra-refresh=1:keyint=12"}},
    "hevc": {"codec": "libx265", "options": {"preset": "ultrafast", "x265-params": "log-level=none"}},
}

MakePool = Callable[..., DecodingPool]


@pytest.fixture(scope="module")
def video_of(make_video) -> Callable[[str], bytes]:
    made: dict[str, bytes] = {}

    def video(case: str) -> bytes:
        if case not in made:
            made[case] = make_video(**CASES[case])
        return made[case]

    return video


@pytest.fixture
def make_pool() -> Iterator[MakePool]:
    """Pools with small segments, closed at the end; no thread is left behind."""
    pools: list[DecodingPool] = []

    def make(engines: int | list[Any], **settings: int) -> DecodingPool:
        pools.append(DecodingPool([CpuEngine()] * engines if isinstance(engines, int) else engines, packets_per_segment=8, **settings))
        return pools[-1]

    before = threading.active_count()
    yield make
    for pool in pools:
        pool.close()
    assert threading.active_count() == before


def decode(pool: DecodingPool, data: bytes, wanted: list[int], **how: Any) -> Frames:
    return outputs(pool, pool.add_decoding_request(bitstream_of(data), wanted, **how))


def expected(data: bytes, wanted: Sequence[int]) -> Frames:
    frames = decode_all(data)
    return [frames[index] for index in wanted]


def test_what_is_converted_in_the_engine_comes_out(make_pool, video_of):
    names: set[str] = set()

    def convert(frame: Any, reformatter: Any) -> np.ndarray:
        names.add(threading.current_thread().name)
        return np.array([frame.pts, frame.width])

    frames = decode(make_pool(2), video_of("closed GOP"), [0, 1, 40], convert=convert)
    assert [int(frame[1]) for frame in frames] == [96] * 3 and len({int(frame[0]) for frame in frames}) == 3
    assert names <= {"decode 0", "decode 1"}


def test_little_memory_ahead_of_the_taker_gives_the_same_frames(make_pool, video_of):
    """Of two requests neither blocks the engines for the other, whichever is taken first."""
    data = video_of("B-frames")
    wanted = list(range(48))
    happened: list[str] = []
    pool = make_pool([Watched(happened.append), Watched(happened.append)], max_bytes_ahead=2 * 64 * 96 * 3)
    first, second = (pool.add_decoding_request(bitstream_of(data), wanted) for _ in range(2))
    assert_frames(outputs(pool, second), expected(data, wanted))
    assert_frames(outputs(pool, first), expected(data, wanted))
    assert happened.count("open") == happened.count("close") <= 4, "one decoder per engine and request"


class HeldEngine(CpuEngine):
    """Opens a decoder only while it is let."""

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.opened: list[Bitstream] = []

    def open(self, bitstream: Bitstream, num_threads: int = 1) -> CpuDecoder:
        self.opened.append(bitstream)
        assert self.may_go.wait(WAIT_S)
        return super().open(bitstream, num_threads)


def test_of_two_requests_the_first_is_decoded_first(make_pool, video_of):
    data = video_of("closed GOP")
    engine = HeldEngine()
    pool = make_pool([engine])
    decoded: list[str] = []

    def tagged(tag: str) -> Callable[..., np.ndarray]:
        return lambda frame, _: decoded.append(tag) or np.zeros(1)

    wanted = list(range(0, 20))
    first, second = (pool.add_decoding_request(bitstream_of(data), wanted, convert=tagged(tag)) for tag in "ab")
    engine.may_go.set()
    assert len(outputs(pool, first)) == len(outputs(pool, second)) == len(wanted)
    assert decoded == ["a"] * 20 + ["b"] * 20
    assert len(engine.opened) == 2, "a decoder serves all the segments of a request"


class Watched(CpuEngine):
    """Calls ``at_instant`` in the engine's thread before each thing that it does, with its name."""

    def __init__(self, at_instant: Callable[[str], None]) -> None:
        self._at_instant = at_instant

    def open(self, bitstream: Bitstream, num_threads: int = 1) -> Any:
        self._at_instant("open")
        return WatchedDecoder(super().open(bitstream, num_threads), self._at_instant)


class WatchedDecoder:
    def __init__(self, decoder: CpuDecoder, at_instant: Callable[[str], None]) -> None:
        self._decoder = decoder
        self._at_instant = at_instant

    def __getattr__(self, name: str) -> Any:
        if name in ("decode", "drain", "reset", "close"):
            self._at_instant(name)
        return getattr(self._decoder, name)


@pytest.mark.parametrize("ending", ["cancel", "close"])
@pytest.mark.parametrize(
    "instant",
    ["open 1", "open 2", "decode 1", "decode 7", "decode 30", "drain 1", "reset 1", "reset 3", "convert 1", "convert 20", "close 1"],
)
@pytest.mark.parametrize("max_bytes_ahead", [1 << 20, 3 * 64 * 96 * 3])
def test_a_request_may_be_ended_at_any_instant_of_its_engines(make_pool, video_of, instant, ending, max_bytes_ahead):
    """Another thread ends it while an engine is in the midst of something; nobody waits for ever, and the reader is free afterwards."""
    name, number = instant.split()
    seen = Counter()
    lock, is_ended = threading.Lock(), threading.Event()
    enders: list[threading.Thread] = []

    def at_instant(what: str) -> None:
        with lock:
            seen[what] += 1
            if what != name or seen[what] != int(number):
                return
            end = pool.close if ending == "close" else lambda: pool.cancel(request)
            enders.append(threading.Thread(target=end))
            enders[-1].start()
        assert is_ended.wait(WAIT_S)

    pool = make_pool([Watched(at_instant), Watched(at_instant)], max_bytes_ahead=max_bytes_ahead)
    end_request = pool._dispatch.cancel
    pool._dispatch.cancel = lambda request: (end_request(request), is_ended.set())[0]  # type: ignore[method-assign]

    def convert(frame: Any, reformatter: Any) -> np.ndarray:
        at_instant("convert")
        return np.zeros((64, 96, 3), np.uint8)

    bitstream = bitstream_of(video_of("B-frames"))
    request = pool.add_decoding_request(bitstream, list(range(48)), convert)
    with suppress(ValueError):  # that it is cancelled
        outputs(pool, request)
    is_ended.set()  # where it is over before the instant comes, or ends by itself
    pool.cancel(request)
    for ender in enders:
        ender.join(WAIT_S)
        assert not ender.is_alive()
    bitstream.reader.close()  # type: ignore[attr-defined]


def test_engines_that_wait_hold_nothing_of_what_they_did(make_pool, video_of):
    pool = make_pool(2)
    bitstream = bitstream_of(video_of("closed GOP"))
    reader = weakref.ref(bitstream.reader)
    assert len(outputs(pool, pool.add_decoding_request(bitstream, [0, 20, 40]))) == 3
    del bitstream
    gc.collect()
    assert reader() is None


@pytest.mark.parametrize("num_taken", [0, 1, 7, 48])
@pytest.mark.parametrize("case", ["closed GOP", "one GOP", "missing time stamps"])
def test_a_request_may_be_cancelled_at_any_point(make_pool, video_of, case, num_taken):
    data = video_of(case)
    pool = make_pool(2)
    wanted = list(range(48))
    bitstream = bitstream_of(data)
    request = pool.add_decoding_request(bitstream, wanted)
    for _ in range(num_taken):
        assert pool.get_decoding_output(request, WAIT_S) is not None
    pool.cancel(request)
    pool.cancel(request)
    bitstream.reader.close()  # type: ignore[attr-defined]
    if num_taken < 48:
        with pytest.raises(ValueError, match="cancelled"):
            pool.get_decoding_output(request, WAIT_S)
    assert_frames(decode(pool, data, [3, 30]), expected(data, [3, 30]))


def test_many_takers_come_and_go(make_pool, video_of):
    """Little memory, three engines, three takers; every other request is given up somewhere."""
    pool = make_pool(3, max_bytes_ahead=4 * 64 * 96 * 3)
    videos = {case: decode_all(video_of(case)) for case in ("open GOP", "intra refresh", "missing time stamps")}
    failures: list[BaseException] = []

    def take(case: str, seed: int) -> None:
        random = np.random.default_rng(seed)
        try:
            for number in range(6):
                wanted = sorted(random.integers(0, 48, 20).tolist())
                due = [videos[case][index] for index in wanted]
                request = pool.add_decoding_request(bitstream_of(video_of(case)), wanted)
                if number % 2:
                    num_taken = int(random.integers(20))
                    assert_frames([pool.get_decoding_output(request, WAIT_S) for _ in range(num_taken)], due[:num_taken])
                    pool.cancel(request)
                else:
                    assert_frames(outputs(pool, request), due)
        except BaseException as failure:
            failures.append(failure)

    takers = [threading.Thread(target=take, args=(case, seed)) for seed, case in enumerate(videos)]
    for taker in takers:
        taker.start()
    for taker in takers:
        taker.join(2 * WAIT_S)
    assert failures == [] and not any(taker.is_alive() for taker in takers)


def test_who_waits_for_a_cancelled_request_is_told(make_pool, video_of):
    engine = HeldEngine()
    pool = make_pool([engine])
    request = pool.add_decoding_request(bitstream_of(video_of("closed GOP")), [0])
    errors: list[Exception] = []

    def take() -> None:
        try:
            pool.get_decoding_output(request, WAIT_S)
        except ValueError as error:
            errors.append(error)

    taker = threading.Thread(target=take)
    taker.start()
    until_s = time.monotonic() + WAIT_S
    while not engine.opened and time.monotonic() < until_s:
        time.sleep(0.001)
    canceller = threading.Thread(target=pool.cancel, args=(request,))
    canceller.start()
    taker.join(WAIT_S)
    assert "cancelled" in str(errors[0]) and canceller.is_alive(), "cancel waits for the engine"
    engine.may_go.set()
    canceller.join(WAIT_S)
    assert not canceller.is_alive()


@pytest.mark.parametrize("num_started", [0, 1])
def test_without_memory_for_a_thread_nothing_is_begun(make_pool, video_of, monkeypatch, num_started):
    """Seen in a storm: the system refused a thread, and later requests waited for it until their time was up."""
    pool, video = make_pool(3), video_of("closed GOP")
    start, begun = threading.Thread.start, []

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith("decode"):
            if len(begun) == num_started:
                raise RuntimeError("can't start new thread")
            begun.append(thread)
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(MemoryError, match="no memory for a thread"):
            decode(pool, video, [0, 1, 40])
    assert not pool._jobs and not pool._dispatch.requests
    assert_frames(decode(pool, video, [0, 1, 40]), expected(video, [0, 1, 40]))
    assert sorted(thread.name for thread in pool._threads) == ["decode 0", "decode 1", "decode 2"]


def test_a_wait_may_be_limited(make_pool, video_of):
    """Whatever else happens in the meantime: waiters of all requests are woken for any frame, and any end."""
    engine = HeldEngine()
    pool = make_pool([engine])
    request, ended = (pool.add_decoding_request(bitstream_of(video_of("closed GOP")), [0]) for _ in range(2))
    pool.cancel(ended)
    is_over = threading.Event()

    def wake() -> None:
        while not is_over.wait(0.001):
            pool.cancel(ended)

    waker = threading.Thread(target=wake)
    waker.start()
    try:
        with pytest.raises(TimeoutError):
            pool.get_decoding_output(request, 0.05)
    finally:
        is_over.set()
        waker.join(WAIT_S)
    engine.may_go.set()
    assert len(outputs(pool, request)) == 1


def test_the_budget_ends_a_wait_for_engines_that_do_something_else(make_pool, video_of):
    engine = HeldEngine()
    pool = make_pool([engine])
    other = pool.add_decoding_request(bitstream_of(video_of("closed GOP")), [0])
    budget = TimeBudget(0.05)
    request = pool.add_decoding_request(bitstream_of(video_of("closed GOP"), budget), [0])
    with budget.running(), pytest.raises(MediaError, match=r"longer than the limit of 0\.05 s"):
        pool.get_decoding_output(request)
    pool.cancel(request)
    engine.may_go.set()
    assert len(outputs(pool, other)) == 1


class Breaking:
    """A decoder that raises at its n-th packet."""

    def __init__(self, decoder: CpuDecoder, num_packets: int, error: Exception) -> None:
        self._decoder = decoder
        self._left = num_packets
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def decode(self, packet: Any, is_wanted: bool) -> list[Any]:
        self._left -= 1
        if self._left < 0:
            raise self._error
        return self._decoder.decode(packet, is_wanted)


class CountingEngine(CpuEngine):
    """Notes how many threads each decoder gets."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def open(self, bitstream: Bitstream, num_threads: int = 1) -> Any:
        self.threads.append(num_threads)
        return super().open(bitstream, num_threads)


class FragileEngine(CpuEngine):
    def __init__(self, kind: str, error: Exception, num_packets: int = 5) -> None:
        self.kind = kind
        self._error = error
        self._num_packets = num_packets

    def open(self, bitstream: Bitstream, num_threads: int = 1) -> Any:
        return Breaking(super().open(bitstream, num_threads), self._num_packets, self._error)


@pytest.mark.parametrize("case", ["B-frames", "missing time stamps"])
def test_the_processor_takes_over_from_hardware_that_fails(make_pool, video_of, monkeypatch, case):
    monkeypatch.setattr("mmrt.media.decoding.choose_kind", lambda info, kinds: kinds[0])
    data = video_of(case)
    for error in (EngineError("not supported"), RuntimeError("the device is gone")):
        pool = make_pool([FragileEngine("hardware", error), FragileEngine("hardware", error, 9), CpuEngine()])
        assert_frames(decode(pool, data, list(range(48))), expected(data, list(range(48))))


def test_all_cores_take_over_from_one_unit(make_pool, video_of, monkeypatch):
    monkeypatch.setattr("mmrt.media.decoding.choose_kind", lambda info, kinds: kinds[0])
    data = video_of("closed GOP")
    both, opened = threading.Barrier(2, timeout=WAIT_S), itertools.count()

    def at_instant(name: str) -> None:
        if name == "open" and next(opened) < 2:
            both.wait()  # one core alone would wait in vain

    pool = make_pool([FragileEngine("hardware", EngineError("not supported"), 0), *[Watched(at_instant) for _ in range(4)]])
    request = pool.add_decoding_request(bitstream_of(data), list(range(48)))
    assert_frames(outputs(pool, request), expected(data, list(range(48))))
    assert request.max_running == 4 and not both.broken


def test_a_dropped_segment_of_several_threads_is_not_decoded_again(make_pool, video_of):
    opened, began, may_go = [], threading.Event(), threading.Event()

    def at_instant(name: str) -> None:
        opened.append(name) if name == "open" else None
        if name == "decode":
            began.set()
            assert may_go.wait(WAIT_S)

    pool = make_pool([Watched(at_instant)] * 4)
    request = pool.add_decoding_request(bitstream_of(video_of("one GOP")), [20, 40])
    assert began.wait(WAIT_S)
    cancelling = threading.Thread(target=pool.cancel, args=(request,))
    cancelling.start()
    while pool._dispatch.requests:
        time.sleep(0.01)
    may_go.set()
    cancelling.join(WAIT_S)
    assert opened == ["open"]


def test_an_engine_that_fails_fails_its_request_only(make_pool, video_of):
    data = video_of("closed GOP")
    pool = make_pool([FragileEngine(CPU, RuntimeError("engine on fire"), 30)])
    with pytest.raises(RuntimeError, match="on fire"):
        decode(pool, data, list(range(48)))
    assert_frames(decode(pool, data, [0, 3]), expected(data, [0, 3]))


def test_a_spent_time_budget_ends_the_request(make_pool, video_of):
    budget = TimeBudget(1.0, clock=time.monotonic)
    bitstream = bitstream_of(video_of("closed GOP"), budget)
    budget._spent_s = 2.0
    pool = make_pool(2)
    request = pool.add_decoding_request(bitstream, list(range(48)))
    with pytest.raises(MediaError, match="longer than the limit of 1 s"):
        outputs(pool, request)


def test_the_budget_ends_decoding_that_reads_nothing_any_more(video_of):
    """All packets of the first group are there when the second one's have been asked for."""
    budget = TimeBudget(1.0)
    bitstream = bitstream_of(video_of("closed GOP"), budget)
    assert bitstream.info.index is not None
    groups = plan_groups(bitstream.info.index, range(48))
    cursor = PacketCursor(bitstream, bitstream.info.index, groups)
    next(cursor.packets(groups[1]))
    budget._spent_s = 2.0
    with pytest.raises(MediaError, match="longer than the limit of 1 s"):
        next(cursor.packets(groups[0]))


def test_a_large_video_is_decoded_by_fewer_engines(make_pool, video_of):
    """So that its decoders fit into memory; one there is in any case."""
    bitstream = bitstream_of(video_of("closed GOP"))
    each = decoder_bytes(bitstream.info)
    pools = [make_pool(3, max_decoder_bytes=most) for most in (1, 2 * each, 9 * each)]
    assert [pool.max_bytes(bitstream.info) - BYTES_AHEAD for pool in pools] == [each, 2 * each, 3 * each]
    for pool, num_engines in zip(pools, (1, 2, 3), strict=True):
        request = pool.add_decoding_request(bitstream, range(48))
        assert request.max_running == num_engines
        assert_frames(outputs(pool, request), decode_all(video_of("closed GOP")))


@pytest.mark.parametrize("case, threads", [("one GOP", {4}), ("missing time stamps", {1}), ("closed GOP", {1})])
def test_a_video_of_fewer_segments_than_engines_uses_their_cores(make_pool, video_of, case, threads):
    engine = CountingEngine()
    data = video_of(case)
    assert_frames(decode(make_pool([engine] * 4), data, list(range(48))), expected(data, list(range(48))))
    assert set(engine.threads) == threads


@pytest.mark.parametrize("case", ["one GOP", "closed GOP"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_broken_data_in_a_decoder_of_several_threads(make_pool, video_of, case, share):
    """The number of threads decides on nothing: frames are those of one engine."""
    data = bytearray(video_of(case))
    at = data.index(b"mdat")
    begin = at + int(share * int.from_bytes(data[at - 4 : at]))
    data[begin : begin + 200] = bytes(range(200))
    wanted = list(range(48))
    alone = decode(make_pool(1), bytes(data), wanted)
    assert any(not np.array_equal(a, b) for a, b in zip(alone, expected(video_of(case), wanted), strict=True)), "there is damage"
    for num_engines in (3, 5):
        assert_frames(decode(make_pool(num_engines), bytes(data), wanted), alone)


def test_deep_colours_take_more_memory():
    """8 bits and 4:2:0 are 12 bits a pixel; 4:2:2 in two bytes a sample is 32."""
    plain, deep = (decoder_bytes(bitstream_of(encode_video(num_frames=3, pix_fmt=name)).info) for name in ("yuv420p", "yuv422p10le"))
    assert deep * 12 == plain * 32


def test_broken_data_gives_the_frames_that_can_be_had(make_pool, video_of):
    data = bytearray(video_of("closed GOP"))
    middle = len(data) // 2
    data[middle : middle + 1000] = bytes(1000)
    frames = decode(make_pool(2), bytes(data), list(range(48)))
    assert len(frames) == 48 and {frame.shape for frame in frames} == {(64, 96, 3)}
    assert_frames(frames[:12], expected(video_of("closed GOP"), list(range(12))))


def test_packets_are_read_once_and_kept_only_for_segments_under_way(video_of, monkeypatch):
    data = video_of("open GOP")
    bitstream = bitstream_of(data)
    index = bitstream.info.index
    assert index is not None
    segments = plan_segments(index, range(48), num_parts=4)
    groups = [group for segment in segments for group in segment.groups]
    cursor = PacketCursor(bitstream, index, groups)
    third = iter(cursor.packets(groups[2]))
    next(third)
    before = [sum(1 for _ in cursor.packets(group)) for group in groups[:2]]
    assert before == [group.last + 1 - group.first for group in groups[:2]]
    cursor.forget(groups[0])
    cursor.forget(groups[1])
    num_last = sum(1 for _ in cursor.packets(groups[3]))
    assert num_last == groups[3].last + 1 - groups[3].first
    assert [len(held) for held in cursor._held.values()] == [groups[2].last - groups[2].first, 0]
    cursor.forget(groups[2])
    assert [*cursor._held] == [groups[3]] and list(third) == []


def test_hardware_is_chosen_by_codec_and_size(video_of):
    info = bitstream_of(video_of("closed GOP")).info
    assert info.codec == "h264" and choose_kind(info, ["nvdec", CPU]) == CPU
    assert choose_kind(info, ["nvdec"]) == "nvdec"
    assert choose_kind(bitstream_of(video_of("hevc")).info, ["nvdec", CPU]) == "nvdec"
    assert choose_kind(bitstream_of(video_of("hevc")).info, [CPU]) == CPU


def test_bad_requests(make_pool, video_of):
    bitstream = bitstream_of(video_of("closed GOP"))
    pool = make_pool(1)
    with pytest.raises(ValueError, match="ascend"):
        pool.add_decoding_request(bitstream, [3, 2])
    with pytest.raises(ValueError, match=r"0\.\.47"):
        pool.add_decoding_request(bitstream, [48])
    assert outputs(pool, pool.add_decoding_request(bitstream, [])) == []
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        pool.add_decoding_request(bitstream, [0])
