"""Create a run before its first actor starts (checkpoint, address, ``run.json``), and join a process to it.

Called by the command line for ``mmrt up``, and by actors without a supervisor (systemd): there ``memory`` makes the run
directory, and the others wait for it.
"""

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ... import __version__
from ...shm.errors import MissingError, ShmError
from ...shm.run_directory import RunDirectory
from ..config.runtime_config import RuntimeConfig, load_config
from ..environment import Environment
from ..errors import ConfigError, RunError
from .host_room import read_host_room
from .listening import open_listeners
from .number_format import has_bfloat16_units, plan_formats
from .processors import check_processors, plan_threads, read_processors

DEFAULT_MODEL = Path(__file__).parents[2] / "models" / "demo"
_JOIN_POLL_S = 0.05
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+)?(@[\w./-]+)?")


def model_path(config: RuntimeConfig) -> Path:
    """Return the checkpoint directory of the configuration, or that of the demo model if none is configured.

    Raises: ConfigError if it is not a checkpoint directory, or an adapter has to be merged into it, for which another is made.
    """
    if config.model.adapter:
        raise ConfigError(f"model.adapter = {config.model.adapter!r}: `mmrt up` and `mmrt units` make a checkpoint with it")
    try:
        path = Path(config.model.path).expanduser().absolute() if config.model.path else DEFAULT_MODEL
    except RuntimeError as error:
        raise ConfigError(f"model.path = {config.model.path!r}: {error}") from None
    try:
        has_config, is_directory = (path / "config.json").is_file(), path.is_dir()
    except OSError as error:
        raise ConfigError(f"model.path = {config.model.path!r} cannot be read: {error.strerror}") from None
    if not has_config:
        raise ConfigError(f"model.path = {config.model.path!r} {_why_no_checkpoint(config.model.path, path, is_directory)}")
    return path


def _why_no_checkpoint(given: str, path: Path, is_directory: bool) -> str:
    """Explain what is wrong with a path without a config.json, and what to do."""
    what = "has no config.json" if is_directory else "is not a directory"
    name = given.removeprefix("https://huggingface.co/").rstrip("/")
    if path.is_file() and path.suffix == ".gguf":
        return "is a GGUF file, of which `mmrt up` and `mmrt units` make a checkpoint"
    if not path.exists() and path.suffix == ".gguf":
        return "is not there"
    if not path.exists() and _HUB_NAME.fullmatch(name):
        return f"{what} here; a hub may have it: mmrt pull {name}"
    return f"{what}: expected a Hugging Face checkpoint directory"


def free_port(config: RuntimeConfig) -> int:
    """Return the port to serve on: the configured one if it is free, any free one for 0.

    Raises: RunError if it is in use or the address cannot be bound.
    """
    listeners = open_listeners(config.server.host, config.server.port)
    port = int(listeners[0].getsockname()[1])
    for listener in listeners:
        listener.close()
    return port


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of ``run.json``. Its configuration holds the port that was picked."""

    version: str = __version__
    config: RuntimeConfig = RuntimeConfig()
    model_path: str = ""
    origin: str = ""  # what its user named where that is another place: a GGUF file, or a hub's model at a commit
    dtype_reason: str = ""  # why the model is not computed in the checkpoint's dtype
    has_api_key: bool = False  # server.api_key is set; the key itself is in no file
    config_file: str = ""  # what it was configured by, where there is no supervisor
    created_s: float = 0.0  # wall clock; noted by the run directory
    front: str = ""  # NAME/DIGEST of the front of several models that has started it, and of its configuration; "": none has
    runs: tuple[str, ...] = ()  # of a front: the names of the runs of its models

    @property
    def endpoint(self) -> str:
        """The address that clients use: a wildcard address is reached over loopback."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.config.server.host, self.config.server.host)
        return f"{self.config.server.scheme}://{f'[{host}]' if ':' in host else host}:{self.config.server.port}"

    @property
    def model_name(self) -> str:
        """The name by which clients know the model."""
        return self.config.model.name or Path(self.model_path).name

    @property
    def page(self) -> str:
        """The address of the page for people; "" if it is not served."""
        return f"{self.endpoint}/" if self.config.server.page else ""


def run_info(config: RuntimeConfig, model: Path, port: int, dtype_reason: str = "") -> RunInfo:
    """Make the ``run.json`` contents of a run that serves on ``port``. The rest is from ``fit_to_machine``."""
    server = msgspec.structs.replace(config.server, port=port)
    return RunInfo(config=msgspec.structs.replace(config, server=server), model_path=str(model), dtype_reason=dtype_reason)


