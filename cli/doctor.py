"""``mmrt doctor``: whether mmrt can run here, and what is missing for what."""

import sys
from typing import Annotated

import msgspec
import typer

from ..runtime.environment import read_environment
from ..runtime.errors import UserError
from .doctor_checks import Check, State, diagnose
from .options import ConfigFile, RunName, configuration, run_path
from .terminal import Palette

_COLOURS: dict[State, int] = {"ok": 32, "note": 36, "warning": 33, "failed": 31}


def register(app: typer.Typer) -> None:
    @app.command()
    def doctor(
        config: ConfigFile = None,
        model: Annotated[str | None, typer.Option("--model", "-m", metavar="DIR", help="Checkpoint directory.")] = None,
        device: Annotated[str | None, typer.Option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N.")] = None,
        host: Annotated[str | None, typer.Option("--host", metavar="HOST", help="Where to serve; 0.0.0.0 is everywhere.")] = None,
        port: Annotated[int | None, typer.Option("--port", "-p", metavar="N", help="The port to serve on.")] = None,
        json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
        run: RunName = None,
    ) -> None:
        """Check this machine for a run: memory, ports, versions, GPU.

        One line for each check, with the options that mmrt up would be given. Exits with 1 if mmrt cannot run here.
        """
        from .doctor_facts import read_facts
        from .up import override

        environment = read_environment()
        try:
            found = override(configuration(config, environment), model, device, host, port)
        except UserError as error:
            checks = diagnose(read_facts(error, run_path(run), environment))
        else:
            checks = diagnose(read_facts(found, run_path(run), environment))
        can_run = all(check.state != "failed" for check in checks)
        if json:
            print(msgspec.json.encode({"can_run": can_run, "checks": checks}).decode())
        else:
            _print(checks, Palette(sys.stdout, environment))
        raise typer.Exit(0 if can_run else 1)


def _print(checks: list[Check], palette: Palette) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{palette.paint(f'{check.state:<7}', _COLOURS[check.state])}  {check.name:<{width}}  {check.text}")
