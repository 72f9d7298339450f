"""Attention within sequences that stand one after another: windows and frames of pictures, pieces of sound. Towers use it."""

from itertools import groupby
from typing import NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ...cpu_kernels import flash_attention


class Sequences(NamedTuple):
    """Rows [0, borders[-1]) split at ``borders``: a row attends to those of its sequence only."""

    borders: Tensor  # int32 [S + 1], from 0, on the tower's device
    longest: int
    runs: tuple[tuple[int, int], ...]  # (count, length) of sequences of one length that follow each other, in order

    @classmethod
    def of(cls, lengths: NDArray[np.int64], device: torch.device) -> Self:
        """From the sequences' ``lengths`` [S], in rows, each at least 1."""
        borders = torch.from_numpy(np.concatenate(([0], lengths.cumsum())).astype(np.int32))
        runs = tuple((len(list(equal)), length) for length, equal in groupby(lengths.tolist()))
        return cls(borders.to(device), int(lengths.max()), runs)


def attend(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float = 0.0) -> Tensor:
    """softmax(scale q k') v within each sequence, [T, heads, D] each and the result, of one dtype: a call for each run. ``scale`` 0:
    1 / sqrt(D)."""
    outputs: list[Tensor] = []
    has_kernel, begin = flash_attention.has_kernel(q), 0
    for count, length in sequences.runs:
        rows = slice(begin, begin := begin + count * length)
        queries, keys, values = (tensor[rows].view(count, length, *tensor.shape[1:]) for tensor in (q, k, v))
        if has_kernel:
            found = flash_attention.attend(queries, keys, values, scale=scale).output.to(q.dtype)
        else:
            turned = queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
            found = F.scaled_dot_product_attention(*turned, scale=scale or None).transpose(1, 2)
        outputs.append(found.flatten(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
