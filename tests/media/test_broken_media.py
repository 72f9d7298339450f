"""Files that are broken, hostile or of the wrong kind: a MediaError that says so and gives nothing away, never anything else."""

import io
import re
import struct
import zlib
from contextlib import closing
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from mmrt.media.audio import decode_audio
from mmrt.media.container import open_container
from mmrt.media.errors import MediaError, MediaMemoryError
from mmrt.media.image import decode_image
from mmrt.media.limits import GuardedReader, MediaLimits, TimeBudget
from mmrt.media.video import decode_frames
from mmrt.media.video_info import analyse
from mmrt.tests.settings import examples

LIMITS = MediaLimits()


def decode(kind: str, data: bytes, limits: MediaLimits = LIMITS, budget: TimeBudget | None = None) -> list[np.ndarray]:
    """Everything that the video actor does with the bytes of an item."""
    budget = budget or TimeBudget(60)
    reader = io.BytesIO(data)
    if kind == "image":
        return [decode_image(reader, limits, budget)]
    if kind == "audio":
        return [decode_audio(reader, 16000, limits, budget)]
    info = analyse(reader, limits, budget)
    return [frame for _, frame in decode_frames(reader, info, range(0, info.num_frames, 4), limits, budget)]


def refusal(kind: str, data: bytes, limits: MediaLimits = LIMITS, budget: TimeBudget | None = None) -> MediaError:
    with pytest.raises(MediaError) as caught:
        decode(kind, data, limits, budget)
    assert not re.search(r"0x[0-9a-f]{4}|/\w+/|Traceback|<.*>", caught.value.message), caught.value.message
    return caught.value


def image_file(picture: np.ndarray, format: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, format, **options)
    return buffer.getvalue()


def with_scans(jpeg: bytes, num_scans: int) -> bytes:
    """A JPEG with its first scan header so many times."""
    start = jpeg.index(b"\xff\xda")
    length = 2 + int.from_bytes(jpeg[start + 2 : start + 4], "big")
    return jpeg[:start] + jpeg[start : start + length] * (num_scans - 1) + jpeg[start:]


