"""The files of a Qwen2.5-VL checkpoint that ``mmrt model make`` writes besides weights."""

from collections.abc import Mapping
from typing import Any

from ..family import CheckpointRecipe
from ..qwen2_5.made_checkpoint import (
    IMAGE_PROCESSOR,
    PLAIN_TOKENS,
    SHAPES,
    Dimensions,
    chat_template,
    generation_config,
    text_config,
    vision_config,
)

SPECIAL_TOKENS = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> <|quad_start|> "
    "<|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
).split()
CHAT_TEMPLATE = chat_template("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def recipes() -> dict[str, CheckpointRecipe]:
    """By shape."""
    return {shape: recipe(dimensions) for shape, dimensions in SHAPES.items()}


def recipe(dimensions: Dimensions) -> CheckpointRecipe:
    """A checkpoint of these sizes."""

    def files(ids: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        return {
            "preprocessor_config.json": {**IMAGE_PROCESSOR, "processor_class": "Qwen2_5_VLProcessor"},
            "config.json": _config(dimensions, ids),
            "generation_config.json": generation_config(ids),
        }

    vocab_size = dimensions.text["vocab_size"]
    return CheckpointRecipe(vocab_size, dimensions.num_merges, SPECIAL_TOKENS, PLAIN_TOKENS, {}, CHAT_TEMPLATE, files)


def _config(dimensions: Dimensions, ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "dtype": dimensions.dtype,
        "tie_word_embeddings": dimensions.tie,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "text_config": text_config(dimensions, ids, "qwen2_5_vl_text"),
        "vision_config": {**vision_config(dimensions, "qwen2_5_vl_vision"), "tokens_per_second": 4},
    }
