"""``mmrt bench video``: the time to the first token of a long video beside its stages alone: one pipeline, or one after the other?

A run is started, and asked about a video of a minute; decoding, encoding and prefill of the same video are then done alone. Reported:
TTFT; the sum of the stages, which is what a server without a pipeline takes; the floor, which is the larger of the slowest stage alone
and of all processor seconds that the run spent until the first token, divided by the number of processors. ``--plot`` draws the stages.
"""

import argparse
import asyncio
import base64
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console

from mmrt.bench.environment import Environment, read_environment
from mmrt.bench.output import JSON_HELP, Tell, progress, run_bench
from mmrt.bench.own_run import OwnRun, OwnRunError, own_run, processes_of
from mmrt.bench.render import show_table
from mmrt.bench.serve.client import find_model, open_session, stream_chat
from mmrt.bench.serve.errors import BenchError
from mmrt.bench.serve.plot import PlotError
from mmrt.bench.serve.record import Record
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.config.sections import MemorySection, ModelSection, ServerSection
from mmrt.runtime.supervisor.processes import cpu_seconds

from .clips import kept_or_passing, make_clips
from .trace_stages import StageSlice, overlap_s, plot_stages, stage_slices
from .trials import run_apart
from .video_stages import STAGES, StageAlone

TARGET = 1.2
_TIMEOUT_S = 1800.0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One request. ``slices`` are what the stages did for it, in seconds since it was sent."""

    ttft_s: float
    cpu_s: float
    num_prompt_tokens: int
    slices: list[StageSlice]


class VideoBench(msgspec.Struct, frozen=True, kw_only=True):
    environment: Environment
    checkpoint: str
    clip: str
    seconds: int
    ttft_s: float  # median
    cpu_s: float  # median, of all processes until the first token
    overlap_s: float  # median: how long at least two stages were at work at once
    num_prompt_tokens: int
    alone: dict[str, StageAlone]  # medians
    floor_s: float
    ratio: float
    is_met: bool

    @property
    def sequential_s(self) -> float:
        return sum(stage.wall_s for stage in self.alone.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 when it could not be measured or the target was missed."""
    parser = argparse.ArgumentParser(prog="mmrt bench video", description="TTFT of a long video beside its stages alone.")
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="DIR", help="a checkpoint of a family that takes video")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    add("--seconds", type=int, default=60, help="of the video (%(default)s)")
    add("--height", type=int, default=720, help="of its frames, 16:9 (%(default)s)")
    add("--fps", type=float, default=1.0, help="at which frames are sampled (%(default)s)")
    add("--max-pixels", type=int, default=224 * 224, help="of a frame (%(default)s)")
    add("--rounds", type=int, default=3, help="of everything (%(default)s)")
    add("--clips", type=Path, metavar="DIR", help="where the clip is kept; made and removed otherwise")
    add("--plot", type=Path, metavar="FILE", help="draw the last request's stages")
    add("--json", type=Path, metavar="FILE", help=JSON_HELP)
    options = parser.parse_args(argv)
    if options.seconds < 1 or options.rounds < 1 or options.height < 36:
        parser.error("--seconds and --rounds must be at least 1, --height at least 36")
    errors = BenchError, OwnRunError, PlotError, OSError, ValueError
    bench = run_bench("video", options.json, errors, lambda console: measure(console, options), show)
    return 0 if bench is not None and bench.is_met else 1


