"""``mmrt logs``: print the actors' output, also after the run."""

import sys
import time
from typing import Annotated

import typer

from ..runtime.environment import read_environment
from ..runtime.errors import RunError
from ..runtime.process.json_log import readable
from ..runtime.stage_table import ACTORS, SUPERVISOR, process_in
from ..runtime.supervisor.logs import LogReader, read_layout_of_logs
from ..shm.run_directory import RunDirectory
from .options import RunName, check_actor, completed_from, log_directory, run_path
from .terminal import Palette

_FOLLOW_POLL_S = 0.2
_ALL = 1 << 20  # lines: more than the log files keep
_OTHERS = (SUPERVISOR, "zygote", "front")


def register(app: typer.Typer) -> None:
    @app.command()
    def logs(
        actor: Annotated[
            str | None,
            typer.Argument(
                metavar="ACTOR",
                help="Only this actor's; also supervisor, zygote; front.",
                autocompletion=completed_from((*ACTORS, *_OTHERS)),
            ),
        ] = None,
        follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
        lines: Annotated[int, typer.Option("--lines", "-n", min=0, metavar="N", help="How many to begin with.")] = 50,
        request: Annotated[
            str | None, typer.Option(metavar="REQUEST", help="Only what names this request: its id, or how it begins.")
        ] = None,
        run: RunName = None,
    ) -> None:
        """Print what the actors have logged, in the order of time.

        The logs lie in $XDG_STATE_HOME/mmrt/RUN, and stay there after the run.
        """
        if actor is not None:
            check_actor(actor, _OTHERS)
        path = run_path(run)
        environment = read_environment()
        directory = log_directory(path, environment)
        if not directory.is_dir():
            raise RunError(f"no logs in {directory}")
        reader = LogReader(directory, () if actor is None else [process_in(read_layout_of_logs(directory), actor)])
        palette = Palette(sys.stdout, environment)
        found = reader.last(lines) if request is None else [it for it in reader.last(_ALL) if request in it[1]][-lines or _ALL :]
        for name, line in found:
            for text in readable(line):
                print(palette.line(name, text))
        if not found and lines:
            about = "" if request is None else f" about {request}"
            print(f"{actor or 'nobody'} has logged nothing{about} in {directory}", file=sys.stderr)
        while follow:
            alive = RunDirectory.is_alive(path)
            for name, line in reader.new():
                if request is not None and request not in line:
                    continue
                for text in readable(line):
                    print(palette.line(name, text), flush=True)
            if not alive:
                break
            time.sleep(_FOLLOW_POLL_S)
        reader.close()
