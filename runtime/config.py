"""The configuration of a run: one frozen struct per component, nested in ``RuntimeConfig``, loaded from one TOML file.

Unknown keys are refused by name with a suggestion, wrong values with the limit that they violate. Used by the command line, the
supervisor and every actor; imports only the standard library and msgspec.
"""

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from .config_errors import explain, refuse_unknown
from .errors import ConfigError
from .fetch_config import FetchSection
from .otlp_endpoint import otlp_url
from .presets import PRESETS
from .stage_table import (
    DEFAULT_LAYOUT,
    MAX_INSTANCES,
    STAGES,
    InstanceId,
    Stage,
    actors_of,
    check_layout,
    devices_of,
    process_in,
    processes_of,
    spread_layout,
    stage_of,
    torch_actors,
)
from .toml_text import show, toml_table

MAX_STEP_TOKENS = 4096  # of a prefill or encode plan
# Of the registry in controller/scheduling/policy.py.
POLICY_NAMES = ("unified", "stage_level", "overlap", "slack", "weighted", "monolithic", "split", "auto")
FLOAT32_WEIGHTS = ("float32", "float16")  # formats of weights that are multiplied in float32 alone
MIN_FPS = 0.01  # seconds per temporal patch are a factor of positions, which must not grow without bound

SERVER_FILES = ("api_keys_file", "tls_cert", "tls_key")  # of [server]; relative to the configuration's

HostName = Annotated[str, Meta(pattern=r"^(\*|[A-Za-z0-9._-]+)$")]
Origin = Annotated[str, Meta(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s]+)$")]
Port = Annotated[int, Meta(ge=0, le=65535)]
Positive = Annotated[int, Meta(ge=1, le=1 << 40)]
Size = Annotated[int, Meta(ge=1, le=1 << 30)]
NotNegative = Annotated[int, Meta(ge=0, le=1 << 40)]
Seconds = Annotated[float, Meta(gt=0, le=31_536_000)]
Objective = Annotated[float, Meta(ge=1, le=3_600_000)]
Wait = Annotated[float, Meta(ge=0, le=31_536_000)]
Threads = Annotated[int, Meta(ge=0, le=1024)]
Nice = Annotated[int, Meta(ge=0, le=19)]
TurnsMode = Literal["off", "plans", "layers"]
Device = Annotated[str, Meta(pattern=r"^(cpu|cuda(:[0-9]+)?)$")]


class ModelSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str = ""  # a Hugging Face checkpoint directory; "" is the demo model, which comes with mmrt
    name: str = ""  # what /v1/models calls it; "" is the directory's name
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    weights: Literal["auto", "float32", "bfloat16", "float16", "int8", "int4"] = (
        "auto"  # format of the language model's matrices, on a CPU
    )
    max_context: NotNegative = 0  # tokens; 0 is the checkpoint's own limit, at most 32768
    device: Device = "cpu"  # where it is computed: cpu, cuda, or cuda:N

    @property
    def on_cuda(self) -> bool:
        return self.device != "cpu"


class ServerSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    port: Port = 8000  # 0 picks a free one
    api_key: str = ""
    api_keys_file: str = ""  # keys with names and limits, read again when it changes; relative to the configuration's
    tls_cert: str = ""  # PEM, with its chain; "" serves without TLS. Both read again when they change, relative as above
    tls_key: str = ""
    allow_origins: tuple[Origin, ...] = ()  # of web pages that may use the server (CORS); "*" allows any
    allowed_hosts: tuple[HostName, ...] = ()  # names in Host besides localhost, addresses and host; "*" allows any
    page: bool = True  # a page for people at /: a playground, the live run, and buttons that kill and restart its processes
    max_body_mib: Size = 64
    keep_alive_s: Seconds = 10.0
    request_timeout_s: Seconds = 600.0
    max_waiting: NotNegative = 256  # requests queued before 503
    max_connections: Annotated[int, Meta(ge=0, le=1_000_000)] = 0  # 0: as many as the limit on open files allows

    @property
    def scheme(self) -> str:
        return "https" if self.tls_cert else "http"

    @property
    def needs_key(self) -> bool:
        """True if clients need an API key."""
        return bool(self.api_key or self.api_keys_file)


class MediaSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_items: NotNegative = 16  # per request
    max_item_mib: Size = 32
    max_pixels: Positive = 178_956_970
    max_request_pixels: Positive = 536_870_912  # of all pictures of a request
    max_video_s: Seconds = 3600.0
    max_frames: Positive = 256  # sampled frames per video
    fps: Annotated[float, Meta(ge=MIN_FPS, le=1000)] = 2.0
    max_audio_s: Seconds = 600.0
    item_timeout_s: Seconds = 60.0
    gpu_decoding: bool = False  # by the video units of GPUs, in a run on CUDA
    gpu_jpegs: bool = False  # by the JPEG units of the GPU, likewise: pixels differ by a few levels
    fetch: FetchSection = FetchSection()

    @property
    def decodes_on_gpu(self) -> bool:
        """True if the video process opens a GPU, in a run on CUDA."""
        return self.gpu_decoding or self.gpu_jpegs


