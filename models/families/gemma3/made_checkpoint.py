"""The files of a Gemma 3 checkpoint that ``mmrt model make`` writes besides weights."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..family import CheckpointRecipe

SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
CHAT_TEMPLATE = """\
{{- '<bos>' -}}
{%- if messages[0].role == 'system' -%}
{%- set first = messages[0].content ~ '\\n\\n' -%}{%- set turns = messages[1:] -%}
{%- else -%}
{%- set first = '' -%}{%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('turns must be of user and assistant, one after the other') -}}
{%- endif -%}
{{- '<start_of_turn>' ~ ('model' if message.role == 'assistant' else message.role) ~ '\\n' -}}
{{- (first if loop.first else '') ~ message.content | trim ~ '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""


class _Shape(NamedTuple):
    dtype: str
    num_merges: int
    sizes: dict[str, Any]


def _published(hidden: int, inner: int, layers: int) -> _Shape:
    return _Shape("bfloat16", 8000, _sizes(262144, hidden, inner, layers, 4, 1, 256, window=512, context=32768))


def _sizes(
    vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int, *, window: int, context: int
) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim,
        "sliding_window": window,
        "layer_types": ["full_attention" if number % 6 == 0 else "sliding_attention" for number in range(1, layers + 1)],
        "max_position_embeddings": context,
    }


_SHAPES = {
    "tiny": _Shape("float32", 900, _sizes(1216, 128, 256, 7, 4, 2, 64, window=48, context=8192)),
    "270m": _published(640, 2048, 18),
    "1b": _published(1152, 6912, 26),
}


def recipes() -> dict[str, CheckpointRecipe]:
    """By shape."""
    return {name: _recipe(shape) for name, shape in _SHAPES.items()}


def _recipe(shape: _Shape) -> CheckpointRecipe:
    def files(ids: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        ends = {"eos_token_id": [ids["<eos>"], ids["<end_of_turn>"]], "bos_token_id": ids["<bos>"], "pad_token_id": ids["<pad>"]}
        config = {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "dtype": shape.dtype,
            "hidden_activation": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            },
            "tie_word_embeddings": True,
            **ends,
            **shape.sizes,
        }
        return {"config.json": config, "generation_config.json": {**ends, "do_sample": True, "top_k": 64, "top_p": 0.95}}

    vocab_size, merges = shape.sizes["vocab_size"], shape.num_merges
    return CheckpointRecipe(vocab_size, merges, SPECIAL_TOKENS, (), {}, CHAT_TEMPLATE, files, end="<eos>")
