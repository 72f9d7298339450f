"""The table of fields as docs/api.md has it:
``python -m mmrt.tests.actors.gateway.field_table_markdown docs/api.md`` writes it there."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from mmrt.actors.gateway.reading.field_rules import Kinds, Place, Rule
from mmrt.actors.gateway.reading.field_table import chat, common, media, messages, ollama, responses
from mmrt.actors.gateway.reading.harmless import NEVER

BEGIN, END = "<!-- the table of fields -->\n", "<!-- its end -->\n"
_MODULES = (common, chat, media, responses, messages, ollama)
_OF_ALL = Place("requests for work", (), common.WORK)


def table() -> str:
    """Return the table, with a row for fields of an object that have the same reason."""
    rows = [("object", "field, type or role", "here", "why, or what to do instead"), ("---",) * 4, *_of_place(_OF_ALL, {})]
    found = [one for module in _MODULES for one in vars(module).values()]
    for one in {one.name: one for one in found if isinstance(one, Place | Kinds)}.values():
        rows += _of_place(one, {} if not one.rules else common.WORK) if isinstance(one, Place) else _of_kinds(one)
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _of_place(place: Place, shared: Mapping[str, Rule]) -> Iterator[tuple[str, ...]]:
    if place.used:
        yield place.name, _listed(place.used), "used", ""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, rule in place.rules.items():
        if shared.get(name) != rule and name not in place.used:
            groups.setdefault((_verdict(rule), rule.why), []).append(name)
    for (verdict, why), names in groups.items():
        yield place.name, _listed(names), verdict, why


def _of_kinds(kinds: Kinds) -> Iterator[tuple[str, ...]]:
    yield kinds.name, _listed(kinds.used), "used", ""
    for verdict, reasons in (("no effect", kinds.without), ("refused", kinds.refused)):
        groups: dict[str, list[str]] = {}
        for name, why in reasons.items():
            groups.setdefault(why, []).append(name)
        for why, names in groups.items():
            yield kinds.name, _listed(names), verdict, why


def _verdict(rule: Rule) -> str:
    if not rule.is_refused:
        return "no effect"
    return "refused" if rule.values is NEVER else f"only {rule.values.words}"


def _listed(names: "tuple[str, ...] | list[str]") -> str:
    return ", ".join(f"`{name}`" for name in names)


def with_table(text: str) -> str:
    """Return a document with the table between its marks."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(with_table(document.read_text()))
