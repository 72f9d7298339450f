"""An actor under pdb, in a terminal: ``mmrt debug`` executes this once the supervisor has lent it the role.

``python -m mmrt.runtime.observe.debugger ACTOR`` stops before the actor's ``main``; the supervised process serves until this one
is about to take the role. The role is given back when this process ends for any reason: the kernel then drops the role lock.
"""

import argparse
import importlib
import logging
import os
import pdb
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

PACKAGE_DIRECTORY = Path(__file__).parents[2]


class Debugger(pdb.Pdb):
    """Pdb whose ``quit`` ends the process rather than raising an exception that the actor would take for a failed request."""

    def __init__(self, commands: Sequence[str] = (), *, readrc: bool = True) -> None:
        super().__init__(readrc=readrc)
        self.rcLines.extend(commands)
        self.at_prompt = False

    def _cmdloop(self) -> None:
        self.at_prompt = True
        try:
            super()._cmdloop()
        finally:
            self.at_prompt = False

    def do_quit(self, arg: str) -> NoReturn:
        """q(uit), exit, Ctrl-D: end this process; the supervised one takes over."""
        raise SystemExit(0)

    do_q = do_exit = do_EOF = do_quit

    def lookupmodule(self, filename: str) -> str | None:
        """Find files like pdb; those of the package also by their path inside it, next to the file shown, or by the end of their path
        where only one file has it."""
        shown = Path(self.curframe.f_code.co_filename).parent if self.curframe is not None else PACKAGE_DIRECTORY
        for directory in (PACKAGE_DIRECTORY, shown):
            if (file := directory / filename).is_file():
                return str(file)
        folders = [init.parent for init in PACKAGE_DIRECTORY.glob("*/__init__.py")]
        name = Path(filename).name
        found = [file for folder in folders for file in (folder.rglob(name) if name else ()) if file.is_file() and file.match(filename)]
        return str(found[0]) if len(found) == 1 else super().lookupmodule(filename)


class DebugSession:
    """Changes to an actor's process that runs in a terminal. ``actors/`` has the calls."""

    def __init__(self, name: str, commands: Sequence[str], *, stops_first: bool) -> None:
        self._name = name
        self._stops_first = stops_first
        self._debugger = Debugger(commands)
        self._actor: Any = None

    def run(self, main: Callable[..., None], actor: Any) -> None:
        """Call the actor's ``main(actor)``, under pdb unless it must not stop there."""
        self._actor = actor
        self._hook()
        self.guard_prompt()
        if self._stops_first:
            # Pdb takes Ctrl-C from here on: it interrupts the actor, and at the prompt the command.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            print(f"{self._name}: pid {os.getpid()}, before its start. The supervised process serves until you continue.", flush=True)
            self._debugger.runcall(main, actor)
        else:
            signal.signal(signal.SIGINT, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
            print(f"{self._name}: pid {os.getpid()}. breakpoint() and exceptions stop it, Ctrl-C ends it.", flush=True)
            main(actor)

    def guard_prompt(self) -> None:
        """Extend the SIGTERM handler to end the process while it is at a prompt, where the actor would not notice the signal."""
        before = signal.getsignal(signal.SIGTERM)

        def terminated(number: int, frame: FrameType | None) -> None:
            if callable(before):
                before(number, frame)
            if self._debugger.at_prompt:
                print(f"\n{self._name}: told to end", flush=True)
                raise SystemExit(0)

        signal.signal(signal.SIGTERM, terminated)

    def post_mortem(self, traceback: TracebackType) -> None:
        """Open a prompt at the origin of an exception; ``c`` continues with the actor's handling of it."""
        debugger = self._debugger if not self._debugger.at_prompt else Debugger(readrc=False)
        print(f"{self._name}: post-mortem; c goes on, q gives the role back", flush=True)
        debugger.reset()
        debugger.interaction(None, traceback)

    def leave(self) -> NoReturn:
        """End the process where an exception would not: in an event loop's callback, which swallows ``SystemExit``."""
        self._actor.close()
        say_over(self._name)
        os._exit(0)

    def _hook(self) -> None:
        def stop_here(*_: object, **__: object) -> None:
            self._debugger.set_trace(sys._getframe(1))

        sys.breakpointhook = stop_here
        logging.getLogger().addHandler(_OnException(self))


class _OnException(logging.Handler):
    """Opens the debugger when an actor logs an exception: it logs each one that it survives, and the last one."""

    def __init__(self, session: DebugSession) -> None:
        super().__init__()
        self._session = session

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and isinstance(record.exc_info[1], SystemExit):
            self._session.leave()
        traceback = record.exc_info[2] if record.exc_info else None
        if traceback is not None and threading.current_thread() is threading.main_thread():
            self._session.post_mortem(traceback)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the actor that the arguments name. Returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m mmrt.runtime.observe.debugger")
    parser.add_argument("actor")
    parser.add_argument("--command", action="append", default=[])
    parser.add_argument("--no-pdb", action="store_true")
    options = parser.parse_args(argv)
    run_actor = importlib.import_module("mmrt.actors.host.process").run_actor
    session = DebugSession(options.actor, options.command, stops_first=not options.no_pdb)
    try:
        status: int = run_actor(options.actor, session)
    finally:
        say_over(options.actor)
    return status


def say_over(name: str) -> None:
    print(f"{name}: the supervised process takes over", flush=True)


if __name__ == "__main__":
    sys.exit(main())
