"""The interface of a sampler on the device of the logits: the rows of a step, its guidance pairs, and ``Sampler``.

Shapes: B rows, V vocabulary, P pairs, L rows of logits, E biases, M masked logits, G rows with a mask, W = ceil(V / 32).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .penalties import History, Penalties


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of each row, arrays of length B.

    ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off; ``index`` is the token's number in its sequence.
    """

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seed: NDArray[np.uint64]
    index: NDArray[np.int64]

    def of(self, number: NDArray[np.int64]) -> "SamplingRows":
        """Return those of some rows, by their numbers."""
        return SamplingRows(*(getattr(self, field.name)[number] for field in fields(self)))


@dataclass(frozen=True, slots=True)
class Pairs:
    """Guidance pairs among a step's rows: ``row`` int64 [P] of the conditional logits, ``companion_row`` int64 [P] of the others, and
    ``scale`` float32 [P]."""

    row: NDArray[np.int64]
    companion_row: NDArray[np.int64]
    scale: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LogitChanges:
    """Changes of single logits (``rules``): ``bias`` float32 [E] is added at (``bias_row``, ``bias_id``), int64 [E]; the logits at
    (``masked_row``, ``masked_id``), int64 [M], are masked."""

    bias_row: NDArray[np.int64]
    bias_id: NDArray[np.int64]
    bias: NDArray[np.float32]
    masked_row: NDArray[np.int64]
    masked_id: NDArray[np.int64]


class Constraints(Protocol):
    """Rows that may draw certain tokens only. Their masks cost time, so a sampler asks for those that it needs."""

    @property
    def row(self) -> NDArray[np.int64]:
        """Return the numbers of the rows, int64 [G], rising."""
        ...

    def allows(self, number: int, token: int) -> bool:
        """Return whether the ``number``th of these rows may draw a token."""
        ...

    def masks(self, numbers: Sequence[int] | None = None) -> "Masks":
        """Return the masks of some of these rows, or of all."""
        ...


@dataclass(frozen=True, slots=True)
class Masks:
    """``Constraints`` as bits (``masks``): ``row`` int64 [G], rising; ``bits`` int32 [G, W], bit ``t % 32`` of word ``t // 32`` being 1
    where token t may be drawn."""

    row: NDArray[np.int64]
    bits: NDArray[np.int32]

    def allows(self, number: int, token: int) -> bool:
        return bool(self.bits[number, token // 32] >> token % 32 & 1)

    def masks(self, numbers: Sequence[int] | None = None) -> "Masks":
        return self if numbers is None else Masks(self.row[list(numbers)], self.bits[list(numbers)])


class Sampler(Protocol):
    """A sampler for the decode actor, on the device of the logits."""

    def remember(self, histories: Sequence[History]) -> None:
        """Set the past tokens of the rows with penalties before the next steps; from then on the sampler counts what it draws."""
        ...

    def sample(
        self,
        logits: Tensor,
        rows: SamplingRows,
        pairs: Pairs | None = None,
        penalties: Penalties | None = None,
        changes: LogitChanges | None = None,
        masks: Constraints | None = None,
    ) -> Tensor:
        """Draw one token per row. ``logits`` [L, V], which are used up; row i draws from ``logits[i]``, guided where it is of a pair
        (CF1), then changed (``rules``), penalised and masked (``masks``). ``penalties`` are those of the rows given to ``remember``, in
        their order.

        Returns int64 [B] where the logits lie, B <= L being the number of ``rows``: the rest are companions. On a device
        this only launches, and reading the result waits; read it before the next call.
        """
        ...
