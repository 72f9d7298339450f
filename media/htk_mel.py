"""The log-mel spectrogram of Gemma's sound towers in numpy, bit-equal to transformers' Gemma4AudioFeatureExtractor.

Magnitudes, not powers, of windows that are shorter than the transform; HTK's mel scale; the natural logarithm. A frame depends on its
own window alone. transformers pads clips and zeroes frames that reach into the padding: those are not made here.
"""

import numpy as np
import numpy.typing as npt
from numpy import fft  # now: the process that decodes reads no files later

from .rules import MelRules

_FLOOR = 1e-3  # added to what the logarithm is taken of


class HtkMel:
    """Window and filters of one set of rules, made once."""

    def __init__(self, rules: MelRules) -> None:
        self._rules = rules
        self._window = np.hanning(rules.window + 1)[:-1].astype(np.float32)
        self._filters = htk_filters(rules)

    def __call__(self, waveform: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """waveform float32 [num_samples] -> float32 [num_frames, num_mel_bins]."""
        rules = self._rules
        padded = np.concatenate((np.zeros(rules.window // 2, np.float32), waveform))
        starts = np.arange(rules.num_frames(len(waveform))) * rules.hop
        frames = padded[starts[:, None] + np.arange(rules.window)] * self._window
        magnitudes = np.abs(fft.rfft(frames, n=rules.n_fft, axis=-1))
        logarithms: npt.NDArray[np.float32] = np.log(magnitudes @ self._filters + _FLOOR).astype(np.float32)
        return logarithms


def htk_filters(rules: MelRules) -> npt.NDArray[np.float64]:
    """Triangular filters of height 1, [n_fft / 2 + 1, num_mel_bins]."""
    top_hz = rules.sample_rate / 2
    edges_hz = 700.0 * (10.0 ** (np.linspace(0.0, 2595.0 * np.log10(1.0 + top_hz / 700.0), rules.num_mel_bins + 2) / 2595.0) - 1.0)
    slopes = edges_hz[None, :] - np.linspace(0.0, top_hz, rules.n_fft // 2 + 1)[:, None]
    widths = np.diff(edges_hz)
    rising, falling = -slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]
    filters: npt.NDArray[np.float64] = np.maximum(0.0, np.minimum(rising, falling))
    return filters
