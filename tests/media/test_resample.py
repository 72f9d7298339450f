"""Sound at other rates: nothing folds down from above half the rate, nothing below is lost, and soxr, as librosa calls it, agrees."""

import io
import math
from collections.abc import Callable

import numpy as np
import pytest

from mmrt.media.audio import decode_audio
from mmrt.media.limits import MediaLimits
from mmrt.media.mel import LogMel
from mmrt.media.resample import resampled
from mmrt.models.media_config import AudioRules

RATE = 16000
DOWN = (22050, 32000, 44100, 47999, 48000, 96000, 192000)
UP = (1000, 8000, 11025, 15000)
KEPT = 0.456  # of the lower rate: up to here
EDGE_HZ = KEPT * RATE


def decibels(signal: np.ndarray, reference: np.ndarray) -> float:
    return 10 * math.log10(max(float((signal.astype(np.float64) ** 2).mean() / (reference.astype(np.float64) ** 2).mean()), 1e-30))


def tone(rate: int, hz: float, seconds: float = 0.5) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hz * np.arange(int(rate * seconds)) / rate)).astype(np.float32)


def whole(samples: np.ndarray, rate: int, size: int = 1024) -> np.ndarray:
    return resampled((samples[start : start + size] for start in range(0, len(samples), size)), rate, RATE)


def noise(rate: int, below_hz: float, seconds: float = 2.0) -> np.ndarray:
    """Pink noise without anything at and above a frequency."""
    spectrum = np.fft.rfft(np.random.default_rng(0).standard_normal(int(rate * seconds)))
    hz = np.fft.rfftfreq(int(rate * seconds), 1 / rate)
    pink = np.fft.irfft(spectrum * (hz < below_hz) / np.sqrt(np.maximum(hz, 20)), int(rate * seconds))
    return (0.3 * pink / np.abs(pink).max()).astype(np.float32)


@pytest.mark.parametrize("rate", DOWN)
def test_nothing_folds_down(rate):
    """Tones above half the rate, from where the filter stops on."""
    for hz in (8001, 8050, 8200, 8500, 9000, 10000, 10900, 12000, 16100, 20000, 31000, 64100, 95000):
        if hz < rate / 2:
            heard = whole(tone(rate, hz), rate)[1000:-1000]
            assert decibels(heard, tone(rate, hz)) < -80, hz


@pytest.mark.parametrize("rate", UP)
def test_nothing_is_mirrored_upwards(rate):
    """What stands above half the rate, of noise that reaches up to it."""
    heard = np.fft.rfft(whole(noise(rate, rate / 2, 4.0), rate) * np.hanning(4 * RATE))
    assert decibels(np.abs(heard[2 * rate + 20 :]), np.abs(heard[: 2 * rate])) < -80


@pytest.mark.parametrize("rate", [*UP, *DOWN])
def test_what_lies_below_stays_as_it_is(rate):
    """In size and in time."""
    for hz in KEPT * min(rate, RATE) * np.array([0.01, 0.2, 0.9, 1.0]):
        heard, expected = whole(tone(rate, hz), rate), tone(RATE, hz)
        assert decibels((heard - expected)[2000:-2000], expected) < -70, hz


def test_a_file_of_48_khz_is_filtered(make_audio):
    """Tones at 8 to 9 kHz in stereo."""
    samples = sum(tone(48000, hz, 1.0) for hz in np.arange(8050, 9000, 100)) / 10
    heard = decode_audio(io.BytesIO(make_audio(np.stack([samples, samples]), 48000, "pcm_f32le", "wav", "flt")), RATE, MediaLimits())
    assert decibels(heard[1000:-1000], samples) < -80


@pytest.mark.many
@pytest.mark.parametrize("rate", [*UP, *DOWN, 100_003])
@pytest.mark.parametrize("num_samples", [0, 1, 2, 7, 100, 1023, 1024, 5000, 10_007])
def test_pieces_come_to_the_same_as_the_whole(rate, num_samples):
    samples = np.random.default_rng(1).standard_normal(num_samples).astype(np.float32)
    heard = whole(samples, rate, 1 << 20)
    assert heard.dtype == np.float32 and len(heard) == -(-num_samples * RATE // rate)
    for size in (313, 1024):
        assert np.array_equal(whole(samples, rate, size), heard)


def test_the_models_own_rate_is_left_alone():
    samples = noise(RATE, 8000)
    assert np.array_equal(whole(samples, RATE), samples)


@pytest.fixture
def librosa_resample() -> Callable[[np.ndarray, int], np.ndarray]:
    """What ``librosa.resample`` does by default: soxr_hq, and as many samples as the length asks for."""
    soxr = pytest.importorskip("soxr", reason="soxr comes with the test extra")

    def resample(samples: np.ndarray, rate: int) -> np.ndarray:
        num = math.ceil(len(samples) * RATE / rate)
        heard = soxr.resample(samples, rate, RATE, quality="soxr_hq")[:num]
        return np.pad(heard, (0, num - len(heard)))

    return resample


@pytest.mark.parametrize("rate", [8000, 11025, *DOWN])
def test_soxr_hears_the_same(librosa_resample, rate):
    """Of what both keep, and of it in sound that has more."""
    edge_hz = KEPT * min(rate, RATE)
    samples = noise(rate, edge_hz)
    difference = whole(samples, rate) - librosa_resample(samples, rate)
    assert rate < RATE or decibels(difference, samples) < -75, "from the first sample to the last"
    assert decibels(difference[1000:-1000], samples) < -80
    samples = noise(rate, rate / 2)
    sounds = whole(samples, rate), librosa_resample(samples, rate)
    heard, expected = (np.fft.rfft(sound * np.hanning(len(sound)))[: int(edge_hz * 2)] for sound in sounds)
    assert decibels(np.abs(heard - expected), np.abs(expected)) < -75


@pytest.mark.parametrize("rate", [8000, 44100, 48000])
def test_mel_frames_are_those_of_librosas_path(librosa_resample, rate):
    """The bins at the very top of what the file holds lie where the filters fall off."""
    log_mel = LogMel(AudioRules())
    samples = noise(rate, rate / 2)
    ours, theirs = (log_mel(sound) for sound in (whole(samples, rate), librosa_resample(samples, rate)))
    difference = np.abs(ours - theirs)
    assert difference.mean() < 2e-3 and difference.max() < 0.6
    assert rate < RATE or difference[:, :-4].max() < 0.01
