"""GGUF files written from checkpoints as llama.cpp's converter writes them, with the package gguf."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from mmrt.models.config import load_model_config
from mmrt.tests.models import gguf_decoders

ARCHITECTURES = {
    **{"qwen3_moe": "qwen3moe", "qwen2_vl": "qwen2vl", "qwen2_5_vl": "qwen2vl"},
    **{"qwen3_vl": "qwen3vl", "qwen3_vl_moe": "qwen3vlmoe"},
    **{
        "gemma3_text": "gemma3",
        "smolvlm": "llama",
        "olmo3": "olmo2",
        "llava": "llama",
        "llava_next": "llama",
        "internvl": "qwen2",
        "lighton_ocr": "qwen3",
    },
    **dict.fromkeys(("glm4v", "glm46v", "glm_ocr"), "glm4"),
    **{"qwen3_5": "qwen35", "qwen3_5_moe": "qwen35moe", "qwen2_5_omni_thinker": "qwen2vl"},
}
TOWERS = (
    *("visual.", "audio_tower.", "vision_tower.", "multi_modal_projector.", "model.vision_model.", "model.connector."),
    *("embed_vision.", "embed_audio.", "vision_encoder.", "vision_projection.", "image_newline"),
)
OTHERS = ("gemma3", "glm4", "phi3", "smollm3", "granite", "olmo2", "ernie4_5", "seed_oss", "mistral3", "gemma4")
TURNED = ("llama", "smollm3", "granite", "mistral3")
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
Tensors = dict[str, torch.Tensor]


def own_name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    layer, part = name.removeprefix("model.layers.").split(".", 1)
    module, ending = part.rsplit(".", 1)
    return f"blk.{layer}.{PARTS[module]}.{ending}"


def stacked(tensors: Tensors, own_name: Callable[[str], str] = own_name) -> Tensors:
    """With the matrices of all experts of a layer in one tensor."""
    found = {own_name(name): value for name, value in tensors.items() if ".experts." not in name}
    experts = [name for name in tensors if ".experts.0." in name]
    for first in experts:
        before, after = first.split("experts.0.")
        layer = before.removeprefix("model.layers.").split(".")[0]
        parts = [
            tensors[f"{before}experts.{expert}.{after}"]
            for expert in range(len(tensors))
            if f"{before}experts.{expert}.{after}" in tensors
        ]
        found[f"blk.{layer}.ffn_{after.removesuffix('_proj.weight')}_exps.weight"] = torch.stack(parts)
    return found


def turned(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of queries and keys in the order of architecture "llama"."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def hybrid_fields(config: dict[str, Any]) -> dict[str, int]:
    """Of Qwen3.5."""
    shared = {"expert_shared_feed_forward_length": config["shared_expert_intermediate_size"]} if "num_experts" in config else {}
    return {
        "rope.dimension_count": int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]),
        "full_attention_interval": config["full_attention_interval"],
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_value_head_dim"] * config["linear_num_value_heads"],
        **shared,
    }


def hybrid_tensors(values: Tensors, config: dict[str, Any], architecture: Any) -> Tensors:
    """As llama.cpp's converter writes Qwen3.5: with norms plus 1, the rates of decay, and value heads that take turns."""
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    before = 2 * keys * config["linear_key_head_dim"]

    def by_turns(value: torch.Tensor, axis: int = 0) -> torch.Tensor:
        groups = value.movedim(axis, 0).unflatten(0, (keys, heads // keys, -1))
        return groups.transpose(0, 1).flatten(0, 2).movedim(0, axis).contiguous()

    def own_name(name: str) -> str:
        if name.endswith(".dt_bias"):
            return f"{names.get_name(name.replace('dt_bias', 'dt_proj'))}.bias"
        found = names.get_name(name) or f"{names.get_name(name.removesuffix('.weight'))}.weight"
        assert not found.startswith("None"), name
        return str(found)

    changed: Tensors = {}
    for name, value in values.items():
        part = name.removesuffix(".weight").rpartition(".")[2]
        if part.endswith("norm") and "linear_attn" not in name:
            value = value + 1
        elif part == "A_log":
            value = by_turns(-value.exp())
        elif part in ("in_proj_z", "in_proj_a", "in_proj_b", "dt_bias"):
            value = by_turns(value)
        elif part in ("in_proj_qkv", "conv1d"):
            value = torch.cat([value[:before], by_turns(value[before:])])
        elif part == "out_proj":
            value = by_turns(value, 1)
        changed[name] = value.squeeze() if part in ("conv1d", "shared_expert_gate") else value
    return stacked(changed, own_name)


def write_gguf(
    checkpoint: Path,
    file: Path,
    kind: str = "F32",
    changes: dict[str, Any] | None = None,
    tokens: bool = True,
    ropes: bool = True,
    wider: dict[str, str] | None = None,
) -> Tensors:
    """Write a checkpoint as a file of one type of matrices; vectors are F32. Returns its values by the checkpoint's
    names, where no part is of a ``wider`` type."""
    root = json.loads((checkpoint / "config.json").read_text())
    config = root | root.get("text_config", {})
    arch = ARCHITECTURES.get(root["model_type"], root["model_type"])
    writer = gguf.GGUFWriter(file, arch)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    fields = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        **({"feed_forward_length": config["intermediate_size"]} if arch != "qwen35moe" else {}),
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim,
    }
    rope = config.get("rope_parameters") or config.get("rope_scaling") or config
    numbers = {"attention.layer_norm_rms_epsilon": config["rms_norm_eps"], "rope.freq_base": rope.get("rope_theta", 10000.0)}
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if arch.startswith("qwen3vl"):
        writer.add_num_deepstack_layers(len(root["vision_config"]["deepstack_visual_indexes"]))
    if "num_experts" in config and arch != "gemma4":
        fields |= {
            "expert_count": config["num_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
        }
    if arch.startswith("qwen35"):
        fields |= hybrid_fields(config)
    if arch in OTHERS:
        fields |= gguf_decoders.fields_of(arch, {**config, "head_dim": head_dim})
    for key, value in (fields | (changes or {})).items():
        if isinstance(value, list):
            writer.add_array(f"{arch}.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"{arch}.{key}", value)
        elif isinstance(value, str):
            writer.add_string(f"{arch}.{key}", value)
        else:
            numbers[key] = value
    for key, value in numbers.items():
        writer.add_float32(f"{arch}.{key}", value)
    if tokens:
        _write_tokens(checkpoint, writer)
    values = decoder_of(checkpoint)
    if config.get("tie_word_embeddings"):
        values.pop("lm_head.weight", None)
    written = {
        name: _rounded(value, kind) if value.dim() == 2 and "shared_expert_gate" not in name else value
        for name, value in values.items()
    }
    plain = dict(values)
    for name in values:
        if arch in TURNED and (".q_proj." in name or ".k_proj." in name):
            plain[name] = turned(values[name], heads if ".q_proj." in name else kv_heads)
    if (stretch := load_model_config(checkpoint).language.ropes[0].stretch) and ropes and arch == "llama":
        writer.add_tensor("rope_freqs.weight", np.array(stretch, np.float32))
    if arch in OTHERS:
        experts = {name: value for name, value in plain.items() if ".experts." in name}
        others = {name: value for name, value in plain.items() if name not in experts}
        own = gguf_decoders.tensors_of(arch, config, others) | stacked(experts)
        for name, factors in gguf_decoders.factors_of(arch, config).items():
            writer.add_tensor(name, factors)
    else:
        own = hybrid_tensors(plain, config, gguf.MODEL_ARCH[arch.upper()]) if arch.startswith("qwen35") else stacked(plain)
    for name, value in own.items():
        if value.dim() < 2 or kind == "F32" or "ssm_conv1d" in name:
            writer.add_tensor(name, value.numpy())
        else:
            part = name.split(".")[-2]
            number = gguf.GGMLQuantizationType[(wider or {}).get(part, kind)]
            writer.add_tensor(name, gguf.quants.quantize(value.numpy(), number), raw_dtype=number)
    finish(writer)
    return written


def decoder_of(checkpoint: Path) -> Tensors:
    """The values of its decoder, by the names of a text model, in which each expert has matrices of its own."""
    found: Tensors = {}
    for name, value in load_file(checkpoint / "model.safetensors").items():
        for text in ("model.language_model.", "language_model.model.", "model.text_model."):
            name = name.replace(text, "model.")
        name = name.replace("language_model.lm_head.", "lm_head.")
        if any(part in name for part in TOWERS):
            continue
        if name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj"):
            before, _, part = name.rpartition(".")
            halves = dict(zip(("gate_proj", "up_proj"), value.chunk(2, 1), strict=True)) if "gate" in part else {part: value}
            for own, matrices in halves.items():
                found |= {f"{before}.{expert}.{own}.weight": matrix.float() for expert, matrix in enumerate(matrices)}
        else:
            found[name] = value.float()
    return found


def write_tower(checkpoint: Path, file: Path, kind: str = "F32", changes: dict[str, Any] | None = None, old: bool = False) -> Path:
    """Write a checkpoint's vision tower as a file of its own. ``kind``: of the blocks' matrices. ``old``: as converters of 2024 have
    written it: with sizes that are not true, and the matrices of feed-forwards by each other's names."""
    root = json.loads((checkpoint / "config.json").read_text())
    family, vision = root["model_type"], root["vision_config"]
    image = json.loads((checkpoint / "preprocessor_config.json").read_text())
    writer = gguf.GGUFWriter(file, "clip")
    kinds = {"qwen2_vl": "qwen2vl_merger", "qwen2_5_vl": "qwen2.5vl_merger", "qwen2_5_omni_thinker": "qwen2.5o"}
    projector = kinds.get(family, "qwen3vl_merger")
    fields: dict[str, Any] = {
        "clip.has_vision_encoder": True,
        "clip.projector_type": projector,
        "clip.vision.block_count": vision["depth"],
        "clip.vision.embedding_length": vision.get("embed_dim", vision["hidden_size"]),
        "clip.vision.feed_forward_length": 0 if old else vision.get("intermediate_size", vision["hidden_size"]),
        "clip.vision.projection_dim": (root | root.get("text_config", {}))["hidden_size"],
        "clip.vision.patch_size": vision["patch_size"],
        "clip.vision.attention.head_count": vision["num_heads"],
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.image_mean": image["image_mean"],
        "clip.vision.image_std": image["image_std"],
    }
    if projector == "qwen2.5o":
        sound = {"block_count": "encoder_layers", "embedding_length": "d_model", "feed_forward_length": "encoder_ffn_dim"}
        sound |= {"attention.head_count": "encoder_attention_heads", "num_mel_bins": "num_mel_bins"}
        fields |= {f"clip.audio.{key}": root["audio_config"][field] for key, field in sound.items()}
        fields["clip.has_audio_encoder"] = True
    if family in ("qwen2_5_vl", "qwen2_5_omni_thinker"):
        fields["clip.vision.n_wa_pattern"] = vision["fullatt_block_indexes"][0] + 1
    if projector == "qwen3vl_merger":
        deep = vision.get("deepstack_visual_indexes", [])
        fields["clip.vision.spatial_merge_size"] = vision["spatial_merge_size"]
        fields["clip.vision.is_deepstack_layers"] = [block in deep for block in range(vision["depth"])]
    for key, value in (fields | (changes or {})).items():
        if value is not None:
            element = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value), element)
    number = gguf.GGMLQuantizationType[kind]
    for name, tensor in _tower_tensors(checkpoint, vision, projector, old).items():
        if ".blk." in name and tensor.dim() == 2 and kind != "F32":
            writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), number), raw_dtype=number)
        else:
            writer.add_tensor(name, tensor.contiguous().numpy())
    finish(writer)
    return file


