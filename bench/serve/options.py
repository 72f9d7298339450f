"""The arguments of ``mmrt bench serve``: parsed, checked against each other, and frozen. Called by ``serve``."""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from ..output import JSON_HELP
from .slo import Slo
from .workload import Lengths, MediaShapes, Modality, parse_modalities

Scenario = Literal["steady", "mixed", "stall", "chat"]
SCENARIOS: tuple[Scenario, ...] = ("steady", "mixed", "stall", "chat")

_DEFAULT_URL = "http://127.0.0.1:8000"
_DEFAULT_MODALITY = {"steady": "text", "mixed": "text,image", "stall": "image", "chat": "image"}
_DEFAULT_MAX_TOKENS = {"steady": 64, "mixed": 64, "stall": 1024, "chat": 32}
_DEFAULT_NUM_REQUESTS = {"steady": 64, "mixed": 64, "chat": 8}
_DEFAULT_CONCURRENCY = {"steady": 4, "mixed": 4, "stall": 4, "chat": 1}

ValueT = TypeVar("ValueT")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options. ``rate`` None and ``trace`` None: ``concurrency`` at a time. ``model`` "" is the server's first."""

    url: str
    api_key: str
    model: str
    scenario: Scenario
    modalities: dict[Modality, float]
    num_requests: int | None
    seed: int
    rate: float | None
    concurrency: int
    trace: Path | None
    lengths: Lengths
    own_input: bool  # --input-tokens was given: a trace's lengths do not replace it
    own_output: bool
    shapes: MediaShapes
    temperature: float
    extensions: bool
    timeout_s: float
    num_warmup: int
    num_streams: int
    phase_s: float
    fresh_interval_s: float
    fresh_max_tokens: int
    num_turns: int
    compare_caches: str | None  # the checkpoint of the runs to compare, "" for the demo model
    slo: Slo | None
    out: Path | None
    json: Path | None
    plot: Path | None


def settings_of(options: Options) -> dict[str, str | int | float | bool | None]:
    """The options as flat plain data for the report; without the API key."""
    plain: dict[str, Any] = msgspec.to_builtins(options, enc_hook=str)
    flat: dict[str, str | int | float | bool | None] = {}
    for key, value in plain.items():
        if key in ("api_key", "out", "json", "plot"):
            continue
        if key == "modalities":
            value = ",".join(f"{name}:{weight:g}" for name, weight in value.items())
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": _plain(inner) for name, inner in value.items()}
        else:
            flat[key] = _plain(value)
    return flat


def _plain(value: Any) -> str | int | float | bool | None:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return "x".join(map(str, value)) if isinstance(value, list | tuple) else value


def parse_options(argv: Sequence[str]) -> Options:
    """Parse the command line. Exits with status 2 and a message for a bad one."""
    parser = _make_parser()
    given = parser.parse_args(argv)
    scenario: Scenario = given.scenario
    try:
        modalities = parse_modalities(given.modality or _DEFAULT_MODALITY[scenario])
    except ValueError as error:
        parser.error(f"--modality: {error}")
    _check(parser, given, modalities)
    low, high = given.input_tokens or (64, 64)
    num_requests = given.num_requests
    if num_requests is None and not given.trace:
        num_requests = _DEFAULT_NUM_REQUESTS.get(scenario)
    tbt_s = math.inf if given.slo_tbt is None else given.slo_tbt
    return Options(
        url=(given.url or _DEFAULT_URL).rstrip("/").removesuffix("/v1"),
        api_key=given.api_key,
        model=given.model,
        scenario=scenario,
        modalities=modalities,
        num_requests=num_requests,
        seed=given.seed,
        rate=given.rate,
        concurrency=given.concurrency or _DEFAULT_CONCURRENCY[scenario],
        trace=given.trace,
        lengths=Lengths(input_low=low, input_high=high, max_tokens=given.max_tokens or _DEFAULT_MAX_TOKENS[scenario]),
        own_input=given.input_tokens is not None,
        own_output=given.max_tokens is not None,
        shapes=MediaShapes(
            image_size=given.image_size,
            image_format=given.image_format,
            video_size=given.video_size,
            video_s=given.video_seconds,
            video_fps=given.video_fps,
            audio_s=given.audio_seconds,
        ),
        temperature=given.temperature,
        extensions=given.extensions,
        timeout_s=given.timeout,
        num_warmup=given.warmup,
        num_streams=given.streams,
        phase_s=given.phase,
        fresh_interval_s=given.fresh_interval,
        fresh_max_tokens=given.fresh_max_tokens,
        num_turns=given.turns,
        compare_caches=given.compare_caches,
        slo=None if given.slo_ttft is None else Slo(given.slo_ttft, tbt_s),
        out=given.out,
        json=given.json,
        plot=given.plot,
    )


