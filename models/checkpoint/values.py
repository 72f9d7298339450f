"""Matrices of numbers, and those that are made of others: in another order, or with what an adapter adds. ``weights`` uses them."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from .weight_specs import Shape

Order = tuple[int, ...]
"""The places of the model's first, second and so on of so many rows in the checkpoint. () leaves all as they are."""


class Values(Protocol):
    """A matrix in the files."""

    @property
    def shape(self) -> Shape: ...

    def values(self, rows: slice) -> Tensor:
        """Float32 [n, K]."""
        ...


class Plain(NamedTuple):
    """Values of a tensor that is not quantized."""

    tensor: Tensor

    @property
    def shape(self) -> Shape:
        return tuple(self.tensor.shape)

    def values(self, rows: slice) -> Tensor:
        return self.tensor[rows].float()


class Sum(NamedTuple):
    """Values of a matrix with what an adapter adds."""

    matrix: Values
    delta: Callable[[slice], Tensor]

    @property
    def shape(self) -> Shape:
        return self.matrix.shape

    def values(self, rows: slice) -> Tensor:
        return self.matrix.values(rows) + self.delta(rows)


class Reordered:
    """A matrix in the model's order."""

    def __init__(self, matrix: Values, order: Order) -> None:
        self.shape, self._matrix, self.order = matrix.shape, matrix, order

    def values(self, rows: slice) -> Tensor:
        """As the matrix's, of whole runs of rows."""
        return reordered(self._matrix.values(rows), self.order)


def reordered(rows: Tensor, order: Order) -> Tensor:
    """Rows [n, ...] in the model's order, n a multiple of the order's length."""
    return rows.view(-1, len(order), *rows.shape[1:])[:, list(order)].flatten(0, 1) if order else rows
