"""The files of a Gemma 3 checkpoint that ``mmrt model make`` writes besides weights."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..family import CheckpointRecipe

SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
_SEEING_TOKENS = (*SPECIAL_TOKENS, "<start_of_image>", "<end_of_image>", "<image_soft_token>")
_TOKEN_NAMES = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
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


_SEEING_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{- (first if loop.first else '') ~ message.content | trim ~ '<end_of_turn>\\n' -}}",
    """\
{{- first if loop.first else '' -}}
{%- if message.content is string -%}{{ message.content | trim }}
{%- else -%}
{%- for item in message.content -%}
{%- if item.type in ('image', 'image_url') -%}<start_of_image>
{%- elif item.type == 'text' -%}{{ item.text | trim }}
{%- else -%}{{ raise_exception('this model takes no content part of type ' ~ item.type) }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<end_of_turn>\\n' -}}""",
)


class _Shape(NamedTuple):
    """``num_tokens`` of a picture; ``factor`` by which positions of layers without a window are stretched."""

    dtype: str
    num_merges: int
    sizes: dict[str, Any]
    vision: dict[str, int] = {}
    num_tokens: int = 256
    factor: float = 1.0


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


_SIGLIP = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 14,
    "image_size": 896,
}
_TINY_TOWER = {
    "hidden_size": 96,
    "intermediate_size": 144,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "patch_size": 6,
    "image_size": 96,
}


def _seeing(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int, scalar: int = 256) -> _Shape:
    sizes = _sizes(262208, hidden, inner, layers, heads, kv_heads, head_dim, window=1024, context=131072)
    return _Shape("bfloat16", 8000, {**sizes, "query_pre_attn_scalar": scalar}, _SIGLIP, factor=8.0)


_SEEING_SHAPES = {
    "tiny": _Shape("float32", 900, _sizes(1216, 128, 256, 7, 4, 2, 64, window=48, context=8192), _TINY_TOWER, 64, 2.0),
    "4b": _seeing(2560, 10240, 34, 8, 4, 256),
    "12b": _seeing(3840, 15360, 48, 16, 8, 256),
    "27b": _seeing(5376, 21504, 62, 32, 16, 128, 168),
}


def recipes(family: str) -> dict[str, CheckpointRecipe]:
    """By shape."""
    shapes = _SHAPES if family == "gemma3" else _SEEING_SHAPES
    return {name: _recipe(shape) for name, shape in shapes.items()}


def _recipe(shape: _Shape) -> CheckpointRecipe:
    def files(ids: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        ends = {"eos_token_id": [ids["<eos>"], ids["<end_of_turn>"]], "bos_token_id": ids["<bos>"], "pad_token_id": ids["<pad>"]}
        full = {"rope_type": "default", "rope_theta": 1e6}
        text = {
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": full if shape.factor == 1.0 else {**full, "rope_type": "linear", "factor": shape.factor},
            },
            "tie_word_embeddings": True,
            **ends,
            **shape.sizes,
        }
        alone = {**text, "architectures": ["Gemma3ForCausalLM"], "dtype": shape.dtype}
        config = _seeing_config(shape, text, ids, ends) if shape.vision else alone
        generation = {"generation_config.json": {**ends, "do_sample": True, "top_k": 64, "top_p": 0.95}}
        return {"config.json": config, **generation, **(_processors(shape) if shape.vision else {})}

    vocab_size, merges = shape.sizes["vocab_size"], shape.num_merges
    if not shape.vision:
        return CheckpointRecipe(vocab_size, merges, SPECIAL_TOKENS, (), {}, CHAT_TEMPLATE, files, end="<eos>")
    return CheckpointRecipe(vocab_size, merges, _SEEING_TOKENS, (), _TOKEN_NAMES, _SEEING_TEMPLATE, files, end="<eos>")


def _seeing_config(shape: _Shape, text: dict[str, Any], ids: Mapping[str, int], ends: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "dtype": shape.dtype,
        "tie_word_embeddings": True,
        "mm_tokens_per_image": shape.num_tokens,
        "boi_token_index": ids["<start_of_image>"],
        "eoi_token_index": ids["<end_of_image>"],
        "image_token_index": ids["<image_soft_token>"],
        "text_config": text,
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_act": "gelu_pytorch_tanh",
            "vision_use_head": False,
            **shape.vision,
        },
        **ends,
    }


def _processors(shape: _Shape) -> dict[str, dict[str, Any]]:
    side, half = shape.vision["image_size"], [0.5, 0.5, 0.5]
    size = {"height": side, "width": side}
    image = {"image_processor_type": "Gemma3ImageProcessor", "resample": 2, "size": size, "image_mean": half, "image_std": half}
    name = {"processor_class": "Gemma3Processor"}
    return {"preprocessor_config.json": {**image, **name}, "processor_config.json": {**name, "image_seq_length": shape.num_tokens}}
