"""``mmrt restart ACTOR…``: replace actors' processes by new ones, each warm before the old one ends."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Annotated

import typer

from ..runtime.config.runtime_config import RuntimeConfig
from ..runtime.errors import RunError
from ..runtime.process.run import read_run_info
from ..runtime.stage_table import ACTORS, restart_order
from ..runtime.supervisor.control import RestartReply, RestartRequest, call
from ..shm.errors import MissingError
from ..shm.run_directory import RunDirectory
from .options import RunName, check_actor, completed_from, run_path


def register(app: typer.Typer) -> None:
    @app.command()
    def restart(
        actors: Annotated[
            list[str] | None,
            typer.Argument(
                metavar="ACTOR",
                help=f"Of {', '.join(ACTORS)}; decode.1 is the second decode. Several at the same time.",
                autocompletion=completed_from(ACTORS),
            ),
        ] = None,
        everything: Annotated[bool, typer.Option("--all", help="All of them, one after another.")] = False,
        run: RunName = None,
    ) -> None:
        """Restart actors with the code on disk; no request is lost.

        If a new process does not come up, the old one keeps serving and the exit status is 1; --all then stops.
        """
        path, names = run_path(run), check_names(actors or [], everything)
        failed = False
        names = _processes_of(path, names)
        for name, reply in _one_after_another(path, names) if everything else _at_once(path, names):
            failed |= not _tell(name, reply)
        if failed:
            raise typer.Exit(1)


def check_names(actors: Sequence[str], everything: bool) -> list[str]:
    """The actors to restart, each once; none for all. Raises: BadParameter for unknown names, for none and for both."""
    if everything == bool(actors):
        raise typer.BadParameter("name actors, or say --all" if not actors else "either names of actors or --all, not both")
    for name in actors:
        check_actor(name)
    return list(dict.fromkeys(actors))


def _restart(run: Path, name: str) -> RestartReply | RunError:
    try:
        reply = call(run, RestartRequest(name), timeout_s=None)
    except RunError as error:
        return error
    assert isinstance(reply, RestartReply)
    return reply


def _at_once(run: Path, names: Sequence[str]) -> Iterator[tuple[str, RestartReply | RunError]]:
    """Restart all at once, in threads that Ctrl-C need not wait for."""
    replies: Queue[tuple[str, RestartReply | Exception]] = Queue()

    def ask(name: str) -> None:
        try:
            replies.put((name, _restart(run, name)))
        except Exception as error:
            replies.put((name, error))

    for name in names:
        Thread(target=ask, args=(name,), daemon=True).start()
    come: dict[str, RestartReply | Exception] = {}
    for name in names:
        while name not in come:
            come.update([replies.get()])
        reply = come[name]
        if isinstance(reply, Exception) and not isinstance(reply, RunError):
            raise reply
        yield name, reply


def _one_after_another(run: Path, names: Sequence[str]) -> Iterator[tuple[str, RestartReply | RunError]]:
    """Restart each only when the previous one serves again; stop at the first failure."""
    for index, name in enumerate(names):
        reply = _restart(run, name)
        yield name, reply
        if isinstance(reply, RunError) or not reply.ok:
            if rest := names[index + 1 :]:
                print(f"not restarted: {', '.join(rest)}", file=sys.stderr)
            return


def _tell(name: str, reply: RestartReply | RunError) -> bool:
    """Print the outcome; return whether it succeeded."""
    if isinstance(reply, RestartReply) and reply.ok:
        print(reply.message, flush=True)
        return True
    if isinstance(reply, RestartReply):
        for line in reply.log:
            print(f"{name} | {line}", file=sys.stderr)
    print(f"error: {reply if isinstance(reply, RunError) else reply.message}", file=sys.stderr)
    return False


def _processes_of(run: Path, actors: Sequence[str]) -> list[str]:
    """The processes that the actors live in, each once, or all; the actors themselves where no run is up."""
    config = RuntimeConfig()
    with suppress(MissingError), RunDirectory.attach(run, timeout_s=0.0) as directory:
        config = read_run_info(directory).config
    return list(dict.fromkeys(config.process_of(actor) for actor in actors or restart_order(config.instances)))
