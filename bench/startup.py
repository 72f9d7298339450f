"""``mmrt bench startup``: how long a user waits, and what an idle run takes: times, processor and memory beside their targets.

Starts runs through the command line in a home of its own: once, when kernels have to be made and files may have to be read, and again.
"""

import argparse
import statistics
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import msgspec
from PIL import Image
from rich.console import Console

from ..runtime.config.runtime_config import RuntimeConfig
from ..runtime.config.sections import ModelSection, ServerSection
from ..runtime.stage_table import torch_actors
from ..runtime.supervisor.processes import cpu_seconds
from .environment import Environment, read_environment
from .output import JSON_HELP, run_bench
from .own_run import OwnRun, OwnRunError, own_run, processes_of, timed
from .processes import memory_of
from .render import show_table

MEBI = 1 << 20
_SETTLE_S, _IDLE_S = 2.0, 10.0
_NUM_RESTARTS = 3  # of each torch actor
_LONG_ANSWER = 200  # tokens
_ANSWER_TIMEOUT_S = 120.0


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One figure. ``target`` is its upper limit, None where there is none."""

    name: str
    value: float
    unit: str
    target: float | None = None

    @property
    def is_reached(self) -> bool | None:
        return None if self.target is None else self.value <= self.target


class StartupBench(msgspec.Struct, frozen=True, kw_only=True):
    environment: Environment
    measurements: list[Measurement]
    memory: dict[str, tuple[int, int]]  # process -> (PSS, private dirty), bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, also when a target is missed."""
    parser = argparse.ArgumentParser(prog="mmrt bench startup", description="How long a user waits, and what an idle run takes.")
    add = parser.add_argument
    add("--model", default="", metavar="DIR", help="default: the embedded demo model")
    add("--shared-weights-of", metavar="DIR", help="also start this larger checkpoint: are its weights in memory once?")
    add("--json", type=Path, metavar="FILE", help=JSON_HELP)
    options = parser.parse_args(argv)
    bench = run_bench(
        "startup", options.json, (OwnRunError, OSError), lambda _: measure(options.model, options.shared_weights_of), show
    )
    return 1 if bench is None else 0


def measure(model: str, larger: str | None) -> StartupBench:
    """Everything; ``larger``: a checkpoint to start as well. Raises: OwnRunError, OSError."""
    environment = read_environment()
    with own_run(is_new=True) as run:
        measurements = measure_starts(run, _config(model))
        measurements.append(measure_status(run))
        measurements += measure_restarts(run)
        measurements.append(measure_idle(run))
        memory = read_memory(run)
        measurements.append(Measurement(name="whole run, PSS", value=_sum(memory, 0), unit="MiB", target=1200))
        measurements.append(Measurement(name="down", value=run.down(), unit="s"))
        if larger:
            measurements += measure_shared_weights(run, _config(larger))
    return StartupBench(environment=environment, measurements=measurements, memory=memory)


def _config(model: str) -> RuntimeConfig:
    path = str(Path(model).absolute()) if model else ""
    return RuntimeConfig(model=ModelSection(path=path), server=ServerSection(port=0))


def measure_starts(run: OwnRun, config: RuntimeConfig) -> list[Measurement]:
    """Once and again, then a question about a picture and a long answer. Leaves the run up. Raises: OwnRunError, OSError."""
    first_s = run.up(config)
    run.down()
    again_s = run.up(config)
    picture = run.home / "picture.png"
    Image.new("RGB", (224, 224), "red").save(picture)
    asked_s = run.command("ask", "What colour is it?", "--image", str(picture))[0]
    endpoint = run.report().endpoint
    _generate(endpoint, 1)
    few_s = timed(lambda: _generate(endpoint, 1))
    many_s = timed(lambda: _generate(endpoint, 1 + _LONG_ANSWER))
    return [
        Measurement(name="up to ready, first: makes kernels", value=first_s, unit="s", target=8),
        Measurement(name="up to ready, again", value=again_s, unit="s", target=5),
        Measurement(name="up to the first answer, about a picture", value=again_s + asked_s, unit="s", target=10),
        Measurement(name="a token of one stream", value=1000 * (many_s - few_s) / _LONG_ANSWER, unit="ms", target=33.3),
    ]


