"""A checkpoint's configuration, processor, tokenizer and names of tensors in the words that llama.cpp's converter knows (pure).

Published files have these words, those of ``mmrt model make`` and of transformers 5 do not.
"""

from collections.abc import Mapping
from typing import Any

_DECODERS = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_NAMES = {"LightOnOcrForConditionalGeneration": "LightOnOCRForConditionalGeneration"}
_HEARS = {"model.audio_tower.": "audio_tower."}
_BREAKS = {"language_model.model.embed_tokens.": "model.embed_tokens."}  # the file of a Pixtral tower has a row of it
_TENSORS = {  # by model_type: how names begin
    "llava": _BREAKS,
    "mistral3": _BREAKS,
    "gemma3": {"vision_tower.": "vision_tower.vision_model."},
    "internvl": {f"{part}.": f"model.{part}." for part in ("vision_tower", "multi_modal_projector")},
    "paddleocr_vl": {"model.projector.": "mlp_AR.", "model.visual.": "visual.", "model.language_model.": "model."},
    "qwen3_asr": {**_HEARS, "model.multi_modal_projector.linear_": "audio_tower.proj"},
    "qwen3_omni_moe_thinker": _HEARS,
}
_PARAGRAPH = "ĊĊ"  # two line ends, as tokenizers of bytes write them


def converter_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json as the converter finds the decoder and the towers."""
    model_type = config["model_type"]
    found = {**config, "architectures": [_NAMES.get(name, name) for name in config["architectures"]]}
    if model_type in ("smolvlm", "internvl", "lighton_ocr"):
        found["text_config"] = {**config["text_config"], "architectures": [_DECODERS[config["text_config"]["model_type"]]]}
    if model_type == "internvl":
        found["vision_config"] = {"layer_norm_eps": 1e-6, **config["vision_config"], "architectures": ["InternVisionModel"]}
    if model_type == "qwen2_5_omni_thinker":
        found |= {"model_type": "qwen2_5_omni", "architectures": ["Qwen2_5OmniModel"], "thinker_config": config}
    if model_type == "qwen3_omni_moe_thinker":
        found |= {"model_type": "qwen3_omni_moe", "architectures": ["Qwen3OmniMoeForConditionalGeneration"], "thinker_config": config}
    if model_type == "qwen3_asr":
        text = config["text_config"]
        rope = {**text["rope_parameters"], "mrope_section": _sections(text["head_dim"])}
        found["thinker_config"] = {**config, "text_config": {**text, "rope_parameters": rope}}
    if model_type == "gemma4_unified":
        found["text_config"] = {"moe_intermediate_size": None, **config["text_config"]}
    if model_type == "paddleocr_vl":
        found["vision_config"] = {**config["vision_config"], "architectures": ["PaddleOCRVisionModel"]}
    return found


def _sections(head_dim: int) -> list[int]:
    """Pairs of a head for each axis of positions. Of a prompt with sound alone the axes are equal, so transformers has none."""
    side = head_dim // 2 * 5 // 16
    return [head_dim // 2 - 2 * side, side, side]


def converter_processor(processor: Mapping[str, Any]) -> dict[str, Any]:
    """processor_config.json. A processor of pictures within it that leaves colours as they are has a mean and a deviation."""
    found = {**processor}
    if image := processor.get("image_processor"):
        found["image_processor"] = {"image_mean": [0.0] * 3, "image_std": [1.0] * 3, **image}
    return found


def model_options(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Options for the decoder's file. Of Qwen3.5 made checkpoints lack the layers that guess further tokens."""
    return ("--no-mtp",) if str(config.get("text_config", config)["model_type"]).startswith("qwen3_5") else ()


def converter_name(name: str, model_type: str) -> str:
    """The name of a tensor."""
    for begun, known in _TENSORS.get(model_type, {}).items():
        if name.startswith(begun):
            return known + name.removeprefix(begun)
    return name


def converter_tokenizer(tokenizer: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """tokenizer.json. SmolVLM's has a token of two line ends, which llama.cpp puts before a picture: of a made one, a word that no text
    gives becomes it."""
    words = tokenizer["model"].get("vocab", {})
    if model_type != "smolvlm" or not isinstance(words, dict) or _PARAGRAPH in words:
        return {**tokenizer}
    last = max(words, key=lambda word: words[word])
    changed = {_PARAGRAPH if word == last else word: number for word, number in words.items()}
    return {**tokenizer, "model": {**tokenizer["model"], "vocab": changed}}
