"""Names of tensors in GGUF files, and those of the same tensors in a Hugging Face checkpoint: of decoders, some of whose parts are
named otherwise in some architectures, and of towers, which lie in files of their own (mmproj). Pure."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
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
}
_OF_ARCHITECTURES = {  # parts of layers
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "glm4": {
        "post_attention_norm": "post_self_attn_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}
_ALONE = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}  # of layers, with their ends
_EXPERTS = {
    "ffn_gate_exps": ("gate_proj",),
    "ffn_up_exps": ("up_proj",),
    "ffn_down_exps": ("down_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_NUMBERED = re.compile(r"(?:blk|model\.layers)\.(\d+)\.")
_LAYERS_OWN = re.compile(r"blk\.(\d+)\.(.+)")
FRAME = ".{}"  # behind the name of a patch embedding's part: that of a frame behind the first
PATCHES = "v.patch_embd.weight"
_OF_TOWERS = {
    PATCHES: "patch_embed.proj.weight",
    f"{PATCHES}.1": f"patch_embed.proj.weight{FRAME.format(1)}",
    "v.patch_embd.bias": "patch_embed.proj.bias",
    "v.position_embd.weight": "pos_embed.weight",
    **{
        f"{theirs}.{end}": f"merger.{ours}.{end}"
        for theirs, ours in {"v.post_ln": "ln_q", "mm.0": "mlp.0", "mm.2": "mlp.2"}.items()
        for end in ("weight", "bias")
    },
}
_OF_BLOCKS = {
    "ln1": "norm1",
    "ln2": "norm2",
    "attn_qkv": "attn.qkv",
    "attn_q": "attn.q",
    "attn_k": "attn.k",
    "attn_v": "attn.v",
    "attn_out": "attn.proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OF_SOUND = {  # with their ends
    **{f"a.conv1d.{number}.{end}": f"conv{number}.{end}" for number in (1, 2) for end in ("weight", "bias")},
    **{
        f"{theirs}.{end}": f"{ours}.{end}"
        for theirs, ours in {"a.post_ln": "ln_post", "mm.a.fc": "proj"}.items()
        for end in ("weight", "bias")
    },
}
_OF_SOUND_BLOCKS = {
    "ln1": "self_attn_layer_norm",
    "ln2": "final_layer_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "fc1",
    "ffn_down": "fc2",
}
POSITIONS = "a.position_embd.weight"  # sines and cosines, which a tower makes itself
_OF_DEEPSTACK = {"norm": "ln_q", "fc1": "mlp.0", "fc2": "mlp.2"}
_OF_SIGLIP = {
    **{f"v.patch_embd.{end}": f"embeddings.patch_embedding.{end}" for end in ("weight", "bias")},
    **{f"v.post_ln.{end}": f"post_layernorm.{end}" for end in ("weight", "bias")},
    "v.position_embd.weight": "embeddings.position_embedding.weight",
}
_OF_SIGLIP_BLOCKS = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_BLOCK = re.compile(r"v\.blk\.(\d+)\.(\w+)\.(weight|bias)")
_SOUND_BLOCK = re.compile(r"a\.blk\.(\d+)\.(\w+)\.(weight|bias)")
_DEEPSTACK = re.compile(r"v\.deepstack\.(\d+)\.(\w+)\.(weight|bias)")


class _Siglip(NamedTuple):
    """Names of a tower that is SigLIP's: their beginning, and those of what follows the tower."""

    prefix: str
    merger: Mapping[str, str]


_SIGLIPS = {  # by ``clip.projector_type``
    "gemma3": _Siglip(
        "vision_tower.vision_model.",
        {
            "mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight",
            "mm.soft_emb_norm.weight": "multi_modal_projector.mm_soft_emb_norm.weight",
        },
    ),
    "idefics3": _Siglip("model.vision_model.", {"mm.model.fc.weight": "model.connector.modality_projection.proj.weight"}),
}


class Naming(NamedTuple):
    """The facts that a file's names of tensors depend on. ``layers``: parts of a decoder's layers. ``deepstack``: see
    ``deepstack_blocks``. ``siglip``: of a tower with SigLIP's names; without it they are Qwen's."""

    layers: Mapping[str, str] = _OF_LAYERS
    deepstack: tuple[int, ...] = ()
    siglip: _Siglip | None = None


