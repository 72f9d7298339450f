"""The files of a Qwen2-Audio checkpoint that ``mmrt model make`` writes besides weights."""

from collections.abc import Mapping
from typing import Any

from ..family import CheckpointRecipe
from ..qwen2_5.made_checkpoint import PLAIN_TOKENS, Dimensions, audio_sizes, generation_config, text_sizes

_SPECIAL_TOKENS = "<|endoftext|> <|im_start|> <|im_end|> <|AUDIO|> <|audio_bos|> <|audio_eos|>".split()
_TOKEN_NAMES = {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}
_CHAT_TEMPLATE = """\
{%- set sounds = namespace(number=0) -%}
{%- if messages[0].role != 'system' -%}{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' ~ message.role ~ '\\n' -}}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for item in message.content -%}
{%- if item.type in ('audio', 'audio_url', 'input_audio') -%}
{%- set sounds.number = sounds.number + 1 -%}
{{- 'Audio ' ~ sounds.number ~ ': <|audio_bos|><|AUDIO|><|audio_eos|>\\n' -}}
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
    "processor_class": "Qwen2AudioProcessor",
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "sampling_rate": 16000,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": 30,
    "padding_value": 0.0,
    "return_attention_mask": True,
}
_SHAPES = {
    "tiny": Dimensions("float32", 900, False, text_sizes(1216, 128, 256, 4, 4, 2, 8192), {}, audio_sizes(2, 64, 128, 4)),
    "7b": Dimensions("bfloat16", 8000, False, text_sizes(156032, 4096, 11008, 32, 32, 32, 8192), {}, audio_sizes(32, 1280, 5120, 20)),
}


def recipes() -> dict[str, CheckpointRecipe]:
    """By shape."""
    return {shape: _recipe(dimensions) for shape, dimensions in _SHAPES.items()}


def _recipe(dimensions: Dimensions) -> CheckpointRecipe:
    def files(ids: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        text = {
            **dimensions.text,
            "model_type": "qwen2",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": dimensions.tie,
            "use_sliding_window": False,
            "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": None,
        }
        audio = {
            **dimensions.audio,
            "model_type": "qwen2_audio_encoder",
            "activation_function": "gelu",
            "max_source_positions": 1500,
            "num_mel_bins": 128,
        }
        config = {
            "architectures": ["Qwen2AudioForConditionalGeneration"],
            "model_type": "qwen2_audio",
            "dtype": dimensions.dtype,
            "audio_token_index": ids["<|AUDIO|>"],
            "text_config": text,
            "audio_config": audio,
        }
        return {"preprocessor_config.json": _PROCESSOR, "config.json": config, "generation_config.json": generation_config(ids)}

    vocab_size, merges = dimensions.text["vocab_size"], dimensions.num_merges
    return CheckpointRecipe(vocab_size, merges, _SPECIAL_TOKENS, PLAIN_TOKENS, _TOKEN_NAMES, _CHAT_TEMPLATE, files)
