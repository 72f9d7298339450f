"""The program ``mmrt``: finds the command's module, runs it, and turns every expected failure into one line and an exit status.

Only the module of the command that was asked for is imported, so that ``mmrt status`` is quick and nothing loads torch by accident.
"""

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from ..runtime.errors import UserError
from .words import aliases_of, expand, refusal

if TYPE_CHECKING:
    import typer

COMMANDS = (
    "up",
    "serve",
    "pull",
    "down",
    "status",
    "top",
    "restart",
    "scale",
    "layout",
    "debug",
    "logs",
    "trace",
    "record",
    "inspect",
    "cache",
    "policy",
    "replay",
    "ask",
    "chat",
    "run",
    "examples",
    "dashboards",
    "model",
    "config",
    "units",
    "doctor",
    "bench",
    "actor",
    "version",
)
_EPILOGUE = (
    "Exit status: 0 all is well (up: the run ended as asked); 1 something failed (an actor, the run, a request); "
    "2 wrong usage, configuration or checkpoint; 130 forced by Ctrl-C."
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry of the console script. Always exits."""
    sys.exit(_flushed(run(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: Sequence[str]) -> int:
    """Run one command line. Returns the exit status."""
    from ..shm.errors import ShmError

    try:
        if len(arguments) == 2 and arguments[0] == "actor" and not arguments[1].startswith("-"):
            # No typer, which takes half a second on a busy machine: an actor pays for every import at each restart.
            return importlib.import_module(".actor", __package__).run(arguments[1])  # type: ignore[no-any-return]
        if arguments in (["status"], ["status", "--json"]):  # asked most often, by people and by scripts
            from ..shm.run_directory import RunDirectory

            importlib.import_module(".status", __package__).show(RunDirectory.default_path(), "--json" in arguments)
            return 0
        return _run_app(expand(list(arguments)))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except ShmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has closed it
        _forget_output()
        return 0
    except OSError as error:
        if error.errno != errno.ENOSPC or not _is_output_full():
            raise
        _forget_output()
        print(f"error: {error.strerror}", file=sys.stderr)
        return 1


def _flushed(status: int) -> int:
    """Flush the output and return the exit status; the interpreter's own flush would complain of a reader that has gone."""
    try:
        sys.stdout.flush()
    except OSError as error:
        _forget_output()
        if error.errno not in (errno.EPIPE, errno.EIO):
            print(f"error: {error.strerror}", file=sys.stderr)
            return status or 1
    return status


def _is_output_full() -> bool:
    """Return whether our output finds no room, rather than some file."""
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        return True
    return False


def _forget_output() -> None:
    """Drop the output: otherwise the interpreter complains when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run_app(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] in COMMANDS:
        app = build_app([arguments[0]])
        if arguments[0] == "bench" and len(arguments) > 1:
            importlib.import_module(".bench", __package__).check_name(arguments[1])
    else:
        app = _app_of_others(arguments)
    try:
        app(args=list(arguments), prog_name="mmrt")
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer has taken it for a failure
            raise end.__context__ from None
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    return 0


def _app_of_others(arguments: Sequence[str]) -> "typer.Typer":
    """Return the program with one command of another package, or with all commands where none is named."""
    from . import plugins

    found = plugins.found_commands()
    if not arguments or arguments[0].startswith("-"):
        return build_app([*COMMANDS, *found])
    if arguments[0] not in found:
        plugins.refuse_missing(arguments[0])
        raise UserError(refusal(arguments[0], [command for command in (*COMMANDS, *found) if command != "actor"]))
    return build_app([arguments[0]])


def build_app(commands: Sequence[str]) -> "typer.Typer":
    """Return the program with these commands, the program's own or those of other packages."""
    import typer

    app = typer.Typer(
        name="mmrt",
        help="Serve multimodal language models as a handful of small processes.",
        epilog=_EPILOGUE,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["--help", "-h"]},
    )

    def tell_version(asked: bool) -> None:
        if asked:
            importlib.import_module(".version", __package__).print_versions()
            raise typer.Exit

    @app.callback()
    def root(
        version: Annotated[bool, typer.Option("--version", callback=tell_version, is_eager=True, help="Print versions.")] = False,
    ) -> None:
        pass

    for command in commands:
        if command in COMMANDS:
            importlib.import_module(f".{command}", __package__).register(app)
        else:
            importlib.import_module(".plugins", __package__).add_command(command, app)
    for info in app.registered_commands:
        name = info.name or (info.callback.__name__ if info.callback is not None else "")
        if aliases := aliases_of(name):
            info.epilog = f"Also typed: {', '.join(f'mmrt {alias}' for alias in aliases)}."
    return app


if __name__ == "__main__":
    main()
