"""``mmrt bench experts``: what a layer's experts cost in a decode step on the CPU, in one call for each matrix and one by one.

One layer with random weights. Routers' logits are noise, so every step chooses other experts. Both ways take turns on the same rows.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from torch import Tensor

from mmrt.bench.environment import Environment, read_environment
from mmrt.bench.output import JSON_HELP, run_bench
from mmrt.bench.render import show_table
from mmrt.cpu_kernels import layer_kernels
from mmrt.models.architecture import MoeConfig
from mmrt.models.checkpoint.narrowing import narrow
from mmrt.models.checkpoint.weight_specs import scales_of
from mmrt.models.lm.experts import Experts, Routes, route, sum_by_expert
from mmrt.models.lm.matrices import matrix_of

FORMATS = ("bfloat16", "float16", "float32", "int8", "int8g", "int4")
_GROUP = 32


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """``width``: of an expert. ``weights``: their format; activations are in bfloat16 where the experts are in 8 bits or fewer or in
    bfloat16, else in float32."""

    num_experts: int
    top_k: int
    hidden: int
    width: int
    weights: str


class ExpertCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step's experts in one layer, medians, of ``chosen`` experts with ``num_bytes`` on average. ``ratio``: the median of
    before / after."""

    rows: int
    chosen: float
    num_bytes: float
    before_s: float
    after_s: float
    ratio: float


