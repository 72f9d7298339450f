"""Files that decoders get wrong: each is made here, and every frame is the one that plain decoding in sequence gives."""

import io
import struct
from collections.abc import Sequence
from contextlib import closing
from dataclasses import fields, replace
from itertools import pairwise
from unittest.mock import patch

import av
import av.stream
import numpy as np
import pytest
from PIL import Image

from mmrt.media import container
from mmrt.media.errors import MediaError
from mmrt.media.limits import UNLIMITED, MediaLimits
from mmrt.media.video import decode_frames
from mmrt.media.video_info import VideoInfo, analyse
from mmrt.tests.media.conftest import assert_frames, decode_all, decode_on, encode_video, picture
from mmrt.tests.media.h264_fields import field_coded

LIMITS = MediaLimits()
X265 = {"preset": "ultrafast"}
VP9 = {"codec": "libvpx-vp9", "container": "webm"}
FAST = {"deadline": "good", "cpu-used": "8"}
FRAGMENTED = "frag_keyframe+empty_moov"
HDR = "log-level=none:colorprim=bt2020:transfer=smpte2084:colormatrix=bt2020nc"

CASES: dict[str, dict] = {
    "vp9 with hidden reference frames": VP9 | {"options": FAST | {"lag-in-frames": "12", "auto-alt-ref": "1"}},
    "vp9 of odd size": VP9 | {"options": FAST, "height": 61, "width": 97},
    "vp9 with alpha": VP9 | {"options": FAST | {"auto-alt-ref": "0"}, "pix_fmt": "yuva420p"},
    "vp9 IVF": VP9 | {"options": FAST, "container": "ivf"},
    "vp8 with alpha": {"codec": "libvpx", "container": "webm", "options": FAST | {"auto-alt-ref": "0"}, "pix_fmt": "yuva420p"},
    "hevc HDR": {"codec": "libx265", "options": X265 | {"x265-params": HDR}, "pix_fmt": "yuv420p10le"},
    "av1 of 10 bits": {"codec": "libsvtav1", "container": "matroska", "options": {"preset": "12"}, "pix_fmt": "yuv420p10le"},
    "av1, one frame": {"codec": "libsvtav1", "options": {"preset": "12"}, "num_frames": 1},
    "av1 without a container": {"codec": "libsvtav1", "container": "obu", "options": {"preset": "12"}},
    "mpeg2 interlaced": {"codec": "mpeg2video", "container": "mpegts", "options": {"flags": "+ilme+ildct", "bf": "2"}},
    "mpeg2 program stream": {"codec": "mpeg2video", "container": "mpeg", "options": {"bf": "2"}},
    "mpeg4 MP4": {"codec": "mpeg4", "options": {"bf": "2"}},
    "ProRes with alpha": {"codec": "prores_ks", "container": "mov", "pix_fmt": "yuva444p10le"},
    "FFV1 with alpha": {"codec": "ffv1", "container": "matroska", "pix_fmt": "bgra"},
    "h264 grey": {"pix_fmt": "gray"},
    "h264 4:2:2 of 10 bits": {"pix_fmt": "yuv422p10le"},
    "h264 FLV": {"container": "flv", "options": {"bf": "3"}},
    "h264 AVI, numbered as it lies": {"container": "avi", "options": {"bf": "3"}},
    "h264 that begins late": {"times": [25 * i + 3000 for i in range(24)]},
    "MPEG-TS with sound": {"container": "mpegts", "audio": True, "options": {"bf": "3"}},
    "motion JPEG of odd size": {"codec": "mjpeg", "container": "avi", "pix_fmt": "yuvj420p", "height": 61, "width": 97},
    "GIF animation": {"codec": "gif", "container": "gif", "pix_fmt": "rgb8"},
    "GIF, one frame": {"codec": "gif", "container": "gif", "pix_fmt": "rgb8", "num_frames": 1},
}


