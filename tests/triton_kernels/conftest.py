"""Kernels run on the GPU where there is one, and otherwise in Triton's interpreter, repaired."""

import pytest
import torch

HAS_GPU = torch.cuda.is_available()

if not HAS_GPU:
    from mmrt.tests.triton_kernels import interpreter

    interpreter.install()


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where tensors of kernel tests live."""
    return torch.device("cuda" if HAS_GPU else "cpu")
