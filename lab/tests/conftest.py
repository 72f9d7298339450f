"""The toy server of the benches' tests, and the runs of the end-to-end tests."""

from mmrt.tests.bench.conftest import honest, start_server, toy_server
from mmrt.tests.end_to_end.conftest import checkpoints, launch, oracle, server

__all__ = ["checkpoints", "honest", "launch", "oracle", "server", "start_server", "toy_server"]
