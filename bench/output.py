"""Output of a bench: tables on the terminal, JSON to a file or to standard output; progress meanwhile; and why there is none.

Called by every ``main`` here.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
from rich.console import Console

from .environment import Environment
from .render import show_environment

STANDARD_OUTPUT = Path("-")
JSON_HELP = "write the figures; - is standard output"
_LINE_S = 5.0  # between lines about progress, where they cannot be overwritten


def json_file(text: str) -> Path:
    """The file for figures, for argparse: a measurement of minutes must not end without a place for them."""
    path = Path(text)
    if path != STANDARD_OUTPUT and path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory")
    if path != STANDARD_OUTPUT and not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path.parent} is no directory")
    return path


def report_folder(text: str) -> Path:
    """The directory for a report, for argparse. It is made with those above it."""
    path = Path(text)
    if above := next((one for one in (path, *path.parents) if one.exists() and not one.is_dir()), None):
        raise argparse.ArgumentTypeError(f"{above} is no directory")
    return path


Tell = Callable[[str], object]
"""Takes a few words on what is being done."""


def open_console(json: Path | None) -> Console:
    """The console for tables: standard error when standard output is for JSON."""
    return Console(stderr=json == STANDARD_OUTPUT)


def write_json(json: Path | None, figures: object) -> None:
    """Write the figures where they were asked for. Raises: OSError."""
    encoded = msgspec.json.format(msgspec.json.encode(figures)).decode() + "\n"
    if json == STANDARD_OUTPUT:
        print(encoded, end="")
    elif json is not None:
        json.write_text(encoded)


class Bench(Protocol):
    """The figures of a bench: a msgspec.Struct."""

    @property
    def environment(self) -> Environment: ...


B = TypeVar("B", bound=Bench)


def run_bench(
    name: str,
    json: Path | None,
    errors: tuple[type[Exception], ...],
    measure: Callable[[Console], B],
    show: Callable[[Console, B], None],
) -> B | None:
    """Measure, show the environment and the tables, write the figures. None after one of these errors, which is told."""
    console = open_console(json)
    try:
        bench = measure(console)
    except errors as error:
        print(f"mmrt bench {name}: {error}", file=sys.stderr)
        return None
    show_environment(console, bench.environment)
    show(console, bench)
    write_json(json, bench)
    return bench


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
