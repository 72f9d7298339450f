"""The fault, process and phase for each number of a storm: a function of seed and number, so that each fault can be replayed.

Pure. The kinds come in turn, each as often as the others, in an order that the seed shuffles anew for each turn. So do the cells of
a kind, process x phase: all of them come once before one comes again. Faults in the drain are a separate series, since each ends a
run.
"""

import itertools
import random
from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from mmrt.bench.processes import SUPERVISOR, ZYGOTE
from mmrt.runtime.stage_table import DEFAULT_LAYOUT, STAGES, actors_of, format_layout, instance_id, parse_layout, stage_of, torch_actors

Kind = Literal["kill", "stop", "pause", "term", "exit", "oom", "enospc", "lost", "late", "restart", "scale", "layout", "line"]
Phase = Literal["idle", "queued", "fetching", "decoding", "encoding", "prefill", "hand-over", "mid-stream", "drain"]
LINE: Kind = "line"  # --lines alone
KINDS: tuple[Kind, ...] = tuple(kind for kind in get_args(Kind) if kind != LINE)
PHASES: tuple[Phase, ...] = get_args(Phase)
EVERYBODY = "all"  # the target of a full file system, and of another layout

MEANINGS: dict[Kind, str] = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP, until the watchdog has found it",
    "pause": "SIGSTOP, and SIGCONT before anybody may call it a hang",
    "term": "SIGTERM from nobody in particular",
    "exit": "exit status 0 out of the blue",
    "oom": "no more address space than it has (RLIMIT_AS), for a while",
    "enospc": "the file system of the run directory is full, for a while",
    "lost": "a good part of the process's messages is lost, for a while",
    "late": "many of the process's messages come late and out of order, for a while",
    "restart": "mmrt restart: a new generation takes over while the old one works",
    "scale": "mmrt scale: one more of the stage, and as many as before after a while",
    "line": "SIGKILL at a line of its source that none has died at before",
    "layout": "mmrt layout set: other numbers of all processes of the stages, and the first layout after a while",
}
# The zygote has no bus and no fault hook; the kernel would handle its lack of memory.
_ZYGOTE_KINDS: frozenset[Kind] = frozenset({"kill", "stop", "pause", "term", "line"})
_MOST = 3  # processes of a kind in another layout
_SCALABLE = frozenset(name for name, stage in STAGES.items() if stage.can_scale)
_LENGTHS_S: dict[Kind, tuple[float, float]] = {
    "pause": (0.05, 1.0),
    "oom": (1.0, 3.0),
    "enospc": (0.5, 2.0),
    "lost": (0.5, 2.0),
    "late": (0.5, 2.0),
    "scale": (0.0, 2.0),
    "layout": (0.0, 2.0),
}


class Cell(msgspec.Struct, frozen=True, order=True):
    """One field of the matrix."""

    kind: Kind
    target: str
    phase: Phase


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A cell with all its random values. ``delay_s`` after the phase is seen, ``length_s`` of a lasting fault."""

    seed: int
    index: int
    cell: Cell
    delay_s: float
    length_s: float
    lost: float = 0.0  # share of messages
    late: float = 0.0
    second: str = ""  # a second target that is killed as well
    second_delay_s: float = 0.0
    layout: str = ""  # of the run for a while
    num_lines: int = 0  # that the process still comes to, of those that none has died at
    is_at_start: bool = False  # counted from the start of the next process on

    @property
    def name(self) -> str:
        """The name by which the fault can be replayed."""
        return f"{self.seed}:{'d' if self.cell.phase == 'drain' else ''}{self.index}"

    def describe(self) -> str:
        also = f" (and kill {self.second} {self.second_delay_s * 1000:.0f} ms later)" if self.second else ""
        return f"{self.name} {self.cell.kind} {self.cell.target} in phase {self.cell.phase}{also}"


def targets_of(layout: str) -> tuple[str, ...]:
    """The processes of a run that faults hit."""
    return *actors_of(layout), ZYGOTE


def cells(kinds: Sequence[Kind], targets: Sequence[str], phases: Sequence[Phase], layout: str = DEFAULT_LAYOUT) -> list[Cell]:
    """Every cell that makes sense, in a fixed order."""
    found = set()
    for kind, target, phase in itertools.product(kinds, targets, phases):
        if target == ZYGOTE and kind not in _ZYGOTE_KINDS:
            continue
        if target == SUPERVISOR and (kind != LINE or phase != "mid-stream"):
            continue  # its death ends the run, and the next one has to be started
        if phase == "drain" and kind in ("oom", "enospc", "restart", "scale", "layout"):
            continue  # the run is going away: the first two would only say so later, the others are refused
        if kind == "scale" and target != _first_of_scalable(target, layout):
            continue
        if kind == "layout" and stage_of(target) not in _SCALABLE:
            continue
        found.add(Cell(kind, EVERYBODY if kind in ("enospc", "layout") else target, phase))
    return sorted(found)


def _first_of_scalable(target: str, layout: str) -> str:
    """The first actor of the target's stage; "" if there cannot be one more."""
    stage = stage_of(target)
    return stage if stage in _SCALABLE and _count(target, layout) < STAGES[stage].max_count else ""


