"""Sound files to mono waveforms: rates, channels, codecs, and files that hold no sound."""

import io
import math
import wave
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import av
import numpy as np
import pytest
from PIL import Image

from mmrt.media.audio import _stretches, decode_audio, decode_sound_track
from mmrt.media.errors import MediaError
from mmrt.media.limits import MediaLimits
from mmrt.tests.media.conftest import encode_film

LIMITS = MediaLimits()
RATE = 16000


def decoded(data: bytes, limits: MediaLimits = LIMITS) -> np.ndarray:
    waveform = decode_audio(io.BytesIO(data), RATE, limits)
    assert waveform.dtype == np.float32 and waveform.ndim == 1
    return waveform


def tone(rate: int, seconds: float = 1.0, amplitudes: tuple[float, ...] = (0.5,)) -> np.ndarray:
    phase = 2 * np.pi * 440 * np.arange(int(rate * seconds)) / rate
    return np.stack([amplitude * np.sin(phase) for amplitude in amplitudes])


def test_wav_of_the_models_rate_is_exact(make_audio):
    samples = np.random.default_rng(0).integers(-32768, 32768, (1, 5001)) / 32768
    assert np.array_equal(decoded(make_audio(samples)), samples[0].astype(np.float32))


def test_stereo_is_the_mean_of_its_channels(make_audio):
    samples = np.random.default_rng(0).integers(-32768, 32768, (2, 5001)) / 32768
    assert np.array_equal(decoded(make_audio(samples)), samples.astype(np.float32).mean(axis=0))


@pytest.mark.parametrize(
    ("rate", "codec", "container", "format", "channels"),
    [
        (8000, "pcm_u8", "wav", "u8", 1),
        (48000, "pcm_f32le", "wav", "flt", 2),
        (96000, "pcm_s24le", "wav", "s32", 6),
        (44100, "flac", "flac", "s16", 1),
        (44100, "flac", "flac", "s16", 6),
        (48000, "libopus", "ogg", "flt", 1),
        (48000, "libopus", "webm", "flt", 2),
        (44100, "libmp3lame", "mp3", "fltp", 1),
        (44100, "libmp3lame", "mp3", "fltp", 2),
        (44100, "aac", "mp4", "fltp", 2),
        (48000, "aac", "adts", "fltp", 1),
        (48000, "aac", "mpegts", "fltp", 2),
        (48000, "flac", "flac", "s32", 8),
        (48000, "libopus", "ogg", "flt", 8),
        (48000, "pcm_s16le", "mov", "s16", 8),
        (44100, "alac", "mp4", "s16p", 2),
        (192000, "pcm_f64le", "wav", "dbl", 1),
        (44100, "pcm_s16be", "aiff", "s16", 2),
        (44100, "pcm_s24be", "aiff", "s32", 1),
        (44100, "pcm_s16le", "caf", "s16", 2),
        (48000, "ac3", "ac3", "fltp", 2),
        (48000, "eac3", "eac3", "fltp", 2),
        (44100, "adpcm_ima_wav", "wav", "s16p", 2),
        (44100, "adpcm_ms", "wav", "s16p", 2),
        (44100, "adpcm_ima_qt", "mov", "s16p", 2),
    ],
)
def test_rates_codecs_and_channels(make_audio, rate, codec, container, format, channels):
    amplitudes = tuple(0.6 - 0.1 * channel for channel in range(channels))
    waveform = decoded(make_audio(tone(rate, amplitudes=amplitudes), rate, codec, container, format))
    assert len(waveform) == pytest.approx(RATE, abs=1100)  # AAC pads to whole frames
    middle = waveform[4000:12000]
    assert np.sqrt(2 * (middle**2).mean()) == pytest.approx(np.mean(amplitudes), rel=0.06)
    spectrum = np.abs(np.fft.rfft(middle))
    assert spectrum.argmax() == 220  # 440 Hz in half a second


