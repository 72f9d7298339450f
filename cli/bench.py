"""``mmrt bench NAME …``: hands over to a module of ``mmrt.bench``, which parses its own options."""

import importlib
import sys
from collections.abc import Callable

import typer

BENCHES = {
    "serve": "Latencies and throughput of a server under load.",
    "sim": "A load on the controller's code, without a server.",
    "goodput": "Policies side by side, by goodput.",
    "autoscale": "What more processes in bursts only save.",
    "profile": "How long each stage works, for bench sim.",
    "bus": "Bus, ring and pools beside ZeroMQ, queues and memcpy.",
    "runtime": "What the runtime costs when a model computes nothing.",
    "gateway": "What gateway and page cost.",
    "masks": "What masks of grammars add to a decode step.",
    "restart": "What clients notice of restarts, kills and edits.",
    "recorder": "What the journal and the flight recorders cost.",
    "controller": "What a tick of the controller costs.",
    "startup": "How long a user waits, and what an idle run takes.",
    "versus_transformers": "Images at once beside transformers in sequence.",
    "peers": "Prefill and decode steps beside llama.cpp's.",
    "accuracy": "How far reduced precision is from float32.",
    "media": "Decoding beside PyAV, OpenCV and torchcodec.",
    "video": "The first token of a long video beside its stages.",
}

MODULES = {
    "serve": "serve.command",
    "sim": "sim.command",
    "goodput": "goodput.command",
    "autoscale": "planner.autoscale",
    "profile": "sim.profile",
    "bus": "micro.bus",
    "runtime": "micro.runtime",
    "recorder": "micro.recorder",
    "gateway": "micro.gateway",
    "masks": "micro.masks",
    "peers": "peers.command",
    "media": "media.command",
    "video": "media.video",
}  # below mmrt.bench; the others have the bench's name


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Measure. Each has options of its own: mmrt bench NAME --help.")
    app.add_typer(group, name="bench")
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    for name, about in BENCHES.items():
        group.command(name, help=about, context_settings=settings)(_handing_over(name))


def _handing_over(name: str) -> Callable[[typer.Context], None]:
    def command(context: typer.Context) -> None:
        if not {"-h", "--help"} & {*context.args}:
            print(f"mmrt bench {name} …", file=sys.stderr, flush=True)  # its imports take seconds
        raise typer.Exit(importlib.import_module(f"mmrt.bench.{MODULES.get(name, name)}").main(context.args))

    return command