class MemorySection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_sequences: Annotated[int, Meta(ge=0, le=65536)] = 0  # 0: 64, on CUDA 256
    kv_tokens: NotNegative = 0  # 0: a share of the memory that is available: see process/pool_sizes.py
    gpu_memory_utilization: Annotated[float, Meta(ge=0.05, le=1)] = 0.9  # share of the device's memory that may be in use
    kv_page_tokens: Annotated[int, Meta(ge=1, le=1024)] = 16
    kv_dtype: Literal["auto", "int8", "fp8"] = "auto"  # auto: the model's; the others take half of bfloat16's memory
    media_mib: Size = 64
    patch_mib: Size = 64
    embedding_tokens: NotNegative = 0  # 0: likewise
    prefix_cache: bool = True  # KV pages of earlier requests are found again where a prompt begins alike
    embedding_cache: bool = True  # media of equal content are analysed and encoded once


class CacheSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dir: str = ""  # where cached pages outlive the run; "" is nowhere
    max_mib: Size = 4096  # of all files there that belong to this model


class SchedulingSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    policy: str = "unified"  # one of POLICY_NAMES, or a file NAME.py, relative to the configuration's
    preset: Literal["", "monolithic", "split"] = ""  # of presets.py
    tbt_target_ms: Annotated[float, Meta(ge=0, le=3_600_000)] = 0.0  # 0: twice the undisturbed step, on a CPU at least 50
    prefill_budget_tokens: NotNegative = 0  # tokens per prefill step; 0: learned while serving
    encode_budget_tokens: NotNegative = 0  # patch rows per encode step; 0: likewise


class ObjectiveSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ttft_ms: Objective = 4000.0  # until the first token
    tbt_ms: Annotated[float, Meta(ge=0, le=3_600_000)] = 0.0  # between tokens; 0: as scheduling.tbt_target_ms


