"""The device that a run computes on: opened or refused, waited for, and recognised when it is lost."""

import torch

from ..runtime.config import ModelSection
from ..runtime.errors import ConfigError

_LOST = ("CUDA error", "Triton Error [CUDA]", "CUBLAS_STATUS", "CUDNN_STATUS")
_NO_ROOM = ("allocate memory", "out of memory")


def open_device(model: ModelSection) -> torch.device:
    """Where ``model.device`` says; a CUDA device has its number and is this process's current one from then on.

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
        raise ConfigError(f"model.device = {model.device!r} is beyond the {torch.cuda.device_count()} devices that there are")
    try:
        import cuda.bindings.driver  # noqa: F401
    except ImportError:
        raise ConfigError(f"model.device = {model.device!r} needs cuda-bindings: pip install 'mmrt[cuda]'") from None
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    torch.cuda.init()  # type: ignore[no-untyped-call]
    torch.backends.cudnn.allow_tf32 = False  # float32 is float32 in convolutions, too, as it is in products
    return device


class Completion:
    """Tells when what this process has launched is done: a plan is done when its event is, and nothing else is waited for.

    Launches of other processes are in no order with it.
    """

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(blocking=True) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Until all that was launched on the current stream is done; on the CPU it is. Raises: RuntimeError if some of it failed."""
        if self._event is not None:
            self._event.record()
            self._event.synchronize()


def is_out_of_memory(error: Exception) -> bool:
    """Whether torch or Triton found no room, in host memory or on the device."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_ROOM)


def is_device_lost(error: Exception) -> bool:
    """Whether the device refuses this process from now on, as after a fault in a kernel: only a new process can compute."""
    return isinstance(error, RuntimeError) and not is_out_of_memory(error) and any(words in str(error) for words in _LOST)
