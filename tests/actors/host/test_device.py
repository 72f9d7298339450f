"""The device of a run: refused where there is none, and what its errors mean for a process."""

from pathlib import Path

import pytest
import torch

from mmrt.actors.host.device import check_fp8, open_device, raise_if_fatal, sharing_of
from mmrt.runtime.config.sections import ModelSection
from mmrt.runtime.errors import ConfigError

FAULT = RuntimeError("CUDA error: an illegal memory access was encountered")
LOST = [FAULT, RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")]
NO_ROOM = [
    RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
]
IGNORED_FIELDS = [ValueError("CUDA error: says who"), RuntimeError("shape '[3]' is invalid for input of size 2")]


def test_the_cpu_is_always_there() -> None:
    assert open_device(ModelSection()) == torch.device("cpu")


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch was built with CUDA")
@pytest.mark.parametrize("name", ["cuda", "cuda:3"])
def test_a_torch_without_cuda_is_told_apart(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"no CUDA device for model\.device = '{name}': torch .* was built without CUDA"):
        open_device(ModelSection(device=name))


@pytest.mark.parametrize("capability", [(8, 0), (7, 5), (8, 6)])
def test_a_device_without_fp8_is_told_what_it_needs(capability: tuple[int, int]) -> None:
    found = f"{capability[0]}.{capability[1]}"
    with pytest.raises(ConfigError, match=rf"needs compute capability 8\.9; the device has {found}: use 'int8'"):
        check_fp8(capability)
    check_fp8((8, 9))
    check_fp8((9, 0))


def test_how_a_device_is_shared(tmp_path: Path) -> None:
    assert sharing_of(torch.device("cuda"), tmp_path, "E+P+D") == "time slices"
    assert sharing_of(torch.device("cuda"), tmp_path, "EP+D") == "time slices, EP by streams"
    assert sharing_of(torch.device("cuda"), tmp_path, "EPD") == "streams"
    (tmp_path / "control").touch()
    assert sharing_of(torch.device("cuda"), tmp_path, "E+P+D") == "MPS" and sharing_of(torch.device("cpu"), tmp_path, "EPD") == ""


@pytest.mark.parametrize("error", LOST)
def test_a_lost_device_ends_the_process(error: RuntimeError) -> None:
    with pytest.raises(RuntimeError) as caught:
        raise_if_fatal(error)
    assert caught.value is error


@pytest.mark.parametrize("error", NO_ROOM)
def test_so_does_a_lack_of_memory(error: RuntimeError) -> None:
    with pytest.raises(MemoryError, match="allocate|out of memory"):
        raise_if_fatal(error)


@pytest.mark.parametrize("error", IGNORED_FIELDS)
def test_other_errors_are_the_request_s(error: Exception) -> None:
    raise_if_fatal(error)
