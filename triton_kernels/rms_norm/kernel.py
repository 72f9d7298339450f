"""One row per program, held in registers from the load to the store."""

import triton
import triton.language as tl


@triton.jit
def norm_row(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    epsilon,
    stride_x: tl.int64,
    stride_residual: tl.int64,
    stride_out: tl.int64,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    """Grid (rows,). With ``ADD`` the row is residual + x, which replaces the residual, rounded to its dtype before it is normalized."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    x = tl.load(x_ptr + row * stride_x + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        residual = residual_ptr + row * stride_residual + column
        total = (tl.load(residual, mask=inside, other=0.0).to(tl.float32) + x).to(residual_ptr.dtype.element_ty)
        tl.store(residual, total, mask=inside)
        x = total.to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, 0) / SIZE + epsilon)
    tl.store(out_ptr + row * stride_out + column, (x * factor * weight).to(out_ptr.dtype.element_ty), mask=inside)
