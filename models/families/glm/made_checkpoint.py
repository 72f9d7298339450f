"""The files of a GLM checkpoint that ``mmrt model make`` writes besides weights."""

from collections.abc import Mapping
from typing import Any

from ..family import CheckpointRecipe
from ..qwen2_5.made_checkpoint import IMAGE_PROCESSOR, Dimensions, text_sizes

_SPECIAL_TOKENS = (
    "<|endoftext|> [MASK] [gMASK] [sMASK] <sop> <eop> <|system|> <|user|> <|assistant|> <|observation|> <|begin_of_image|> "
    "<|end_of_image|> <|begin_of_video|> <|end_of_video|> <|image|> <|video|>"
).split()
_PLAIN_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_CHAT_TEMPLATE = """\
[gMASK]<sop>
{%- for message in messages -%}
{{- '<|' ~ message.role ~ '|>\\n' -}}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for item in message.content -%}
{%- if item.type == 'image' or item.type == 'image_url' -%}<|begin_of_image|><|image|><|end_of_image|>
{%- elif item.type == 'video' or item.type == 'video_url' -%}<|begin_of_video|><|video|><|end_of_video|>
{%- elif item.type == 'text' -%}{{ item.text }}
{%- else -%}{{ raise_exception('this model takes no content part of type ' ~ item.type) }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""
_FENCES = {"start": "begin", "end": "end"}
_ARCHITECTURES = {
    "glm_ocr": "GlmOcrForConditionalGeneration",
    "glm4v": "Glm4vForConditionalGeneration",
    "glm46v": "Glm46VForConditionalGeneration",
}
_PROCESSORS = {"glm_ocr": "Glm46V", "glm4v": "Glm4v", "glm46v": "Glm46V"}


def _vision(depth: int, hidden: int, inner: int, heads: int) -> dict[str, int]:
    return {"depth": depth, "hidden_size": hidden, "intermediate_size": inner, "num_heads": heads}


_OCR = {
    "tiny": Dimensions("float32", 900, False, {**text_sizes(1216, 128, 192, 4, 4, 2), "head_dim": 64}, _vision(3, 64, 96, 4)),
    "0.9b": Dimensions(
        "bfloat16",
        8000,
        False,
        {**text_sizes(59392, 1536, 4608, 16, 16, 8, 131072), "head_dim": 128},
        _vision(24, 1024, 4096, 16),
    ),
}
_4V = {
    "tiny": Dimensions("float32", 900, False, text_sizes(1216, 128, 192, 4, 4, 2), _vision(3, 64, 160, 4)),
    "9b": Dimensions("bfloat16", 8000, False, text_sizes(151552, 4096, 13696, 40, 32, 2, 65536), _vision(24, 1536, 13696, 12)),
}


def recipes(family: str) -> dict[str, CheckpointRecipe]:
    """By shape."""
    return {shape: _recipe(family, dimensions) for shape, dimensions in (_OCR if family == "glm_ocr" else _4V).items()}


def _recipe(family: str, dimensions: Dimensions) -> CheckpointRecipe:
    text, vision = _text(family, dimensions), _tower(family, dimensions)

    def files(ids: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        ends = {"eos_token_id": [ids["<|endoftext|>"], ids["<|user|>"]], "pad_token_id": ids["<|endoftext|>"]}
        config = {
            "architectures": [_ARCHITECTURES[family]],
            "model_type": family,
            "dtype": dimensions.dtype,
            "tie_word_embeddings": dimensions.tie,
            "text_config": {**text, **ends},
            "vision_config": vision,
            **{f"{name}_token_id": ids[f"<|{name}|>"] for name in ("image", "video")},
            **{f"{kind}_{end}_token_id": ids[f"<|{word}_of_{kind}|>"] for kind in ("image", "video") for end, word in _FENCES.items()},
        }
        generation = {**ends, "do_sample": False}
        image, video = _processors(family)
        return {
            "preprocessor_config.json": image,
            "video_preprocessor_config.json": video,
            "config.json": config,
            "generation_config.json": generation,
        }

    vocab_size, merges = dimensions.text["vocab_size"], dimensions.num_merges
    return CheckpointRecipe(vocab_size, merges, _SPECIAL_TOKENS, _PLAIN_TOKENS, {}, _CHAT_TEMPLATE, files, end="<|endoftext|>")


def _text(family: str, dimensions: Dimensions) -> dict[str, Any]:
    """``text_config``. Half of a head turns; in GLM-OCR all of it, which the file says: llama.cpp takes half where it is silent."""
    sizes, is_ocr = dimensions.text, family == "glm_ocr"
    pairs = sizes.get("head_dim", sizes["hidden_size"] // sizes["num_attention_heads"]) // (2 if is_ocr else 4)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [pairs - 2 * (pairs * 3 // 8), *[pairs * 3 // 8] * 2]}
    return {
        **sizes,
        "model_type": "glm_ocr_text" if is_ocr else "glm4v_text",
        "attention_bias": not is_ocr,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {**rope, "partial_rotary_factor": 1.0 if is_ocr else 0.5},
        "tie_word_embeddings": dimensions.tie,
    }


def _tower(family: str, dimensions: Dimensions) -> dict[str, Any]:
    """``vision_config``."""
    return {
        **dimensions.vision,
        "model_type": "glm_ocr_vision" if family == "glm_ocr" else "glm4v_vision",
        "attention_bias": family == "glm_ocr",
        "hidden_act": "silu",
        "image_size": 336,
        "in_channels": 3,
        "out_hidden_size": dimensions.text["hidden_size"],
        "patch_size": 14,
        "rms_norm_eps": 1e-5,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


def _processors(family: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of pictures and of videos."""
    name = _PROCESSORS[family]
    both = {field: value for field, value in IMAGE_PROCESSOR.items() if not field.endswith(("_pixels", "_type"))}
    both["processor_class"] = f"{name}Processor"
    image = {"image_processor_type": f"{name}ImageProcessor", "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 12288}}
    video = {
        "video_processor_type": f"{name}VideoProcessor",
        "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 60000},
        "fps": 2,
        "num_frames": 16,  # as published, and not used
        "max_duration": 300,
    }
    return {**both, **image}, {**both, **video}
