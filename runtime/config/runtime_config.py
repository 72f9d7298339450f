"""The configuration of a run: one frozen struct per component, nested in ``RuntimeConfig``, loaded from one TOML file.

Unknown keys are refused by name with a suggestion, wrong values with the limit that they violate. Used by the command line, the
supervisor and every actor; imports only the standard library and msgspec.
"""

import difflib
import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..errors import ConfigError
from ..stage_table import (
    MAX_INSTANCES,
    STAGES,
    InstanceId,
    actors_of,
    check_layout,
    devices_of,
    instance_id,
    process_in,
    processes_of,
    spread_layout,
    stage_of,
)
from .errors import explain, refuse_excess, refuse_unknown
from .otlp_endpoint import otlp_url
from .presets import PRESETS, has_same_kinds
from .sections import (
    FLOAT32_WEIGHTS,
    POLICY_NAMES,
    ActorSection,
    ActorsSection,
    AutoscaleSection,
    CacheSection,
    DeviceSection,
    LoggingSection,
    MediaSection,
    MemorySection,
    ModelSection,
    SchedulingSection,
    ServerSection,
    SharingSection,
    SloSection,
    StructuredOutputSection,
    SupervisorSection,
    TracingSection,
)
from .toml_text import show, toml_table

MAX_FILE_BYTES = 1 << 20
MAX_STEP_TOKENS = 4096  # of a prefill or encode plan
MAX_UNANSWERED = 2  # plans that an actor may have unacknowledged
SERVER_FILES = ("api_keys_file", "tls_cert", "tls_key")  # of [server]; relative to the configuration's


class RuntimeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a run needs to know. ``config show`` prints it, ``config check`` validates it."""

    model: ModelSection = ModelSection()
    server: ServerSection = ServerSection()
    media: MediaSection = MediaSection()
    memory: MemorySection = MemorySection()
    cache: CacheSection = CacheSection()
    structured_output: StructuredOutputSection = StructuredOutputSection()
    scheduling: SchedulingSection = SchedulingSection()
    autoscale: AutoscaleSection = AutoscaleSection()
    slo: SloSection = SloSection()
    actors: ActorsSection = ActorsSection()
    devices: Annotated[tuple[DeviceSection, ...], Meta(max_length=MAX_INSTANCES)] = ()  # none: all share one KV pool
    supervisor: SupervisorSection = SupervisorSection()
    logging: LoggingSection = LoggingSection()
    tracing: TracingSection = TracingSection()

    def step_limit_s(self, actor: str) -> float:
        """Return the seconds that one step of an actor may take before its watchdog kills it; 0 for actors without long steps."""
        stage = STAGES[stage_of(actor)]
        return stage.step_limit_s + (self.media.item_timeout_s if "media" in stage.inputs else 0.0)

    def actor(self, name: str) -> ActorSection:
        """Return the settings of an actor: those of its stage, or one thread for a stage that computes nothing."""
        section: ActorSection = getattr(self.actors, stage_of(name), ActorSection(threads=1))
        return section

    def most_threads(self, name: str) -> int:
        """Return how many threads an actor has while others leave cores idle, once threads are planned."""
        section = self.actor(name)
        return max(section.threads, section.most_threads) if isinstance(section, SharingSection) else section.threads

    @property
    def instances(self) -> tuple[InstanceId, ...]:
        """The actors of a run. Their places are their numbers in shared memory."""
        return actors_of(self.actors.layout)

    @property
    def num_gateways(self) -> int:
        return sum(STAGES[stage_of(actor)].listens for actor in self.instances)

    @property
    def prefill_ranks(self) -> int:
        """The stages of prefill's pipeline; 1 if the run has none."""
        return sum(stage_of(actor) == "prefill" for actor in self.instances) if self.scheduling.prefill_pipeline else 1

    @property
    def max_prefill_tokens(self) -> int:
        """The tokens that a prefill plan has at most."""
        return max(MAX_STEP_TOKENS, self.scheduling.prefill_budget_tokens)

    @property
    def num_kv_pools(self) -> int:
        """One for each device; one without devices."""
        return len(self.devices) or 1

    @property
    def device_names(self) -> tuple[str, ...]:
        return tuple(device.name for device in self.devices)

    @property
    def actor_devices(self) -> dict[InstanceId, int]:
        """The number of the device of each actor that has one."""
        return {actor: self.device_names.index(name) for actor, name in devices_of(self.actors.layout).items()}

    def kv_device(self, actor: str) -> int:
        """Return the number of the device whose KV pool an actor has as its own: of prefill's pipeline all stages have that of the
        first."""
        in_pipeline = self.scheduling.prefill_pipeline and stage_of(actor) == "prefill"
        return self.actor_devices.get(instance_id("prefill", 0) if in_pipeline else InstanceId(actor), 0)

    def process_of(self, actor: str) -> str:
        """Return the name of the process that the actor runs in."""
        return process_in(self.actors.layout, actor)

    @property
    def processes(self) -> dict[InstanceId, tuple[InstanceId, ...]]:
        """Return the actors of each process of a run, by process name."""
        return processes_of(self.actors.layout)


