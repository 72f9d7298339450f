"""``mmrt restart ACTOR``: replace one actor's process by a new one that is warm before the old one ends."""

import sys
from typing import Annotated

import typer

from ..config import ACTORS
from ..control import RestartReply, RestartRequest, call
from .options import DEFAULT_RUN, RunName, run_path


def register(app: typer.Typer) -> None:
    @app.command()
    def restart(actor: Annotated[str, typer.Argument(help=f"One of {', '.join(ACTORS)}.")], run: RunName = DEFAULT_RUN) -> None:
        """Load an actor's code anew without losing a request.

        If the new process does not come up, the old one keeps serving and the exit status is 1.
        """
        reply = call(run_path(run), RestartRequest(actor), timeout_s=None)
        assert isinstance(reply, RestartReply)
        if reply.ok:
            print(reply.message)
            return
        for line in reply.log:
            print(f"  {line}", file=sys.stderr)
        print(f"error: {reply.message}", file=sys.stderr)
        raise typer.Exit(1)
