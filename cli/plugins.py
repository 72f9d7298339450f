"""Commands and benches of other packages, the lab's among them: they name these as entry points."""

from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from ..runtime.errors import UserError

if TYPE_CHECKING:
    import typer

_COMMANDS, _BENCHES = "mmrt.commands", "mmrt.benches"
LAB = "mmrt's lab, which is not installed: in a clone of mmrt, pip install -e ./lab"
LAB_COMMANDS = ("plan", "advise", "chaos")


def found_commands() -> list[str]:
    """Return the names of commands of other packages."""
    return sorted({point.name for point in entry_points(group=_COMMANDS)})


def add_command(name: str, app: "typer.Typer") -> None:
    """Add one of them to the program; the first, where several packages have it."""
    point, *_ = entry_points(group=_COMMANDS, name=name)
    point.load()(app)


def found_benches() -> dict[str, tuple[str, str]]:
    """Return what each bench of other packages measures, and the module that has its ``main``, by name."""
    return {name: bench for point in entry_points(group=_BENCHES) for name, bench in point.load().items()}


def is_lab_installed() -> bool:
    """Return whether commands of the lab are here."""
    return set(LAB_COMMANDS) <= set(found_commands())


def refuse_missing(command: str) -> None:
    """Raises: UserError for a command of the lab that is not installed."""
    if command in LAB_COMMANDS:
        raise UserError(f"mmrt {command} is a command of {LAB}")