def assert_exact(data: bytes) -> VideoInfo:
    """All frames, some, and the last one are those of decoding in sequence, on any number of engines."""
    reference = decode_all(data)
    info = analyse(io.BytesIO(data), LIMITS)
    assert info.num_frames == len(reference)
    assert (info.height, info.width) == reference[0].shape[:2]
    with patch.object(container, "_SELF_EXPLAINED", {}):
        assert_same(info, analyse(io.BytesIO(data), LIMITS))
    for wanted in (range(len(reference)), range(0, len(reference), 5), [len(reference) - 1]):
        for num_engines in (1, 2, 3):
            assert_frames(decode_on(num_engines, data, wanted), [reference[index] for index in wanted])
    return info


def assert_same(info: VideoInfo, other: VideoInfo) -> None:
    """What the head says of a file is what FFmpeg finds when it probes it."""
    assert replace(info, index=None) == replace(other, index=None)
    assert (info.index is None) == (other.index is None)
    if info.index is not None and other.index is not None:
        for field in fields(info.index):
            assert np.array_equal(getattr(info.index, field.name), getattr(other.index, field.name)), field.name


@pytest.mark.parametrize(
    ("clip", "is_probed"),
    [
        ({}, [False]),
        ({"codec": "libx265", "options": X265 | {"x265-params": "log-level=none"}}, [False]),
        (VP9 | {"options": FAST}, [False]),
        ({"container": "matroska"}, [False, True]),  # H.264 in it may lack time stamps
        ({"container_options": {"movflags": FRAGMENTED}}, [False, True]),  # nor does the head tell their order
        ({"options": {"bf": "0"}}, [False, True]),
        ({"codec": "mpeg4"}, [False, True]),
        ({"container": "mpegts"}, [True]),
    ],
)
def test_no_picture_is_decoded_to_learn_what_the_head_says(clip, is_probed):
    data = encode_video(num_frames=12, **({"options": {"bf": "3"}} | clip))
    with patch.object(container.av, "open", wraps=av.open) as opening:
        opened, stream = container.open_video(io.BytesIO(data), LIMITS, UNLIMITED)
    with closing(opened):
        assert [call.kwargs["options"]["codec_whitelist"] != "none" for call in opening.call_args_list] == is_probed
        assert (stream.codec_context.pix_fmt is not None) == is_probed[-1]


@pytest.mark.parametrize("flags", [{}, {"movflags": FRAGMENTED}])
def test_h264_that_does_not_say_how_far_frames_are_out_of_order(flags):
    """Some encoders leave it out. A decoder that guesses too little gives frames too early and drops others."""
    options = {"bf": "3", "x264-params": "b-pyramid=normal:keyint=12:b-adapt=0"}
    data = encode_video(num_frames=48, options=options, container_options=flags)
    assert_exact(without_reorder_depth(data))


def test_a_head_without_a_size(h264):
    at = h264.index(b"avc1", h264.index(b"stsd")) + 28
    assert struct.unpack_from(">HH", h264, at) == (96, 64)
    assert_exact(h264[:at] + bytes(4) + h264[at + 4 :])


def without_reorder_depth(data: bytes) -> bytes:
    """The same H.264 in MP4 with bitstream_restriction_flag cleared in its SPS: the bit that ends it follows at once."""
    begin = data.index(b"avcC") + 4 + 8
    end = begin + int.from_bytes(data[begin - 2 : begin])
    bits = "".join(f"{byte:08b}" for byte in data[begin:end])
    flag = max(at for at in range(len(bits)) if is_restriction(bits, at))
    bits = (bits[:flag] + "01").ljust(len(bits), "0")
    return data[:begin] + int(bits, 2).to_bytes(end - begin) + data[end:]


def is_restriction(bits: str, at: int) -> bool:
    """Whether two flags that are set, twice 0, four more numbers and the last bit that is set are here."""
    if bits[at : at + 4] != "1111":
        return False
    rest = bits[at + 4 :].rstrip("0")
    for _ in range(4):
        zeros = len(rest) - len(rest.lstrip("0"))
        rest = rest[2 * zeros + 1 :]
    return rest == "1"


@pytest.mark.many
@pytest.mark.parametrize("name", CASES)
def test_wanted_frames_equal_sequential_decoding(name):
    assert_exact(encode_video(**({"num_frames": 24} | CASES[name])))


