"""The models of ``mmrt_lab.peers.rows``: one of each family, with random weights, most of 0.3 to 1.1 billion parameters (pure).

A family whose smallest published model is larger has that model with fewer layers, experts or words, or a narrower decoder. What is
changed stands in the table, and in the row's name.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from mmrt.models.families.family import CheckpointRecipe
from mmrt.models.families.registry import family_named

Medium = Literal["image", "audio"]


class Shape(NamedTuple):
    """``size``: a published one of the family. ``text``, ``vision``, ``audio``: fields of config.json's parts that differ from it;
    ``image``: of preprocessor_config.json. ``media``: what besides text is measured."""

    size: str
    text: Mapping[str, Any] = {}
    vision: Mapping[str, Any] = {}
    audio: Mapping[str, Any] = {}
    image: Mapping[str, Any] = {}
    media: tuple[Medium, ...] = ()


_WORDS = {"vocab_size": 16384}
_IMAGE: tuple[Medium, ...] = ("image",)
_BOTH: tuple[Medium, ...] = ("image", "audio")


def _narrow(inner: int, kv_heads: int, layers: int, **others: int) -> dict[str, int]:
    """A decoder with 16 heads of 128."""
    sizes = {"hidden_size": 2048, "intermediate_size": inner, "num_attention_heads": 16, "num_key_value_heads": kv_heads}
    return {**_WORDS, **sizes, "num_hidden_layers": layers, **others}


def _layers(number: int) -> dict[str, int]:
    return {**_WORDS, "num_hidden_layers": number}


def _deep(number: int, *blocks: int) -> dict[str, Any]:
    return {"depth": number, "deepstack_visual_indexes": list(blocks)}


_FEW_EXPERTS = {**_layers(4), "num_experts": 16}
_SIX_OF_SIGLIP = {"num_hidden_layers": 6}
SHAPES: dict[str, Shape] = {
    "gemma3_seeing": Shape("4b", _narrow(8192, 4, 6, num_attention_heads=8), _SIX_OF_SIGLIP, media=_IMAGE),
    "gemma4": Shape(
        "e2b",
        {**_layers(10), "intermediate_size": 3072, "num_kv_shared_layers": 5},
        {"num_hidden_layers": 8},
        {"num_hidden_layers": 4},
        media=_BOTH,
    ),
    "gemma4_unified": Shape("12b", {**_layers(6), "intermediate_size": 2048}, media=_BOTH),
    "qwen2_vl": Shape("2b", _layers(6), {"depth": 8}, media=_IMAGE),
    "qwen2_5_vl": Shape("small", media=_IMAGE),
    "qwen3_vl": Shape("2b", _layers(4), _deep(12, 2, 5, 8), media=_IMAGE),
    "qwen3_vl_moe": Shape("30b-a3b", _FEW_EXPERTS, _deep(8, 1, 3, 5), media=_IMAGE),
    "qwen3_5": Shape("0.8b", _layers(12), media=_IMAGE),
    "qwen3_5_moe": Shape("35b-a3b", _FEW_EXPERTS, {"depth": 6}, media=_IMAGE),
    "qwen2_5_omni": Shape("small", media=_BOTH),
    "qwen3_omni_moe": Shape("30b-a3b", _FEW_EXPERTS, _deep(8, 1, 3, 5), {"encoder_layers": 8}, media=_BOTH),
    "qwen2_audio": Shape("7b", _narrow(5504, 16, 4), audio={"encoder_layers": 8}, media=("audio",)),
    "qwen3_asr": Shape("0.6b", media=("audio",)),
    "glm_ocr": Shape("0.9b", media=_IMAGE),
    "glm4v": Shape("9b", _narrow(6848, 2, 4), {"depth": 4, "out_hidden_size": 2048}, media=_IMAGE),
    "glm46v": Shape("9b", _narrow(6848, 2, 4), {"depth": 4, "out_hidden_size": 2048}, media=_IMAGE),
    "smolvlm": Shape("256m", image={"size": {"longest_edge": 1024}}, media=_IMAGE),  # five tiles, not 17
    "internvl": Shape("1b", _layers(12), {"num_hidden_layers": 12}, media=_IMAGE),
    "lighton_ocr": Shape("1b", _layers(8), {"num_hidden_layers": 12}, media=_IMAGE),
    "mistral3": Shape("ministral-3b", _layers(3), {"num_hidden_layers": 12}, media=_IMAGE),
    "pixtral": Shape("12b", _narrow(7168, 4, 4), {"num_hidden_layers": 12}, media=_IMAGE),
    "minicpmv4_6": Shape("1.3b", _layers(12), media=_IMAGE),
    "minicpmv4_7": Shape("tiny", media=_IMAGE),
    "paddleocr_vl": Shape("0.9b", media=_IMAGE),
    "llava": Shape("7b", _narrow(5504, 16, 4), media=_IMAGE),
    "llava_next": Shape("mistral-7b", _narrow(7168, 4, 4), media=_IMAGE),
    "llava_onevision": Shape("0.5b", _layers(12), {"num_hidden_layers": 13}, media=_IMAGE),
    "llama": Shape("360m"),
    "mistral": Shape("7b-v0.3", _narrow(7168, 4, 5)),
    "smollm3": Shape("3b", _layers(4)),
    "phi3": Shape("mini-4k", _layers(2)),
    "glm": Shape("9b", _narrow(6848, 2, 4)),
    "glm4": Shape("9b", _narrow(6848, 2, 4)),
    "ernie4_5": Shape("0.3b"),
    "seed_oss": Shape("36b", _narrow(11264, 2, 4)),
    "granite": Shape("3.3-2b", {"num_hidden_layers": 4}),
    "olmo2": Shape("1b", _layers(4)),
    "olmo3": Shape("7b", _narrow(5504, 16, 4)),
    "qwen2": Shape("0.5b"),
    "qwen3": Shape("0.6b"),
    "qwen3_moe": Shape("30b-a3b", _FEW_EXPERTS),
    "gemma3": Shape("270m"),
}
_ONE_BY_ONE = ("qwen3_vl_moe", "qwen3_omni_moe")
"""Families whose experts are written alone: llama.cpp's converter takes stacked ones in transformers 4's order of axes."""

_PARTS = ("text_config", "vision_config", "audio_config")


def recipe_of(family: str, shape: Shape) -> CheckpointRecipe:
    """The published size's recipe with what the shape changes. Raises: KeyError for an unknown family or size."""
    published = family_named(family).recipes()[shape.size]

    def files(ids: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        made = published.files(ids)
        image = {"preprocessor_config.json": {**made["preprocessor_config.json"], **shape.image}} if shape.image else {}
        return {**made, **image, "config.json": changed(made["config.json"], shape)}

    are_stacked = published.are_stacked and family not in _ONE_BY_ONE
    return published._replace(vocab_size=shape.text.get("vocab_size", published.vocab_size), files=files, are_stacked=are_stacked)


def changed(config: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """config.json with the shape's fields in its parts. A list of kinds of layers keeps its first ones."""
    parts = dict(zip(_PARTS, (shape.text, shape.vision, shape.audio), strict=True))
    if "text_config" not in config:
        return _with_fields(config, shape.text)
    return {**config, **{name: _with_fields(config[name], fields) for name, fields in parts.items() if fields}}


def _with_fields(part: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    found = {**part, **fields}
    if "layer_types" in part:
        found["layer_types"] = part["layer_types"][: found["num_hidden_layers"]]
    if "vocab_size_per_layer_input" in part:
        found["vocab_size_per_layer_input"] = found["vocab_size"]
    return found


def text_of(shape: Shape) -> str:
    """The size and what is changed in it, as a row names it: "9b; text: 4 layers, ..."."""
    parts = {"text": shape.text, "tower": shape.vision, "sound": shape.audio, "pictures": shape.image}
    said = [f"{name}: {', '.join(f'{field} {value}' for field, value in part.items())}" for name, part in parts.items() if part]
    return "; ".join((shape.size, *said))
