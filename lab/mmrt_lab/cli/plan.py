"""``mmrt plan``: hands over to ``mmrt_lab.planner``, which parses its own options."""

import importlib
import sys

import typer


def register(app: typer.Typer) -> None:
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

    @app.command(context_settings=settings)
    def plan(context: typer.Context) -> None:
        """Simulate a load on every layout, and say which is best."""
        if not {"-h", "--help"} & {*context.args}:
            print("mmrt plan …", file=sys.stderr, flush=True)  # its imports take seconds
        raise typer.Exit(importlib.import_module("mmrt_lab.planner.command").main(context.args))
