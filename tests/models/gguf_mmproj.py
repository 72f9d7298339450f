"""Towers of checkpoints as files of their own (mmproj), as llama.cpp's converter writes them; names are those of the package gguf.
``gguf_files`` has Qwen's."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import torch
from safetensors.torch import load_file

from mmrt.models.checkpoint.gguf_towers import swapped
from mmrt.tests.models.gguf_files import TOWERS, finish, turned

BLOCKS = 8  # of the map of names, which numbers parts of a projector by them too
ENDS = (".weight", ".bias", ".input_max", ".input_min", ".output_max", ".output_min")
Fields = dict[str, Any]


class Kind(NamedTuple):
    """``projector``: clip.projector_type. ``names``: parts of a checkpoint's names, and what they are in the package's map. ``fields``:
    metadata that other kinds do not have, of config.json and the processor's file."""

    projector: str
    names: dict[str, str]
    fields: Callable[[Fields, Fields], Fields]


def gemma3(root: Fields, image: Fields) -> Fields:
    vision = root["vision_config"]
    merge = vision["image_size"] // vision["patch_size"] // int(root["mm_tokens_per_image"] ** 0.5)
    return {"clip.use_gelu": True, "clip.vision.projector.scale_factor": merge}


def smolvlm(root: Fields, image: Fields) -> Fields:
    edge = image["size"]["longest_edge"]
    told = 1e-5  # what the converter writes where a checkpoint does not say
    own = {"clip.vision.projector.scale_factor": root["scale_factor"], "clip.vision.preproc_image_size": edge}
    return {"clip.use_gelu": True, "clip.vision.attention.layer_norm_epsilon": told, **own}


def gemma4(root: Fields, image: Fields) -> Fields:
    sound = root["audio_config"]
    return {
        "clip.projector_type": None,
        "clip.vision.projector_type": "gemma4v",
        "clip.has_audio_encoder": True,
        "clip.audio.projector_type": "gemma4a",
        "clip.audio.embedding_length": sound["hidden_size"],
        "clip.audio.feed_forward_length": 4 * sound["hidden_size"],
        "clip.audio.block_count": sound["num_hidden_layers"],
        "clip.audio.attention.head_count": sound["num_attention_heads"],
        "clip.audio.num_mel_bins": 128,
        "clip.audio.attention.layer_norm_epsilon": 1e-6,
    }


def pixtral(root: Fields, image: Fields) -> Fields:
    merge = {"clip.vision.spatial_merge_size": root["spatial_merge_size"]} if "spatial_merge_size" in root else {}
    act = root["vision_config"]["hidden_act"]
    return {"clip.vision.attention.layer_norm_epsilon": 1e-5, f"clip.use_{act}": True, **merge}


def internvl(root: Fields, image: Fields) -> Fields:
    return {"clip.use_gelu": True, "clip.vision.projector.scale_factor": int(1 / root["downsample_ratio"])}


def glm(root: Fields, image: Fields) -> Fields:
    return {"clip.use_silu": True, "clip.vision.attention.layer_norm_epsilon": root["vision_config"]["rms_norm_eps"]}


def clip(root: Fields, image: Fields) -> Fields:
    """As the converter of 2024 has written it: without the layers behind the one that is seen."""
    seen = root["vision_config"]["num_hidden_layers"] + 1 + root["vision_feature_layer"]
    fields: Fields = {"clip.use_gelu": False, "clip.vision.block_count": seen, "clip.vision.attention.layer_norm_epsilon": 1e-5}
    if "image_grid_pinpoints" in root:
        fields["clip.vision.image_grid_pinpoints"] = [side for pair in root["image_grid_pinpoints"] for side in pair]
    return fields


CLIP = {"multi_modal_projector.linear_1": "visual.merger.mlp.0", "multi_modal_projector.linear_2": "visual.merger.mlp.2"}
CLIP |= {"vision_tower.": "vision_tower.vision_model."}
GEMMA4 = {"model.vision_tower.encoder.": "vision_model.model.", "model.audio_tower.": "conformer.", ".linear.": "."}
INTERN = {
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.layer_norm": "mlp1.0",
    "multi_modal_projector.linear_1": "mlp1.1",
    "multi_modal_projector.linear_2": "mlp1.3",
}
LIGHTON = {"model.vision_encoder.": "vision_tower.", "model.vision_projection.": "multi_modal_projector."}
KINDS = {
    "gemma3": Kind("gemma3", {"vision_tower.": "vision_tower.vision_model.", "_weight": ".weight"}, gemma3),
    "smolvlm": Kind("idefics3", {}, smolvlm),
    "gemma4": Kind("gemma4v", GEMMA4, gemma4),
    "mistral3": Kind("pixtral", {}, pixtral),
    "llava": Kind("pixtral", {}, pixtral),
    "llava_next": Kind("mlp", CLIP, clip),
    "lighton_ocr": Kind("lightonocr", LIGHTON, pixtral),
    "internvl": Kind("internvl", INTERN, internvl),
    "glm4v": Kind("glm4v", {"model.visual.": "visual."}, glm),
    "glm46v": Kind("glm4v", {"model.visual.": "visual."}, glm),
    "glm_ocr": Kind("glm4v", {"model.visual.": "visual."}, glm),
}
ALONE = ("position_embedding_table", "position_embeddings", "lambda_1", "lambda_2", "per_dim_scale")  # names that get an end


