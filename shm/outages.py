"""The actors that the run does without for now, and why: written by the supervisor, read by the controller.

It exists from the start of the run, so that a full file system cannot hide an outage.
"""

from pathlib import Path

import msgspec

from ..schema.outage import Outage
from .published import Published
from .run_directory import RunDirectory


class OutageTable(Published[tuple[Outage, ...]]):
    """All outages of a run. Only the supervisor publishes them."""

    NAME = "outages"
    MAX_BYTES = 16384  # every actor of the largest run may be broken
    DECODER = msgspec.msgpack.Decoder(tuple[Outage, ...])
    FIRST = ()

    def publish(self, value: tuple[Outage, ...]) -> None:
        """Replace them, with their reasons shortened."""
        super().publish(tuple(outage.shortened() for outage in value))

    @classmethod
    def _path(cls, run: RunDirectory) -> Path:
        return run.path / cls.NAME  # without the run id: a memory that makes its segments anew leaves it alone