class ExpertBench(msgspec.Struct, frozen=True, kw_only=True):
    environment: Environment
    shape: Shape
    num_threads: int
    num_steps: int
    costs: list[ExpertCost]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 when nothing could be measured."""
    parser = argparse.ArgumentParser(prog="mmrt bench experts", description="What a layer's experts cost in a decode step.")
    add = parser.add_argument
    add("--experts", type=int, default=128, help="of the layer (%(default)s)")
    add("--chosen", type=int, default=8, help="of each row (%(default)s)")
    add("--hidden", type=int, default=2048, help="size, a multiple of 64 (%(default)s)")
    add("--width", type=int, default=768, help="of an expert, a multiple of 64 (%(default)s)")
    add("--weights", choices=FORMATS, default=FORMATS[0], help="format of the experts (%(default)s)")
    add("--rows", type=int, nargs="+", default=[1, 4, 16], help="of a step (1 4 16)")
    add("--steps", type=int, default=20, help="of each number of rows (%(default)s)")
    add("--threads", type=int, default=1, help="with one, processor time is measured (%(default)s)")
    add("--json", type=Path, metavar="FILE", help=JSON_HELP)
    options = parser.parse_args(argv)
    for name, value in (("steps", options.steps), ("threads", options.threads), *(("rows", rows) for rows in options.rows)):
        if value < 1:
            parser.error(f"--{name} {value} must be at least 1")
    for name, value in (("hidden", options.hidden), ("width", options.width)):
        if value < 1 or value % 64:
            parser.error(f"--{name} {value} must be a multiple of 64")
    if not 1 <= options.chosen <= options.experts:
        parser.error(f"--chosen {options.chosen} must be from 1 to --experts {options.experts}")
    shape = Shape(
        num_experts=options.experts, top_k=options.chosen, hidden=options.hidden, width=options.width, weights=options.weights
    )
    bench = run_bench("experts", options.json, (), lambda _: measure(shape, options.rows, options.steps, options.threads), show)
    return 1 if bench is None else 0


def measure(shape: Shape, rows: Sequence[int], num_steps: int, num_threads: int) -> ExpertBench:
    """Everything."""
    environment, before = read_environment(), torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        layer = _Layer(shape)
        clock = time.thread_time if num_threads == 1 else time.perf_counter  # of a thread: others may be busy beside it
        costs = [_measure(layer, num_rows, num_steps, clock) for num_rows in rows]
    finally:
        torch.set_num_threads(before)
    return ExpertBench(environment=environment, shape=shape, num_threads=num_threads, num_steps=num_steps, costs=costs)


class _Layer:
    def __init__(self, shape: Shape) -> None:
        experts, hidden, width = shape.num_experts, shape.hidden, shape.width
        self.config = MoeConfig(num_experts=experts, top_k=shape.top_k, expert_size=width)
        self.hidden = hidden
        self.dtype = torch.float32 if shape.weights in ("float32", "float16") else torch.bfloat16
        generator, stored = torch.Generator().manual_seed(0), dict[str, Tensor]()
        for name, rows, columns in (("gate_up", 2 * width, hidden), ("down", hidden, width)):
            for part, dtype, size in _parts(shape.weights, name, columns):
                stored[part] = torch.empty(experts * rows, *size, dtype=dtype)
            for first in range(0, experts * rows, rows):  # an expert at a time: all in float32 would take gigabytes
                values = torch.randn(rows, columns, generator=generator).mul_(columns**-0.5)
                narrow(values, *(stored[part][first : first + rows] for part, _, _ in _parts(shape.weights, name, columns)))
        self.experts = Experts(self.config, matrix_of(stored, "gate_up"), matrix_of(stored, "down"))
        self.expert_bytes = sum(values.nbytes for values in stored.values()) / experts
        self._has_kernels = layer_kernels.has_kernels(self.dtype, hidden, width)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        if self._has_kernels:
            return layer_kernels.silu_mul(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return torch.nn.functional.silu(gate).mul_(up)

    def at_once(self, x_NH: Tensor, routes: Routes) -> Tensor:
        return sum_by_expert(x_NH, routes, self.experts, self.silu_mul, alike=True)

    def one_by_one(self, x_NH: Tensor, routes: Routes) -> Tensor:
        """Two products for each expert that a row chose."""
        of_pairs, order = routes.numbers.flatten().sort(stable=True)
        tokens, weights = order // self.config.top_k, routes.weights.flatten()[order].unsqueeze(1)
        found, counts = torch.unique_consecutive(of_pairs, return_counts=True)
        sizes, total = counts.tolist(), torch.zeros(x_NH.shape)
        num_gates, num_outs = (matrix.num_rows // self.config.num_experts for matrix in (self.experts.gate_up, self.experts.down))
        for number, its, share in zip(found.tolist(), torch.split(tokens, sizes), torch.split(weights, sizes), strict=True):
            gate_up = self.experts.gate_up.rows(number * num_gates, num_gates)
            down = self.experts.down.rows(number * num_outs, num_outs)
            total.index_add_(0, its, down.product(self.silu_mul(gate_up.product(x_NH[its]))).float().mul_(share))
        return total


def _parts(weights: str, name: str, columns: int) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Tensors that a matrix is kept as: name, dtype, and shape of a row."""
    if weights == "int4":
        return [(name, torch.uint8, (columns // 2,)), (scales_of(name), torch.bfloat16, (columns // _GROUP, 2))]
    if weights == "int8g":
        return [(name, torch.int8, (columns,)), (scales_of(name), torch.bfloat16, (columns // _GROUP,))]
    if weights == "int8":
        return [(name, torch.int8, (columns,)), (scales_of(name), torch.bfloat16, ())]
    return [(name, getattr(torch, weights), (columns,))]


def _measure(layer: _Layer, num_rows: int, num_steps: int, clock: Callable[[], float]) -> ExpertCost:
    generator = torch.Generator().manual_seed(num_rows)
    ways = layer.one_by_one, layer.at_once
    taken: tuple[list[float], list[float]] = [], []
    chosen = list[int]()
    for step in range(num_steps + 1):
        x = torch.randn(num_rows, layer.hidden, generator=generator).to(layer.dtype)
        routes = route(torch.randn(num_rows, layer.config.num_experts, generator=generator).to(layer.dtype), layer.config)
        for number in (0, 1) if step % 2 else (1, 0):
            began_s = clock()
            ways[number](x, routes)
            if step:  # the first one warms up
                taken[number].append(clock() - began_s)
        chosen.append(len(set(routes.numbers.flatten().tolist())))
    before, after = taken
    return ExpertCost(
        rows=num_rows,
        chosen=statistics.mean(chosen[1:]),
        num_bytes=statistics.mean(chosen[1:]) * layer.expert_bytes,
        before_s=statistics.median(before),
        after_s=statistics.median(after),
        ratio=statistics.median(one / other for one, other in zip(before, after, strict=True)),
    )


def show(console: Console, bench: ExpertBench) -> None:
    """The table."""
    rows = [
        [
            str(cost.rows),
            f"{cost.chosen:.1f}",
            f"{cost.num_bytes / 2**20:.0f}",
            *(f"{1000 * seconds:.2f}" for seconds in (cost.before_s, cost.after_s)),
            f"{cost.ratio:.2f}",
            f"{cost.num_bytes / cost.after_s / 1e9:.1f}",
        ]
        for cost in bench.costs
    ]
    shape, time_of = bench.shape, "processor time" if bench.num_threads == 1 else f"{bench.num_threads} threads"
    title = (
        f"{shape.top_k} of {shape.num_experts} experts, {shape.hidden} x {shape.width}, {shape.weights}: {bench.num_steps} steps, "
        f"{time_of}, medians"
    )
    headings = ["rows", "experts", "MiB read", "one by one, ms", "at once, ms", "ratio", "GB/s"]
    show_table(console, title, headings, rows)
