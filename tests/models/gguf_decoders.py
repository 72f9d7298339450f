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
    part = 0.5 if arch == "glm4" and "mrope_section" not in rope else 1.0
    turning = int(head_dim * rope.get("partial_rotary_factor", part))
    if arch == "gemma3":
        full = rope["full_attention"]
        stretched = {"rope.scaling.type": "linear", "rope.scaling.factor": full["factor"]} if "factor" in full else {}
        own = {"attention.sliding_window": config["sliding_window"], "rope.freq_base": full["rope_theta"], **stretched}
        return {**own, "attention.value_length": head_dim}
    if arch == "gemma4":
        return gemma4_fields(config)
    if arch == "granite":
        names = {"attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier"}
        names |= {"residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"}
        return {theirs: config[ours] for theirs, ours in names.items()}
    if arch == "olmo2" and config["model_type"] == "olmo3":
        full, local = (rope[f"{kind}_attention"] for kind in ("full", "sliding"))
        return {
            "attention.sliding_window": config["sliding_window"],
            "attention.sliding_window_pattern": [bool(number % 4) for number in range(1, config["num_hidden_layers"] + 1)],
            "rope.freq_base": full["rope_theta"],
            "rope.freq_base_swa": local["rope_theta"],
            "rope.scaling.type": full["rope_type"],
            "rope.scaling.factor": full["factor"],
            "rope.scaling.original_context_length": full["original_max_position_embeddings"],
        }
    if arch == "mistral3" and "llama_4_scaling_beta" in rope:
        return {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
            "attention.temperature_scale": rope["llama_4_scaling_beta"],
        }
    if arch == "phi3":
        trained = config.get("original_max_position_embeddings") or config["max_position_embeddings"]
        own = {"rope.dimension_count": turning, "rope.scaling.original_context_length": trained}
        if "short_factor" in rope:
            by_length = math.sqrt(1 + math.log(config["max_position_embeddings"] / trained) / math.log(trained))
            own["rope.scaling.attn_factor"] = rope.get("attention_factor", by_length)
        return {**own, "attention.sliding_window": config.get("sliding_window") or 0}
    return {"rope.dimension_count": turning, "attention.value_length": head_dim}


def gemma4_fields(config: dict[str, Any]) -> dict[str, Any]:
    layers, shared, inner = config["num_hidden_layers"], config["num_kv_shared_layers"], config["intermediate_size"]
    are_local = [kind == "sliding_attention" for kind in config["layer_types"]]
    local, full = config["head_dim"], config["global_head_dim"]
    fields = {
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": are_local,
        "attention.shared_kv_layers": shared,
        "attention.key_length": full,
        "attention.key_length_swa": local,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "final_logit_softcapping": config["final_logit_softcapping"],
        "rope.dimension_count": full,
        "rope.dimension_count_swa": local,
        "rope.freq_base": config["rope_parameters"]["full_attention"]["rope_theta"],
        "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
    }
    if config.get("use_double_wide_mlp"):
        fields["feed_forward_length"] = [inner] * (layers - shared) + [2 * inner] * shared
    if (own := config.get("num_global_key_value_heads")) is not None:
        fields["attention.head_count_kv"] = [config["num_key_value_heads"] if is_local else own for is_local in are_local]
    if config.get("enable_moe_block"):
        names = {"expert_count": "num_experts", "expert_used_count": "top_k_experts"}
        names |= {"expert_feed_forward_length": "moe_intermediate_size"}
        fields |= {theirs: config[ours] for theirs, ours in names.items()}
    return fields


def halved(value: torch.Tensor, heads: int, turning: int) -> torch.Tensor:
    """Rows of queries and keys as halves of the pairs that turn."""
    own = value.view(heads, len(value) // heads, -1)
    return torch.cat([own[:, 0:turning:2], own[:, 1:turning:2], own[:, turning:]], 1).view(value.shape)


def gemma4_name(name: str) -> str:
    """A name as the package's map has it, or as the converter gives it."""
    layer = name.split(".")[2] if ".layers." in name else ""
    own = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
    for part, theirs in own.items():
        if name.endswith(part):
            return f"blk.{layer}.{theirs}"
    return f"{name}.weight" if name.endswith("layer_scalar") else name


def tensors_of(arch: str, config: dict[str, Any], values: Tensors) -> Tensors:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config["num_hidden_layers"])
    if arch == "gemma4":
        values = {gemma4_name(name): value for name, value in values.items()}
    rope = config.get("rope_parameters") or {}
    if "mrope_section" in rope:
        turning, head_dim = (
            2 * sum(rope["mrope_section"]),
            config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        )
        parts = ("q_proj.", "k_proj.")
        values = {
            name: halved(value, len(value) // head_dim, turning) if any(part in name for part in parts) else value
            for name, value in values.items()
        }
    found = {name if name.startswith("blk.") else names.get_name(name, (".weight", ".bias")): value for name, value in values.items()}
    assert None not in found and len(found) == len(values)
    if arch == "gemma3":
        found = {name: value + 1 if name.endswith("norm.weight") else value for name, value in found.items()}
    return found


def factors_of(arch: str, config: dict[str, Any]) -> dict[str, Any]:
    """Tensors of ropes."""
    rope = config.get("rope_parameters") or {}
    if arch == "gemma4":
        pairs = config["global_head_dim"] // 2
        turning = int(pairs * rope["full_attention"]["partial_rotary_factor"])
        return {"rope_freqs.weight": np.array([1.0] * turning + [1e30] * (pairs - turning), np.float32)}
    kinds = ("short", "long") if arch == "phi3" and "short_factor" in rope else ()
    return {f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32) for kind in kinds}
