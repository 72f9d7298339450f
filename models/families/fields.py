"""Checkpoint reading shared by families: the decoder's fields, dtype and ids that end a sequence."""

from collections.abc import Callable

from ..architecture import AttentionConfig, DType, FeedForwardConfig, LanguageConfig, LayerConfig, MlpConfig, RopeConfig
from ..checkpoint.json_fields import CheckpointFiles, JsonObject
from ..errors import CheckpointError


def parse_attention(text: JsonObject, default_head_dim: int = 0, default_kv_heads: int = 0) -> AttentionConfig:
    """Heads and biases. ``default_head_dim`` 0: the hidden size divided among the heads; ``default_kv_heads`` 0: as many as heads.
    Raises CheckpointError."""
    heads = text.integer("num_attention_heads")
    kv_heads = text.integer("num_key_value_heads", default=default_kv_heads or heads)
    if heads % kv_heads:
        raise text.error("num_key_value_heads", f"is {kv_heads}, which does not divide num_attention_heads ({heads})")
    head_dim = text.integer("head_dim", default=default_head_dim or max(text.integer("hidden_size") // heads, 1))
    if head_dim % 2:
        raise text.error("head_dim", f"is {head_dim}, expected an even number")
    has_biases = text.boolean("attention_bias", default=False)
    return AttentionConfig(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, bias=has_biases, output_bias=has_biases)


def max_positions(text: JsonObject) -> int:
    """Tokens of the longest context. Raises CheckpointError."""
    return text.integer("max_position_embeddings", default=32768)


FeedForwards = Callable[[JsonObject, int], list[FeedForwardConfig]]
"""Reads the feed-forward of each layer, so many."""


def parse_mlps(text: JsonObject, num_layers: int) -> list[FeedForwardConfig]:
    """All layers have the same. Raises CheckpointError."""
    return [MlpConfig(intermediate_size=text.integer("intermediate_size"))] * num_layers


def parse_fused_mlps(text: JsonObject, num_layers: int) -> list[FeedForwardConfig]:
    """As ``parse_mlps``, with one matrix for gate and up in the checkpoint. Raises CheckpointError."""
    return [MlpConfig(intermediate_size=text.integer("intermediate_size"), is_fused=True)] * num_layers


def parse_decoder(
    text: JsonObject, mixer: AttentionConfig, rope: RopeConfig, tie: bool, feed_forwards: FeedForwards = parse_mlps
) -> LanguageConfig:
    """A decoder whose layers have mixers that are alike. Raises CheckpointError, also for an activation other than SiLU."""
    text.text("hidden_act", default="silu", choices=("silu",))
    num_layers = text.integer("num_hidden_layers", most=1000)
    return LanguageConfig(
        vocab_size=text.integer("vocab_size"),
        hidden_size=text.integer("hidden_size"),
        rms_norm_eps=text.number("rms_norm_eps", default=1e-6),
        layers=tuple(LayerConfig(mixer=mixer, feed_forward=each) for each in feed_forwards(text, num_layers)),
        ropes=(rope,),
        tie_embeddings=tie,
    )


def parse_dtype(*places: JsonObject) -> DType:
    """The checkpoint's dtype from the first place that names one; half precision of either kind is computed in bfloat16."""
    for place in places:
        if place.has("dtype", "torch_dtype"):
            name = place.text("dtype", "torch_dtype", choices=("float32", "bfloat16", "float16"))
            return "float32" if name == "float32" else "bfloat16"
    return "bfloat16"


def parse_eos(files: CheckpointFiles, *places: JsonObject) -> tuple[int, ...]:
    """Ids that end a sequence: generation_config.json's, else the configuration's, else the tokenizer's. Raises CheckpointError."""
    generation = files.optional("generation_config.json")
    for place in (generation, *places) if generation is not None else places:
        if place.has("eos_token_id") and (found := place.integers("eos_token_id")):
            return found
    tokenizer = files.optional("tokenizer_config.json") or JsonObject({}, "defaults")
    if tokenizer.has("eos_token"):
        added = (files.optional("tokenizer.json") or JsonObject({}, "defaults")).objects("added_tokens")
        known = {token.text("content"): token.integer("id", least=0) for token in added}
        known |= {token: int(id) for id, token in tokenizer.object("added_tokens_decoder").tokens().items() if id.isdigit()}
        if (found_id := known.get(tokenizer.token("eos_token"))) is not None:
            return (found_id,)
    raise CheckpointError(f"{files.path}: no eos_token_id in generation_config.json or config.json, and no eos_token of the tokenizer")
