"""What several commands share: which run is meant, and which configuration."""

from pathlib import Path
from typing import Annotated

import typer

from ..runtime.config import RuntimeConfig, load_config
from ..runtime.environment import Environment
from ..shm.run_directory import RunDirectory

RunName = Annotated[str | None, typer.Option("--run", metavar="NAME", help='Name of the run; default $MMRT_RUN_DIR, or "default".')]
ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", metavar="FILE", help="TOML configuration; default $MMRT_CONFIG.")]


def run_path(name: str | None) -> Path:
    """The run directory of this name; without one $MMRT_RUN_DIR, or that of the default run."""
    if name is not None and (not name or "/" in name or name in (".", "..")):
        raise typer.BadParameter(f"{name!r} is not a name", param_hint="--run")
    return RunDirectory.default_path(name)


def configuration(file: Path | None, environment: Environment) -> RuntimeConfig:
    """The configuration of --config, or else $MMRT_CONFIG, or else the defaults."""
    return load_config(file or environment.config_file)


def log_directory(run: Path, environment: Environment) -> Path:
    """Where the logs of the run lie; they outlive it."""
    return environment.state_home / run.name
