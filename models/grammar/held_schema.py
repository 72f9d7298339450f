"""The part of a client's schema that a grammar of llguidance can hold. Pure.

Annotations are left out without a word. What restricts answers and cannot be held is dropped and named. Every answer that is valid
under the schema stays possible, up to ``bounds``; where nothing is dropped, every possible answer is valid.

* An object gets only the properties that its schema names, where it names some and does not speak of others (``closed_objects``).
* ``nullable`` means what it does in OpenAPI.
* What would be endless has an end: see ``bounds``.
"""

from typing import Any, NamedTuple

from . import bounds
from .closed_objects import NOTHING, OPEN, Closing, Names, closing_of, with_closing
from .keywords import (
    FORMATS,
    IN_PLACE,
    KEPT,
    REFUSED_BY_OPENAI,
    RESTRICTING,
    is_number_beyond,
    name_pattern,
    pattern_parts,
    with_null,
    without_property_names,
)
from .property_counts import hold_counts
from .references import References, same, type_of, types_of, values_of

Schema = dict[str, Any]
SCHEMAS = ("items", "additionalProperties", "additionalItems", "prefixItems")
_NOT_READ = "it has look-around or a back-reference, which no grammar reads"


class Dropped(NamedTuple):
    """A keyword without effect: its place, a JSON pointer, and the reason. ``is_refused``: OpenAI's strict mode refuses it."""

    pointer: str
    reason: str
    is_refused: bool


class Held(NamedTuple):
    """``schema``: what is held. ``dropped``: what is not."""

    schema: Any
    dropped: list[Dropped]


def hold(schema: Any, *, is_open: bool = False) -> Held:
    """Return what a grammar can hold of a schema. ``is_open``: objects may have properties that their schemas do not speak of.

    Raises: GrammarError for a pattern that is too large.
    """
    holder = _Holder(schema, is_open)
    held = holder.root()
    return Held(held, list(dict.fromkeys(holder.dropped)))


