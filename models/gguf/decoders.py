"""What the decoders of some architectures have in config.json beside, or in another way than, all others. Pure."""

from ..checkpoint.json_fields import JsonObject
from .contents import LONG_FACTORS, SHORT_FACTORS, Contents, Fields

_WINDOW = "attention.sliding_window"
_GEMMA_27B = 62  # layers
_GEMMA_INTERVAL = 6


def gemma3(facts: JsonObject, fields: Fields, contents: Contents) -> Fields:
    """Five layers with a window for one that attends to all, unless the file says which. Raises CheckpointError."""
    layers, hidden, heads = (fields[name] for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    window = facts.integer(_WINDOW, default=0, least=0)
    local = {"rope_type": "default", "rope_theta": facts.number("rope.freq_base_swa", default=1e4)}
    own: Fields = {
        "layer_types": _kinds(facts, layers) if window else ["full_attention"] * layers,
        "sliding_window": window or None,
        "query_pre_attn_scalar": hidden // heads if layers == _GEMMA_27B else fields["head_dim"],
        "rope_parameters": {"full_attention": {"rope_type": "default", **fields["rope_parameters"]}, "sliding_attention": local},
        "hidden_activation": "gelu_pytorch_tanh",
    }
    if facts.has("final_logit_softcapping"):
        own["final_logit_softcapping"] = facts.number("final_logit_softcapping")
    return {**fields, **own}


def _kinds(facts: JsonObject, layers: int) -> list[str]:
    """Of a file's layers, each of which it says whether it has a window; or that every so many-th has none."""
    said = facts.data.get("attention.sliding_window_pattern", _GEMMA_INTERVAL)
    if isinstance(said, list):
        if len(said) < layers or not all(type(one) is bool for one in said):
            raise facts.error("attention.sliding_window_pattern", f"is no list of true or false for each of {layers} layers")
        return ["sliding_attention" if has_window else "full_attention" for has_window in said[:layers]]
    if type(said) is bool:  # of all layers alike
        return ["sliding_attention" if said else "full_attention"] * layers
    interval = facts.integer("attention.sliding_window_pattern", default=_GEMMA_INTERVAL)
    return ["sliding_attention" if number % interval else "full_attention" for number in range(1, layers + 1)]


def glm4(facts: JsonObject, fields: Fields, contents: Contents) -> Fields:
    """A part of each head turns. Raises CheckpointError for the decoder of a model that sees, which turns by three axes."""
    if facts.has("rope.dimension_sections") and any(facts.integers("rope.dimension_sections")):
        raise facts.error("rope.dimension_sections", "are of a model that sees; of GLM-4.1V, 4.6V and OCR mmrt reads the directory")
    return {**fields, "rope_parameters": _with_part(facts, fields)}


def phi3(facts: JsonObject, fields: Fields, contents: Contents) -> Fields:
    """Factors of its rope are in tensors: for the context of its training, and beyond. Raises CheckpointError."""
    own: Fields = {"rope_parameters": _with_part(facts, fields), "sliding_window": facts.integer(_WINDOW, default=0, least=0) or None}
    if short := contents.factors.get(SHORT_FACTORS):
        own["original_max_position_embeddings"] = facts.integer("rope.scaling.original_context_length")
        own["rope_parameters"] |= {
            "rope_type": "longrope",
            "short_factor": list(short),
            "long_factor": list(contents.factors.get(LONG_FACTORS, short)),
        }
        if facts.has("rope.scaling.attn_factor"):
            own["rope_parameters"]["attention_factor"] = facts.number("rope.scaling.attn_factor")
    return {**fields, **own}


def _with_part(facts: JsonObject, fields: Fields) -> Fields:
    """``rope_parameters`` with the part of a head that turns."""
    turning = facts.integer("rope.dimension_count", default=fields["head_dim"], most=fields["head_dim"])
    return {**fields["rope_parameters"], "partial_rotary_factor": turning / fields["head_dim"]}
