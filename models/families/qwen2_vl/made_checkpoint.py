"""The files of a Qwen2-VL checkpoint that ``mmrt model make`` writes besides weights."""

from ..family import CheckpointRecipe
from ..qwen2_5.made_checkpoint import IMAGE_PROCESSOR, Dimensions, text_sizes
from ..qwen2_5.made_seeing import recipe as seeing_recipe

_PROCESSORS = {"preprocessor_config.json": {**IMAGE_PROCESSOR, "processor_class": "Qwen2VLProcessor"}}
_BIG_VISION = {"depth": 32, "embed_dim": 1280, "num_heads": 16}
_SHAPES = {
    "tiny": Dimensions("float32", 900, False, text_sizes(1216, 128, 256, 4, 4, 2), {"depth": 3, "embed_dim": 64, "num_heads": 4}),
    "2b": Dimensions("bfloat16", 8000, True, text_sizes(151936, 1536, 8960, 28, 12, 2), _BIG_VISION),
    "7b": Dimensions("bfloat16", 8000, False, text_sizes(152064, 3584, 18944, 28, 28, 4), _BIG_VISION),
    "72b": Dimensions("bfloat16", 8000, False, text_sizes(152064, 8192, 29568, 80, 64, 8), _BIG_VISION),
}


def recipes() -> dict[str, CheckpointRecipe]:
    """By shape."""
    return {shape: _recipe(dimensions) for shape, dimensions in _SHAPES.items()}


def _recipe(dimensions: Dimensions) -> CheckpointRecipe:
    vision = {
        **dimensions.vision,
        "hidden_act": "quick_gelu",
        "mlp_ratio": 4,
        "in_channels": 3,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "hidden_size": dimensions.text["hidden_size"],
    }
    return seeing_recipe(dimensions, "qwen2_vl", "Qwen2VLForConditionalGeneration", vision, _PROCESSORS)