def load_config(path: Path | None = None, api_key: str = "") -> RuntimeConfig:
    """Load the configuration from the TOML file at ``path``, of 1 MiB at most; the defaults if it is None.

    ``api_key``: replaces that of the file, unless it is empty. Raises: ConfigError naming file and key.
    """
    config = RuntimeConfig() if path is None else _load_file(path)
    if not api_key:
        return config
    return msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, api_key=api_key))


def _load_file(path: Path) -> RuntimeConfig:
    text = read_text(path)
    try:
        return with_files(parse_config(text), path.absolute().parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def read_text(path: Path) -> str:
    """Return the text of a configuration file. Raises: ConfigError naming the file."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: a configuration has at most {MAX_FILE_BYTES >> 20} MiB, this file has more")
        return data.decode()
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from None


def is_policy_file(policy: str) -> bool:
    """Return whether a policy is that of a file, and not one of mmrt's."""
    return policy.endswith(".py")


def with_files(config: RuntimeConfig, directory: Path) -> RuntimeConfig:
    """Make the paths of files absolute, from the configuration's directory. Raises ConfigError if a policy has no file."""
    paths = {name: str(directory / path) for name in SERVER_FILES if (path := getattr(config.server, name))}
    config = msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, **paths))
    policy = config.scheduling.policy
    if not is_policy_file(policy):
        return config
    file = directory / policy
    try:
        is_file = file.is_file()
    except OSError:  # a name that is too long for a file
        is_file = False
    if not is_file:
        raise ConfigError(f"scheduling.policy = {show(policy)}: there is no file {file}")
    return msgspec.structs.replace(config, scheduling=msgspec.structs.replace(config.scheduling, policy=str(file)))


def parse_config(text: str) -> RuntimeConfig:
    """Parse the configuration from TOML ``text``. Raises ConfigError."""
    return convert_config(parse_toml(text))


def parse_toml(text: str) -> dict[str, Any]:
    """Return the data of a TOML text, whose numbers and texts have the size that a configuration's may have. Raises ConfigError."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError("not valid TOML: nested too deep") from None
    except ValueError:  # of Python's int, which takes no more
        raise ConfigError(f"not valid TOML: a number has more than {sys.get_int_max_str_digits()} digits") from None
    refuse_excess(data)
    return data


def convert_config(data: dict[str, Any]) -> RuntimeConfig:
    """Convert plain data, as ``to_data`` makes and run.json holds, to a configuration. Raises ConfigError."""
    refuse_unknown(data, RuntimeConfig)
    try:
        config = msgspec.convert(data, RuntimeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(explain(str(error), data, RuntimeConfig)) from None
    config = _with_preset(config)
    _check_devices(config)
    try:
        config = with_layout(config, config.actors.layout)
    except ConfigError as error:
        raise ConfigError(f"actors.layout = {show(config.actors.layout)}: {error}") from None
    if config.num_gateways > 1 and config.server.scheme == "https":
        raise ConfigError(
            f"actors.layout = {show(config.actors.layout)}: TLS ends in one gateway, leave server.tls_cert out or have one"
        )
    policy = config.scheduling.policy
    if policy not in POLICY_NAMES and not is_policy_file(policy):
        near = difflib.get_close_matches(policy, POLICY_NAMES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"scheduling.policy = {show(policy)}: {hint}expected one of {', '.join(POLICY_NAMES)}, or a file NAME.py")
    _check_weights(config.model)
    try:
        otlp_url(config.tracing.otlp_endpoint or "http://localhost")
    except ValueError as error:
        raise ConfigError(f"tracing.otlp_endpoint = {show(config.tracing.otlp_endpoint)}: {error}") from None
    if config.scheduling.prefill_pipeline:
        _check_pipeline(config)
    if config.autoscale.enabled:
        _check_autoscale(config)
    if config.cache.dir and config.model.on_cuda:
        raise ConfigError(f"cache.dir = {show(config.cache.dir)}: pages on a CUDA device cannot be stored")
    if config.model.on_cuda and config.media.decodes_on_gpu and config.media.isolation != "shared":
        raise ConfigError("media.isolation = 'process': a GPU decodes in one process; leave media.gpu_decoding and media.gpu_jpegs out")
    if bool(config.server.tls_cert) != bool(config.server.tls_key):
        given, missing = ("tls_cert", "tls_key") if config.server.tls_cert else ("tls_key", "tls_cert")
        raise ConfigError(f"server.{given} = {show(getattr(config.server, given))}: needs server.{missing} besides")
    if config.supervisor.backoff_max_s < config.supervisor.backoff_s:
        raise ConfigError(
            f"supervisor.backoff_max_s = {config.supervisor.backoff_max_s} is less than"
            f" supervisor.backoff_s = {config.supervisor.backoff_s}"
        )
    return config


def with_layout(config: RuntimeConfig, layout: str) -> RuntimeConfig:
    """Return the configuration with another layout, each process on its device. Raises ConfigError if a run cannot have it."""
    layout = spread_layout(layout, config.device_names)
    check_layout(layout, config.device_names)
    if (preset := config.scheduling.preset) and not has_same_kinds(layout, needed := str(PRESETS[preset].fixed["actors.layout"])):
        raise ConfigError(f"scheduling.preset = {show(preset)} needs {show(needed)}, or more of its processes")
    return msgspec.structs.replace(config, actors=msgspec.structs.replace(config.actors, layout=layout))


def _check_devices(config: RuntimeConfig) -> None:
    """Raise ConfigError for devices that a run cannot have."""
    for number, device in enumerate(config.devices):
        if device.name in config.device_names[:number]:
            raise ConfigError(f"devices[{number}].name = {show(device.name)}: another device has this name")
        if device.cpus and not numbers_in(device.cpus):
            raise ConfigError(f"devices[{number}].cpus = {show(device.cpus)}: names no processor")
    if config.devices and config.scheduling.preset:
        raise ConfigError(f"devices: scheduling.preset = {show(config.scheduling.preset)} has a layout without devices")
    if config.devices and config.model.on_cuda:
        raise ConfigError(
            f"devices: are parts of a CPU; model.device = {show(config.model.device)} is one device: leave [[devices]] out"
        )
    _check_transfer(config)


def _check_autoscale(config: RuntimeConfig) -> None:
    """Raise ConfigError for a run whose layout cannot or must not follow the load."""
    if config.model.on_cuda:
        raise ConfigError(f"autoscale.enabled: the layout of a run on {config.model.device} is set at the start: leave it out")
    if config.scheduling.preset:
        raise ConfigError(
            f"autoscale.enabled: scheduling.preset = {show(config.scheduling.preset)} keeps its layout: leave one of them out"
        )


def _check_pipeline(config: RuntimeConfig) -> None:
    """Raise ConfigError for a run that prefill's actors cannot be a pipeline in."""
    if config.prefill_ranks < 2:
        layout = config.actors.layout
        raise ConfigError(f"scheduling.prefill_pipeline: actors.layout = {show(layout)} has one prefill, expected 2 or more, as E+2P+D")
    if config.scheduling.preset:
        raise ConfigError(f"scheduling.prefill_pipeline: scheduling.preset = {show(config.scheduling.preset)} has none: leave one out")
    if config.autoscale.enabled:
        raise ConfigError("autoscale.enabled: the stages of scheduling.prefill_pipeline are set at the start: leave one of them out")


