"""GGUF files written from checkpoints as llama.cpp's converter writes them, with the package gguf."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from mmrt.models.config import load_model_config

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


def stacked(tensors: Tensors) -> Tensors:
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
    config = json.loads((checkpoint / "config.json").read_text())
    arch = {"qwen3_moe": "qwen3moe"}.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(file, arch)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    fields = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim,
    }
    rope = config.get("rope_parameters") or config.get("rope_scaling") or config
    numbers = {"attention.layer_norm_rms_epsilon": config["rms_norm_eps"], "rope.freq_base": rope.get("rope_theta", 10000.0)}
    if arch == "qwen3moe":
        fields |= {
            "expert_count": config["num_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
        }
    for key, value in (fields | (changes or {})).items():
        if isinstance(value, int):
            writer.add_uint32(f"{arch}.{key}", value)
        elif isinstance(value, str):
            writer.add_string(f"{arch}.{key}", value)
        else:
            numbers[key] = value
    for key, value in numbers.items():
        writer.add_float32(f"{arch}.{key}", value)
    if tokens:
        _write_tokens(checkpoint, writer)
    values = {name: value.float() for name, value in load_file(checkpoint / "model.safetensors").items()}
    if config.get("tie_word_embeddings"):
        values.pop("lm_head.weight", None)
    written = {name: _rounded(value, kind) if value.dim() == 2 else value for name, value in values.items()}
    plain = dict(values)
    for name in values:
        if arch == "llama" and ".q_proj." in name or arch == "llama" and ".k_proj." in name:
            plain[name] = turned(values[name], heads if ".q_proj." in name else kv_heads)
    if (stretch := load_model_config(checkpoint).language.ropes[0].stretch) and ropes and arch == "llama":
        writer.add_tensor("rope_freqs.weight", np.array(stretch, np.float32))
    for name, value in stacked(plain).items():
        if value.dim() < 2 or kind == "F32":
            writer.add_tensor(name, value.numpy())
        else:
            part = name.split(".")[-2]
            number = gguf.GGMLQuantizationType[(wider or {}).get(part, kind)]
            writer.add_tensor(name, gguf.quants.quantize(value.numpy(), number), raw_dtype=number)
    finish(writer)
    return written


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
    writer.add_chat_template((checkpoint / "chat_template.jinja").read_text())
