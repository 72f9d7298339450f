"""The files of a checkpoint of text alone that ``mmrt model make`` writes besides weights."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..family import CheckpointRecipe
from ..qwen2_5.made_checkpoint import PLAIN_TOKENS, expert_sizes, generation_config

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
_LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


class _Shape(NamedTuple):
    """Sizes, named as in config.json, and what else is the family's."""

    dtype: str
    num_merges: int
    sizes: dict[str, Any]


def _sizes(
    vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, *, context: int, theta: float
) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    }


def _experts(num_experts: int, top_k: int, size: int, head_dim: int) -> dict[str, Any]:
    return {
        **expert_sizes(num_experts, top_k, size),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "head_dim": head_dim,
        "tie_word_embeddings": False,
    }


def _llama_3(factor: float, tied: bool, *sizes: int) -> _Shape:
    rope = {"rope_theta": 5e5, **_LLAMA_3, "factor": factor, "original_max_position_embeddings": 8192}
    return _Shape(
        "bfloat16", 8000, {**_sizes(128256, *sizes, context=131072, theta=5e5), "rope_parameters": rope, "tie_word_embeddings": tied}
    )


def _smollm2(theta: float, *sizes: int) -> _Shape:
    return _Shape("bfloat16", 8000, {**_sizes(49152, *sizes, context=8192, theta=theta), "tie_word_embeddings": True})


def _mistral(vocab: int, theta: float, window: int | None) -> _Shape:
    sizes = _sizes(vocab, 4096, 14336, 32, 32, 8, context=32768, theta=theta)
    return _Shape("bfloat16", 8000, {**sizes, "sliding_window": window, "tie_word_embeddings": False})


def _qwen2(vocab: int, tied: bool, *sizes: int) -> _Shape:
    return _Shape("bfloat16", 8000, {**_sizes(vocab, *sizes, context=32768, theta=1e6), "tie_word_embeddings": tied})


def _qwen3(tied: bool, *sizes: int) -> _Shape:
    return _Shape("bfloat16", 8000, {**_sizes(151936, *sizes, context=40960, theta=1e6), "head_dim": 128, "tie_word_embeddings": tied})


def _phi(vocab: int, theta: float, context: int, *sizes: int, **others: Any) -> _Shape:
    all_sizes = _sizes(vocab, *sizes, context=context, theta=theta)
    rope = {**all_sizes["rope_parameters"], "partial_rotary_factor": 1.0}
    return _Shape(
        "bfloat16", 8000, {**all_sizes, "rope_parameters": rope, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, **others}
    )


