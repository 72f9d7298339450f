"""Parts of made checkpoints shared by Qwen3-VL and Qwen3.5: the processors' files, and towers."""

from typing import Any

from ..qwen2_5.made_checkpoint import Dimensions

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


def vision_sizes(depth: int, hidden: int, inner: int, heads: int, positions: int = 2304) -> dict[str, Any]:
    """Of ``vision_config``."""
    return {"depth": depth, "hidden_size": hidden, "intermediate_size": inner, "num_heads": heads, "num_position_embeddings": positions}


SMALL, LARGE = vision_sizes(24, 1024, 4096, 16), vision_sizes(27, 1152, 4304, 16)


def vision_config(dimensions: Dimensions) -> dict[str, Any]:
    """``vision_config`` of config.json."""
    return {
        **dimensions.vision,
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": dimensions.text["hidden_size"],
    }
