"""The registered model families, one line each. Reading a configuration imports only the family that it names. Families of one
line of models share a module.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, cast

from ..architecture import ModelConfig
from .family import Family


class Entry(NamedTuple):
    """``load`` imports the family. ``model_types``: what config.json calls it; ``tower``: of those that it calls alike, the one whose
    ``vision_config`` is of this type."""

    load: Callable[[], Any]
    model_types: tuple[str, ...]
    tower: str = ""


def _text() -> Any:
    return import_module(".text.families", __package__)


def _glm() -> Any:
    return import_module(".glm.families", __package__)


FAMILIES: dict[str, Entry] = {
    "qwen2_5_omni": Entry(lambda: import_module(".qwen2_5_omni", __package__), ("qwen2_5_omni", "qwen2_5_omni_thinker")),
    "qwen3_omni_moe": Entry(lambda: import_module(".qwen3_omni_moe", __package__), ("qwen3_omni_moe", "qwen3_omni_moe_thinker")),
    "qwen2_5_vl": Entry(lambda: import_module(".qwen2_5_vl", __package__), ("qwen2_5_vl",)),
    "qwen2_vl": Entry(lambda: import_module(".qwen2_vl", __package__), ("qwen2_vl",)),
    "qwen3_vl": Entry(lambda: import_module(".qwen3_vl", __package__).QWEN3_VL, ("qwen3_vl",)),
    "qwen3_vl_moe": Entry(lambda: import_module(".qwen3_vl", __package__).QWEN3_VL_MOE, ("qwen3_vl_moe",)),
    "llama": Entry(lambda: _text().LLAMA, ("llama",)),
    "gemma3": Entry(lambda: import_module(".gemma3", __package__), ("gemma3_text",)),
    "gemma3_seeing": Entry(lambda: import_module(".gemma3.seeing", __package__), ("gemma3",)),
    "gemma4": Entry(lambda: import_module(".gemma4", __package__), ("gemma4", "gemma4_text")),
    "gemma4_unified": Entry(lambda: import_module(".gemma4.unified", __package__), ("gemma4_unified", "gemma4_unified_text")),
    "mistral": Entry(lambda: _text().MISTRAL, ("mistral",)),
    "smollm3": Entry(lambda: _text().SMOLLM3, ("smollm3",)),
    "phi3": Entry(lambda: _text().PHI3, ("phi3",)),
    "glm": Entry(lambda: _text().GLM, ("glm",)),
    "glm4": Entry(lambda: _text().GLM4, ("glm4",)),
    "ernie4_5": Entry(lambda: _text().ERNIE4_5, ("ernie4_5",)),
    "seed_oss": Entry(lambda: _text().SEED_OSS, ("seed_oss",)),
    "granite": Entry(lambda: _text().GRANITE, ("granite",)),
    "olmo2": Entry(lambda: _text().OLMO2, ("olmo2",)),
    "olmo3": Entry(lambda: _text().OLMO3, ("olmo3",)),
    "qwen2": Entry(lambda: _text().QWEN2, ("qwen2",)),
    "qwen3": Entry(lambda: _text().QWEN3, ("qwen3",)),
    "qwen3_moe": Entry(lambda: _text().QWEN3_MOE, ("qwen3_moe",)),
    "qwen3_5": Entry(lambda: import_module(".qwen3_5", __package__).QWEN3_5, ("qwen3_5", "qwen3_5_text")),
    "qwen3_5_moe": Entry(lambda: import_module(".qwen3_5", __package__).QWEN3_5_MOE, ("qwen3_5_moe", "qwen3_5_moe_text")),
    "glm_ocr": Entry(lambda: _glm().GLM_OCR, ("glm_ocr",)),
    "glm4v": Entry(lambda: _glm().GLM4V, ("glm4v",)),
    "glm46v": Entry(lambda: _glm().GLM46V, ("glm46v",)),
    "qwen2_audio": Entry(lambda: import_module(".qwen2_audio", __package__), ("qwen2_audio",)),
    "qwen3_asr": Entry(lambda: import_module(".qwen3_asr", __package__), ("qwen3_asr",)),
    "smolvlm": Entry(lambda: import_module(".smolvlm", __package__), ("smolvlm", "idefics3")),
    "internvl": Entry(lambda: import_module(".internvl", __package__), ("internvl",)),
    "lighton_ocr": Entry(lambda: import_module(".pixtral", __package__).LIGHTON_OCR, ("lighton_ocr",)),
    "mistral3": Entry(lambda: import_module(".pixtral", __package__).MISTRAL3, ("mistral3",)),
    "minicpmv4_6": Entry(lambda: import_module(".minicpm_v", __package__).MINICPM_V_4_6, ("minicpmv4_6",)),
    "minicpmv4_7": Entry(lambda: import_module(".minicpm_v", __package__).MINICPM_V_4_7, ("minicpmv4_7",)),
    "paddleocr_vl": Entry(lambda: import_module(".paddleocr_vl", __package__), ("paddleocr_vl",)),
    "llava": Entry(lambda: import_module(".llava", __package__).LLAVA, ("llava",)),
    "pixtral": Entry(lambda: import_module(".pixtral", __package__).PIXTRAL, ("llava",), "pixtral"),
    "llava_next": Entry(lambda: import_module(".llava", __package__).LLAVA_NEXT, ("llava_next",)),
    "llava_onevision": Entry(lambda: import_module(".llava.onevision", __package__).LLAVA_ONEVISION, ("llava_onevision",)),
    "null": Entry(lambda: import_module(".null", __package__), ("mmrt_null",)),
}


def family_named(name: str) -> Family:
    """The family of this name. Raises: KeyError."""
    return cast(Family, FAMILIES[name].load())


def family_of(config: ModelConfig) -> Family:
    """The model's family."""
    return family_named(config.family)


def family_name(model_type: str, tower: object = None) -> str | None:
    """The name of the family of config.json's ``model_type``, and of that of its ``vision_config``; None if there is none."""
    names = [name for name, entry in FAMILIES.items() if model_type in entry.model_types]
    return next((name for name in names if FAMILIES[name].tower == tower), names[0] if names else None)
