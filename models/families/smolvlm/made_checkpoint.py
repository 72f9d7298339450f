"""The files of a SmolVLM2 or Idefics3 checkpoint that ``mmrt model make`` writes besides weights."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..family import CheckpointRecipe
from ..qwen2_5.made_checkpoint import text_sizes

_TEMPLATE = """\
<|im_start|>
{%- for message in messages -%}
{{- message.role | capitalize -}}
{%- if message.content is string -%}{{ ': ' ~ message.content }}
{%- else -%}
{{- ':' if message.content[0].type in ('image', 'image_url') else ': ' -}}
{%- for item in message.content -%}
{%- if item.type == 'image' or item.type == 'image_url' -%}<image>
{%- elif item.type == 'text' -%}{{ item.text }}
{%- else -%}{{ raise_exception('this model takes no content part of type ' ~ item.type) }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<end_of_utterance>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}
"""
_MOST_TILES = 6  # in a row or column that have tags


class _Shape(NamedTuple):
    """Sizes, and the numbers that text and pictures differ by: ``theta`` of the rope, ``merge`` x ``merge`` patches of a token."""

    model_type: str
    architecture: str
    dtype: str
    num_merges: int
    text: dict[str, int]
    theta: float
    vision: dict[str, int]
    merge: int


def _vision(layers: int, hidden: int, inner: int, heads: int, patch: int, side: int) -> dict[str, int]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads}
    return {**sizes, "patch_size": patch, "image_size": side}


def _smolvlm(text: dict[str, int], theta: float, vision: dict[str, int], merge: int) -> _Shape:
    return _Shape("smolvlm", "SmolVLMForConditionalGeneration", "bfloat16", 8000, text, theta, vision, merge)


_BASE = _vision(12, 768, 3072, 12, 16, 512)
_SHAPES = {
    "tiny": _smolvlm(text_sizes(1216, 128, 192, 4, 4, 2), 1e5, _vision(3, 144, 96, 2, 14, 58), 2)._replace(
        dtype="float32", num_merges=900
    ),
    "256m": _smolvlm(text_sizes(49280, 576, 1536, 30, 9, 3, 8192), 1e5, _BASE, 4),
    "500m": _smolvlm(text_sizes(49280, 960, 2560, 32, 15, 5, 8192), 1e5, _BASE, 4),
    "2.2b": _smolvlm(text_sizes(49280, 2048, 8192, 24, 32, 32, 8192), 273768.0, _vision(27, 1152, 4304, 16, 14, 384), 3),
    "idefics3-8b": _Shape(
        "idefics3",
        "Idefics3ForConditionalGeneration",
        "bfloat16",
        8000,
        text_sizes(128259, 4096, 14336, 32, 32, 8, 131072),
        5e5,
        _vision(27, 1152, 4304, 16, 14, 364),
        2,
    ),
}
_SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 1 + _MOST_TILES) for column in range(1, 1 + _MOST_TILES)),
)


def recipes() -> dict[str, CheckpointRecipe]:
    """By shape."""
    return {name: _recipe(shape) for name, shape in _SHAPES.items()}


def _recipe(shape: _Shape) -> CheckpointRecipe:
    side = shape.vision["image_size"]
    processor = {
        "image_processor_type": "SmolVLMImageProcessor" if shape.model_type == "smolvlm" else "Idefics3ImageProcessor",
        "processor_class": "SmolVLMProcessor" if shape.model_type == "smolvlm" else "Idefics3Processor",
        "do_image_splitting": True,
        "do_pad": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 1,
        "size": {"longest_edge": 4 * side},
        "max_image_size": {"longest_edge": side},
    }

    def files(ids: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        ends = {"eos_token_id": ids["<end_of_utterance>"], "pad_token_id": ids["<|endoftext|>"]}
        text = {
            **shape.text,
            "model_type": "llama",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": shape.theta},
            "tie_word_embeddings": False,
            "bos_token_id": ids["<|im_start|>"],
            **ends,
        }
        config = {
            "architectures": [shape.architecture],
            "model_type": shape.model_type,
            "dtype": shape.dtype,
            "tie_word_embeddings": False,
            "scale_factor": shape.merge,
            "image_token_id": ids["<image>"],
            "text_config": text,
            "vision_config": {**shape.vision, "model_type": f"{shape.model_type}_vision", "hidden_act": "gelu_pytorch_tanh"},
        }
        num_tokens = (side // shape.vision["patch_size"] // shape.merge) ** 2
        return {
            "config.json": config,
            "preprocessor_config.json": processor,
            "processor_config.json": {"image_seq_len": num_tokens, "processor_class": processor["processor_class"]},
            "generation_config.json": {**ends, "do_sample": False},
        }

    vocab_size = shape.text["vocab_size"]
    end = "<end_of_utterance>"
    return CheckpointRecipe(vocab_size, shape.num_merges, _SPECIAL_TOKENS, (), {}, _TEMPLATE, files, end=end)
