"""The device of a run: refused where there is none, and what its errors mean for a process."""

import pytest
import torch

from mmrt.actors.device import is_device_lost, is_out_of_memory, open_device
from mmrt.runtime.config import ModelSection
from mmrt.runtime.errors import ConfigError

FAULT = RuntimeError("CUDA error: an illegal memory access was encountered")
LOST = [FAULT, RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")]
NO_ROOM = [
    RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
]
HARMLESS = [ValueError("CUDA error: says who"), RuntimeError("shape '[3]' is invalid for input of size 2")]


def test_the_cpu_is_always_there() -> None:
    assert open_device(ModelSection()) == torch.device("cpu")


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch was built with CUDA")
@pytest.mark.parametrize("name", ["cuda", "cuda:3"])
def test_a_torch_without_cuda_is_told_apart(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"no CUDA device for model\.device = '{name}': torch .* was built without CUDA"):
        open_device(ModelSection(device=name))


def test_errors_of_a_device() -> None:
    assert [is_device_lost(error) for error in [*LOST, *NO_ROOM, *HARMLESS]] == [True] * 2 + [False] * 5
    assert [is_out_of_memory(error) for error in [*LOST, *NO_ROOM, *HARMLESS]] == [False] * 2 + [True] * 3 + [False] * 2
