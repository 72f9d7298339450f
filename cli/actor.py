"""``mmrt actor NAME``: be one actor. The supervisor and the systemd units run this."""

from typing import TYPE_CHECKING, Annotated

from ..runtime.stage_table import ACTORS, parse_instance

if TYPE_CHECKING:
    import typer


def register(app: "typer.Typer") -> None:
    import typer

    @app.command(hidden=True)
    def actor(
        name: Annotated[str, typer.Argument(metavar="ACTOR", help=f"One of {', '.join(ACTORS)}; decode.1 is the second decode.")],
    ) -> None:
        """Be one actor of the run in $MMRT_RUN_DIR (for systemd and for debugging; `mmrt up` starts all of them)."""
        raise typer.Exit(run(name))


def run(name: str) -> int:
    """Run the actor to its end. Returns its exit status."""
    parse_instance(name)
    from ..actors.host.process import run_actor

    return run_actor(name)
