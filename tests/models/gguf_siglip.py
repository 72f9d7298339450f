"""The tower of a checkpoint of Gemma 3 or SmolVLM as a file of its own, as llama.cpp's converter writes it; names are those of the
package gguf."""

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file

from mmrt.tests.models.gguf_files import TOWERS, finish


def write_siglip(checkpoint: Path, file: Path, kind: str = "F32", changes: dict[str, Any] | None = None) -> Path:
    """``kind``: of matrices. ``changes``: of metadata; None leaves a key out."""
    root = json.loads((checkpoint / "config.json").read_text())
    vision, image = root["vision_config"], json.loads((checkpoint / "preprocessor_config.json").read_text())
    is_gemma, patches = root["model_type"] == "gemma3", vision["image_size"] // vision["patch_size"]
    merge = patches // int(root["mm_tokens_per_image"] ** 0.5) if is_gemma else root["scale_factor"]
    fields = {
        "clip.has_vision_encoder": True,
        "clip.projector_type": "gemma3" if is_gemma else "idefics3",
        "clip.use_gelu": True,
        "clip.vision.projection_dim": root["text_config"]["hidden_size"],
        "clip.vision.image_size": vision["image_size"],
        "clip.vision.patch_size": vision["patch_size"],
        "clip.vision.embedding_length": vision["hidden_size"],
        "clip.vision.feed_forward_length": vision["intermediate_size"],
        "clip.vision.block_count": vision["num_hidden_layers"],
        "clip.vision.attention.head_count": vision["num_attention_heads"],
        "clip.vision.attention.layer_norm_epsilon": 1e-6
        if is_gemma
        else 1e-5,  # what the converter writes where a checkpoint does not say
        "clip.vision.image_mean": image["image_mean"],
        "clip.vision.image_std": image["image_std"],
        "clip.vision.projector.scale_factor": merge,
    }
    if not is_gemma:
        fields["clip.vision.preproc_image_size"] = image["size"]["longest_edge"]
    writer = gguf.GGUFWriter(file, "clip")
    for key, value in (fields | (changes or {})).items():
        if value is not None:
            element = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value), element)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision["num_hidden_layers"])
    for name, value in load_file(checkpoint / "model.safetensors").items():
        if not any(part in name for part in TOWERS):
            continue
        older = name.replace("vision_tower.", "vision_tower.vision_model.").replace("_weight", ".weight")
        own = names.get_name(older, (".weight", ".bias"))
        assert own is not None, name
        value = value.float() + (1 if "soft_emb_norm" in name else 0)
        fits = kind in ("F32", "F16") or value.shape[-1] % 32 == 0
        number = gguf.GGMLQuantizationType["F32" if value.dim() < 2 or "embd" in own else kind if fits else "F16"]
        data = torch.Tensor(value).contiguous().numpy()
        writer.add_tensor(own, data if number == 0 else gguf.quants.quantize(data, number), raw_dtype=number)
    finish(writer)
    return file
