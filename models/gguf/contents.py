"""What is read of a GGUF file's header."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import CheckpointError

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


def strings_of(metadata: Mapping[str, Any], key: str, where: str) -> list[str]:
    """A key's list of strings. Raises: CheckpointError."""
    found = metadata.get(key)
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise CheckpointError(f"{where}: {key} is missing, or no list of strings")
    return found
