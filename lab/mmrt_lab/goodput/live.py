"""The judge's loads on this machine: each system is a run of its own, whose caches are cleared before each load."""

import asyncio
import signal
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import uvloop
from numpy.typing import NDArray
from rich.console import Console

from mmrt.bench.own_run import OwnRun, own_run
from mmrt.bench.processes import send_signal
from mmrt.bench.serve.command import run_bench
from mmrt.bench.serve.errors import BenchError
from mmrt.bench.serve.options import Options
from mmrt.bench.serve.record import Record
from mmrt.models.config import facts_of, load_model_config
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.config.sections import ServerSection
from mmrt.runtime.observe.breakdown import Breakdown, request_breakdown, step_begins
from mmrt.runtime.observe.dumps import Recording
from mmrt.runtime.observe.flight import complete_since_ns, merge
from mmrt.runtime.observe.trace_requests import plan_spans, plans_by_request, request_spans
from mmrt.runtime.process.host_room import HostRoom, read_host_room
from mmrt.runtime.process.memory_layout import plan_layout
from mmrt.runtime.process.run import model_path
from mmrt.schema.policy_report import PolicyReport
from mmrt.shm.run_directory import RunDirectory

from .options import GoodputOptions
from .report import Measured
from .simulated import Measure
from .systems import System

T = TypeVar("T")

_PROCESSES_BYTES = 768 << 20  # of the processes of a run, beside pools and weights; nine have 560 MiB


def fit_at_once(options: GoodputOptions) -> bool:
    """Runs of all systems have room on this machine's processors at the same time. Raises: CheckpointError, ConfigError."""
    if any(system.config.model.on_cuda for system in options.systems):
        return False
    room = read_host_room(RunDirectory.default_path())
    needed = [_needed(_configured(options, system), room) for system in options.systems]
    shared_bytes = sum(one.shared_bytes for one in needed)
    return shared_bytes <= room.shared_bytes and sum(one.memory_bytes for one in needed) <= room.memory_bytes


def _needed(config: RuntimeConfig, room: HostRoom) -> HostRoom:
    """The memory that a run needs at most. Weights count twice, for kernels may keep a copy in another form. Raises: CheckpointError,
    ConfigError."""
    section, memory = config.model, config.memory
    model = load_model_config(model_path(config), section.dtype, section.max_context, memory.kv_dtype, section.weights)
    facts = facts_of(model, memory.kv_page_tokens, memory.kv_transfer_dtype)
    shared_bytes = facts.weight_bytes + plan_layout(config, facts, model.dtype, room).num_bytes
    return HostRoom(shared_bytes + facts.weight_bytes + _PROCESSES_BYTES, shared_bytes)


def _configured(options: GoodputOptions, system: System) -> RuntimeConfig:
    """The configuration of a system's run."""
    path = str(options.checkpoint.absolute()) if options.checkpoint else system.config.model.path
    model = msgspec.structs.replace(system.config.model, path=path)
    return msgspec.structs.replace(system.config, model=model, server=ServerSection(port=0))


@contextmanager
def live(options: GoodputOptions, system: System) -> Iterator[Measure]:
    """A run of the system. Raises: OwnRunError; when it measures also BenchError, ShmError, OSError."""
    config = _configured(options, system)
    name = f"goodput-{options.systems.index(system)}"
    with own_run(name) as run, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        run.up(config)
        url = run.report().endpoint

        def measure(load: Options) -> Measured:
            run.command("cache", "clear")
            (_, records, stall), num_kills = runner.run(_under_kills(run_bench(load, [url], Console(quiet=True)), run, options))
            check_policy(run.report().policy)
            with RunDirectory.attach(run.run) as directory:
                recorders = Recording.take(directory).recorders
            return Measured(records, break_down_records(recorders, records), stall, num_kills)

        yield measure


async def _under_kills(work: Coroutine[Any, Any, T], run: OwnRun, options: GoodputOptions) -> tuple[T, int]:
    """Do the work while processes are killed. Returns what it returns, and the number of kills."""
    doing, num_kills = asyncio.create_task(work), 0
    every_s = 60 / options.kills_per_minute if options.kills_per_minute else None
    while not (await asyncio.wait([doing], timeout=every_s))[0]:
        report = await asyncio.to_thread(run.report)
        alive = [actor.pid for actor in report.actors if actor.pid is not None]
        if alive and send_signal(alive[num_kills % len(alive)], signal.SIGKILL):
            num_kills += 1
    return await doing, num_kills


def check_policy(policy: PolicyReport) -> None:
    """Raises: BenchError if another policy than the wanted one is in charge."""
    if policy.set_aside or policy.refused:
        raise BenchError(f"the policy is {policy.summary}: the figures would be those of {policy.name}")


def break_down_records(recorders: Mapping[str, NDArray[Any]], records: Sequence[Record]) -> list[Breakdown]:
    """The parts of each request that went well, from the flight recorders. Left out: requests of which the recorders have lost
    records to newer ones."""
    since_ns = complete_since_ns(recorders)
    found = merge(recorders, since_ns)
    spans = {span.request_id: span for span in request_spans(found).values()}
    begins_ns = step_begins(found)
    plans = plans_by_request(plan_spans(found))
    breakdowns = []
    for record in records:
        span, begin_ns, end_ns = spans.get(record.request_id), round(record.sent_s * 1e9), round(record.end_s * 1e9)
        if record.is_success and span is not None and begin_ns >= since_ns:
            breakdowns.append(request_breakdown(span, plans.get(span.key, ()), begins_ns, end_ns, begin_ns, end_ns))
    return breakdowns
