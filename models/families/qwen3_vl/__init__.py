"""Qwen3-VL, also with experts: text, images and video. Its decoder and positions as in transformers' ``qwen3_vl`` and
``qwen3_vl_moe``."""

from functools import partial

import msgspec

from ...architecture import FeedForwardConfig, LanguageConfig
from ...checkpoint.json_fields import JsonObject
from ...media_config import VisionConfig
from ..experts import parse_router, place_experts
from ..fields import FeedForwards, parse_attention, parse_decoder, parse_mlps
from ..qwen3 import seeing
from ..qwen3.family import Qwen3Family
from ..text.ropes import expect_whole_heads

_VISION_START = 151652  # of <|vision_start|>, where the file does not say


def _parse_text(text: JsonObject, tie: bool, feed_forwards: FeedForwards) -> LanguageConfig:
    mixer = msgspec.structs.replace(parse_attention(text, default_head_dim=128), qk_norm=True)
    expect_whole_heads(text)
    rope = seeing.parse_rope(text, mixer.head_dim // 2, default_theta=5e5, default_section=(24, 20, 20))
    return parse_decoder(text, mixer, rope, tie, feed_forwards)


def _parse_experts(text: JsonObject, num_layers: int) -> list[FeedForwardConfig]:
    """They are weighed so that the weights sum up to 1, whatever the file says."""
    return place_experts(text, num_layers, parse_router(text, renormalise=True))


def _parse_vision(vision: JsonObject, hidden_size: int) -> VisionConfig:
    config = seeing.parse_vision(vision, hidden_size)
    return msgspec.structs.replace(config, deepstack_blocks=seeing.parse_deepstack(vision, config))


def _family(name: str, feed_forwards: FeedForwards) -> Qwen3Family:
    return Qwen3Family(name, __name__, partial(_parse_text, feed_forwards=feed_forwards), _parse_vision, _VISION_START)


QWEN3_VL, QWEN3_VL_MOE = _family("qwen3_vl", parse_mlps), _family("qwen3_vl_moe", _parse_experts)
