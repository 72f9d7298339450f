"""What checkpoints of Gemma have in common: the activation, and the names of norms, which other families have in other places."""

from . import checkpoint

ACTIVATION = "gelu_pytorch_tanh"
_NORMS = {
    ".post_attention_layernorm.": ".post_self_attn_layernorm.",
    ".pre_feedforward_layernorm.": ".post_attention_layernorm.",
    ".post_feedforward_layernorm.": ".post_mlp_layernorm.",
}


def canonical_name(name: str) -> str:
    """See ``Family``."""
    return checkpoint.renamed(checkpoint.canonical_name(name), _NORMS)


def checkpoint_name(name: str) -> str:
    """See ``Family``."""
    return checkpoint.renamed(checkpoint.checkpoint_name(name), {ours: theirs for theirs, ours in _NORMS.items()})