class _Holder:
    def __init__(self, root: Any, is_open: bool) -> None:
        self._root = root
        self._is_open = is_open
        self._references = References(root)
        self._ends = bounds.ends_of(root)
        self._numbers: dict[tuple[str, bool], int] = {}  # of definitions, by pointer and whether they are a part of a value's schema
        self.dropped: list[Dropped] = []

    def root(self) -> Any:
        held = self._whole(self._root, "")
        if not isinstance(held, dict):
            return held
        definitions: Schema = {}
        done = 0
        while done < len(self._numbers):  # each may name others
            (pointer, is_part), number = list(self._numbers.items())[done]
            target = self._references.at(pointer)
            definitions[str(number)] = self._part(target, pointer) if is_part else self._whole(target, pointer)
            done += 1
        if bounds.names_free_json([held, definitions]):
            definitions |= bounds.FREE_JSON
        return {**held, "$defs": definitions} if definitions else held

    # ------------------------------------------------------------------------------------------------------ schemas

    def _whole(self, schema: Any, pointer: str, outer: Names = NOTHING) -> Any:
        """Hold all that is said of a value. ``outer``: the properties that are named around a choice of which this is an option."""
        schema, pointer = self._bare(schema, pointer)
        if schema is True or schema == {}:
            return bounds.FREE if outer == NOTHING else schema
        if not isinstance(schema, dict):
            return schema
        closing = OPEN if self._is_open else closing_of(schema, outer, self._references)
        return self._held(schema, pointer, closing, is_part=False)

    def _part(self, schema: Any, pointer: str) -> Any:
        """Hold a part of what is said of a value."""
        schema, pointer = self._bare(schema, pointer)
        return self._held(schema, pointer, OPEN, is_part=True) if isinstance(schema, dict) else schema

    def _bare(self, schema: Any, pointer: str) -> tuple[Any, str]:
        """Write in other words what has them, and take off what is around a schema without saying anything."""
        while isinstance(schema, dict):
            said = schema.keys() & RESTRICTING
            if not said:
                return True, pointer
            members = schema.get("allOf")
            if said != {"allOf"} or not isinstance(members, list) or len(members) != 1:
                break
            schema, pointer = members[0], f"{pointer}/allOf/0"
        if not isinstance(schema, dict):
            return schema, pointer
        schema = without_property_names(with_null(schema), self._references)
        excluded = self._references.resolve(schema.get("not", False), RESTRICTING - {"$ref"})
        if excluded is True or excluded == {} or self._references.resolve(schema) is False:
            return False, pointer
        if isinstance(excluded, dict):
            schema = self._without(schema, excluded, pointer)
        return schema, pointer

    def _without(self, schema: Schema, excluded: Schema, pointer: str) -> Schema:
        """Hold ``not``."""
        rest = {name: value for name, value in schema.items() if name != "not"}
        if self._references.are_apart(rest, excluded):
            return rest
        values, others = values_of(rest), values_of(excluded)
        if values is not None and others is not None and not excluded.keys() & RESTRICTING - {"enum", "const", "type"}:
            texts = {same(value) for value in others if type_of(value) in types_of(excluded)}
            left = [value for value in values if same(value) not in texts]
            return {**{name: value for name, value in rest.items() if name != "const"}, "enum": left}
        self._drop(pointer, "not")
        return rest

    def _held(self, schema: Schema, pointer: str, closing: Closing, is_part: bool) -> Any:
        others_are_refused = schema.get("unevaluatedProperties") is False
        if others_are_refused:
            own = closing_of(
                {name: value for name, value in schema.items() if name != "unevaluatedProperties"}, NOTHING, self._references
            )
            closing = own if closing == OPEN else closing
        is_part_of_value = is_part or closing.here is not None or schema.keys() & RESTRICTING != {"$ref"}
        out: Schema = {}
        for name, value in schema.items():
            place = f"{pointer}/{name}"
            if name == "$ref":
                out[name] = self._reference(value, is_part_of_value)
            elif name == "allOf" and isinstance(value, list):
                _add_members(out, [self._part(one, f"{place}/{number}") for number, one in enumerate(value)])
            elif name in ("anyOf", "oneOf") and isinstance(value, list):
                self._choice(out, name, value, pointer, closing)
            elif name == "properties" and isinstance(value, dict):
                out[name] = {key: self._whole(one, f"{place}/{_step(key)}") for key, one in value.items()}
            elif name == "patternProperties" and isinstance(value, dict):
                out[name] = self._patterns(value, place)
            elif name in SCHEMAS:
                is_list = isinstance(value, list)
                out[name] = (
                    [self._whole(one, f"{place}/{at}") for at, one in enumerate(value)] if is_list else self._whole(value, place)
                )
            elif name in KEPT | IN_PLACE | {"properties", "patternProperties"}:
                self._kept(out, schema, name, pointer)
            elif name in ("format", "pattern"):
                self._text(out, name, value, pointer)
            else:
                self._other(out, schema, name, pointer)
        if isinstance(patterns := out.get("patternProperties"), dict) and len(patterns) < len(schema["patternProperties"]):
            out["additionalProperties"] = True  # their keys stay possible
            if schema.get("additionalProperties", True) not in (True, {}):
                self._drop(pointer, "additionalProperties", "a pattern of patternProperties is not held", is_refused=False)
        out = with_closing(out, closing)
        is_closed = closing.here is not None and not closing.is_rough and out.get("additionalProperties") is False
        if others_are_refused and not is_closed:
            self._drop(pointer, "unevaluatedProperties")
        hold_counts(out, lambda name, reason: self._drop(pointer, name, reason))
        bounds.bound(out, is_part, self._ends)
        return out

    def _choice(self, out: Schema, name: str, value: list[Any], pointer: str, closing: Closing) -> None:
        """Hold ``anyOf``, and ``oneOf`` as if it were the same: it is where no value is valid under two."""
        outer, place = closing.options, f"{pointer}/{name}"
        options = [
            self._part(one, f"{place}/{number}") if outer is None else self._whole(one, f"{place}/{number}", outer)
            for number, one in enumerate(value)
        ]
        if name == "oneOf" and not self._all_apart(value):
            self._drop(pointer, name, "it is taken as anyOf: its schemas may have values in common")
        if "anyOf" in out:
            _add_members(out, [{"anyOf": options}])
        else:
            out["anyOf"] = options

    def _all_apart(self, options: list[Any]) -> bool:
        pairs = ((one, other) for number, one in enumerate(options) for other in options[number + 1 :])
        return all(self._references.are_apart(one, other) for one, other in pairs)

    def _reference(self, value: Any, is_part: bool) -> Any:
        pointer = self._references.pointer_of(value)
        try:
            if pointer is not None:
                self._references.at(pointer)
        except LookupError:
            pointer = None
        if pointer is None:
            return value  # llguidance says what is wrong with it
        return f"#/$defs/{self._numbers.setdefault((pointer, is_part), len(self._numbers))}"

    # ----------------------------------------------------------------------------------------------------- keywords

    def _patterns(self, value: Schema, place: str) -> Schema:
        found: Schema = {}
        for name, one in value.items():
            pattern, where = name_pattern(name), f"{place}/{_step(name)}"
            if pattern is None:
                self._drop(where, "", _NOT_READ, is_refused=False)
            else:
                found[pattern] = self._whole(one, where)
        return found

    def _text(self, out: Schema, name: str, value: Any, pointer: str) -> None:
        """Hold ``format`` or ``pattern``."""
        if name == "format" and isinstance(value, str) and value not in FORMATS:
            self._drop(pointer, name, f"no grammar is known for {value[:40]!r}")
        elif name == "format" or not isinstance(value, str):
            out[name] = value
        elif (parts := pattern_parts(value)) is None:
            self._drop(pointer, name, _NOT_READ, is_refused=False)
        else:
            out[name] = parts[0]
            if len(parts) > 1:
                _add_members(out, [{name: part} for part in parts[1:]])

    def _kept(self, out: Schema, schema: Schema, name: str, pointer: str) -> None:
        if is_number_beyond(schema, name):
            self._drop(pointer, name, "it has too many digits", is_refused=False)
        else:
            out[name] = schema[name]

    def _other(self, out: Schema, schema: Schema, name: str, pointer: str) -> None:
        """Drop a keyword that is not held, if it restricts something."""
        value = schema[name]
        match name:
            case "uniqueItems":
                is_idle = value is not True or schema.get("maxItems", 2) in (0, 1)
            case "contains":
                is_idle = schema.get("minContains", 1) == 0 and "maxContains" not in schema
            case "dependentRequired" | "dependentSchemas" | "dependencies":
                is_idle = not value
            case "if":
                is_idle = all(schema.get(branch, True) in (True, {}) for branch in ("then", "else"))
            case "unevaluatedItems":
                is_idle = value is True or value == {} or "items" in schema
                if value is False and not is_idle and not IN_PLACE & schema.keys():
                    out["items"], is_idle = False, True
            case "unevaluatedProperties":
                is_idle = isinstance(value, bool) or value == {}
            case "propertyNames" | "$dynamicRef" | "$recursiveRef":
                is_idle = False
            case _:
                is_idle = True
        if not is_idle:
            self._drop(pointer, name)

    def _drop(self, pointer: str, name: str, reason: str = "no grammar holds it", is_refused: bool | None = None) -> None:
        refused = name in REFUSED_BY_OPENAI if is_refused is None else is_refused
        self.dropped.append(Dropped(f"{pointer}/{name}" if name else pointer, reason, refused))


def _add_members(out: Schema, members: list[Any]) -> None:
    """Add to ``allOf``. If that is no list, llguidance says so."""
    if isinstance(known := out.setdefault("allOf", []), list):
        known += members


def _step(name: str) -> str:
    """A step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
