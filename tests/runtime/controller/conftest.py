"""A check of every grant of KV pages, in all tests of the controller's rules; and a place for the files of simulated runs."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmrt.runtime.controller import machine
from mmrt.runtime.controller.caches import prefix_cache
from mmrt.runtime.controller.rows import intake, kv_manager
from mmrt.runtime.controller.rows.placement import Placement
from mmrt.runtime.controller.state.request import Request
from mmrt.runtime.controller.state.state import ControllerState


@pytest.fixture(scope="session", autouse=True)
def grants_share_what_the_caches_have() -> Iterator[None]:
    """The pages that a placement has found are those that the caches have when the grant shares them."""
    grant_kv = kv_manager.grant_kv

    def grant(state: ControllerState, request: Request, placement: Placement) -> bool:
        source, targets = placement.source or placement.pool, request.targets
        assert placement.hits == prefix_cache.find_hits(state, request, source)
        home = [] if placement.source is None else prefix_cache.find_home_hits(state, request, placement.pool, targets)
        assert placement.at_home == home
        return grant_kv(state, request, placement)

    with pytest.MonkeyPatch.context() as patch:
        for module in (intake, machine):
            patch.setattr(module, "grant_kv", grant)
        yield


@pytest.fixture
def place() -> Iterator[Path]:
    """A short path, for sockets; on a tmpfs where there is one."""
    with tempfile.TemporaryDirectory(prefix="mmrt-test-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as name:
        yield Path(name)
