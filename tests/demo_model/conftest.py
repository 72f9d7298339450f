"""The toy server and the prepared skeleton of the benches' tests."""

from mmrt.tests.bench.conftest import honest, prepared, start_server, toy_server

__all__ = ["honest", "prepared", "start_server", "toy_server"]
