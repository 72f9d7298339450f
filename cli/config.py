"""``mmrt config show|check``: the effective configuration, and whether a file is one."""

from pathlib import Path
from typing import Annotated

import typer

from ..runtime.config import load_config, to_toml
from ..runtime.environment import read_environment
from .options import ConfigFile, configuration


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Show or check the configuration.")
    app.add_typer(group, name="config")

    @group.command()
    def show(config: ConfigFile = None) -> None:
        """Print the whole effective configuration, defaults included, as TOML."""
        print(to_toml(configuration(config, read_environment())), end="")

    @group.command()
    def check(file: Annotated[Path, typer.Argument(metavar="FILE", help="A TOML configuration.")]) -> None:
        """Exit with 0 if FILE is a valid configuration, with 2 and the reason if it is not."""
        load_config(file)
        print(f"{file}: ok")
