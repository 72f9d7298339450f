"""The exam: a held-out seed of the demo data through a server, beside transformers on the same checkpoint.

Every question is an HTTP request with encoded files, answered greedily. An answer is right when it is the expected one but for case,
spaces and the full stop; of strangers' questions, any that admits not to know. With ``--url`` a running server is asked; without, a run
is started in float32, and ended before transformers begins.
"""

import argparse
import asyncio
import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import aiohttp
import msgspec
import uvloop
from rich.console import Console
from rich.progress import track

from mmrt.bench.environment import read_environment
from mmrt.bench.output import JSON_HELP, open_console, write_json
from mmrt.bench.own_run import OwnRunError, layout_argument, own_run
from mmrt.bench.serve.client import find_model, open_session
from mmrt.bench.serve.errors import BenchError
from mmrt.bench.serve.load_options import share as share_argument
from mmrt.models.architecture import KvDType, WeightFormat
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.config.sections import ActorsSection, MemorySection, ModelSection, ServerSection
from mmrt.runtime.process.run import DEFAULT_MODEL
from mmrt.runtime.stage_table import DEFAULT_LAYOUT
from mmrt_lab.extras import need_extra

from ..training.recipe import load_recipe
from .cases import NOT_LEARNED, ROWS, SEEN, Case, body_of, select
from .reference import Reference
from .report import (
    Answer,
    Guided,
    QualityBench,
    Setting,
    Shared,
    guided_of_answers,
    row_of_answers,
    share,
    shared_of_answers,
    shortcomings,
    show,
    show_changes,
)
from .restarts import restartable, restarting

