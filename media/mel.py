"""The log-mel spectrogram of Whisper-style audio towers in torch, bit-equal to transformers' WhisperFeatureExtractor, and to its
Qwen3ASRFeatureExtractor, which mirrors a clip's end in place of padding it.

Values are clamped to the clip's own maximum less 8, so the spectrogram is made of the whole clip at once and segments are slices
of it. Qwen2.5-Omni's processor pads every clip with silence to its full length (``max_s``) and masks what is padded; the model
sees ceil(samples / hop) frames. Only the silence that those frames' windows reach is made here, which gives the same numbers.

torchaudio is not used, even on a GPU install: its spectrum is the same ``torch.stft``, bit for bit, and its mel filters are
float32, which puts the result up to 3e-4 off.
"""

import numpy as np
import numpy.typing as npt
import torch

from .htk_mel import HtkMel
from .rules import MelRules

Waveform = npt.NDArray[np.float32]


def spectrogram(rules: MelRules, waveform: Waveform) -> npt.NDArray[np.float32]:
    """The mel frames of a clip, float32 [num_frames, num_mel_bins]; without a transform its samples."""
    if not rules.n_fft:
        return np.pad(waveform, (0, -len(waveform) % rules.hop)).reshape(-1, rules.hop)
    return HtkMel(rules)(waveform) if rules.window else LogMel(rules)(waveform)


def mel_filters(rules: MelRules) -> torch.Tensor:
    """Slaney's triangular filters with unit area. float32 [n_fft / 2 + 1, num_mel_bins], computed in float64."""
    top_hz = rules.sample_rate / 2
    mels = np.linspace(_hz_to_mel(np.float64(0.0)), _hz_to_mel(np.float64(top_hz)), rules.num_mel_bins + 2)
    edges_hz = _mel_to_hz(mels)
    bins_hz = np.linspace(0.0, top_hz, rules.n_fft // 2 + 1)
    slopes = edges_hz[None, :] - bins_hz[:, None]
    widths = np.diff(edges_hz)
    rising, falling = -slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]
    filters = np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (edges_hz[2:] - edges_hz[:-2]))
    return torch.from_numpy(filters).to(torch.float32)


_HZ_PER_MEL, _LINEAR_END_HZ = 200.0 / 3, 1000.0
_LINEAR_END_MEL = _LINEAR_END_HZ / _HZ_PER_MEL
_LOG_STEP = np.log(6.4) / 27.0


def _hz_to_mel(hz: npt.NDArray[np.float64] | np.float64) -> npt.NDArray[np.float64]:
    ratio = np.maximum(hz, 1e-9) / _LINEAR_END_HZ
    return np.where(hz >= _LINEAR_END_HZ, _LINEAR_END_MEL + np.log(ratio) / _LOG_STEP, hz / _HZ_PER_MEL)


def _mel_to_hz(mel: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    logarithmic = _LINEAR_END_HZ * np.exp(_LOG_STEP * (mel - _LINEAR_END_MEL))
    return np.where(mel >= _LINEAR_END_MEL, logarithmic, _HZ_PER_MEL * mel)


_MIN_FRAMES = 64  # a product of few columns is summed in another order, and would differ in the last bit


class LogMel:
    """Window and filters of one set of rules, made once."""

    def __init__(self, rules: MelRules) -> None:
        self._rules = rules
        self._window = torch.hann_window(rules.n_fft)
        self._filters = mel_filters(rules)

    def __call__(self, waveform: Waveform) -> npt.NDArray[np.float32]:
        """waveform float32 [num_samples], at least one -> float32 [num_frames, num_mel_bins], silent ones at the end as far as
        ``max_s`` goes."""
        rules = self._rules
        num_frames = rules.num_frames(len(waveform)) + rules.silent_frames
        padded = np.zeros(self._num_padded(len(waveform), num_frames), dtype=np.float32)
        padded[: len(waveform)] = waveform
        spectrum = torch.stft(torch.from_numpy(padded), rules.n_fft, rules.hop, window=self._window, return_complex=True)
        power = (spectrum[..., :-1].abs() ** 2).contiguous()
        log_mel = torch.clamp(self._filters.T @ power, min=1e-10).log10()
        log_mel = torch.maximum(log_mel, log_mel.max() - 8.0)
        frames: npt.NDArray[np.float32] = ((log_mel + 4.0) / 4.0)[:, :num_frames].T.contiguous().numpy()
        return frames

    def _num_padded(self, num_samples: int, num_frames: int) -> int:
        """Samples of the clip with the silence that frames reach; ``torch.stft`` mirrors what they reach beyond."""
        rules = self._rules
        if rules.has_mirrored_end:
            return max(num_samples, rules.min_samples)
        num_padded = max((num_frames + 1) * rules.hop + 2 * rules.n_fft, _MIN_FRAMES * rules.hop)
        full_length = int(rules.max_s * rules.sample_rate)  # at its very end the extractor mirrors the clip instead of padding it
        return min(num_padded, full_length) if num_samples <= full_length else num_padded
