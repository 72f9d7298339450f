"""Options shared by several commands: the run, the configuration, and the actor."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..runtime.environment import Environment
from ..runtime.errors import ConfigError
from ..runtime.stage_table import STAGES, parse_instance, stage_of
from ..shm.errors import ShmError
from ..shm.run_directory import RunDirectory

if TYPE_CHECKING:
    from ..runtime.config.runtime_config import RuntimeConfig

RunName = Annotated[str | None, typer.Option("--run", metavar="NAME", help='Name of the run; default $MMRT_RUN_DIR, or "default".')]
ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", metavar="FILE", help="TOML configuration; default $MMRT_CONFIG.")]
ModelDir = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="MODEL", help="Checkpoint directory, GGUF file, or a hub's ORG/REPO[:TAG] (model.path)."),
]
Autoscale = Annotated[
    bool, typer.Option("--autoscale", help="More processes of a stage while the load needs them (autoscale.enabled).")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Fetch a model by name without a question (model.download).")]
Mmproj = Annotated[
    str | None,
    typer.Option("--mmproj", metavar="FILE", help="Part of a GGUF model that sees; default: one that fits beside it (model.mmproj)."),
]
Adapter = Annotated[
    str | None, typer.Option("--adapter", metavar="DIR", help="LoRA adapter, or ORG/REPO of one, merged at load (model.adapter).")
]
Device = Annotated[str | None, typer.Option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N (model.device).")]
MaxContext = Annotated[
    int | None, typer.Option("--max-model-len", metavar="N", help="Tokens of prompt and answer at most (model.max_context).")
]
Dtype = Annotated[str | None, typer.Option("--dtype", metavar="TYPE", help="auto, float32 or bfloat16 (model.dtype).")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        help="Key that clients must send (server.api_key). Other users see options in ps; they do not see $MMRT_API_KEY.",
    ),
]
Host = Annotated[str | None, typer.Option("--host", metavar="HOST", help="Where to serve; 0.0.0.0 is everywhere (server.host).")]
Port = Annotated[int | None, typer.Option("--port", "-p", metavar="N", help="The port; 0 picks a free one (server.port).")]


def run_path(name: str | None) -> Path:
    """The run directory of this name; without one $MMRT_RUN_DIR, or that of the default run."""
    if name is not None and (not name or "/" in name or name in (".", "..")):
        raise typer.BadParameter(f"{name!r} is not a name", param_hint="--run")
    return RunDirectory.default_path(name)


def model_run_path(name: str | None) -> Path:
    """The same of a run that has one model. Raises: RunError for a front of several."""
    from ..runtime.process.run import is_of_several

    path = run_path(name)
    try:
        with RunDirectory.attach(path, timeout_s=0) as run:
            runs = run.info.get("runs")
    except ShmError:  # whoever needs a run says so
        return path
    if runs:
        raise is_of_several(path, runs)
    return path


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
    """The configuration of --config, or else $MMRT_CONFIG, or else the defaults; with the key of $MMRT_API_KEY."""
    from ..runtime.config.runtime_config import load_config  # most commands need no configuration, and it takes long to import

    return load_config(file or environment.config_file, environment.server_key)


def override(config: "RuntimeConfig", options: Mapping[str, str | int | None]) -> "RuntimeConfig":
    """Put options that are given into a configuration. ``options``: by the dotted names of its keys; None: not given.

    Raises: ConfigError for a value that the key cannot have; BadParameter for an empty one.
    """
    from ..runtime.config.runtime_config import convert_config, to_data

    data = to_data(config)
    for key, value in options.items():
        if value == "":
            raise typer.BadParameter(f"{key} is empty; leave the option out for the configured value")
        if value is not None:
            section, _, name = key.partition(".")
            data[section][name] = value
    return convert_config(data)


def check_files(config: "RuntimeConfig") -> None:
    """Check the files that the gateway reads besides the checkpoint, and how many it may open. Raises: ConfigError."""
    from ..runtime.process.kept_connections import check_shared
    from ..runtime.process.listening import connection_limit

    connection_limit(config.server.max_connections)
    check_shared(config.num_gateways, config.server.max_connections)
    if config.server.api_keys_file:
        from ..actors.gateway.keys.key_file import read_keys

        read_keys(Path(config.server.api_keys_file))
    if config.server.tls_cert:
        from ..actors.gateway.keys.tls import make_context

        make_context(Path(config.server.tls_cert), Path(config.server.tls_key))


def log_directory(run: Path, environment: Environment) -> Path:
    """The directory of the run's logs; they outlive it."""
    return environment.state_home / run.name
