"""The files of a Qwen2.5-Omni checkpoint that ``mmrt model make`` writes besides weights."""

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
    "<|endoftext|> <|im_start|> <|im_end|> <|AUDIO|> <|audio_bos|> <|audio_eos|> <|box_end|> <|quad_start|> <|quad_end|> "
    "<|vision_bos|> <|vision_eos|> <|vision_pad|> <|IMAGE|> <|VIDEO|>"
).split()
TOKEN_NAMES = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
_AUDIO_BRANCH = "{%- elif item.type in ('audio', 'audio_url', 'input_audio') -%}<|audio_bos|><|AUDIO|><|audio_eos|>\n"
CHAT_TEMPLATE = chat_template("<|vision_bos|>", "<|vision_eos|>", "<|IMAGE|>", "<|VIDEO|>", _AUDIO_BRANCH)
_PROCESSOR = {
    **IMAGE_PROCESSOR,
    "processor_class": "Qwen2_5OmniProcessor",
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "sampling_rate": 16000,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": 300,
    "padding_value": 0.0,
    "return_attention_mask": True,
}


def recipes() -> dict[str, CheckpointRecipe]:
    """By shape."""
    return {shape: recipe(dimensions) for shape, dimensions in SHAPES.items()}


def recipe(dimensions: Dimensions) -> CheckpointRecipe:
    """A checkpoint of these sizes."""

    def files(ids: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        return {
            "preprocessor_config.json": _PROCESSOR,
            "config.json": _config(dimensions, ids),
            "generation_config.json": generation_config(ids),
        }

    vocab_size = dimensions.text["vocab_size"]
    return CheckpointRecipe(vocab_size, dimensions.num_merges, SPECIAL_TOKENS, PLAIN_TOKENS, TOKEN_NAMES, CHAT_TEMPLATE, files)


def _config(dimensions: Dimensions, ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2_5OmniThinkerForConditionalGeneration"],
        "model_type": "qwen2_5_omni_thinker",
        "dtype": dimensions.dtype,
        "tie_word_embeddings": dimensions.tie,
        "image_token_index": ids["<|IMAGE|>"],
        "video_token_index": ids["<|VIDEO|>"],
        "audio_token_index": ids["<|AUDIO|>"],
        "vision_start_token_id": ids["<|vision_bos|>"],
        "vision_end_token_id": ids["<|vision_eos|>"],
        "audio_start_token_id": ids["<|audio_bos|>"],
        "audio_end_token_id": ids["<|audio_eos|>"],
        "position_id_per_seconds": 25,
        "seconds_per_chunk": 2,
        "text_config": text_config(dimensions, ids, "qwen2_5_omni_text"),
        "vision_config": vision_config(dimensions, "qwen2_5_omni_vision_encoder"),
        "audio_config": {
            **dimensions.audio,
            "model_type": "qwen2_5_omni_audio_encoder",
            "activation_function": "gelu",
            "max_source_positions": 1500,
            "n_window": 100,
            "num_mel_bins": 128,
            "output_dim": dimensions.text["hidden_size"],
        },
    }
