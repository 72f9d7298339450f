"""A matrix's place in a tensor that has those of all experts of a layer, one after another. Some checkpoints have each transposed."""

from typing import NamedTuple

from torch import Tensor

from .safetensors_files import StoredTensor
from .weight_specs import Part, Shape


class Place(NamedTuple):
    """``tensor`` is the matrix; or these ``columns`` of it are, transposed."""

    tensor: StoredTensor
    columns: slice | None = None

    def of(self, values: Tensor) -> Tensor:
        """The matrix, where these are the tensor's values."""
        return values if self.columns is None else values[:, self.columns].t()


def turned(shape: Shape) -> Shape:
    """The shape of all matrices [E, N, K], each transposed."""
    count, rows, columns = shape
    return count, columns, rows


def place_of(part: Part, num_rows: int, tensor: StoredTensor, is_turned: bool) -> Place:
    """The place of so many rows of a matrix in a tensor of ``part.shape``, or of that ``turned``."""
    _, rows, columns = part.shape
    if is_turned:
        return Place(tensor.rows(part.number * columns, (columns, rows)), slice(part.first, part.first + num_rows))
    return Place(tensor.rows(part.number * rows + part.first, (num_rows, columns)))
