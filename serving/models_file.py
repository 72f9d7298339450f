"""The file that ``mmrt serve`` reads: where the front serves, how much memory its runs share, and the configuration of each run.

A run's keys are those of ``[model]`` in a run's own configuration, beside ``pinned``; its other sections are tables below the model.
"""

import hashlib
import re
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..hub.names import parse_name
from ..runtime.config.errors import explain, refuse_unknown
from ..runtime.config.runtime_config import RuntimeConfig, convert_config, parse_toml, read_text, to_toml, with_files
from ..runtime.config.sections import LoggingSection, ModelSection, ServerSection, Wait
from ..runtime.config.toml_text import show
from ..runtime.errors import ConfigError
from ..runtime.process.run import DEFAULT_MODEL
from .sizes import read_size

MAX_MODELS = 64
MAX_SUFFIX = 40  # characters: sockets allow run directories few
# Of a run whose file does not say: a run alone takes a share of the memory, one of several must not.
KV_TOKENS, EMBEDDING_TOKENS = 32768, 16384
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,159}")
_OF_FRONT = ("model", "server", "logging")  # sections of a run that are no table of a model


class FrontSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    memory: str = ""  # of all runs together, such as "20 GiB"; "" is 80 % of what is available when the front starts
    idle_s: Wait = 600.0  # without a request, after which a run ends; 0: never
    turn_s: Wait = 10.0  # that a busy run goes on to take requests while another model waits for its memory
    max_keep_alive_s: Wait = 0.0  # most that a request's keep_alive may ask for; 0: it is ignored


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    server: ServerSection = ServerSection()
    front: FrontSection = FrontSection()
    logging: LoggingSection = LoggingSection()
    model: Annotated[tuple[dict[str, Any], ...], Meta(min_length=1, max_length=MAX_MODELS)]


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model of the file. ``config``: of its run, which serves the front alone. ``pinned``: loaded at the start, and never ended."""

    name: str
    config: RuntimeConfig
    pinned: bool

    @property
    def run_suffix(self) -> str:
        """What the name of its run has behind the front's."""
        name = re.sub(r"[^A-Za-z0-9._-]", "-", self.name)
        return name if len(name) <= MAX_SUFFIX else f"{name[: MAX_SUFFIX - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"

    @property
    def digest(self) -> str:
        """Of the configuration: a run of another one is not this model's."""
        return hashlib.sha256(to_toml(self.config).encode()).hexdigest()[:16]


class ModelsFile(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file. ``memory_bytes``: of all runs together, 0 where the file does not say."""

    server: ServerSection
    front: FrontSection
    logging: LoggingSection
    models: tuple[ServedModel, ...]
    memory_bytes: int


def load_models(path: Path, server_options: dict[str, str | int]) -> ModelsFile:
    """Read the file. ``server_options`` replace keys of its ``[server]``. Paths in it are relative to its directory.

    Raises: ConfigError naming file, key, value and limit.
    """
    text = read_text(path)
    try:
        data = parse_toml(text)
        data["server"] = {**server, **server_options} if isinstance(server := data.get("server", {}), dict) else server
        return _convert(data, path.absolute().parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _convert(data: dict[str, Any], directory: Path) -> ModelsFile:
    entries = data.get("model", [])
    if isinstance(entries, dict):
        raise ConfigError("model: is one table, expected an array of tables: write [[model]] above each")
    refuse_unknown(data, _File)
    if not entries:
        raise ConfigError("model: there is none, expected at least one table [[model]]")
    try:
        file = msgspec.convert(data, _File)
    except msgspec.ValidationError as error:
        raise ConfigError(explain(str(error), data, _File)) from None
    # The checks of a whole configuration hold for these sections as well.
    server = with_files(convert_config({"server": data["server"]}), directory).server
    models = tuple(_convert_model(entry, f"model[{at}]", server, file.logging, directory) for at, entry in enumerate(file.model))
    _check_names(models)
    return ModelsFile(
        server=server,
        front=file.front,
        logging=file.logging,
        models=models,
        memory_bytes=read_size(file.front.memory, "front.memory") if file.front.memory else 0,
    )


def _convert_model(entry: dict[str, Any], path: str, server: ServerSection, logging: LoggingSection, directory: Path) -> ServedModel:
    own = {field.name for field in msgspec.structs.fields(ModelSection)}
    sections = [field.name for field in msgspec.structs.fields(RuntimeConfig) if field.name not in _OF_FRONT]
    if unknown := sorted(set(entry) - own - {"pinned", *sections}):
        raise ConfigError(f"unknown key {path}.{unknown[0][:60]}: a model has {', '.join([*sorted(own), 'pinned', *sections])}")
    pinned = entry.get("pinned", False)
    if not isinstance(pinned, bool):
        raise ConfigError(f"{path}.pinned = {show(pinned)}: expected true or false")
    try:
        config = convert_config(
            {"model": {key: entry[key] for key in own & set(entry)}, **{key: entry[key] for key in sections if key in entry}}
        )
        config = with_files(config, directory)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    name = config.model.name or _name_of(config.model.path, directory)
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{path}.name = {show(name)}: expected 1 to 160 letters, digits and . _ : / @ + -, the first a letter or digit"
        )
    return ServedModel(name=name, config=_of_run(config, name, server, logging, directory), pinned=pinned)


def _name_of(path: str, directory: Path) -> str:
    hub_name = parse_name(path)
    if hub_name is not None and _found(path, directory) == path:
        return hub_name.served
    return Path(path).name.removesuffix(".gguf") or "demo"


def _of_run(config: RuntimeConfig, name: str, server: ServerSection, logging: LoggingSection, directory: Path) -> RuntimeConfig:
    """Return the configuration of a model's run: on this machine alone, at any port, with the front's keys and limits."""
    replace = msgspec.structs.replace
    defaults = ServerSection()
    own = replace(
        server,
        **{
            "host": defaults.host,
            "port": 0,
            "tls_cert": "",
            "tls_key": "",
            "allow_origins": (),
            "allowed_hosts": (),
            "max_connections": 0,
        },
    )
    path = _found(config.model.path, directory) or str(DEFAULT_MODEL)
    mmproj, adapter = (_found(named, directory) for named in (config.model.mmproj, config.model.adapter))
    model = replace(config.model, name=name, path=path, mmproj=mmproj, adapter=adapter)
    memory = config.memory
    if not config.model.on_cuda:
        kv_tokens = memory.kv_tokens or max(KV_TOKENS, config.model.max_context)
        memory = replace(memory, kv_tokens=kv_tokens, embedding_tokens=memory.embedding_tokens or EMBEDDING_TOKENS)
    return replace(config, model=model, server=own, logging=logging, memory=memory)


def _found(path: str, directory: Path) -> str:
    """Return a path as seen from the file's directory; a name that is no path there, as of a repository, stays as it is."""
    if not path:
        return path
    try:
        there = directory / Path(path).expanduser()
        return str(there) if there.exists() or path.startswith((".", "/", "~")) else path
    except (OSError, RuntimeError):  # too long, or of no user: whoever reads it says so
        return path


def _check_names(models: tuple[ServedModel, ...]) -> None:
    seen: dict[str, tuple[int, str]] = {}
    for at, model in enumerate(models):
        before = seen.setdefault(model.run_suffix.lower(), (at, model.name))
        if before[0] != at:
            same = "has this name" if before[1] == model.name else f"{show(before[1])} has a run of the same name"
            raise ConfigError(f"model[{at}].name = {show(model.name)}: model[{before[0]}] {same}")
