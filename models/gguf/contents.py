"""What is read of a GGUF file's header."""

from collections.abc import Mapping
from typing import Any, NamedTuple

Fields = dict[str, Any]

ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS = (f"rope_{which}.weight" for which in ("freqs", "factors_short", "factors_long"))
FACTORS = frozenset((ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS))
"""Tensors that a configuration depends on."""


class Contents(NamedTuple):
    """Of a file. ``types``: of its tensors, by name; ``shapes`` likewise; ``factors`` of ropes, by the names of their tensors."""

    where: str
    metadata: Mapping[str, Any]
    types: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    factors: Mapping[str, tuple[float, ...]] = {}
