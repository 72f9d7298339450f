"""The data that ``mmrt status`` shows, as a table or JSON: made by ``status_report``, or by a front of several models; sent over the
control socket."""

import msgspec

from ...schema.policy_report import NO_POLICY_YET, PolicyReport


class ActorReport(msgspec.Struct, kw_only=True):
    """One actor. ``memory_bytes`` is its proportional set size, ``cpu_percent`` of one processor since the last look."""

    name: str
    state: str
    ready: bool = False
    pid: int | None = None
    generation: int = 0
    restarts: int = 0
    last_exit: str = ""
    status: str = ""
    uptime_s: float = 0.0
    memory_bytes: int | None = None
    cpu_percent: float | None = None
    queue_depth: int = 0
    steps: int = 0
    broken: str = ""  # why the run does without it for now
    next_probe_s: float | None = None  # seconds until the next try, if broken and not being tried


class PoolReport(msgspec.Struct):
    pages: int = 0
    used: int = 0


class RequestsReport(msgspec.Struct):
    """``waiting_for``: what requests lack that wait, such as "KV pages"."""

    waiting: int = 0
    preparing: int = 0
    running: int = 0
    waiting_for: list[str] = []

    @property
    def words(self) -> str:
        lacking = f" for {' and '.join(self.waiting_for)}" if self.waiting_for else ""
        return f"{self.waiting} waiting{lacking}, {self.preparing} preparing, {self.running} running"


class ComputeReport(msgspec.Struct):
    """The model's device and number formats. ``sharing``: how encoder, prefill and decode share a CUDA device: "time slices" (the
    driver alternates between processes), "MPS" (they run side by side), or "streams" of one process; for a layout like EP+D
    both: "time slices, EP by streams"."""

    device: str
    dtype: str
    kv_dtype: str
    sharing: str = ""
    dtype_reason: str = ""  # why it is not the checkpoint's
    weights: str = ""  # format of the language model's matrices


class RunReport(msgspec.Struct, kw_only=True):
    """The whole run. ``ready``: every actor serves; ``compute`` is None until the model is known."""

    ready: bool
    state: str  # starting, ready, degraded, stopping; "unsupervised" when no supervisor answers
    path: str
    run_id: str
    layout: str = ""
    endpoint: str
    model: str
    supervisor_pid: int | None
    uptime_s: float
    overhead_bytes: int = 0  # memory (PSS) of supervisor, zygote and spare
    actors: list[ActorReport]
    pools: dict[str, PoolReport]
    requests: RequestsReport
    compute: ComputeReport | None = None
    policy: PolicyReport = NO_POLICY_YET


class ModelReport(msgspec.Struct, kw_only=True):
    """A model of a front. ``run``: the name of its run for ``--run``; ``needs_bytes``: memory of its run, 0 while it is not known;
    ``problem``: why it cannot be loaded."""

    name: str
    state: str  # absent, loading, ready, draining
    run: str
    run_path: str
    model: str
    pinned: bool = False
    pid: int | None = None
    running: int = 0
    waiting: int = 0
    needs_bytes: int = 0
    takes: list[str] = []
    idle_s: float | None = None  # since its last request, while it is ready
    problem: str = ""


class FrontReport(msgspec.Struct, kw_only=True):
    """The front of several models. ``budget_bytes``: of all runs together."""

    path: str
    endpoint: str
    pid: int
    uptime_s: float
    budget_bytes: int
    is_ending: bool
    models: list[ModelReport]