def _check_transfer(config: RuntimeConfig) -> None:
    """Raise ConfigError for pages that cannot be packed on their way."""
    given = f"memory.kv_transfer_dtype = {show(config.memory.kv_transfer_dtype)}"
    if config.memory.kv_transfer_dtype == "auto":
        return
    if config.num_kv_pools == 1:
        raise ConfigError(f"{given}: packs KV pages on their way between [[devices]], at least 2 are needed, not {len(config.devices)}")
    if config.memory.kv_dtype != "auto":
        raise ConfigError(f'{given}: pages of memory.kv_dtype = {show(config.memory.kv_dtype)} are packed already, expected "auto"')


def numbers_in(text: str) -> frozenset[int]:
    """Return the numbers of a list such as "0-3,8"."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _check_weights(model: ModelSection) -> None:
    """Raise ConfigError for weights that the device or the dtype does not allow."""
    given = f"model.weights = {show(model.weights)}"
    if model.weights != "auto" and model.on_cuda:
        raise ConfigError(f"{given}: on model.device = {show(model.device)} weights are kept in model.dtype, expected 'auto'")
    if model.weights in FLOAT32_WEIGHTS and model.dtype == "bfloat16":
        raise ConfigError(f"{given}: such weights are multiplied in float32, expected model.dtype 'auto' or 'float32'")


def _with_preset(config: RuntimeConfig) -> RuntimeConfig:
    """Set what the preset says. Raises ConfigError for a key with another value than the default's and the preset's; a layout may
    have other numbers of its processes."""
    if not (name := config.scheduling.preset):
        return config
    data, defaults = to_data(config), to_data(RuntimeConfig())
    for key, value in (PRESETS[name].fixed | PRESETS[name].defaults).items():
        section, _, field = key.partition(".")
        configured = data[section][field]
        if configured == defaults[section][field]:
            data[section][field] = value
        elif key in PRESETS[name].fixed and configured != value:
            if key == "actors.layout":  # ``with_layout`` judges it
                continue
            raise ConfigError(f"{key} = {show(configured)}: scheduling.preset = {show(name)} needs {show(value)}")
    return msgspec.convert(data, RuntimeConfig)


def to_data(config: RuntimeConfig) -> dict[str, Any]:
    """Convert a configuration to plain data, for run.json. ``convert_config`` is the inverse."""
    data: dict[str, Any] = msgspec.to_builtins(config)
    return data


def to_toml(config: RuntimeConfig) -> str:
    """Return the whole configuration, with defaults, as TOML that ``parse_config`` reads back to an equal one."""
    return "\n".join(toml_table(to_data(config), "")).lstrip("\n") + "\n"
