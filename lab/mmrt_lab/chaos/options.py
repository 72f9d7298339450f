"""The command line of ``mmrt chaos``, checked before anything is started."""

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import msgspec

from mmrt.bench.own_run import layout_argument
from mmrt.bench.processes import SUPERVISOR, ZYGOTE
from mmrt.models.architecture import WeightFormat
from mmrt.runtime.config.sections import FLOAT32_WEIGHTS, TurnsMode
from mmrt.runtime.errors import ConfigError
from mmrt.runtime.stage_table import DEFAULT_LAYOUT, devices_of

from .faults import KINDS, LINE, MEANINGS, PHASES, Cell, Kind, Phase, cells, parse_name, targets_of
from .storm_config import Dtype

SOAK_MINUTES = 30.0
SOAK_INTERVAL_S = 10.0
SOAK_CANCEL_SHARE = 0.01
NUM_LINES = 1000
LINE_PAIRS = 0.2
_EPILOG = """kinds:
{kinds}
processes: {targets}
phases: {phases}

Every storm prints its seed; a failed fault is asked for again with --replay SEED:INDEX (SEED:dINDEX for one in the drain).
Exit status: 0 every promise was kept, 1 one was broken, 2 wrong usage."""


_FIELDS = {"faults": "num_faults", "actors": "targets", "drains": "num_drains", "cancel": "cancel_share", "interval": "interval_s"}
_FIELDS |= {"default_restarts": "has_default_restarts", "soak": "is_soak", "lines": "is_at_lines"}


class ChaosOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options. ``num_faults`` or ``minutes``, whichever comes first; None is no limit."""

    seed: int
    num_faults: int | None
    minutes: float | None
    num_drains: int
    concurrency: int
    cancel_share: float
    pairs: float
    interval_s: float
    quiet_every: int
    max_tokens: int
    model: str
    dtype: Dtype
    weights: WeightFormat
    layout: str
    turns: TurnsMode
    has_default_restarts: bool
    json: Path | None
    out: Path | None
    kinds: list[Kind]
    targets: list[str]
    phases: list[Phase]
    replay: tuple[int, bool, int] | None
    is_soak: bool
    is_at_lines: bool

    @property
    def is_exact(self) -> bool:
        """True if a text must equal the undisturbed one: float32 computes it, so that other sums in another batch change no token.

        In bfloat16, int8, int8g and int4 activations are rounded, and a sum of another order may fall to the other side.
        """
        return self.dtype == "float32" and self.weights not in ("int8", "int8g", "int4")

    @property
    def filters(self) -> str:
        """The options that ask for the same storm again: with others an index means another fault, or hits another run."""
        kinds, targets = ([LINE], _targets(self.layout, True)) if self.is_at_lines else (KINDS, targets_of(self.layout))
        chosen = (("kinds", self.kinds, kinds), ("actors", self.targets, targets), ("phases", self.phases, PHASES))
        words = [f"--{name} {','.join(some)} " for name, some, every in chosen if list(some) != list(every)]
        words += [f"--dtype {self.dtype} "] if self.dtype != "float32" else []
        words += [f"--weights {self.weights} "] if self.weights != "auto" else []
        words += [f"--layout {self.layout} "] if self.layout != DEFAULT_LAYOUT else []
        words += [f"--turns {self.turns} "] if self.turns != "off" else []
        words += ["--default-restarts "] if self.has_default_restarts else []
        words += ["--lines "] if self.is_at_lines else []
        return "".join(words) + (f"--pairs {self.pairs:g} " if self.pairs else "")

    @property
    def storm_cells(self) -> list[Cell]:
        return cells(self.kinds, self.targets, [phase for phase in self.phases if phase != "drain"], self.layout)

    @property
    def drain_cells(self) -> list[Cell]:
        return cells(self.kinds, self.targets, [phase for phase in self.phases if phase == "drain"], self.layout)


def parse_options(argv: Sequence[str] | None) -> ChaosOptions:
    """Read the command line. Exits with status 2 and a message when it makes no sense."""
    parser = _parser()
    given = argparse.Namespace(**{_FIELDS.get(name, name): value for name, value in vars(parser.parse_args(argv)).items()})
    soak, replay = given.is_soak, given.replay
    lines = given.is_at_lines
    if soak and (given.kinds or given.phases):
        parser.error("--soak kills processes at fixed times: --kinds and --phases do not go with it")
    if lines and (given.kinds or soak):
        parser.error("--lines kills at lines of the source: --kinds and --soak do not go with it")
    if given.num_faults is None and given.minutes is None:
        given.minutes = SOAK_MINUTES if soak else None
        given.num_faults = None if soak else 1 if replay else NUM_LINES if lines else 30
    if given.num_drains is None:
        given.num_drains = 0 if soak or lines or (replay and not replay[1]) else 1
    if given.cancel_share is None:
        given.cancel_share = SOAK_CANCEL_SHARE if soak else 0.08
    if given.interval_s is None:
        given.interval_s = SOAK_INTERVAL_S if soak else 0.0
    given.seed = replay[0] if replay else given.seed
    if given.pairs is None:
        given.pairs = LINE_PAIRS if lines else 0.0
    given.kinds = ["kill"] if soak else [LINE] if lines else given.kinds or list(KINDS)
    targets = _targets(given.layout, lines)
    if given.targets is None:
        given.targets = [target for target in targets if not (soak and target == ZYGOTE)]
    else:
        try:
            given.targets = _choices(targets)(given.targets)
        except argparse.ArgumentTypeError as error:
            parser.error(f"argument --actors: {error}")
    given.phases = [phase for phase in PHASES if phase not in ("idle", "drain")] if soak else given.phases or list(PHASES)
    options = ChaosOptions(**vars(given))
    if options.dtype == "bfloat16" and options.weights in FLOAT32_WEIGHTS:
        parser.error(f"--weights {options.weights} are multiplied in float32: --dtype bfloat16 does not go with them")
    if replay is None and not options.storm_cells and not options.drain_cells:
        parser.error("no kind of fault in --kinds fits --actors and --phases")
    return options


def _targets(layout: str, is_at_lines: bool) -> tuple[str, ...]:
    """The processes that can be hit."""
    return (*targets_of(layout), SUPERVISOR) if is_at_lines else targets_of(layout)


def _parser() -> argparse.ArgumentParser:
    epilog = _EPILOG.format(
        kinds="\n".join(f"  {kind:<8}{meaning}" for kind, meaning in MEANINGS.items()),
        targets=", ".join(targets_of(DEFAULT_LAYOUT)),
        phases=", ".join(PHASES),
    )
    parser = argparse.ArgumentParser(
        prog="mmrt chaos",
        description="A seeded storm of faults over a run of its own, under load; every promise is checked throughout.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--seed", type=_whole(0), default=1, help="which storm (%(default)s)")
    add("--faults", type=_whole(0), metavar="N", help="end after N faults (30, unless --minutes is given)")
    add("--minutes", type=_positive, metavar="M", help="end after M minutes")
    add("--kinds", type=_choices(KINDS), metavar="K,…", help="only these kinds")
    add("--actors", metavar="A,…", help="only these processes; of several decodes the second is decode.1")
    add("--phases", type=_choices(PHASES), metavar="P,…", help="only these phases")
    add("--drains", type=_whole(0), metavar="N", help="times that the run is taken down in mid-stream, with a fault in its drain (1)")
    add("--replay", type=_replay, metavar="SEED:INDEX", help="only this fault of this storm, --faults times (1)")
    add("--soak", action="store_true", help="30 minutes with a kill every 10 s and 1 %% cancelled requests; growth is a failure")
    add("--concurrency", type=_whole(1), default=8, help="requests at a time (%(default)s)")
    add("--cancel", type=_share, metavar="SHARE", help="share of requests whose client disconnects (0.08; soak 0.01)")
    add(
        "--lines",
        action="store_true",
        help=f"{NUM_LINES:,} kills at lines of the source, of every process, the supervisor's among them",
    )
    add("--pairs", type=_share, metavar="SHARE", help=f"share of faults that also kill another process (0; lines {LINE_PAIRS:g})")
    add("--interval", type=_number, metavar="S", help="least seconds between faults (0; soak 10)")
    add("--quiet-every", type=_whole(1), default=10, metavar="N", help="faults between two quiet points (%(default)s)")
    add("--max-tokens", type=_whole(8), default=120, help="of the longest stream (%(default)s)")
    add("--model", default="", metavar="DIR", help="an omni checkpoint (default: a tiny one is made)")
    add(
        "--dtype",
        choices=get_args(Dtype),
        default="float32",
        help="model.dtype; in bfloat16 texts may change, only their share is shown",
    )
    add("--weights", choices=get_args(WeightFormat), default="auto", help="model.weights; in int8 and int4 texts may change, as above")
    add("--layout", type=_layout, default=DEFAULT_LAYOUT, help="processes of the model's stages, as 2E+PD or EP@0+D@1 (%(default)s)")
    add("--turns", choices=get_args(TurnsMode), default="off", help="actors.turns (%(default)s)")
    add("--default-restarts", action="store_true", help="use the default restart limit and backoff; otherwise no actor is given up")
    add("--json", type=Path, metavar="FILE", help="write the report; - is standard output")
    add("--out", type=Path, metavar="DIR", help="where the logs of a storm with failures go (default: they stay where they are)")
    return parser


def _whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return parse


def _layout(text: str) -> str:
    """Check a layout. Its devices are those that it names."""
    if "*" in text:
        raise argparse.ArgumentTypeError(f"{text!r} does not name each device, as EP@0+D@1 does")
    try:
        return layout_argument(text, tuple(devices_of(text).values()))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _number(text: str) -> float:
    if not re.fullmatch(r"[0-9]+(\.[0-9]*)?|\.[0-9]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return float(text)


def _positive(text: str) -> float:
    if (value := _number(text)) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be above 0")
    return value


def _share(text: str) -> float:
    if (value := _number(text)) > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 1")
    return value


def _choices(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        chosen = [name for name in text.split(",") if name]
        if unknown := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        if not chosen:
            raise argparse.ArgumentTypeError(f"nothing was chosen of {', '.join(known)}")
        return chosen

    return parse


def _replay(text: str) -> tuple[int, bool, int]:
    try:
        return parse_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
