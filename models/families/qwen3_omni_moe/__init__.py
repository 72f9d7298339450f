"""Qwen3-Omni's thinker: text, pictures, videos and sounds in, text out. As transformers' ``qwen3_omni_moe``: the decoder and the tower
that sees are Qwen3-VL's with experts, the tower that hears is Qwen3-ASR's.

A video and its sound track take turns by token, within what the tower hears at once. Each run of sound is a segment with all of its
window, and ``details``: the window's first mel frame, and the first and last + 1 of the run's tokens in it. So the tower hears a
window once for each run. Positions of a video whose rate makes them fractions are rounded down.
"""

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ....schema.media import ItemShape, MediaKind, MediaSpan, SegmentShape
from ...architecture import LanguageConfig, ModelConfig
from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from ...checkpoint.weight_specs import TensorSpec, language_specs
from ...media_config import AudioConfig, VisionConfig, VisionRules
from ..experts import parse_experts
from ..family import CheckpointRecipe, made_recipes
from ..fields import max_positions, parse_attention, parse_decoder, parse_dtype, parse_eos
from ..qwen2_5 import clocked, fields, media
from ..qwen2_5.tensors import canonical_name as common_name
from ..qwen2_5.tensors import placed, renamed, vision_specs
from ..qwen3 import seeing, sound
from ..text.ropes import expect_whole_heads

if TYPE_CHECKING:
    import torch

    from ...towers.interface import Tower

_SOUND_TOWER = AudioConfig(
    num_mel_bins=128,
    num_layers=32,
    num_heads=20,
    ffn_size=5120,
    hidden_size=1280,
    out_hidden_size=0,
    max_source_positions=1500,
    n_window=50,
    conv_channels=480,
)
_RULES = VisionRules(patch_size=16, video_min_pixels=128 * 32 * 32, video_max_pixels=768 * 32 * 32)
_LEAST_SAMPLES = 400  # of which the feature extractor makes a frame
_NAMES = {
    ".mlp.linear_fc1.": ".mlp.up_proj.",
    ".mlp.linear_fc2.": ".mlp.down_proj.",
    ".merger_list.": ".deepstack_merger_list.",
}

video_item, image_item, sample_frames = clocked.video_item, media.image_item, media.sample_frames


def parse_config(files: CheckpointFiles) -> ModelConfig:
    """Map config.json of the whole model (thinker_config) or of the bare thinker. Raises CheckpointError."""
    outer = files.required("config.json")
    config = outer.object("thinker_config") if outer.has("thinker_config") else outer
    text, hears = config.object("text_config"), config.object("audio_config")
    language = _parse_text(text, config.boolean("tie_word_embeddings", default=False))
    vision, audio = (
        _parse_vision(config.object("vision_config"), language.hidden_size),
        sound.parse_tower(hears, language.hidden_size, _SOUND_TOWER),
    )
    return ModelConfig(
        family="qwen3_omni_moe",
        language=language,
        dtype=parse_dtype(outer, config, text),
        max_context=max_positions(text),
        eos_token_ids=parse_eos(files, config, text, outer),
        vision=vision,
        audio=audio,
        vision_rules=fields.parse_vision_rules(files, vision, video_falls_back=False, base=_RULES),
        audio_rules=replace(sound.parse_rules(files, hears, audio), min_samples=_LEAST_SAMPLES),
        image_token_id=config.integer("image_token_id", default=151655, least=0),
        video_token_id=config.integer("video_token_id", default=151656, least=0),
        audio_token_id=config.integer("audio_token_id", default=151646, least=0),
        audio_start_token_id=config.integer("audio_start_token_id", default=151647, least=0),
        audio_end_token_id=config.integer("audio_end_token_id", least=0),  # transformers has no default
        positions_per_second=config.number("position_id_per_seconds", default=25),
    )


