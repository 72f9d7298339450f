"""The cost model: how long each stage works, alone and beside others, and what a request costs on its way to the controller and back.

``profile`` measures one and writes it as a JSON file; ``roofline`` computes one. Files for a few models are in ``costs/``. Pure except
for reading files. All times are seconds.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Literal

import msgspec

from mmrt.bench.environment import Environment
from mmrt.models.architecture import ModelConfig
from mmrt.runtime.bus.copy_plans import Load, LoadSegments, Transfer
from mmrt.runtime.bus.plans import Analyse, Encode, Plan, Prefill, PreprocessSegment
from mmrt.schema.media import MediaKind, SegmentShape

FORMAT_VERSION = 3
CONTEXT_QUANTUM = 256  # tokens: the cost of a decode step changes with so many more in its batch
SHIPPED = Path(__file__).with_name("costs")


class CostsError(ValueError):
    """A cost file cannot be used; the message names the file."""


class Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """seconds = fixed_s + max(least_s, per_unit_s * units) + per_square_s * squares.

    ``least_s`` is the time to read the weights, which few units do not shorten. ``squares``: of attention, see ``prefill_squares`` and
    ``encode_squares``. ``points``: (units, seconds), by rising units, in place of the first two terms. Between two of them the time
    changes evenly, and beyond the last one as before it, but it does not fall there.
    """

    fixed_s: float = 0.0
    per_unit_s: float = 0.0
    per_square_s: float = 0.0
    least_s: float = 0.0
    points: tuple[tuple[float, float], ...] = ()

    def seconds(self, units: float, squares: float = 0.0) -> float:
        """The time of so much work, alone on the machine."""
        first_s = _between(self.points, units) if self.points else self.fixed_s + max(self.least_s, self.per_unit_s * units)
        return first_s + self.per_square_s * squares

    @property
    def saturation(self) -> float | None:
        """Units of which the growing part takes as long as the fixed one (TI14): up to there more units cost little, beyond the time
        grows with them. With ``points`` it grows as behind the last but one. None where it does not grow."""
        fixed_s, per_unit_s = self.fixed_s + self.least_s, self.per_unit_s
        if len(self.points) > 1:
            (before, before_s), (last, last_s) = self.points[-2:]
            fixed_s, per_unit_s = self.points[0][1], (last_s - before_s) / (last - before)
        return fixed_s / per_unit_s if per_unit_s > 0 else None

    def times(self, factor: float) -> "Line":
        """The line of the same work, so many times as slow."""
        points = tuple((units, factor * seconds) for units, seconds in self.points)
        fields = {field: factor * getattr(self, field) for field in ("fixed_s", "per_unit_s", "per_square_s", "least_s")}
        return Line(**fields, points=points)


class Overheads(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times outside the stages. ``ingress_s``: of a request from its client to the controller, one request after the other, and
    ``ingress_token_s`` for each token of its prompt, ``ingress_byte_s`` for each byte of its media; ``fill_byte_s``: to write media
    pages; ``egress_s``: of a token from its commit to the client; ``message_s``: of a message on the bus; ``tick_s``: from a
    message's arrival to the controller's decision."""

    ingress_s: float = 0.0
    ingress_token_s: float = 0.0
    ingress_byte_s: float = 0.0
    fill_byte_s: float = 0.0
    egress_s: float = 0.0
    message_s: float = 0.0
    tick_s: float = 0.0


