"""The toy server of the benches' tests, the runs of the end-to-end tests, and the device of the kernels'."""

from mmrt.tests.bench.conftest import honest, start_server, toy_server
from mmrt.tests.end_to_end.conftest import checkpoints, launch, oracle, server
from mmrt.tests.triton_kernels.conftest import device

__all__ = ["checkpoints", "device", "honest", "launch", "oracle", "server", "start_server", "toy_server"]
