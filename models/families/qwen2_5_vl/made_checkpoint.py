"""The files of a Qwen2.5-VL checkpoint that ``mmrt model make`` writes besides weights."""

from ..family import CheckpointRecipe
from ..qwen2_5.made_checkpoint import IMAGE_PROCESSOR, SHAPES, Dimensions, vision_config
from ..qwen2_5.made_seeing import CHAT_TEMPLATE, SPECIAL_TOKENS
from ..qwen2_5.made_seeing import recipe as seeing_recipe

__all__ = ["CHAT_TEMPLATE", "SPECIAL_TOKENS", "recipe", "recipes"]

_PROCESSORS = {"preprocessor_config.json": {**IMAGE_PROCESSOR, "processor_class": "Qwen2_5_VLProcessor"}}


def recipes() -> dict[str, CheckpointRecipe]:
    """By shape."""
    return {shape: recipe(dimensions) for shape, dimensions in SHAPES.items()}


def recipe(dimensions: Dimensions) -> CheckpointRecipe:
    """A checkpoint of these sizes."""
    vision = {**vision_config(dimensions, "qwen2_5_vl_vision"), "tokens_per_second": 4}
    return seeing_recipe(dimensions, "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", vision, _PROCESSORS)
