"""The figures of ``mmrt bench peers`` and their table (pure): medians of both sides, and their ratios beside what is to be reached."""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from mmrt.bench.environment import Environment

from .party import CONTEXT_TOKENS, Job, Time

_HALVES = ("bfloat16", "float16")


class Median(msgspec.Struct, frozen=True):
    """Of the wall time and of the processor time, each by itself."""

    wall_ms: float
    cpu_ms: float


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One job of both sides. The ratios are mmrt's time to the peer's: below 1, mmrt is faster."""

    job: Job
    own: Median
    peer: Median
    wall_ratio: float
    cpu_ratio: float
    goal: float | None  # for ``cpu_ratio``


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Weights in one format, computed in ``dtype``, beside the peer's of the same width."""

    weights: str
    dtype: str
    peer_weights: str
    correlation: float  # of both sides' logits after the same prompt: near 1, or they do not compute the same model
    figures: list[Figure]


class PeersBench(msgspec.Struct, frozen=True, kw_only=True):
    """``variables``: those of the environment that limit instructions."""

    environment: Environment
    checkpoint: str
    num_rounds: int
    variables: dict[str, str]
    builds: list[str]
    pairs: list[Pair]


class Times(NamedTuple):
    """Of all rounds of a job."""

    own: list[Time]
    peer: list[Time]


def figures_of(weights: str, times: Mapping[Job, Times]) -> list[Figure]:
    """One figure for each job."""
    figures = []
    for job, (own_times, peer_times) in times.items():
        own, peer = _median(own_times), _median(peer_times)
        figures.append(
            Figure(
                job=job,
                own=own,
                peer=peer,
                wall_ratio=own.wall_ms / peer.wall_ms,
                cpu_ratio=own.cpu_ms / peer.cpu_ms,
                goal=goal(weights, job.num_sequences),
            )
        )
    return figures


def _median(times: Sequence[Time]) -> Median:
    return Median(1000 * statistics.median(time.wall_s for time in times), 1000 * statistics.median(time.cpu_s for time in times))


def goal(weights: str, num_sequences: int) -> float | None:
    """The ratio of processor times that is to be reached with AVX2; None where there is none."""
    if num_sequences:
        return None if weights == "float32" else {1: 1.1, 4: 0.9, 16: 0.8}[num_sequences]
    return 0.9 if weights in _HALVES else {"int8": 0.5}.get(weights)


def rows_of(pair: Pair) -> list[list[str]]:
    """Rows of the table."""
    rows = []
    for figure in pair.figures:
        job = figure.job
        name = f"step, {job.num_sequences} seq" if job.num_sequences else f"prefill {CONTEXT_TOKENS}"
        times = [f"{time:.0f}" for side in (figure.own, figure.peer) for time in (side.wall_ms, side.cpu_ms)]
        ratios = [f"{figure.wall_ratio:.2f}", f"{figure.cpu_ratio:.2f}", "" if figure.goal is None else f"{figure.goal:g}"]
        rows.append([name, str(job.num_threads), *times, *ratios])
    return rows
