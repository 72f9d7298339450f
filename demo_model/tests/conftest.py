"""The prepared skeleton, the toy server of the benches' tests, and the runs of the end-to-end tests."""

import pytest

from mmrt.demo_model.tests.small_training import Prepared
from mmrt.tests.bench.conftest import start_server, toy_server
from mmrt.tests.end_to_end.conftest import checkpoints, launch

__all__ = ["checkpoints", "launch", "prepared", "start_server", "toy_server"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return Prepared(tmp_path_factory.mktemp("skeleton"))