def _count(target: str, layout: str) -> int:
    """The number of actors of the target's stage."""
    return sum(stage_of(actor) == stage_of(target) for actor in actors_of(layout))


def _other_layout(rng: random.Random, layout: str) -> str:
    """One to three of each process, so that not all are as they were. Those before others with the same stages stay."""
    processes = parse_layout(layout)
    while True:
        others = []
        for place, process in enumerate(processes):
            is_last = not any({*process.stages} & {*later.stages} for later in processes[place + 1 :])
            others.append(msgspec.structs.replace(process, count=rng.randint(1, _MOST) if is_last else process.count))
        if (another := format_layout(others)) != layout:
            return another


def _cell_at(seed: int, index: int, choice: Sequence[Cell]) -> Cell:
    """The cell of this number: first its kind, then which of the kind's cells."""
    kinds = sorted({cell.kind for cell in choice})
    turn, place = divmod(index, len(kinds))
    random.Random(f"{seed}:{turn}:kinds").shuffle(kinds)
    kind = kinds[place]
    of_kind = [cell for cell in choice if cell.kind == kind]
    turn, place = divmod(turn, len(of_kind))
    random.Random(f"{seed}:{turn}:{kind}").shuffle(of_kind)
    return of_kind[place]


def fault_at(seed: int, index: int, choice: Sequence[Cell], pairs: float = 0.0, layout: str = DEFAULT_LAYOUT) -> Fault:
    """The fault of this number; a share of ``pairs`` comes with a second one, half of them
    on the same stage where it has several. Raises: ValueError without cells to choose from."""
    targets = targets_of(layout)
    if not choice:
        raise ValueError("no kind of fault fits these processes and phases")
    cell = _cell_at(seed, index, choice)
    rng = random.Random(f"{seed}:{index}:{cell.phase}")
    shortest_s, longest_s = _LENGTHS_S.get(cell.kind, (0.0, 0.0))
    others = [target for target in targets if target != cell.target and pairs > 0 and cell.phase != "drain"]
    if cell.target == SUPERVISOR:
        others = []
    if cell.kind == "stop" and cell.target == ZYGOTE and cell.phase != "drain":
        # A hung zygote goes unnoticed until an actor must be forked.
        others, pairs = sorted(target for target in targets if stage_of(target) in torch_actors()), 1.0
    siblings = [other for other in others if stage_of(other) == stage_of(cell.target)]
    if cell.kind == "scale":
        siblings.append(instance_id(stage_of(cell.target), _count(cell.target, layout)))  # the one that comes and goes
    another = _other_layout(rng, layout) if cell.kind == "layout" else ""
    if another:
        siblings = sorted({*actors_of(layout)} ^ {*actors_of(another)})
    is_paired = bool(others) and rng.random() < pairs
    second = rng.choice(siblings if is_paired and siblings and rng.random() < 0.5 else others) if is_paired else ""
    return Fault(
        seed=seed,
        index=index,
        cell=cell,
        delay_s=rng.choice((0.0, 0.0, rng.uniform(0, 0.02))),
        length_s=rng.uniform(shortest_s, longest_s),
        lost=rng.uniform(0.2, 0.9) if cell.kind == "lost" else 0.0,
        late=rng.uniform(0.3, 1.0) if cell.kind == "late" else 0.0,
        second=second,
        second_delay_s=rng.choice((0.0, rng.uniform(0, 0.05), rng.uniform(0, 1.0))) if second else 0.0,
        layout=another,
        num_lines=int(2 ** rng.uniform(0, 8)) if cell.kind == LINE else 0,
        is_at_start=cell.kind == LINE and cell.target not in (ZYGOTE, SUPERVISOR) and rng.random() < 0.25,
    )


def parse_name(text: str) -> tuple[int, bool, int]:
    """(seed, True for a fault of the drain, index) of "SEED:INDEX" or "SEED:dINDEX". Raises: ValueError."""
    seed, _, index = text.partition(":")
    number = index.removeprefix("d")
    if not (seed.isascii() and seed.isdigit() and number.isascii() and number.isdigit()):
        raise ValueError(f"{text!r} is not SEED:INDEX or SEED:dINDEX, such as 7:12 or 7:d0")
    return int(seed), index.startswith("d"), int(number)
