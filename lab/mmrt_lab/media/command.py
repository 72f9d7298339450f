"""``mmrt bench media``: decoding video and pictures beside PyAV, OpenCV and torchcodec, where installed.

Every trial is a process of its own; the ways that are compared take turns, and medians are compared. Clips are made on the spot and
kept where ``--clips`` says. Tasks: frames sampled at one per second, scaled to 224 x 224; all frames, decoded and dropped, beside half
of the processor time that decoding on one thread takes; two videos at once beside one after the other; memory over a long video beside
a short one; a JPEG of 12 megapixels. With ``--corpus`` 100 videos of all kinds instead.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from mmrt.bench.environment import Environment, read_environment
from mmrt.bench.output import JSON_HELP, Tell, progress, run_bench
from mmrt.bench.render import show_table
from mmrt.bench.serve.errors import BenchError

from .clips import CODECS, kept_or_passing, make_clips, repeat_clip, write_jpeg
from .corpus import EDITION, LONGEST_S, NUM_FILES, SHORTEST_S
from .corpus_speed import CorpusBench, measure_corpus, show_corpus
from .methods import Trial, is_available, jpeg_decoders
from .trials import run_apart

SAMPLED_TARGETS = {"h264": 2.0, "hevc": 2.2, "vp9": 1.2}
FULL_TARGET = 1.15
AT_ONCE_TARGET = 1.0
JPEG_TARGET = 1.0
NOISE = 1.03  # two runs of the same thing differ by that much
PEERS = ("pyav", "opencv", "torchcodec")
_JPEG_SIZE = (3000, 4000)
_EPILOGUE = (
    "The corpus is FlashCodec's workload at a size that fits: the speed on each file beside PyAV and torchcodec, and whether all "
    "frames are those of PyAV in sequence. It takes minutes to make and to decode; --longest makes it smaller."
)


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison: the median of each way, and the figure that the target is for."""

    name: str
    medians: dict[str, Trial]
    figure: str
    value: float
    target: float | None = None
    is_met: bool | None = None


class MediaBench(msgspec.Struct, frozen=True, kw_only=True):
    environment: Environment
    seconds: int
    height: int
    width: int
    rounds: int
    absent: list[str]  # of the peers
    tasks: list[Task]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 when something could not be measured or a target was missed."""
    parser = argparse.ArgumentParser(prog="mmrt bench media", description="Decoding beside other libraries.", epilog=_EPILOGUE)
    add = parser.add_argument
    add("--codecs", nargs="+", choices=list(CODECS), default=list(CODECS), help="of the clips (all)")
    add("--seconds", type=int, default=60, help="of a clip (%(default)s)")
    add("--height", type=int, default=720, help="of its frames, 16:9 (%(default)s)")
    add("--rounds", type=int, help="of every comparison (5; corpus 1)")
    add("--long", type=int, default=20, metavar="N", help="the long video is the clip N times (%(default)s)")
    add("--corpus", action="store_true", help="100 videos of all kinds instead, from 2 s to 20 minutes")
    add("--files", type=int, default=NUM_FILES, metavar="N", help="of the corpus (%(default)s)")
    add("--longest", type=float, default=LONGEST_S, metavar="SECONDS", help="of the corpus (%(default)g)")
    add("--seed", type=int, default=0, metavar="N", help="of the corpus (%(default)s)")
    add("--clips", type=Path, metavar="DIR", help="where clips are kept; made and removed otherwise (corpus: ~/.cache/mmrt)")
    add("--json", type=Path, metavar="FILE", help=JSON_HELP)
    options = parser.parse_args(argv)
    if options.rounds is None:
        options.rounds = 1 if options.corpus else 5
    if min(options.seconds, options.rounds, options.long, options.files) < 1 or options.height < 36 or options.seed < 0:
        parser.error("--seconds, --rounds, --long and --files must be at least 1, --height at least 36, --seed at least 0")
    if not SHORTEST_S <= options.longest <= 7200:
        parser.error(f"--longest {options.longest:g} is not from {SHORTEST_S:g} to 7200")
    if options.corpus:
        corpus = run_bench("media", options.json, (OSError, ValueError), lambda console: _corpus(console, options), show_corpus)
        return 0 if corpus is not None and corpus.is_right else 1
    bench = run_bench("media", options.json, (BenchError, OSError), lambda console: measure(console, options), show)
    return 0 if bench is not None and all(task.is_met is not False for task in bench.tasks) else 1


def _corpus(console: Console, options: argparse.Namespace) -> CorpusBench:
    """PyAV's errors are subclasses of these. Raises: OSError, ValueError."""
    directory = options.clips or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmrt" / f"corpus-{EDITION}"
    return measure_corpus(console, directory, options.seed, options.files, options.longest, options.rounds)


