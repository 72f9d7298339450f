"""The files of a checkpoint with Pixtral's tower that ``mmrt model make`` writes besides weights."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..family import CheckpointRecipe
from ..qwen2_5.made_checkpoint import IMAGE_PROCESSOR, text_sizes

_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' ~ message.role ~ '\\n' -}}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for item in message.content -%}
{%- if item.type == 'image' or item.type == 'image_url' -%}IMAGE
{%- elif item.type == 'text' -%}{{ item.text }}
{%- else -%}{{ raise_exception('this model takes no content part of type ' ~ item.type) }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MISTRAL_TOKENS = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
_TOKENS = {
    "lighton_ocr": {"image_token": "<|image_pad|>", "image_break_token": "<|vision_pad|>", "image_end_token": "<|vision_end|>"},
    "mistral3": _MISTRAL_TOKENS,
    "pixtral": _MISTRAL_TOKENS,
}


class _Shape(NamedTuple):
    """Sizes, and the numbers that models differ by: ``unit`` of the image processor's sides, ``edge`` of its pictures."""

    dtype: str
    num_merges: int
    text: dict[str, Any]
    vision: dict[str, int]
    edge: int
    unit: int = 14


def _vision(layers: int, hidden: int, inner: int, heads: int) -> dict[str, int]:
    return {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads}


_LARGE = _vision(24, 1024, 4096, 16)
_MISTRAL = {"model_type": "mistral", "head_dim": 128, "sliding_window": None, "rms_norm_eps": 1e-5}
_MISTRAL |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e9}}
_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384, "beta_fast": 32.0}
_YARN |= {"beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
_MINISTRAL = {**_MISTRAL, "model_type": "ministral3", "rope_parameters": _YARN}
_QWEN3 = {"model_type": "qwen3", "head_dim": 128, "rms_norm_eps": 1e-6}
_QWEN3 |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
_TINY_TEXT, _TINY_VISION = text_sizes(1216, 128, 192, 4, 4, 2), _vision(3, 64, 96, 4)


def _mistral(kind: dict[str, Any], *sizes: int) -> _Shape:
    return _Shape("bfloat16", 8000, {**text_sizes(131072, *sizes), **kind}, _LARGE, 1540)


_SHAPES = {
    "lighton_ocr": {
        "tiny": _Shape("float32", 900, {**_TINY_TEXT, **_QWEN3, "head_dim": 32}, _TINY_VISION, 210),
        "1b": _Shape("bfloat16", 8000, {**text_sizes(151936, 1024, 3072, 28, 16, 8, 16384), **_QWEN3}, _LARGE, 1540),
    },
    "pixtral": {
        "tiny": _Shape("float32", 900, {**_TINY_TEXT, **_MISTRAL, "head_dim": 32}, _TINY_VISION, 210),
        "12b": _Shape("bfloat16", 8000, {**text_sizes(131072, 5120, 14336, 40, 32, 8, 1024000), **_MISTRAL}, _LARGE, 1024, 16),
    },
    "mistral3": {
        "tiny": _Shape("float32", 900, {**_TINY_TEXT, **_MISTRAL, "head_dim": 32}, _TINY_VISION, 210),
        "ministral-3b": _mistral(_MINISTRAL, 3072, 9216, 26, 32, 8, 262144),
        "ministral-8b": _mistral(_MINISTRAL, 4096, 14336, 34, 32, 8, 262144),
        "24b": _mistral(_MISTRAL, 5120, 32768, 40, 32, 8, 131072),
    },
}
_ARCHITECTURES = {"lighton_ocr": "LightOnOcr", "mistral3": "Mistral3", "pixtral": "Llava"}
_TIED = ("lighton_ocr-1b", "mistral3-ministral-3b")


def recipes(family: str) -> dict[str, CheckpointRecipe]:
    """By shape."""
    return {name: _recipe(family, shape, f"{family}-{name}" in _TIED) for name, shape in _SHAPES[family].items()}


def _recipe(family: str, shape: _Shape, is_tied: bool) -> CheckpointRecipe:
    tokens = _TOKENS[family]
    has_breaks, is_llava = family != "lighton_ocr", family == "pixtral"
    patch, merge = (shape.unit, 1) if is_llava else (14, 2)
    name = "PixtralProcessor" if has_breaks else "LightOnOcrProcessor"
    image: dict[str, Any] = {
        "image_processor_type": "PixtralImageProcessorFast",
        "processor_class": name,
        "patch_size": {"height": shape.unit, "width": shape.unit},
        "size": {"longest_edge": shape.edge},
        **{name: IMAGE_PROCESSOR[name] for name in ("image_mean", "image_std")},
    }

    def files(ids: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        ends = {"eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"], "bos_token_id": None}
        config = {
            "architectures": [f"{_ARCHITECTURES[family]}ForConditionalGeneration"],
            "model_type": "llava" if is_llava else family,
            **({"vision_feature_layer": -1, "vision_feature_select_strategy": "full"} if is_llava else {"spatial_merge_size": 2}),
            "dtype": shape.dtype,
            "tie_word_embeddings": is_tied,
            "image_token_index" if has_breaks else "image_token_id": ids[tokens["image_token"]],
            "text_config": {**shape.text, **ends, "hidden_act": "silu", "tie_word_embeddings": is_tied},
            "vision_config": {
                **shape.vision,
                "model_type": "pixtral",
                "patch_size": patch,
                "image_size": shape.edge,
                "head_dim": shape.vision["hidden_size"] // shape.vision["num_attention_heads"],
                "hidden_act": "silu",
                "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
            },
        }
        processor = {"processor_class": name, "patch_size": patch, "spatial_merge_size": merge}
        return {
            "config.json": config,
            "preprocessor_config.json": image,
            "processor_config.json": processor,
            "generation_config.json": {**ends, "do_sample": False},
        }

    special, template = (*_CONTROL, *tokens.values()), _TEMPLATE.replace("IMAGE", tokens["image_token"])
    return CheckpointRecipe(shape.text["vocab_size"], shape.num_merges, special, (), tokens, template, files)
