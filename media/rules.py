"""Protocols for the facts of a model that media functions need; the configuration structs of models/ fit them."""

from typing import Literal, Protocol

Resample = Literal["bicubic", "lanczos"]
"""The filter by which pictures are resized."""


class PatchRules(Protocol):
    """A vision tower's cutting of frames: rows of [3, temporal_patch_size, patch_size, patch_size], merge_size² of them per token."""

    @property
    def patch_size(self) -> int: ...
    @property
    def temporal_patch_size(self) -> int: ...
    @property
    def merge_size(self) -> int: ...


class MelRules(Protocol):
    """The log-mel spectrogram that an audio tower reads; ``hop`` and ``n_fft`` in samples. The others as in ``AudioRules``."""

    @property
    def sample_rate(self) -> int: ...
    @property
    def n_fft(self) -> int: ...
    @property
    def hop(self) -> int: ...
    @property
    def num_mel_bins(self) -> int: ...
    @property
    def max_s(self) -> float: ...
    @property
    def min_samples(self) -> int: ...
    @property
    def has_mirrored_end(self) -> bool: ...
    def num_frames(self, num_samples: int) -> int: ...
