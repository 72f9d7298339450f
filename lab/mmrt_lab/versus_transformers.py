"""``mmrt bench versus_transformers``: concurrent image requests beside the same ones in sequence through transformers.

Both sides answer the same pictures and words with the same checkpoint. With ``--url`` a running server is measured; without, a run
is started, and ended before transformers' ``generate`` begins, so that the two do not share the processors. transformers gets every
processor, as torch takes them by default.
"""

import argparse
import asyncio
import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from rich.console import Console

from mmrt.bench.environment import Environment, read_environment
from mmrt.bench.output import JSON_HELP, run_bench
from mmrt.bench.own_run import OwnRunError, own_run
from mmrt.bench.render import show_table, show_targets
from mmrt.bench.serve.client import find_model, open_session, stream_chat
from mmrt.bench.serve.drivers import run_closed_loop
from mmrt.bench.serve.errors import BenchError
from mmrt.bench.serve.load_options import image_size
from mmrt.bench.serve.record import Record
from mmrt.bench.serve.report import Distribution, distribution, duration_of
from mmrt.bench.serve.samples import make_image
from mmrt.bench.serve.workload import Calibration, Lengths, MediaShapes, RequestPlan, make_body, make_prompt, media_seed, plan_steady
from mmrt.models.config import load_model_config
from mmrt.models.text.chat_template import ChatTemplate
from mmrt.models.text.tokenizer import Tokenizer
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.config.sections import ActorSection, ActorsSection, ModelSection, SchedulingSection, ServerSection

from .extras import need_extra

TARGET_RATIO = 2.5
DECODE_THREADS = 2  # of the run that is started
_TIMEOUT_S = 1800.0


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One side's figures over all requests."""

    duration_s: float
    num_tokens: int
    requests_per_s: float
    tokens_per_s: float
    ttft: Distribution | None = None  # transformers gives the whole answer at once


class VersusBench(msgspec.Struct, frozen=True, kw_only=True):
    environment: Environment
    checkpoint: str
    dtype: str
    num_requests: int
    max_tokens: int
    image_size: tuple[int, int]
    server: Side
    transformers: Side
    ratio: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, also when the target is missed; 1 when a request failed."""
    about = "Concurrent image requests beside the same ones in sequence through transformers. Needs the extra reference."
    parser = argparse.ArgumentParser(prog="mmrt bench versus_transformers", description=about)
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="DIR", help="a checkpoint of a family that takes images")
    add("--url", help="a server that serves it already")
    add("--num-requests", type=int, default=16, help="all at once (%(default)s)")
    add("--max-tokens", type=int, default=64)
    add("--image-size", type=image_size, default=(336, 336), metavar="WxH")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    add("--json", type=Path, metavar="FILE", help=JSON_HELP)
    options = parser.parse_args(argv)
    if options.num_requests < 1 or options.max_tokens < 1:
        parser.error("--num-requests and --max-tokens must be at least 1")
    errors = BenchError, OwnRunError, OSError, ValueError
    bench = run_bench("versus_transformers", options.json, errors, lambda _: measure(options), show)
    return 1 if bench is None else 0


def measure(options: argparse.Namespace) -> VersusBench:
    """Both sides, one after the other. Raises: BenchError, OwnRunError, OSError, ValueError."""
    need_extra("reference", "transformers")
    config = load_model_config(options.checkpoint, options.dtype)
    if "image" not in config.media_kinds:
        raise BenchError(f"{options.checkpoint} is of family {config.family!r}, which takes no images")
    lengths = Lengths(input_low=16, input_high=16, max_tokens=options.max_tokens)
    plans = plan_steady({"text": 0.5, "image": 0.5}, options.num_requests, lengths, 0)
    shapes = MediaShapes(image_size=options.image_size)
    environment = read_environment()
    if options.url:
        server = measure_server(options.url, plans, shapes)
    else:
        with own_run() as run:
            run.up(
                RuntimeConfig(
                    model=ModelSection(path=str(options.checkpoint.absolute()), dtype=options.dtype),
                    server=ServerSection(port=0),
                    actors=ActorsSection(decode=ActorSection(threads=DECODE_THREADS)),
                    scheduling=SchedulingSection(prompt_lookup=False),
                )
            )
            server = measure_server(run.report().endpoint, plans, shapes)
    reference = measure_transformers(options.checkpoint, config.dtype, plans, shapes)
    return VersusBench(
        environment=environment,
        checkpoint=options.checkpoint.name,
        dtype=config.dtype,
        num_requests=options.num_requests,
        max_tokens=options.max_tokens,
        image_size=options.image_size,
        server=server,
        transformers=reference,
        ratio=server.tokens_per_s / reference.tokens_per_s,
    )


def measure_server(url: str, plans: Sequence[RequestPlan], shapes: MediaShapes) -> Side:
    """All requests at once, after one to warm up. Raises: BenchError if one fails."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        warm_up = msgspec.structs.replace(plans[0], seed="warmup", max_tokens=2)
        for batch in ([warm_up], plans):
            records = runner.run(send_all(url.rstrip("/"), batch, shapes, len(batch)))
            if failed := [record.error for record in records if record.error is not None]:
                raise BenchError(f"{len(failed)} of {len(records)} requests failed, the first with: {failed[0]}")
    num_tokens, duration_s = sum(record.num_tokens for record in records), duration_of(records)
    return Side(
        duration_s=duration_s,
        num_tokens=num_tokens,
        requests_per_s=len(records) / duration_s,
        tokens_per_s=num_tokens / duration_s,
        ttft=distribution(record.ttft_s for record in records if record.ttft_s is not None),
    )


