"""Elementwise over rows whose first half is the gate."""

import triton
import triton.language as tl


@triton.jit
def silu_mul_rows(gate_up_ptr, out_ptr, stride_gate_up: tl.int64, stride_out: tl.int64, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate_ptr = gate_up_ptr + row * stride_gate_up + column
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + SIZE, mask=inside, other=0.0).to(tl.float32)
    small = tl.exp(-tl.abs(gate))
    sigmoid = tl.where(gate < 0, small, 1.0) / (1.0 + small)
    tl.store(out_ptr + row * stride_out + column, (gate * sigmoid * up).to(out_ptr.dtype.element_ty), mask=inside)
