"""What the exam finds: answers, counted per row of a table, and the table. Pure but for the terminal."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec
from rich.console import Console

from mmrt.bench.environment import Environment
from mmrt.bench.render import show_environment, show_table

from ..data.kinds import normalised
from ..data.strange import OTHERWISE
from .cases import COMBINED, NOT_LEARNED, SEEN


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """How many of so many."""

    num_right: int = 0
    num: int = 0

    @property
    def value(self) -> float:
        return self.num_right / self.num if self.num else 1.0

    def __add__(self, other: "Share") -> "Share":
        return Share(num_right=self.num_right + other.num_right, num=self.num + other.num)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One question with what came back. ``token_ids`` with the one that ends the answer."""

    row: str
    medium: str
    index: int
    degraded: bool
    question: str
    expected: str
    reply: str
    token_ids: list[int]
    is_right: bool
    num_prompt_tokens: int = 0
    reference: str | None = None
    reference_is_right: bool | None = None
    is_equal: bool | None = None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One task, or one kind of question beside other media."""

    name: str
    combined: bool
    clean: Share
    degraded: Share
    reference_clean: Share | None = None
    reference_degraded: Share | None = None

    @property
    def both(self) -> Share:
        return self.clean + self.degraded


class Guided(msgspec.Struct, frozen=True, kw_only=True):
    """The degraded half with one guidance scale."""

    scale: float
    all: Share
    rows: dict[str, Share]


class Shared(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks on pictures, or on videos, with a share of their tokens. ``num_prompt_tokens``: mean, with those of the words."""

    share: float
    kind: str
    all: Share
    num_prompt_tokens: float
    rows: dict[str, Share]


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What was special about the run; None: not known, of a server that was running."""

    kv_dtype: str | None = None
    weights: str | None = None
    layout: str | None = None
    restarts: int = 0

    @property
    def words(self) -> list[str]:
        words = [] if self.kv_dtype in (None, "float32") else [f"KV cache in {self.kv_dtype}"]
        words += [] if self.weights in (None, "float32") else [f"weights in {self.weights}"]
        words += [] if self.layout in (None, "E+P+D") else [f"layout {self.layout}"]
        return words + ([f"{self.restarts} restarts"] if self.restarts else [])


class QualityBench(msgspec.Struct, frozen=True, kw_only=True):
    environment: Environment
    checkpoint: str
    seed: int
    setting: Setting = Setting()
    rows: list[Row]
    equal: Share | None  # answers whose tokens are transformers'
    guided: list[Guided]
    shared: list[Shared] = []
    answers: list[Answer]

    @property
    def is_quantized(self) -> bool:
        """Then some answers differ from transformers' by right."""
        return self.setting.kv_dtype in ("int8", "fp8") or self.setting.weights in ("int8", "int4")


def share(truths: Iterable[bool]) -> Share:
    """How many of them are true."""
    known = list(truths)
    return Share(num_right=sum(known), num=len(known))


def row_of_answers(name: str, answers: Sequence[Answer]) -> Row:
    halves = [[a for a in answers if a.row == name and a.degraded == degraded] for degraded in (False, True)]
    clean, degraded = (share(a.is_right for a in half) for half in halves)
    row = Row(name=name, combined=name in COMBINED, clean=clean, degraded=degraded)
    if any(a.reference is not None for half in halves for a in half):
        theirs = [share(a.reference_is_right is True for a in half) for half in halves]
        row = msgspec.structs.replace(row, reference_clean=theirs[0], reference_degraded=theirs[1])
    return row


def guided_of_answers(scale: float, answers: Sequence[Answer]) -> Guided:
    rows: dict[str, list[bool]] = defaultdict(list)
    for answer in answers:
        rows[answer.row].append(answer.is_right)
    tasks = share(a.is_right for a in answers if a.row not in NOT_LEARNED)
    return Guided(scale=scale, all=tasks, rows={name: share(row) for name, row in rows.items()})


def shared_of_answers(token_share: float, answers: Sequence[Answer]) -> list[Shared]:
    """Of pictures, then of videos, as far as there are any."""
    found = []
    for kind, media in SEEN.items():
        rows: dict[str, list[bool]] = defaultdict(list)
        mine = [answer for answer in answers if answer.medium in media and answer.row not in NOT_LEARNED]
        for answer in mine:
            rows[answer.row].append(answer.is_right)
        if mine:
            found.append(
                Shared(
                    share=token_share,
                    kind=kind,
                    all=share(answer.is_right for answer in mine),
                    num_prompt_tokens=sum(answer.num_prompt_tokens for answer in mine) / len(mine),
                    rows={name: share(row) for name, row in rows.items()},
                )
            )
    return found


