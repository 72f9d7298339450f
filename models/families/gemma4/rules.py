"""Rules of Gemma 4's processors, from a checkpoint's files."""

import math
from collections.abc import Mapping

from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from ...errors import CheckpointError
from ...media_config import AudioConfig, AudioRules, VisionRules
from ..qwen2_5 import fields
from .media import BUDGETS
from .towers_config import Conformer, PooledVision, RawVision

_FRAMES = 32  # of a video
_WINDOW_MS, _HOP_MS = 20.0, 10.0
_PLAIN = {"preemphasis": 0.0, "dither": 0.0, "min_frequency": 0.0, "input_scale_factor": 1.0, "mel_floor": 1e-3}
_MAX_S = 30.0
_BICUBIC = 3  # as Pillow numbers filters


def vision_rules(files: CheckpointFiles, vision: PooledVision | RawVision, patch: int, pool: int) -> VisionRules:
    """``patch``, ``pool``: pixels at a side of a patch, and patches at a side of a token, as config.json has them. Raises
    CheckpointError for processors that make other rows than the tower takes."""
    image, video, _ = fields.processors(files, video_falls_back=False)
    area, places = (patch * pool) ** 2, vision.table_size // vision.merge_size
    sizes = {"patch_size": patch, "pooling_kernel_size": pool}
    budget, frame_budget = (_budget(processor, sizes, places, default) for processor, default in ((image, 280), (video, 70)))
    if not video.boolean("do_sample_frames", default=True):
        raise video.error("do_sample_frames", "is false, which is not supported")
    num_frames = video.integer("num_frames", default=_FRAMES)
    return VisionRules(
        patch_size=vision.patch_size,
        temporal_patch_size=1,
        merge_size=vision.merge_size,
        min_pixels=area,
        max_pixels=budget * area,
        video_min_pixels=area,
        video_max_pixels=frame_budget * area,
        min_frames=num_frames,
        max_frames=num_frames,
        image_mean=(0.5, 0.5, 0.5),  # of towers that shift colours; others multiply them alone
        image_std=(0.5, 0.5, 0.5),
    )


def _budget(processor: JsonObject, sizes: Mapping[str, int], num_places: int, default: int) -> int:
    """Tokens of a picture at most. ``num_places``: tokens at a side that have places in the tower's table."""
    for name, plain in (("image_mean", 0.0), ("image_std", 1.0)):
        if processor.boolean("do_normalize", default=False) and (found := processor.colour(name, default=(plain,) * 3)) != (plain,) * 3:
            raise processor.error(name, f"is {list(found)}, expected {plain:g} of each colour: the tower shifts them itself")
    for name in ("do_resize", "do_rescale"):
        if not processor.boolean(name, default=True):
            raise processor.error(name, "is false, which is not supported")
    for name, number in (("resample", _BICUBIC), ("rescale_factor", 1 / 255)):
        if not math.isclose(step := processor.number(name, default=number, least=0), number, rel_tol=1e-6):
            raise processor.error(name, f"is {step:g}, expected {number:g}")
    for name, size in sizes.items():
        if (side := processor.integer(name, default=size)) != size:
            raise processor.error(name, f"is {side}, but the vision tower has {size}")
    if (budget := processor.integer("max_soft_tokens", default=default)) not in BUDGETS:
        raise processor.error("max_soft_tokens", f"is {budget}, expected one of {', '.join(map(str, BUDGETS))}")
    if budget > num_places:
        raise processor.error("max_soft_tokens", f"is {budget}: the tower has places for {num_places} tokens at a side")
    return budget


def sound_rules(files: CheckpointFiles, audio: Conformer) -> AudioRules:
    """Raises CheckpointError for an extractor that makes other frames."""
    extractor = fields.feature_extractor(files, audio)
    rate = extractor.integer("sampling_rate", default=16000)
    for name, plain in _PLAIN.items():
        if not math.isclose(found := extractor.number(name, default=plain, least=0), plain):
            raise extractor.error(name, f"is {found:g}, expected {plain:g}")
    if not math.isclose(top := extractor.number("max_frequency", default=8000.0), rate / 2):
        raise extractor.error("max_frequency", f"is {top:g}, expected half of sampling_rate ({rate / 2:g})")
    for name in ("per_bin_mean", "per_bin_stddev"):
        if extractor.has(name):
            raise extractor.error(name, "is not null, which is not supported")
    window, hop = (
        round(rate * extractor.number(name, default=default) / 1000)
        for name, default in (("frame_length_ms", _WINDOW_MS), ("hop_length_ms", _HOP_MS))
    )
    if window % 2 or not 1 <= hop <= window:
        raise CheckpointError(f"{files.path}: sounds have windows of {window} samples, {hop} apart, which do not fit each other")
    n_fft = 2 ** math.ceil(math.log2(window)) * (2 if extractor.boolean("fft_overdrive", default=False) else 1)
    return AudioRules(
        sample_rate=rate, n_fft=n_fft, hop=hop, num_mel_bins=audio.num_mel_bins, window_frames=4, max_s=_MAX_S, window=window
    )


def raw_sound_rules(files: CheckpointFiles, audio: AudioConfig) -> AudioRules:
    """Of rows that are samples themselves. Raises CheckpointError for an extractor that makes others."""
    extractor, length = fields.feature_extractor(files, audio), audio.num_mel_bins
    if (found := extractor.integer("audio_samples_per_token", default=length)) != length:
        raise extractor.error("audio_samples_per_token", f"is {found}, but the model takes {length}")
    rate = extractor.integer("sampling_rate", default=16000)
    return AudioRules(sample_rate=rate, n_fft=0, hop=length, num_mel_bins=length, window_frames=1, max_s=0.0)
