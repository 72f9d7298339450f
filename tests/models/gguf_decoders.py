"""What llama.cpp's converter writes of decoders that have fields, names or values of their own; names are those of the package gguf."""

import math
from typing import Any

import gguf
import numpy as np
import torch

Tensors = dict[str, torch.Tensor]


def fields_of(arch: str, config: dict[str, Any]) -> dict[str, Any]:
    """Metadata besides what all decoders have."""
    rope, head_dim = config.get("rope_parameters") or {}, config["head_dim"]
    turning = int(head_dim * rope.get("partial_rotary_factor", 0.5 if arch == "glm4" else 1.0))
    if arch == "gemma3":
        full = rope["full_attention"]
        stretched = {"rope.scaling.type": "linear", "rope.scaling.factor": full["factor"]} if "factor" in full else {}
        own = {"attention.sliding_window": config["sliding_window"], "rope.freq_base": full["rope_theta"], **stretched}
        return {**own, "attention.value_length": head_dim}
    if arch == "phi3":
        trained = config.get("original_max_position_embeddings") or config["max_position_embeddings"]
        own = {"rope.dimension_count": turning, "rope.scaling.original_context_length": trained}
        if "short_factor" in rope:
            by_length = math.sqrt(1 + math.log(config["max_position_embeddings"] / trained) / math.log(trained))
            own["rope.scaling.attn_factor"] = rope.get("attention_factor", by_length)
        return {**own, "attention.sliding_window": config.get("sliding_window") or 0}
    return {"rope.dimension_count": turning, "attention.value_length": head_dim}


def tensors_of(arch: str, config: dict[str, Any], values: Tensors) -> Tensors:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config["num_hidden_layers"])
    found = {names.get_name(name, (".weight", ".bias")): value for name, value in values.items()}
    assert None not in found and len(found) == len(values)
    if arch == "gemma3":
        found = {name: value + 1 if name.endswith("norm.weight") else value for name, value in found.items()}
    return found


def factors_of(arch: str, config: dict[str, Any]) -> dict[str, Any]:
    """Tensors of ropes."""
    rope = config.get("rope_parameters") or {}
    kinds = ("short", "long") if arch == "phi3" and "short_factor" in rope else ()
    return {f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32) for kind in kinds}
