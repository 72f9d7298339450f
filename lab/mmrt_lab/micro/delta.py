"""``mmrt bench delta``: what a layer's DeltaNet costs on the CPU in a step and in a prompt, beside the reading of its states.

Random numbers between the products. Several layers take turns, so that no state is in cache from the step before.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch
from rich.console import Console

from mmrt.bench.environment import Environment, read_environment
from mmrt.bench.output import JSON_HELP, run_bench
from mmrt.bench.render import show_table
from mmrt.models.architecture import AttentionConfig, DeltaConfig, LanguageConfig, LayerConfig, MlpConfig, ModelConfig
from mmrt.models.lm.decoder import StateRefs, StateRows
from mmrt.models.lm.delta import CpuDelta, DeltaWeights, Projected
from mmrt.models.lm.delta_pages import DeltaPages, StatePools
from mmrt.models.state_layout import GRID, state_layout

_NUM_LAYERS = 8
_PROMPT = 512  # tokens


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one layer and row, medians: of a step, of the base that is written after 16 steps, and of reading the state."""

    rows: int
    step_s: float
    fold_s: float
    read_s: float


class DeltaBench(msgspec.Struct, frozen=True, kw_only=True):
    """``prompt_s``: of one layer and token."""

    environment: Environment
    config: DeltaConfig
    num_threads: int
    num_steps: int
    prompt_s: float
    costs: list[StepCost]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 when nothing could be measured."""
    parser = argparse.ArgumentParser(prog="mmrt bench delta", description="What a layer's DeltaNet costs.")
    add = parser.add_argument
    add("--key-heads", type=int, default=16, help="(%(default)s)")
    add("--value-heads", type=int, default=32, help="a multiple of the key heads (%(default)s)")
    add("--size", type=int, default=128, help="of a key and of a value (%(default)s)")
    add("--rows", type=int, nargs="+", default=[1, 4, 8], help="of a step (1 4 8)")
    add("--steps", type=int, default=48, help="of each number of rows (%(default)s)")
    add("--threads", type=int, default=1, help="with one, processor time is measured (%(default)s)")
    add("--json", type=Path, metavar="FILE", help=JSON_HELP)
    options = parser.parse_args(argv)
    for name in ("key_heads", "value_heads", "size", "steps", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)} must be at least 1")
    for rows in options.rows:
        if rows < 1:
            parser.error(f"--rows {rows} must be at least 1")
    if options.value_heads % options.key_heads:
        parser.error(f"--value-heads {options.value_heads} must be a multiple of --key-heads {options.key_heads}")
    sizes = {"key_dim": options.size, "value_dim": options.size}
    config = DeltaConfig(num_key_heads=options.key_heads, num_value_heads=options.value_heads, **sizes)
    bench = run_bench("delta", options.json, (), lambda _: measure(config, options.rows, options.steps, options.threads), show)
    return 1 if bench is None else 0


def measure(config: DeltaConfig, rows: Sequence[int], num_steps: int, num_threads: int) -> DeltaBench:
    """Everything, in bfloat16."""
    environment, before = read_environment(), torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        layers = _Layers(config, max(rows))
        clock = time.thread_time if num_threads == 1 else time.perf_counter  # of a thread: others may be busy beside it
        prompt_s = layers.prompt_s(clock)
        costs = [layers.cost(number, num_steps, clock) for number in rows]
    finally:
        torch.set_num_threads(before)
    return DeltaBench(
        environment=environment, config=config, num_threads=num_threads, num_steps=num_steps, prompt_s=prompt_s, costs=costs
    )


class _Layers:
    def __init__(self, config: DeltaConfig, most_rows: int) -> None:
        attention = AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=8)
        mlp = MlpConfig(intermediate_size=8)
        mixers: list[AttentionConfig | DeltaConfig] = [*[config] * _NUM_LAYERS, attention]
        layers = tuple(LayerConfig(mixer=mixer, feed_forward=mlp) for mixer in mixers)
        language = LanguageConfig(vocab_size=8, hidden_size=8, rms_norm_eps=1e-6, layers=layers, ropes=())
        model = ModelConfig(family="none", language=language, dtype="bfloat16", max_context=4096, eos_token_ids=())
        layout = state_layout(model)
        assert layout is not None
        sizes = (2 * most_rows, layout.base_bytes), (most_rows, layout.log_bytes)
        pages = DeltaPages(model, StatePools(*(torch.zeros(*size, dtype=torch.uint8) for size in sizes)))
        self._config, self._delta = config, CpuDelta(config, _NUM_LAYERS, 1e-6, pages)
        self._states = pages.parts.states
        heads = config.num_value_heads
        conv, norm = torch.randn(config.conv_size, config.mixed_size), torch.ones(config.value_dim)
        self._weights = DeltaWeights(conv, -torch.logspace(-2, 1, heads), torch.randn(heads) - 3, norm)

    def _projected(self, count: int) -> Projected:
        config = self._config
        widths = config.mixed_size, config.num_value_heads * config.value_dim, 2 * config.num_value_heads
        return Projected(*(torch.randn(count, width).bfloat16() for width in widths))

    def prompt_s(self, clock: Callable[[], float]) -> float:
        tokens, taken = self._projected(_PROMPT), []
        self._delta.begin_prefill([(0, _PROMPT)], [StateRefs(-1, 0, 0)])
        for layer in [*range(_NUM_LAYERS)] * 2:
            began_s = clock()
            self._delta.prefill(layer, self._weights, tokens)
            taken.append(clock() - began_s)
        return statistics.median(taken[1:]) / _PROMPT

    def cost(self, rows: int, num_steps: int, clock: Callable[[], float]) -> StepCost:
        """Of rows that go on from token 512, whose bases and logs alternate as in a run."""
        taken: dict[str, list[float]] = {"step": [], "fold": [], "read": []}
        numbers, tokens = torch.arange(rows), self._projected(rows)
        bases, others = numbers, numbers + rows

        def timed(name: str, calls: int, call: Callable[[], object]) -> None:
            began_s = clock()
            call()
            taken[name].append((clock() - began_s) / calls / rows)

        for place in range(_PROMPT, _PROMPT + max(num_steps, GRID)):
            states = StateRows(bases, numbers)
            self._delta.begin_decode(torch.full((rows,), place + 1), states)
            for layer in range(_NUM_LAYERS):
                timed("step", 1, partial(self._delta.decode, layer, self._weights, tokens))
            if (place + 1) % GRID == 0:
                timed("fold", _NUM_LAYERS, partial(self._delta.fold, [place + 1] * rows, states, others.tolist()))
                bases, others = others, bases
            timed("read", _NUM_LAYERS, self._states[int(bases[0]) :][:rows].sum)
        medians = {f"{name}_s": statistics.median(values) for name, values in taken.items()}
        return StepCost(rows=rows, **medians)


def show(console: Console, bench: DeltaBench) -> None:
    """The table."""
    rows = [
        [
            str(cost.rows),
            *(f"{1e6 * seconds:.0f}" for seconds in (cost.step_s, cost.fold_s / GRID, cost.read_s)),
            f"{(cost.step_s + cost.fold_s / GRID) / cost.read_s:.2f}",
        ]
        for cost in bench.costs
    ]
    config, time_of = bench.config, "processor time" if bench.num_threads == 1 else f"{bench.num_threads} threads"
    title = (
        f"DeltaNet, {config.num_key_heads} key and {config.num_value_heads} value heads of {config.key_dim} and {config.value_dim}: "
        f"µs of one layer and row, {time_of}, medians; a prompt takes {1e6 * bench.prompt_s:.0f} µs of one layer and token"
    )
    show_table(console, title, ["rows", "step", "base, by step", "reading the state", "ratio"], rows)