@pytest.mark.parametrize(
    "how",
    [
        {"codec": "mpeg4"},
        {"codec": "mpeg4", "options": {"bf": "2"}},
        {},
        {"codec": "libx265", "options": X265 | {"x265-params": "log-level=none"}},
    ],
)
def test_a_file_that_calls_every_frame_a_key_frame(how):
    """An MP4 without the table of key frames says so. Decoded from such a frame, MPEG-4 would come out grey."""
    data = encode_video(num_frames=24, **how)
    assert data.count(b"stss") == 1
    assert_exact(data.replace(b"stss", b"free"))


def boxes(mp4: bytes, path: Sequence[bytes]) -> list[tuple[int, int]]:
    """(offset, size) of each box along the path."""
    found: list[tuple[int, int]] = []
    at, end = 0, len(mp4)
    for name in path:
        while True:
            assert at < end, name
            size, kind = struct.unpack_from(">I4s", mp4, at)
            if kind == name:
                break
            at += size
        found.append((at, size))
        at, end = at + 8, at + size
    return found


def with_edits(mp4: bytes, edits: Sequence[tuple[float | None, float]]) -> bytes:
    """The file with another edit list: (start in the medium or None for nothing, duration), in seconds."""
    ((_, _), (mvhd, _)), (*_, (mdhd, _)) = boxes(mp4, [b"moov", b"mvhd"]), boxes(mp4, [b"moov", b"trak", b"mdia", b"mdhd"])
    (movie_rate,), (media_rate,) = (struct.unpack_from(">I", mp4, at + 20) for at in (mvhd, mdhd))
    *parents, (at, size) = boxes(mp4, [b"moov", b"trak", b"edts", b"elst"])
    entries = [
        struct.pack(">IiI", round(s * movie_rate), -1 if start is None else round(start * media_rate), 1 << 16) for start, s in edits
    ]
    body = struct.pack(">II", 0, len(edits)) + b"".join(entries)
    edited = bytearray(mp4[:at] + struct.pack(">I4s", 8 + len(body), b"elst") + body + mp4[at + size :])
    for parent, parent_size in parents:
        struct.pack_into(">I", edited, parent, parent_size + 8 + len(body) - size)
    return bytes(edited)


@pytest.fixture(scope="module")
def h264() -> bytes:
    return encode_video(options={"bf": "2"})


@pytest.mark.parametrize(
    ("edits", "num_frames"),
    [
        ([(10.5 / 24, 1.0)], 24),
        ([(None, 1.0), (2 / 24, 1.0)], 24),
        ([(2 / 24, 10 / 24), (20 / 24, 10 / 24)], 22),
        ([(2 / 24, 10 / 24), (2 / 24, 10 / 24)], 22),
        ([(24 / 24, 10 / 24), (2 / 24, 10 / 24)], 22),
    ],
    ids=["cut at both ends", "nothing first", "two parts", "a part twice", "parts in another order"],
)
def test_edit_lists(h264, edits, num_frames):
    assert assert_exact(with_edits(h264, edits)).num_frames == num_frames


@pytest.mark.parametrize(
    ("edits", "says"),
    [([(None, 1.0)], "the video has no frames"), ([(100.0, 1.0)], "no frame of the video can be decoded")],
    ids=["nothing at all", "behind the end"],
)
def test_edit_lists_that_show_nothing(h264, edits, says):
    with pytest.raises(MediaError, match=says) as caught:
        analyse(io.BytesIO(with_edits(h264, edits)), LIMITS)
    assert caught.value.status == 422


def box(name: bytes, *content: bytes) -> bytes:
    body = b"".join(content)
    return struct.pack(">I4s", 8 + len(body), name) + body


def full_box(name: bytes, *numbers: int, content: bytes = b"") -> bytes:
    return box(name, struct.pack(f">{1 + len(numbers)}I", 0, *numbers), content)


