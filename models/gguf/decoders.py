"""What the decoders of some architectures have in config.json beside, or in another way than, all others. Pure."""

import math

from ..checkpoint.json_fields import JsonObject
from .contents import LONG_FACTORS, SHORT_FACTORS, Contents, Fields

_WINDOW = "attention.sliding_window"
_GEMMA_27B = 62  # layers
_GEMMA_INTERVAL, _OLMO_INTERVAL = 6, 4
SECTIONS = "mrope_section"  # in the rope's fields
LONGER_QUERIES = "llama_4_scaling_beta"  # in the rope's fields


def gemma3(facts: JsonObject, fields: Fields, contents: Contents) -> Fields:
    """Five layers with a window for one that attends to all, unless the file says which. Raises CheckpointError."""
    layers, hidden, heads = (fields[name] for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    window = facts.integer(_WINDOW, default=0, least=0)
    local = {"rope_type": "default", "rope_theta": facts.number("rope.freq_base_swa", default=1e4)}
    own: Fields = {
        "layer_types": _kinds(facts, layers, _GEMMA_INTERVAL) if window else ["full_attention"] * layers,
        "sliding_window": window or None,
        "query_pre_attn_scalar": hidden // heads if layers == _GEMMA_27B else fields["head_dim"],
        "rope_parameters": {"full_attention": {"rope_type": "default", **fields["rope_parameters"]}, "sliding_attention": local},
        "hidden_activation": "gelu_pytorch_tanh",
    }
    if facts.has("final_logit_softcapping"):
        own["final_logit_softcapping"] = facts.number("final_logit_softcapping")
    return {**fields, **own}


def _kinds(facts: JsonObject, layers: int, usual_interval: int) -> list[str]:
    """Of a file's layers, each of which it says whether it has a window; or that every so many-th has none."""
    said = facts.data.get("attention.sliding_window_pattern", usual_interval)
    if isinstance(said, list):
        if len(said) < layers or not all(type(one) is bool for one in said):
            raise facts.error("attention.sliding_window_pattern", f"is no list of true or false for each of {layers} layers")
        return ["sliding_attention" if has_window else "full_attention" for has_window in said[:layers]]
    if type(said) is bool:  # of all layers alike
        return ["sliding_attention" if said else "full_attention"] * layers
    interval = facts.integer("attention.sliding_window_pattern", default=usual_interval)
    return ["sliding_attention" if number % interval else "full_attention" for number in range(1, layers + 1)]


def glm4(facts: JsonObject, fields: Fields, contents: Contents) -> Fields:
    """A part of each head turns; in the decoder of a model that sees by three axes, and in another order of rows. Raises
    CheckpointError."""
    rope, sections = _with_part(facts, fields), facts.integers("rope.dimension_sections", default=(), least=0)
    if not any(sections):
        return {**fields, "rope_parameters": rope}
    turning = facts.integer("rope.dimension_count", default=fields["head_dim"])
    return {
        **fields,
        "rope_parameters": {**rope, SECTIONS: list(sections[:3])},
        "quantization_config": {**fields["quantization_config"], "halved": turning},
    }


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


def granite(facts: JsonObject, fields: Fields, contents: Contents) -> Fields:
    """By what embeddings, scores and layers are multiplied, and logits divided; llama.cpp too wants the last one. Raises
    CheckpointError."""
    return {
        **fields,
        "attention_multiplier": facts.number("attention.scale", default=fields["head_dim"] ** -0.5),
        "embedding_multiplier": facts.number("embedding_scale", default=1.0),
        "residual_multiplier": facts.number("residual_scale", default=1.0),
        "logits_scaling": facts.number("logit_scale"),
    }


def olmo(facts: JsonObject, fields: Fields, contents: Contents) -> Fields:
    """OLMo 3 has windows, beside which heads turn by a rope that is not stretched. Raises CheckpointError."""
    if not facts.has(_WINDOW):
        return fields
    layers, theta = fields["num_hidden_layers"], fields["rope_parameters"]["rope_theta"]
    local = {"rope_type": "default", "rope_theta": facts.number("rope.freq_base_swa", default=theta)}
    return {
        **fields,
        "model_type": "olmo3",
        "sliding_window": facts.integer(_WINDOW),
        "layer_types": _kinds(facts, layers, _OLMO_INTERVAL),
        "rope_parameters": {"full_attention": fields["rope_parameters"], "sliding_attention": local},
    }


def seed_oss(facts: JsonObject, fields: Fields, contents: Contents) -> Fields:
    return {**fields, "attention_out_bias": "blk.0.attn_output.bias" in contents.types}


def mistral3(facts: JsonObject, fields: Fields, contents: Contents) -> Fields:
    """Of Ministral 3 yarn multiplies nothing, and queries grow beyond the context of its training: a file tells both by a number, and 0
    is as none. Raises CheckpointError."""
    rope = {**fields["rope_parameters"]}
    share = facts.number("rope.scaling.yarn_log_multiplier", default=0.0, least=0)
    if share and rope.get("rope_type") == "yarn":
        usual = 0.1 * math.log(max(rope["factor"], 1.0))
        rope["attention_factor"] = rope.get("attention_factor", 1 + usual) / (1 + share * usual)
    if growth := facts.number("attention.temperature_scale", default=0.0, least=0):
        rope[LONGER_QUERIES] = growth
    return {**fields, "sliding_window": None, "rope_parameters": rope}


def _with_part(facts: JsonObject, fields: Fields) -> Fields:
    """``rope_parameters`` with the part of a head that turns."""
    turning = facts.integer("rope.dimension_count", default=fields["head_dim"], most=fields["head_dim"])
    return {**fields["rope_parameters"], "partial_rotary_factor": turning / fields["head_dim"]}
