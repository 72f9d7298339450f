"""Memory of a CUDA device that outlives the processes that use it: allocated by one, handed on as a descriptor, mapped by all.

The driver's virtual memory management: a physical allocation has no address until a process maps it, can be exported as a file
descriptor, and is freed when the last mapping and the last descriptor are gone, in whichever process. The ``memory`` actor allocates;
prefill, decode and encoder attach. Imported only where a model is computed on CUDA: needs cuda-bindings, and a driver to call.
"""

import logging
import os
from collections.abc import Callable
from typing import Any, Self

from cuda.bindings import driver

from .descriptors import Descriptor
from .errors import DeviceError

log = logging.getLogger(__name__)

_POSIX_FD = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_READ = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
_READ_WRITE = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE


class DeviceMemory:
    """``num_bytes`` on device ``ordinal``, mapped in this process until ``close``, or its end.

    Any array library uses it in place by ``__cuda_array_interface__`` (version 3): uint8 [num_bytes].
    """

    def __init__(self, ordinal: int, num_bytes: int, handle: Any, what: str, writable: bool = True) -> None:
        """Map an allocation; use ``allocate`` or ``attach``. The handle is given up: the mapping keeps the allocation."""
        self.ordinal = ordinal
        self.num_bytes = num_bytes
        self._descriptor = -1
        self._address = 0
        self._is_mapped = False
        try:
            self._size = padded_bytes(num_bytes, _granularity(ordinal))
            self._address = int(_call(what, driver.cuMemAddressReserve, self._size, 0, driver.CUdeviceptr(0), 0))
            _call(what, driver.cuMemMap, self._pointer, self._size, 0, handle, 0)
            self._is_mapped = True
            self._allow_access(what, writable)
        except DeviceError:
            self.close()
            raise
        finally:
            driver.cuMemRelease(handle)

    @classmethod
    def allocate(cls, ordinal: int, num_bytes: int) -> Self:
        """Allocate memory of unknown content. Raises: DeviceError, which names the size asked for; ValueError for less than a byte."""
        if num_bytes < 1:
            raise ValueError(f"{num_bytes} bytes on device {ordinal}: at least 1 is needed")
        what = f"{num_bytes} bytes on device {ordinal}"
        size = padded_bytes(num_bytes, _granularity(ordinal))
        handle = _call(what, driver.cuMemCreate, size, _properties(ordinal), 0)
        try:
            descriptor = int(_call(f"export of {what}", driver.cuMemExportToShareableHandle, handle, _POSIX_FD, 0))
        except DeviceError:
            driver.cuMemRelease(handle)
            raise
        try:
            memory = cls(ordinal, num_bytes, handle, what)
        except DeviceError:
            os.close(descriptor)
            raise
        memory._descriptor = descriptor
        return memory

    @classmethod
    def attach(cls, ordinal: int, descriptor: Descriptor, writable: bool = True) -> Self:
        """Map memory of another process. The descriptor stays the caller's, and is no longer needed. Raises: DeviceError.

        Not ``writable``: a kernel of this process that writes there faults, and what all processes read stays as it is. Where the
        driver refuses that, the log says so, and the memory can be written like any.
        """
        what = f"{descriptor.num_bytes} bytes of another process on device {ordinal}"
        _call("the CUDA driver", driver.cuInit, 0)
        handle = _call(what, driver.cuMemImportFromShareableHandle, descriptor.fd, _POSIX_FD)
        return cls(ordinal, descriptor.num_bytes, handle, what, writable)

    @property
    def descriptor(self) -> Descriptor:
        """The descriptor for others to attach, of memory allocated here; open until ``close``."""
        assert self._descriptor >= 0, "only who has allocated exports"
        return Descriptor(self._descriptor, self.num_bytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": (self.num_bytes,), "typestr": "|u1", "data": (self._address, False), "strides": None}

    @property
    def _pointer(self) -> Any:
        return driver.CUdeviceptr(self._address)

    def _allow_access(self, what: str, writable: bool) -> None:
        if not writable:
            try:
                return self._set_access(what, _READ)
            except DeviceError as error:
                log.warning("%s for reading only: mapped for writing, too", error)
        self._set_access(what, _READ_WRITE)

    def _set_access(self, what: str, flags: Any) -> None:
        access = driver.CUmemAccessDesc()
        access.location = _location(self.ordinal)
        access.flags = flags
        _call(what, driver.cuMemSetAccess, self._pointer, self._size, [access], 1)

    def clear(self) -> None:
        """Zero it all, by the driver, in order with launches on the default stream. Needs the device's context."""
        _call(f"clearing {self.num_bytes} bytes on device {self.ordinal}", driver.cuMemsetD8, self._pointer, 0, self.num_bytes)

    def close(self) -> None:
        """Unmap. Nothing may be using it: neither tensors on it nor kernels that were launched."""
        if self._is_mapped:
            _call("unmapping", driver.cuMemUnmap, self._pointer, self._size)
            self._is_mapped = False
        if self._address:
            _call("unmapping", driver.cuMemAddressFree, self._pointer, self._size)
            self._address = 0
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def padded_bytes(num_bytes: int, granularity: int) -> int:
    """The bytes allocated and mapped for ``num_bytes``: whole pages of the device."""
    return -(-num_bytes // granularity) * granularity


def _granularity(ordinal: int) -> int:
    _call("the CUDA driver", driver.cuInit, 0)
    minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(_call(f"device {ordinal}", driver.cuMemGetAllocationGranularity, _properties(ordinal), minimum))


def _properties(ordinal: int) -> Any:
    """Memory on the device that can be exported as a file descriptor."""
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.requestedHandleTypes = _POSIX_FD
    properties.location = _location(ordinal)
    return properties


def _location(ordinal: int) -> Any:
    location = driver.CUmemLocation()
    location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = ordinal
    return location


def _call(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """The value that a driver function returns behind its status. Raises: DeviceError."""
    status, *values = function(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"{what}: {function.__name__} says {getattr(status, 'name', status)}")
    return values[0] if values else None