def measure(console: Console, options: argparse.Namespace) -> MediaBench:
    """Make the clips and do all tasks. Raises: BenchError, OSError."""
    codecs, num_seconds, rounds, num_repeats, height = options.codecs, options.seconds, options.rounds, options.long, options.height
    width = height * 16 // 9 // 2 * 2
    tasks = []
    with progress(console) as tell, kept_or_passing(options.clips) as directory:
        clips = make_clips(directory, codecs, num_seconds, height, width, tell)
        first = clips[codecs[0]]
        long = repeat_clip(first, directory / f"long-{num_repeats}x-{first.name}", num_repeats, num_seconds)
        jpeg = write_jpeg(directory / f"picture-{height}.jpg", *(_JPEG_SIZE if height >= 720 else (height, width)))
        for codec, clip in clips.items():
            tasks.append(_sampled(codec, clip, num_seconds, rounds, tell))
            tasks.append(_full(codec, clip, rounds, tell))
        tasks.append(_at_once(first, num_seconds, rounds, tell))
        tasks.append(_memory(first, long, num_seconds, num_repeats, tell))
        tell("JPEG")
        tasks.append(_jpeg(jpeg, rounds))
    return MediaBench(
        environment=read_environment(),
        seconds=num_seconds,
        height=height,
        width=width,
        rounds=rounds,
        absent=[peer for peer in PEERS if not is_available(peer)],
        tasks=tasks,
    )


def _sampled(codec: str, clip: Path, num_seconds: int, rounds: int, tell: Tell) -> Task:
    peers = [peer for peer in PEERS if is_available(peer)]
    medians = compare({name: (name, num_seconds, [clip]) for name in ["mmrt", *peers]}, rounds, f"{codec}, sampled", tell)
    fastest = min((peer for peer in peers if peer in medians), key=lambda peer: medians[peer].wall_s)
    value, target = medians[fastest].wall_s / medians["mmrt"].wall_s, SAMPLED_TARGETS[codec]
    figure = f"times faster than {fastest}"
    return Task(name=f"{codec}, sampled", medians=medians, figure=figure, value=value, target=target, is_met=value >= target)


def _full(codec: str, clip: Path, rounds: int, tell: Tell) -> Task:
    """The floor is exact on two processors; on others their number takes the place of two."""
    floor = "ffmpeg" if is_available("ffmpeg") else "pyav single"
    peers = [peer for peer in PEERS if is_available(peer)]
    medians = compare({name: (name, 0, [clip]) for name in ["mmrt", floor, *peers]}, rounds, f"{codec}, all", tell)
    num_cpus = read_environment().num_cpus
    value = medians["mmrt"].wall_s / (medians[floor].cpu_s / num_cpus)
    figure = f"of 1/{num_cpus} of the CPU time of {floor}"
    return Task(name=f"{codec}, all", medians=medians, figure=figure, value=value, target=FULL_TARGET, is_met=value <= FULL_TARGET)


