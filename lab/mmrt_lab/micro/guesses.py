"""``mmrt bench guesses``: how much sooner answers come where decode checks guesses (``scheduling.prompt_lookup``).

Two runs of one model, with guesses and without, get the same requests in turns: a text to be copied, code to be edited, JSON of a
schema, a story, and eight stories at once. Each is greedy, so the answers must be the same; of a model in bfloat16 they may differ
where a step's rows are multiplied by other than mmrt's kernels.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from rich.console import Console

from mmrt.bench.environment import Environment, read_environment
from mmrt.bench.output import JSON_HELP, progress, run_bench
from mmrt.bench.own_run import OwnRun, OwnRunError, own_run
from mmrt.bench.render import show_table
from mmrt.bench.serve.errors import BenchError
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.config.sections import ModelSection, SchedulingSection, ServerSection

_TEXT = (
    "The committee met on Tuesday and looked at three plans. The first plan would rebuild the old bridge with stone from the valley. "
    "The second would move the road to the north side of the river, where the ground is firm. The third would leave everything as it "
    "is and pay for a ferry. Nobody liked the ferry, but everybody agreed that it was cheap."
)
_CODE = """def total(items):
    result = 0
    for item in items:
        result = result + item.price * item.count
    if result > 100:
        result = result - 10
    return result"""
_PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "last_name": {"type": "string", "maxLength": 12},
        "favourite_colour": {"enum": ["red", "green", "blue"]},
    },
    "required": ["first_name", "last_name", "favourite_colour"],
}
_PEOPLE = {"type": "array", "items": _PERSON, "minItems": 4, "maxItems": 4}
_STORY = "Tell me a story about a sailor who finds an island."


def _asks(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **more}


CASES: dict[str, tuple[dict[str, Any], int]] = {
    "copy": (_asks(f"Repeat this text word for word:\n\n{_TEXT}"), 1),
    "edit": (_asks(f"{_CODE}\n\nRename the variable result to amount and print the whole function again."), 1),
    "JSON": (_asks("Write four people.", response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": _PEOPLE}}), 1),
    "story": (_asks(_STORY), 1),
    "eight stories": (_asks(_STORY), 8),
}
"""Of each case a request, and how many of it are sent at once."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """``num_tokens`` of an answer; tokens a second without guesses and with them, and their ratio, of each round; whether all answers
    of both were the same."""

    name: str
    num_tokens: int
    without: list[float]
    with_guesses: list[float]
    same: bool

    @property
    def ratio(self) -> float:
        """The median."""
        return statistics.median(there / here for here, there in zip(self.without, self.with_guesses, strict=True))


class GuessesBench(msgspec.Struct, frozen=True, kw_only=True):
    environment: Environment
    model: str
    cases: list[Case]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0; 1 if the runs cannot be had."""
    parser = argparse.ArgumentParser(prog="mmrt bench guesses", description="How much sooner answers come with guesses.")
    add = parser.add_argument
    add("model", nargs="?", default="", help="a checkpoint's directory or a GGUF file; the demo model")
    add("--rounds", type=int, default=5, help="of each case (%(default)s)")
    add("--tokens", type=int, default=160, help="of an answer at most (%(default)s)")
    add("--json", type=Path, metavar="FILE", help=JSON_HELP)
    options = parser.parse_args(argv)
    if options.rounds < 1 or options.tokens < 1:
        parser.error("--rounds and --tokens must be at least 1")

    def run(console: Console) -> GuessesBench:
        return measure(console, options.model, options.rounds, options.tokens)

    bench = run_bench("guesses", options.json, (BenchError, OwnRunError, OSError), run, show)
    return 0 if bench is not None else 1


def measure(console: Console, model: str, num_rounds: int, num_tokens: int) -> GuessesBench:
    """Everything. Raises: BenchError, OwnRunError, OSError."""
    path = str(Path(model).resolve()) if model else ""
    with progress(console) as tell, own_run("without") as without, own_run("with") as having:
        for run, on in ((without, False), (having, True)):
            tell(f"starting a run with prompt_lookup = {on}")
            run.up(
                RuntimeConfig(
                    model=ModelSection(path=path), server=ServerSection(port=0), scheduling=SchedulingSection(prompt_lookup=on)
                )
            )
        cases = []
        for name in CASES:
            tell(name)
            cases.append(asyncio.run(_measure(name, without, having, num_rounds, num_tokens)))
        return GuessesBench(environment=read_environment(), model=model or "the demo model", cases=cases)


async def _measure(name: str, without: OwnRun, having: OwnRun, num_rounds: int, num_tokens: int) -> Case:
    rates: dict[OwnRun, list[float]] = {without: [], having: []}
    texts, counts = set(), []
    async with aiohttp.ClientSession() as session:
        for number in range(-1, num_rounds):  # the first round warms up
            for run in (without, having) if number % 2 else (having, without):
                found, rate = await _ask(session, run.report().endpoint, name, num_tokens)
                texts |= {text for text, _ in found}
                counts += [count for _, count in found]
                if number >= 0:
                    rates[run].append(rate)
    return Case(name=name, num_tokens=max(counts), without=rates[without], with_guesses=rates[having], same=len(texts) == 1)


async def _ask(session: aiohttp.ClientSession, url: str, name: str, num_tokens: int) -> tuple[list[tuple[str, int]], float]:
    """The answers' texts and numbers of tokens, and tokens a second of all."""
    body, num_streams = CASES[name]
    began_s = time.perf_counter()
    answers = await asyncio.gather(*(_answer(session, url, {**body, "max_tokens": num_tokens}) for _ in range(num_streams)))
    return answers, sum(count for _, count in answers) / (time.perf_counter() - began_s)


async def _answer(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[str, int]:
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        answer = await response.json()
    if response.status != 200:
        raise BenchError(f"status {response.status}: {answer}")
    return answer["choices"][0]["message"]["content"] or "", answer["usage"]["completion_tokens"]


def show(console: Console, bench: GuessesBench) -> None:
    rows = [
        [
            case.name,
            str(case.num_tokens),
            f"{statistics.median(case.without):.1f}",
            f"{statistics.median(case.with_guesses):.1f}",
            f"{case.ratio:.2f}",
            "yes" if case.same else "no",
        ]
        for case in bench.cases
    ]
    show_table(console, f"tokens a second, {bench.model}", ["case", "tokens", "without", "with guesses", "ratio", "same answer"], rows)
