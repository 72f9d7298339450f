"""The quantization that a checkpoint was published in, as its config.json describes it: AWQ, GPTQ, FP8, NVFP4,
MXFP4 or compressed-tensors. Pure.

The models read such matrices, and the run chooses the format in which they are kept.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

Packing = Literal["awq", "gptq", "gptq_v2", "pack-quantized", "int-quantized"]
Fp4Packing = Literal["nvfp4", "modelopt", "mxfp4"]
Form = Literal["int4", "int8", "int8g", "bfloat16", "float16", "float32"]

GROUP_STEP = 32  # int4 and int8g have a scale for so many neighbouring columns; int4 also for twice, four or eight times as many
_METHODS = "'awq', 'gptq', 'fp8', 'modelopt' and 'compressed-tensors' are supported"
_FP4_FORMATS: dict[str, tuple[Fp4Packing, int]] = {"nvfp4-pack-quantized": ("nvfp4", 16), "mxfp4-pack-quantized": ("mxfp4", 32)}
_PLACES = ((), ("thinker_config",), ("text_config",))
_FIELDS = ("quantization_config", "compression_config")


class IntegerQuantization(msgspec.Struct, frozen=True, kw_only=True, tag="integers"):
    """Matrices of integers: a value is (integer - zero point) x scale, with a scale for each row and group of columns.

    ``group_size`` 0: a group is a whole row. ``symmetric``: zero points are the middle of the integers' range, and are not stored.
    ``centred``: they are the middle, stored or not. ``in_order``: a group's columns are neighbours.
    """

    packing: Packing
    bits: Literal[4, 8]
    group_size: int
    symmetric: bool
    centred: bool = False
    in_order: bool = True

    @property
    def form(self) -> Form:
        """The narrowest format of weights that holds the integers as they are; bfloat16 if none does."""
        if self.bits == 8 and not self.group_size and self.symmetric:
            return "int8"
        if not self.in_order or self.group_size % GROUP_STEP:
            return "bfloat16"
        if self.bits == 4:
            return "int4"
        return "int8g" if self.symmetric or self.centred else "bfloat16"


class Fp8Quantization(msgspec.Struct, frozen=True, kw_only=True, tag="fp8"):
    """Matrices of FP8 numbers (E4M3): a value is number x scale. ``block``: rows and columns that share a scale; None: one scale for
    the matrix or one for each row, whichever the files have."""

    block: tuple[int, int] | None

    @property
    def form(self) -> Form:
        """int8g rounds the numbers of 32 columns to steps of their largest: far less than E4M3 has rounded them by, in half of
        bfloat16's memory."""
        return "int8g"


class Fp4Quantization(msgspec.Struct, frozen=True, kw_only=True, tag="fp4"):
    """Matrices of numbers of 4 bits (E2M1). NVFP4: a value is number x scale of 16 columns, divided by a scale of the matrix as
    compressed-tensors has it, or multiplied by ModelOpt's. MXFP4: number x power of two of 32 columns."""

    packing: Fp4Packing

    @property
    def form(self) -> Form:
        """int8g has 16 times as many steps as E2M1."""
        return "int8g"


class GgufQuantization(msgspec.Struct, frozen=True, kw_only=True, tag="gguf"):
    """Tensors of GGUF files, each of a type of its own. ``form``: the format of weights for their values. ``permuted``: rows of queries
    and keys lie in the order of architecture "llama", the two halves of a head by turns. ``tower_heads``: of a tower in which they do
    so too; 0 if they do not. ``halved``: so many values of each head that turn lie as halves of pairs, which stand side by side in the
    checkpoint."""

    form: Form
    permuted: bool = False
    tower_heads: int = 0
    halved: int = 0


Quantization = IntegerQuantization | Fp8Quantization | Fp4Quantization | GgufQuantization


class _Awq(msgspec.Struct):
    bits: int = 4
    group_size: int = 128
    zero_point: bool = True
    version: str = "gemm"


class _Gptq(msgspec.Struct):
    bits: int = 4
    group_size: int = 128
    desc_act: bool = False
    sym: bool = True
    checkpoint_format: str = "gptq"
    is_marlin_format: bool = False


class _Fp8(msgspec.Struct):
    fmt: str = "e4m3"
    weight_block_size: tuple[int, ...] | None = None
    scale_fmt: str = "float"


class _ModelOpt(msgspec.Struct):
    quant_algo: str = ""
    group_size: int = 16


class _Weights(msgspec.Struct, frozen=True):
    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None
    actorder: str | bool | None = None
    block_structure: tuple[int, ...] | None = None


class _Group(msgspec.Struct, frozen=True):
    weights: _Weights | None = None
    format: str | None = None


class _CompressedTensors(msgspec.Struct):
    config_groups: dict[str, _Group]
    format: str = ""
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


def find_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """Read the quantization that config.json names, or None. Raises: ValueError saying what is not supported, and what is."""
    for path in _PLACES:
        place: Any = config
        for name in path:
            place = place.get(name)
        for field in _FIELDS:
            if isinstance(place, Mapping) and place.get(field) is not None:
                return _read(place[field], ".".join((*path, field)))
    return None


def _read(found: Any, where: str) -> Quantization:
    method = found.get("quant_method") if isinstance(found, Mapping) else None
    readers = {
        "awq": _read_awq,
        "gptq": _read_gptq,
        "fp8": _read_fp8,
        "modelopt": _read_modelopt,
        "gguf": _read_gguf,
        "compressed-tensors": _read_compressed_tensors,
    }
    if not isinstance(method, str) or method not in readers:
        raise ValueError(f"{where} is of method {method!r}: {_METHODS}")
    given = {field: value for field, value in found.items() if value is not None}
    try:
        return readers[method]({"version": given.get("format", "gemm"), "checkpoint_format": given.get("format", "gptq"), **given})
    except (msgspec.ValidationError, ValueError) as error:
        raise ValueError(f"{where} of method {method!r}: {error}") from None


