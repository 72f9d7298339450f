"""The files of a Gemma 4 checkpoint that ``mmrt model make`` writes besides weights."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..family import CheckpointRecipe

_SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>")
_CHAT_TEMPLATE = """\
{{- '<bos>' -}}
{%- for message in messages -%}
{{- '<|turn>' ~ ('model' if message.role == 'assistant' else message.role) ~ '\\n' ~ message.content | trim ~ '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn>model\\n' -}}{%- endif -%}
"""


class _Shape(NamedTuple):
    dtype: str
    num_merges: int
    sizes: dict[str, Any]


def _sizes(vocab: int, hidden: int, inner: int, inputs: int, layers: int, shared: int, interval: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "vocab_size_per_layer_input": vocab,
        "hidden_size": hidden,
        "hidden_size_per_layer_input": inputs,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_kv_shared_layers": shared,
        "layer_types": ["sliding_attention" if number % interval else "full_attention" for number in range(1, layers + 1)],
    }


def _heads(heads: int, kv_heads: int, head_dim: int, window: int, context: int) -> dict[str, Any]:
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "global_head_dim": 2 * head_dim,
        "sliding_window": window,
        "max_position_embeddings": context,
    }


_SHAPES = {
    "tiny": _Shape("float32", 900, {**_sizes(1216, 128, 192, 32, 8, 3, 4), **_heads(4, 2, 32, 48, 8192), "use_double_wide_mlp": True}),
    "e2b": _Shape(
        "bfloat16",
        8000,
        {**_sizes(262144, 1536, 6144, 256, 35, 20, 5), **_heads(8, 1, 256, 512, 131072), "use_double_wide_mlp": True},
    ),
    "e4b": _Shape(
        "bfloat16",
        8000,
        {**_sizes(262144, 2560, 10240, 256, 42, 18, 6), **_heads(8, 2, 256, 512, 131072), "use_double_wide_mlp": False},
    ),
}


def recipes() -> dict[str, CheckpointRecipe]:
    """By shape."""
    return {name: _recipe(shape) for name, shape in _SHAPES.items()}


def _recipe(shape: _Shape) -> CheckpointRecipe:
    def files(ids: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        ends = {"eos_token_id": [ids["<eos>"], ids["<turn|>"]], "bos_token_id": ids["<bos>"], "pad_token_id": ids["<pad>"]}
        config = {
            "architectures": ["Gemma4ForCausalLM"],
            "model_type": "gemma4_text",
            "dtype": shape.dtype,
            "final_logit_softcapping": 30.0,
            "hidden_activation": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            },
            "tie_word_embeddings": True,
            **ends,
            **shape.sizes,
        }
        return {"config.json": config, "generation_config.json": {**ends, "do_sample": True, "top_k": 64, "top_p": 0.95}}

    vocab_size = shape.sizes["vocab_size"]
    return CheckpointRecipe(vocab_size, shape.num_merges, _SPECIAL_TOKENS, (), {}, _CHAT_TEMPLATE, files, end="<eos>")