def naming_of(metadata: Iterable[Mapping[str, Any]], names: Iterable[str]) -> Naming:
    """Of files with these metadata, and tensors of these names. The decoder's first file says its architecture."""
    files = list(metadata)
    said = [its["general.architecture"] for its in files if "general.architecture" in its]
    own = next((_OF_ARCHITECTURES[one] for one in said if isinstance(one, str) and one in _OF_ARCHITECTURES), {})
    kinds = [its.get(f"clip.{part}projector_type") for its in files for part in ("", "vision.")]
    siglip = next((_SIGLIPS[kind] for kind in kinds if isinstance(kind, str) and kind in _SIGLIPS), None)
    return Naming({**_OF_LAYERS, **own}, deepstack_blocks(names), siglip)


def checkpoint_name(name: str, naming: Naming) -> str:
    """The name of a tensor in a checkpoint; its own where there is none, so that it is said by it."""
    deepstack, found = naming.deepstack, _LAYER.fullmatch(name)
    if found is not None and found[2] in naming.layers:
        return f"model.layers.{int(found[1])}.{naming.layers[found[2]]}.{found[3]}"
    found = _LAYERS_OWN.fullmatch(name)
    if found is not None and found[2] in _ALONE:
        return f"model.layers.{int(found[1])}.{_ALONE[found[2]]}"
    found = _BLOCK.fullmatch(name)
    if (siglip := naming.siglip) is not None:
        if found is not None and found[2] in _OF_SIGLIP_BLOCKS:
            return f"{siglip.prefix}encoder.layers.{int(found[1])}.{_OF_SIGLIP_BLOCKS[found[2]]}.{found[3]}"
        if name in _OF_SIGLIP:
            return f"{siglip.prefix}{_OF_SIGLIP[name]}"
        if name in siglip.merger:
            return siglip.merger[name]
    if found is not None and found[2] in _OF_BLOCKS:
        return f"visual.blocks.{int(found[1])}.{_OF_BLOCKS[found[2]]}.{found[3]}"
    found = _SOUND_BLOCK.fullmatch(name)
    if found is not None and found[2] in _OF_SOUND_BLOCKS:
        return f"audio_tower.layers.{int(found[1])}.{_OF_SOUND_BLOCKS[found[2]]}.{found[3]}"
    if name in _OF_SOUND:
        return f"audio_tower.{_OF_SOUND[name]}"
    found = _DEEPSTACK.fullmatch(name)
    if found is not None and found[2] in _OF_DEEPSTACK and int(found[1]) in deepstack:
        return f"visual.deepstack_merger_list.{deepstack.index(int(found[1]))}.{_OF_DEEPSTACK[found[2]]}.{found[3]}"
    return f"visual.{_OF_TOWERS[name]}" if name in _OF_TOWERS else _WHOLE.get(name, name)


def deepstack_blocks(names: Iterable[str]) -> tuple[int, ...]:
    """The blocks of a tower that a merger stands behind: a file names mergers by them, a checkpoint in their order."""
    return tuple(sorted({int(found[1]) for name in names if (found := _DEEPSTACK.fullmatch(name))}))


def has_swapped_names(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a file of these tensors has the matrices of a tower's feed-forwards by each other's names."""
    down, norm = shapes.get("v.blk.0.ffn_down.weight", ()), shapes.get("v.blk.0.ln1.weight", ())
    return len(down) == 2 and down[1:] == norm != down[:1]


def swapped(name: str) -> str:
    """The name of a tower's other matrix of a feed-forward: old files have the two by each other's names."""
    found = _BLOCK.fullmatch(name)
    other = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}.get(found[2]) if found else None
    return name if found is None or other is None else f"v.blk.{found[1]}.{other}.{found[3]}"


def checkpoint_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor in a checkpoint: some have an axis of one more there, or one less."""
    part = name.split(".")[-2:-1]
    if part == ["ssm_conv1d"] and len(shape) == 2:
        return shape[0], 1, shape[1]
    if name.startswith("a.conv1d.") and name.endswith(".bias") and shape[1:] == (1,):
        return shape[:1]
    return (1, *shape) if part == ["ffn_gate_inp_shexp"] and len(shape) == 1 else shape


def layer_of(name: str) -> int:
    """The number of the layer that a tensor of a decoder is of, by its name in a file or a checkpoint; -1 if it is of none."""
    found = _NUMBERED.match(name)
    return -1 if found is None else int(found[1])


def is_experts(name: str) -> bool:
    """Whether a tensor [experts, rows, columns] holds a matrix of each expert, or two, one below the other."""
    found = _LAYER.fullmatch(name)
    return found is not None and found[2] in _EXPERTS


def names_of_expert(name: str, expert: int) -> list[str]:
    """The names of an expert's matrices in a checkpoint."""
    found = _LAYER.fullmatch(name)
    assert found is not None
    return [f"model.layers.{int(found[1])}.mlp.experts.{expert}.{part}.{found[3]}" for part in _EXPERTS[found[2]]]
