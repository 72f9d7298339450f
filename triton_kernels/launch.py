"""Launch parameters of a kernel, which each operation's ``config`` returns for a shape. Pure; tables ship with the package, nothing is
tuned while serving."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Launch:
    """``tiles``: block sizes by the names of the kernel's ``tl.constexpr`` parameters."""

    tiles: Mapping[str, int]
    num_warps: int
    num_stages: int

    def arguments(self) -> dict[str, int]:
        """Keyword arguments of ``kernel[grid](...)``."""
        return {**self.tiles, "num_warps": self.num_warps, "num_stages": self.num_stages}


def architecture(device: torch.device) -> int:
    """Compute capability without its dot, for tables that depend on it. The interpreter uses the values for sm_90."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