def write_mmproj(checkpoint: Path, file: Path, kind: str = "F32", changes: Fields | None = None) -> Path:
    """``kind``: of matrices. ``changes``: of metadata; None leaves a key out."""
    root = json.loads((checkpoint / "config.json").read_text())
    vision, own = root["vision_config"], KINDS[root["model_type"]]
    if vision.get("model_type") == "clip_vision_model":
        own = KINDS["llava_next"]
    image = checkpoint / "preprocessor_config.json"
    processor = json.loads((image if image.exists() else checkpoint / "processor_config.json").read_text())
    processor = processor.get("image_processor", processor)

    def size(*names: str) -> int:
        found = next(vision[name] for name in names if name in vision)
        return int(found[0] if isinstance(found, list) else found)

    fields = {
        "clip.has_vision_encoder": True,
        "clip.projector_type": own.projector,
        "clip.vision.projection_dim": (root | root["text_config"])["hidden_size"],
        "clip.vision.image_size": size("image_size") if "image_size" in vision else 224,
        "clip.vision.patch_size": size("patch_size"),
        "clip.vision.embedding_length": size("hidden_size"),
        "clip.vision.feed_forward_length": size("intermediate_size"),
        "clip.vision.block_count": size("num_hidden_layers", "depth"),
        "clip.vision.attention.head_count": size("num_attention_heads", "num_heads"),
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.image_mean": processor.get("image_mean", [0.0] * 3),
        "clip.vision.image_std": processor.get("image_std", [1.0] * 3),
        **own.fields(root, processor),
    }
    writer = gguf.GGUFWriter(file, "clip")
    for key, value in (fields | (changes or {})).items():
        if value is not None:
            element = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value), element)
    for name, value in _tensors(checkpoint, own, fields["clip.vision.attention.head_count"], fields["clip.vision.block_count"]):
        fits = kind in ("F32", "F16") or value.shape[-1] % 32 == 0
        number = gguf.GGMLQuantizationType["F32" if value.dim() < 2 or "embd" in name else kind if fits else "F16"]
        data = value.contiguous().numpy()
        writer.add_tensor(name, data if number == 0 else gguf.quants.quantize(data, number), raw_dtype=number)
    finish(writer)
    return file


def _tensors(checkpoint: Path, kind: Kind, heads: int, depth: int) -> list[tuple[str, torch.Tensor]]:
    """By the package's names, with the values that the converter writes."""
    is_clip = kind.fields is clip
    names, found = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, BLOCKS), list[tuple[str, torch.Tensor]]()
    for name, value in load_file(checkpoint / "model.safetensors").items():
        if is_clip and "image_newline" in name:
            found.append(("model.image_newline", value.float()))
            continue
        if not any(part in name for part in TOWERS) or (is_clip and _is_behind(name, depth)):
            continue
        known, changed = name, _value(name, value.float(), kind, heads)
        for theirs, ours in kind.names.items():
            known = known.replace(theirs, ours)
        own = names.get_name(f"{known}.weight" if known.endswith(ALONE) else known, ENDS) or names.get_name(known)
        assert own is not None, name
        own = swapped(own) if is_clip else own
        if changed.dim() == 5:
            found += [(own, changed[:, :, 0]), (f"{own}.1", changed[:, :, 1])]
        else:
            found.append((own, changed))
    return found


def _is_behind(name: str, depth: int) -> bool:
    """Whether a tensor is behind what CLIP's file has."""
    layer = re.search(r"encoder\.layers\.(\d+)\.", name)
    return "post_layernorm" in name or (layer is not None and int(layer[1]) >= depth)


def _value(name: str, value: torch.Tensor, kind: Kind, heads: int) -> torch.Tensor:
    part = name.removesuffix(".weight").rpartition(".")[2]
    if part == "mm_soft_emb_norm":
        return value + 1
    if part in ("q_proj", "k_proj") and kind.fields is pixtral:
        return turned(value, heads)
    if part == "input_proj" and "patch_embedder" in name:
        side = int((value.shape[1] // 3) ** 0.5)
        return value.view(-1, side, side, 3).permute(0, 3, 1, 2)
    if part == "per_dim_scale":
        return torch.nn.functional.softplus(value)
    if part == "depthwise_conv1d":
        return value.squeeze(1)
    return value if value.dim() else value.view(1)
