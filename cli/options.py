"""Options shared by several commands: the run, the configuration, and the actor."""

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..runtime.environment import Environment
from ..runtime.errors import ConfigError
from ..runtime.stage_table import STAGES, parse_instance, stage_of
from ..shm.run_directory import RunDirectory

if TYPE_CHECKING:
    from ..runtime.config import RuntimeConfig

RunName = Annotated[str | None, typer.Option("--run", metavar="NAME", help='Name of the run; default $MMRT_RUN_DIR, or "default".')]
ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", metavar="FILE", help="TOML configuration; default $MMRT_CONFIG.")]


def run_path(name: str | None) -> Path:
    """The run directory of this name; without one $MMRT_RUN_DIR, or that of the default run."""
    if name is not None and (not name or "/" in name or name in (".", "..")):
        raise typer.BadParameter(f"{name!r} is not a name", param_hint="--run")
    return RunDirectory.default_path(name)


def check_actor(name: str, others: Sequence[str] = ()) -> None:
    """Raise BadParameter for a name that neither an actor can have nor is in ``others``, with the nearest one."""
    if name in others:
        return
    try:
        parse_instance(name)
    except ConfigError as error:
        if stage_of(name) in STAGES:
            raise typer.BadParameter(str(error)) from None
        actors = (*STAGES, *others)
        near = difflib.get_close_matches(name, actors, n=1)
        meant = f"did you mean {near[0]}? There" if near else "there"
        raise typer.BadParameter(f"no actor {name!r}; {meant} are {', '.join(actors)}") from None


def completed_from(names: Sequence[str]) -> Callable[[str], list[str]]:
    """The shell's completions for an argument that is one of ``names``."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def configuration(file: Path | None, environment: Environment) -> "RuntimeConfig":
    """The configuration of --config, or else $MMRT_CONFIG, or else the defaults."""
    from ..runtime.config import load_config  # most commands need no configuration, and it takes long to import

    return load_config(file or environment.config_file)


def check_files(config: "RuntimeConfig") -> None:
    """Check the files that the gateway reads besides the checkpoint, and how many it may open. Raises: ConfigError."""
    from ..runtime.process.listening import connection_limit

    connection_limit(config.server.max_connections)
    if config.server.api_keys_file:
        from ..actors.gateway.key_file import read_keys

        read_keys(Path(config.server.api_keys_file))
    if config.server.tls_cert:
        from ..actors.gateway.tls import make_context

        make_context(Path(config.server.tls_cert), Path(config.server.tls_key))


def log_directory(run: Path, environment: Environment) -> Path:
    """The directory of the run's logs; they outlive it."""
    return environment.state_home / run.name