PROGRAM = "python -m mmrt_demo_model.exam"
HELD_OUT_SEED = 20_000  # training has another
_TIMEOUT_S = 600.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0; 1 when a request failed, or when what was required was not reached."""
    options = _parse(argv)
    console = open_console(options.json)
    try:
        before = None if options.against is None else msgspec.json.decode(options.against.read_bytes(), type=QualityBench)
        if before is not None and before.seed != options.seed:
            raise ValueError(f"{options.against} is of seed {before.seed}, not {options.seed}")
        bench = measure(options, console)
    except (BenchError, OwnRunError, OSError, ValueError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    show(console, bench)
    if before is not None:
        show_changes(console, bench, before)
    write_json(options.json, bench)
    below = [] if options.require is None else shortcomings(bench, options.require, options.require_combined)
    for line in below:
        print(f"{PROGRAM}: {line}", file=sys.stderr)
    return 1 if below else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="How many answers about held-out demo data are right.")
    add = parser.add_argument
    add("--checkpoint", type=Path, metavar="DIR", help="a qwen2_5_omni checkpoint (the demo model)")
    add("--url", help="a server that serves it already, in float32 if it is to equal transformers")
    add("--kv-dtype", choices=get_args(KvDType), help="numbers of the started run's KV cache, instead of float32")
    add("--weights", choices=get_args(WeightFormat), default="auto", help="format of its matrices, instead of float32")
    add("--layout", type=layout_argument, help="processes of the model's stages in the started run, such as 2E+PD")
    add(
        "--restart",
        type=lambda text: tuple(text.split(",")),
        default=(),
        metavar="A,B",
        help="restart these actors of it in turn while it is asked",
    )
    add("--samples", type=int, default=40, help="questions per task, half of those on media about degraded ones (%(default)s)")
    add("--tasks", type=_names, default=tuple(ROWS), metavar="A,B", help=f"of {', '.join(ROWS)}")
    learned_from = load_recipe().seed
    add(
        "--seed",
        type=int,
        default=HELD_OUT_SEED,
        help=f"of the questions (%(default)s); the demo model learned from seed {learned_from}",
    )
    add("--max-tokens", type=int, default=64)
    add("--concurrency", type=int, default=16, help="requests at once (%(default)s)")
    add("--guidance", type=_scales, default=(), metavar="S,S", help="ask the degraded half again with these guidance scales")
    add("--shares", type=_shares, default=(), metavar="S,S", help="ask about pictures and videos again with this share of their tokens")
    add("--no-transformers", action="store_true", help="leave the comparison out, which needs the extra reference")
    add("--require", type=float, metavar="SHARE", help="exit with 1 if a task is below, or, in float32, an answer is not transformers'")
    add("--require-combined", type=float, metavar="SHARE", help="the same for tasks on two kinds of media (default: of --require)")
    add("--against", type=Path, metavar="FILE", help="also show what has changed since these figures were written by --json")
    add("--json", type=Path, metavar="FILE", help=JSON_HELP)
    options = parser.parse_args(argv)
    if options.samples < 1 or options.max_tokens < 1 or options.concurrency < 1:
        parser.error("--samples, --max-tokens and --concurrency must be at least 1")
    if options.url and (options.kv_dtype or options.weights != "auto" or options.layout or options.restart):
        parser.error("--kv-dtype, --weights, --layout and --restart are of a run that is started, not of a server that --url names")
    options.layout = options.layout or DEFAULT_LAYOUT
    known = restartable(options.layout)
    if unknown := [name for name in options.restart if name not in known]:
        parser.error(f"argument --restart: no such actor, or not one to restart here: {', '.join(unknown)}; {', '.join(known)} are")
    if options.require is None and options.require_combined is not None:
        options.require = 0.0
    if options.require_combined is None:
        options.require_combined = options.require
    return options


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _names(text: str) -> tuple[str, ...]:
    names = _words(text)
    if unknown := [name for name in names if name not in ROWS]:
        raise argparse.ArgumentTypeError(f"no such task: {', '.join(unknown)}")
    return names


def _scales(text: str) -> tuple[float, ...]:
    scales = tuple(float(part) for part in text.split(","))
    if not all(0 <= scale <= 20 for scale in scales):
        raise argparse.ArgumentTypeError("guidance scales are 0 to 20")
    return scales


def _shares(text: str) -> tuple[float, ...]:
    return tuple(map(share_argument, text.split(",")))


def measure(options: argparse.Namespace, console: Console) -> QualityBench:
    """The server, then transformers. Raises: BenchError, OwnRunError, OSError, ValueError."""
    if not options.no_transformers:
        need_extra("reference", "transformers")
    environment = read_environment()
    cases = select(options.seed, options.samples, options.tasks)
    checkpoint = (options.checkpoint or DEFAULT_MODEL).absolute()
    setting = Setting()
    if options.url:
        answers, guided, shared = ask_all(options.url, cases, options)
    else:
        with own_run() as run:
            config = RuntimeConfig(
                model=ModelSection(path=str(checkpoint), dtype="float32", weights=options.weights),
                memory=MemorySection(kv_dtype=options.kv_dtype or "auto"),
                actors=ActorsSection(layout=options.layout),
                server=ServerSection(port=0),
            )
            run.up(config)
            report = run.report()
            with restarting(run, options.restart) as restarts:
                answers, guided, shared = ask_all(report.endpoint, cases, options)
            formats = {} if report.compute is None else {"kv_dtype": report.compute.kv_dtype, "weights": report.compute.weights}
            setting = Setting(**formats, layout=config.actors.layout, restarts=len(restarts))
    if not options.no_transformers:
        answers = compare(Reference(checkpoint), cases, answers, options.max_tokens, console)
    compared = [answer for answer in answers if answer.is_equal is not None]
    return QualityBench(
        environment=environment,
        checkpoint=checkpoint.name,
        seed=options.seed,
        setting=setting,
        rows=[row_of_answers(name, answers) for name in ROWS if name in options.tasks],
        equal=share(answer.is_equal is True for answer in compared) if compared else None,
        guided=guided,
        shared=shared,
        answers=answers,
    )


Asked = tuple[list[Answer], list[Guided], list[Shared]]


def ask_all(url: str, cases: Sequence[Case], options: argparse.Namespace) -> Asked:
    """All questions plainly, then those about degraded media once per guidance scale, and pictures and videos once per
    share of their tokens. Raises: BenchError if a request fails."""
    degraded = [case for case in cases if case.degraded]
    seen = [case for case in cases if any(case.medium in media for media in SEEN.values()) and case.row not in NOT_LEARNED]

    async def everything() -> Asked:
        plain = await _ask(url.rstrip("/"), cases, options, {})
        guided = []
        for scale in options.guidance:
            answers = await _ask(url.rstrip("/"), degraded, options, {"guidance_scale": scale})
            guided.append(guided_of_answers(scale, answers))
        shared = shared_of_answers(1.0, plain) if options.shares else []
        for token_share in options.shares:
            answers = await _ask(url.rstrip("/"), seen, options, {"mm_processor_kwargs": {"token_share": token_share}})
            shared += shared_of_answers(token_share, answers)
        return plain, guided, shared

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(everything())


async def _ask(url: str, cases: Sequence[Case], options: argparse.Namespace, more: Mapping[str, Any]) -> list[Answer]:
    answers: list[Answer | None] = [None] * len(cases)
    waiting = iter(enumerate(cases))
    async with open_session(_TIMEOUT_S) as session:
        model = await find_model(session, url)

        async def worker() -> None:
            for number, case in waiting:
                answers[number] = await _ask_one(session, url, case, body_of(case, model, options.max_tokens, more))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(options.concurrency):
                    group.create_task(worker())
        except* BenchError as errors:
            raise BenchError(str(errors.exceptions[0])) from None
    return [answer for answer in answers if answer is not None]


class _Message(msgspec.Struct):
    content: str


class _Choice(msgspec.Struct):
    message: _Message
    token_ids: list[int] = []


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage = _Usage()


_decode_completion = msgspec.json.Decoder(_Completion).decode


async def _ask_one(session: aiohttp.ClientSession, url: str, case: Case, body: bytes) -> Answer:
    try:
        async with session.post(f"{url}/v1/chat/completions", data=io.BytesIO(body)) as response:
            data = await response.read()
            if response.status != 200:
                raise BenchError(f"{case.row}, sample {case.index}: HTTP {response.status}: {data[:300].decode(errors='replace')}")
        completion = _decode_completion(data)
        choice = completion.choices[0]
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError, IndexError) as error:
        raise BenchError(f"{case.row}, sample {case.index}: {type(error).__name__}: {error}") from None
    return Answer(
        row=case.row,
        medium=case.medium,
        index=case.index,
        degraded=case.degraded,
        question=case.question.text,
        expected=case.question.answer,
        reply=choice.message.content,
        token_ids=choice.token_ids,
        is_right=case.question.is_right(choice.message.content),
        num_prompt_tokens=completion.usage.prompt_tokens,
    )


def compare(reference: Reference, cases: Sequence[Case], answers: Sequence[Answer], max_tokens: int, console: Console) -> list[Answer]:
    """The answers with transformers' beside them."""
    compared = []
    pairs = list(zip(cases, answers, strict=True))
    for case, answer in track(pairs, "transformers", console=console, disable=not console.is_terminal):
        text, ids = reference.answer(case, max_tokens)
        is_right = case.question.is_right(text)
        is_equal = ids == answer.token_ids
        compared.append(msgspec.structs.replace(answer, reference=text, reference_is_right=is_right, is_equal=is_equal))
    return compared


if __name__ == "__main__":
    sys.exit(main())
