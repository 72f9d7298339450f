"""What device memory asks of the driver, and what it gives back when that is refused: with a toy in the driver's place."""

import importlib.util
import logging
import os
import sys
from collections import Counter
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import mmrt.shm
from mmrt.shm.descriptors import Descriptor
from mmrt.shm.errors import DeviceError

PAGE_BYTES = 4096
HANDLE, ADDRESS = 7, 1 << 40


class Result(Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1


class ToyDriver(ModuleType):
    """Keeps count of what is held; ``refused``: names of functions, and flags of access."""

    CUresult = Result
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR="fd")
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READ="read", CU_MEM_ACCESS_FLAGS_PROT_READWRITE="write")
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM="minimum")
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
    CUmemAllocationProp = CUmemAccessDesc = CUmemLocation = SimpleNamespace
    CUdeviceptr = int

    def __init__(self) -> None:
        super().__init__("driver")
        self.refused: set[str] = set()
        self.held: Counter[str] = Counter()
        self.access = ""
        self.cleared: list[tuple[int, int, int]] = []
        self.descriptor = -1

    def _do(self, name: str, *values: object, **held: int) -> tuple[object, ...]:
        if name in self.refused:
            return (Result.CUDA_ERROR_INVALID_VALUE, *(None for _ in values))
        self.held.update(held)
        return (Result.CUDA_SUCCESS, *values)

    def cuInit(self, flags: int) -> Any:
        return self._do("cuInit")

    def cuMemGetAllocationGranularity(self, properties: object, option: object) -> Any:
        return self._do("cuMemGetAllocationGranularity", PAGE_BYTES)

    def cuMemCreate(self, size: int, properties: object, flags: int) -> Any:
        return self._do("cuMemCreate", HANDLE, handles=1)

    def cuMemExportToShareableHandle(self, handle: int, kind: object, flags: int) -> Any:
        self.descriptor = os.open(os.devnull, os.O_RDONLY)
        return self._do("cuMemExportToShareableHandle", self.descriptor)

    def cuMemImportFromShareableHandle(self, fd: int, kind: object) -> Any:
        return self._do("cuMemImportFromShareableHandle", HANDLE, handles=1)

    def cuMemRelease(self, handle: int) -> Any:
        return self._do("cuMemRelease", handles=-1)

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> Any:
        return self._do("cuMemAddressReserve", ADDRESS, addresses=size)

    def cuMemAddressFree(self, address: int, size: int) -> Any:
        return self._do("cuMemAddressFree", addresses=-size)

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> Any:
        return self._do("cuMemMap", mapped=size)

    def cuMemUnmap(self, address: int, size: int) -> Any:
        return self._do("cuMemUnmap", mapped=-size)

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> Any:
        if access[0].flags in self.refused:
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        self.access = access[0].flags
        return self._do("cuMemSetAccess")

    def cuMemsetD8(self, address: int, value: int, count: int) -> Any:
        self.cleared.append((address, value, count))
        return self._do("cuMemsetD8")

    @property
    def all_held(self) -> dict[str, int]:
        return {name: count for name, count in self.held.items() if count}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> ToyDriver:
    driver = ToyDriver()
    bindings = ModuleType("cuda.bindings")
    bindings.driver = driver  # type: ignore[attr-defined]
    for name, module in {"cuda": ModuleType("cuda"), "cuda.bindings": bindings, "cuda.bindings.driver": driver}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return driver


@pytest.fixture
def memory(driver: ToyDriver) -> Any:
    """The class over the toy: a module of its own, beside the real one."""
    file = Path(mmrt.shm.__file__).with_name("device_memory.py")
    spec = importlib.util.spec_from_file_location("mmrt.shm.toy_device_memory", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.DeviceMemory


def test_what_is_allocated_is_given_back(driver: ToyDriver, memory: Any) -> None:
    made = memory.allocate(0, 5000)
    assert driver.all_held == {"addresses": 2 * PAGE_BYTES, "mapped": 2 * PAGE_BYTES} and driver.access == "write"
    made.clear()
    assert driver.cleared == [(ADDRESS, 0, 5000)]
    made.close()
    made.close()
    assert not driver.all_held
    with pytest.raises(OSError):
        os.fstat(driver.descriptor)


def test_where_reading_alone_is_refused_it_is_mapped_for_writing(
    driver: ToyDriver, memory: Any, caplog: pytest.LogCaptureFixture
) -> None:
    memory.attach(0, Descriptor(5, 100), writable=False)
    assert driver.access == "read" and not caplog.records
    driver.refused = {"read"}
    with caplog.at_level(logging.WARNING):
        memory.attach(0, Descriptor(5, 100), writable=False)
    assert driver.access == "write"
    (record,) = caplog.records
    assert "100 bytes of another process on device 0: cuMemSetAccess says CUDA_ERROR_INVALID_VALUE" in record.getMessage()


@pytest.mark.parametrize(
    "refused", ["cuMemGetAllocationGranularity", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemImportFromShareableHandle"]
)
def test_nothing_is_kept_of_memory_that_cannot_be_attached(driver: ToyDriver, memory: Any, refused: str) -> None:
    driver.refused = {refused}
    with pytest.raises(DeviceError, match=f"{refused} says CUDA_ERROR_INVALID_VALUE"):
        memory.attach(0, Descriptor(5, 100), writable=False)
    assert not driver.all_held


@pytest.mark.parametrize("refused", ["cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"])
def test_nothing_is_kept_of_memory_that_cannot_be_allocated(driver: ToyDriver, memory: Any, refused: str) -> None:
    driver.refused = {refused}
    with pytest.raises(DeviceError, match=f"{refused} says"):
        memory.allocate(0, 100)
    assert not driver.all_held
    if driver.descriptor >= 0:
        with pytest.raises(OSError):
            os.fstat(driver.descriptor)
