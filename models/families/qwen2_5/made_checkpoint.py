"""Parts of made checkpoints shared by Qwen's families: shapes, tokens, chat template, parts of the JSON files."""

from collections.abc import Mapping
from typing import Any, NamedTuple

PLAIN_TOKENS = ("<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>").split()
_TEMPLATE = """\
{%- macro part(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}
{%- for item in content -%}
{%- if item.type == 'image' or item.type == 'image_url' -%}VISION_OPENIMAGEVISION_CLOSE
{%- elif item.type == 'video' or item.type == 'video_url' -%}VISION_OPENVIDEOVISION_CLOSE
AUDIO_BRANCH{%- elif item.type == 'text' -%}{{ item.text }}
{%- else -%}{{ raise_exception('this model takes no content part of type ' ~ item.type) }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{{- '<|im_start|>' ~ message.role ~ '\\n' -}}{{- part(message.content) -}}{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


class Dimensions(NamedTuple):
    """Sizes of a shape, named as in config.json. The last two are Qwen2.5's."""

    dtype: str
    num_merges: int
    tie: bool
    text: dict[str, int]
    vision: dict[str, Any]
    audio: dict[str, int] = {}
    full_attention_every: int = 0


def text_sizes(vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, context: int = 32768) -> dict[str, int]:
    """Of ``text_config``."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
    }


def expert_sizes(num_experts: int, top_k: int, size: int) -> dict[str, int]:
    """Of ``text_config``, besides."""
    return {"num_experts": num_experts, "num_experts_per_tok": top_k, "moe_intermediate_size": size}


def _vision(depth: int, hidden: int, inner: int, heads: int) -> dict[str, int]:
    return {"depth": depth, "hidden_size": hidden, "intermediate_size": inner, "num_heads": heads}


def audio_sizes(layers: int, hidden: int, inner: int, heads: int) -> dict[str, int]:
    """Of ``audio_config``."""
    return {
        "encoder_layers": layers,
        "d_model": hidden,
        "encoder_ffn_dim": inner,
        "encoder_attention_heads": heads,
    }


_BIG_VISION, _BIG_AUDIO = _vision(32, 1280, 3420, 16), audio_sizes(32, 1280, 5120, 20)
SHAPES: dict[str, Dimensions] = {
    "tiny": Dimensions(
        "float32", 900, False, text_sizes(1216, 128, 256, 4, 4, 2), _vision(3, 64, 128, 4), audio_sizes(2, 64, 128, 4), 2
    ),
    "small": Dimensions(
        "bfloat16", 8000, False, text_sizes(16384, 1024, 4096, 16, 16, 4), _vision(12, 640, 1708, 10), audio_sizes(6, 384, 1536, 6), 4
    ),
    "3b": Dimensions("bfloat16", 8000, True, text_sizes(151936, 2048, 11008, 36, 16, 2, 128000), _BIG_VISION, _BIG_AUDIO, 8),
    "7b": Dimensions("bfloat16", 8000, False, text_sizes(152064, 3584, 18944, 28, 28, 4, 128000), _BIG_VISION, _BIG_AUDIO, 8),
}


def text_config(dimensions: Dimensions, ids: Mapping[str, int], model_type: str) -> dict[str, Any]:
    """``text_config`` of config.json."""
    pairs = dimensions.text["hidden_size"] // dimensions.text["num_attention_heads"] // 2
    side = pairs * 3 // 8
    return {
        **dimensions.text,
        "model_type": model_type,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": dimensions.tie,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000000.0,
            "mrope_section": [pairs - 2 * side, side, side],
        },
    }


def vision_config(dimensions: Dimensions, model_type: str) -> dict[str, Any]:
    """``vision_config`` of config.json."""
    every = dimensions.full_attention_every
    return {
        **dimensions.vision,
        "model_type": model_type,
        "hidden_act": "silu",
        "in_channels": 3,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "window_size": 112,
        "out_hidden_size": dimensions.text["hidden_size"],
        "fullatt_block_indexes": list(range(every - 1, dimensions.vision["depth"], every)),
    }


def chat_template(opening: str, closing: str, image: str, video: str, audio_branch: str = "") -> str:
    """The template with these control tokens around and for media. ``audio_branch``: its branch for sound, if any."""
    replaced = {"VISION_OPEN": opening, "VISION_CLOSE": closing, "AUDIO_BRANCH": audio_branch, "IMAGE": image, "VIDEO": video}
    template = _TEMPLATE
    for name in replaced:
        template = template.replace(name, f"\0{name}\0")
    for name, text in replaced.items():
        template = template.replace(f"\0{name}\0", text)
    return template


def generation_config(ids: Mapping[str, int]) -> dict[str, Any]:
    """generation_config.json: greedy."""
    return {
        "bos_token_id": None,
        "pad_token_id": ids["<|endoftext|>"],
        "eos_token_id": eos_token_ids(ids),
        "do_sample": False,
    }


def eos_token_ids(ids: Mapping[str, int]) -> list[int]:
    """Ids that end an answer."""
    return [ids["<|im_end|>"], ids["<|endoftext|>"]]


IMAGE_PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 56 * 56,
    "max_pixels": 28 * 28 * 1280,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
