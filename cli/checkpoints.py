"""The checkpoint directory of a configuration: the directory that it names, or one made of a GGUF file or for an adapter."""

import shutil
from pathlib import Path

import msgspec

from ..hub.cache import name_of
from ..models.checkpoint.files import GGUF_SUFFIX, TOKENIZER, adapted_directory, begins_as_gguf, is_first_shard, is_tower, missing_files
from ..models.config import load_model_config
from ..models.errors import CheckpointError
from ..models.gguf.made import made_directories
from ..runtime.config.runtime_config import RuntimeConfig
from ..runtime.environment import read_environment
from ..runtime.errors import ConfigError, RunError
from ..runtime.process.run import model_path, running
from ..shm.errors import ShmError
from ..shm.run_directory import RunDirectory


def whole_checkpoint(config: RuntimeConfig) -> Path:
    """Return the checkpoint directory of the configuration, which has every kind of file that a run needs.

    Raises: ConfigError naming those that are missing.
    """
    path = checkpoint_of(config)
    try:
        has_weights = load_model_config(path).null is None
    except CheckpointError:  # its configuration is refused where it is read
        has_weights = True
    if missing := missing_files(path, has_weights):
        is_gguf = any(path.glob(f"*{GGUF_SUFFIX}"))
        advice = "A GGUF file has it as tokenizer.chat_template" if is_gguf else "Get it whole, as by mmrt pull ORG/REPO"
        raise ConfigError(f"model.path = {config.model.path!r} is not a whole checkpoint: {'; '.join(missing)}. {advice}")
    return path


def checkpoint_of(config: RuntimeConfig, home: Path | None = None) -> Path:
    """Return the checkpoint directory of the configuration. Of a GGUF file, or a directory that holds one, one is made, and of a
    checkpoint with an adapter another. ``home``: where; by default among mmrt's state.

    Raises: ConfigError.
    """
    home = home or read_environment().state_home
    try:
        path = _plain_checkpoint(config, home)
    except (CheckpointError, RuntimeError) as error:
        raise ConfigError(f"model.path = {config.model.path!r}: {error}") from None
    except OSError as error:
        raise ConfigError(f"model.path = {config.model.path!r} cannot be read: {error.strerror}") from None
    if not config.model.adapter:
        return path
    try:
        return adapted_directory(path, Path(config.model.adapter).expanduser().absolute(), home / "adapters")
    except (CheckpointError, RuntimeError) as error:
        raise ConfigError(f"model.adapter = {config.model.adapter!r}: {error}") from None
    except OSError as error:
        raise ConfigError(f"model.adapter = {config.model.adapter!r} cannot be read: {error.strerror}") from None


def origin_of(config: RuntimeConfig, checkpoint: Path) -> str:
    """Return how ``mmrt status`` names a run's model and its adapter: a directory, a GGUF file, or a hub's model at its commit."""
    origin = _shown(config.model.path) if config.model.path else str(checkpoint)
    return f"{origin} with {_shown(config.model.adapter)}" if config.model.adapter else origin


def _shown(text: str) -> str:
    path = Path(text).expanduser().absolute()
    return str(name_of(path) or path)


def _plain_checkpoint(config: RuntimeConfig, home: Path) -> Path:
    file = _gguf_file(Path(config.model.path).expanduser()) if config.model.path else None
    if file is None and config.model.mmproj:
        raise CheckpointError(f"is no GGUF file, for which model.mmproj = {config.model.mmproj!r} would be")
    if file is None:
        return model_path(msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, adapter="")))
    from ..models.gguf.directory import gguf_directory  # with torch, which other starts do without here

    file, tower = file.absolute(), config.model.mmproj
    found = gguf_directory(file, home / "gguf", _towers(file), Path(tower).expanduser().absolute() if tower else None)
    for made in made_directories(home / "gguf"):
        if made.is_stale and not is_in_use(made.path):
            shutil.rmtree(made.path.parent, ignore_errors=True)
    return found


def is_in_use(folder: Path) -> str:
    """The run that serves a model of a folder, or links to its files; "" if none does."""
    here = RunDirectory.default_path()
    for path in {here, *here.parent.glob(f"{here.name}.*"), *RunDirectory.default_path("default").parent.glob("*/")}:
        try:
            info = running(path)
        except (RunError, ShmError):
            continue
        if not info.model_path:  # a front of several models: their runs are beside it
            continue
        served = Path(info.model_path)
        files = [Path(info.config.model.path).expanduser(), served, *(file.resolve() for file in served.glob("*"))]
        if any(file.is_relative_to(folder) for file in files):
            return path.name
    return ""


def _towers(file: Path) -> list[Path]:
    """Files that may have the part of a model that sees: those beside it, and of a hub's repository those at its top."""
    name = name_of(file)
    folders = {file.parent} if name is None else {file.parent, next(folder for folder in file.parents if folder.name == name.revision)}
    return sorted(path for folder in folders for path in folder.glob(f"*{GGUF_SUFFIX}") if is_tower(path))


def _gguf_file(path: Path) -> Path | None:
    """The GGUF file, or first shard, that a path names; None if it names none. Repositories of such files may have the original's
    config.json as well, but no tokenizer. Raises: CheckpointError for several models, OSError."""
    if path.is_file() and (path.suffix == GGUF_SUFFIX or begins_as_gguf(path)):
        return path
    if not path.is_dir() or (path / "config.json").is_file() and (path / TOKENIZER).is_file():
        return None
    found = [file for file in sorted(path.glob(f"*{GGUF_SUFFIX}")) if not is_tower(file) and is_first_shard(file)]
    if len(found) > 1:
        raise CheckpointError(f"holds several models: {', '.join(file.name for file in found)}; name one of the files")
    return found[0] if found else None
