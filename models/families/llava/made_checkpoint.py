"""The files of a LLaVA checkpoint, 1.5, NeXT or OneVision, that ``mmrt model make`` writes besides weights."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..family import CheckpointRecipe
from ..qwen2_5.made_checkpoint import IMAGE_PROCESSOR, text_sizes

_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>")
_ONE_VISION_TOKENS = (*_SPECIAL_TOKENS, "<video>")
_TEMPLATE = """\
{%- for message in messages -%}
{{- message.role | upper ~ ': ' -}}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for item in message.content -%}
{%- if item.type == 'image' or item.type == 'image_url' -%}{{- '<image>\\n' -}}
{%- elif item.type == 'text' -%}{{ item.text }}
{%- else -%}{{ raise_exception('this model takes no content part of type ' ~ item.type) }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>' if message.role == 'assistant' else ' ' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}
"""
_ONE_VISION_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' ~ message.role ~ ' ' -}}
{%- if message.content is string -%}{{ '\\n' ~ message.content }}
{%- else -%}
{%- for item in message.content -%}
{%- if item.type == 'image' or item.type == 'image_url' -%}<image>
{%- elif item.type == 'video' or item.type == 'video_url' -%}<video>
{%- elif item.type == 'text' -%}{{ '\\n' ~ item.text }}
{%- else -%}{{ raise_exception('this model takes no content part of type ' ~ item.type) }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


class _Shape(NamedTuple):
    """Sizes, and the kind of decoder."""

    model_type: str
    dtype: str
    num_merges: int
    text: dict[str, Any]
    vision: dict[str, int]


def _vision(layers: int, hidden: int, inner: int, heads: int, side: int) -> dict[str, int]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads}
    return {**sizes, "patch_size": 14, "image_size": side, "projection_dim": hidden}


_SIGLIP = _vision(26, 1152, 4304, 16, 384)
_CLIP_L = _vision(24, 1024, 4096, 16, 336)
_VICUNA = _Shape("llama", "bfloat16", 8000, text_sizes(32064, 4096, 11008, 32, 32, 32, 4096), _CLIP_L)
_TINY = _Shape("llama", "float32", 900, text_sizes(1216, 128, 192, 4, 4, 2), _vision(4, 64, 96, 4, 58))
_SHAPES = {
    "llava": {
        "tiny": _TINY,
        "7b": _VICUNA,
        "13b": _VICUNA._replace(text=text_sizes(32064, 5120, 13824, 40, 40, 40, 4096)),
    },
    "llava_next": {
        "tiny": _TINY._replace(model_type="mistral"),
        "7b": _VICUNA,
        "mistral-7b": _VICUNA._replace(model_type="mistral", text=text_sizes(32064, 4096, 14336, 32, 32, 8, 32768)),
    },
}
_SHAPES_OF_ONE_VISION = {
    "tiny": _TINY._replace(model_type="qwen2", vision=_vision(3, 72, 96, 2, 72)),
    "0.5b": _Shape("qwen2", "bfloat16", 8000, text_sizes(152000, 896, 4864, 24, 14, 2), _SIGLIP),
    "7b": _Shape("qwen2", "bfloat16", 8000, text_sizes(152128, 3584, 18944, 28, 28, 4), _SIGLIP),
}
_CLASSES = {"llava": "LlavaForConditionalGeneration", "llava_next": "LlavaNextForConditionalGeneration"}


def recipes(family: str) -> dict[str, CheckpointRecipe]:
    """By shape."""
    if family == "llava_onevision":
        return {name: _recipe_of_one_vision(shape) for name, shape in _SHAPES_OF_ONE_VISION.items()}
    return {name: _recipe(family, shape) for name, shape in _SHAPES[family].items()}


def _recipe(family: str, shape: _Shape) -> CheckpointRecipe:
    side = shape.vision["image_size"]
    grids = [[side * rows, side * columns] for rows, columns in ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))]
    processor: dict[str, Any] = {
        "image_processor_type": "CLIPImageProcessor" if family == "llava" else "LlavaNextImageProcessor",
        "processor_class": "LlavaProcessor" if family == "llava" else "LlavaNextProcessor",
        "size": {"shortest_edge": side},
        "crop_size": {"height": side, "width": side},
        **{name: IMAGE_PROCESSOR[name] for name in ("image_mean", "image_std")},
        **({"image_grid_pinpoints": grids} if family == "llava_next" else {}),
    }

    def files(ids: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        ends = {"eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"], "bos_token_id": None}
        text = {
            **shape.text,
            **ends,
            "model_type": shape.model_type,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": False,
        }
        text |= {"sliding_window": None} if shape.model_type == "mistral" else {}
        config = {
            "architectures": [_CLASSES[family]],
            "model_type": family,
            "dtype": shape.dtype,
            "tie_word_embeddings": False,
            "image_token_index": ids["<image>"],
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
            "text_config": text,
            "vision_config": {**shape.vision, "model_type": "clip_vision_model", "hidden_act": "quick_gelu"},
            **({"image_grid_pinpoints": grids} if family == "llava_next" else {}),
        }
        generation = {**ends, "do_sample": False}
        return {"preprocessor_config.json": processor, "config.json": config, "generation_config.json": generation}

    vocab_size = shape.text["vocab_size"]
    return CheckpointRecipe(vocab_size, shape.num_merges, _SPECIAL_TOKENS, (), {}, _TEMPLATE, files)


def _recipe_of_one_vision(shape: _Shape) -> CheckpointRecipe:
    side, is_tiny = shape.vision["image_size"], shape.dtype == "float32"
    most = 2 if is_tiny else 9
    grids = [[side * rows, side * columns] for rows in range(1, 4 if is_tiny else 7) for columns in range(1, 7)]
    colours = {"image_mean": [0.5, 0.4, 0.3] if is_tiny else [0.5] * 3, "image_std": [0.5] * 3}
    image: dict[str, Any] = {
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "processor_class": "LlavaOnevisionProcessor",
        "size": {"height": side, "width": side},
        "image_grid_pinpoints": grids,
        **colours,
    }
    video = {"video_processor_type": "LlavaOnevisionVideoProcessor", "size": {"height": side, "width": side}, **colours}
    processor = {
        "num_image_tokens": (side // 14) ** 2,
        "vision_feature_select_strategy": "full",
        "vision_aspect_ratio": f"anyres_max_{most}",
    }

    def files(ids: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        ends = {"eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"], "bos_token_id": None}
        text = {
            **shape.text,
            **ends,
            "model_type": "qwen2",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "use_sliding_window": False,
            "tie_word_embeddings": shape.text["hidden_size"] == 896,
        }
        config = {
            "architectures": ["LlavaOnevisionForConditionalGeneration"],
            "model_type": "llava_onevision",
            "dtype": shape.dtype,
            "tie_word_embeddings": shape.text["hidden_size"] == 896,
            "image_token_index": ids["<image>"],
            "video_token_index": ids["<video>"],
            "vision_aspect_ratio": f"anyres_max_{most}",
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "image_grid_pinpoints": grids,
            "text_config": text,
            "vision_config": {
                **{name: value for name, value in shape.vision.items() if name != "projection_dim"},
                "model_type": "siglip_vision_model",
                "hidden_act": "gelu_pytorch_tanh",
                "vision_use_head": False,
            },
        }
        return {
            "config.json": config,
            "preprocessor_config.json": image,
            "video_preprocessor_config.json": video,
            "processor_config.json": processor,
            "generation_config.json": {**ends, "do_sample": False},
        }

    vocab_size = shape.text["vocab_size"]
    return CheckpointRecipe(vocab_size, shape.num_merges, _ONE_VISION_TOKENS, (), {}, _ONE_VISION_TEMPLATE, files)
