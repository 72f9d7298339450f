"""The layouts that the planner compares: every way to divide devices among the methods of disaggregation (pure; TI1, TI10)."""

from collections.abc import Iterator, Mapping

from mmrt.runtime.stage_table import MAX_INSTANCES, STAGES, ProcessSpec, format_layout, parse_layout

METHODS = ("E+P+D", "EP+D", "ED+P")  # of the text
LEAST_DEVICES, MOST_DEVICES = 3, MAX_INSTANCES


def candidates(num_devices: int) -> list[str]:
    """Return all layouts of the three methods: 2 C(N-1, 1) + C(N-1, 2), which is 35 for 8 devices (TI10).

    Raises: ValueError for fewer devices than a layout divides, or more than a run has instances of a stage.
    """
    if not LEAST_DEVICES <= num_devices <= MOST_DEVICES:
        raise ValueError(f"{num_devices} devices: the planner divides {LEAST_DEVICES} to {MOST_DEVICES}")
    return [join(method, counts) for method in METHODS for counts in _compositions(num_devices, len(parse_layout(method)))]


def colocated(num_devices: int) -> str:
    """Return the layout in which every device has all stages: outside of the text's space, its default at the start (TI1)."""
    return join("EPD", (num_devices,))


def join(method: str, counts: tuple[int, ...]) -> str:
    """Return the layout with so many processes of each kind of a method."""
    kinds = zip(parse_layout(method), counts, strict=True)
    return format_layout(ProcessSpec(process.stages, count) for process, count in kinds)


def divided(method: str, shares: Mapping[str, int]) -> str:
    """Return the layout of a method in which stages that share a process have their devices together. ``shares``: devices of each
    stage, by its letter."""
    return join(method, tuple(sum(shares[letter] for letter in kind) for kind in method.split("+")))


def processes(layout: str) -> list[tuple[str, int]]:
    """Return the letters of each kind of process that computes, and how many there are."""
    computing = [process for process in parse_layout(layout) if STAGES[process.stages[0]].can_scale]
    return [("".join(STAGES[stage].letter for stage in process.stages), process.count) for process in computing]


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write ``total`` as so many numbers of at least 1, in order."""
    if parts == 1:
        if total >= 1:
            yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in _compositions(total - first, parts - 1):
            yield first, *rest
