"""``mmrt bench NAME …``: hands over to ``mmrt.bench.NAME``, which parses its own options."""

import importlib
from collections.abc import Callable

import typer

BENCHES = {
    "serve": "Drive an OpenAI-compatible server with a seeded workload; report latencies and throughput.",
    "bus": "Bus, ring and pools beside ZeroMQ, multiprocessing.Queue and memcpy.",
    "runtime": "What the runtime itself costs, with a model that computes nothing.",
    "restart": "What clients notice of restarts, kills and edits of each actor.",
    "journal": "What it costs to note every request.",
    "recorder": "What the flight recorders cost.",
    "startup": "How long a user waits, and what an idle run takes.",
    "versus_transformers": "Concurrent image requests beside the same ones in sequence through transformers.",
    "accuracy": "How far reduced precision is from float32, beside transformers.",
    "media": "Decoding beside PyAV, OpenCV and torchcodec.",
    "video": "The time to the first token of a long video beside its stages alone.",
    "quality": "How many answers about held-out demo data are right, beside transformers.",
}

MODULES = {
    "serve": "bench.serve.command",
    "bus": "bench.micro.bus",
    "runtime": "bench.micro.runtime",
    "journal": "bench.micro.journal",
    "recorder": "bench.micro.recorder",
    "media": "bench.media.command",
    "video": "bench.media.video",
    "quality": "examples.demo_model.exam.command",
}  # others: bench.NAME


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Measure. Each has options of its own: mmrt bench NAME --help.")
    app.add_typer(group, name="bench")
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    for name, about in BENCHES.items():
        group.command(name, help=about, context_settings=settings)(_handing_over(name))


def _handing_over(name: str) -> Callable[[typer.Context], None]:
    def command(context: typer.Context) -> None:
        raise typer.Exit(importlib.import_module(f"mmrt.{MODULES.get(name, f'bench.{name}')}").main(context.args))

    return command
