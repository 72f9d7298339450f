"""Repairs of the interpreter of Triton 3.6 and 3.7, without which kernels cannot be tested on a CPU. Unrepaired it does this:

* With numpy 2.4 or later, ``range`` over a loaded value raises: an array of one element is no index any more.
* Products of bfloat16 matrices multiply raw bits; 8-bit floats go through float16.
* Integer to bfloat16 reinterprets bits; float32 to bfloat16 truncates; rounding to 8-bit floats loses the carry (1.97 -> 1.0).
* Every nested call of a function patches the whole language again: half of the time of a kernel that calls functions.
* Not repaired: ``+``, ``*`` and comparisons of bfloat16 work on raw bits, so kernels convert to float32 after every load.

It shows neither races nor misalignment, nor limits of shared memory or pipelining.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as stock

_TORCH = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_UNSIGNED = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32, 64: torch.uint64}
_NARROW = (tl.bfloat16, tl.float8e4nv, tl.float8e5)  # types that numpy has not: the interpreter holds their bits
_stock_patch_language = stock._patch_lang
_stock_convert, _stock_cast, _stock_patch = stock._convert_float, stock.InterpreterBuilder.cast_impl, stock._patch_lang_tensor


def install() -> None:
    """Repair the interpreter of this process. May be called more than once."""
    builder = stock.InterpreterBuilder
    stock._convert_float = _convert_float
    stock._patch_lang_tensor = _patch_lang_tensor
    stock._patch_lang = lambda function: _stock_patch_language(_Language)
    stock.InterpretedFunction.__call__ = _call
    builder.create_dot = _create_dot
    builder.cast_impl = _cast
    for name in ("create_si_to_fp", "create_ui_to_fp", "create_fp_to_si", "create_fp_to_ui"):
        setattr(builder, name, lambda self, source, target: _cast(self, source, target))


class _Language:
    """A function that uses everything that the interpreter has to patch."""

    __globals__ = {"tl": tl, "core": tl.core}


def _call(self: Any, *arguments: Any, **named: Any) -> Any:
    return self.rewrite()(*arguments, **named)


def _convert_float(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    """The bits of ``data`` in another floating type, rounded to nearest even by torch."""
    if source not in _TORCH or target not in _TORCH:
        return _stock_convert(data, source, target, rounding_mode)
    bits = np.ascontiguousarray(data).view(f"uint{source.primitive_bitwidth}").copy()
    values = torch.from_numpy(bits).view(_TORCH[source]).to(_TORCH[target])
    return values.view(_UNSIGNED[target.primitive_bitwidth]).numpy()


def _to_float32(handle: Any) -> Any:
    scalar = handle.dtype.scalar
    if scalar in _NARROW:
        return _convert_float(handle.data, scalar, tl.float32, None).view(np.float32).reshape(handle.data.shape)
    return handle.data.astype(np.float32)


def _create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    if d.data.dtype != np.float32:
        product = np.matmul(a.data.astype(d.data.dtype), b.data.astype(d.data.dtype))
    else:
        product = np.matmul(_to_float32(a), _to_float32(b))
    return stock.TensorHandle(product + d.data, d.dtype.scalar)


def _cast(self: Any, source: Any, target: Any) -> Any:
    from_type, to_type = source.dtype.scalar, target.scalar
    direct = (tl.float32, tl.bfloat16)
    if to_type == tl.bfloat16 and from_type not in direct:
        bits = _convert_float(source.data.astype(np.float32), tl.float32, tl.bfloat16, None)
        return stock.TensorHandle(bits.view(np.uint16).reshape(source.data.shape), tl.bfloat16)
    if from_type == tl.bfloat16 and to_type not in direct:
        return stock.TensorHandle(_to_float32(source).astype(stock._get_np_dtype(target)), to_type)
    return _stock_cast(self, source, target)


def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
    _stock_patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))
