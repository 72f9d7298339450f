"""What the tests of the controller's actor leave behind is undone."""

import resource
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def memory_limit() -> Iterator[None]:
    """A policy of a file limits the memory of the process that it is in charge of: here that of all later tests."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)