def _at_once(clip: Path, num_seconds: int, rounds: int, tell: Tell) -> Task:
    ways = {name: (method, num_seconds, [clip, clip]) for name, method in (("one by one", "mmrt"), ("at once", "mmrt at once"))}
    medians = compare(ways, rounds, "two videos", tell)
    value = medians["at once"].wall_s / medians["one by one"].wall_s
    is_met = value <= AT_ONCE_TARGET * NOISE
    return Task(name="two videos", medians=medians, figure="of one by one", value=value, target=AT_ONCE_TARGET, is_met=is_met)


def _memory(clip: Path, long: Path, num_seconds: int, num_repeats: int, tell: Tell) -> Task:
    ways = {"short": ("mmrt", num_seconds, [clip]), "long": ("mmrt", num_seconds * num_repeats, [long])}
    medians = compare(ways, 1, "memory", tell)
    value = medians["long"].peak_bytes / (1 << 20)
    return Task(name=f"{num_seconds * num_repeats} s of video", medians=medians, figure="MiB beyond the idle process", value=value)


def compare(ways: dict[str, tuple[str, int, list[Path]]], rounds: int, task: str, tell: Tell) -> dict[str, Trial]:
    """The median trial of each way, given as (method, frames, files). They take turns; a peer that fails is left out."""
    trials: dict[str, list[Trial]] = {name: [] for name in ways}
    for number in range(rounds):
        for name, (method, num_wanted, files) in ways.items():
            tell(f"{task}: {name}, {number + 1} of {rounds}")
            try:
                trials[name].append(run_apart("methods", [method, str(num_wanted), *map(str, files)], Trial, method))
            except BenchError as error:
                if method not in PEERS:
                    raise
                print(f"mmrt bench media: {error}", file=sys.stderr)
    return {name: _median(of) for name, of in trials.items() if of}


def _median(trials: list[Trial]) -> Trial:
    return Trial(
        wall_s=statistics.median(trial.wall_s for trial in trials),
        cpu_s=statistics.median(trial.cpu_s for trial in trials),
        num_frames=trials[0].num_frames,
        peak_bytes=max(trial.peak_bytes for trial in trials),
    )


def _jpeg(path: Path, rounds: int) -> Task:
    decoders = jpeg_decoders(path.read_bytes())
    trials: dict[str, list[Trial]] = {name: [] for name in decoders}
    for number in range(3 * rounds + 1):
        for name, decode in decoders.items():
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            decode()
            trial = Trial(wall_s=time.perf_counter() - wall_s, cpu_s=time.process_time() - cpu_s, num_frames=1, peak_bytes=0)
            trials[name] += [trial] if number else []  # the first time is warm-up
    medians = {name: _median(of) for name, of in trials.items()}
    fastest = min((name for name in medians if name != "mmrt"), key=lambda name: medians[name].wall_s)
    value = medians[fastest].wall_s / medians["mmrt"].wall_s
    figure = f"times as fast as {fastest}"
    return Task(name="JPEG", medians=medians, figure=figure, value=value, target=JPEG_TARGET, is_met=value * NOISE >= JPEG_TARGET)


def _trial_rows(bench: MediaBench) -> list[list[str]]:
    return [
        [task.name, way, f"{trial.wall_s:.3f}", f"{trial.cpu_s:.3f}", str(trial.num_frames), f"{trial.peak_bytes / (1 << 20):.0f}"]
        for task in bench.tasks
        for way, trial in task.medians.items()
    ]


def _target_rows(bench: MediaBench) -> list[list[str]]:
    verdicts = {None: "", True: "met", False: "missed"}
    return [
        [task.name, task.figure, f"{task.value:.2f}", "" if task.target is None else f"{task.target:.2f}", verdicts[task.is_met]]
        for task in bench.tasks
    ]


def show(console: Console, bench: MediaBench) -> None:
    """Show each trial beside its peers: medians and targets."""
    for name in bench.absent:
        console.print(f"{name} is not installed, and not compared with", style="yellow")
    show_table(console, "medians", ["task", "way", "wall s", "CPU s", "frames", "memory MiB"], _trial_rows(bench))
    show_table(console, "targets", ["task", "figure", "measured", "target", ""], _target_rows(bench))
