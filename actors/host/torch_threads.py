"""The trial that lets torch's thread count change while a stage serves: with any number of threads each row must have the same bits.

The libraries below torch (oneDNN, MKL) choose how they divide a product, by the processor and its size. Products and attention of a few
sizes are tried once on a machine (``choices``).
"""

from itertools import product

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...cpu_kernels.choices import kept
from ...models.checkpoint.weights import torch_dtype

_ROWS = (3, 30, 300)
_SHAPES = ((512, 588), (512, 1024))  # the first has rows that are no whole vectors: only torch multiplies them
_HEADS, _HEAD_DIM = 8, 64


def may_change(dtype: str, most_threads: int) -> bool:
    """Return whether rows in this dtype are the same bits with one thread and with 2, 3 and ``most_threads``."""
    name = f"torch-{dtype}-with-{most_threads}-threads"
    return kept(name, lambda: "alike" if _are_alike(torch_dtype(dtype), most_threads) else "differs") == "alike"


@torch.inference_mode()
def _are_alike(dtype: torch.dtype, most_threads: int) -> bool:
    before = torch.get_num_threads()
    numbers = np.random.default_rng(0)

    def random(*shape: int) -> Tensor:
        return torch.from_numpy(numbers.standard_normal(shape)).to(dtype)

    linears = [(random(num_rows, shape[1]), random(*shape)) for num_rows, shape in product(_ROWS, _SHAPES)]
    q, k, v = (random(1, _HEADS, _ROWS[-1], _HEAD_DIM) for _ in range(3))

    def compute(num_threads: int) -> list[Tensor]:
        torch.set_num_threads(num_threads)
        return [*(F.linear(x, values) for x, values in linears), F.scaled_dot_product_attention(q, k, v, is_causal=True)]

    try:
        alone = compute(1)
        counts = {2, 3, most_threads}
        return all(all(map(torch.equal, alone, compute(count))) for count in counts if 1 < count <= most_threads)
    finally:
        torch.set_num_threads(before)
