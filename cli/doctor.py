"""``mmrt doctor``: whether mmrt can run here, and what is missing for what."""

import sys
from typing import Annotated

import msgspec
import typer

from ..runtime.environment import read_environment
from ..runtime.errors import UserError
from .doctor_checks import Check, State, diagnose
from .hub_models import with_cached
from .options import Adapter, ConfigFile, Device, Host, Mmproj, ModelDir, Port, RunName, configuration, override, run_path
from .terminal import Palette

_COLOURS: dict[State, int] = {"ok": 32, "note": 36, "warning": 33, "failed": 31}


def register(app: typer.Typer) -> None:
    @app.command()
    def doctor(
        config: ConfigFile = None,
        model: ModelDir = None,
        mmproj: Mmproj = None,
        adapter: Adapter = None,
        device: Device = None,
        host: Host = None,
        port: Port = None,
        json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
        run: RunName = None,
    ) -> None:
        """Check this machine for a run: memory, ports, versions, GPU.

        One line for each check, with the options that mmrt up would be given. Exits with 1 if mmrt cannot run here.
        """
        from .doctor_facts import read_facts

        environment = read_environment()
        try:
            options = {
                **{"model.path": model, "model.mmproj": mmproj, "model.adapter": adapter, "model.device": device},
                **{"server.host": host, "server.port": port},
            }
            found = with_cached(override(configuration(config, environment), options))
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
