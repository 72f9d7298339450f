"""``mmrt model make``: a random-weight checkpoint of a given shape, which transformers loads too.

Nothing is downloaded. The command line calls it, and ``mmrt up`` when no model is configured; so do tests. torch, not transformers.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from safetensors.torch import save_file

from .architecture import ModelConfig
from .config import load_model_config
from .layout import Source, tensor_specs
from .make_tokenizer import Family, write_tokenizer

Shape = Literal["tiny", "small", "3b", "7b"]

_SHARD_BYTES = 2_000_000_000
_LOGIT_STD = 3.0  # of the language model's logits: near-ties are rare
_TIED_EMBEDDING_STD = 0.05  # small, or a tied model repeats its input: the residual stream begins with it
_SHARP = 1.5  # gain of projections that make attention choose and the MLP weigh; more of it, and bfloat16 errors grow


class _Dimensions(NamedTuple):
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
_SHAPES: dict[Shape, _Dimensions] = {
    "tiny": _Dimensions(
        "float32", 900, False, _text(1216, 128, 256, 4, 4, 2), _vision(3, 64, 128, 4), _audio(2, 64, 128, 4), 2
    ),
    "small": _Dimensions(
        "bfloat16", 8000, False, _text(16384, 1024, 4096, 16, 16, 4), _vision(12, 640, 1708, 10), _audio(6, 384, 1536, 6), 4
    ),
    "3b": _Dimensions(
        "bfloat16", 8000, True, _text(151936, 2048, 11008, 36, 16, 2, 128000), _BIG_VISION, _BIG_AUDIO, 8
    ),
    "7b": _Dimensions(
        "bfloat16", 8000, False, _text(152064, 3584, 18944, 28, 28, 4, 128000), _BIG_VISION, _BIG_AUDIO, 8
    ),
}


def make_checkpoint(
    shape: Shape,
    out: Path | str,
    family: Family = "qwen2_5_omni",
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a checkpoint directory ``out``; it appears whole or not at all. ``progress(done_bytes, total_bytes)``.

    Raises: FileExistsError if ``out`` is there already.
    """
    out = Path(out)
    if out.exists():
        raise FileExistsError(f"{out} exists already")
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    dimensions = _SHAPES[shape]
    vocab_size = dimensions.text["vocab_size"]
    ids = write_tokenizer(partial, family, vocab_size, dimensions.num_merges)
    _write_configs(partial, family, dimensions, ids)
    if family != "null":
        config = load_model_config(partial)
        _write_weights(partial, config, sorted(ids.values()), seed, progress)
    partial.rename(out)


# ------------------------------------------------------------------------------------------------------ configuration


def _write_configs(out: Path, family: Family, dimensions: _Dimensions, ids: dict[str, int]) -> None:
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
        _write_json(out / "preprocessor_config.json", _preprocessor(family))
    _write_json(out / "config.json", config)
    generation = {"bos_token_id": None, "pad_token_id": ids["<|endoftext|>"], "eos_token_id": eos, "do_sample": False}
    _write_json(out / "generation_config.json", generation)


def _write_json(file: Path, data: dict[str, object]) -> None:
    file.write_text(json.dumps(data, indent=2) + "\n")


def _text_config(dimensions: _Dimensions, ids: dict[str, int], model_type: str) -> dict[str, object]:
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


def _vision_config(dimensions: _Dimensions, model_type: str) -> dict[str, object]:
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


def _vl_config(dimensions: _Dimensions, ids: dict[str, int]) -> dict[str, object]:
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


def _omni_config(dimensions: _Dimensions, ids: dict[str, int]) -> dict[str, object]:
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


# ------------------------------------------------------------------------------------------------------------- weights


def _write_weights(
    out: Path, config: ModelConfig, control_ids: list[int], seed: int, progress: Callable[[int, int], None] | None
) -> None:
    sources = [source for spec in tensor_specs(config) for source in spec.sources]
    dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
    total = sum(math.prod(source.shape) for source in sources) * dtype.itemsize
    shards = list(_shards(sources, dtype.itemsize))
    generator = torch.Generator().manual_seed(seed)
    weight_map: dict[str, str] = {}
    done = 0
    for number, shard in enumerate(shards, 1):
        tensors: dict[str, torch.Tensor] = {}
        for source in shard:
            tensors[_checkpoint_name(source.name)] = _random(source, config, control_ids, dtype, generator)
            done += math.prod(source.shape) * dtype.itemsize
            if progress is not None:
                progress(done, total)
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, out / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        _write_json(
            out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
        )


def _shards(sources: list[Source], itemsize: int) -> Iterator[list[Source]]:
    shard: list[Source] = []
    num_bytes = 0
    for source in sources:
        size = math.prod(source.shape) * itemsize
        if shard and num_bytes + size > _SHARD_BYTES:
            yield shard
            shard, num_bytes = [], 0
        shard.append(source)
        num_bytes += size
    yield shard


def _checkpoint_name(name: str) -> str:
    """The name that transformers' save_pretrained gives to it."""
    for ours, theirs in (("language.", "model."), ("vision.", "visual."), ("audio.", "audio_tower.")):
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def _random(
    source: Source, config: ModelConfig, control_ids: list[int], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Values under which a random model's text depends on all of its prompt and does not fall into one token."""
    mean, std = _distribution(source, config)
    values = torch.empty(source.shape, dtype=dtype).normal_(mean, std, generator=generator)
    last = source.name == "lm_head.weight" or (source.name == "language.embed_tokens.weight" and config.language.tie_embeddings)
    if last:  # control tokens other than the two that end a turn are never said: their logits are 0 among many random ones
        values[[token for token in control_ids if token not in config.eos_token_ids]] = 0
    return values


def _distribution(source: Source, config: ModelConfig) -> tuple[float, float]:
    hidden = config.language.hidden_size
    name = source.name
    fan_in = math.prod(source.shape[1:])
    if name == "language.embed_tokens.weight":
        return 0.0, _TIED_EMBEDDING_STD if config.language.tie_embeddings else 1.0
    if name == "lm_head.weight":
        return 0.0, _LOGIT_STD / math.sqrt(hidden)
    if name == "language.norm.weight":
        scale = _LOGIT_STD / (_TIED_EMBEDDING_STD * math.sqrt(hidden)) if config.language.tie_embeddings else 1.0
        return scale, 0.05 * scale
    if len(source.shape) == 1:
        return (0.0, 0.1) if name.endswith("bias") else (1.0, 0.1)
    sharp = any(part in name for part in (".q_proj.", ".k_proj.", ".down_proj."))
    return 0.0, (_SHARP if sharp else 1.0) / math.sqrt(fan_in)
