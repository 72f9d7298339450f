"""The common parts of Qwen3-VL and Qwen3.5: config.json, the tower and its tensors' names, and positions."""

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ....schema.media import MediaSpan
from ...architecture import LanguageConfig, ModelConfig, RopeConfig, interleaved_axes
from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from ...media_config import VisionConfig
from ..fields import max_positions, parse_dtype, parse_eos
from ..qwen2_5 import fields, seeing, tensors
from ..text.ropes import parse_turns, rope_fields
from . import clips
from .times import read_time_tokens

_NAMES = {  # in this order: a block's first matrix, then a merger's
    ".mlp.linear_fc1.": ".mlp.up_proj.",
    ".mlp.linear_fc2.": ".mlp.down_proj.",
    ".linear_fc1.": ".mlp.0.",
    ".linear_fc2.": ".mlp.2.",
    ".norm.": ".ln_q.",
}


def parse_config(
    files: CheckpointFiles,
    family: str,
    parse_text: Callable[[JsonObject, bool], LanguageConfig],
    parse_tower: Callable[[JsonObject, int], VisionConfig],
    vision_start: int,
) -> ModelConfig:
    """Map config.json; arguments as those of Qwen2.5's ``seeing.parse_config``. ``vision_start``: the id of ``<|vision_start|>``, which
    other ids of vision follow where the file does not name them. Raises CheckpointError."""
    config = files.required("config.json")
    is_tied = config.boolean("tie_word_embeddings", default=False)  # text_config's says nothing, as in transformers

    def parse_tied(text: JsonObject, _: bool) -> LanguageConfig:
        return parse_text(text, is_tied)

    return msgspec.structs.replace(
        seeing.parse_config(files, family, parse_tied, parse_tower, clips.parse_rules, vision_start + 3),
        vision_start_token_id=config.integer("vision_start_token_id", default=vision_start, least=0),
        vision_end_token_id=config.integer("vision_end_token_id", default=vision_start + 1, least=0),
        times=read_time_tokens(files.path),
    )


def parse_text_alone(files: CheckpointFiles, family: str, parse_text: Callable[[JsonObject, bool], LanguageConfig]) -> ModelConfig:
    """Map config.json of a checkpoint without a tower; the decoder's fields are in ``text_config`` or at the top. Raises
    CheckpointError."""
    root = files.required("config.json")
    text = root.object("text_config") if root.has("text_config") else root
    tied = root if root.has("tie_word_embeddings") else text
    return ModelConfig(
        family=family,
        language=parse_text(text, tied.boolean("tie_word_embeddings", default=False)),
        dtype=parse_dtype(text, root),
        max_context=max_positions(text),
        eos_token_ids=parse_eos(files, root, text),
    )


def parse_rope(text: JsonObject, pairs: int, default_theta: float, default_section: tuple[int, ...]) -> RopeConfig:
    """Axes take turns among the ``pairs`` of a head that turn. Raises CheckpointError."""
    rope = rope_fields(text)
    if not rope.boolean("mrope_interleaved", default=True):
        raise rope.error("mrope_interleaved", "is false; only axes that take turns are supported")
    section = rope.integers("mrope_section", default=default_section)
    if len(section) != 3 or sum(section) != pairs:
        raise rope.error("mrope_section", f"is {list(section)}, expected three numbers that sum to the {pairs} pairs that turn")
    turns = parse_turns(text, 2 * pairs, max_positions(text), default_theta)
    return msgspec.structs.replace(turns, axes=interleaved_axes(section, pairs))


def parse_vision(vision: JsonObject, hidden_size: int) -> VisionConfig:
    """The tower, without deepstack. Raises CheckpointError if it does not fit the decoder."""
    vision.text("hidden_act", default="gelu_pytorch_tanh", choices=("gelu_pytorch_tanh",))
    config = fields.parse_tower(vision, hidden_size, vision.integer("intermediate_size", default=4304), patch=16)
    num_positions = vision.integer("num_position_embeddings", default=2304)
    side = math.isqrt(num_positions)
    if side * side != num_positions:
        raise vision.error("num_position_embeddings", f"is {num_positions}, expected the square of a number")
    return msgspec.structs.replace(config, norm="layer", feed_forward="gelu_tanh", patch_bias=True, position_side=side)


def parse_deepstack(vision: JsonObject, config: VisionConfig) -> tuple[int, ...]:
    """``VisionConfig.deepstack_blocks``. Raises CheckpointError."""
    blocks = vision.integers("deepstack_visual_indexes", default=(8, 16, 24))
    if list(blocks) != sorted({*blocks} & {*range(config.depth)}):
        raise vision.error("deepstack_visual_indexes", f"is {list(blocks)}, expected ascending numbers below depth ({config.depth})")
    return blocks


def canonical_name(name: str) -> str:
    """See ``Family``."""
    return tensors.renamed(tensors.canonical_name(name), _NAMES)


def checkpoint_name(name: str) -> str:
    """See ``Family``."""
    return tensors.nested_name(tensors.renamed(name, {ours: theirs for theirs, ours in _NAMES.items()}))


def positions(config: ModelConfig, num_tokens: int, spans: Sequence[MediaSpan]) -> tuple[NDArray[np.int64], int]:
    """Each frame of a video is a picture, and its time is text."""

    return seeing.positions_by_patch(config, num_tokens, [part for span in spans for part in clips.frames_of(span)])
