"""Section ``ceilings``: the device's best rates, to which all shares refer."""

from collections.abc import Iterator
from functools import partial

import torch

from .case import Check, Size, Timing, gigabytes_per_s, teraflops
from .results import Row
from .timing import Clock


def checks(device: torch.device, size: Size) -> Iterator[Check]:
    """None."""
    del device, size
    return iter(())


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
    rate = gigabytes_per_s(2 * source.numel() * source.itemsize, timed.time_us)
    return [Row(case="", time_us=timed.time_us, rate=rate, unit="GB/s", note="read and written; what only reads may come above it")]


def _product(size: int, clock: Clock) -> list[Row]:
    a, b, out = (torch.randn(size, size, dtype=torch.bfloat16, device=clock.device) for _ in range(3))
    timed = clock.time([partial(torch.mm, a, b, out=out)])
    return [Row(case="", time_us=timed.time_us, rate=teraflops(2 * size**3, timed.time_us), unit="TFLOP/s")]
