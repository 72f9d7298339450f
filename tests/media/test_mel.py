"""Log-mel frames against WhisperFeatureExtractor as Qwen2.5-Omni's processor uses it (padded, then masked), bit for bit."""

import functools
from typing import Any

import numpy as np
import pytest

from mmrt.media.mel import LogMel, mel_filters
from mmrt.models.media_config import AudioRules
from mmrt.tests.settings import ImportedLater

transformers: Any = ImportedLater("transformers")
LENGTHS = (1, 2, 159, 160, 161, 400, 799, 1000, 16000, 31840, 32001, 33333)


@functools.cache
def extractor(num_bins: int, seconds: int) -> Any:
    return transformers.WhisperFeatureExtractor(feature_size=num_bins, chunk_length=seconds)


def signal(kind: str, num_samples: int) -> np.ndarray:
    seconds = np.arange(num_samples) / 16000
    signals = {
        "noise": lambda: 0.1 * np.random.default_rng(0).standard_normal(num_samples),
        "chirp": lambda: 0.5 * np.sin(2 * np.pi * (100 + 150 * seconds) * seconds),
        "click at the end": lambda: np.eye(1, num_samples, num_samples - 1)[0],
        "silence": lambda: np.zeros(num_samples),
    }
    return signals[kind]().astype(np.float32)


def reference(waveform: np.ndarray, num_bins: int, seconds: int) -> np.ndarray:
    output = extractor(num_bins, seconds)(
        waveform, sampling_rate=16000, padding="max_length", return_attention_mask=True, return_tensors="np"
    )
    return output["input_features"][0].T[output["attention_mask"][0].astype(bool)]


@pytest.mark.parametrize("kind", ["noise", "chirp", "click at the end", "silence"])
@pytest.mark.parametrize("num_bins", [80, 128])
def test_mel_frames_equal_the_feature_extractor(kind, num_bins):
    rules = AudioRules(num_mel_bins=num_bins, max_s=30)
    log_mel = LogMel(rules)
    for num_samples in LENGTHS:
        waveform = signal(kind, num_samples)
        frames = log_mel(waveform)
        assert frames.dtype == np.float32 and frames.flags.c_contiguous
        assert frames.shape == (rules.num_frames(num_samples), num_bins)
        assert np.array_equal(frames, reference(waveform, num_bins, 30)), num_samples


@pytest.mark.parametrize("missing", [0, 1, 50, 161, 1000])
def test_the_end_of_a_full_clip(missing):
    waveform = signal("noise", 30 * 16000 - missing)
    assert np.array_equal(LogMel(AudioRules(max_s=30))(waveform), reference(waveform, 128, 30))


def test_padding_to_300_s_changes_nothing():
    waveform = signal("chirp", 16000)
    assert np.array_equal(LogMel(AudioRules())(waveform), reference(waveform, 128, 300))


@pytest.mark.parametrize("num_bins", [80, 128])
def test_filters_equal_those_of_transformers(num_bins):
    filters = mel_filters(AudioRules(num_mel_bins=num_bins)).numpy()
    assert np.array_equal(filters, extractor(num_bins, 30).mel_filters.astype(np.float32))


@pytest.mark.parametrize("kind", ["noise", "chirp", "click at the end", "silence"])
def test_a_mirrored_end(kind):
    """As Qwen3-ASR's extractor, which counts the silence that fills up a clip of less than half a second."""
    rules = AudioRules(max_s=0, min_samples=8000, has_mirrored_end=True)
    log_mel, theirs = LogMel(rules), transformers.Qwen3ASRFeatureExtractor()
    for num_samples in (1, 159, 7999, 8000, 8001, 8159, 8160, 31840, 32001, 33333, 40 * 16000 + 77):
        waveform = signal(kind, num_samples)
        output = theirs(waveform, sampling_rate=16000, padding=True, return_attention_mask=True, return_tensors="np")
        expected = output["input_features"][0].T[output["attention_mask"][0].astype(bool)]
        assert len(expected) == rules.num_frames(num_samples) >= 50
        assert np.array_equal(log_mel(waveform), expected), num_samples


@pytest.mark.parametrize("kind", ["noise", "click at the end", "silence"])
def test_silence_behind_a_clip(kind):
    """Frames of it, as far as the extractor pads."""
    log_mel = LogMel(AudioRules(max_s=30, silent_frames=2))
    for num_samples in (1, 160, 31840, 33333, 30 * 16000 - 161, 30 * 16000 - 7, 30 * 16000):
        waveform = signal(kind, num_samples)
        output = extractor(128, 30)(waveform, sampling_rate=16000, padding="max_length", return_tensors="np")
        expected = output["input_features"][0].T[: -(-num_samples // 160) + 2]
        assert np.array_equal(log_mel(waveform), expected), num_samples
