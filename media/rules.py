"""What media functions need to know of a model: protocols that the configuration structs of models/ fit."""

from typing import Protocol


class PatchRules(Protocol):
    """How a vision tower cuts frames: rows of [3, temporal_patch_size, patch_size, patch_size], merge_size² of them per token."""

    @property
    def patch_size(self) -> int: ...
    @property
    def temporal_patch_size(self) -> int: ...
    @property
    def merge_size(self) -> int: ...


class MelRules(Protocol):
    """The log-mel spectrogram that an audio tower reads; ``hop`` and ``n_fft`` in samples, ``max_s`` of the feature extractor."""

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
