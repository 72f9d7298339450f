"""A LoRA adapter that is merged into a checkpoint's matrices when they are loaded: W + B A alpha / r (Hu et al., 2021), in float32 and
before any rounding. As peft writes it: ``adapter_config.json``, ``adapter_model.safetensors``.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointError
from .files import ADAPTER, ADAPTER_FILES
from .safetensors_files import DTYPES, SafetensorsFiles
from .weight_specs import Source

_PREFIX = "base_model.model."
_PARTS = {".lora_A.weight": "A", ".lora_B.weight": "B", ".lora_A.default.weight": "A", ".lora_B.default.weight": "B"}
_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")  # of the training; others change the base's weights, too
_HARMLESS = frozenset(  # fields that say how an adapter was trained, or that are read here; others have to be empty
    ("peft_type", "lora_alpha", "r", "use_rslora", "rank_pattern", "init_lora_weights", "task_type", "peft_version", "auto_mapping")
    + ("base_model_name_or_path", "revision", "inference_mode", "target_modules", "exclude_modules", "lora_dropout", "runtime_config")
    + ("layers_to_transform", "layers_pattern", "megatron_core", "eva_config", "qalora_group_size", "ensure_weight_tying")
)


class _Pair(NamedTuple):
    """Of a matrix [N, K]: A [r, K], B [N, r], float32, and the factor of their product."""

    a: Tensor
    b: Tensor
    factor: float


class Adapter:
    """``deltas`` by the names of the model's sources."""

    def __init__(self, pairs: Mapping[str, _Pair], where: Path) -> None:
        self._pairs, self._where = pairs, where

    def check(self, sources: Iterable[Source]) -> None:
        """Raise CheckpointError for a matrix that the model does not have, or of another shape."""
        shapes = {source.name: source.shape for source in sources}
        for name, pair in self._pairs.items():
            found = pair.b.shape[0], pair.a.shape[1]
            if name not in shapes:
                raise CheckpointError(f"{self._where}: changes {name!r}, a matrix that the model does not have")
            if shapes[name] != found or pair.a.shape[0] != pair.b.shape[1]:
                given = f"A of shape {list(pair.a.shape)} and B of {list(pair.b.shape)}"
                raise CheckpointError(f"{self._where}: has {given} for {name!r} of shape {list(shapes[name])}")

    def delta_of(self, name: str) -> Callable[[slice], Tensor] | None:
        """What is added to rows of a source, float32 [n, K]; None if nothing is."""
        pair = self._pairs.get(name)
        return None if pair is None else lambda rows: (pair.b[rows] @ pair.a).mul_(pair.factor)


def read_adapter(checkpoint: Path, canonical_name: Callable[[str], str]) -> Adapter | None:
    """The adapter of a checkpoint directory, or None if it has none. Raises: CheckpointError naming the field or tensor."""
    path = checkpoint / ADAPTER
    if not path.is_symlink() and not path.exists():
        return None
    config = read_config(path / ADAPTER_FILES[0])
    parts: dict[str, dict[str, Tensor]] = {}
    with SafetensorsFiles(path) as files:
        for name, stored in files.tensors.items():
            ending = next((ending for ending in _PARTS if name.endswith(ending)), None)
            if ending is None or stored.dtype not in DTYPES or len(stored.shape) != 2 or not stored.num_bytes:
                told = f"dtype {stored.dtype} and shape {list(stored.shape)}"
                raise CheckpointError(f"{stored.file}: tensor {name!r} with {told} is not supported, only A and B of matrices are")
            values = torch.frombuffer(bytearray(files.view(stored)), dtype=DTYPES[stored.dtype]).view(stored.shape).float()
            if not bool(values.isfinite().all()):
                raise CheckpointError(f"{stored.file}: tensor {name!r} has a value that is not finite")
            module = name.removesuffix(ending).removeprefix(_PREFIX)
            both = parts.setdefault(canonical_name(f"{module}.weight"), {})
            if _PARTS[ending] in both:
                raise CheckpointError(f"{stored.file}: tensor {name!r} is there twice, by another name")
            both[_PARTS[ending]] = values
    if not parts:
        raise CheckpointError(f"{path}: has no tensors")
    if absent := next((name for name, both in parts.items() if len(both) != 2), None):
        raise CheckpointError(f"{path}: has A or B alone for {absent!r}")
    return Adapter({name: _Pair(both["A"], both["B"], _factor(config, both["A"].shape[0])) for name, both in parts.items()}, path)


def _factor(config: Mapping[str, Any], rank: int) -> float:
    alpha = float(config["lora_alpha"])
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def read_config(file: Path) -> Mapping[str, Any]:
    """An adapter's fields. Raises: CheckpointError naming the one that is not supported."""
    try:
        config: Any = json.loads(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}; an adapter is a directory that peft has written") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not valid JSON: {error}") from None
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        raise CheckpointError(f"{file}: peft_type is {kind!r}, expected 'LORA'")
    alpha, begun = config.get("lora_alpha"), config.get("init_lora_weights")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise CheckpointError(f"{file}: lora_alpha is {alpha!r}, expected a number")
    for field, value in config.items():
        if value and field not in _HARMLESS and (field, value) != ("bias", "none"):
            raise CheckpointError(f"{file}: {field} is {value!r}, which is not supported")
    if begun not in _BEGINNINGS:
        raise CheckpointError(f"{file}: init_lora_weights is {begun!r}, for which the base has other weights: not supported")
    return dict(config)
