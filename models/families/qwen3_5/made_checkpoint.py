"""The files of a checkpoint of Qwen3.5 that ``mmrt model make`` writes besides weights."""

from typing import Any

from ..family import CheckpointRecipe
from ..qwen2_5.made_checkpoint import Dimensions, expert_sizes, text_sizes
from ..qwen2_5.made_seeing import recipe as seeing_recipe
from ..qwen3.made_vision import LARGE, PROCESSORS, SMALL, vision_config, vision_sizes

_TURNS = {"rope_type": "default", "partial_rotary_factor": 0.25, "mrope_interleaved": True}
_TINY_VISION, _LEAST_VISION = vision_sizes(3, 64, 128, 4, 144), vision_sizes(12, 768, 3072, 12)
_TINY = Dimensions("float32", 900, False, text_sizes(1216, 128, 256, 4, 4, 2, 8192), _TINY_VISION)
_TINY_HEADS = {
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "rope_parameters": {**_TURNS, "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
}


def _published(tie: bool, vision: dict[str, Any], hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> Dimensions:
    return Dimensions("bfloat16", 8000, tie, text_sizes(248320, hidden, inner, layers, heads, kv_heads, 262144), vision)


_PUBLISHED = {  # and the value heads of their linear layers
    "0.8b": (_published(True, _LEAST_VISION, 1024, 3584, 24, 8, 2), 16),
    "2b": (_published(True, SMALL, 2048, 6144, 24, 8, 2), 16),
    "4b": (_published(True, SMALL, 2560, 9216, 32, 16, 4), 32),
    "9b": (_published(False, LARGE, 4096, 12288, 32, 16, 4), 32),
    "27b": (_published(False, LARGE, 5120, 17408, 64, 24, 4), 48),
}
_WITH_EXPERTS = {  # the shared one is as wide as the others
    "35b-a3b": (_published(False, LARGE, 2048, 512, 40, 16, 2), 32, expert_sizes(256, 8, 512)),
    "122b-a10b": (_published(False, LARGE, 3072, 1024, 48, 32, 2), 64, expert_sizes(256, 8, 1024)),
    "397b-a17b": (_published(False, LARGE, 4096, 1024, 60, 32, 2), 64, expert_sizes(512, 10, 1024)),
}


def recipes(family: str) -> dict[str, CheckpointRecipe]:
    """By shape."""
    if family == "qwen3_5":
        dense = {shape: _recipe(family, "Qwen3_5", dimensions, _heads(heads)) for shape, (dimensions, heads) in _PUBLISHED.items()}
        return {"tiny": _recipe(family, "Qwen3_5", _TINY, _TINY_HEADS), **dense}
    tiny = _TINY_HEADS | _shared(expert_sizes(8, 2, 64))
    return {"tiny": _recipe(family, "Qwen3_5Moe", _TINY, tiny)} | {
        shape: _recipe(family, "Qwen3_5Moe", dimensions, _heads(heads) | _shared(experts))
        for shape, (dimensions, heads, experts) in _WITH_EXPERTS.items()
    }


def _heads(num_value_heads: int) -> dict[str, Any]:
    return {
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": num_value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "rope_parameters": {**_TURNS, "rope_theta": 1e7, "mrope_section": [11, 11, 10]},
    }


def _shared(experts: dict[str, int]) -> dict[str, int]:
    return {**experts, "shared_expert_intermediate_size": experts["moe_intermediate_size"]}


def _recipe(family: str, model: str, dimensions: Dimensions, heads: dict[str, Any]) -> CheckpointRecipe:
    text = {"full_attention_interval": 4, "linear_conv_kernel_dim": 4, "attention_bias": False, **heads}
    return seeing_recipe(dimensions, family, f"{model}ForConditionalGeneration", vision_config(dimensions), PROCESSORS, text)