def _generate(endpoint: str, num_tokens: int) -> None:
    body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
    request = urllib.request.Request(f"{endpoint}/v1/chat/completions", msgspec.json.encode(body), {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the run is here, whatever proxy there is
    with opener.open(request, timeout=_ANSWER_TIMEOUT_S) as response:
        response.read()


def measure_status(run: OwnRun) -> Measurement:
    """The whole command, median of five."""
    times_s = [timed(lambda: run.command("status")) for _ in range(5)]
    return Measurement(name="status", value=statistics.median(times_s), unit="s", target=0.3)


def measure_restarts(run: OwnRun) -> list[Measurement]:
    """The whole command for each torch actor, median; the new generation is ready when it returns."""
    measurements = []
    for actor in sorted({*torch_actors()} - {"memory"}):
        times_s = [run.command("restart", actor)[0] for _ in range(_NUM_RESTARTS)]
        measurements.append(Measurement(name=f"restart {actor}", value=statistics.median(times_s), unit="s", target=1))
    return measurements


def measure_idle(run: OwnRun) -> Measurement:
    """Processor use of all processes together, in percent of one."""
    pids = processes_of(run.report())
    time.sleep(_SETTLE_S)
    before = {pid: cpu_seconds(pid) for pid in pids}
    start_s = time.monotonic()
    time.sleep(_IDLE_S)
    elapsed_s = time.monotonic() - start_s
    used_s = sum((cpu_seconds(pid) or 0.0) - (earlier or 0.0) for pid, earlier in before.items())
    return Measurement(name="idle, all processes", value=100 * used_s / elapsed_s, unit="% CPU", target=3)


def read_memory(run: OwnRun) -> dict[str, tuple[int, int]]:
    """(PSS, private dirty) by process; those without a name of their own together."""
    memory: dict[str, tuple[int, int]] = {}
    for pid, name in processes_of(run.report()).items():
        pss, dirty = memory_of(pid)
        before = memory.get(name, (0, 0))
        memory[name] = before[0] + pss, before[1] + dirty
    return memory


def measure_shared_weights(run: OwnRun, config: RuntimeConfig) -> list[Measurement]:
    """With a checkpoint that is large compared to a process: prefill and decode map its weights, neither has its own."""
    ready_s = run.up(config)
    memory = read_memory(run)
    dirty = sum(memory[name][1] for name in ("prefill", "decode") if name in memory) / MEBI
    run.down()
    return [
        Measurement(name="larger model: up to ready", value=ready_s, unit="s"),
        Measurement(name="larger model: whole run, PSS", value=_sum(memory, 0), unit="MiB"),
        Measurement(name="larger model: private dirty of prefill and decode", value=dirty, unit="MiB", target=150),
    ]


def _sum(memory: dict[str, tuple[int, int]], which: int) -> float:
    return sum(values[which] for values in memory.values()) / MEBI


def show(console: Console, bench: StartupBench) -> None:
    """Figures beside targets, then memory by process."""
    verdict = {None: "", True: "reached", False: "MISSED"}
    rows = [
        [
            measured.name,
            f"{measured.value:.2f} {measured.unit}",
            "" if measured.target is None else f"<= {measured.target:g} {measured.unit}",
            verdict[measured.is_reached],
        ]
        for measured in bench.measurements
    ]
    show_table(console, "start-up and idle", ["", "measured", "target", ""], rows)
    rows = [[name, f"{pss / MEBI:.0f}", f"{dirty / MEBI:.0f}"] for name, (pss, dirty) in sorted(bench.memory.items())]
    show_table(console, "memory, MiB", ["process", "PSS", "private dirty"], rows)
