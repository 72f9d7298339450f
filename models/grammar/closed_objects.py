"""Objects that get only the properties that their schemas name. Pure.

A schema says in several places what properties an object has: by its own ``properties``, those of the members of its ``allOf``, of what
it refers to, and of the option that is taken of ``anyOf``. All of them are allowed; so others can be excluded only where all are known.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from .keywords import RESTRICTING, name_pattern, without_property_names
from .references import References, types_of, values_of

_CONDITIONAL = ("if", "then", "else", "not")  # not held; what they name stays possible


class Names(NamedTuple):
    """Names and patterns of properties. ``are_given``: as properties, not only as required ones."""

    properties: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    are_given: bool = False


class Closing(NamedTuple):
    """Where others are excluded. ``here``: in the schema itself, these being known. ``options``: in each option of its choice, with
    what is known around it; None: not there. ``is_rough``: options' properties are allowed in all of them."""

    here: Names | None
    options: Names | None
    is_rough: bool = False


NOTHING = Names()
OPEN = Closing(None, None)


def closing_of(schema: Mapping[str, Any], outer: Names, references: References) -> Closing:
    """Return where objects of a schema are closed. ``outer``: what is known around it. One that speaks of other properties stays as it
    is."""
    if outer == NOTHING and schema.keys() & RESTRICTING == {"$ref"}:
        return OPEN  # what it refers to is closed by itself
    if values_of(schema) is not None or "object" not in types_of(references.resolve(schema)):
        return Closing(None, NOTHING)
    gathered = _Gathered(references)
    gathered.add_names(outer)
    gathered.add(schema, is_own=True)
    if gathered.speaks_of_others:
        return OPEN
    if not gathered.choices:
        return Closing(gathered.names if gathered.are_given else None, None)
    if gathered.choices == [True]:
        return Closing(None, gathered.names)
    gathered.add_options()
    if gathered.speaks_of_others or not gathered.are_given:
        return OPEN
    return Closing(gathered.names, None, is_rough=True)


def with_closing(schema: dict[str, Any], closing: Closing) -> dict[str, Any]:
    """Return a schema that excludes other properties, if they are excluded here."""
    properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    if closing.here is None or not (isinstance(properties, dict) and isinstance(patterns, dict)):
        return schema
    theirs = [name_pattern(pattern) for pattern in closing.here.patterns]
    if None in theirs:
        return schema
    closed = {**schema, "properties": {**properties, **{name: True for name in closing.here.properties if name not in properties}}}
    if others := {pattern: True for pattern in theirs if pattern not in patterns}:
        closed["patternProperties"] = {**patterns, **others}
    return {**closed, "additionalProperties": False}


class _Gathered:
    """What is said of properties in a schema and in what holds together with it."""

    def __init__(self, references: References, is_conditional: bool = False) -> None:
        """``is_conditional``: all of it is only possible."""
        self._references = references
        self._is_conditional = is_conditional
        self._properties: dict[str, None] = {}
        self._patterns: dict[str, None] = {}
        self._seen: set[int] = set()
        self._options: list[Any] = []
        self._conditional: list[Any] = []
        self.are_given = False
        self.speaks_of_others = False
        self.choices: list[bool] = []  # whether each is the schema's own

    @property
    def names(self) -> Names:
        return Names(tuple(self._properties), tuple(self._patterns), self.are_given)

    def add_names(self, names: Names) -> None:
        self._properties |= dict.fromkeys(names.properties)
        self._patterns |= dict.fromkeys(names.patterns)
        self.are_given |= names.are_given

    def add(self, schema: Any, is_own: bool = False) -> None:
        """Add what a schema says. Without recursion: a chain of references can be longer than Python's stack."""
        left = [schema]
        while left:
            one = left.pop()
            if isinstance(one, dict) and id(one) not in self._seen:
                self._seen.add(id(one))
                left += reversed(self._add_alone(one, is_own))
            is_own = False
        if not self._is_conditional and self._conditional:
            inner = _Gathered(self._references, is_conditional=True)
            inner._options, self._conditional = self._conditional, []
            inner.add_options()
            self.add_names(inner.names._replace(are_given=False))

    def _add_alone(self, schema: dict[str, Any], is_own: bool) -> list[Any]:
        """Add what stands in a schema itself. Returns the schemas that hold together with it."""
        said = schema if is_own else without_property_names(schema, self._references)
        for keyword, found in (("properties", self._properties), ("patternProperties", self._patterns)):
            if isinstance(said.get(keyword), dict):
                found |= dict.fromkeys(said[keyword])
                self.are_given = True
        if isinstance(required := said.get("required"), list):
            self._properties |= {name: None for name in required if isinstance(name, str)}
        self.speaks_of_others |= "additionalProperties" in said or "unevaluatedProperties" in said
        others = list(said["allOf"]) if isinstance(said.get("allOf"), list) else []
        if "$ref" in said:
            target = self._references.resolve({"$ref": said["$ref"]})
            if isinstance(target, dict) and "$ref" not in target:
                others.append(target)
        for keyword in ("anyOf", "oneOf"):
            if isinstance(said.get(keyword), list):
                self.choices.append(is_own)
                self._options += said[keyword]
        conditional = self._options if self._is_conditional else self._conditional
        conditional += [said[keyword] for keyword in _CONDITIONAL if keyword in said]
        if isinstance(schemas := said.get("dependentSchemas"), dict):
            conditional += schemas.values()
        return others

    def add_options(self) -> None:
        """Add what the options of choices say, and those of theirs."""
        while self._options:
            self.add(self._options.pop(0))
