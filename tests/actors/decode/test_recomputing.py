"""When tokens are computed anew instead of copied. ``end_to_end/test_devices`` has what is computed."""

from contextlib import nullcontext
from typing import Any, cast

import pytest

from mmrt.actors.decode.recomputing import Pace, Recomputing
from mmrt.runtime.bus.copy_plans import TransferChunk

COMPANION = TransferChunk(0, 1, 1, 0, 64)  # it has no media


class Model:
    """Takes no time."""

    def prefill(self, chunks: list[object]) -> None:
        del chunks


def recomputing(is_idle: bool = True) -> Recomputing:
    anything: Any = None
    made = Recomputing(anything, cast(Any, Model()), anything, 16, lambda: is_idle, lambda _: nullcontext())
    made._chunk = lambda *_: anything  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize(
    ("copy_s", "token_s", "pays"),
    [(1.0, 0.01, True), (0.5, 0.01, False), (0.0, 0.01, False), (1.0, 0.0, False)],
    ids=["slow link", "fast link", "unknown link", "unknown prefill"],
)
def test_the_faster_way_is_taken(copy_s: float, token_s: float, pays: bool) -> None:
    assert recomputing().pays(COMPANION, 64, copy_s, token_s) == pays


def test_steps_come_first() -> None:
    assert not recomputing(is_idle=False).pays(COMPANION, 64, 1.0, 0.01)


def test_ones_own_pace_counts_once_it_is_known() -> None:
    made = recomputing()
    assert not made.pays(COMPANION, 64, 1.0, 1.0)
    for _ in range(3):
        made.compute(1, COMPANION, 0, 64)
    assert made.pays(COMPANION, 64, 1.0, 1.0)


def test_a_pace_is_that_of_most_pieces() -> None:
    pace = Pace()
    for _ in range(3):
        assert pace.unit_s == 0.0
        pace.took(100, 1.0)
    pace.took(100, 1000.0)
    assert pace.unit_s == 0.01
    for _ in range(40):
        pace.took(100, 10.0)
    assert pace.unit_s == 0.1
