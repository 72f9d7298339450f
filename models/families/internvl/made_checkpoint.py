"""The files of an InternVL checkpoint that ``mmrt model make`` writes besides weights."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..family import CheckpointRecipe
from ..qwen2_5.made_checkpoint import IMAGE_PROCESSOR, chat_template, text_sizes

_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *_TOKENS.values())
_TEMPLATE = chat_template("", "{{- '\\n' -}}", "<IMG_CONTEXT>", "<video>")


class _Shape(NamedTuple):
    """Sizes, and the kind of decoder."""

    model_type: str
    dtype: str
    num_merges: int
    text: dict[str, int]
    vision: dict[str, int]


def _vision(layers: int, hidden: int, inner: int, heads: int, side: int) -> dict[str, int]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads}
    return {**sizes, "image_size": side}


def _shape(model_type: str, text: dict[str, int]) -> _Shape:
    return _Shape(model_type, "bfloat16", 8000, text, _vision(24, 1024, 4096, 16, 448))


_SHAPES = {
    "tiny": _Shape("qwen2", "float32", 900, text_sizes(1216, 128, 192, 4, 4, 2), _vision(3, 64, 96, 4, 56)),
    "1b": _shape("qwen2", text_sizes(151674, 896, 4864, 24, 14, 2)),
    "2b": _shape("qwen2", text_sizes(151674, 1536, 8960, 28, 12, 2)),
    "8b": _shape("qwen2", text_sizes(151674, 3584, 18944, 28, 28, 4)),
    "3.5-1b": _shape("qwen3", text_sizes(151936, 1024, 3072, 28, 16, 8, 40960)),
    "3.5-4b": _shape("qwen3", text_sizes(151936, 2560, 9728, 36, 32, 8, 40960)),
    "3.5-8b": _shape("qwen3", text_sizes(151936, 4096, 12288, 36, 32, 8, 40960)),
}


def recipes() -> dict[str, CheckpointRecipe]:
    """By shape."""
    return {name: _recipe(shape) for name, shape in _SHAPES.items()}


def _recipe(shape: _Shape) -> CheckpointRecipe:
    side = shape.vision["image_size"]
    colours = {name: IMAGE_PROCESSOR[name] for name in ("image_mean", "image_std")}
    image: dict[str, Any] = {
        "image_processor_type": "GotOcr2ImageProcessorFast",
        "processor_class": "InternVLProcessor",
        "crop_to_patches": False,
        "min_patches": 1,
        "max_patches": 12,
        "size": {"height": side, "width": side},
        **colours,
    }
    video = {"video_processor_type": "InternVLVideoProcessor", "size": {"height": side, "width": side}, **colours}

    def files(ids: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        ends = {"eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"], "bos_token_id": None}
        text = {
            **shape.text,
            **ends,
            "model_type": shape.model_type,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "tie_word_embeddings": False,
        }
        text |= {"head_dim": 128} if shape.model_type == "qwen3" else {}
        config = {
            "architectures": ["InternVLForConditionalGeneration"],
            "model_type": "internvl",
            "dtype": shape.dtype,
            "tie_word_embeddings": False,
            "image_token_id": ids["<IMG_CONTEXT>"],
            "image_seq_length": (side // 28) ** 2,
            "downsample_ratio": 0.5,
            "text_config": text,
            "vision_config": {
                **shape.vision,
                "model_type": "internvl_vision",
                "attention_bias": True,
                "image_size": [side, side],
                "patch_size": [14, 14],
                "norm_type": "layer_norm",
                "use_qk_norm": False,
                "hidden_act": "gelu",
            },
        }
        return {
            "config.json": config,
            "preprocessor_config.json": image,
            "video_preprocessor_config.json": video,
            "processor_config.json": {"image_seq_length": (side // 28) ** 2, "processor_class": "InternVLProcessor"},
            "generation_config.json": {**ends, "do_sample": False},
        }

    vocab_size = shape.text["vocab_size"]
    return CheckpointRecipe(vocab_size, shape.num_merges, _SPECIAL_TOKENS, (), _TOKENS, _TEMPLATE, files)