def motion_jpeg(jpeg: bytes, height: int, width: int) -> bytes:
    """An AVI of one picture."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="avi") as output:
        stream = output.add_stream("mjpeg", rate=1)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuvj420p"
        packet = av.Packet(jpeg)
        packet.stream, packet.pts, packet.dts, packet.is_keyframe = stream, 0, 0, True
        output.mux(packet)
    return buffer.getvalue()


def many_tracks(count: int) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        streams = [output.add_stream("aac", rate=16000, layout="mono") for _ in range(count)]
        for stream in streams:
            samples = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            samples.sample_rate = 16000
            output.mux([*stream.encode(samples), *stream.encode(None)])
    return buffer.getvalue()


@pytest.fixture(scope="module")
def files(make_video, make_audio, make_picture) -> dict[str, bytes]:
    picture = make_picture(0, 48, 64)
    scans = with_scans(image_file(picture, "JPEG", progressive=True), 92)
    tone = 0.3 * np.sin(np.arange(16000) / 20)[None]
    return {
        "video": make_video(options={"bf": "2"}),
        "webm": make_video("libvpx", "webm", num_frames=12),
        "image": image_file(picture),
        "jpeg": image_file(picture, "JPEG"),
        "gif": image_file(picture, "GIF"),
        "webp": image_file(picture, "WEBP"),
        "animated webp": image_file(picture, "WEBP", save_all=True, append_images=[Image.new("RGB", (64, 48))]),
        "scans": scans,
        "scans in AVI": motion_jpeg(scans, 48, 64),
        "audio": make_audio(tone),
        "mp3": make_audio(tone, 44100, "libmp3lame", "mp3", "fltp"),
        "sound in mp4": make_audio(tone, 48000, "aac", "mp4", "fltp"),
        "video with sound": make_video(num_frames=12, audio=True),
        "70 tracks": many_tracks(70),
        "text": b"Once upon a time\n" * 20,
        "noise": np.random.default_rng(1).bytes(5000),
        "empty": b"",
    }


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        ("video", "image", "a PNG image, not a video: send it as image_url"),
        ("video", "jpeg", "a JPEG image, not a video"),
        ("video", "webp", "a WebP image, not a video: send it as image_url"),
        ("video", "audio", "a WAV audio file, not a video: send it as input_audio"),
        ("video", "sound in mp4", "holds no video stream; it holds sound"),
        ("video", "text", "this is text, not a video"),
        ("video", "noise", "not a video that can be read"),
        ("video", "empty", "empty"),
        ("image", "video", "an MP4 video, not an image: send it as video_url"),
        ("image", "webm", "WebM video, not an image"),
        ("image", "audio", "a WAV audio file, not an image: send it as input_audio"),
        ("image", "text", "this is text, not an image"),
        ("image", "noise", "not an image that can be read"),
        ("image", "empty", "empty"),
        ("audio", "image", "a PNG image, not an audio"),
        ("audio", "webm", "holds no audio stream"),
        ("audio", "video", "holds no audio stream"),
        ("audio", "text", "this is text"),
        ("audio", "empty", "empty"),
    ],
)
def test_wrong_kinds_are_named(files, kind, name, says):
    error = refusal(kind, files[name])
    assert says in error.message
    assert error.status == 422


@pytest.mark.parametrize("kind", ["video", "audio", "image"])
@pytest.mark.parametrize("header", ["ffconcat version 1.0\n", "#EXTM3U\n#EXTINF:1,\n"])
def test_playlists_open_no_other_file(files, tmp_path: Path, kind, header):
    secret = tmp_path / "secret.mp4"
    secret.write_bytes(files["video"])
    line = f"file '{secret}'\n" if header.startswith("ff") else f"{secret}\n#EXT-X-ENDLIST\n"
    refusal(kind, f"{header}{line}".encode())


def test_a_codec_that_is_not_on_the_list_is_not_even_tried(make_video):
    """FFmpeg decodes a frame of any stream of which the container does not say enough."""
    data = make_video("huffyuv", "avi", num_frames=2, pix_fmt="yuv422p")
    with av.open(io.BytesIO(data)) as container:
        assert container.streams.video[0].codec_context.pix_fmt == "yuv422p", "FFmpeg would"
    with closing(open_container(io.BytesIO(data), "video", LIMITS, TimeBudget(60))) as container:
        assert container.streams.video[0].codec_context.pix_fmt is None
    assert "the video codec huffyuv is not supported" in refusal("video", data).message


def test_a_cover_picture_is_no_video(files):
    """An MP3 with attached picture: sound only."""
    cover = files["jpeg"]
    text = b"APIC"
    body = b"\x00image/jpeg\x00\x03\x00" + cover
    frame = text + len(body).to_bytes(4, "big") + b"\0\0" + body
    size = bytes((len(frame) >> shift) & 0x7F for shift in (21, 14, 7, 0))
    data = b"ID3\x03\0\0" + size + frame + files["mp3"]
    with av.open(io.BytesIO(data)) as container:
        assert container.streams.video, "the fixture has a cover"
    assert len(decode("audio", data)[0]) == pytest.approx(16000 * 16000 / 44100, abs=2)
    refusal("video", data)


@pytest.mark.parametrize(
    ("kind", "name"), [("image", "image"), ("image", "jpeg"), ("video", "video"), ("video", "webm"), ("audio", "sound in mp4")]
)
@pytest.mark.parametrize("part", [0.02, 0.3, 0.7, 0.9])
def test_cut_off_files(files, kind, name, part):
    """An image must be whole, and so must an MP4 with its index at the end; of other files what is there is used."""
    data = files[name][: int(part * len(files[name]))]
    if name != "webm" or part < 0.5:
        assert refusal(kind, data).status == 422
    else:
        assert decode(kind, data)


@given(data=st.data())
@settings(max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_flipped_bytes_never_raise_anything_else(files, data):
    kind, name = data.draw(
        st.sampled_from(
            [("video", "video"), ("video", "webm"), ("video", "animated webp"), ("image", "image"), ("image", "jpeg"), ("image", "gif")]
            + [("audio", "audio"), ("audio", "mp3"), ("audio", "sound in mp4")]
        )
    )
    broken = bytearray(files[name])
    for position in data.draw(st.lists(st.integers(0, len(broken) - 1), min_size=1, max_size=12)):
        broken[position] = data.draw(st.integers(0, 255))
    try:
        results = decode(kind, bytes(broken))
    except MediaError:
        return
    assert all(np.isfinite(result).all() for result in results)


def test_a_video_with_broken_packets_keeps_its_timeline(files, decode_sequentially):
    """Frames that cannot be decoded are replaced; the others stay where they are."""
    data = bytearray(files["video"])
    start = data.index(b"mdat") + 4
    for position in range(start + 2000, start + 4000, 40):
        data[position] ^= 0xFF
    info = analyse(io.BytesIO(data), LIMITS)
    frames = [frame for _, frame in decode_frames(io.BytesIO(data), info, range(info.num_frames))]
    assert len(frames) == info.num_frames == 48
    assert np.array_equal(frames[0], decode_sequentially(files["video"])[0])


@pytest.mark.parametrize(
    ("kind", "name", "limits", "says"),
    [
        ("video", "video", MediaLimits(max_frame_pixels=64 * 96 - 1), "96x64 exceed the limit of 6143 pixels"),
        ("video", "video", MediaLimits(max_video_s=1.5), "2.0 s, longer than the limit of 1.5 s"),
        ("video", "video", MediaLimits(max_packets=47), "more than 47 packets"),
        ("video", "video", MediaLimits(max_aspect=1.2), "aspect ratio limit of 1.2:1"),
        ("image", "image", MediaLimits(max_pixels=3071), "64x48 exceeds the limit of 3071 pixels"),
        ("image", "image", MediaLimits(max_aspect=1.2), "aspect ratio limit of 1.2:1"),
        ("image", "scans", MediaLimits(), "101 scans exceeds the limit of 100"),
        ("video", "scans in AVI", MediaLimits(), "101 scans exceeds the limit of 100"),
        ("audio", "audio", MediaLimits(max_audio_s=0.9), "longer than the limit of 0.9 s"),
        ("audio", "mp3", MediaLimits(max_packets=3), "more than 3 packets"),
        ("audio", "video with sound", MediaLimits(max_audio_s=0.9), "longer than the limit of 0.9 s"),
        ("audio", "video with sound", MediaLimits(max_packets=9), "more than 9 packets"),
        ("audio", "70 tracks", MediaLimits(), "70 streams exceeds the limit of 64"),
        ("video", "70 tracks", MediaLimits(), "70 streams exceeds the limit of 64"),
    ],
)
def test_limits_name_the_value(files, kind, name, limits, says):
    error = refusal(kind, files[name], limits)
    assert says in error.message
    assert error.status == 400


class CountingReader(io.BytesIO):
    num_read = 0

    def read(self, size=-1, /):
        data = super().read(size)
        self.num_read += len(data)
        return data


def test_an_animation_of_very_many_frames_is_refused_when_the_limit_is_passed():
    """FFmpeg skims over the whole file when it opens it; its frames are read up to the limit."""
    head = b"GIF89a" + 2 * b"\x10\0" + b"\x80\0\0" + b"\0\0\0\xff\xff\xff"
    frame = b"\x21\xf9\x04\0\x0a\0\0\0" + b"\x2c\0\0\0\0\x01\0\x01\0\0" + b"\x02\x02\x44\x01\0"
    reader = CountingReader(head + 1_000_000 * frame + b";")
    with pytest.raises(MediaError, match="the animation has more than 36000 frames") as caught:
        analyse(reader, LIMITS)
    assert caught.value.status == 400
    assert reader.num_read < reader.getbuffer().nbytes + 2 * 36_000 * len(frame)


@pytest.mark.parametrize(("kind", "name"), [("video", "video"), ("image", "jpeg"), ("audio", "mp3")])
def test_the_time_budget_ends_any_decoding(files, kind, name):
    seconds = iter(range(1_000_000))
    budget = TimeBudget(1.5, clock=lambda: next(seconds))
    with budget.running():
        error = refusal(kind, files[name], budget=budget)
    assert "limit of 1.5 s" in error.message
    assert error.status == 400


def test_a_reader_that_goes_round_in_circles_is_stopped():
    reader = GuardedReader(io.BytesIO(bytes(1 << 16)), TimeBudget(60))
    with pytest.raises(MediaError, match="back and forth"):
        while True:
            reader.seek(0)
            reader.read(1 << 16)


def test_a_pixel_bomb_is_refused_before_it_is_decoded():
    """32768² pixels of one colour are a few kilobytes of PNG."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", 32768, 32768, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    error = refusal("image", data)
    assert "pixels" in error.message
    assert error.status == 400


def test_a_decoder_without_memory_says_so(files, monkeypatch):
    """It is not taken for broken data: whether the medium or the process is to blame is for the actor to say."""

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(av, "open", fail)
        assert isinstance(refusal("video", files["video"]), MediaMemoryError)
        assert isinstance(refusal("audio", files["audio"]), MemoryError)
    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, "convert", fail)
        assert isinstance(refusal("image", files["gif"]), MediaMemoryError)
