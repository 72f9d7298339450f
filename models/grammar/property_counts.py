"""``minProperties`` and ``maxProperties`` as far as llguidance holds them. Pure."""

from collections.abc import Callable
from typing import Any

from .keywords import IN_PLACE


def hold_counts(schema: dict[str, Any], drop: Callable[[str, str], None]) -> None:
    """Take away from a held schema what is not held, or says nothing. ``drop`` is told a keyword and the reason.

    Nothing keeps a model from writing a key twice where other keys than the named ones are allowed; a reader counts it once. So of
    ``minProperties`` only as many can be promised as are ``required``, and one more. With optional properties there can be "at least
    one" or "at most one" and no other number.
    """
    least, most = (schema.get(keyword) for keyword in ("minProperties", "maxProperties"))
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if (least is None and most is None) or not isinstance(properties, dict) or not isinstance(required, list):
        return
    if not all(one is None or (isinstance(one, int) and one >= 0) for one in (least, most)):
        return  # llguidance says what it expects
    num_required = len(set(map(str, required)))
    optional = [name for name, value in properties.items() if name not in required and value is not False]
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if most is not None and is_closed and most >= num_required + len(optional):
        del schema["maxProperties"]
        most = None
    if least is not None and least <= num_required and not IN_PLACE & schema.keys():
        del schema["minProperties"]
        least = None
    if least is not None and least > num_required + 1:
        drop("minProperties", f"only {num_required + 1} can be promised: one more than is required")
        least = schema["minProperties"] = num_required + 1
    if IN_PLACE & schema.keys() or (optional and not _is_one_of(least, most, num_required, is_closed)):
        for keyword in ("minProperties", "maxProperties"):
            if schema.pop(keyword, None) is not None:
                drop(keyword, "no grammar counts optional properties")


def _is_one_of(least: int | None, most: int | None, num_required: int, is_closed: bool) -> bool:
    """Return whether it is "at least one" or "at most one" of the optional properties, or exactly one, in a closed object."""
    return is_closed and (least is None or least <= num_required + 1) and (most is None or most == num_required + 1)
