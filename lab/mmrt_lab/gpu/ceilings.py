"""Section ``ceilings``: the device's best rates, to which all shares refer."""

from collections.abc import Iterator
from functools import partial

import torch

from .case import Timing
from .results import Row
from .timing import Clock


def timings(quick: bool) -> Iterator[Timing]:
    """Copies on the device, and bfloat16 products of random matrices; the best of each is the ceiling."""
    for megabytes in (256, 1024) if quick else (256, 1024, 4096):
        yield Timing(f"copy of {megabytes} MiB", partial(_copy, megabytes))
    for size in (8192,) if quick else (4096, 8192, 16384):
        yield Timing(f"bf16 product, {size} x {size} x {size}", partial(_product, size))


def _copy(megabytes: int, clock: Clock) -> list[Row]:
    source = torch.randn(megabytes * 2**19, dtype=torch.bfloat16, device=clock.device)
    target = torch.empty_like(source)
    timed = clock.time([partial(target.copy_, source)])
    return [timed.moved(2 * source.nbytes, note="read and written; what only reads may come above it")]


def _product(size: int, clock: Clock) -> list[Row]:
    a, b, out = (torch.randn(size, size, dtype=torch.bfloat16, device=clock.device) for _ in range(3))
    return [clock.time([partial(torch.mm, a, b, out=out)]).computed(2 * size**3)]
