"""A matrix as it is kept in a format of weights, and the values that it has there."""

import torch
from torch import Tensor

from mmrt.models.checkpoint import int4, int8g
from mmrt.models.checkpoint.narrowing import narrow
from mmrt.models.checkpoint.weight_specs import scales_of

GROUP = 32  # columns, of int4 and int8g


def keep(values: Tensor, form: str, name: str = "w") -> dict[str, Tensor]:
    """The weights of a model with one matrix."""
    rows, columns = values.shape
    scales = {"int8": (rows,), "int8g": (rows, columns // GROUP), "int4": (rows, columns // GROUP, 2)}.get(form)
    if form == "int4":
        target = torch.empty(rows, columns // 2, dtype=torch.uint8)
    else:
        target = torch.empty(rows, columns, dtype=getattr(torch, form.removesuffix("g")))
    found = {name: target}
    if scales is not None:
        found[scales_of(name)] = torch.empty(scales, dtype=torch.bfloat16)
    narrow(values, target, found.get(scales_of(name)))
    return found


def exact(weights: dict[str, Tensor], name: str = "w") -> Tensor:
    """The values of a matrix, float64."""
    kept, scales = weights[name], weights.get(scales_of(name))
    if scales is None:
        return kept.double()
    if scales.dim() == 1:
        return kept.double() * scales.double().unsqueeze(1)
    out = torch.empty(len(kept), scales.shape[1] * GROUP, dtype=torch.float64)
    (int4.unpack if kept.dtype == torch.uint8 else int8g.unpack)(kept, scales, out)
    return out
