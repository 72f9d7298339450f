"""Rows of activations in groups, each of which is multiplied by rows of its own of one matrix: the experts of a layer, one below the
other. All groups are one call of a team, so a matrix's row is read once however many rows of activations are in its group.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from .kernel import check_columns, threads_for

Words = NDArray[np.int64]


class Groups:
    """``sizes``: of consecutive groups of rows of activations. ``firsts``: of each group the first of the ``num_values`` rows of the
    matrix that multiply it."""

    def __init__(self, sizes: ArrayLike, firsts: ArrayLike, num_values: int) -> None:
        self.sizes, self.firsts, self.num_values = np.asarray(sizes, np.int64), np.asarray(firsts, np.int64), num_values
        self.starts = self.sizes.cumsum() - self.sizes  # of each group among the rows of activations

    def check(self, x_MK: Tensor, num_values: int, num_columns: int) -> None:
        """Raises: ValueError for activations that do not fit groups and a matrix of this shape, which a kernel would read beyond their
        end."""
        check_columns(x_MK, num_columns)
        num_rows, last = int(self.sizes.sum()), num_values - self.num_values
        if num_rows != len(x_MK) or any(not 0 <= first <= last for first in self.firsts):
            raise ValueError(
                f"activations {list(x_MK.shape)} in groups of {num_rows} rows, by {self.num_values} rows each, from "
                f"{self.firsts.tolist()} on, of a matrix of {num_values}"
            )

    def doubled(self, rows: ArrayLike) -> "Groups":
        """These groups, where each of some rows is followed by a second one."""
        groups = self.starts.searchsorted(np.asarray(rows, np.int64), "right") - 1
        return Groups(self.sizes + np.bincount(groups, minlength=len(self.sizes)), self.firsts, self.num_values)

    def num_threads(self, num_columns: int) -> int:
        """Threads that compute products with a matrix of so many columns."""
        return threads_for(len(self.sizes) * self.num_values * num_columns)

    def of_rows(self, tensor: Tensor) -> Words:
        """The address of each group's first row in a contiguous tensor with a row for each row of activations."""
        return tensor.data_ptr() + self.starts * (tensor.stride(0) * tensor.element_size())

    def of_values(self, tensor: Tensor) -> Words:
        """As ``of_rows``, of a tensor with a row for each row of the matrix."""
        return tensor.data_ptr() + self.firsts * (tensor.stride(0) * tensor.element_size())

    def words(self, *columns: int | Words) -> Words:
        """The words of all products, a row for each; a number is the same in all."""
        found = np.empty((len(self.sizes), len(columns)), np.int64)
        for index, column in enumerate(columns):
            found[:, index] = column
        return found
