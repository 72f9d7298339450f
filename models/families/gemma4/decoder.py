"""Gemma 4's decoder, as transformers' ``gemma4_text``: layers with a window for one that attends to all, whose heads are larger. In
small models the last layers attend to the keys and values of earlier ones, and each layer has inputs of its own.
"""

from msgspec.structs import replace

from ...architecture import (
    AttentionConfig,
    LanguageConfig,
    LayerConfig,
    MlpAndExpertsConfig,
    MlpConfig,
    MoeConfig,
    PerLayerConfig,
    RopeConfig,
)
from ...checkpoint.json_fields import JsonObject
from ..fields import parse_attention
from ..text import gemma
from ..text.windows import windows_by_pattern

_STILL = 1e30  # by which a pair turns more slowly that does not turn


def parse_text(text: JsonObject, max_context: int, tie: bool, placeholders: tuple[int, ...]) -> LanguageConfig:
    """``placeholders`` of media. Raises CheckpointError."""
    text.text("hidden_activation", default=gemma.ACTIVATION, choices=(gemma.ACTIVATION,))
    hidden_size = text.integer("hidden_size")
    layers = _parse_layers(text, max_context)
    size = text.integer("hidden_size_per_layer_input", default=256, least=0)
    inputs = PerLayerConfig(
        size=size,
        vocab_size=text.integer("vocab_size_per_layer_input", default=262144),
        pad_id=text.integer("pad_token_id", default=0, least=0),
        placeholders=placeholders,
    )
    return LanguageConfig(
        vocab_size=text.integer("vocab_size", default=262144),
        hidden_size=hidden_size,
        rms_norm_eps=text.number("rms_norm_eps", default=1e-6),
        layers=layers,
        ropes=_parse_ropes(text, layers),
        tie_embeddings=tie,
        embedding_scale=hidden_size**0.5,
        final_softcap=text.number("final_logit_softcapping") if text.has("final_logit_softcapping") else 0.0,
        per_layer=inputs if size else None,
    )


def _parse_layers(text: JsonObject, max_context: int) -> tuple[LayerConfig, ...]:
    num_layers = text.integer("num_hidden_layers", most=1000)
    windows = windows_by_pattern(text, num_layers, default_interval=6, default_window=512)
    windows[-1] = 0  # as transformers has it, whatever the file says
    num_shared = text.integer("num_kv_shared_layers", default=0, least=0, most=num_layers - 1)
    num_owners, is_wide = num_layers - num_shared, text.boolean("use_double_wide_mlp", default=False)
    inner, layers, seeing = text.integer("intermediate_size"), list[LayerConfig](), _sees_pictures(text)
    experts = _parse_experts(text)
    for index, window in enumerate(windows):
        owner = -1
        if index >= num_owners:
            owner = max((earlier for earlier in range(num_owners) if bool(windows[earlier]) == bool(window)), default=-1)
            if owner < 0:
                raise text.error("num_kv_shared_layers", f"is {num_shared}; layer {index} finds no earlier one of its type")
        mixer = _parse_heads(text, index, is_full=not window)
        own_window = window if window < max_context else 0
        mixer = replace(mixer, window=own_window, owner=owner, sees_pictures=seeing and bool(window))
        mlp = MlpConfig(intermediate_size=inner * (2 if is_wide and owner >= 0 else 1), activation="gelu_tanh")
        feed_forward = mlp if experts is None else MlpAndExpertsConfig(mlp=mlp, experts=experts)
        layers.append(LayerConfig(mixer=mixer, feed_forward=feed_forward, has_output_norms=True, has_scalar=True))
    return tuple(layers)


def _parse_experts(text: JsonObject) -> MoeConfig | None:
    """Of all layers, beside their MLPs. Raises CheckpointError."""
    if not text.boolean("enable_moe_block", default=False):
        return None
    num_experts = text.integer("num_experts", most=1 << 16)
    return MoeConfig(
        num_experts=num_experts,
        top_k=text.integer("top_k_experts", most=num_experts),
        expert_size=text.integer("moe_intermediate_size"),
        activation="gelu_tanh",
    )


def _sees_pictures(text: JsonObject) -> bool:
    """Whether pictures see themselves in layers that have a window. Raises CheckpointError."""
    if not text.has("use_bidirectional_attention"):
        return False
    return text.text("use_bidirectional_attention", choices=("vision",)) == "vision"


def _parse_heads(text: JsonObject, index: int, is_full: bool) -> AttentionConfig:
    """Of a layer. Published files say how layers that attend to all differ, those of transformers 5 how each layer does."""
    heads = parse_attention(text, default_head_dim=256, default_kv_heads=4)
    head_dim, kv_heads, k_is_v = heads.head_dim, heads.num_kv_heads, is_full and text.boolean("attention_k_eq_v", default=False)
    if text.has("per_layer_config"):
        own = text.object("per_layer_config").object(str(index))
        head_dim, kv_heads = own.integer("head_dim", default=head_dim), own.integer("num_key_value_heads", default=kv_heads)
    elif is_full:
        head_dim = text.integer("global_head_dim", default=512)
        kv_heads = text.integer("num_global_key_value_heads", default=kv_heads) if k_is_v else kv_heads
    if heads.num_heads % kv_heads or head_dim % 2:
        raise text.error("per_layer_config", f"says that layer {index} has {kv_heads} heads of keys of size {head_dim}")
    heads = replace(heads, head_dim=head_dim, num_kv_heads=kv_heads, rope=int(is_full), k_is_v=k_is_v)
    return replace(heads, qk_norm=True, v_norm=True, scale=1.0)


def _parse_ropes(text: JsonObject, layers: tuple[LayerConfig, ...]) -> tuple[RopeConfig, RopeConfig]:
    """Of layers with a window, then of the others: pairs behind the first ones do not turn ("proportional")."""
    ropes = text.object("rope_parameters")
    local, full = ropes.object("sliding_attention"), ropes.object("full_attention")
    local.text("rope_type", default="default", choices=("default",))
    full.text("rope_type", default="proportional", choices=("proportional",))
    head_dim = next(layer.mixer.head_dim for layer in layers if isinstance(layer.mixer, AttentionConfig) and layer.mixer.rope == 1)
    turning = int(full.number("partial_rotary_factor", default=0.25, least=0, most=1.0) * head_dim // 2)
    factor = full.number("factor", default=1.0)
    stretch = (factor,) * turning + (_STILL,) * (head_dim // 2 - turning)
    return (
        RopeConfig(theta=local.number("rope_theta", default=1e4)),
        RopeConfig(theta=full.number("rope_theta", default=1e6), stretch=stretch),
    )
