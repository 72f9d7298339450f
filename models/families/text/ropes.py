"""Rotary position embeddings of a checkpoint, and how they reach beyond the context that the model was first trained with. Pure.

The formulas are transformers' (``modeling_rope_utils``): linear; llama3 (Llama 3.1); yarn (Peng et al., 2023). "dynamic" turns heads as
"default" does up to ``max_position_embeddings``, which is the context that is served: beyond, each longer length has angles of its own,
and K that is stored would not fit them. So it is with "longrope" beyond ``original_max_position_embeddings``. "mrope" is "default" with
several axes, as older files say it.
"""

import math
from collections.abc import Callable

from msgspec.structs import replace

from ...architecture import RopeConfig
from ...checkpoint.json_fields import JsonObject

_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "mrope")

_LONG = ("longrope", "su", "yarn")  # as Phi-3's files name it

Ropes = Callable[[JsonObject, int, int], RopeConfig]
"""Reads the embedding of heads of a size, for a context of so many tokens. Raises CheckpointError."""

TurningLayers = Callable[[JsonObject, int], list[bool]]
"""Reads in which layers, so many, heads turn. Raises CheckpointError."""


def all_turn(text: JsonObject, num_layers: int) -> list[bool]:
    """They do in all."""
    return [True] * num_layers


def turn_but_for_some(text: JsonObject, num_layers: int) -> list[bool]:
    """SmolLM3's: ``no_rope_layers`` has a 0 for a layer in which they do not; else every ``no_rope_layer_interval``-th is one."""
    interval = text.integer("no_rope_layer_interval", default=4)
    found = text.integers("no_rope_layers", default=[int(number % interval != 0) for number in range(1, num_layers + 1)])
    if len(found) < num_layers:
        raise text.error("no_rope_layers", f"has {len(found)} numbers, expected one for each of num_hidden_layers ({num_layers})")
    return [number != 0 for number in found[:num_layers]]


