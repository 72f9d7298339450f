"""``mmrt bench NAME …``: hands over to a module that parses its own options, of ``mmrt.bench`` or of another package (``plugins``)."""

import importlib
import sys
from collections.abc import Callable

import typer

from ..runtime.errors import UserError
from . import plugins

BENCHES = {
    "serve": ("Latencies and throughput of a server under load.", "mmrt.bench.serve.command"),
    "restart": ("What clients notice of restarts, kills and edits.", "mmrt.bench.restart"),
    "startup": ("How long a user waits, and what an idle run takes.", "mmrt.bench.startup"),
}


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Measure. Each has options of its own: mmrt bench NAME --help.")
    app.add_typer(group, name="bench", epilog=None if plugins.is_lab_installed() else f"More benches are in {plugins.LAB}.")
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    for name, (about, module) in _benches().items():
        group.command(name, help=about, context_settings=settings)(_handing_over(name, module))


def check_name(name: str) -> None:
    """Raises: UserError for a bench that is not installed, which may be one of the lab's."""
    if not name.startswith("-") and not plugins.is_lab_installed() and name not in _benches():
        raise UserError(f"there is no bench {name!r} here; most are in {plugins.LAB}")


def _benches() -> dict[str, tuple[str, str]]:
    return BENCHES | plugins.found_benches()


def _handing_over(name: str, module: str) -> Callable[[typer.Context], None]:
    def command(context: typer.Context) -> None:
        if not {"-h", "--help"} & {*context.args}:
            print(f"mmrt bench {name} …", file=sys.stderr, flush=True)  # its imports take seconds
        raise typer.Exit(importlib.import_module(module).main(context.args))

    return command
