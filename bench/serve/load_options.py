"""The options of a load: which requests, how many, when. ``options`` adds those of a server, ``sim.options`` those of a simulation."""

import argparse
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from .presets import OBJECTIVES, WORKLOADS
from .slo import Slo
from .workload import Lengths, MediaShapes, Modality, parse_modalities

Scenario = Literal["steady", "mixed", "stall", "chat"]
SCENARIOS: tuple[Scenario, ...] = ("steady", "mixed", "stall", "chat")

_DEFAULT_MODALITY = {"steady": "text", "mixed": "text,image", "stall": "image", "chat": "image"}
_DEFAULT_MAX_TOKENS = {"steady": 64, "mixed": 64, "stall": 1024, "chat": 32}
_DEFAULT_NUM_REQUESTS = {"steady": 64, "mixed": 64, "chat": 8}
_DEFAULT_CONCURRENCY = {"steady": 4, "mixed": 4, "stall": 4, "chat": 1}
_TEXTS = ("scenario", "modality", "input_tokens", "max_tokens")
_MEDIA = ("image_size", "image_format", "video_size", "video_seconds", "video_fps", "audio_seconds")
_ARRIVALS = (
    "workload",
    "dataset",
    "rate",
    "concurrency",
    "trace",
    "seed",
    "turns",
    "streams",
    "phase",
    "fresh_interval",
    "fresh_max_tokens",
    "token_share",
)
LOAD_NAMES = (*_TEXTS, *_MEDIA, *_ARRIVALS, "objective", "slo_ttft", "slo_tbt")  # all options of a load but the number of requests
LEAST_PRECISION = 0.001  # of a search for a goodput

ValueT = TypeVar("ValueT")


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``rate`` None and ``trace`` None: ``concurrency`` at a time. ``workload``: one of ``presets``, whose requests are sent instead of
    those of ``modalities`` and ``lengths``; its shapes are in ``shapes``. ``dataset``: a file with requests of its own."""

    scenario: Scenario
    workload: str | None
    dataset: Path | None
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
    num_streams: int
    phase_s: float
    fresh_interval_s: float
    fresh_max_tokens: int
    num_turns: int
    slo: Slo | None


def settings_of(options: LoadOptions) -> dict[str, str | int | float | bool | None]:
    """The options as flat plain data for the report; without the API key and the files that are written."""
    plain: dict[str, Any] = msgspec.to_builtins(options, enc_hook=str)
    flat: dict[str, str | int | float | bool | None] = {}
    for key, value in plain.items():
        if key in ("api_key", "out", "json", "plot") or (
            (options.workload or options.dataset) and key in ("scenario", "modalities", "lengths")
        ):
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


def load_values(parser: argparse.ArgumentParser, given: argparse.Namespace) -> dict[str, Any]:
    """The fields of ``LoadOptions``, checked against each other. Exits with status 2 and a message for bad ones."""
    scenario: Scenario = given.scenario
    try:
        modalities = parse_modalities(given.modality or _DEFAULT_MODALITY[scenario])
    except ValueError as error:
        parser.error(f"--modality: {error}")
    _check(parser, given, modalities)
    low, high = given.input_tokens or (64, 64)
    num_requests = given.num_requests
    if num_requests is None and not given.trace and not given.dataset:
        num_requests = _DEFAULT_NUM_REQUESTS.get(scenario)
    return dict(
        scenario=scenario,
        workload=given.workload,
        dataset=given.dataset,
        modalities=modalities,
        num_requests=num_requests,
        seed=given.seed,
        rate=given.rate,
        concurrency=given.concurrency or _DEFAULT_CONCURRENCY[scenario],
        trace=given.trace,
        lengths=Lengths(input_low=low, input_high=high, max_tokens=given.max_tokens or _DEFAULT_MAX_TOKENS[scenario]),
        own_input=bool(given.input_tokens or given.workload),
        own_output=bool(given.max_tokens or given.workload),
        shapes=_shapes(given),
        num_streams=given.streams,
        phase_s=given.phase,
        fresh_interval_s=given.fresh_interval,
        fresh_max_tokens=given.fresh_max_tokens,
        num_turns=given.turns,
        slo=_objective(given),
    )


def _shapes(given: argparse.Namespace) -> MediaShapes:
    if given.workload:
        return msgspec.structs.replace(WORKLOADS[given.workload].shapes, token_share=given.token_share)
    return MediaShapes(
        image_size=given.image_size,
        image_format=given.image_format,
        video_size=given.video_size,
        video_s=given.video_seconds,
        video_fps=given.video_fps,
        audio_s=given.audio_seconds,
        token_share=given.token_share,
    )


def _objective(given: argparse.Namespace) -> Slo | None:
    if given.objective:
        return OBJECTIVES[given.objective]
    return None if given.slo_ttft is None else Slo(given.slo_ttft, math.inf if given.slo_tbt is None else given.slo_tbt)


def _check(parser: argparse.ArgumentParser, given: argparse.Namespace, modalities: Mapping[Modality, float]) -> None:
    """Check the options against each other. Exits with status 2."""
    if given.workload:
        refuse_options(parser, given, (*_TEXTS, *_MEDIA), f"--workload {given.workload} has requests of its own")
    if given.dataset:
        texts = [name for name in _TEXTS if name != "max_tokens"]
        refuse_options(
            parser, given, (*texts, *_MEDIA, "workload", "token_share"), f"--dataset {given.dataset} has requests of its own"
        )
    if given.objective:
        refuse_options(parser, given, ("slo_ttft", "slo_tbt"), f"--objective {given.objective} says TTFT and TBT")
    if given.trace and given.concurrency is not None:
        parser.error("--trace has arrivals of its own: it goes with --rate, which stretches them, not with --concurrency")
    if given.scenario == "stall":
        if given.trace or given.rate is not None or given.concurrency is not None:
            parser.error("the stall scenario has --streams and --fresh-interval instead of --rate, --concurrency and --trace")
        if len(modalities) != 1 or "text" in modalities:
            parser.error("the stall scenario takes one --modality for the fresh requests: image, video or audio")
    if given.scenario == "chat" and (given.trace or given.rate is not None):
        parser.error("the chat scenario has --concurrency: conversations at a time, each turn after the one before")
    if given.slo_ttft is None and given.slo_tbt is not None:
        parser.error("--slo-tbt needs --slo-ttft")


def refuse_options(parser: argparse.ArgumentParser, given: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Exit with status 2 if one of these options has another value than its default's."""
    for name in names:
        if getattr(given, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} {getattr(given, name)}: {why}")


