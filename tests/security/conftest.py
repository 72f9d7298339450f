"""A real run with an API key."""

from mmrt.tests.end_to_end.conftest import checkpoints, launch, source

__all__ = ["checkpoints", "launch", "source"]
