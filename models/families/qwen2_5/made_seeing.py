"""Made checkpoints of the families that see, and do not hear: their tokens, chat template and config.json."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..family import CheckpointRecipe
from .made_checkpoint import PLAIN_TOKENS, Dimensions, chat_template, generation_config, text_config

SPECIAL_TOKENS = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> <|quad_start|> "
    "<|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
).split()
CHAT_TEMPLATE = chat_template("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def recipe(
    dimensions: Dimensions,
    family: str,
    architecture: str,
    vision: Mapping[str, Any],
    processors: Mapping[str, dict[str, Any]],
    text: Mapping[str, Any] = MappingProxyType({}),
) -> CheckpointRecipe:
    """A checkpoint of these sizes, whose ``vision_config`` is ``vision``; ``processors`` are the processors' files by name, ``text``
    fields of ``text_config`` that are not as Qwen2's."""

    def files(ids: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        config = {
            "architectures": [architecture],
            "model_type": family,
            "dtype": dimensions.dtype,
            "tie_word_embeddings": dimensions.tie,
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
            "text_config": {**text_config(dimensions, ids, f"{family}_text"), **text},
            "vision_config": {"model_type": f"{family}_vision", **vision},
        }
        return {**processors, "config.json": config, "generation_config.json": generation_config(ids)}

    vocab_size = dimensions.text["vocab_size"]
    return CheckpointRecipe(vocab_size, dimensions.num_merges, SPECIAL_TOKENS, PLAIN_TOKENS, {}, CHAT_TEMPLATE, files)