def _read_awq(found: Mapping[str, Any]) -> Quantization:
    awq = msgspec.convert(found, _Awq)
    _expect("bits", awq.bits, [4])
    _expect("version", awq.version.lower(), ["gemm"])
    _expect("zero_point", awq.zero_point, [True])
    return IntegerQuantization(packing="awq", bits=4, group_size=_group_size(awq.group_size), symmetric=False)


def _read_gptq(found: Mapping[str, Any]) -> Quantization:
    gptq = msgspec.convert(found, _Gptq)
    _expect("bits", gptq.bits, [4, 8])
    _expect("checkpoint_format", gptq.checkpoint_format, ["gptq", "gptq_v2"])
    _expect("is_marlin_format", gptq.is_marlin_format, [False])
    return IntegerQuantization(
        packing="gptq_v2" if gptq.checkpoint_format == "gptq_v2" else "gptq",
        bits=8 if gptq.bits == 8 else 4,
        group_size=_group_size(gptq.group_size),
        symmetric=False,
        centred=gptq.sym,
        in_order=not gptq.desc_act,
    )


def _read_fp8(found: Mapping[str, Any]) -> Quantization:
    """As Qwen and DeepSeek publish them. How activations are rounded (``activation_scheme``) does not count."""
    fp8 = msgspec.convert(found, _Fp8)
    _expect("fmt", fp8.fmt.lower(), ["e4m3"])
    _expect("scale_fmt", fp8.scale_fmt.lower(), ["float", "ue8m0"])
    return Fp8Quantization(block=None if fp8.weight_block_size is None else _block("weight_block_size", fp8.weight_block_size))


def _read_modelopt(found: Mapping[str, Any]) -> Quantization:
    """As NVIDIA publishes them. The KV cache's scales do not count."""
    modelopt = msgspec.convert(found, _ModelOpt)
    _expect("quant_algo", modelopt.quant_algo, ["FP8", "NVFP4"])
    if modelopt.quant_algo == "FP8":
        return Fp8Quantization(block=None)
    _expect("group_size", modelopt.group_size, [16])
    return Fp4Quantization(packing="modelopt")


def _read_gguf(found: Mapping[str, Any]) -> Quantization:
    """As mmrt itself writes it, into the directory that it makes of a file."""
    fields = {name: value for name, value in found.items() if name in ("form", "permuted", "tower_heads", "halved")}
    return msgspec.convert({"type": "gguf", **fields}, GgufQuantization)


def _block(field: str, found: Sequence[int]) -> tuple[int, int]:
    if len(found) != 2 or min(found) < 1:
        raise ValueError(f"{field} is {list(found)}, expected numbers of rows and columns")
    return found[0], found[1]


def _read_compressed_tensors(found: Mapping[str, Any]) -> Quantization:
    config = msgspec.convert(found, _CompressedTensors)
    if config.sparsity_config and config.sparsity_config.get("format", "dense") != "dense":
        raise ValueError(f"sparsity_config has format {config.sparsity_config['format']!r}: sparse weights are not supported")
    if config.transform_config and config.transform_config.get("config_groups"):
        raise ValueError("transform_config is set: transformed weights are not supported")
    schemes = {(group.format or config.format, group.weights) for group in config.config_groups.values()}
    if len(schemes) != 1:
        raise ValueError(f"config_groups have {len(schemes)} formats of weights, expected one")
    ((packing, weights),) = schemes
    if weights is None:
        raise ValueError("config_groups have no weights")
    if packing == "float-quantized":
        return _read_compressed_floats(weights)
    if packing in _FP4_FORMATS:
        return _read_compressed_fp4(weights, *_FP4_FORMATS[packing])
    _expect("format", packing, ["pack-quantized", "int-quantized", "float-quantized", *_FP4_FORMATS])
    _expect("type", weights.type, ["int"])
    _expect("num_bits", weights.num_bits, [4, 8] if packing == "pack-quantized" else [8])
    strategy = weights.strategy or ("group" if (weights.group_size or -1) > 0 else "channel")
    _expect("strategy", strategy, ["group", "channel"])
    return IntegerQuantization(
        packing="pack-quantized" if packing == "pack-quantized" else "int-quantized",
        bits=8 if weights.num_bits == 8 else 4,
        group_size=_group_size(weights.group_size or -1) if strategy == "group" else 0,
        symmetric=weights.symmetric,
        in_order=weights.actorder not in (True, "group", "dynamic"),
    )


def _read_compressed_floats(weights: _Weights) -> Quantization:
    _expect("type", weights.type, ["float"])
    _expect("num_bits", weights.num_bits, [8])
    _expect("symmetric", weights.symmetric, [True])
    _expect("strategy", weights.strategy, ["tensor", "channel", "block"])
    return Fp8Quantization(block=_block("block_structure", weights.block_structure or ()) if weights.strategy == "block" else None)


def _read_compressed_fp4(weights: _Weights, packing: Fp4Packing, group_size: int) -> Quantization:
    _expect("type", weights.type, ["float"])
    _expect("num_bits", weights.num_bits, [4])
    _expect("symmetric", weights.symmetric, [True])
    _expect("group_size", weights.group_size, [group_size])
    return Fp4Quantization(packing=packing)


def _group_size(found: int) -> int:
    if found == 0 or found < -1:
        raise ValueError(f"group_size is {found}, expected -1 or a number of columns")
    return max(found, 0)


def _expect(field: str, found: object, expected: Sequence[object]) -> None:
    if found not in expected:
        raise ValueError(f"{field} is {found!r}, expected {' or '.join(map(repr, expected))}")
