"""The sections of the configuration, one frozen struct for each, with defaults and limits. ``runtime_config`` puts them together."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ..stage_table import DEFAULT_LAYOUT, MAX_INSTANCES, STAGES, Stage, torch_actors
from .fetch import FetchSection

# Of the registry in controller/scheduling/policy.py.
POLICY_NAMES = ("unified", "stage_level", "overlap", "slack", "weighted", "monolithic", "split", "auto")
FLOAT32_WEIGHTS = ("float32", "float16")  # formats of weights that are multiplied in float32 alone
MAX_FPS = 1000
AUTO = "auto"
TokenShare = Annotated[float, Meta(ge=0.05, le=1)] | Literal["auto"]
MIN_FPS = 0.01  # seconds per temporal patch are a factor of positions, which must not grow without bound

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
    path: str = ""  # a checkpoint directory, a GGUF file, or a hub's ORG/REPO; "" is the demo model, which comes with mmrt
    mmproj: str = ""  # of a GGUF file: the file of the part that sees; "": one that fits beside it, if there is any
    adapter: str = ""  # directory of a LoRA adapter, merged when the model is loaded
    name: str = ""  # what /v1/models calls it; "" is the directory's name, or ORG/REPO
    download: bool = False  # a model by name that is not in the cache is fetched without a question
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    weights: Literal["auto", "float32", "bfloat16", "float16", "int8", "int8g", "int4"] = (
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
    max_tool_schema_kib: Size = 1024  # of all functions of a request, as JSON
    strict_fields: bool = False  # fields that mmrt does not know are refused, not ignored
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
    max_items: NotNegative = 512  # per request, each frame of a list counted
    max_item_mib: Size = 32
    max_pixels: Positive = 178_956_970
    max_request_pixels: Positive = 536_870_912  # of all pictures of a request that no cache has
    max_video_s: Seconds = 3600.0
    max_frames: Positive = 256  # sampled frames per video
    fps: Annotated[float, Meta(ge=MIN_FPS, le=MAX_FPS)] = 2.0
    max_audio_s: Seconds = 600.0
    token_share: TokenShare = 1.0  # of the tokens of pictures and videos; auto: fewer under load
    item_timeout_s: Seconds = 60.0
    isolation: Literal["shared", "process"] = "shared"  # "process": each item is decoded in a process of its own
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
    kv_transfer_dtype: Literal["auto", "int8", "int4"] = "auto"  # of KV pages copied to another device; auto: as they are
    media_mib: Size = 64
    patch_mib: Size = 64
    embedding_tokens: NotNegative = 0  # 0: likewise
    prefix_cache: bool = True  # KV pages of earlier requests are found again where a prompt begins alike
    embedding_cache: bool = True  # media of equal content are analysed and encoded once


class StructuredOutputSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    additional_properties: bool = False  # allowed in objects whose schemas name properties and say nothing about others


class CacheSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dir: str = ""  # where cached pages outlive the run; "" is nowhere
    max_mib: Size = 4096  # of all files there that belong to this model


class SchedulingSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    policy: str = "auto"  # one of POLICY_NAMES, or a file NAME.py, relative to the configuration's
    preset: Literal["", "monolithic", "split"] = ""  # of presets.py
    routing: Literal["least_load", "round_robin", "random"] = "least_load"  # of work to the instances of a stage
    prefill_pipeline: bool = False  # prefill's actors are stages of a pipeline, each with a range of layers, not each with all
    tbt_target_ms: Annotated[float, Meta(ge=0, le=3_600_000)] = 0.0  # 0: by a step alone (``tbt_rule``)
    prefill_budget_tokens: NotNegative = 0  # tokens per prefill step; 0: learned while serving
    encode_budget_tokens: NotNegative = 0  # patch rows per encode step; 0: likewise
    prompt_lookup: bool = True  # decode guesses tokens from the prompt and the answer, on a CPU, and checks them in the same step


class AutoscaleSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    enabled: bool = False  # the run sets the layouts that ``mmrt advise`` would propose
    dry_run: bool = False  # it only says them
    every_s: Annotated[float, Meta(ge=0.5, le=3600)] = 5.0  # between looks
    calm_s: Annotated[float, Meta(ge=1, le=86_400)] = 120.0  # for which fewer processes must have done before some go
    most: Annotated[int, Meta(ge=0, le=MAX_INSTANCES)] = 0  # of each kind; 0: the processor's cores
    idle_cores: Annotated[float, Meta(ge=0, le=1024)] = 0.5  # with fewer of them none come: they would share what others use


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


class SharingSection(ActorSection, frozen=True, kw_only=True, forbid_unknown_fields=True):
    most_threads: Threads = 0  # while others leave cores idle; 0: planned where ``threads`` is, else as many as those


def actors_section(stages: Mapping[str, Stage] = STAGES) -> type[msgspec.Struct]:
    """Make the struct of [actors]: the layout, and a section with defaults for each stage that computes with torch."""
    fields: list[tuple[str, Any, Any]] = [("layout", str, DEFAULT_LAYOUT), ("turns", TurnsMode, "off")]
    for name in torch_actors(stages):
        base, defaults = SharingSection if stages[name].has_device else ActorSection, [("nice", Nice, stages[name].nice)]
        section = msgspec.defstruct("ActorSection", defaults, bases=(base,), frozen=True, kw_only=True, forbid_unknown_fields=True)
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
    gateway_standby: bool = False  # a second process of it that waits, warm, for its death


class LoggingSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: Literal["text", "json"] = "text"  # json: one object a line

    @property
    def is_json(self) -> bool:
        return self.format == "json"


class TracingSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    otlp_endpoint: str = ""  # the URL of a collector of traces; "" is off
    sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0  # of the requests whose client does not decide it
