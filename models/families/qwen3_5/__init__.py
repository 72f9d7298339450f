"""Qwen3.5, also with experts: three layers with a DeltaNet for one that attends. As transformers' ``qwen3_5`` and ``qwen3_5_moe``.

It sees as Qwen3-VL does, without deepstack; a checkpoint without a tower is text alone.
"""

from functools import partial

from ...architecture import FeedForwardConfig
from ...checkpoint.json_fields import JsonObject
from ..experts import parse_router
from ..fields import FeedForwards, parse_mlps
from ..qwen3 import seeing
from ..qwen3.family import Qwen3Family
from ..qwen3.hybrid import parse_text

_VISION_START = 248053  # of <|vision_start|>, where the file does not say


def _parse_experts(text: JsonObject, num_layers: int) -> list[FeedForwardConfig]:
    """All layers have some, weighed so that the weights sum up to 1, and one that every token has."""
    for field, neutral in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        if text.has(field) and text.data[field] != neutral:
            raise text.error(field, f"is {text.data[field]!r}, expected {neutral}: layers without experts are not supported")
    return [parse_router(text, renormalise=True, has_shared=True)] * num_layers


def _family(name: str, feed_forwards: FeedForwards) -> Qwen3Family:
    return Qwen3Family(
        name, __name__, partial(parse_text, feed_forwards=feed_forwards), seeing.parse_vision, _VISION_START, may_be_text=True
    )


QWEN3_5, QWEN3_5_MOE = _family("qwen3_5", parse_mlps), _family("qwen3_5_moe", _parse_experts)
