"""The device that a run computes on: open or refuse it, wait for it, and recognise its loss."""

import os
import shutil
import sysconfig
from pathlib import Path

import torch

from ...runtime.config.sections import ModelSection
from ...runtime.errors import ConfigError

_PYTHON_H = Path(sysconfig.get_path("include"), "Python.h")
_FP8_CAPABILITY = (8, 9)
_LOST = ("CUDA error", "Triton Error [CUDA]", "CUBLAS_STATUS", "CUDNN_STATUS")
_NO_ROOM = ("allocate memory", "out of memory")


def open_device(model: ModelSection) -> torch.device:
    """Open ``model.device``; a CUDA device has its number and is this process's current one from then on.

    Raises: ConfigError where there is none.
    """
    if not model.on_cuda:
        return torch.device("cpu")
    if torch.version.cuda is None:
        raise ConfigError(f"no CUDA device for model.device = {model.device!r}: torch {torch.__version__} was built without CUDA")
    if not torch.cuda.is_available():
        raise ConfigError(f"no CUDA device for model.device = {model.device!r}: torch {torch.__version__} finds none")
    number = torch.device(model.device).index or 0
    if number >= torch.cuda.device_count():
        raise ConfigError(f"model.device = {model.device!r} does not exist: this machine has {torch.cuda.device_count()} CUDA devices")
    try:
        import cuda.bindings.driver  # noqa: F401
    except ImportError:
        raise ConfigError(f"model.device = {model.device!r} needs cuda-bindings: pip install 'mmrt[cuda]'") from None
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")) or not _PYTHON_H.is_file():
        what = f"a C compiler and {_PYTHON_H}"
        raise ConfigError(f"model.device = {model.device!r} needs {what} to build Triton's kernel launchers")
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    torch.cuda.init()  # type: ignore[no-untyped-call]
    torch.cuda.current_stream(device).synchronize()  # the driver's calls on memory need the context, which is made late
    torch.backends.cudnn.allow_tf32 = False  # float32 is float32: in convolutions,
    torch.backends.cuda.matmul.allow_tf32 = False  # and in products, whatever the environment asks for
    return device


def check_fp8(capability: tuple[int, int]) -> None:
    """Check the device for float8_e4m3fn. Raises: ConfigError for one that cannot compute with it."""
    if capability < _FP8_CAPABILITY:
        needed, found = (".".join(map(str, version)) for version in (_FP8_CAPABILITY, capability))
        raise ConfigError(f"memory.kv_dtype is 'fp8', which needs compute capability {needed}; the device has {found}: use 'int8'")


def sharing_of(device: torch.device, mps_pipe: Path, layout: str) -> str:
    """Describe the sharing of the device by encoder, prefill and decode: see ``report.ComputeReport``. Processes join CUDA's
    multi-process service by themselves where its pipe is."""
    if device.type != "cuda":
        return ""
    processes = "MPS" if os.path.exists(mps_pipe / "control") else "time slices"
    shared = next((stages for stages in layout.split("+") if len(stages) > 1), "")
    return processes if not shared else "streams" if shared == layout else f"{processes}, {shared} by streams"


class Completion:
    """Tells when this process's launches are done: a plan is done when its event is, and nothing else is waited for.

    Launches of other processes are in no order with it.
    """

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(blocking=True) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until all launches on the current stream are done; on the CPU they are. Raises: RuntimeError if one of them failed."""
        if self._event is not None:
            self._event.record()
            self._event.synchronize()


def raise_if_fatal(error: Exception) -> None:
    """Raise an error that must end this process, while it is handled: the fault is the process's, not its request's.

    Raises: MemoryError if torch or Triton found no room, in host memory or on the device: a new process gets what this one
    holds. ``error`` itself if the device refuses this process from now on, as after a fault in a kernel.
    """
    if not isinstance(error, RuntimeError):
        return
    if any(words in str(error) for words in _NO_ROOM):
        raise MemoryError(str(error)) from None
    if is_lost(error):
        raise error


def is_lost(error: BaseException) -> bool:
    """Return whether the error is the device's, which refuses this process from now on: the next wait sees it, whatever its cause."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST)
