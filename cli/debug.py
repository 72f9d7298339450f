"""``mmrt debug ACTOR``: be an actor of the run, in this terminal, under pdb, for as long as it takes."""

import fcntl
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, NoReturn

import typer

from ..runtime.environment import CHILD_LISTEN_FD
from ..runtime.stage_table import ACTORS
from ..runtime.supervisor.control import borrow_role
from ..runtime.supervisor.processes import CHILD_LIFELINE_FD
from .options import RunName, check_actor, completed_from, run_path

_TERMINAL = ("TERM", "COLORTERM", "COLUMNS", "LINES", "NO_COLOR", "HOME", "LANG", "LC_ALL")
_HIGH_FD = 64


def register(app: typer.Typer) -> None:
    @app.command()
    def debug(
        actor: Annotated[
            str,
            typer.Argument(
                metavar="ACTOR",
                help=f"One of {', '.join(ACTORS)}; decode.1 is the second decode.",
                autocompletion=completed_from(ACTORS),
            ),
        ],
        command: Annotated[
            list[str] | None, typer.Option("--command", "-c", metavar="CMD", help="A pdb command to begin with; may be repeated.")
        ] = None,
        no_pdb: Annotated[bool, typer.Option("--no-pdb", help="Do not stop at first: only breakpoint() and exceptions do.")] = False,
        run: RunName = None,
    ) -> None:
        """Run an actor of this run in your terminal, under pdb.

        Everything else waits for it. It stops before the actor begins: set breakpoints (b actors/decode/loop.py:80) and continue (c).
        When it ends, however it ends, the supervised process takes over.
        """
        check_actor(actor)
        if no_pdb and command:
            raise typer.BadParameter("--command is for pdb, which --no-pdb leaves out")
        path = run_path(run)
        reply, listeners, connection = borrow_role(path, actor)
        commands = [part for text in command or [] for part in ("--command", text)]
        program = [sys.executable, "-P", "-m", "mmrt.runtime.observe.debugger", actor, *commands, *(["--no-pdb"] if no_pdb else [])]
        become(program, reply.environment, connection, listeners)


def become(program: Sequence[str], environment: Mapping[str, str], connection: socket.socket, listeners: Sequence[int]) -> NoReturn:
    """Replace this program by the actor's: the same pid, which is the one that the role was lent to.

    The connection takes the lifeline's place: it ends with the supervisor.
    """
    # First out of the way, then where they belong: neither step may overwrite what is still needed.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD) for fd in (connection.fileno(), *listeners)]
    for fd, place in zip(high, (CHILD_LIFELINE_FD, *range(CHILD_LISTEN_FD, CHILD_LISTEN_FD + len(listeners))), strict=True):
        os.dup2(fd, place, inheritable=True)
    terminal = {name: os.environ[name] for name in _TERMINAL if name in os.environ}
    sys.stdout.flush()
    os.execve(program[0], list(program), {**environment, **terminal})