def no_turns(head_dim: int) -> RopeConfig:
    """Angles of 0 everywhere."""
    return RopeConfig(theta=1e4, stretch=(math.inf,) * (head_dim // 2))


def rope_fields(text: JsonObject) -> JsonObject:
    """The object of ``text`` that describes the embedding."""
    rope = text.object("rope_scaling") if text.data.get("rope_scaling") else text.object("rope_parameters")
    return rope.object("full_attention") if rope.has("full_attention") else rope  # by kind of layer


def parse_rope(text: JsonObject, head_dim: int, max_positions: int, default_theta: float = 1e4) -> RopeConfig:
    """The embedding of ``text``, whose ``max_position_embeddings`` are ``max_positions``. Raises CheckpointError."""
    expect_whole_heads(text)
    return parse_turns(text, head_dim, max_positions, default_theta)


def parse_partial_rope(text: JsonObject, head_dim: int, max_positions: int) -> RopeConfig:
    """As ``parse_rope``, where a part of each head may turn. Raises CheckpointError."""
    return _of_part(parse_turns(text, turning := parse_turning(text, head_dim), max_positions), turning, head_dim)


def parse_ernie_rope(text: JsonObject, head_dim: int, max_positions: int) -> RopeConfig:
    """Heads turn in neighbouring pairs. Raises CheckpointError."""
    return replace(parse_rope(text, head_dim, max_positions, default_theta=5e5), has_neighbours=True)


def parse_glm_rope(text: JsonObject, head_dim: int, max_positions: int) -> RopeConfig:
    """Half of each head turns where the file does not say, in neighbouring pairs. Raises CheckpointError."""
    turning = parse_turning(text, head_dim, default=0.5)
    return replace(_of_part(parse_turns(text, turning, max_positions), turning, head_dim), has_neighbours=True)


def parse_phi3_rope(text: JsonObject, head_dim: int, max_positions: int) -> RopeConfig:
    """Phi-3's: of "longrope", which has other angles for each side of the trained context, those of the short side. Raises
    CheckpointError."""
    rope = rope_fields(text)
    if rope.text("rope_type", "type", default="default", choices=("default", *_LONG)) == "default":
        return parse_partial_rope(text, head_dim, max_positions)
    turning, theta = parse_turning(text, head_dim), (rope if rope.has("rope_theta") else text).number("rope_theta", default=1e4)
    if len(stretch := rope.numbers("short_factor")) != turning // 2:
        raise rope.error("short_factor", f"has {len(stretch)} numbers, expected one for each of the {turning // 2} pairs that turn")
    trained = trained_positions(text, max_positions)
    factor = rope.number("factor", default=max_positions / trained)
    scale = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 and trained > 1 else 1.0
    whole = RopeConfig(theta=theta, stretch=stretch, factor=rope.number("attention_factor", default=scale))
    return _of_part(whole, turning, head_dim)


def served_positions(text: JsonObject, max_positions: int) -> int:
    """Tokens of the longest context whose angles are known before it is: of "longrope" the trained one. So of models whose queries
    grow beyond that, as Ministral 3's. Raises CheckpointError."""
    rope = rope_fields(text)
    is_long = rope.has("short_factor") and rope.text("rope_type", "type", default="default") in _LONG
    is_long |= rope.has("llama_4_scaling_beta")
    return min(max_positions, trained_positions(text, max_positions)) if is_long else max_positions


def trained_positions(text: JsonObject, max_positions: int) -> int:
    """Tokens of the context that a model was first trained with. Raises CheckpointError."""
    place = text if text.has("original_max_position_embeddings") else rope_fields(text)
    return place.integer("original_max_position_embeddings", default=max_positions)


def _of_part(rope: RopeConfig, turning: int, head_dim: int) -> RopeConfig:
    return rope if turning == head_dim else replace(rope, axes=(0,) * (turning // 2))


def expect_whole_heads(text: JsonObject) -> None:
    """Raise CheckpointError if a part of each head turns."""
    for place in (rope_fields(text), text):
        if (part := place.number("partial_rotary_factor", default=1.0)) != 1.0:
            raise place.error("partial_rotary_factor", f"is {part:g}; partly rotated heads are not supported")


def parse_turning(text: JsonObject, head_dim: int, default: float = 1.0) -> int:
    """How many of a head's values turn: the part that ``text`` says, or ``default``. Raises CheckpointError."""
    rope = rope_fields(text)
    part = (rope if rope.has("partial_rotary_factor") else text).number("partial_rotary_factor", default=default, most=1.0)
    if (turning := int(head_dim * part)) % 2 or not turning:
        raise rope.error("partial_rotary_factor", f"is {part:g}; {turning} of a head's {head_dim} values would turn, expected pairs")
    return turning


def parse_turns(text: JsonObject, head_dim: int, max_positions: int, default_theta: float = 1e4) -> RopeConfig:
    """As ``parse_rope``, where ``head_dim`` values of a head turn. Raises CheckpointError."""
    rope = rope_fields(text)
    theta = (rope if rope.has("rope_theta") else text).number("rope_theta", default=default_theta)
    if theta <= 1:
        raise text.error("rope_theta", f"is {theta:g}, expected more than 1")
    kind = rope.text("rope_type", "type", default="default", choices=_KINDS)
    if kind in ("default", "dynamic", "mrope"):
        return RopeConfig(theta=theta)
    frequencies = [theta ** (-2 * pair / head_dim) for pair in range(head_dim // 2)]
    if kind == "linear":
        return RopeConfig(theta=theta, stretch=(rope.number("factor"),) * len(frequencies))
    trained = trained_positions(text, max_positions)
    if kind == "llama3":
        return RopeConfig(theta=theta, stretch=_llama3(rope, frequencies, trained))
    factor = rope.number("factor", default=max_positions / trained)
    return RopeConfig(theta=theta, stretch=_yarn(rope, theta, head_dim, factor, trained), factor=_yarn_factor(rope, factor))


def _llama3(rope: JsonObject, frequencies: list[float], trained: int) -> tuple[float, ...]:
    """Waves longer than the trained context by ``low_freq_factor`` become longer by ``factor``, those shorter by ``high_freq_factor``
    stay, those between go over from one to the other."""
    factor, low, high = (rope.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise rope.error("high_freq_factor", f"is {high:g}, expected more than low_freq_factor ({low:g})")
    turns = [trained * frequency / (2 * math.pi) for frequency in frequencies]  # in the trained context
    kept = [min(max((turn - low) / (high - low), 0.0), 1.0) for turn in turns]
    return tuple(1 / (share + (1 - share) / factor) for share in kept)


def _yarn(rope: JsonObject, theta: float, head_dim: int, factor: float, trained: int) -> tuple[float, ...]:
    """Pairs that turn ``beta_fast`` times in the trained context stay, those that turn ``beta_slow`` times become slower by ``factor``,
    and the pairs between go over from one to the other by their number."""

    def pair_of(turns: float) -> float:
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_of(rope.number("beta_fast", default=32.0)), pair_of(rope.number("beta_slow", default=1.0))
    if rope.boolean("truncate", default=True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001
    slowed = [min(max((pair - first) / width, 0.0), 1.0) for pair in range(head_dim // 2)]
    return tuple(1 / (share / factor + (1 - share)) for share in slowed)


def _yarn_factor(rope: JsonObject, factor: float) -> float:
    """By which cosines and sines are multiplied: what attention loses of its sharpness in a longer context."""
    if rope.has("attention_factor"):
        return rope.number("attention_factor")

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    one, all_dim = rope.number("mscale", default=0.0, least=0), rope.number("mscale_all_dim", default=0.0, least=0)
    return scale(one) / scale(all_dim) if one and all_dim else scale(1.0)
