"""The files of a Qwen3.5 checkpoint of text alone that ``mmrt model make`` writes besides weights."""

from collections.abc import Mapping
from typing import Any

from ..family import CheckpointRecipe
from ..qwen2_5.made_checkpoint import PLAIN_TOKENS, generation_config
from ..text.made_checkpoint import CHAT_TEMPLATE, SPECIAL_TOKENS

_TINY_ROPE = {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [4, 2, 2]}
_ROPE = {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
_SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "dtype": "float32",
        "vocab_size": 1216,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", **_TINY_ROPE},
    },
    "9b": {
        "dtype": "bfloat16",
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", **_ROPE},
    },
}


def recipes() -> dict[str, CheckpointRecipe]:
    """By shape."""
    return {name: _recipe(sizes) for name, sizes in _SHAPES.items()}


def _recipe(sizes: dict[str, Any]) -> CheckpointRecipe:
    def files(ids: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        config = {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "full_attention_interval": 4,
            "linear_conv_kernel_dim": 4,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": None,
            **sizes,
        }
        return {"config.json": config, "generation_config.json": generation_config(ids)}

    num_merges = 900 if sizes["dtype"] == "float32" else 8000
    return CheckpointRecipe(sizes["vocab_size"], num_merges, SPECIAL_TOKENS, PLAIN_TOKENS, {}, CHAT_TEMPLATE, files)