@pytest.mark.parametrize("channels", [3, 8, 12])
def test_unusual_channel_counts(channels):
    """PyAV crashes on planar frames of eight channels and more."""
    samples = np.random.default_rng(0).integers(-9000, 9000, (5000, channels)).astype("<i2")
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((channels, 2, RATE, 0, "NONE", ""))
        file.writeframes(samples.tobytes())
    assert np.array_equal(decoded(buffer.getvalue()), (samples / np.float32(32768)).mean(axis=1, dtype=np.float32))


@pytest.mark.parametrize(("channels", "rate", "says"), [(17, 16000, "17 channels exceeds the limit of 16"), (1, 10**9, "Hz is")])
def test_wild_channel_counts_and_rates(channels, rate, says):
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((channels, 1, rate, 0, "NONE", ""))
        file.writeframes(bytes(1700))
    with pytest.raises(MediaError, match=says) as caught:
        decoded(buffer.getvalue())
    assert caught.value.status == 400


def test_planar_frames_of_eight_channels(make_audio):
    """PyAV crashes when it is asked for their planes. The fourth channel is low frequencies alone: the tone is not in it."""
    amplitudes = tuple(0.6 - 0.05 * channel for channel in range(8))
    middle = decoded(make_audio(tone(48000, amplitudes=amplitudes), 48000, "aac", "mp4", "fltp"))[4000:12000]
    assert np.sqrt(2 * (middle**2).mean()) == pytest.approx((sum(amplitudes) - amplitudes[3]) / 8, rel=0.02)


@pytest.mark.parametrize(
    ("codec", "container", "format", "says"),
    [
        ("pcm_s16be", "au", "s16", "this is an AU audio file, which is not supported"),
        ("wavpack", "wv", "s16p", "this is a WavPack audio file, which is not supported"),
        ("tta", "tta", "s16", "this is a TTA audio file, which is not supported"),
        ("adpcm_yamaha", "wav", "s16p", "the audio codec adpcm_yamaha is not supported"),
    ],
)
def test_other_formats_and_codecs_are_refused_by_name(make_audio, codec, container, format, says):
    with pytest.raises(MediaError, match=f"{says} .supported: WAV, AIFF, CAF, MP3") as caught:
        decoded(make_audio(tone(44100), 44100, codec, container, format))
    assert caught.value.status == 422


def test_silence_is_sound(make_audio):
    assert not decoded(make_audio(np.zeros((1, 4000)))).any()


def test_a_single_sample(make_audio):
    assert len(decoded(make_audio(np.full((1, 1), 0.25)))) == 1


def test_no_samples():
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
    with pytest.raises(MediaError, match="no samples") as caught:
        decoded(buffer.getvalue())
    assert caught.value.status == 422


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e9])
def test_values_that_are_no_samples(make_audio, value):
    samples = tone(RATE)
    samples[0, 100] = value
    with pytest.raises(MediaError, match="not numbers, or out of range"):
        decoded(make_audio(samples, codec="pcm_f32le", format="flt"))


def test_a_bomb_is_stopped_while_it_is_decoded(make_audio):
    """Two minutes of silence are 8 kB of Opus; no more than the limit is ever decoded."""
    data = make_audio(np.zeros((1, 48000 * 120)), 48000, "libopus", "ogg", "flt")
    assert len(data) < 60_000
    with pytest.raises(MediaError, match="longer than the limit of 30 s") as caught:
        decoded(data, MediaLimits(max_audio_s=30))
    assert caught.value.status == 400


def test_a_sound_as_long_as_the_limit(make_audio):
    """The lengths of its frames in seconds add up to a little more."""
    data = make_audio(np.zeros((1, RATE * 30 + 1)), RATE, "pcm_s16le", "wav", "s16")
    with pytest.raises(MediaError, match="longer than the limit of 30 s"):
        decoded(data, MediaLimits(max_audio_s=30))
    data = make_audio(np.zeros((1, RATE * 30)), RATE, "pcm_s16le", "wav", "s16")
    assert len(decoded(data, MediaLimits(max_audio_s=30))) == RATE * 30


def test_the_sound_of_a_video_can_be_heard(make_video):
    assert len(decoded(make_video(audio=True))) >= 16000


