"""The files of a Qwen3-ASR checkpoint that ``mmrt model make`` writes besides weights."""

from collections.abc import Mapping
from typing import Any

from ..family import CheckpointRecipe
from ..qwen2_5.made_checkpoint import PLAIN_TOKENS, Dimensions, audio_sizes, eos_token_ids, text_sizes

_SPECIAL_TOKENS = "<|endoftext|> <|im_start|> <|im_end|> <|audio_start|> <|audio_end|> <|audio_pad|>".split()
_TOKEN_NAMES = {"audio_token": "<|audio_pad|>", "audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>"}
_CHAT_TEMPLATE = """\
{%- if messages[0].role != 'system' -%}{{- '<|im_start|>system\\n<|im_end|>\\n' -}}{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' ~ message.role ~ '\\n' -}}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for item in message.content -%}
{%- if item.type in ('audio', 'audio_url', 'input_audio') -%}<|audio_start|><|audio_pad|><|audio_end|>
{%- elif item.type == 'text' -%}{{ item.text }}
{%- else -%}{{ raise_exception('this model takes no content part of type ' ~ item.type) }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
_PROCESSOR = {
    "processor_class": "Qwen3ASRProcessor",
    "feature_extractor_type": "Qwen3ASRFeatureExtractor",
    "feature_size": 128,
    "sampling_rate": 16000,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": 30,
    "min_length": 8000,
    "n_window": 50,
    "padding_value": 0.0,
    "return_attention_mask": True,
}


def _shape(hidden: int, inner: int, sound: dict[str, int]) -> Dimensions:
    text = {**text_sizes(151936, hidden, inner, 28, 16, 8, 65536), "head_dim": 128}
    return Dimensions("bfloat16", 8000, True, text, {}, {**sound, "downsample_hidden_size": 480})


_SHAPES = {
    "tiny": Dimensions(
        "float32",
        900,
        False,
        {**text_sizes(1216, 128, 256, 4, 4, 2), "head_dim": 64},
        {},
        {**audio_sizes(2, 64, 128, 4), "downsample_hidden_size": 24},
    ),
    "0.6b": _shape(1024, 3072, audio_sizes(18, 896, 3584, 14)),
    "1.7b": _shape(2048, 6144, audio_sizes(24, 1024, 4096, 16)),
}


def recipes() -> dict[str, CheckpointRecipe]:
    """By shape."""
    return {shape: _recipe(dimensions) for shape, dimensions in _SHAPES.items()}


def _recipe(dimensions: Dimensions) -> CheckpointRecipe:
    text = {
        **dimensions.text,
        "model_type": "qwen3",
        "attention_bias": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": dimensions.tie,
    }
    audio = {
        **dimensions.audio,
        "model_type": "qwen3_asr_encoder",
        "activation_function": "gelu",
        "max_position_embeddings": 13,
        "n_window": 50,
        "n_window_infer": 800,
        "num_mel_bins": 128,
        "output_dim": dimensions.text["hidden_size"],
    }

    def files(ids: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        ends = {"eos_token_id": eos_token_ids(ids)[::-1], "pad_token_id": ids["<|im_end|>"]}
        config = {
            "architectures": ["Qwen3ASRForConditionalGeneration"],
            "model_type": "qwen3_asr",
            "dtype": dimensions.dtype,
            "tie_word_embeddings": dimensions.tie,
            "audio_token_id": ids["<|audio_pad|>"],
            "timestamp_token_id": ids["<timestamp>"],
            "audio_config": audio,
            "text_config": text,
            **ends,
        }
        generation = {**ends, "do_sample": False}
        return {"preprocessor_config.json": _PROCESSOR, "config.json": config, "generation_config.json": generation}

    vocab_size, merges = dimensions.text["vocab_size"], dimensions.num_merges
    plain = [*PLAIN_TOKENS, "<asr_text>", "<timestamp>"]
    return CheckpointRecipe(vocab_size, merges, _SPECIAL_TOKENS, plain, _TOKEN_NAMES, _CHAT_TEMPLATE, files)