def _long_rope(pairs: int, part: float, trained: int) -> dict[str, Any]:
    """Of Phi-3; the factors are made up."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": part, "original_max_position_embeddings": trained}
    factors = {name: [1.0 + scale * pair for pair in range(pairs)] for name, scale in (("short_factor", 0.05), ("long_factor", 0.8))}
    return {"original_max_position_embeddings": trained, "rope_parameters": {**rope, **factors}}


def _glm(context: int, has_biases: bool, epsilon: float, *sizes: int) -> _Shape:
    all_sizes = _sizes(151552, *sizes, context=context, theta=1e4)
    rope = {**all_sizes["rope_parameters"], "partial_rotary_factor": 0.5}
    others = {"head_dim": 128, "attention_bias": has_biases, "rms_norm_eps": epsilon, "tie_word_embeddings": False}
    return _Shape("bfloat16", 8000, {**all_sizes, "rope_parameters": rope, **others})


def _tiny_glm(has_biases: bool) -> _Shape:
    sizes = _sizes(1216, 128, 256, 4, 4, 2, context=8192, theta=1e4)
    return _Shape("float32", 900, {**sizes, "head_dim": 64, "attention_bias": has_biases, "tie_word_embeddings": False})


def _ernie(dtype: str, num_merges: int, head_dim: int, *sizes: int) -> _Shape:
    others = {"head_dim": head_dim, "use_bias": False, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    return _Shape(dtype, num_merges, {**_sizes(*sizes, context=131072, theta=5e5), **others})


def _seed(dtype: str, num_merges: int, head_dim: int, *sizes: int) -> _Shape:
    others = {"head_dim": head_dim, "attention_bias": True, "attention_out_bias": False, "tie_word_embeddings": False}
    return _Shape(dtype, num_merges, {**_sizes(*sizes, context=524288, theta=1e7), **others})


def _granite(dtype: str, num_merges: int, attention: float, logits: float, tied: bool, *sizes: int) -> _Shape:
    multipliers = {"embedding_multiplier": 12.0, "attention_multiplier": attention, "residual_multiplier": 0.22}
    others = {**multipliers, "logits_scaling": logits, "rms_norm_eps": 1e-5, "tie_word_embeddings": tied}
    return _Shape(dtype, num_merges, {**_sizes(*sizes, context=131072, theta=1e7), **others})


def _olmo(vocab: int, context: int, *sizes: int, **others: Any) -> _Shape:
    return _Shape("bfloat16", 8000, {**_sizes(vocab, *sizes, context=context, theta=5e5), "tie_word_embeddings": False, **others})


def _olmo3_ropes(factor: float, trained: int) -> dict[str, Any]:
    full = {"rope_type": "yarn", "rope_theta": 5e5, "factor": factor, "original_max_position_embeddings": trained}
    return {"sliding_attention": {"rope_type": "default", "rope_theta": 5e5}, "full_attention": full}


_OLMO3: dict[str, Any] = {"sliding_window": 4096, "rope_parameters": _olmo3_ropes(8.0, 8192)}
_TINY_LLAMA = _sizes(1216, 128, 256, 4, 4, 2, context=8192, theta=10000.0)
_TINY_LLAMA["rope_parameters"] |= {**_LLAMA_3, "original_max_position_embeddings": 256}
_SHAPES = {  # of the published models: hidden size, that of the feed-forward, layers, heads, heads of keys and values
    "llama": {
        "tiny": _Shape("float32", 900, {**_TINY_LLAMA, "tie_word_embeddings": False}),
        "135m": _smollm2(1e5, 576, 1536, 30, 9, 3),
        "360m": _smollm2(1e5, 960, 2560, 32, 15, 5),
        "1.7b": _smollm2(1.3e5, 2048, 8192, 24, 32, 32),
        "1b": _llama_3(32.0, True, 2048, 8192, 16, 32, 8),
        "3b": _llama_3(32.0, True, 3072, 8192, 28, 24, 8),
        "8b": _llama_3(8.0, False, 4096, 14336, 32, 32, 8),
        "70b": _llama_3(8.0, False, 8192, 28672, 80, 64, 8),
    },
    "mistral": {
        "tiny": _Shape("float32", 900, {**_sizes(1216, 128, 256, 4, 4, 2, context=8192, theta=1e4), "sliding_window": 48}),
        "7b": _mistral(32000, 1e4, window=4096),
        "7b-v0.3": _mistral(32768, 1e6, window=None),
    },
    "smollm3": {
        "tiny": _Shape("float32", 900, {**_sizes(1216, 128, 256, 4, 4, 2, context=8192, theta=5e6), "tie_word_embeddings": True}),
        "3b": _Shape(
            "bfloat16", 8000, {**_sizes(128256, 2048, 11008, 36, 16, 4, context=65536, theta=5e6), "tie_word_embeddings": True}
        ),
    },
    "phi3": {
        "tiny": _Shape(
            "float32",
            900,
            {**_sizes(1216, 128, 256, 4, 4, 2, context=8192, theta=1e4), **_long_rope(12, 0.75, 2048), "tie_word_embeddings": False},
        ),
        "mini-4k": _phi(32064, 1e4, 4096, 3072, 8192, 32, 32, 32, sliding_window=2047),
        "4-mini": _phi(200064, 1e4, 131072, 3072, 8192, 32, 24, 8, **_long_rope(48, 0.75, 4096), tie_word_embeddings=True),
        "4": _phi(100352, 2.5e5, 16384, 5120, 17920, 40, 40, 10),
    },
    "glm": {"tiny": _tiny_glm(True), "9b": _glm(131072, True, 1.5625e-7, 4096, 13696, 40, 32, 2)},
    "glm4": {
        "tiny": _tiny_glm(False),
        "9b": _glm(32768, False, 1e-5, 4096, 13696, 40, 32, 2),
        "32b": _glm(32768, False, 1e-5, 6144, 23040, 61, 48, 2),
    },
    "ernie4_5": {
        "tiny": _ernie("float32", 900, 64, 1216, 128, 256, 4, 4, 2),
        "0.3b": _ernie("bfloat16", 8000, 128, 103424, 1024, 3072, 18, 16, 2),
    },
    "seed_oss": {
        "tiny": _seed("float32", 900, 64, 1216, 128, 256, 4, 4, 2),
        "36b": _seed("bfloat16", 8000, 128, 155136, 5120, 27648, 64, 80, 8),
    },
    "granite": {
        "tiny": _granite("float32", 900, 0.1, 3.0, False, 1216, 128, 256, 4, 4, 2),
        "3.3-2b": _granite("bfloat16", 8000, 0.015625, 8.0, True, 49159, 2048, 8192, 40, 32, 8),
        "3.3-8b": _granite("bfloat16", 8000, 0.0078125, 16.0, True, 49159, 4096, 12800, 40, 32, 8),
    },
    "olmo2": {
        "tiny": _olmo(1216, 4096, 128, 256, 4, 4, 2)._replace(dtype="float32", num_merges=900),
        "1b": _olmo(100352, 4096, 2048, 8192, 16, 16, 16),
        "7b": _olmo(100352, 4096, 4096, 11008, 32, 32, 32),
        "13b": _olmo(100352, 4096, 5120, 13824, 40, 40, 40),
        "32b": _olmo(100352, 4096, 5120, 27648, 64, 40, 8),
    },
    "olmo3": {
        "tiny": _olmo(1216, 8192, 128, 256, 4, 4, 2, sliding_window=48, rope_parameters=_olmo3_ropes(4.0, 2048))._replace(
            dtype="float32", num_merges=900
        ),
        "7b": _olmo(100278, 65536, 4096, 11008, 32, 32, 32, **_OLMO3),
        "32b": _olmo(100278, 65536, 5120, 27648, 64, 40, 8, **_OLMO3),
    },
    "qwen2": {
        "tiny": _Shape("float32", 900, {**_sizes(1216, 128, 256, 4, 4, 2, context=8192, theta=1e6), "tie_word_embeddings": True}),
        "0.5b": _qwen2(151936, True, 896, 4864, 24, 14, 2),
        "1.5b": _qwen2(151936, True, 1536, 8960, 28, 12, 2),
        "3b": _qwen2(151936, True, 2048, 11008, 36, 16, 2),
        "7b": _qwen2(152064, False, 3584, 18944, 28, 28, 4),
        "14b": _qwen2(152064, False, 5120, 13824, 48, 40, 8),
        "32b": _qwen2(152064, False, 5120, 27648, 64, 40, 8),
        "72b": _qwen2(152064, False, 8192, 29568, 80, 64, 8),
    },
    "qwen3": {
        "tiny": _Shape(
            "float32", 900, {**_sizes(1216, 128, 256, 4, 4, 2, context=8192, theta=1e6), "head_dim": 64, "tie_word_embeddings": False}
        ),
        "0.6b": _qwen3(True, 1024, 3072, 28, 16, 8),
        "1.7b": _qwen3(True, 2048, 6144, 28, 16, 8),
        "4b": _qwen3(True, 2560, 9728, 36, 32, 8),
        "8b": _qwen3(False, 4096, 12288, 36, 32, 8),
        "14b": _qwen3(False, 5120, 17408, 40, 40, 8),
        "32b": _qwen3(False, 5120, 25600, 64, 64, 8),
    },
    "qwen3_moe": {
        "tiny": _Shape("float32", 900, {**_sizes(1216, 128, 256, 4, 4, 2, context=8192, theta=1e6), **_experts(8, 2, 64, 64)}),
        "30b-a3b": _Shape(
            "bfloat16", 8000, {**_sizes(151936, 2048, 6144, 48, 32, 4, context=40960, theta=1e6), **_experts(128, 8, 768, 128)}
        ),
        "235b-a22b": _Shape(
            "bfloat16", 8000, {**_sizes(151936, 4096, 12288, 94, 64, 4, context=40960, theta=1e6), **_experts(128, 8, 1536, 128)}
        ),
    },
}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def recipes(family: str) -> dict[str, CheckpointRecipe]:
    """By shape."""
    return {name: _recipe(family, shape) for name, shape in _SHAPES[family].items()}


def _recipe(family: str, shape: _Shape) -> CheckpointRecipe:
    def files(ids: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        config = {
            "architectures": [_ARCHITECTURES[family]],
            "model_type": family,
            "dtype": shape.dtype,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": None,
            **shape.sizes,
        }
        return {"config.json": config, "generation_config.json": generation_config(ids)}

    vocab_size = shape.sizes["vocab_size"]
    return CheckpointRecipe(vocab_size, shape.num_merges, SPECIAL_TOKENS, PLAIN_TOKENS, {}, CHAT_TEMPLATE, files)