def measure(console: Console, options: argparse.Namespace) -> VideoBench:
    """Everything, and the picture that is asked for. Raises: BenchError, OwnRunError, PlotError, OSError, ValueError."""
    checkpoint = options.checkpoint.absolute()
    environment = read_environment()
    with progress(console) as tell, kept_or_passing(options.clips) as directory:
        clip = make_clips(directory, ["h264"], options.seconds, options.height, options.height * 16 // 9 // 2 * 2, tell)["h264"]
        with own_run() as run:
            tell("starting a run")
            model = ModelSection(path=str(checkpoint), dtype=options.dtype)
            memory = MemorySection(prefix_cache=False, embedding_cache=False)  # the same clip is asked about again and again
            run.up(RuntimeConfig(model=model, memory=memory, server=ServerSection(port=0)))
            answers = uvloop.run(_ask_again_and_again(run, clip, _limits(options), options.rounds, tell))
        alone = {stage: _alone(stage, checkpoint, clip, options, tell) for stage in STAGES}
    if options.plot is not None:
        title = f"{checkpoint.name}: {options.seconds} s of video"
        plot_stages(options.plot, title, answers[-1].slices, answers[-1].ttft_s)
    ttft_s, cpu_s = (statistics.median(values) for values in zip(*((a.ttft_s, a.cpu_s) for a in answers), strict=True))
    floor_s = max(*(stage.wall_s for stage in alone.values()), cpu_s / environment.num_cpus)
    return VideoBench(
        environment=environment,
        checkpoint=checkpoint.name,
        clip=clip.name,
        seconds=options.seconds,
        ttft_s=ttft_s,
        cpu_s=cpu_s,
        overlap_s=statistics.median(overlap_s(answer.slices) for answer in answers),
        num_prompt_tokens=answers[0].num_prompt_tokens,
        alone=alone,
        floor_s=floor_s,
        ratio=ttft_s / floor_s,
        is_met=ttft_s <= TARGET * floor_s,
    )


def _limits(options: argparse.Namespace) -> dict[str, float]:
    return {"fps": options.fps, "max_pixels": options.max_pixels}


async def _ask_again_and_again(run: OwnRun, clip: Path, limits: dict[str, float], rounds: int, tell: Tell) -> list[Answer]:
    """The first answer warms everything up, budgets included, and does not count."""
    url = run.report().endpoint
    async with open_session(_TIMEOUT_S) as session:
        body = _body(await find_model(session, url), clip, limits)
        answers = []
        for number in range(rounds + 1):
            tell(f"asking: {number} of {rounds}" if number else "asking, to warm up")
            pids = processes_of(run.report())
            before_s = _cpu_s(pids)
            record = Record(index=number, group="video", scheduled_s=time.monotonic())
            await stream_chat(session, url, body, record)
            cpu_s = _cpu_s(pids) - before_s
            if record.error or record.ttft_s is None:
                raise BenchError(record.error or "no token came")
            trace = await asyncio.to_thread(run.command, "trace", "--out", "-")
            slices = stage_slices(msgspec.json.decode(trace[1]), record.sent_s, record.end_s)
            answers.append(Answer(ttft_s=record.ttft_s, cpu_s=cpu_s, num_prompt_tokens=record.num_prompt_tokens or 0, slices=slices))
    return answers[1:]


def _body(model: str, clip: Path, limits: dict[str, float]) -> bytes:
    url = f"data:video/mp4;base64,{base64.b64encode(clip.read_bytes()).decode()}"
    content = [{"type": "video_url", "video_url": {"url": url}, **limits}, {"type": "text", "text": "What happens?"}]
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 1, "temperature": 0, "stream": True}
    return msgspec.json.encode({**body, "stream_options": {"include_usage": True}})


def _cpu_s(pids: dict[int, str]) -> float:
    return sum(cpu_seconds(pid) or 0.0 for pid in pids)


def _alone(stage: str, checkpoint: Path, clip: Path, options: argparse.Namespace, tell: Tell) -> StageAlone:
    """The median of so many processes. Raises: BenchError."""
    arguments = [stage, str(checkpoint), options.dtype, str(clip), "--fps", str(options.fps), "--max-pixels", str(options.max_pixels)]
    trials = []
    for number in range(options.rounds):
        tell(f"{stage} alone: {number + 1} of {options.rounds}")
        trials.append(run_apart("video_stages", arguments, StageAlone, f"{stage} alone"))
    return StageAlone(
        wall_s=statistics.median(trial.wall_s for trial in trials),
        cpu_s=statistics.median(trial.cpu_s for trial in trials),
        num_units=trials[0].num_units,
    )


def show(console: Console, bench: VideoBench) -> None:
    """Stages, then the whole beside its floor."""
    rows = [[name, f"{stage.wall_s:.2f}", f"{stage.cpu_s:.2f}", str(stage.num_units)] for name, stage in bench.alone.items()]
    rows.append(["one after the other", f"{bench.sequential_s:.2f}", f"{sum(stage.cpu_s for stage in bench.alone.values()):.2f}", ""])
    rows.append(["TTFT", f"{bench.ttft_s:.2f}", f"{bench.cpu_s:.2f}", str(bench.num_prompt_tokens)])
    show_table(console, f"{bench.checkpoint}, {bench.clip}", ["", "wall s", "CPU s", "units"], rows)
    verdict = "met" if bench.is_met else "missed"
    console.print(f"TTFT is {bench.ratio:.2f} times the floor of {bench.floor_s:.2f} s (target {TARGET:.2f}: {verdict})")
    console.print(f"two or more stages worked at once for {bench.overlap_s:.2f} s", style="dim")
