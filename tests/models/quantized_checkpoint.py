"""Checkpoints quantized to the nearest, and packed as AWQ, GPTQ and compressed-tensors describe."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from mmrt.schema.quantization import IntegerQuantization, find_quantization

Tensors = dict[str, torch.Tensor]
GROUP = 32


def words(integers: np.ndarray, bits: int) -> torch.Tensor:
    """Integers [A, B] in 32-bit words along the last axis, the first in the lowest bits."""
    grouped = integers.astype(np.uint32).reshape(len(integers), -1, 32 // bits)
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    return torch.from_numpy(np.ascontiguousarray(np.bitwise_or.reduce(grouped << shifts, axis=2)).view(np.int32))


def quantize(weight: torch.Tensor, known: IntegerQuantization) -> tuple[Tensors, torch.Tensor]:
    """A matrix as the packing stores it, and its values."""
    middle, most = 1 << (known.bits - 1), (1 << known.bits) - 1
    num_rows, num_columns = weight.shape
    groups = weight.unflatten(1, (-1, known.group_size or num_columns))
    least, largest = groups.amin(2), groups.amax(2)
    scales = ((largest - least) / (most - 1) if not known.symmetric else 2 * groups.abs().amax(2) / (most - 1)).half()
    zeros = torch.full_like(least, middle) if known.symmetric else (-least / scales.float()).round().clamp(1, most)
    codes = (groups / scales.float().unsqueeze(2) + zeros.unsqueeze(2)).round().clamp(0, most)
    values = ((codes - zeros.unsqueeze(2)) * scales.float().unsqueeze(2)).flatten(1)
    rows, offsets = codes.flatten(1).numpy(), zeros.numpy()
    if known.packing == "awq":
        columns = [0, 2, 4, 6, 1, 3, 5, 7]
        shuffled = (part.T.reshape(-1, num_rows // 8, 8)[..., columns].reshape(-1, num_rows) for part in (rows, offsets))
        packed, packed_zeros = (words(part, 4) for part in shuffled)
        return {"qweight": packed, "qzeros": packed_zeros, "scales": scales.T.contiguous()}, values
    if known.packing == "gptq":
        packed_zeros = words(offsets.T - 1, known.bits)
        tensors = {"qweight": words(rows, known.bits).T.contiguous(), "qzeros": packed_zeros, "scales": scales.T.contiguous()}
        return tensors | {"g_idx": torch.arange(num_columns, dtype=torch.int32) // GROUP}, values
    if known.packing == "int-quantized":
        return {"weight": (codes.flatten(1) - middle).to(torch.int8), "weight_scale": scales}, values
    tensors = {"weight_packed": words(rows, known.bits), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    return tensors | {"weight_zero_point": words(offsets.T, known.bits).T.contiguous()}, values


def compressed(packing: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", **weights}, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": packing, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


PACKED = {"num_bits": 4, "strategy": "group", "group_size": GROUP, "symmetric": False, "actorder": "weight"}
CONFIGS: dict[str, dict[str, Any]] = {
    "awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP,
        "version": "gemm",
        "zero_point": True,
        "modules_to_not_convert": ["visual"],
    },
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False},
    "packed": compressed("pack-quantized", PACKED),
    "packed8": compressed("pack-quantized", {**PACKED, "num_bits": 8, "group_size": 2 * GROUP, "symmetric": True}),
    "int8": compressed("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": True}),
}


def quantize_checkpoint(source: Path, root: Path, config: dict[str, Any], spared: str = "nothing") -> tuple[Path, Path]:
    """Copies of a checkpoint: with the linear layers of the language model quantized, but for those with ``spared`` in their names; and
    with the values of that, in float32."""
    known = find_quantization({"quantization_config": config})
    assert known is not None
    quantized, plain = (Path(shutil.copytree(source, root / name)) for name in ("quantized", "plain"))
    tensors = load_file(source / "model.safetensors")
    ours, theirs = dict(tensors), dict(tensors)
    for name, value in tensors.items():
        module = name.removesuffix(".weight")
        if module.endswith("_proj") and module != name and ".layers." in name and spared not in name:
            packed, theirs[name] = quantize(value, known)
            del ours[name]
            ours |= {f"{module}.{part}": tensor for part, tensor in packed.items()}
    save_file(ours, quantized / "model.safetensors")
    save_file(theirs, plain / "model.safetensors")
    given = json.loads((source / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**given, "quantization_config": config}))
    return quantized, plain