def _parse_text(text: JsonObject, tie: bool) -> LanguageConfig:
    heads = replace(parse_attention(text), qk_norm=True)
    expect_whole_heads(text)
    rope = seeing.parse_rope(text, heads.head_dim // 2, default_theta=1e6, default_section=(24, 20, 20))
    return parse_decoder(text.with_defaults({"norm_topk_prob": True}), heads, rope, tie, parse_experts)


def _parse_vision(vision: JsonObject, hidden_size: int) -> VisionConfig:
    config = seeing.parse_vision(vision, hidden_size)
    return replace(config, deepstack_blocks=seeing.parse_deepstack(vision, config))


def audio_item(config: ModelConfig, num_frames: int) -> ItemShape:
    """A segment for each window. A rest that is shorter than a chunk stays with the window before: in a segment of its own it would be
    a clip that is heard without silence behind it."""
    item = sound.audio_item(config, num_frames)
    assert config.audio is not None
    if len(item.segments) == 1 or (rest := item.segments[-1].num_rows) >= 2 * config.audio.n_window:
        return item
    *others, last, _ = item.segments
    length = last.num_rows + rest
    joined = SegmentShape("audio", (length, 0, 0), length, last.row_bytes, sound.num_tokens(config.audio, length))
    return replace(item, segments=[*others, joined])


def video_with_sound(config: ModelConfig, video: ItemShape, sound: ItemShape) -> ItemShape:
    """Each temporal patch stands before the first token of sound that does not begin earlier; the longer of the two goes on alone."""
    rules, (t, h, w) = media.vision_rules(config, "video"), video.grid
    starts = np.arange(t) * video.second_per_grid_s * config.positions_per_second
    before = np.minimum(np.ceil(starts), sound.num_tokens).astype(np.int64)  # tokens of sound before each patch
    segments, at = list[SegmentShape](), 0
    for number, count in zip(*np.unique(before, return_counts=True), strict=True):
        segments += _runs(sound, at, int(number))
        segments += media.video_segments(rules, (int(count), h, w))
        at = int(number)
    segments += _runs(sound, at, sound.num_tokens)
    return replace(video, num_tokens=video.num_tokens + sound.num_tokens, segments=segments)


def _runs(sound: ItemShape, first: int, end: int) -> Iterator[SegmentShape]:
    """Tokens [first, end) of a sound: a segment of each window that has some."""
    frames = tokens = 0
    for window in sound.segments:
        start, stop = max(first - tokens, 0), min(end - tokens, window.num_tokens)
        if start < stop:
            yield replace(window, num_tokens=stop - start, details=(frames, start, stop))
        frames, tokens = frames + window.num_rows, tokens + window.num_tokens


def positions(config: ModelConfig, num_tokens: int, spans: Sequence[MediaSpan]) -> tuple[NDArray[np.int64], int]:
    """As Qwen2.5-Omni's, and each token that opens or closes a medium has a position of its own."""
    return clocked.positions_by_clock(config, num_tokens, spans, shares_fences=False)


def tensor_specs(config: ModelConfig) -> list[TensorSpec]:
    """See ``Family``."""
    assert config.vision is not None and config.audio is not None
    return [*language_specs(config.language), *vision_specs(config.vision), *sound.tower_specs(config.audio)]


def canonical_name(name: str) -> str:
    """See ``Family``."""
    return renamed(common_name(name), _NAMES)


def checkpoint_name(name: str) -> str:
    """See ``Family``."""
    inner = renamed(name, {ours: theirs for theirs, ours in _NAMES.items()})
    parts = {"language.": "language_model.", "vision.": "visual.", "audio.": "audio_tower."}
    return placed(inner, {ours: f"model.{theirs}" for ours, theirs in parts.items()})


def build_towers(config: ModelConfig, weights: "dict[str, torch.Tensor]", device: "torch.device") -> "dict[MediaKind, Tower]":
    # By its name: only the process that builds towers depends on them.
    towers: dict[MediaKind, Tower] = import_module(f"{__package__}.towers").build_towers(config, weights, device)
    return towers


def recipes() -> Mapping[str, CheckpointRecipe]:
    return made_recipes(__package__)
