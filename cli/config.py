"""``mmrt config show|check``: the effective configuration, and whether a file is one."""

from pathlib import Path
from typing import Annotated

import typer

from ..runtime.config.runtime_config import load_config, to_toml
from ..runtime.environment import read_environment
from .options import ConfigFile, check_files, configuration


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Show or check the configuration.")
    app.add_typer(group, name="config")

    @group.command()
    def show(config: ConfigFile = None) -> None:
        """Print the effective configuration with its defaults as TOML."""
        print(to_toml(configuration(config, read_environment())), end="")

    @group.command()
    def check(file: Annotated[Path, typer.Argument(metavar="FILE", help="A TOML configuration.")]) -> None:
        """Say whether FILE is a valid configuration.

        The exit status is 0 if it is; else 2, with the reason.
        """
        check_files(load_config(file))
        print(f"{file}: ok")
