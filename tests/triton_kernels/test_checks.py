"""What every wrapper asks of the device. Strides, types and shapes are refused in the tests of the operations."""

import pytest
import torch

from mmrt.triton_kernels.checks import check_device


def test_tensors_on_another_than_the_current_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)  # there may be no GPU here
    check_device("q", torch.device("cuda", 0))
    with pytest.raises(ValueError, match="q is on cuda:1, not on cuda:0, the current device"):
        check_device("q", torch.device("cuda", 1))