def sound_track(data: bytes, limits: MediaLimits = LIMITS) -> np.ndarray:
    waveform = decode_sound_track(io.BytesIO(data), RATE, limits)
    assert waveform.dtype == np.float32 and waveform.ndim == 1
    return waveform


NOISE = np.random.default_rng(0).integers(-32768, 32768, 2 * RATE).astype(np.float32) / 32768


@pytest.mark.parametrize("container", ["mov", "matroska"])
@pytest.mark.parametrize(("picture_s", "sound_s"), [(0, 0), (0, 0.5), (0.5, 0), (0.3, 1.1), (1.2, 0.2), (2, 2)])
def test_a_sound_track_begins_with_the_pictures(container, picture_s, sound_s):
    """Sound before the first picture is cut off, and silence stands where there is none yet."""
    late = round((sound_s - picture_s) * RATE)
    waveform = sound_track(encode_film(NOISE, "pcm_s16le", container, picture_s, sound_s))
    assert np.array_equal(waveform, np.concatenate((np.zeros(max(0, late), np.float32), NOISE[max(0, -late) :])))


@pytest.mark.parametrize("sound_s", [0, 0.5, -0.7])
def test_silence_fills_the_gaps_of_a_sound_track(sound_s):
    """Two gaps; and one too small to be one, of which many add up. The first stretch may be over before the pictures begin."""
    small = {1.28 + 0.064 * k: 0.04 for k in range(1, 4)}
    data = encode_film(NOISE, "pcm_s16le", "matroska", max(0.0, -sound_s), max(0.0, sound_s), gaps={0.64: 0.5, 1.28: 1.25, **small})
    a, b, c = (round(RATE * at_s) for at_s in (0.64, 1.28, 1.28 + 3 * 0.064))
    silent = np.zeros(4 * RATE, np.float32)
    parts = (NOISE[:a], silent[: RATE // 2], NOISE[a:b], silent[: RATE * 5 // 4], NOISE[b:c], silent[: round(RATE * 0.12)], NOISE[c:])
    whole = np.concatenate(parts)
    late = round(RATE * sound_s)
    assert np.array_equal(sound_track(data), np.concatenate((silent[: max(0, late)], whole[max(0, -late) :])))
    assert np.array_equal(decoded(data), NOISE), "a sound of its own has no pictures to keep up with"


@pytest.mark.parametrize(("codec", "container"), [("aac", "mp4"), ("aac", "mpegts"), ("libopus", "matroska")])
def test_sound_behind_a_gap_is_where_ffmpeg_has_it(codec, container):
    """FFmpeg's own filter that keeps sound in time, on what is decoded; its time begins with the sound."""
    samples = np.concatenate((np.zeros(48000), tone(48000)[0])).astype(np.float32)
    data = encode_film(samples, codec, container, 0.0, 0.0, 48000, gaps={0.5: 2.0})
    heard = sound_track(data)
    with av.open(io.BytesIO(data)) as file:
        picture_s, sound_s = (float(stream.start_time * stream.time_base) for stream in (file.streams.video[0], file.streams.audio[0]))
        graph = av.filter.Graph()
        nodes = (
            graph.add_abuffer(template=file.streams.audio[0]),
            graph.add("aresample", "16000:async=1"),
            graph.add("abuffersink"),
        )
        graph.link_nodes(*nodes).configure()
        for frame in file.decode(audio=0):
            graph.push(frame)
        graph.push(None)
        expected = np.concatenate([frame.to_ndarray()[0] for frame in drained(graph)])
    assert len(heard) == pytest.approx(len(expected), abs=0.05 * RATE)
    begins_s, expected_s = (np.argmax(np.abs(waveform) > 0.25) / RATE for waveform in (heard, expected))
    assert begins_s == pytest.approx(expected_s + sound_s - picture_s, abs=0.005)
    assert begins_s == pytest.approx(3, abs=0.05)


class Frame(NamedTuple):
    """As much of PyAV's as times need."""

    time: float | None
    samples: int = RATE // 2
    sample_rate: int = RATE


@pytest.mark.parametrize(
    ("times", "stretches"),
    [
        ([1.0, 1.5, 2.0], [(1.0, 3)]),
        ([1.0, 1.56, 2.12], [(1.0, 2), (2.12, 1)]),
        ([1.0, 1.5, 3.0, 3.5], [(1.0, 2), (3.0, 2)]),
        ([5.0, 0.0, 0.5, 6.7], [(5.0, 3), (6.7, 1)]),
        ([None, None, 1.0, None, 2.0], [(None, 2), (1.0, 3)]),
        ([math.nan, 0.5], [(None, 1), (0.5, 1)]),
        ([math.nan, math.nan], [(None, 2)]),
        ([], []),
    ],
    ids=["no gap", "small gaps add up", "a gap", "backward", "some unknown", "no time base", "none known", "nothing"],
)
def test_where_sound_has_gaps(times, stretches):
    assert [(start, len([*frames])) for start, frames in _stretches(map(Frame, times))] == stretches


def drained(graph: Any) -> Iterator[Any]:
    with suppress(av.BlockingIOError, av.EOFError):
        while True:
            yield graph.pull()


def test_a_broken_packet_leaves_the_sound_behind_it_in_time():
    data = encode_film(np.concatenate((NOISE, NOISE)), "flac", "matroska")
    with av.open(io.BytesIO(data)) as container:
        packets = [packet for packet in container.demux(audio=0) if packet.size]
    expected = sound_track(data)
    expected[2 * 1152 : 4 * 1152] = 0  # 144 ms
    for packet in packets[2:4]:
        data = data.replace(bytes(packet), bytes(packet.size))
    assert np.array_equal(sound_track(data), expected)


@pytest.mark.parametrize(("codec", "container"), [("aac", "mp4"), ("aac", "mpegts"), ("libopus", "matroska"), ("aac", "matroska")])
@pytest.mark.parametrize("sound_s", [0, 0.5])
def test_the_delay_of_a_codec_shifts_no_sound(codec, container, sound_s):
    """Half a second of silence, then a tone: where it begins is where it stood when it was encoded."""
    samples = np.concatenate((np.zeros(24000), tone(48000)[0])).astype(np.float32)
    waveform = sound_track(encode_film(samples, codec, container, 0.0, sound_s, 48000))
    loud = np.abs(waveform) > 0.25
    assert np.argmax(loud) / RATE == pytest.approx(0.5 + sound_s, abs=0.005)


@pytest.mark.parametrize("container", ["mp4", "WEBP", "GIF"])
def test_a_video_without_sound(make_video, make_picture, container):
    buffer = io.BytesIO(make_video() if container == "mp4" else b"")
    if container != "mp4":
        first, *others = [Image.fromarray(make_picture(number, 64, 96)) for number in range(3)]
        first.save(buffer, container, save_all=True, append_images=others, duration=200)
    with pytest.raises(MediaError, match="the video has no sound track") as caught:
        sound_track(buffer.getvalue())
    assert caught.value.status == 422


@pytest.mark.parametrize(("sound_s", "gap_s", "limit_s"), [(0, 0, 1.5), (1.9, 0, 3.5), (3.0, 0, 2.5), (0, 1, 2.5), (0, 100_000, 600)])
def test_a_sound_track_that_is_too_long(sound_s, gap_s, limit_s):
    """Silence in front of it and within it counts, too, before any is made."""
    data = encode_film(NOISE, "pcm_s16le", "matroska", 0.0, sound_s, gaps={1.0: gap_s})
    with pytest.raises(MediaError, match=f"the sound track is longer than the limit of {limit_s} s") as caught:
        sound_track(data, MediaLimits(max_audio_s=limit_s))
    assert caught.value.status == 400


def test_a_sound_track_that_ends_before_the_pictures_begin():
    with pytest.raises(MediaError, match="the sound track has no samples"):
        sound_track(encode_film(NOISE, "pcm_s16le", "matroska", 3.0, 0.0))
