"""Names of tensors in GGUF files, and those of the same tensors in a Hugging Face checkpoint: of decoders alone. Pure."""

import re

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
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def checkpoint_name(name: str) -> str:
    """The name of a tensor in a checkpoint; its own where there is none, so that it is said by it."""
    found = _LAYER.fullmatch(name)
    if found is not None and found[2] in _OF_LAYERS:
        return f"model.layers.{int(found[1])}.{_OF_LAYERS[found[2]]}.{found[3]}"
    return _WHOLE.get(name, name)


def is_experts(name: str) -> bool:
    """Whether a tensor [experts, rows, columns] holds a matrix of each expert."""
    found = _LAYER.fullmatch(name)
    return found is not None and found[2] in _EXPERTS


def name_of_expert(name: str, expert: int) -> str:
    """The name of an expert's matrix in a checkpoint."""
    found = _LAYER.fullmatch(name)
    assert found is not None
    return f"model.layers.{int(found[1])}.mlp.experts.{expert}.{_EXPERTS[found[2]]}.{found[3]}"
