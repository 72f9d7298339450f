"""The arguments of ``mmrt bench serve``: parsed, checked against each other, and frozen. Called by ``serve``."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..output import JSON_HELP, json_file
from .load_options import LoadOptions, add_load, load_values, number

_TIMEOUT_S = 600.0


class Options(LoadOptions, frozen=True, kw_only=True):
    """The options. ``url`` "" is the run that is up on this machine, ``model`` "" the server's first."""

    url: str
    api_key: str
    model: str
    temperature: float
    extensions: bool
    keeps_connections: bool
    timeout_s: float
    num_warmup: int
    compare_caches: str | None  # the checkpoint of the runs to compare, "" for the demo model
    out: Path | None
    json: Path | None
    plot: Path | None


def parse_options(argv: Sequence[str]) -> Options:
    """Parse the command line. Exits with status 2 and a message for a bad one."""
    parser = _make_parser()
    given = parser.parse_args(argv)
    values = load_values(parser, given)
    if given.compare_caches is not None and (given.scenario != "chat" or given.url is not None or given.concurrency is not None):
        parser.error("--compare-caches starts servers of its own, for the chat scenario, and holds one conversation at a time")
    return Options(
        **values,
        url=(given.url or "").rstrip("/").removesuffix("/v1"),
        api_key=given.api_key,
        model=given.model,
        temperature=given.temperature,
        extensions=given.extensions,
        keeps_connections=given.keeps_connections,
        timeout_s=given.timeout,
        num_warmup=given.warmup,
        compare_caches=given.compare_caches,
        out=given.out,
        json=given.json,
        plot=given.plot,
    )


def server_options(values: Mapping[str, Any]) -> Options:
    """Those of ``load_values``, with the defaults of a server of our own."""
    return Options(
        **values,
        url="",
        api_key="",
        model="",
        temperature=0.0,
        extensions=True,
        keeps_connections=True,
        timeout_s=_TIMEOUT_S,
        num_warmup=1,
        compare_caches=None,
        out=None,
        json=None,
        plot=None,
    )


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mmrt bench serve",
        description="Drive an OpenAI-compatible server with a seeded workload and report TTFT, TBT, E2E and throughput.",
        epilog="Exit status: 0 when every request went well, 1 when one failed or no server is there, 2 for a bad command line.",
    )
    add = parser.add_argument
    add("--url", help="base URL of the server; default: that of the run that is up here, with its key")
    add("--model", default="", help="default: the first that the server offers")
    add("--api-key", default="", help="sent as a bearer token")
    add_load(parser)
    add("--temperature", type=number("temperature", float, least=0), default=0.0)
    add(
        "--compare-caches",
        nargs="?",
        const="",
        metavar="DIR",
        help="chat: start two runs of mmrt, with the caches and without, for the checkpoint DIR or the demo model; hold each "
        "conversation with both, one after the other; report the ratio of medians",
    )
    closes = "a connection for each request: for servers that close one behind a stream and do not say so, as llama.cpp's"
    add("--new-connections", dest="keeps_connections", action="store_false", help=closes)
    add("--no-extensions", dest="extensions", action="store_false", help="send neither ignore_eos nor continuous_usage_stats")
    add("--timeout", type=number("seconds", float, above=0), default=_TIMEOUT_S, help="seconds for one request (%(default)s)")
    add(
        "--warmup",
        type=number("number", int, least=0),
        default=1,
        help="requests of each kind before the clock runs (%(default)s)",
    )
    add("--out", type=Path, metavar="DIR", help="write report.json and records.jsonl (with --plot: the plot) there")
    add("--json", type=json_file, metavar="FILE", help=JSON_HELP)
    add("--plot", type=Path, metavar="FILE", help="write a picture: .png, .svg or .pdf")
    return parser
