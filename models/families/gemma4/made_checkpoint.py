"""The files of a Gemma 4 checkpoint that ``mmrt model make`` writes besides weights."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..family import CheckpointRecipe

_TOKENS = {
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "video_token": "<|video|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}
_SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", *_TOKENS.values())
_IDS = {
    "image_token_id": "image_token",
    "video_token_id": "video_token",
    "audio_token_id": "audio_token",
    "boi_token_id": "boi_token",
    "eoi_token_id": "eoi_token",
    "boa_token_id": "boa_token",
    "eoa_token_index": "eoa_token",
}
_CHAT_TEMPLATE = """\
{{- '<bos>' -}}
{%- for message in messages -%}
{{- '<|turn>' ~ ('model' if message.role == 'assistant' else message.role) ~ '\\n' -}}
{%- if message.content is string -%}{{ message.content | trim }}
{%- else -%}
{%- for item in message.content -%}
{%- if item.type in ('image', 'image_url') -%}{{ '\\n\\n<|image|>\\n\\n' }}
{%- elif item.type in ('video', 'video_url') -%}{{ '\\n\\n<|video|>\\n\\n' }}
{%- elif item.type in ('audio', 'audio_url', 'input_audio') -%}<|audio|>
{%- elif item.type == 'text' -%}{{ item.text | trim }}
{%- else -%}{{ raise_exception('this model takes no content part of type ' ~ item.type) }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn>model\\n' -}}{%- endif -%}
"""


class _Shape(NamedTuple):
    dtype: str
    num_merges: int
    sizes: dict[str, Any]
    vision: dict[str, Any]
    audio: dict[str, Any]


def _tower(layers: int, hidden: int, inner: int, heads: int, head_dim: int, positions: int, *, standardize: bool) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        "position_embedding_size": positions,
        "standardize": standardize,
    }


def _conformer(layers: int, hidden: int, heads: int, channels: tuple[int, int], chunk: int, width: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "subsampling_conv_channels": list(channels),
        "attention_chunk_size": chunk,
        "attention_context_left": chunk + 1,
        "output_proj_dims": width,
    }


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


_TINY_TOWER = {**_tower(3, 96, 160, 3, 48, 900, standardize=True), "patch_size": 4, "use_clipped_linears": True}
_VISION, _AUDIO = _tower(16, 768, 3072, 12, 64, 10240, standardize=False), _conformer(12, 1024, 8, (128, 32), 12, 1536)


_LARGE = _tower(27, 1152, 4304, 16, 72, 10240, standardize=True)


def _published(sizes: dict[str, Any], heads: dict[str, Any], is_wide: bool) -> _Shape:
    return _Shape("bfloat16", 8000, {**sizes, **heads, "use_double_wide_mlp": is_wide}, _VISION, _AUDIO)


_SHAPES = {
    "tiny": _Shape(
        "float32",
        900,
        {**_sizes(1216, 128, 192, 32, 8, 3, 4), **_heads(4, 2, 32, 48, 8192), "use_double_wide_mlp": True},
        _TINY_TOWER,
        _conformer(3, 64, 4, (16, 8), 6, 40),
    ),
    "e2b": _published(_sizes(262144, 1536, 6144, 256, 35, 20, 5), _heads(8, 1, 256, 512, 131072), is_wide=True),
    "e4b": _published(_sizes(262144, 2560, 10240, 256, 42, 18, 6), _heads(8, 2, 256, 512, 131072), is_wide=False),
    "26b-a4b": _Shape(
        "bfloat16",
        8000,
        {
            **_sizes(262144, 2816, 2112, 0, 30, 0, 6),
            **_heads(16, 8, 256, 1024, 262144),
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "use_bidirectional_attention": "vision",
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
        },
        _LARGE,
        {},
    ),
    "31b": _Shape(
        "bfloat16",
        8000,
        {
            **_sizes(262144, 5376, 21504, 0, 60, 0, 6),
            **_heads(32, 16, 256, 1024, 262144),
            "num_global_key_value_heads": 4,
            "attention_k_eq_v": True,
            "use_bidirectional_attention": "vision",
        },
        _LARGE,
        {},
    ),
}


_UNIFIED_SHAPES = {
    "tiny": _Shape(
        "float32",
        900,
        {
            **_sizes(1216, 128, 192, 0, 6, 0, 3),
            **_heads(4, 2, 32, 48, 8192),
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
        },
        {"patch_size": 4, "mm_embed_dim": 96, "output_proj_dims": 96, "mm_posemb_size": 300},
        {"audio_embed_dim": 80},
    ),
    "12b": _Shape(
        "bfloat16",
        8000,
        {**_sizes(262144, 3840, 15360, 0, 48, 0, 6), **_heads(16, 8, 256, 1024, 262144)},
        {"patch_size": 16, "mm_embed_dim": 3840, "output_proj_dims": 3840, "mm_posemb_size": 1120},
        {"audio_embed_dim": 640},
    ),
}


def recipes(family: str) -> dict[str, CheckpointRecipe]:
    """By shape."""
    shapes = _SHAPES if family == "gemma4" else _UNIFIED_SHAPES
    return {name: _recipe(shape, family) for name, shape in shapes.items()}


def _recipe(shape: _Shape, family: str) -> CheckpointRecipe:
    name = family.title().replace("_", "")  # as classes begin
    pixels = {"patch_size": shape.vision.get("patch_size", 16), "pooling_kernel_size": 3, "resample": 3, "rescale_factor": 1 / 255}
    num_bins = shape.audio.get("audio_embed_dim") or shape.audio.get("subsampling_conv_channels", [128])[0]
    extractor = {"feature_extractor_type": f"{name}AudioFeatureExtractor", "feature_size": num_bins}
    if family == "gemma4_unified":
        extractor["audio_samples_per_token"] = num_bins
    processor = {
        "processor_class": f"{name}Processor",
        "image_processor": {"image_processor_type": f"{name}ImageProcessor", "max_soft_tokens": 280, "do_normalize": False, **pixels},
        "video_processor": {"video_processor_type": f"{name}VideoProcessor", "max_soft_tokens": 70, "num_frames": 32, **pixels},
        "feature_extractor": {**extractor, "sampling_rate": 16000},
    }

    def files(ids: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        ends = {"eos_token_id": [ids["<eos>"], ids["<turn|>"]], "bos_token_id": ids["<bos>"], "pad_token_id": ids["<pad>"]}
        text = {
            "model_type": f"{family}_text",
            "final_logit_softcapping": 30.0,
            "hidden_activation": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            },
            **ends,
            **shape.sizes,
        }
        config = {
            "architectures": [f"{name}ForConditionalGeneration"],
            "model_type": family,
            "dtype": shape.dtype,
            "tie_word_embeddings": True,
            "text_config": text,
            "vision_config": {"model_type": f"{family}_vision", **shape.vision},
            "audio_config": {"model_type": f"{family}_audio", **shape.audio} if shape.audio else None,
            **{field: ids[_TOKENS[token]] for field, token in _IDS.items()},
            **ends,
        }
        return {
            "config.json": config,
            "processor_config.json": processor,
            "generation_config.json": {**ends, "do_sample": True, "top_k": 64, "top_p": 0.95},
        }

    vocab_size = shape.sizes["vocab_size"]
    return CheckpointRecipe(
        vocab_size, shape.num_merges, _SPECIAL_TOKENS, (), _TOKENS, _CHAT_TEMPLATE, files, end="<eos>", are_stacked=True
    )
