"""The configuration of a run: one frozen struct per component, nested in ``RuntimeConfig``, loaded from one TOML file.

Unknown keys are refused by name with a suggestion. The environment is read here and nowhere else.
"""

from typing import Literal

import msgspec

ACTORS = ("memory", "controller", "gateway", "video", "encoder", "prefill", "decode", "detokenizer")
TORCH_ACTORS = frozenset({"memory", "video", "encoder", "prefill", "decode"})


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class ModelSection(_Section, frozen=True):
    path: str = ""  # a Hugging Face checkpoint directory; "" is the embedded default model
    name: str = ""  # what /v1/models calls it; "" is the directory's name
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_context: int = 0  # tokens; 0 is the checkpoint's own limit, at most 32768


class ServerSection(_Section, frozen=True):
    host: str = "127.0.0.1"
    port: int = 8000  # 0 picks a free one
    api_key: str = ""
    max_body_mib: int = 64
    keep_alive_s: float = 10.0
    request_timeout_s: float = 600.0
    max_waiting: int = 256  # requests queued before 503


class MediaSection(_Section, frozen=True):
    max_items: int = 16  # per request
    max_item_mib: int = 32
    max_pixels: int = 178_956_970
    max_video_s: float = 3600.0
    max_frames: int = 256  # sampled frames per video
    fps: float = 2.0
    max_audio_s: float = 600.0
    item_timeout_s: float = 60.0


class MemorySection(_Section, frozen=True):
    max_sequences: int = 64
    kv_tokens: int = 0  # 0: enough for 32 sequences of 2048 tokens, or one whole context
    kv_page_tokens: int = 16
    media_mib: int = 64
    patch_mib: int = 64
    embedding_tokens: int = 16384


class SchedulingSection(_Section, frozen=True):
    policy: Literal["unified"] = "unified"
    tbt_target_ms: float = 50.0
    prefill_budget_tokens: int = 0  # tokens per prefill step; 0: found by search at start, then steered
    encode_budget_tokens: int = 0  # patch rows per encode step; 0: likewise


class ActorSection(_Section, frozen=True):
    threads: int = 1
    nice: int = 0


class ActorsSection(_Section, frozen=True):
    decode: ActorSection = ActorSection(nice=0)
    prefill: ActorSection = ActorSection(nice=10)
    encoder: ActorSection = ActorSection(nice=15)
    video: ActorSection = ActorSection(nice=15)
    memory: ActorSection = ActorSection(nice=0)


class SupervisorSection(_Section, frozen=True):
    restart_limit: int = 5  # starts of one actor that die young within restart_window_s before it is failed
    restart_window_s: float = 30.0
    backoff_s: float = 0.1  # doubled per failure, up to backoff_max_s
    backoff_max_s: float = 5.0
    drain_s: float = 30.0
    ready_timeout_s: float = 180.0
    watchdog_s: float = 30.0


class RuntimeConfig(_Section, frozen=True):
    """Everything a run needs to know. ``config show`` prints it, ``config check`` validates it."""

    model: ModelSection = ModelSection()
    server: ServerSection = ServerSection()
    media: MediaSection = MediaSection()
    memory: MemorySection = MemorySection()
    scheduling: SchedulingSection = SchedulingSection()
    actors: ActorsSection = ActorsSection()
    supervisor: SupervisorSection = SupervisorSection()

    def actor(self, name: str) -> ActorSection:
        section: ActorSection = getattr(self.actors, name, ActorSection())
        return section
