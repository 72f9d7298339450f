"""The files of a checkpoint of Qwen3-VL that ``mmrt model make`` writes besides weights."""

from typing import Any

from ..family import CheckpointRecipe
from ..qwen2_5.made_checkpoint import Dimensions, expert_sizes, text_sizes
from ..qwen2_5.made_seeing import recipe as seeing_recipe
from ..qwen3.made_vision import LARGE, PROCESSORS, SMALL, vision_config, vision_sizes


def _deep(vision: dict[str, Any], *blocks: int) -> dict[str, Any]:
    return {**vision, "deepstack_visual_indexes": list(blocks)}


_SMALL, _LARGE = _deep(SMALL, 5, 11, 17), _deep(LARGE, 8, 16, 24)
_TINY = _deep(vision_sizes(5, 64, 128, 4, 144), 0, 2, 3)
_SHAPES = {
    "tiny": Dimensions("float32", 900, False, text_sizes(1216, 128, 256, 5, 4, 2), _TINY),
    "2b": Dimensions("bfloat16", 8000, True, text_sizes(151936, 2048, 6144, 28, 16, 8, 262144), _SMALL),
    "4b": Dimensions("bfloat16", 8000, True, text_sizes(151936, 2560, 9728, 36, 32, 8, 262144), _SMALL),
    "8b": Dimensions("bfloat16", 8000, False, text_sizes(151936, 4096, 12288, 36, 32, 8, 262144), _LARGE),
    "32b": Dimensions("bfloat16", 8000, False, text_sizes(151936, 5120, 25600, 64, 64, 8, 262144), _LARGE),
}
_WITH_EXPERTS = {
    "tiny": (_SHAPES["tiny"], expert_sizes(8, 2, 64)),
    "30b-a3b": (
        Dimensions("bfloat16", 8000, False, text_sizes(151936, 2048, 6144, 48, 32, 4, 262144), _LARGE),
        expert_sizes(128, 8, 768),
    ),
    "235b-a22b": (
        Dimensions("bfloat16", 8000, False, text_sizes(151936, 4096, 12288, 94, 64, 4, 262144), _LARGE),
        expert_sizes(128, 8, 1536),
    ),
}


def recipes(family: str) -> dict[str, CheckpointRecipe]:
    """By shape."""
    if family == "qwen3_vl":
        return {shape: _recipe(family, "Qwen3VL", shape, dimensions, {}) for shape, dimensions in _SHAPES.items()}
    made = {shape: _recipe(family, "Qwen3VLMoe", shape, *sizes) for shape, sizes in _WITH_EXPERTS.items()}
    return {shape: recipe._replace(are_stacked=True) for shape, recipe in made.items()}


def _recipe(family: str, model: str, shape: str, dimensions: Dimensions, experts: dict[str, int]) -> CheckpointRecipe:
    head_dim = 64 if shape == "tiny" else 128
    side = head_dim // 2 * 5 // 16
    section = [head_dim // 2 - 2 * side, side, side]
    text = {
        "head_dim": head_dim,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": section, "mrope_interleaved": True},
        **experts,
    }
    return seeing_recipe(dimensions, family, f"{model}ForConditionalGeneration", vision_config(dimensions), PROCESSORS, text)