async def send_all(url: str, plans: Sequence[RequestPlan], shapes: MediaShapes, concurrency: int) -> list[Record]:
    """The records of all requests, so many at a time. Raises: BenchError if there is no server."""
    async with open_session(_TIMEOUT_S) as session:
        model = await find_model(session, url)
        bodies = {plan.index: make_body(plan, shapes, Calibration(), model) for plan in plans}

        async def send(plan: RequestPlan, record: Record) -> None:
            await stream_chat(session, url, bodies[plan.index], record)

        return await run_closed_loop(plans, concurrency, send, lambda record: None)


def measure_transformers(checkpoint: Path, dtype: str, plans: Sequence[RequestPlan], shapes: MediaShapes) -> Side:
    """The same pictures and words, one request after the other; preprocessing included, loading not. Raises: ValueError."""
    answers = answers_of_transformers(checkpoint, dtype, plans, shapes)
    num_tokens, duration_s = sum(count for count, _ in answers), sum(seconds for _, seconds in answers)
    return Side(
        duration_s=duration_s,
        num_tokens=num_tokens,
        requests_per_s=len(plans) / duration_s,
        tokens_per_s=num_tokens / duration_s,
    )


def answers_of_transformers(
    checkpoint: Path, dtype: str, plans: Sequence[RequestPlan], shapes: MediaShapes, device: str = "cpu"
) -> list[tuple[int, float]]:
    """(tokens, seconds) of each request. Raises: ValueError."""
    reference = _Reference(checkpoint, dtype, device)
    reference.generate(plans[0], shapes, 2)
    answers = []
    for plan in plans:
        start_s = time.perf_counter()
        answers.append((reference.generate(plan, shapes, plan.max_tokens), time.perf_counter() - start_s))
    return answers


class _Reference:
    """transformers' model and image processor of a checkpoint. Only this class imports torch and transformers."""

    def __init__(self, checkpoint: Path, dtype: str, device: str) -> None:
        import torch
        import transformers
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self._torch: Any = torch
        self._config = load_model_config(checkpoint)
        self._tokenizer = Tokenizer.load(checkpoint)
        self._template = ChatTemplate.load(checkpoint)
        self._processor = Qwen2VLImageProcessorPil.from_pretrained(checkpoint)
        name = {
            "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
            "qwen2_5_omni": "Qwen2_5OmniThinkerForConditionalGeneration",
        }.get(self._config.family)
        if name is None:
            raise ValueError(f"no reference for family {self._config.family!r}")
        self._model = getattr(transformers, name).from_pretrained(checkpoint, dtype=getattr(torch, dtype)).to(device).eval()

    def generate(self, plan: RequestPlan, shapes: MediaShapes, max_tokens: int) -> int:
        """Answer one request greedily; how many tokens it took."""
        from PIL import Image

        torch = self._torch
        image = Image.open(io.BytesIO(make_image(media_seed(plan, 0), *shapes.image_size, shapes.image_format)))
        pixels = self._processor(images=[image.convert("RGB")], return_tensors="pt")
        grid = pixels["image_grid_thw"]
        rules = self._config.vision_rules
        assert rules is not None
        num_image_tokens = int(grid[0].prod()) // rules.merge_size**2
        prompt = make_prompt(plan.seed, Calibration().num_words(plan.num_input_tokens))
        rendered = self._template.render([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": prompt}]}])
        ids = [
            id
            for token in self._tokenizer.encode(rendered)
            for id in ([token] * num_image_tokens if token == self._config.image_token_id else [token])
        ]
        device = self._model.device
        input_ids = torch.tensor([ids], device=device)
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                pixel_values=pixels["pixel_values"].to(device, self._model.dtype),
                image_grid_thw=grid.to(device),
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
            )
        return int(output.shape[1]) - len(ids)


def show(console: Console, bench: VersusBench) -> None:
    """Both sides and the ratio."""
    width, height = bench.image_size
    title = f"{bench.checkpoint}, {bench.dtype}: {bench.num_requests} requests, {width}x{height}, {bench.max_tokens} tokens out"
    rows = []
    for name, side in (("server, all at once", bench.server), ("transformers, one by one", bench.transformers)):
        ttft = f"{side.ttft.p50:.2f}" if side.ttft else ""
        rows.append([name, f"{side.duration_s:.1f}", f"{side.requests_per_s:.2f}", f"{side.tokens_per_s:.1f}", ttft])
    show_table(console, title, ["", "s", "requests/s", "tokens/s", "TTFT P50, s"], rows)
    text = f"{bench.ratio:.2f} times transformers' throughput, target {TARGET_RATIO:g}"
    show_targets(console, {text: bench.ratio >= TARGET_RATIO})
