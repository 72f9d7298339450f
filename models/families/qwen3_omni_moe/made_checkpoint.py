"""The files of a Qwen3-Omni checkpoint, its thinker alone, that ``mmrt model make`` writes besides weights."""

from collections.abc import Mapping
from typing import Any

from ..family import CheckpointRecipe
from ..qwen2_5.made_checkpoint import PLAIN_TOKENS, Dimensions, audio_sizes, chat_template, expert_sizes, generation_config, text_sizes
from ..qwen3.made_vision import LARGE, vision_config, vision_sizes

_SPECIAL_TOKENS = (
    "<|endoftext|> <|im_start|> <|im_end|> <|audio_start|> <|audio_end|> <|audio_pad|> <|vision_start|> <|vision_end|> "
    "<|vision_pad|> <|image_pad|> <|video_pad|>"
).split()
_TOKEN_NAMES = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
_AUDIO_BRANCH = "{%- elif item.type in ('audio', 'audio_url', 'input_audio') -%}<|audio_start|><|audio_pad|><|audio_end|>\n"
_TEMPLATE = chat_template("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", _AUDIO_BRANCH)
_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "feature_extractor_type": "WhisperFeatureExtractor",
    "processor_class": "Qwen3OmniMoeProcessor",
    **{"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 3136, "max_pixels": 12845056},
    **{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
    **{"feature_size": 128, "sampling_rate": 16000, "hop_length": 160, "n_fft": 400, "chunk_length": 300, "padding_value": 0.0},
    "return_attention_mask": True,
}
_SHAPES = {
    "tiny": (
        Dimensions(
            *("float32", 900, False),
            {**text_sizes(1216, 128, 256, 5, 4, 2), "head_dim": 64, **expert_sizes(8, 2, 64)},
            {**vision_sizes(5, 64, 128, 4, 144), "deepstack_visual_indexes": [0, 2, 3]},
            {**audio_sizes(2, 64, 128, 4), "downsample_hidden_size": 24},
        )
    ),
    "30b-a3b": (
        Dimensions(
            *("bfloat16", 8000, False),
            {**text_sizes(152064, 2048, 768, 48, 32, 4, 65536), "head_dim": 128, **expert_sizes(128, 8, 768)},
            {**LARGE, "deepstack_visual_indexes": [8, 16, 24]},
            {**audio_sizes(32, 1280, 5120, 20), "downsample_hidden_size": 480},
        )
    ),
}


def recipes() -> dict[str, CheckpointRecipe]:
    """By shape."""
    return {shape: _recipe(dimensions) for shape, dimensions in _SHAPES.items()}


def _recipe(dimensions: Dimensions) -> CheckpointRecipe:
    pairs = dimensions.text["head_dim"] // 2
    side = pairs * 5 // 16

    def files(ids: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [pairs - 2 * side, side, side], "mrope_interleaved": True}
        text = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "norm_topk_prob": True, "rope_parameters": rope}
        sounds = {
            **{"activation_function": "gelu", "max_source_positions": 1500, "n_window": 50, "n_window_infer": 800},
            **{"num_mel_bins": 128, "output_dim": dimensions.text["hidden_size"]},
        }
        config = {
            "architectures": ["Qwen3OmniMoeThinkerForConditionalGeneration"],
            "model_type": "qwen3_omni_moe_thinker",
            "dtype": dimensions.dtype,
            "tie_word_embeddings": dimensions.tie,
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
            "audio_token_id": ids["<|audio_pad|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
            "audio_start_token_id": ids["<|audio_start|>"],
            "audio_end_token_id": ids["<|audio_end|>"],
            "position_id_per_seconds": 13,
            "text_config": {**dimensions.text, **text, "model_type": "qwen3_omni_moe_text"},
            "vision_config": {**vision_config(dimensions), "model_type": "qwen3_omni_moe_vision_encoder"},
            "audio_config": {**dimensions.audio, **sounds, "model_type": "qwen3_omni_moe_audio_encoder"},
        }
        return {"preprocessor_config.json": _PROCESSOR, "config.json": config, "generation_config.json": generation_config(ids)}

    vocab_size, merges = dimensions.text["vocab_size"], dimensions.num_merges
    return CheckpointRecipe(vocab_size, merges, _SPECIAL_TOKENS, PLAIN_TOKENS, _TOKEN_NAMES, _TEMPLATE, files, are_stacked=True)