def _check(parser: argparse.ArgumentParser, given: argparse.Namespace, modalities: Mapping[Modality, float]) -> None:
    """Check the options against each other. Exits with status 2."""
    if given.trace and given.concurrency is not None:
        parser.error("--trace has arrivals of its own: it goes with --rate, which stretches them, not with --concurrency")
    if given.scenario == "stall":
        if given.trace or given.rate is not None or given.concurrency is not None:
            parser.error("the stall scenario has --streams and --fresh-interval instead of --rate, --concurrency and --trace")
        if len(modalities) != 1 or "text" in modalities:
            parser.error("the stall scenario takes one --modality for the fresh requests: image, video or audio")
    if given.scenario == "chat" and (given.trace or given.rate is not None):
        parser.error("the chat scenario has --concurrency: conversations at a time, each turn after the one before")
    if given.compare_caches is not None and (given.scenario != "chat" or given.url is not None or given.concurrency is not None):
        parser.error("--compare-caches starts servers of its own, for the chat scenario, and holds one conversation at a time")
    if given.slo_ttft is None and given.slo_tbt is not None:
        parser.error("--slo-tbt needs --slo-ttft")


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mmrt bench serve",
        description="Drive an OpenAI-compatible server with a seeded workload and report TTFT, TBT, E2E and throughput.",
        epilog="Exit status: 0 when every request went well, 1 when one failed or no server is there, 2 for a bad command line.",
    )
    add = parser.add_argument
    add("--url", help=f"base URL of the server ({_DEFAULT_URL})")
    add("--model", default="", help="default: the first that the server offers")
    add("--api-key", default="", help="sent as a bearer token")
    add(
        "--scenario",
        choices=SCENARIOS,
        default="steady",
        help="steady: requests all alike; mixed: one modality each, by weight; stall: text streams alone, then with fresh media; "
        "chat: conversations about a medium, each turn with all before it",
    )
    add(
        "--modality",
        help="e.g. text,image; weighted for mixed: text:3,image:1. Default: text (steady), text,image (mixed), image (stall, chat)",
    )
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--rate",
        type=_number("rate", float, above=0),
        help="requests per second, Poisson; inf: all at once; with --trace: its mean rate",
    )
    load.add_argument(
        "--concurrency", type=_number("concurrency", int, least=1), help="requests at a time (default: 4); chat: conversations (1)"
    )
    add("--trace", type=Path, metavar="FILE", help="arrivals and lengths of a Mooncake .jsonl or Azure .csv trace")
    add(
        "--num-requests",
        type=_number("number", int, least=1),
        help="default: 64, or the whole trace; stall: fresh requests; chat: conversations (8)",
    )
    add("--seed", type=_number("seed", int, least=0), default=0)
    _add_content(add)
    _add_stall(add)
    _add_chat(add)
    _add_report(add)
    return parser


