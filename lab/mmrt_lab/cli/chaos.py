"""``mmrt chaos``: hands over to ``mmrt_lab.chaos.command``, which parses its own options."""

import typer


def register(app: typer.Typer) -> None:
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

    @app.command(context_settings=settings, help="Let faults loose on a run of its own, and check every promise.")
    def chaos(context: typer.Context) -> None:
        from ..chaos.command import main

        raise typer.Exit(main(context.args))
