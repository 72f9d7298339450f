"""Where the figures of a bench go: tables on the terminal, JSON to a file or to standard output. Called by every ``main`` here."""

from pathlib import Path

import msgspec
from rich.console import Console

STANDARD_OUTPUT = Path("-")
JSON_HELP = "write the figures; - is standard output"


def open_console(json: Path | None) -> Console:
    """The console for tables: standard error when standard output is for JSON."""
    return Console(stderr=json == STANDARD_OUTPUT)


def write_json(json: Path | None, figures: msgspec.Struct) -> None:
    """Write the figures where they were asked for. Raises: OSError."""
    encoded = msgspec.json.format(msgspec.json.encode(figures)).decode() + "\n"
    if json == STANDARD_OUTPUT:
        print(encoded, end="")
    elif json is not None:
        json.write_text(encoded)
