"""A Gemma 3 checkpoint's tower as a file of its own, as llama.cpp's converter writes it; names are those of the package gguf."""

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file

from mmrt.tests.models.gguf_files import finish


def write_siglip(checkpoint: Path, file: Path, kind: str = "F32", changes: dict[str, Any] | None = None) -> Path:
    """``kind``: of matrices. ``changes``: of metadata; None leaves a key out."""
    root = json.loads((checkpoint / "config.json").read_text())
    vision, image = root["vision_config"], json.loads((checkpoint / "preprocessor_config.json").read_text())
    merge = vision["image_size"] // vision["patch_size"] // int(root["mm_tokens_per_image"] ** 0.5)
    fields = {
        "clip.has_vision_encoder": True,
        "clip.projector_type": "gemma3",
        "clip.use_gelu": True,
        "clip.vision.projection_dim": root["text_config"]["hidden_size"],
        "clip.vision.image_size": vision["image_size"],
        "clip.vision.patch_size": vision["patch_size"],
        "clip.vision.embedding_length": vision["hidden_size"],
        "clip.vision.feed_forward_length": vision["intermediate_size"],
        "clip.vision.block_count": vision["num_hidden_layers"],
        "clip.vision.attention.head_count": vision["num_attention_heads"],
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.image_mean": image["image_mean"],
        "clip.vision.image_std": image["image_std"],
        "clip.vision.projector.scale_factor": merge,
    }
    writer = gguf.GGUFWriter(file, "clip")
    for key, value in (fields | (changes or {})).items():
        if value is not None:
            element = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value), element)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision["num_hidden_layers"])
    for name, value in load_file(checkpoint / "model.safetensors").items():
        if name.startswith("language_model."):
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
