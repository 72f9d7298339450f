"""Names of tensors of towers, which lie in GGUF files of their own (mmproj), and those of the same tensors in a checkpoint. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

FRAME = ".{}"  # behind the name of a patch embedding's part: that of a frame behind the first
PATCHES = "v.patch_embd.weight"
UNUSED = (
    "a.position_embd.weight",  # sines and cosines, which a tower makes itself
    "v.token_embd.img_break",  # a row of the decoder's embeddings
    "v.token_embd.img_break.weight",
)
_LAYER = re.compile(r"([av])\.blk\.(\d+)\.(.+)")
_FEED_FORWARD = re.compile(r"v\.blk\.(\d+)\.ffn_(up|down)\.(weight|bias)")
_DEEPSTACK = re.compile(r"v\.deepstack\.(\d+)\.(\w+)\.(weight|bias)")
_OF_DEEPSTACK = {"norm": "ln_q", "fc1": "mlp.0", "fc2": "mlp.2"}
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")  # of a product, beside its matrix
_PRODUCT = ".linear"
_INTERN_EMBEDDINGS = "vision_tower.embeddings."
_CLIP_EMBEDDINGS = "vision_tower.vision_model.embeddings."


class TowerNames(NamedTuple):
    """A kind of tower. ``layers``: the beginning of a layer's names in a checkpoint, before its number. ``parts``: what follows, by its
    name in a file, with its end or without. ``whole``: names of all else. ``letter``: of layers in a file."""

    layers: str
    parts: Mapping[str, str]
    whole: Mapping[str, str]
    letter: str = "v"


def _with_ends(names: Mapping[str, str], *ends: str) -> dict[str, str]:
    return {f"{theirs}.{end}": f"{ours}.{end}" for theirs, ours in names.items() for end in ends or ("weight", "bias")}


_QWEN = TowerNames(
    "visual.blocks.",
    {
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
    },
    {
        PATCHES: "visual.patch_embed.proj.weight",
        f"{PATCHES}.1": f"visual.patch_embed.proj.weight{FRAME.format(1)}",
        "v.patch_embd.bias": "visual.patch_embed.proj.bias",
        "v.position_embd.weight": "visual.pos_embed.weight",
        **_with_ends({"v.post_ln": "visual.merger.ln_q", "mm.0": "visual.merger.mlp.0", "mm.2": "visual.merger.mlp.2"}),
    },
)
_QWEN_SOUND = TowerNames(
    "audio_tower.layers.",
    {
        "ln1": "self_attn_layer_norm",
        "ln2": "final_layer_norm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_out": "self_attn.out_proj",
        "ffn_up": "fc1",
        "ffn_down": "fc2",
    },
    _with_ends(
        {
            "a.conv1d.1": "audio_tower.conv1",
            "a.conv1d.2": "audio_tower.conv2",
            "a.post_ln": "audio_tower.ln_post",
            "mm.a.fc": "audio_tower.proj",
        }
    ),
    letter="a",
)
_SIGLIP_PARTS = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}


def _siglip(prefix: str, merger: Mapping[str, str]) -> TowerNames:
    """``merger``: names of what follows the tower."""
    whole = _with_ends({"v.patch_embd": f"{prefix}embeddings.patch_embedding", "v.post_ln": f"{prefix}post_layernorm"})
    whole["v.position_embd.weight"] = f"{prefix}embeddings.position_embedding.weight"
    return TowerNames(f"{prefix}encoder.layers.", _SIGLIP_PARTS, {**whole, **merger})


_GEMMA3 = _siglip(
    "vision_tower.vision_model.",
    {
        "mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight",
        "mm.soft_emb_norm.weight": "multi_modal_projector.mm_soft_emb_norm.weight",
    },
)
_IDEFICS3 = _siglip("model.vision_model.", {"mm.model.fc.weight": "model.connector.modality_projection.proj.weight"})
_GEMMA4 = TowerNames(
    "model.vision_tower.encoder.layers.",
    {
        "ln1": "input_layernorm",
        "attn_post_norm": "post_attention_layernorm",
        "ln2": "pre_feedforward_layernorm",
        "ffn_post_norm": "post_feedforward_layernorm",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_q": "self_attn.q_proj.linear",
        "attn_k": "self_attn.k_proj.linear",
        "attn_v": "self_attn.v_proj.linear",
        "attn_out": "self_attn.o_proj.linear",
        "ffn_gate": "mlp.gate_proj.linear",
        "ffn_up": "mlp.up_proj.linear",
        "ffn_down": "mlp.down_proj.linear",
    },
    {
        PATCHES: "model.vision_tower.patch_embedder.input_proj.weight",
        "v.position_embd.weight": "model.vision_tower.patch_embedder.position_embedding_table",
        "v.std_bias": "model.vision_tower.std_bias",
        "v.std_scale": "model.vision_tower.std_scale",
        "mm.input_projection.weight": "model.embed_vision.embedding_projection.weight",
    },
)
_GEMMA4_SOUND = TowerNames(
    "model.audio_tower.layers.",
    {
        "ffn_norm": "feed_forward1.pre_layer_norm",
        "ffn_up": "feed_forward1.ffw_layer_1.linear",
        "ffn_down": "feed_forward1.ffw_layer_2.linear",
        "ffn_post_norm": "feed_forward1.post_layer_norm",
        "ffn_norm_1": "feed_forward2.pre_layer_norm",
        "ffn_up_1": "feed_forward2.ffw_layer_1.linear",
        "ffn_down_1": "feed_forward2.ffw_layer_2.linear",
        "ffn_post_norm_1": "feed_forward2.post_layer_norm",
        "ln1": "norm_pre_attn",
        "attn_pre_norm": "norm_pre_attn",
        "attn_post_norm": "norm_post_attn",
        "attn_q": "self_attn.q_proj.linear",
        "attn_k": "self_attn.k_proj.linear",
        "attn_v": "self_attn.v_proj.linear",
        "attn_out": "self_attn.post.linear",
        "attn_k_rel": "self_attn.relative_k_proj",
        "per_dim_scale.weight": "self_attn.per_dim_scale",
        "conv_norm": "lconv1d.pre_layer_norm",
        "conv_pw1": "lconv1d.linear_start.linear",
        "conv_dw": "lconv1d.depthwise_conv1d",
        "norm_conv": "lconv1d.conv_norm",
        "conv_pw2": "lconv1d.linear_end.linear",
        "ln2": "norm_out",
    },
    {
        **{
            f"a.conv1d.{number}.{theirs}": f"model.audio_tower.subsample_conv_projection.layer{number}.{ours}"
            for number in (0, 1)
            for theirs, ours in {"weight": "conv.weight", "norm.weight": "norm.weight"}.items()
        },
        "a.input_projection.weight": "model.audio_tower.subsample_conv_projection.input_proj_linear.weight",
        **_with_ends({"a.pre_encode.out": "model.audio_tower.output_proj"}),
        "mm.a.input_projection.weight": "model.embed_audio.embedding_projection.weight",
    },
    letter="a",
)
_PIXTRAL = TowerNames(
    "vision_tower.transformer.layers.",
    {
        "ln1": "attention_norm",
        "ln2": "ffn_norm",
        "attn_q": "attention.q_proj",
        "attn_k": "attention.k_proj",
        "attn_v": "attention.v_proj",
        "attn_out": "attention.o_proj",
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    },
    {
        PATCHES: "vision_tower.patch_conv.weight",
        "v.pre_ln.weight": "vision_tower.ln_pre.weight",
        **_with_ends({"mm.1": "multi_modal_projector.linear_1", "mm.2": "multi_modal_projector.linear_2"}),
        "mm.input_norm.weight": "multi_modal_projector.norm.weight",
        "mm.patch_merger.weight": "multi_modal_projector.patch_merger.merging_layer.weight",
    },
)
_INTERNVL = TowerNames(
    "vision_tower.encoder.layer.",
    {
        "ln1": "layernorm_before",
        "ln2": "layernorm_after",
        "attn_q": "attention.q_proj",
        "attn_k": "attention.k_proj",
        "attn_v": "attention.v_proj",
        "attn_out": "attention.projection_layer",
        "attn_q_norm": "attention.q_norm",
        "attn_k_norm": "attention.k_norm",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
        "ls1.weight": "lambda_1",
        "ls2.weight": "lambda_2",
    },
    {
        "v.class_embd": f"{_INTERN_EMBEDDINGS}cls_token",
        "v.position_embd.weight": f"{_INTERN_EMBEDDINGS}position_embeddings",
        **_with_ends(
            {
                "v.patch_embd": f"{_INTERN_EMBEDDINGS}patch_embeddings.projection",
                "mm.model.mlp.0": "multi_modal_projector.layer_norm",
                "mm.model.mlp.1": "multi_modal_projector.linear_1",
                "mm.model.mlp.3": "multi_modal_projector.linear_2",
            }
        ),
    },
)
_GLM = TowerNames(
    "visual.blocks.",
    {**_QWEN.parts, "attn_q_norm": "attn.q_norm", "attn_k_norm": "attn.k_norm"},
    {
        **{theirs: ours for theirs, ours in _QWEN.whole.items() if theirs.startswith("v.patch_embd")},
        "v.position_embd.weight": "visual.embeddings.position_embedding.weight",
        "v.norm_embd.weight": "visual.post_conv_layernorm.weight",
        "v.post_ln.weight": "visual.post_layernorm.weight",
        **_with_ends({"mm.patch_merger": "visual.downsample", "mm.post_norm": "visual.merger.post_projection_norm"}),
        "mm.model.fc.weight": "visual.merger.proj.weight",
        **{f"mm.{part}.weight": f"visual.merger.{part}_proj.weight" for part in ("gate", "up", "down")},
    },
)
_CLIP = _siglip(
    "vision_tower.vision_model.",
    {
        "v.class_embd": f"{_CLIP_EMBEDDINGS}class_embedding",
        **_with_ends(
            {
                "v.pre_ln": "vision_tower.vision_model.pre_layrnorm",
                "mm.0": "multi_modal_projector.linear_1",
                "mm.2": "multi_modal_projector.linear_2",
            }
        ),
        "model.image_newline": "image_newline",
    },
)
_KINDS = {  # by ``clip.projector_type``; others are Qwen's
    "gemma3": (_GEMMA3,),
    "idefics3": (_IDEFICS3,),
    "gemma4v": (_GEMMA4,),
    "gemma4a": (_GEMMA4_SOUND,),
    "pixtral": (_PIXTRAL,),
    "lightonocr": (_PIXTRAL,),
    "internvl": (_INTERNVL,),
    "glm4v": (_GLM,),
    "mlp": (_CLIP,),
}
QWEN: Sequence[TowerNames] = (_QWEN, _QWEN_SOUND)


def towers_of(kinds: Iterable[object]) -> Sequence[TowerNames]:
    """Of files that tell of these kinds of towers, or of nothing."""
    found = [names for kind in kinds if isinstance(kind, str) for names in _KINDS.get(kind, ())]
    return found or QWEN


def tower_name(name: str, towers: Sequence[TowerNames], deepstack: tuple[int, ...]) -> str | None:
    """The name of a tensor in a checkpoint; None where there is none. ``deepstack``: see ``deepstack_blocks``."""
    if (found := _DEEPSTACK.fullmatch(name)) is not None and found[2] in _OF_DEEPSTACK and int(found[1]) in deepstack:
        return f"visual.deepstack_merger_list.{deepstack.index(int(found[1]))}.{_OF_DEEPSTACK[found[2]]}.{found[3]}"
    layer = _LAYER.fullmatch(name)
    for tower in towers:
        if name in tower.whole:
            return tower.whole[name]
        if layer is not None and layer[1] == tower.letter and (part := layer_part(tower.parts, layer[3])) is not None:
            return f"{tower.layers}{int(layer[2])}.{part}"
    return None


def layer_part(parts: Mapping[str, str], name: str) -> str | None:
    """A layer's tensor behind the layer's number, by its name in a file, likewise; None if there is none."""
    if name in parts:
        return parts[name]
    part, _, end = name.rpartition(".")
    if (own := parts.get(part)) is None:
        return None
    if end in _BOUNDS:
        return f"{own.removesuffix(_PRODUCT)}.{end}" if own.endswith(_PRODUCT) else None
    return f"{own}.{end}" if end in ("weight", "bias") else None


def deepstack_blocks(names: Iterable[str]) -> tuple[int, ...]:
    """The blocks of a tower that a merger stands behind: a file names mergers by them, a checkpoint in their order."""
    return tuple(sorted({int(found[1]) for name in names if (found := _DEEPSTACK.fullmatch(name))}))


def has_swapped_names(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether a file of these tensors swaps the names of the up and down matrices in a tower's feed-forwards."""
    down, norm = shapes.get("v.blk.0.ffn_down.weight", ()), shapes.get("v.blk.0.ln1.weight", ())
    return len(down) == 2 and down[1:] == norm != down[:1]


def swapped(name: str) -> str:
    """The name of a tower's other matrix of a feed-forward: old files have the two by each other's names."""
    found = _FEED_FORWARD.fullmatch(name)
    return name if found is None else f"v.blk.{found[1]}.ffn_{'down' if found[2] == 'up' else 'up'}.{found[3]}"


def tower_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor in a checkpoint, by that's name: some have an axis of one more there, or one less."""
    if name.startswith("audio_tower.conv") and name.endswith(".bias") and shape[1:] == (1,):
        return shape[:1]
    if name.endswith(_BOUNDS) and shape == (1,):
        return ()
    if name.endswith(".depthwise_conv1d.weight") and len(shape) == 2:
        return shape[0], 1, shape[1]
    if name.endswith(".patch_embedder.input_proj.weight") and len(shape) == 4:
        return shape[0], shape[1] * shape[2] * shape[3]
    if name.startswith(_INTERN_EMBEDDINGS) and name.endswith((".cls_token", ".position_embeddings")):
        rows = shape[-2] if len(shape) > 1 else 1
        return 1, rows, shape[-1]
    return shape
