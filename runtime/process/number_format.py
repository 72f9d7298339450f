"""The number formats of a model on a CPU, where the configuration leaves them open: of computation, and of weights.

Processors without units for bfloat16 compute it by way of float32 one number at a time: prefill takes five times as long. There the
model is computed in float32. Its matrices stay in the checkpoint's own half precision: they are the same numbers in half the memory,
and a decode step, which waits for memory, takes less time. Matrices that a checkpoint has quantized stay quantized where a format holds
them as they are.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from ...cpu_kernels.processor import PROC, processor_flags
from ...schema.quantization import find_quantization
from ..config.runtime_config import RuntimeConfig
from ..config.sections import FLOAT32_WEIGHTS

WeightFormat = Literal["auto", "float32", "bfloat16", "float16", "int8", "int8g", "int4"]

WEIGHTS_SHARE = 0.5  # of the memory that is available, for weights in float32

_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # the last on Arm
_LESS_CAPABLE = frozenset({"default", "avx2"})  # ATEN_CPU_CAPABILITY: torch is told to leave the units alone
_HALVES: dict[frozenset[str], WeightFormat] = {frozenset({"BF16"}): "bfloat16", frozenset({"F16"}): "float16"}
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


class _Entry(msgspec.Struct):
    """A tensor in the header of a file; "__metadata__" has no dtype."""

    dtype: str = ""


_decode_config = msgspec.json.Decoder(dict[str, Any]).decode
_decode_header = msgspec.json.Decoder(dict[str, _Entry]).decode


def has_bfloat16_units(capability: str = "", proc: Path = PROC) -> bool:
    """Return whether torch can compute bfloat16 with this processor's own instructions. ``capability``: ATEN_CPU_CAPABILITY."""
    if capability in _LESS_CAPABLE:
        return False
    return not _FLAGS.isdisjoint(processor_flags(proc))


def plan_formats(config: RuntimeConfig, model: Path, has_units: bool, free_bytes: int) -> tuple[RuntimeConfig, str]:
    """Return the configuration with the dtype and the format of weights that suit the processor, and the reason in words; "" if the
    checkpoint's own dtype stays.

    ``free_bytes``: memory that is available. Weights in float32 get a share of it at most; else they are kept in bfloat16.
    """
    if config.model.on_cuda:
        return config, ""
    found = _read_config(model)
    if config.model.weights == "auto" and (form := _form_of(found)) is not None:
        config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, weights=form))
    section = config.model
    if section.dtype != "auto" or _dtype_of(found) == "float32":
        return config, ""
    if section.weights in FLOAT32_WEIGHTS:
        return _in_float32(config, section.weights), f"weights in {section.weights} are multiplied in float32"
    if has_units:
        return config, ""
    why = "the processor has no bfloat16 units"
    if section.weights != "auto":
        return _in_float32(config, section.weights), why
    if (half := _HALVES.get(_stored_dtypes(model))) is not None:
        return _in_float32(config, half), why
    num_bytes = 2 * sum(path.stat().st_size for path in model.glob("*.safetensors"))
    if num_bytes > WEIGHTS_SHARE * free_bytes:
        limit = f"float32 weights would take {num_bytes >> 20} of {free_bytes >> 20} MiB"
        return _in_float32(config, "bfloat16"), f"{why}; {limit}"
    return _in_float32(config, "auto"), why


def _in_float32(config: RuntimeConfig, weights: WeightFormat) -> RuntimeConfig:
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, dtype="float32", weights=weights))


def _read_config(model: Path) -> dict[str, Any]:
    """Return a checkpoint's config.json; an empty one if it cannot be read: that is reported when the model's configuration is read."""
    try:
        return _decode_config((model / "config.json").read_bytes())
    except (OSError, msgspec.DecodeError, RecursionError):
        return {}


def _dtype_of(config: Mapping[str, Any]) -> str:
    """Return the dtype that a checkpoint names; "" if that is for its family to say."""
    return str(config.get("dtype") or config.get("torch_dtype") or "")


def _form_of(config: Mapping[str, Any]) -> WeightFormat | None:
    """Return the format that holds a checkpoint's quantized matrices, or None."""
    try:
        found = find_quantization(config)
    except ValueError:
        return None  # reported when the model's configuration is read
    return None if found is None else found.form


def _stored_dtypes(model: Path) -> frozenset[str]:
    """Return safetensors' names of the dtypes of a checkpoint's tensors, of all files; none if one cannot be read."""
    found: set[str] = set()
    try:
        for path in model.glob("*.safetensors"):
            with path.open("rb") as file:
                num_bytes = int.from_bytes(file.read(8), "little")
                if num_bytes > min(_MAX_HEADER_BYTES, os.fstat(file.fileno()).st_size):
                    return frozenset()
                header = _decode_header(file.read(num_bytes))
            found |= {entry.dtype for entry in header.values() if entry.dtype}
    except (OSError, msgspec.DecodeError, RecursionError):
        return frozenset()  # reported when the weights are loaded
    return frozenset(found)
