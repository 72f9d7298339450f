"""The files of a PaddleOCR-VL checkpoint that ``mmrt model make`` writes besides weights."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..family import CheckpointRecipe
from ..qwen2_5.made_checkpoint import IMAGE_PROCESSOR, text_sizes

_SPECIAL_TOKENS = ("<unk>", "<|begin_of_sentence|>", "</s>", "<|IMAGE_START|>", "<|IMAGE_END|>", "<|IMAGE_PLACEHOLDER|>")
_TOKENS = {"image_token": "<|IMAGE_PLACEHOLDER|>"}
_TEMPLATE = """\
{{- '<|begin_of_sentence|>' -}}
{%- for message in messages -%}
{{- 'User: ' if message.role == 'user' else 'Assistant:\\n' if message.role == 'assistant' else '' -}}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for item in message.content -%}
{%- if item.type == 'image' or item.type == 'image_url' -%}<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>
{%- elif item.type == 'text' -%}{{ item.text }}
{%- else -%}{{ raise_exception('this model takes no content part of type ' ~ item.type) }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '</s>' if message.role == 'assistant' else '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant:\\n' -}}{%- endif -%}
"""


class _Shape(NamedTuple):
    """Sizes. Heads are wider than their share of the decoder."""

    dtype: str
    num_merges: int
    text: dict[str, int]
    head_dim: int
    vision: dict[str, int]


def _vision(layers: int, hidden: int, inner: int, side: int) -> dict[str, int]:
    return {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner, "image_size": side}


_SHAPES = {
    "tiny": _Shape("float32", 900, text_sizes(1216, 128, 192, 4, 3, 1), 64, _vision(3, 72, 100, 112)),
    "0.9b": _Shape(
        "bfloat16",
        8000,
        text_sizes(103424, 1024, 3072, 18, 16, 2, 131072),
        128,
        _vision(27, 1152, 4304, 384),
    ),
}


def recipes() -> dict[str, CheckpointRecipe]:
    """By shape."""
    return {name: _recipe(shape) for name, shape in _SHAPES.items()}


def _recipe(shape: _Shape) -> CheckpointRecipe:
    is_tiny = shape.dtype == "float32"
    bounds = {"min_pixels": 60 * 60, "max_pixels": 224 * 252} if is_tiny else {"min_pixels": 147384, "max_pixels": 2822400}
    image = {
        "image_processor_type": "PaddleOCRVLImageProcessor",
        "processor_class": "PaddleOCRVLProcessor",
        **bounds,
        **{name: IMAGE_PROCESSOR[name] for name in ("image_mean", "image_std")},
        "patch_size": 14,
        "temporal_patch_size": 1,
        "merge_size": 2,
    }
    side = shape.head_dim // 2 * 3 // 8

    def files(ids: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        ends = {"eos_token_id": ids["</s>"], "pad_token_id": ids["<unk>"], "bos_token_id": ids["<|begin_of_sentence|>"]}
        text = {
            **shape.text,
            **ends,
            "model_type": "paddleocr_vl_text",
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "use_bias": False,
            "tie_word_embeddings": not is_tiny,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500000.0,
                "mrope_section": [shape.head_dim // 2 - 2 * side, side, side],
            },
        }
        vision = {
            "model_type": "paddleocr_vl_vision",
            **shape.vision,
            "num_attention_heads": 2 if is_tiny else 16,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "hidden_act": "gelu_pytorch_tanh",
        }
        config = {
            "architectures": ["PaddleOCRVLForConditionalGeneration"],
            "model_type": "paddleocr_vl",
            "dtype": shape.dtype,
            "tie_word_embeddings": not is_tiny,
            "image_token_id": ids["<|IMAGE_PLACEHOLDER|>"],
            "video_token_id": shape.text["vocab_size"] - 1,
            "vision_start_token_id": ids["<|IMAGE_START|>"],
            "vision_end_token_id": ids["<|IMAGE_END|>"],
            "text_config": text,
            "vision_config": vision,
        }
        return {"config.json": config, "preprocessor_config.json": image, "generation_config.json": {**ends, "do_sample": False}}

    vocab_size = shape.text["vocab_size"]
    return CheckpointRecipe(vocab_size, shape.num_merges, _SPECIAL_TOKENS, (), _TOKENS, _TEMPLATE, files, end="</s>")
