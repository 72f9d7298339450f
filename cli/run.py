"""``mmrt run [MODEL] [QUESTION]``: what other programs call so: a conversation with a model, which is started if no run is up."""

import sys
from typing import Annotated

import typer

from ..runtime.environment import read_environment
from ..runtime.errors import RunError
from ..runtime.process.run import running
from ..shm.run_directory import RunDirectory
from .chat import talk
from .checkpoints import whole_checkpoint
from .endpoint import find_endpoint
from .hub_models import with_cached, with_fetched
from .options import Adapter, Mmproj, RunName, Yes, configuration, override, run_path
from .terminal import TerminalReporter
from .up import bring_up, make_plan


def register(app: typer.Typer) -> None:
    @app.command()
    def run(
        model: Annotated[
            str | None, typer.Argument(metavar="MODEL", help="As mmrt up has it; default: that of the run, or the demo model.")
        ] = None,
        question: Annotated[str | None, typer.Argument(metavar="QUESTION", help="Ask this alone; default: a conversation.")] = None,
        mmproj: Mmproj = None,
        adapter: Adapter = None,
        yes: Yes = False,
        run: RunName = None,
    ) -> None:
        """Start the server if none is up, then chat.

        It is mmrt up -d and mmrt chat. The server stays up when the chat ends: mmrt down ends it.
        """
        path, environment = run_path(run), read_environment()
        config = override(configuration(None, environment), {"model.path": model, "model.mmproj": mmproj, "model.adapter": adapter})
        if not RunDirectory.is_alive(path):
            config = with_fetched(config, environment, TerminalReporter(sys.stderr, environment), yes=yes)
            if status := bring_up(make_plan(path, config, environment), detached=True, stream=sys.stderr):
                raise typer.Exit(status)
        elif (model or mmproj or adapter) and str(whole_checkpoint(with_cached(config))) != (info := running(path)).model_path:
            served = info.origin or info.model_path
            raise RunError(f"the run in {path} serves {served}: end it with `mmrt down`, or name another run with --run")
        raise typer.Exit(talk(find_endpoint(None, None, run), question=question))
