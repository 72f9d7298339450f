"""What lies between wanted frames is skipped, and frames are those of decoding in sequence (FC4)."""

import re
from collections import Counter
from typing import Any

import pytest

from mmrt.media.decoding import DecodingPool
from mmrt.media.engines import CpuEngine
from mmrt.media.packets import LEAST_SKIPPED, PacketCursor, PacketReader
from mmrt.media.segments import plan_groups
from mmrt.tests.media.conftest import assert_frames, bitstream_of, decode_all, encode_video, outputs

NUM_FRAMES = 400
WANTED = [0, 3, 130, 250, 251, NUM_FRAMES - 1]
OPEN_GOP = {"x264-params": "open-gop=1:keyint=12:min-keyint=12:bframes=3:scenecut=0"}
SOUGHT: dict[str, dict[str, Any]] = {
    "B-frames": {"options": {"bf": "3", "preset": "veryfast"}},
    "open GOP": {"options": OPEN_GOP},
    "sound": {"audio": True, "options": {"preset": "ultrafast"}},
    "fragments": {"container_options": {"movflags": "frag_keyframe+empty_moov"}, "options": {"preset": "ultrafast"}},
    "hevc": {"codec": "libx265", "options": {"preset": "ultrafast", "x265-params": "log-level=none"}},
    "matroska": {"container": "matroska", "options": {"bf": "2", "preset": "veryfast"}},
    "vp8": {"codec": "libvpx", "container": "webm", "options": {"deadline": "realtime", "cpu-used": "8"}},
    "vp9": {"codec": "libvpx-vp9", "container": "webm", "options": {"deadline": "realtime", "cpu-used": "8"}},
}
READ = {"mpeg-ts": {"container": "mpegts", "options": {"preset": "ultrafast"}}, "avi": {"codec": "mpeg4", "container": "avi"}}


@pytest.fixture
def num_read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many packets have been read, by any engine."""
    counts: Counter[str] = Counter()
    read = PacketReader.read

    def counted(self: PacketReader) -> Any:
        counts["packets"] += 1
        return read(self)

    monkeypatch.setattr(PacketReader, "read", counted)
    return counts


def decoded(data: bytes, num_engines: int) -> list[Any]:
    """The wanted frames."""
    with DecodingPool([CpuEngine()] * num_engines, packets_per_segment=24) as pool:
        return outputs(pool, pool.add_decoding_request(bitstream_of(data), WANTED))


@pytest.mark.parametrize("case", [*SOUGHT, *READ])
def test_few_frames_of_a_long_video_are_those_of_decoding_in_sequence(case: str, num_read: Counter[str]) -> None:
    data = encode_video(num_frames=NUM_FRAMES, **(SOUGHT | READ)[case])
    frames = decode_all(data)
    for num_engines in (1, 3):
        num_read.clear()
        assert_frames(decoded(data, num_engines), [frames[number] for number in WANTED])
        assert num_read["packets"] < NUM_FRAMES / 3 if case in SOUGHT else num_read["packets"] >= NUM_FRAMES


def test_cues_that_lead_elsewhere_cost_time_alone(num_read: Counter[str]) -> None:
    """All cues of a Matroska file point to its last cluster: the first seek finds that out, and the packets are read instead."""
    data = encode_video("libvpx-vp9", "webm", num_frames=NUM_FRAMES, options=SOUGHT["vp9"]["options"])
    begin = data.rindex(b"\x1c\x53\xbb\x6b")
    places = [
        match.span(1) for match in re.finditer(rb"\xf7\x81\x01\xf1[\x81-\x84](.{1,4}?)(?=\xf0|\xbb|\xec|$)", data[begin:], re.DOTALL)
    ]
    assert len(places) >= NUM_FRAMES // 12
    wrong = bytearray(data)
    last = data[begin + places[-1][0] : begin + places[-1][1]]
    for first, end in places:
        wrong[begin + first : begin + end] = last[-(end - first) :].rjust(end - first, b"\0")
    bitstream = bitstream_of(bytes(wrong))
    index = bitstream.info.index
    assert index is not None
    groups = plan_groups(index, WANTED)
    cursor = PacketCursor(bitstream, index, groups)
    for group in groups:
        assert [packet.pts for packet, _ in cursor.packets(group)] == index.pts[group.first : group.last + 1].tolist()
        cursor.forget(group)
    assert num_read["packets"] >= NUM_FRAMES
    frames = decode_all(data)
    assert_frames(decoded(bytes(wrong), 2), [frames[number] for number in WANTED])


def test_a_short_gap_is_read() -> None:
    data = encode_video(num_frames=2 * LEAST_SKIPPED, options={"preset": "ultrafast"})
    bitstream = bitstream_of(data)
    assert bitstream.info.index is not None
    groups = plan_groups(bitstream.info.index, [0, LEAST_SKIPPED - 2, 2 * LEAST_SKIPPED - 1])
    cursor = PacketCursor(bitstream, bitstream.info.index, groups)
    for group in groups:
        assert len([*cursor.packets(group)]) <= group.last + 1 - group.first
        cursor.forget(group)
    assert cursor._sought == 0


def test_a_cursor_keeps_nothing_of_groups_that_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """And closes the file with the last one."""
    closed = []
    monkeypatch.setattr(PacketReader, "close", lambda reader: closed.append(reader))
    bitstream = bitstream_of(encode_video(num_frames=48, options={"preset": "ultrafast"}))
    assert bitstream.info.index is not None
    first, *others = plan_groups(bitstream.info.index, [0, 20, 47])
    cursor = PacketCursor(bitstream, bitstream.info.index, [first, *others])
    assert others and [*cursor.packets(others[-1])]
    cursor.forget(first)
    assert not cursor.holds(first) and [*cursor.packets(first)] == [] and not closed
    for group in others:
        cursor.forget(group)
    assert len(closed) == 1
