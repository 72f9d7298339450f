"""Names of tensors in GGUF files, and those of the same tensors in a Hugging Face checkpoint: of decoders, some of whose parts are
named otherwise in some architectures. ``gguf_towers`` has those of towers. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .gguf_towers import QWEN, TowerNames, deepstack_blocks, layer_part, tower_name, towers_of

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
_OF_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
}
_OF_ARCHITECTURES = {  # parts of layers; "experts": what the names of experts' matrices begin with
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "gemma4": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "layer_output_scale.weight": "layer_scalar",
        "ffn_gate_inp": "router.proj",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "experts": "experts",
    },
    "glm4": {
        "post_attention_norm": "post_self_attn_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
    "olmo2": {"post_ffw_norm": "post_feedforward_layernorm"},
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}
_EXPERTS = {
    "ffn_gate_exps.weight": ("gate_proj",),
    "ffn_up_exps.weight": ("up_proj",),
    "ffn_down_exps.weight": ("down_proj",),
    "ffn_gate_up_exps.weight": ("gate_proj", "up_proj"),
}
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_NUMBERED = re.compile(r"(?:blk|model\.layers)\.(\d+)\.")


class Naming(NamedTuple):
    """The facts that a file's names of tensors depend on. ``layers``: parts of a decoder's layers. ``deepstack``: see
    ``deepstack_blocks``. ``towers``: kinds of towers."""

    layers: Mapping[str, str] = _OF_LAYERS
    deepstack: tuple[int, ...] = ()
    towers: Sequence[TowerNames] = QWEN


def naming_of(metadata: Iterable[Mapping[str, Any]], names: Iterable[str]) -> Naming:
    """Of files with these metadata, and tensors of these names. The decoder's first file says its architecture."""
    files = list(metadata)
    said = [its["general.architecture"] for its in files if "general.architecture" in its]
    own = next((_OF_ARCHITECTURES[one] for one in said if isinstance(one, str) and one in _OF_ARCHITECTURES), {})
    kinds = [its.get(f"clip.{part}projector_type") for its in files for part in ("", "vision.", "audio.")]
    return Naming({**_OF_LAYERS, **own}, deepstack_blocks(names), towers_of(kinds))


def checkpoint_name(name: str, naming: Naming) -> str:
    """The name of a tensor in a checkpoint; its own where there is none, so that it is said by it."""
    found = _LAYER.fullmatch(name)
    if found is not None and (part := layer_part(naming.layers, found[2])) is not None:
        return f"model.layers.{int(found[1])}.{part}"
    return _WHOLE.get(name) or tower_name(name, naming.towers, naming.deepstack) or name


def checkpoint_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor in a checkpoint, by its name in a file: some have an axis of one more there, or one less."""
    part = name.split(".")[-2:-1]
    if part == ["ssm_conv1d"] and len(shape) == 2:
        return shape[0], 1, shape[1]
    return (1, *shape) if part == ["ffn_gate_inp_shexp"] and len(shape) == 1 else shape


def layer_of(name: str) -> int:
    """The number of the layer that a tensor of a decoder is of, by its name in a file or a checkpoint; -1 if it is of none."""
    found = _NUMBERED.match(name)
    return -1 if found is None else int(found[1])


def is_experts(name: str) -> bool:
    """Whether a tensor [experts, rows, columns] holds a matrix of each expert, or two, one below the other."""
    found = _LAYER.fullmatch(name)
    return found is not None and found[2] in _EXPERTS


def names_of_expert(name: str, expert: int, naming: Naming) -> list[str]:
    """The names of an expert's matrices in a checkpoint."""
    found = _LAYER.fullmatch(name)
    assert found is not None
    place = f"model.layers.{int(found[1])}.{naming.layers.get('experts', 'mlp.experts')}"
    return [f"{place}.{expert}.{part}.weight" for part in _EXPERTS[found[2]]]
