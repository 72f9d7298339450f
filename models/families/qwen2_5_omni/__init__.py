"""Qwen2.5-Omni's thinker: text, images, video with or without its sound track, and audio in, text out.

Tokens and positions as in transformers' ``qwen2_5_omni``, with ``use_audio_in_video`` where a video comes with its sound track.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ....schema.media import ItemShape, MediaKind, SegmentShape
from ...architecture import ModelConfig
from ...checkpoint.json_fields import CheckpointFiles
from ...errors import UnsupportedMediaError
from ..family import CheckpointRecipe, made_recipes
from ..fields import max_positions, parse_dtype, parse_eos
from ..qwen2_5 import clocked, fields, media, tensors

if TYPE_CHECKING:
    import torch

    from ...towers.interface import Tower

audio_item, image_item, sample_frames = media.audio_item, media.image_item, media.sample_frames
positions, video_item = clocked.positions, clocked.video_item
canonical_name, checkpoint_name, tensor_specs = tensors.canonical_name, tensors.checkpoint_name, tensors.tensor_specs


def parse_config(files: CheckpointFiles) -> ModelConfig:
    """Map config.json of the whole model (thinker_config) or of the bare thinker. Raises CheckpointError."""
    outer = files.required("config.json")
    config = outer.object("thinker_config") if outer.has("thinker_config") else outer
    text = config.object("text_config")
    language = fields.parse_language(text, tie=config.boolean("tie_word_embeddings", default=False))
    vision = fields.parse_vision(config.object("vision_config"), language.hidden_size, split_qkv=True)
    audio = fields.parse_audio(config.object("audio_config"), language.hidden_size)
    return ModelConfig(
        family="qwen2_5_omni",
        language=language,
        dtype=parse_dtype(outer, config, text),
        max_context=max_positions(text),
        eos_token_ids=parse_eos(files, config, text, outer),
        vision=vision,
        audio=audio,
        vision_rules=fields.parse_vision_rules(files, vision, video_falls_back=False),
        audio_rules=fields.parse_audio_rules(files, audio),
        image_token_id=config.integer("image_token_id", "image_token_index", default=151655, least=0),
        video_token_id=config.integer("video_token_id", "video_token_index", default=151656, least=0),
        audio_token_id=config.integer("audio_token_id", "audio_token_index", default=151646, least=0),
        audio_start_token_id=config.integer("audio_start_token_id", default=151647, least=0),
        audio_end_token_id=config.integer("audio_end_token_id", default=151648, least=0),
        positions_per_second=config.number("position_id_per_seconds", default=25),
        seconds_per_chunk=config.number("seconds_per_chunk", default=2),
    )


def video_with_sound(config: ModelConfig, video: ItemShape, sound: ItemShape) -> ItemShape:
    """Frames and sound take turns in chunks of ``seconds_per_chunk``, frames first; the longer of the two goes on alone.

    A temporal patch belongs to the chunk of the time at which it begins. That is where transformers' processor cuts as long as a
    patch takes no longer than a chunk; longer ones (less than one frame per second) it cuts in two, and here they stay whole.

    Raises: UnsupportedMediaError if the audio tower's windows do not fit into chunks.
    """
    vision, audio = media.vision_rules(config, "video"), config.audio_rules
    assert audio is not None
    chunk_tokens = int(config.positions_per_second * config.seconds_per_chunk)
    chunk_frames = chunk_tokens * media.MEL_FRAMES_PER_TOKEN
    if chunk_frames < 1 or chunk_frames % media.audio_unit(audio):
        problem = f"chunks of {chunk_frames} mel frames are not made of whole windows of {audio.window_frames}"
        raise UnsupportedMediaError(f"this model takes no sound with its videos: {problem}")
    sounds = media.audio_segments(audio, sound.grid[0], chunk_frames)
    t, h, w = video.grid
    starts = np.arange(t) * video.second_per_grid_s * config.positions_per_second
    segments: list[SegmentShape] = []
    for chunk, num_patches in enumerate(np.bincount((starts // chunk_tokens).astype(np.int64), minlength=len(sounds)).tolist()):
        segments += media.video_segments(vision, (num_patches, h, w))
        segments += sounds[chunk : chunk + 1]
    return msgspec.structs.replace(video, num_tokens=video.num_tokens + sound.num_tokens, segments=segments)


def build_towers(config: ModelConfig, weights: "dict[str, torch.Tensor]", device: "torch.device") -> "dict[MediaKind, Tower]":
    # By its name: only the process that builds towers depends on them (runtime/supervisor/reload.py).
    towers: dict[MediaKind, Tower] = import_module(f"{__package__}.towers").build_towers(config, weights, device)
    return towers


def recipes() -> Mapping[str, CheckpointRecipe]:
    return made_recipes(__package__)