def in_one_track(*videos: bytes) -> bytes:
    """The videos' packets one after another in one track of an MP4, each with the sample description that it came with."""
    descriptions, packets, num_packets = [], [], []
    for video in videos:
        *_, (at, size) = boxes(video, [b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stsd"])
        descriptions.append(video[at + 16 : at + size])
        with av.open(io.BytesIO(video)) as opened:
            packets += (taken := [(bytes(p), p.is_keyframe) for p in opened.demux(video=0) if p.size])
        num_packets.append(len(taken))
    head = box(b"ftyp", b"isom\0\0\2\0isomavc1")
    count, keys = len(packets), [number for number, (_, is_key) in enumerate(packets, 1) if is_key]
    sizes = [len(data) for data, _ in packets]
    chunks = [len(head) + 8 + sum(sizes[: sum(num_packets[:part])]) for part in range(len(videos))]
    runs = [number for part, of_it in enumerate(num_packets, 1) for number in (part, of_it, part)]
    tables = box(
        b"stbl",
        full_box(b"stsd", len(videos), content=b"".join(descriptions)),
        full_box(b"stts", 1, count, 1),
        full_box(b"stss", len(keys), *keys),
        full_box(b"stsc", len(videos), *runs),
        full_box(b"stsz", 0, count, *sizes),
        full_box(b"stco", len(videos), *chunks),
    )
    data_here = box(b"dinf", full_box(b"dref", 1, content=box(b"url ", b"\0\0\0\1")))
    handler = full_box(b"hdlr", 0, int.from_bytes(b"vide"), 0, 0, 0, content=b"\0")
    media = box(b"mdia", full_box(b"mdhd", 0, 0, 24, count, 0), handler, box(b"minf", full_box(b"vmhd", 0, 0), data_here, tables))
    as_stored = (1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    track = full_box(b"tkhd", 0, 0, 1, 0, count, 0, 0, 0, 0, *as_stored, 96 << 16, 64 << 16)
    movie = full_box(b"mvhd", 0, 0, 24, count, 1 << 16, 1 << 24, 0, 0, *as_stored, 0, 0, 0, 0, 0, 0, 2)
    return head + box(b"mdat", *(data for data, _ in packets)) + box(b"moov", movie, box(b"trak", track, media))


IN_ORDER = {"options": {"bf": "0"}}
X265_CLOSED = "log-level=none:bframes=0:keyint=12:open-gop=0"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (IN_ORDER, {"options": {"bf": "0", "x264-params": "cabac=0:8x8dct=0:ref=1"}}),
        (IN_ORDER, IN_ORDER | {"height": 96, "width": 128}),
        (
            {"codec": "libx265", "options": X265 | {"x265-params": X265_CLOSED}},
            {"codec": "libx265", "options": X265 | {"x265-params": f"{X265_CLOSED}:no-sao=1"}, "height": 96, "width": 128},
        ),
    ],
    ids=["h264", "h264 of two sizes", "hevc of two sizes"],
)
def test_a_track_of_two_sample_descriptions(first, second):
    """Parameter sets of the second come with its first packet alone: no decoder may begin behind it."""
    videos = [encode_video(num_frames=36, **how) for how in (first, second)]
    info = assert_exact(in_one_track(*videos))
    assert info.num_frames == 72 and info.index is None


def with_cover(video: bytes, container: str) -> bytes:
    """The video with a picture attached that is not part of it: as a track of MP4, as an attachment of Matroska."""
    cover, buffer = io.BytesIO(), io.BytesIO()
    Image.fromarray(picture(99, 40, 40)).save(cover, "JPEG")
    with av.open(io.BytesIO(video)) as source, av.open(buffer, "w", format=container) as output:
        if container == "matroska":
            output.add_attachment("cover.jpg", "image/jpeg", cover.getvalue())
        else:
            attached = output.add_stream("mjpeg")
            attached.width = attached.height = 40
            attached.pix_fmt = "yuvj420p"
            attached.disposition = av.stream.Disposition.attached_pic
        stream = output.add_stream_from_template(source.streams.video[0])
        if container == "mp4":
            packet = av.Packet(cover.getvalue())
            packet.stream, packet.pts, packet.dts, packet.is_keyframe = attached, 0, 0, True
            output.mux(packet)
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = stream
                output.mux(packet)
    return buffer.getvalue()


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_a_cover_is_not_the_video(h264, container):
    data = with_cover(h264, container)
    with av.open(io.BytesIO(data)) as opened:
        assert any(stream.disposition & av.stream.Disposition.attached_pic for stream in opened.streams.video)
    info = analyse(io.BytesIO(data), LIMITS)
    assert (info.codec, info.num_frames) == ("h264", 48)
    frames = [frame for _, frame in decode_frames(io.BytesIO(data), info, range(48))]
    assert all(np.array_equal(a, b) for a, b in zip(frames, decode_all(h264), strict=True))


def test_a_transport_stream_that_begins_and_ends_anywhere():
    """What was lost with the first key frame is not there; but for the last two, which are broken, every frame is itself."""
    whole = encode_video(container="mpegts", options={"bf": "2"})
    num_packets = len(whole) // 188
    data = whole[188 * (num_packets // 5) : 188 * (num_packets * 9 // 10)]
    reference = decode_all(data)
    info = analyse(io.BytesIO(data), LIMITS)
    frames = [frame for _, frame in decode_frames(io.BytesIO(data), info, range(info.num_frames))]
    assert 0 < len(reference) == info.num_frames < 48
    assert all(np.array_equal(a, b) for a, b in zip(frames[:-2], reference[:-2], strict=True))


def test_a_size_beyond_the_limit_in_mid_stream():
    small, large = (encode_video(container="mpegts", num_frames=12, height=height) for height in (64, 128))
    limits = MediaLimits(max_frame_pixels=96 * 64)
    info = analyse(io.BytesIO(small + large), limits)
    frames = decode_frames(io.BytesIO(small + large), info, range(info.num_frames), limits)
    with pytest.raises(MediaError, match="video frames of 96x128 exceed the limit of 6144 pixels") as caught:
        list(frames)
    assert caught.value.status == 400


MATRICES = {1: (0.2126, 0.0722), 5: (0.299, 0.114), 9: (0.2627, 0.0593)}  # BT.709, BT.601, BT.2020: red's and blue's part of luma


@pytest.mark.parametrize("pix_fmt", ["yuv420p", "yuv444p", "yuv420p10le"])
@pytest.mark.parametrize("is_full", [False, True], ids=["limited", "full"])
@pytest.mark.parametrize("matrix", MATRICES, ids=["BT.709", "BT.601", "BT.2020"])
def test_colours_are_what_the_tags_say(matrix, is_full, pix_fmt):
    ycbcr = (150, 90, 170)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as output:
        stream = output.add_stream("libx264", rate=24, options={"qp": "0"})
        stream.width = stream.height = 32
        stream.pix_fmt = pix_fmt
        frame = av.VideoFrame(32, 32, pix_fmt)
        for plane, value in zip(frame.planes, ycbcr, strict=True):
            depth = np.uint16 if "10" in pix_fmt else np.uint8
            samples = np.full(plane.buffer_size // np.dtype(depth).itemsize, value * 4 if "10" in pix_fmt else value, depth)
            plane.update(samples.tobytes())
        for tagged in (stream.codec_context, frame):
            tagged.colorspace, tagged.color_range = matrix, 2 if is_full else 1
        output.mux([*stream.encode(frame), *stream.encode(None)])
    info = analyse(io.BytesIO(buffer.getvalue()), LIMITS)
    ((_, rgb),) = decode_frames(io.BytesIO(buffer.getvalue()), info, [0])
    red, blue = MATRICES[matrix]
    y, cb, cr = ycbcr[0] - 16 * (not is_full), ycbcr[1] - 128, ycbcr[2] - 128
    y, cb, cr = (y, cb, cr) if is_full else (y * 255 / 219, cb * 255 / 224, cr * 255 / 224)
    r, b = y + 2 * (1 - red) * cr, y + 2 * (1 - blue) * cb
    expected = np.clip([r, (y - red * r - blue * b) / (1 - red - blue), b], 0, 255)
    assert np.abs(rgb - expected).max() <= 3  # swscale's tables for 4:2:0 are that coarse


def remuxed(video: bytes, container: str) -> bytes:
    buffer = io.BytesIO()
    with av.open(io.BytesIO(video)) as source, av.open(buffer, "w", format=container) as output:
        stream = output.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = stream
                output.mux(packet)
    return buffer.getvalue()


@pytest.mark.parametrize("container", ["mp4", "mpegts"])
def test_hevc_of_several_sub_layers(container):
    """Pictures that no other of their sub-layer refers to, and pictures of a higher one do."""
    layers = "log-level=none:keyint=24:scenecut=0:bframes=3:b-pyramid=1:b-adapt=0:open-gop=0:temporal-layers=3"
    data = encode_video("libx265", options=X265 | {"x265-params": layers})
    changed = bytearray(data)
    with av.open(io.BytesIO(data)) as opened:
        for packet in opened.demux(video=0):
            at = 0
            while at < packet.size:
                first, second = data[packet.pos + at + 4 : packet.pos + at + 6]
                if second == 2:
                    changed[packet.pos + at + 4] = first & ~2
                at += 4 + int.from_bytes(data[packet.pos + at : packet.pos + at + 4])
    assert changed != data
    assert_exact(remuxed(bytes(changed), container))


@pytest.mark.parametrize("pts_of_next", [0, 1])
def test_hidden_frames_of_vp8(pts_of_next):
    """A reference that is made for others is a packet of its own, in WebM with the next one's time stamp."""
    data = bytearray(encode_video("libvpx", "ivf", options={"deadline": "realtime", "cpu-used": "8"}))
    at, hidden = 32, (1, 9, 17, 30)
    for number in range(48):
        size, pts = struct.unpack_from("<IQ", data, at)
        if number in hidden:
            data[at + 12] &= ~0x10
            struct.pack_into("<Q", data, at + 4, pts + pts_of_next)
        at += 12 + size
    assert assert_exact(bytes(data)).num_frames == 44


@pytest.mark.parametrize(("container", "has_index"), [("mpegts", False), ("h264", False), ("mp4", True), ("matroska", True)])
def test_fields_that_are_coded_apart(container, has_index):
    """FFmpeg takes the two fields of a frame for two packets where it takes the stream apart itself."""
    info = assert_exact(field_coded(24, container))
    assert (info.num_frames, info.fps, info.index is not None) == (24, 25.0, has_index)


def test_frames_of_a_high_rate_are_no_fields():
    """Raw H.264 has no time stamps, and from some rate on FFmpeg guesses another."""
    assert assert_exact(encode_video(num_frames=48, container="h264", rate=120)).num_frames == 48


def test_a_repeated_time_stamp_leaves_the_measured_rate():
    times = np.cumsum([600 if i % 8 == 0 else 25 for i in range(24)]).tolist()
    source = encode_video(container="matroska", num_frames=24, times=times, options={"bf": "0"})
    repeated = io.BytesIO()
    with av.open(io.BytesIO(source)) as file, av.open(repeated, "w", format="matroska") as out:
        stream = out.add_stream_from_template(file.streams.video[0])
        packets = [packet for packet in file.demux() if packet.size]
        packets[13].pts = packets[13].dts = packets[12].pts
        for packet in packets:
            packet.stream = stream
            out.mux(packet)
    info = analyse(io.BytesIO(repeated.getvalue()), LIMITS)
    assert info.index is None and info.num_frames == 24
    assert info.fps == pytest.approx(23 / ((times[-1] - times[0]) / 600), rel=0.1)


def test_time_stamps_need_not_be_even(h264):
    """A variable frame rate in which some frames stand for a second: the rate is that of the frames shown."""
    times = np.cumsum([600 if i % 8 == 0 else 25 for i in range(24)]).tolist()
    info = assert_exact(encode_video(num_frames=24, times=times))
    assert info.index is not None and all(a < b for a, b in pairwise(info.index.timeline.tolist()))
    assert info.fps == pytest.approx(23 / ((times[-1] - times[0]) / 600), rel=0.1)
