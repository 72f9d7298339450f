"""``mmrt bench …``: hands over to ``mmrt.bench``, which parses its own options."""

import importlib

import typer


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Measure.")
    app.add_typer(group, name="bench")
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

    @group.command(context_settings=settings)
    def serve(context: typer.Context) -> None:
        """Drive an OpenAI-compatible server with a seeded workload; report latencies and throughput (--help for its options)."""
        raise typer.Exit(importlib.import_module("mmrt.bench.serve").main(context.args))
