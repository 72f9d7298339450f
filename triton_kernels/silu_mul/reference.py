"""Reference for the kernel, in plain torch."""

from torch import Tensor


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """As ``op.silu_mul``."""
    gate, up = gate_up.chunk(2, -1)
    silu_mul_pair(gate, up, out)


def silu_mul_pair(gate: Tensor, up: Tensor, out: Tensor) -> None:
    """As ``op.silu_mul_pair``."""
    out.copy_(gate.float() * gate.float().sigmoid() * up.float())
