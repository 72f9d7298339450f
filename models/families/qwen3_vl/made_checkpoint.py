"""The files of a Qwen3-VL checkpoint that ``mmrt model make`` writes besides weights."""

from typing import Any

from ..family import CheckpointRecipe
from ..qwen2_5.made_checkpoint import Dimensions, text_sizes
from ..qwen2_5.made_seeing import recipe as seeing_recipe

_PATCHES: dict[str, Any] = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "processor_class": "Qwen3VLProcessor"}
_COLOURS: dict[str, Any] = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
PROCESSORS: dict[str, dict[str, Any]] = {
    "preprocessor_config.json": {
        **_PATCHES,
        **_COLOURS,
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    },
    "video_preprocessor_config.json": {
        **_PATCHES,
        **_COLOURS,
        "video_processor_type": "Qwen3VLVideoProcessor",
        "size": {"shortest_edge": 4096, "longest_edge": 25165824},
    },
}


def _vision(depth: int, hidden: int, inner: int, heads: int, deepstack: list[int], positions: int = 2304) -> dict[str, Any]:
    return {
        "depth": depth,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_heads": heads,
        "deepstack_visual_indexes": deepstack,
        "num_position_embeddings": positions,
    }


_SMALL, _LARGE = _vision(24, 1024, 4096, 16, [5, 11, 17]), _vision(27, 1152, 4304, 16, [8, 16, 24])
_SHAPES = {
    "tiny": Dimensions("float32", 900, False, text_sizes(1216, 128, 256, 5, 4, 2), _vision(5, 64, 128, 4, [0, 2, 3], 144)),
    "2b": Dimensions("bfloat16", 8000, True, text_sizes(151936, 2048, 6144, 28, 16, 8, 262144), _SMALL),
    "4b": Dimensions("bfloat16", 8000, True, text_sizes(151936, 2560, 9728, 36, 32, 8, 262144), _SMALL),
    "8b": Dimensions("bfloat16", 8000, False, text_sizes(151936, 4096, 12288, 36, 32, 8, 262144), _LARGE),
    "32b": Dimensions("bfloat16", 8000, False, text_sizes(151936, 5120, 25600, 64, 64, 8, 262144), _LARGE),
}


def recipes() -> dict[str, CheckpointRecipe]:
    """By shape."""
    return {shape: _recipe(dimensions, head_dim=64 if shape == "tiny" else 128) for shape, dimensions in _SHAPES.items()}


def _recipe(dimensions: Dimensions, head_dim: int) -> CheckpointRecipe:
    side = head_dim // 2 * 5 // 16
    section = [head_dim // 2 - 2 * side, side, side]
    text = {
        "head_dim": head_dim,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": section, "mrope_interleaved": True},
    }
    vision = {
        **dimensions.vision,
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": dimensions.text["hidden_size"],
    }
    return seeing_recipe(dimensions, "qwen3_vl", "Qwen3VLForConditionalGeneration", vision, PROCESSORS, text)
