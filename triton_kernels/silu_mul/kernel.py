"""Elementwise over the rows of two matrices, or of the halves of one."""

import triton
import triton.language as tl


@triton.jit
def silu_mul_rows(
    gate_ptr,
    up_ptr,
    out_ptr,
    stride_gate: tl.int64,
    stride_up: tl.int64,
    stride_out: tl.int64,
    SIZE: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows, blocks of columns). Strides are multiples of STEP, which is how many elements a load may take at once."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(gate_ptr + tl.multiple_of(row * stride_gate, STEP) + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + tl.multiple_of(row * stride_up, STEP) + column, mask=inside, other=0.0).to(tl.float32)
    small = tl.exp(-tl.abs(gate))
    sigmoid = tl.where(gate < 0, small, 1.0) / (1.0 + small)
    active = (gate * sigmoid * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + tl.multiple_of(row * stride_out, STEP) + column, active, mask=inside)
