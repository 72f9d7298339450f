"""Plain data as TOML (pure): whole tables, and values in messages."""

import json
from typing import Any


def toml_table(table: dict[str, Any], path: str) -> list[str]:
    """Return the lines of a table and those in it; ``path``: its dotted name, "" for the top level."""
    lines = [f"{key} = {toml_value(value)}" for key, value in table.items() if not isinstance(value, dict)]
    if lines and path:
        lines = ["", f"[{path}]", *lines]
    for key, value in table.items():
        if isinstance(value, dict):
            lines += toml_table(value, f"{path}.{key}" if path else key)
    return lines


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
