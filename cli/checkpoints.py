"""The checkpoint directory of a configuration: the directory that it names, or one made of a GGUF file or for an adapter."""

from pathlib import Path

import msgspec

from ..models.checkpoint.files import GGUF_SUFFIX, TOKENIZER, adapted_directory, begins_as_gguf, is_first_shard, missing_files
from ..models.config import load_model_config
from ..models.errors import CheckpointError
from ..runtime.config.runtime_config import RuntimeConfig
from ..runtime.environment import read_environment
from ..runtime.errors import ConfigError
from ..runtime.process.run import model_path


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
        advice = "A GGUF file has it as tokenizer.chat_template" if is_gguf else "Get it whole: hf download NAME --local-dir DIR"
        raise ConfigError(f"model.path = {config.model.path!r} is not a whole checkpoint: {'; '.join(missing)}. {advice}")
    return path


def checkpoint_of(config: RuntimeConfig) -> Path:
    """Return the checkpoint directory of the configuration. Of a GGUF file, or a directory that holds one, one is made, and of a
    checkpoint with an adapter another.

    Raises: ConfigError.
    """
    home = read_environment().state_home
    try:
        path = _plain_checkpoint(config, home)
        if config.model.adapter:
            return adapted_directory(path, Path(config.model.adapter).expanduser().absolute(), home / "adapters")
    except (CheckpointError, RuntimeError) as error:
        raise ConfigError(f"model.path = {config.model.path!r}: {error}") from None
    except OSError as error:
        raise ConfigError(f"model.path = {config.model.path!r} cannot be read: {error.strerror}") from None
    return path


def _plain_checkpoint(config: RuntimeConfig, home: Path) -> Path:
    file = _gguf_file(Path(config.model.path).expanduser()) if config.model.path else None
    if file is None:
        return model_path(msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, adapter="")))
    from ..models.gguf.directory import gguf_directory  # with torch, which other starts do without here

    return gguf_directory(file.absolute(), home / "gguf")


def _gguf_file(path: Path) -> Path | None:
    """The GGUF file, or first shard, that a path names; None if it names none. Repositories of such files may have the original's
    config.json as well, but no tokenizer. Raises: CheckpointError for several models, OSError."""
    if path.is_file() and (path.suffix == GGUF_SUFFIX or begins_as_gguf(path)):
        return path
    if not path.is_dir() or (path / "config.json").is_file() and (path / TOKENIZER).is_file():
        return None
    found = [file for file in sorted(path.glob(f"*{GGUF_SUFFIX}")) if "mmproj" not in file.name.lower() and is_first_shard(file)]
    if len(found) > 1:
        raise CheckpointError(f"holds several models: {', '.join(file.name for file in found)}; name one of the files")
    return found[0] if found else None
