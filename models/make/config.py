"""The shapes that ``make`` knows, and a made checkpoint's JSON files."""

import json
from pathlib import Path
from typing import Literal, NamedTuple

from .tokenizer import Family

Shape = Literal["tiny", "small", "3b", "7b"]


class Dimensions(NamedTuple):
    """Sizes of a shape, in the words of config.json."""

    dtype: str
    num_merges: int
    tie: bool
    text: dict[str, int]
    vision: dict[str, int]
    audio: dict[str, int]
    full_attention_every: int


def _text(vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, context: int = 32768) -> dict[str, int]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
    }


def _vision(depth: int, hidden: int, inner: int, heads: int) -> dict[str, int]:
    return {"depth": depth, "hidden_size": hidden, "intermediate_size": inner, "num_heads": heads}


def _audio(layers: int, hidden: int, inner: int, heads: int) -> dict[str, int]:
    return {
        "encoder_layers": layers,
        "d_model": hidden,
        "encoder_ffn_dim": inner,
        "encoder_attention_heads": heads,
    }


_BIG_VISION, _BIG_AUDIO = _vision(32, 1280, 3420, 16), _audio(32, 1280, 5120, 20)
SHAPES: dict[Shape, Dimensions] = {
    "tiny": Dimensions("float32", 900, False, _text(1216, 128, 256, 4, 4, 2), _vision(3, 64, 128, 4), _audio(2, 64, 128, 4), 2),
    "small": Dimensions(
        "bfloat16", 8000, False, _text(16384, 1024, 4096, 16, 16, 4), _vision(12, 640, 1708, 10), _audio(6, 384, 1536, 6), 4
    ),
    "3b": Dimensions("bfloat16", 8000, True, _text(151936, 2048, 11008, 36, 16, 2, 128000), _BIG_VISION, _BIG_AUDIO, 8),
    "7b": Dimensions("bfloat16", 8000, False, _text(152064, 3584, 18944, 28, 28, 4, 128000), _BIG_VISION, _BIG_AUDIO, 8),
}


def write_configs(out: Path, family: Family, dimensions: Dimensions, ids: dict[str, int]) -> None:
    """Write config.json, generation_config.json and preprocessor_config.json; ``ids`` are those of the control tokens."""
    eos = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    if family == "null":
        config: dict[str, object] = {
            "model_type": "mmrt_null",
            "step_ms": 0.0,
            "vocab_size": dimensions.text["vocab_size"],
            "eos_token_id": eos,
        }
    else:
        config = _vl_config(dimensions, ids) if family == "qwen2_5_vl" else _omni_config(dimensions, ids)
        write_json(out / "preprocessor_config.json", _preprocessor(family))
    write_json(out / "config.json", config)
    generation: dict[str, object] = {
        "bos_token_id": None,
        "pad_token_id": ids["<|endoftext|>"],
        "eos_token_id": eos,
        "do_sample": False,
    }
    write_json(out / "generation_config.json", generation)


def write_json(file: Path, data: dict[str, object]) -> None:
    """Write an object as readable JSON."""
    file.write_text(json.dumps(data, indent=2) + "\n")


def _text_config(dimensions: Dimensions, ids: dict[str, int], model_type: str) -> dict[str, object]:
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


def _vision_config(dimensions: Dimensions, model_type: str) -> dict[str, object]:
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


def _vl_config(dimensions: Dimensions, ids: dict[str, int]) -> dict[str, object]:
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "dtype": dimensions.dtype,
        "tie_word_embeddings": dimensions.tie,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "text_config": _text_config(dimensions, ids, "qwen2_5_vl_text"),
        "vision_config": {**_vision_config(dimensions, "qwen2_5_vl_vision"), "tokens_per_second": 4},
    }


def _omni_config(dimensions: Dimensions, ids: dict[str, int]) -> dict[str, object]:
    return {
        "architectures": ["Qwen2_5OmniThinkerForConditionalGeneration"],
        "model_type": "qwen2_5_omni_thinker",
        "dtype": dimensions.dtype,
        "tie_word_embeddings": dimensions.tie,
        "image_token_index": ids["<|IMAGE|>"],
        "video_token_index": ids["<|VIDEO|>"],
        "audio_token_index": ids["<|AUDIO|>"],
        "vision_start_token_id": ids["<|vision_bos|>"],
        "vision_end_token_id": ids["<|vision_eos|>"],
        "audio_start_token_id": ids["<|audio_bos|>"],
        "audio_end_token_id": ids["<|audio_eos|>"],
        "position_id_per_seconds": 25,
        "seconds_per_chunk": 2,
        "text_config": _text_config(dimensions, ids, "qwen2_5_omni_text"),
        "vision_config": _vision_config(dimensions, "qwen2_5_omni_vision_encoder"),
        "audio_config": {
            **dimensions.audio,
            "model_type": "qwen2_5_omni_audio_encoder",
            "activation_function": "gelu",
            "max_source_positions": 1500,
            "n_window": 100,
            "num_mel_bins": 128,
            "output_dim": dimensions.text["hidden_size"],
        },
    }


def _preprocessor(family: Family) -> dict[str, object]:
    config: dict[str, object] = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 56 * 56,
        "max_pixels": 28 * 28 * 1280,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    if family == "qwen2_5_omni":
        config |= {
            "processor_class": "Qwen2_5OmniProcessor",
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": 128,
            "sampling_rate": 16000,
            "hop_length": 160,
            "n_fft": 400,
            "chunk_length": 300,
            "padding_value": 0.0,
            "return_attention_mask": True,
        }
    else:
        config["processor_class"] = "Qwen2_5_VLProcessor"
    return config