def shortcomings(bench: QualityBench, require: float, require_combined: float) -> list[str]:
    """Which tasks are below the required shares, in words; tokens that are not transformers' among them."""
    lines = []
    for row in _tasks(bench):
        least = require_combined if row.combined else require
        if row.both.value < least:
            lines.append(f"{row.name}: {100 * row.both.value:.1f} % of {row.both.num} are right, required {100 * least:g} %")
    if bench.equal is not None and not bench.is_quantized and bench.equal.num_right < bench.equal.num:
        lines.append(f"{bench.equal.num - bench.equal.num_right} of {bench.equal.num} answers are not transformers'")
    return lines


def refusals(bench: QualityBench) -> Share:
    """How many of the answers of the tasks say that what the model has learned is something else."""
    said = {normalised(answer) for answer in OTHERWISE.values()}
    return share(normalised(answer.reply) in said for answer in bench.answers if answer.row not in NOT_LEARNED)


def show(console: Console, bench: QualityBench) -> None:
    """The rows, the sums, equality, and the curve of guidance."""
    show_environment(console, bench.environment)
    columns = ["", "clean", "degraded", "both", "n", "peer clean", "peer degraded"]
    tasks = _tasks(bench)
    shown = [*tasks, _total("all", tasks), *(row for row in bench.rows if row.name in NOT_LEARNED)]
    rows = [
        [row.name, *map(_percent, (row.clean, row.degraded, row.both)), str(row.both.num), *map(_percent, _reference_shares(row))]
        for row in shown
    ]
    title = "; ".join([f"{bench.checkpoint}: right answers in %, seed {bench.seed}", *bench.setting.words])
    if bench.equal is None:
        columns, rows = columns[:5], [row[:5] for row in rows]
    else:
        title += "; peer: transformers"
    show_table(console, title, columns, rows)
    if (refused := refusals(bench)).num_right:
        console.print(
            f"{refused.num_right} of {refused.num} answers of the tasks say that the media are of another world", highlight=False
        )
    if bench.equal is not None:
        is_same = bench.equal.num_right == bench.equal.num
        text = f"{bench.equal.num_right} of {bench.equal.num} answers are transformers', token for token"
        console.print(text, style="green" if is_same else "red", highlight=False)
    if bench.guided:
        plain = _total("all", tasks).degraded
        curve = [["none", _percent(plain), str(plain.num)], *([f"{g.scale:g}", _percent(g.all), str(g.all.num)] for g in bench.guided)]
        show_table(console, "degraded media", ["guidance scale", "right, %", "n"], curve)
    if bench.shared:
        curve = [[s.kind, f"{s.share:g}", f"{s.num_prompt_tokens:.0f}", _percent(s.all), str(s.all.num)] for s in bench.shared]
        show_table(console, "fewer visual tokens", ["", "share", "prompt tokens", "right, %", "n"], curve)


def changes(bench: QualityBench, before: QualityBench) -> tuple[list[tuple[str, Share, Share]], Share]:
    """Rows of both with another share of right answers (name, then, now); of the questions of both, how many kept their tokens."""
    then = {row.name: row.both for row in before.rows}
    rows = [(row.name, then[row.name], row.both) for row in bench.rows if row.name in then and row.both.value != then[row.name].value]
    tokens = {_question_of(answer): answer.token_ids for answer in before.answers}
    kept = share(tokens[_question_of(answer)] == answer.token_ids for answer in bench.answers if _question_of(answer) in tokens)
    return rows, kept


def _question_of(answer: Answer) -> tuple[str, str, int, bool, str]:
    return answer.row, answer.medium, answer.index, answer.degraded, answer.question


def show_changes(console: Console, bench: QualityBench, before: QualityBench) -> None:
    """Both of ``changes``."""
    rows, kept = changes(bench, before)
    if rows:
        title = f"what has changed since {before.environment.date}: right answers in %"
        show_table(console, title, ["", "then", "now"], [[name, _percent(then), _percent(now)] for name, then, now in rows])
    told = [f"{kept.num_right} of {kept.num} answers kept their tokens"] if kept.num else []
    console.print("; ".join([*told, f"{len(rows)} of {len(bench.rows)} rows have changed"]), highlight=False)


def _tasks(bench: QualityBench) -> list[Row]:
    return [row for row in bench.rows if row.name not in NOT_LEARNED]


def _total(name: str, rows: Sequence[Row]) -> Row:
    def added(shares: Iterable[Share | None]) -> Share:
        return sum((one for one in shares if one is not None), Share())

    return Row(
        name=name,
        combined=False,
        clean=added(row.clean for row in rows),
        degraded=added(row.degraded for row in rows),
        reference_clean=added(row.reference_clean for row in rows),
        reference_degraded=added(row.reference_degraded for row in rows),
    )


def _reference_shares(row: Row) -> tuple[Share, Share]:
    return row.reference_clean or Share(), row.reference_degraded or Share()


def _percent(one: Share) -> str:
    return f"{100 * one.value:.1f}" if one.num else "–"
