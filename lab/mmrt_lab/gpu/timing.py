"""Time on the device: CUDA events around work whose input is not in the L2 cache, in a CUDA graph unless told otherwise."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .results import Row

Launch = Callable[[], object]

_FLUSH_BYTES = 512 * 2**20  # several times any L2 cache; reading it takes longer than the host needs for a launch
_WARM_READS = 300  # of the flushed memory before a measurement: clocks fall while the host compiles
_READS_PER_LAUNCH = 4  # of a graph: the host needs a few tenths of a millisecond for one of some hundred kernels
_MEASURE_US = 200_000.0
_FEWEST, _MOST = 5, 50


class Timed(NamedTuple):
    """``time_us`` of one launch, the median. ``first_s``: wall time of the very first one, which compiles what was not compiled."""

    time_us: float
    first_s: float

    def row(self, **more: Any) -> Row:
        """As a row, with these fields besides."""
        return Row(time_us=self.time_us, first_s=self.first_s, **more)

    def moved(self, num_bytes: int, **more: Any) -> Row:
        """With the rate at which so many bytes were moved."""
        return self.row(rate=num_bytes / self.time_us / 1e3, unit="GB/s", **more)

    def computed(self, flops: int, **more: Any) -> Row:
        """With the rate at which so many operations were done."""
        return self.row(rate=flops / self.time_us / 1e6, unit="TFLOP/s", **more)


class Beside(NamedTuple):
    """Microseconds of one launch of the first work with the second beside it, and until both are done."""

    first_us: float
    both_us: float


class Clock:
    """Times launches on ``device``, a CUDA device that is the current one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flush = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.float32, device=device)
        self._sum = torch.zeros((), dtype=torch.float32, device=device)

    def time(self, launches: Sequence[Launch], *, in_graph: bool = True) -> Timed:
        """The median time of one of ``launches``, which run one after another.

        Several that read different memory are for short ones: events and the start of a graph take a few microseconds together.
        Outside a graph the host's part counts where it is longer than the reading of the flushed memory, about 0.1 ms.
        """
        torch.cuda.synchronize()
        begun_s = time.perf_counter()
        launches[0]()
        torch.cuda.synchronize()
        first_s = time.perf_counter() - begun_s
        run = capture(launches).replay if in_graph else _one_by_one(launches)
        for _ in range(_WARM_READS):
            self._read()
        estimate_us = statistics.median(self._measure(run, 3))
        num_repeats = int(min(max(_MEASURE_US / max(estimate_us, 1.0), _FEWEST), _MOST))
        return Timed(statistics.median(self._measure(run, num_repeats)) / len(launches), first_s)

    def beside(self, first: Launch, num_first: int, second: Launch, num_second: int) -> Beside:
        """Two works at once, each a graph that is replayed so many times on its own stream; medians.

        The device reads the flushed memory until the host has launched everything.
        """
        graphs = (capture([first]), num_first), (capture([second]), num_second)
        streams = [torch.cuda.Stream(self.device) for _ in graphs]  # type: ignore[no-untyped-call]
        times: list[tuple[float, float]] = []
        for _ in range(_FEWEST):
            start, ends, both = _event(), [_event() for _ in graphs], _event()
            for _ in range(_READS_PER_LAUNCH * (num_first + num_second)):
                self._read()
            start.record()
            for stream, end, (graph, count) in zip(streams, ends, graphs, strict=True):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    for _ in range(count):
                        graph.replay()
                    end.record()
            for stream in streams:
                torch.cuda.current_stream().wait_stream(stream)
            both.record()
            torch.cuda.synchronize()
            times.append((start.elapsed_time(ends[0]) * 1000 / num_first, start.elapsed_time(both) * 1000))
        return Beside(*(statistics.median(column) for column in zip(*times, strict=True)))

    def _measure(self, run: Launch, num_repeats: int) -> list[float]:
        """Microseconds of each repetition."""
        events = [(_event(), _event()) for _ in range(num_repeats)]
        for start, end in events:
            self._read()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1000 for start, end in events]

    def _read(self) -> None:
        """Fill the L2 cache with something else. Read, not written: dirty lines would be written back during the work that is timed."""
        torch.sum(self._flush, dim=0, out=self._sum)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def capture(launches: Sequence[Launch]) -> torch.cuda.CUDAGraph:
    """A graph of the launches, after a first run of them on another stream. The memory that they use must outlive the graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):  # its own, and with it its own workspaces: two graphs may be replayed at once
        for launch in launches:
            launch()
    torch.cuda.synchronize()
    return graph


def _one_by_one(launches: Sequence[Launch]) -> Launch:
    def run() -> None:
        for launch in launches:
            launch()

    return run