class Delays(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured times outside the stages, all equally likely, in place of those of ``Overheads``. An empty list: as there."""

    ingress_s: list[float] = []
    message_s: list[float] = []
    tick_s: list[float] = []


class Answers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens of an answer in the next prompt of a conversation. Its text may be tokenized differently there.

    ``kept``: how many leading tokens stay the same, each number equally likely; None: all. Empty: all, always. ``growth``: tokens that
    come back for each one that does not stay.
    """

    kept: list[int | None] = []
    growth: float = 1.0


class Costs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Units of ``analyse`` are pixels of a picture and bytes of other media; of ``preprocess`` and ``encode`` patch or mel rows; of
    ``prefill`` tokens; of ``decode`` sequences of a step.

    ``interference``: by the stages that work at once, joined by "+" in alphabetical order, the rate of each as a share of its speed
    alone. ``threads`` and ``nice`` of stages and ``num_cores`` tell what other sets and further instances cost (``interference``).
    ``environment``: where it was measured; None for a roofline.

    ``alone``, ``beside``: while decode does nothing, and while it works. ``egress``: measured times of a stream's tokens from commit to
    client, one after the other, for a stall delays several; None: with the next token; empty: as ``overheads``. ``egress_single``:
    likewise, of steps over one sequence. ``spreads``: by set of stages at work, as in ``interference``, and by stage: factors, all
    equally likely, that tell what plans and steps took of what lines and rates say; empty: none vary.
    """

    format_version: int = FORMAT_VERSION
    name: str
    origin: Literal["measured", "roofline"]
    note: str = ""
    model: ModelConfig
    device: str
    num_cores: int
    threads: dict[str, int]
    nice: dict[str, int] = {}
    environment: Environment | None
    analyse: dict[MediaKind, Line]
    preprocess: dict[MediaKind, Line]
    encode: dict[MediaKind, Line]
    prefill: Line
    decode: Line
    decode_context_s: float  # per token in the KV cache of a step's batch
    decode_wake_s: float = 0.0  # more of the first step after a pause, in which decode had nothing to do
    overheads: Overheads
    interference: dict[str, dict[str, float]]
    alone: Delays = Delays()
    beside: Delays = Delays()
    egress: list[float | None] = []
    egress_single: list[float | None] = []
    spreads: dict[str, dict[str, list[float]]] = {}
    answers: Answers = Answers()

    @property
    def title(self) -> str:
        """The name, with a warning where nothing was measured."""
        return self.name if self.origin == "measured" else f"{self.name} (roofline, never measured)"


def load_costs(name: str) -> Costs:
    """Load a cost file by its path, or one of ``shipped_costs`` by name. Raises: CostsError."""
    path = Path(name) if name.endswith(".json") else SHIPPED / f"{name}.json"
    try:
        costs = msgspec.json.decode(path.read_bytes(), type=Costs)
    except FileNotFoundError:
        raise CostsError(
            f"no costs {name!r}; there are {', '.join(shipped_costs())}, or give a .json file of mmrt bench profile"
        ) from None
    except OSError as error:
        raise CostsError(f"cannot read {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise CostsError(f"{path} is no cost file: {error}") from None
    if costs.format_version != FORMAT_VERSION:
        raise CostsError(f"{path} has format {costs.format_version}, this version reads {FORMAT_VERSION}: run mmrt bench profile again")
    _check(path, costs)
    return costs


def save_costs(path: Path, costs: Costs) -> None:
    """Write a cost file. Raises: OSError."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(costs)) + b"\n")


def shipped_costs() -> list[str]:
    """Names of the cost files that come with mmrt."""
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def _check(path: Path, costs: Costs) -> None:
    """Raises: CostsError for times and rates that no machine has."""

    def refuse(what: str, value: float, limit: str) -> None:
        raise CostsError(f"{path}: {what} is {value}, it must be {limit}")

    lines = {"prefill": costs.prefill, "decode": costs.decode}
    for name, kinds in (("analyse", costs.analyse), ("preprocess", costs.preprocess), ("encode", costs.encode)):
        lines |= {f"{name}.{kind}": line for kind, line in kinds.items()}
    times = {"decode_context_s": costs.decode_context_s, "decode_wake_s": costs.decode_wake_s, "answers.growth": costs.answers.growth}
    times |= {f"answers.kept {number}": count for number, count in enumerate(costs.answers.kept) if count is not None}
    for name, ways in (("egress", costs.egress), ("egress_single", costs.egress_single)):
        times |= {f"{name} {number}": seconds for number, seconds in enumerate(ways) if seconds is not None}
    for name, delays in (("alone", costs.alone), ("beside", costs.beside)):
        for field, values in msgspec.structs.asdict(delays).items():
            times |= {f"{name}.{field} {number}": seconds for number, seconds in enumerate(values)}
    for name, line in lines.items():
        times |= {f"{name}.{field}": value for field, value in msgspec.structs.asdict(line).items() if field != "points"}
        times |= {f"{name}.points {number}": seconds for number, (_, seconds) in enumerate(line.points)}
        units = [units for units, _ in line.points]
        if any(count < 0 for count in units) or any(before >= after for before, after in pairwise(units)):
            raise CostsError(f"{path}: the units of {name}.points must be at least 0, and rise from each to the next")
    times |= {f"overheads.{field}": value for field, value in msgspec.structs.asdict(costs.overheads).items()}
    for what, value in times.items():
        if not 0 <= value < math.inf:
            refuse(what, value, "at least 0")
    for together, rates in costs.interference.items():
        for stage, rate in rates.items():
            if not 0 < rate < math.inf:
                refuse(f"interference of {together}: the rate of {stage}", rate, "above 0")
            if stage not in together.split("+"):
                raise CostsError(f"{path}: interference of {together} has a rate of {stage}, which is not one of them")
    for together, spread in costs.spreads.items():
        for stage, factors in spread.items():
            if not factors or not all(0 < factor < math.inf for factor in factors):
                raise CostsError(f"{path}: spreads of {together}: the factors of {stage} must be above 0, and at least one")
    if costs.num_cores < 1:
        refuse("num_cores", costs.num_cores, "at least 1")


def _between(points: Sequence[tuple[float, float]], units: float) -> float:
    """The seconds of so many units on the straight lines through these points. Outside of them the line of the nearest two goes on.
    More units than the last point's take no less time than it, and the result is never negative."""
    if len(points) == 1:
        return points[0][1]
    at = bisect_left(points, units, 1, len(points) - 1, key=itemgetter(0))
    (before, before_s), (after, after_s) = points[at - 1 : at + 1]
    seconds = before_s + (units - before) / (after - before) * (after_s - before_s)
    return max(0.0, seconds, after_s if units > after else 0.0)


def prefill_squares(start: int, end: int) -> float:
    """Return the tokens that attention reads for tokens [start, end): for each, those before it."""
    return (end**2 - start**2) / 2


def encode_squares(num_rows: int) -> float:
    """Return the rows that full attention reads in a part of an encode plan: for each row, all of the part."""
    return float(num_rows) ** 2


def plan_seconds(costs: Costs, plan: Plan) -> float:
    """The time of a plan, alone on the machine. Raises: CostsError for a kind of medium without costs."""
    match plan:
        case Prefill():
            return costs.prefill.seconds(plan.units, sum([prefill_squares(chunk.start, chunk.end) for chunk in plan.chunks]))
        case Encode():
            shapes = [part.shape for part in plan.parts]
            return sum(_encode_seconds(costs, kind, shapes) for kind in dict.fromkeys(shape.kind for shape in shapes))
        case Analyse():
            media = plan.media
            return _line(costs, "analyse", media.kind).seconds(media.work if media.kind == "image" else media.num_bytes)
        case PreprocessSegment():
            return _line(costs, "preprocess", plan.media.kind).seconds(plan.units)
        case Load() | LoadSegments():
            raise CostsError("pages of files (cache.dir) are not simulated")
        case Transfer():
            raise CostsError("copies of KV pages between devices ([[devices]]) are not simulated")


def _encode_seconds(costs: Costs, kind: MediaKind, shapes: Sequence[SegmentShape]) -> float:
    rows = [shape.num_rows for shape in shapes if shape.kind == kind]
    return _line(costs, "encode", kind).seconds(sum(rows), sum(map(encode_squares, rows)))


def _line(costs: Costs, work: Literal["analyse", "preprocess", "encode"], kind: MediaKind) -> Line:
    lines: dict[MediaKind, Line] = getattr(costs, work)
    if kind not in lines:
        raise CostsError(f"the costs {costs.name} have no line to {work} {kind}; there are {', '.join(lines)}")
    return lines[kind]


def step_seconds(costs: Costs, num_sequences: int, context: int) -> float:
    """The time of a decode step of so many sequences with so many tokens in their KV cache together."""
    return costs.decode.seconds(num_sequences) + costs.decode_context_s * (context // CONTEXT_QUANTUM * CONTEXT_QUANTUM)