def fit_to_machine(config: RuntimeConfig, model: Path, run: Path, environment: Environment) -> tuple[RuntimeConfig, str]:
    """Decide what the configuration leaves to the machine: threads and, on a CPU, number formats. Returns their reason as well."""
    check_processors(config)
    config = plan_threads(config, read_processors())
    return plan_formats(config, model, has_bfloat16_units(environment.cpu_capability), read_host_room(run).num_bytes)


def create_run(path: Path, info: RunInfo) -> RunDirectory:
    """Start a run. ``run.json``, which every process reads, tells whether it has an API key, and not which.

    Raises: BusyError, ShmError.
    """
    return RunDirectory.create(path, _without_key(info))


def rewrite_run_info(run: RunDirectory, info: RunInfo) -> None:
    """Replace ``run.json`` for processes that attach from now on. Raises: OSError."""
    run.rewrite(_without_key(info))


def _without_key(info: RunInfo) -> dict[str, Any]:
    known = msgspec.structs.replace(with_key(info, ""), has_api_key=bool(info.config.server.api_key))
    found: dict[str, Any] = msgspec.to_builtins(known)
    return found


def with_key(info: RunInfo, key: str) -> RunInfo:
    """Return the same with this ``server.api_key``."""
    config = info.config
    return msgspec.structs.replace(
        info, config=msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, api_key=key))
    )


def read_run_info(run: RunDirectory) -> RunInfo:
    """Read the run's ``run.json``; ``server.api_key`` is empty. Raises: RunError if another build wrote what is unknown to this one."""
    try:
        return msgspec.convert(run.info, RunInfo)
    except msgspec.ValidationError as error:
        build = f"the run in {run.path} was started by another build of mmrt"
        raise RunError(f"{build} ({run.info.get('version')}, this is {__version__}): {error}") from None


def running(path: Path, otherwise: str = "") -> RunInfo:
    """Return what the run in ``path`` says of itself. Raises RunError if none is up; ``otherwise``: what else its user can do."""
    try:
        if not RunDirectory.is_alive(path):
            raise MissingError("nobody is there")
        with RunDirectory.attach(path) as directory:
            return read_run_info(directory)
    except MissingError:
        raise RunError(f"no run is up in {path}: start one with `mmrt up`{otherwise}") from None


def _configured(environment: Environment) -> tuple[RuntimeConfig, Path]:
    """The configuration, and its checkpoint directory. Raises: ConfigError."""
    config = load_config(environment.config_file, environment.server_key)
    if environment.checkpoint is None:
        return config, model_path(config)
    if not (environment.checkpoint / "config.json").is_file():
        raise ConfigError(f"MMRT_CHECKPOINT = {str(environment.checkpoint)!r} has no config.json by now: `mmrt units` makes another")
    model = msgspec.structs.replace(config.model, name=config.model.name or environment.model_name)
    return msgspec.structs.replace(config, model=model), environment.checkpoint


def is_of_several(path: Path, runs: Sequence[str]) -> RunError:
    """Return the error about what only the run of one model can do. ``runs``: of the front in ``path``."""
    return RunError(f"{path} is the front of several models: name the run of one, --run {' or --run '.join(runs)}")


def join_run(actor: str, environment: Environment, timeout_s: float = 180.0) -> RunDirectory:
    """Attach ``actor`` to the run in MMRT_RUN_DIR. Without a supervisor ``memory`` makes the run and the others wait for it.

    Raises: RunError when there is none in time; ConfigError.
    """
    path = environment.run_dir or RunDirectory.default_path()
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            if RunDirectory.is_alive(path):
                return RunDirectory.attach(path)
            if environment.lifeline_fd is not None:
                raise RunError(f"the run in {path} is gone")
            if actor == "memory":
                config, model = _configured(environment)
                config, why = fit_to_machine(config, model, path, environment)
                # A port that is configured may be taken: by systemd, which listens on it for the gateway.
                info = run_info(config, model, config.server.port or free_port(config), why)
                file = environment.config_file  # its name is for commands, which may be called elsewhere
                return create_run(path, msgspec.structs.replace(info, config_file="" if file is None else str(file.absolute())))
        except ShmError as error:
            if actor == "memory" or time.monotonic() > deadline_s:
                raise RunError(str(error)) from None
        if time.monotonic() > deadline_s:
            raise RunError(f"no run in {path} after {timeout_s:g} s: is the memory actor up?")
        time.sleep(_JOIN_POLL_S)
