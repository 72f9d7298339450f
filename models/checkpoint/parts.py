"""The tensors that a quantized matrix is made of, checked by the headers of their files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError
from .safetensors_files import StoredTensor
from .weight_specs import Shape

EXPONENTS = ("U8", "F8_E8M0")  # scales of which a byte b says 2 to the power of b - 127


def scale_values(stored: Tensor) -> Tensor:
    """Scales as float32; bytes are exponents."""
    return (stored.view(torch.float8_e8m0fnu) if stored.dtype == torch.uint8 else stored).float()


def find_part(
    name: str, stored: Mapping[str, StoredTensor], dtypes: Sequence[str], shapes: Sequence[Shape], file: Path
) -> StoredTensor:
    """The tensor of this name, of one of these types and shapes. ``file``: where the matrix's others are. Raises: CheckpointError."""
    tensor, wanted = stored.get(name), " or ".join(str(list(shape)) for shape in shapes)
    if tensor is None:
        raise CheckpointError(f"{file}: tensor {name!r} of shape {wanted} is missing")
    if tensor.shape not in shapes or tensor.dtype not in dtypes:
        told = f"has dtype {tensor.dtype} and shape {list(tensor.shape)}"
        raise CheckpointError(
            f"{tensor.file}: tensor {name!r} {told}, expected {' or '.join(dtypes)} and {wanted} by quantization_config"
        )
    return tensor