class TextObjective(ObjectiveSection, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ttft_ms: Objective = 1000.0


class VideoObjective(ObjectiveSection, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ttft_ms: Objective = 20_000.0


class SloSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Objectives by kind of request: that of its most demanding medium, of video, image and audio in this order."""

    text: TextObjective = TextObjective()
    image: ObjectiveSection = ObjectiveSection()
    video: VideoObjective = VideoObjective()
    audio: ObjectiveSection = ObjectiveSection()


class ActorSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    threads: Threads = 0  # 0: planned from the processors: see process/processors.py
    nice: Nice = 0


def actors_section(stages: Mapping[str, Stage] = STAGES) -> type[msgspec.Struct]:
    """Make the struct of [actors]: the layout, and a section with defaults for each stage that computes with torch."""
    fields: list[tuple[str, Any, Any]] = [("layout", str, DEFAULT_LAYOUT), ("turns", TurnsMode, "off")]
    for name in torch_actors(stages):
        defaults = [("threads", Threads, 0), ("nice", Nice, stages[name].nice)]
        section = msgspec.defstruct(
            "ActorSection", defaults, bases=(ActorSection,), frozen=True, kw_only=True, forbid_unknown_fields=True
        )
        fields.append((name, section, section()))
    return msgspec.defstruct("ActorsSection", fields, frozen=True, kw_only=True, forbid_unknown_fields=True)


if TYPE_CHECKING:

    class ActorsSection(msgspec.Struct, frozen=True, kw_only=True):
        """``layout``: the processes of encoders, prefills and decode. ``turns``: whether these compute one at a time, and how long
        a plan may hold up decode. The other fields are the sections of stages."""

        layout: str = DEFAULT_LAYOUT
        turns: TurnsMode = "off"

        def __init__(self, *, layout: str = DEFAULT_LAYOUT, turns: TurnsMode = "off", **sections: ActorSection) -> None: ...

else:
    ActorsSection = actors_section()


class DeviceSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A named part of the machine with a KV pool of its own, for layouts."""

    name: Annotated[str, Meta(pattern=r"^[a-z0-9:]{1,16}$")]
    cpus: Annotated[str, Meta(pattern=r"^([0-9]{1,4}(-[0-9]{1,4})?(,(?=.)|$))*$")] = ""  # such as "0-3,8"; "" is any


class SupervisorSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    restart_limit: Positive = 5  # failures within restart_window_s of running time before the run goes on without the actor
    restart_window_s: Seconds = 30.0
    backoff_s: Seconds = 0.1  # doubled per failure, up to backoff_max_s
    backoff_max_s: Seconds = 5.0
    drain_s: Wait = 30.0
    ready_timeout_s: Seconds = 180.0
    watchdog_s: Seconds = 30.0


class LoggingSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: Literal["text", "json"] = "text"  # json: one object a line

    @property
    def is_json(self) -> bool:
        return self.format == "json"


class TracingSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    otlp_endpoint: str = ""  # the URL of a collector of traces; "" is off
    sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0  # of the requests whose client does not decide it


class RuntimeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a run needs to know. ``config show`` prints it, ``config check`` validates it."""

    model: ModelSection = ModelSection()
    server: ServerSection = ServerSection()
    media: MediaSection = MediaSection()
    memory: MemorySection = MemorySection()
    cache: CacheSection = CacheSection()
    scheduling: SchedulingSection = SchedulingSection()
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

    @property
    def instances(self) -> tuple[InstanceId, ...]:
        """The actors of a run. Their places are their numbers in shared memory."""
        return actors_of(self.actors.layout)

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

    def process_of(self, actor: str) -> str:
        """Return the name of the process that the actor runs in."""
        return process_in(self.actors.layout, actor)

    @property
    def processes(self) -> dict[InstanceId, tuple[InstanceId, ...]]:
        """Return the actors of each process of a run, by process name."""
        return processes_of(self.actors.layout)


def load_config(path: Path | None = None) -> RuntimeConfig:
    """Load the configuration from the TOML file at ``path``; the defaults if it is None. Raises ConfigError naming file and key."""
    if path is None:
        return RuntimeConfig()
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from None
    try:
        return _with_files(parse_config(text), path.absolute().parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def is_policy_file(policy: str) -> bool:
    """Return whether a policy is that of a file, and not one of mmrt's."""
    return policy.endswith(".py")


def _with_files(config: RuntimeConfig, directory: Path) -> RuntimeConfig:
    """Make the paths of files absolute, from the configuration's directory. Raises ConfigError if a policy has no file."""
    paths = {name: str(directory / path) for name in SERVER_FILES if (path := getattr(config.server, name))}
    config = msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, **paths))
    policy = config.scheduling.policy
    if not is_policy_file(policy):
        return config
    file = directory / policy
    if not file.is_file():
        raise ConfigError(f"scheduling.policy = {show(policy)}: there is no file {file}")
    return msgspec.structs.replace(config, scheduling=msgspec.structs.replace(config.scheduling, policy=str(file)))


def parse_config(text: str) -> RuntimeConfig:
    """Parse the configuration from TOML ``text``. Raises ConfigError."""
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"not valid TOML: {error or 'nested too deep'}") from None
    return convert_config(data)


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
    if config.cache.dir and config.model.on_cuda:
        raise ConfigError(f"cache.dir = {show(config.cache.dir)}: pages on a CUDA device cannot be stored")
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
        raise ConfigError(f"devices: are parts of a CPU; model.device = {show(config.model.device)} is one device")
    if config.num_kv_pools > 1 and config.actors.turns != "off":
        raise ConfigError(f'actors.turns = {show(config.actors.turns)}: stages of several [[devices]] take no turns, expected "off"')
    if config.num_kv_pools > 1 and config.cache.dir:
        raise ConfigError(
            f"cache.dir = {show(config.cache.dir)}: stores the pages of one KV pool; [[devices]] makes {config.num_kv_pools}"
        )


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
    """Set what the preset says. Raises ConfigError for a key with another value than the default's and the preset's."""
    if not (name := config.scheduling.preset):
        return config
    data, defaults = to_data(config), to_data(RuntimeConfig())
    for key, value in (PRESETS[name].fixed | PRESETS[name].defaults).items():
        section, _, field = key.partition(".")
        if data[section][field] == defaults[section][field]:
            data[section][field] = value
        elif key in PRESETS[name].fixed and data[section][field] != value:
            raise ConfigError(f"{key} = {show(data[section][field])}: scheduling.preset = {show(name)} needs {show(value)}")
    return msgspec.convert(data, RuntimeConfig)


def to_data(config: RuntimeConfig) -> dict[str, Any]:
    """Convert a configuration to plain data, for run.json. ``convert_config`` is the inverse."""
    data: dict[str, Any] = msgspec.to_builtins(config)
    return data


def to_toml(config: RuntimeConfig) -> str:
    """Return the whole configuration, with defaults, as TOML that ``parse_config`` reads back to an equal one."""
    return "\n".join(toml_table(to_data(config), "")).lstrip("\n") + "\n"