def _add_content(add: Callable[..., object]) -> None:
    """Options for the contents of the requests."""
    add("--input-tokens", type=_token_range, metavar="N|LOW-HIGH", help="text tokens per prompt (64)")
    add("--max-tokens", type=_number("tokens", int, least=1), help="tokens per answer (64; stall: 1024; chat: 32)")
    add("--temperature", type=_number("temperature", float, least=0), default=0.0)
    add("--image-size", type=image_size, default=(336, 336), metavar="WxH")
    add("--image-format", choices=("png", "jpeg"), default="png")
    add("--video-size", type=_even_size, default=(320, 240), metavar="WxH")
    add("--video-seconds", type=_number("seconds", float, above=0), default=2.0)
    add("--video-fps", type=_number("fps", int, least=1), default=8)
    add("--audio-seconds", type=_number("seconds", float, above=0), default=2.0)


def _add_stall(add: Callable[..., object]) -> None:
    add("--streams", type=_number("streams", int, least=1), default=4, help="stall: text streams (%(default)s)")
    add("--phase", type=_number("seconds", float, above=0), default=15.0, help="stall: seconds of each phase (%(default)s)")
    add(
        "--fresh-interval",
        type=_number("seconds", float, above=0),
        default=1.0,
        help="stall: seconds between fresh requests (%(default)s)",
    )
    add(
        "--fresh-max-tokens",
        type=_number("tokens", int, least=1),
        default=16,
        help="stall: answer of a fresh request (%(default)s)",
    )


def _add_chat(add: Callable[..., object]) -> None:
    add("--turns", type=_number("turns", int, least=1), default=5, help="chat: questions of a conversation (%(default)s)")
    add(
        "--compare-caches",
        nargs="?",
        const="",
        metavar="DIR",
        help="chat: start two runs of mmrt, with the caches and without, for the checkpoint DIR or the demo model; hold each "
        "conversation with both, one after the other; report the ratio of medians",
    )


def _add_report(add: Callable[..., object]) -> None:
    """Options for measurement and output."""
    add("--slo-ttft", type=_number("seconds", float, above=0), metavar="S", help="report the share of requests under it")
    add("--slo-tbt", type=_number("seconds", float, above=0), metavar="S", help="and with 90 %% of their TBTs under this")
    add("--no-extensions", dest="extensions", action="store_false", help="send neither ignore_eos nor continuous_usage_stats")
    add("--timeout", type=_number("seconds", float, above=0), default=600.0, help="seconds for one request (%(default)s)")
    add(
        "--warmup",
        type=_number("number", int, least=0),
        default=1,
        help="requests of each kind before the clock runs (%(default)s)",
    )
    add("--out", type=Path, metavar="DIR", help="write report.json and records.jsonl (with --plot: the plot) there")
    add("--json", type=Path, metavar="FILE", help=JSON_HELP)
    add("--plot", type=Path, metavar="FILE", help="write a picture: .png, .svg or .pdf")


def _number(name: str, kind: Callable[[str], ValueT], *, least: float = -math.inf, above: float = -math.inf) -> Callable[[str], ValueT]:
    """A converter for argparse that names the value and the limit."""

    def convert(text: str) -> ValueT:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{name} {text!r} is not a number") from None
        limit = f"at least {least:g}" if least > -math.inf else f"above {above:g}"
        number: Any = value
        if not (number >= least and number > above):
            raise argparse.ArgumentTypeError(f"{name} {text} must be {limit}")
        return value

    return convert


def _token_range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    try:
        limits = int(low), int(high or low)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither N nor LOW-HIGH") from None
    if not 1 <= limits[0] <= limits[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: need 1 <= LOW <= HIGH")
    return limits


def image_size(text: str) -> tuple[int, int]:
    """WIDTHxHEIGHT, for argparse."""
    width, _, height = text.lower().partition("x")
    try:
        size = int(width), int(height)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not WIDTHxHEIGHT") from None
    if min(size) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: both must be at least 1")
    return size


def _even_size(text: str) -> tuple[int, int]:
    size = image_size(text)
    if size[0] % 2 or size[1] % 2:
        raise argparse.ArgumentTypeError(f"{text!r}: a video's sides must be even")
    return size
