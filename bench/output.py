"""Output of a bench: tables on the terminal, JSON to a file or to standard output; and progress meanwhile.

Called by every ``main`` here.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console

STANDARD_OUTPUT = Path("-")
JSON_HELP = "write the figures; - is standard output"
_LINE_S = 5.0  # between lines about progress, where they cannot be overwritten


Tell = Callable[[str], object]
"""Takes a few words on what is being done."""


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


@contextmanager
def progress(console: Console) -> Iterator[Tell]:
    """Show progress: on a terminal in one line that changes; else the first message at once, and later ones now and then."""
    if console.is_terminal:
        with console.status("") as status:
            yield status.update
        return
    told_s = -_LINE_S

    def tell(text: str) -> None:
        nonlocal told_s
        if time.monotonic() - told_s >= _LINE_S:
            console.print(text, style="dim", highlight=False, soft_wrap=True)
            told_s = time.monotonic()

    yield tell