def _tower_tensors(checkpoint: Path, vision: dict[str, Any], projector: str, old: bool) -> Tensors:
    """By the names of the package's own map, but for those that llama.cpp's converter gives itself."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision["depth"])
    own = {"merger.norm": "v.post_ln", "merger.linear_fc1": "mm.0", "merger.linear_fc2": "mm.2"}
    deep = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}
    found: Tensors = {"a.position_embd.weight": torch.zeros(8, 4)} if projector == "qwen2.5o" else {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        name = name.removeprefix("model.")
        if name.startswith("audio_tower."):
            value, end = tensor.float(), name.rpartition(".")[2]
            is_bias_of_conv = ".conv" in name and end == "bias"
            sound = "mm.a.fc" if ".proj." in name else names.get_name(name.removesuffix(f".{end}"))
            found[f"{sound}.{end}"] = value.unsqueeze(1) if is_bias_of_conv else value
            continue
        if not name.startswith("visual."):
            continue
        value, (module, _, end) = tensor.float(), name.rpartition(".")
        if name == "visual.patch_embed.proj.weight":
            found |= {"v.patch_embd.weight": value[:, :, 0], "v.patch_embd.weight.1": value[:, :, 1]}
        elif module.startswith("visual.deepstack_merger_list."):
            number, part = module.removeprefix("visual.deepstack_merger_list.").split(".")
            found[f"v.deepstack.{vision['deepstack_visual_indexes'][int(number)]}.{deep[part]}.{end}"] = value
        elif module.endswith("attn.qkv") and projector != "qwen3vl_merger":
            for part, piece in zip("qkv", value.chunk(3), strict=True):
                found[f"{names.get_name(module).removesuffix('qkv')}{part}.{end}"] = piece
        else:
            found[f"{own.get(module.removeprefix('visual.')) or names.get_name(module)}.{end}"] = value
    swap = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"} if old else {}
    return {".".join(swap.get(part, part) for part in name.split(".")): value for name, value in found.items()}


def copy_field(field: Any, writer: Any) -> None:
    """Write a field of another file."""
    if not field.name.startswith("GGUF.") and field.name != "general.architecture":
        writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)


def with_fields(file: Path, copy: Path, changes: dict[str, Any]) -> Path:
    """A copy of a file with these values; None: without the key."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(copy, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name not in changes:
            copy_field(field, writer)
    for key, value in changes.items():
        if key == "general.architecture":
            writer.kv_data[0][key].value, writer.kv_data[0][key].type = value, gguf.GGUFValueType.get_type(value)
        elif value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
    return copy


def finish(writer: Any) -> None:
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()


def _rounded(values: torch.Tensor, kind: str) -> torch.Tensor:
    """Values of a type; rows are rounded by themselves, so their order does not count."""
    if kind == "F32":
        return values
    number = gguf.GGMLQuantizationType[kind]
    return torch.from_numpy(np.array(gguf.quants.dequantize(gguf.quants.quantize(values.numpy(), number), number)))


def _write_tokens(checkpoint: Path, writer: Any) -> None:
    """The vocabulary of a checkpoint, which splits texts as Qwen2 does."""
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"] | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    special = {token["id"]: 3 if token["special"] else 4 for token in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([special.get(vocabulary[token], 1) for token in tokens])
    writer.add_token_merges(merges)
    names = json.loads((checkpoint / "tokenizer_config.json").read_text())
    writer.add_eos_token_id(vocabulary[names["eos_token"]])
    if "pad_token" in names:
        writer.add_pad_token_id(vocabulary[names["pad_token"]])
    writer.add_chat_template((checkpoint / "chat_template.jinja").read_text())