def add_load(parser: argparse.ArgumentParser) -> None:
    """Add the options of a load."""
    add = parser.add_argument
    add("--workload", choices=tuple(WORKLOADS), help="requests shaped as those of a data set or a trace, instead of a scenario")
    add(
        "--dataset",
        type=Path,
        metavar="FILE",
        help="requests of a file, JSON or JSON lines: messages, conversations (ShareGPT, LLaVA) or prompts, with paths of media",
    )
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
        type=number("rate", float, above=0),
        help="requests per second, Poisson; inf: all at once; with --trace: its mean rate",
    )
    load.add_argument(
        "--concurrency", type=number("concurrency", int, least=1), help="requests at a time (default: 4); chat: conversations (1)"
    )
    add("--trace", type=Path, metavar="FILE", help="arrivals and lengths of a Mooncake .jsonl or Azure .csv trace")
    add(
        "--num-requests",
        type=number("number", int, least=1),
        help="default: 64, or all of a trace or a data set (more than it has: again); stall: fresh requests; chat: conversations (8)",
    )
    add("--seed", type=number("seed", int, least=0), default=0)
    _add_content(add)
    _add_stall(add)
    add("--turns", type=number("turns", int, least=1), default=5, help="chat: questions of a conversation (%(default)s)")
    add("--objective", choices=tuple(OBJECTIVES), metavar="MODEL/WORKLOAD", help="that of a text: " + ", ".join(OBJECTIVES))
    add("--slo-ttft", type=number("seconds", float, above=0), metavar="S", help="report the share of requests under it")
    add("--slo-tbt", type=number("seconds", float, above=0), metavar="S", help="and with 90 %% of their TBTs under this")


def _add_content(add: Callable[..., object]) -> None:
    """Options for the contents of the requests."""
    add("--input-tokens", type=_token_range, metavar="N|LOW-HIGH", help="text tokens per prompt (64)")
    add(
        "--max-tokens",
        type=number("tokens", int, least=1),
        help="tokens per answer (64; stall: 1024; chat: 32; --dataset: as recorded)",
    )
    add("--image-size", type=image_size, default=(336, 336), metavar="WxH")
    add("--image-format", choices=("png", "jpeg"), default="png")
    add("--video-size", type=_even_size, default=(320, 240), metavar="WxH")
    add("--video-seconds", type=number("seconds", float, above=0), default=2.0)
    add("--video-fps", type=number("fps", int, least=1), default=8)
    add("--audio-seconds", type=number("seconds", float, above=0), default=2.0)
    add("--token-share", type=share, default=1.0, metavar="SHARE", help="ask mmrt for this share of the tokens of pictures and videos")


def _add_stall(add: Callable[..., object]) -> None:
    add("--streams", type=number("streams", int, least=1), default=4, help="stall: text streams (%(default)s)")
    add("--phase", type=number("seconds", float, above=0), default=15.0, help="stall: seconds of each phase (%(default)s)")
    add(
        "--fresh-interval",
        type=number("seconds", float, above=0),
        default=1.0,
        help="stall: seconds between fresh requests (%(default)s)",
    )
    add(
        "--fresh-max-tokens",
        type=number("tokens", int, least=1),
        default=16,
        help="stall: answer of a fresh request (%(default)s)",
    )


def number(name: str, kind: Callable[[str], ValueT], *, least: float = -math.inf, above: float = -math.inf) -> Callable[[str], ValueT]:
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


def share(text: str) -> float:
    """A share above 0 and up to 1, for argparse."""
    value = number("share", float, above=0)(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"share {text} must be at most 1")
    return value


def precision(text: str) -> float:
    """The distance of two rates of a search, as a share, for argparse. Below 0.001 no search would end."""
    number("share", float, least=LEAST_PRECISION)(text)
    return share(text)


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
