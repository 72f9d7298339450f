"""Plain data as TOML (pure): whole tables, and values in messages."""

import json
from typing import Any


def toml_table(table: dict[str, Any], path: str) -> list[str]:
    """Return the lines of a table and those in it; ``path``: its dotted name, "" for the top level. Arrays of tables hold no others."""
    lines = [f"{key} = {toml_value(value)}" for key, value in table.items() if not _holds_tables(value)]
    if lines and path:
        lines = ["", f"[{path}]", *lines]
    for key, value in table.items():
        name = f"{path}.{key}" if path else key
        if isinstance(value, dict):
            lines += toml_table(value, name)
        elif _holds_tables(value):
            lines += [line for row in value for line in toml_table(row, f"[{name}]")]
    return lines


def _holds_tables(value: object) -> bool:
    """Return whether the value is a table or an array of tables."""
    return isinstance(value, dict) or isinstance(value, list | tuple) and any(isinstance(row, dict) for row in value)


def toml_value(value: object) -> str:
    """Return the value as TOML writes it."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    return repr(value).lower() if isinstance(value, bool) else repr(value)


def show(value: object) -> str:
    """Return the value for a message, cut after 80 characters."""
    text = toml_value(value)
    return text if len(text) <= 80 else text[:77] + "..."
