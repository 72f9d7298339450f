"""The rule for fields, by which ``field_table`` has an entry for each: what would change the answer and is not done is refused by name,
with the next step; what cannot is taken, and named in the answer (``ignored``). So is a field that nobody knows.

Pure. ``settle`` ends the reading of each object, ``passes_over`` decides about parts, items and tools by their types.
"""

from collections.abc import Mapping
from typing import NamedTuple

from .fields import Fields, refuse, show
from .harmless import EMPTY, NEVER, Harmless
from .ignored import is_strict, note


class Rule(NamedTuple):
    """The rule for a field that its reader does not use. Only with ``values`` does it change nothing where ``is_refused``; otherwise it
    never does, and ``values`` are those that are taken with strict fields as well. ``why`` it is so, and what to do instead."""

    why: str
    values: Harmless
    is_refused: bool

    @property
    def schema(self) -> Mapping[str, object]:
        """The schema of what is taken."""
        return self.values.schema if self.is_refused or is_strict() else {}


def without_effect(why: str, values: Harmless = NEVER) -> Rule:
    """The rule for a field that cannot change the answer."""
    return Rule(why, values, is_refused=False)


def only(values: Harmless, why: str = "") -> Rule:
    """The rule for a field that changes nothing with these values alone."""
    return Rule(why, values, is_refused=True)


def refused(why: str) -> Rule:
    """The rule for a field that would change the answer. ``why`` has the next step."""
    return Rule(why, NEVER, is_refused=True)


class Place(NamedTuple):
    """A kind of object in requests. ``name``: in the documents. ``used``: fields that its reader takes."""

    name: str
    used: tuple[str, ...]
    rules: Mapping[str, Rule] = {}
    known: str = ""  # for errors with strict fields


class Kinds(NamedTuple):
    """The types of an object in requests, or its roles. ``used``: by its reader. The others are passed over, or refused, each for a
    reason; one that is not here is refused, since nobody knows what it would do."""

    name: str
    used: tuple[str, ...]
    without: Mapping[str, str] = {}
    refused: Mapping[str, str] = {}


def settle(fields: Fields, place: Place) -> None:
    """Settle what the reader of an object has left. Raises: RequestError for a field that would change the answer."""
    fields.note_place(place)
    for name in place.rules if fields.is_example else list(fields.leftover):
        if (rule := place.rules.get(name)) is not None:
            _settle(fields, name, rule)
    fields.leave(place.known)


def settle_first(fields: Fields, place: Place, *names: str) -> None:
    """Settle these fields before a reader that is shared with other objects takes them. Raises: RequestError, as ``settle``."""
    for name in names:
        if fields.is_example or name in fields.leftover:
            _settle(fields, name, place.rules[name])


def _settle(fields: Fields, name: str, rule: Rule) -> None:
    value, path = fields.take(name, rule.schema), fields.path(name)
    if value is None:
        return
    if rule.values.is_it(value):
        if not rule.values.is_done:
            note(path, rule.why)
        return
    problem = "is not supported" if rule.values in (NEVER, EMPTY) else f"is {show(value)}, only {rule.values.words} is supported"
    if not rule.is_refused and not is_strict():
        note(path, rule.why)
    else:
        raise refuse(path, f"{problem}: {rule.why}" if rule.why and rule.is_refused else problem)


def passes_over(kinds: Kinds, kind: object, path: str, allowed: str = "", field: str = "type") -> bool:
    """Return whether an object of this type is passed over. ``allowed``: words for the types that are used.

    Raises:
        RequestError: for a type that is neither used nor passed over.
    """
    if isinstance(kind, str) and kind in kinds.used:
        return False
    problem = f"is {show(kind)}, allowed are {allowed or ', '.join(kinds.used)}"
    if isinstance(kind, str) and kind in kinds.without and not is_strict():
        note(f"{path}.{kind}", kinds.without[kind])
        return True
    why = kinds.refused.get(kind) if isinstance(kind, str) else None
    raise refuse(f"{path}.{field}", f"{problem}; {why}" if why else problem)
