"""The files of a MiniCPM-V checkpoint that ``mmrt model make`` writes besides weights."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..family import CheckpointRecipe
from ..qwen2_5.made_checkpoint import chat_template, eos_token_ids, generation_config, text_sizes

_AROUND = {
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
}
_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    **_AROUND,
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}
_LINE_END = 198  # of made tokenizers
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *_TOKENS.values())
_TEMPLATE = chat_template("", "{{- '\\n' -}}", "<|image_pad|>", "<|video_pad|>")


class _Shape(NamedTuple):
    """Sizes. ``side``: of a slice; ``heads``: of the decoder's layers."""

    dtype: str
    num_merges: int
    tie: bool
    text: dict[str, int]
    heads: dict[str, int]
    vision: dict[str, int]
    merge_layer: int
    side: int


def _heads(head_dim: int, keys: int, values: int, key_dim: int, value_dim: int) -> dict[str, int]:
    sizes = {"linear_num_key_heads": keys, "linear_num_value_heads": values}
    return {"head_dim": head_dim, **sizes, "linear_key_head_dim": key_dim, "linear_value_head_dim": value_dim}


def _vision(layers: int, hidden: int, inner: int, heads: int, side: int) -> dict[str, int]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads}
    return {**sizes, "image_size": side, "patch_size": 14}


_SHAPES = {
    "tiny": _Shape(
        "float32",
        900,
        False,
        text_sizes(1216, 128, 256, 4, 4, 2, 8192),
        _heads(64, 2, 4, 16, 32),
        _vision(4, 72, 100, 3, 98),
        1,
        100,
    ),
    "1.3b": _Shape(
        "bfloat16",
        8000,
        True,
        text_sizes(248094, 1024, 3584, 24, 8, 2, 262144),
        _heads(256, 16, 16, 128, 128),
        _vision(27, 1152, 4304, 16, 980),
        6,
        448,
    ),
}


def recipes(family: str) -> dict[str, CheckpointRecipe]:
    """By shape. Published sizes are those of 4.6."""
    return {name: _recipe(family, shape) for name, shape in _SHAPES.items() if name == "tiny" or family == "minicpmv4_6"}


def _recipe(family: str, shape: _Shape) -> CheckpointRecipe:
    processor = f"{family.replace('minicpmv', 'MiniCPMV')}Processor"
    image = {
        "image_processor_type": "MiniCPMV4_6ImageProcessor",
        "processor_class": processor,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "patch_size": 14,
        "scale_resolution": shape.side,
        "max_slice_nums": 9,
        "slice_mode": True,
        "downsample_mode": "16x",
        "use_image_id": True,
    }
    video = {**image, "video_processor_type": "MiniCPMV4_6VideoProcessor", "max_slice_nums": 1, "max_num_frames": 128}

    def files(ids: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        config = {
            "architectures": [processor.replace("Processor", "ForConditionalGeneration")],
            "model_type": family,
            "dtype": shape.dtype,
            "tie_word_embeddings": shape.tie,
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
            "image_size": shape.side,
            "insert_layer_id": shape.merge_layer,
            "downsample_mode": "16x",
            "text_config": _text_config(shape, ids),
            "vision_config": {**shape.vision, "model_type": f"{family}_vision", "hidden_act": "gelu_pytorch_tanh"},
        }
        if family == "minicpmv4_7":
            config |= {name.replace("token", "id"): ids[token] for name, token in _AROUND.items()}
            config["newline_id"] = _LINE_END
        return {
            "config.json": config,
            "preprocessor_config.json": image,
            "video_preprocessor_config.json": video,
            "generation_config.json": generation_config(ids),
        }

    vocab_size = shape.text["vocab_size"]
    return CheckpointRecipe(vocab_size, shape.num_merges, _SPECIAL_TOKENS, (), _TOKENS, _TEMPLATE, files)


def _text_config(shape: _Shape, ids: Mapping[str, int]) -> dict[str, Any]:
    pairs = shape.heads["head_dim"] // 8
    side = pairs // 3
    return {
        **shape.text,
        **shape.heads,
        "model_type": "qwen3_5_text",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "attention_bias": False,
        "tie_word_embeddings": shape.tie,
        "eos_token_id": eos_token_ids(ids)[0],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [pairs - 2 * side, side, side],
        },
    }
