"""What a user has set at run time: ``<run>/tuning``, a JSON file, replaced whole.

``mmrt policy set`` writes it and the controller reads it, at its start and while it runs. So it needs no supervisor, and a new
controller follows it as well.
"""

import os
import time
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from ...shm.regular_file import read_regular

TUNING_NAME = "tuning"
_MAX_BYTES = 1 << 16


class Tuning(msgspec.Struct, frozen=True):
    """``policy``: a name, or the absolute path of a file. ``number`` grows with each order. Both fit into the controller's report."""

    policy: Annotated[str, Meta(max_length=4096)]
    number: Annotated[int, Meta(ge=0, le=1 << 62)] = 0


_decode = msgspec.json.Decoder(Tuning).decode


def write_tuning(run: Path, policy: str) -> Tuning:
    """Set the policy of the run in ``run``. Raises OSError."""
    before = read_tuning(run)
    tuning = Tuning(policy, max(time.time_ns(), before.number + 1 if before is not None else 0))
    part = run / f".{TUNING_NAME}.{os.getpid()}"
    try:
        part.write_bytes(msgspec.json.encode(tuning))
        os.replace(part, run / TUNING_NAME)
    finally:
        part.unlink(missing_ok=True)
    return tuning


def read_tuning(run: Path) -> Tuning | None:
    """Return what has been set; None if nothing has, or if it cannot be read."""
    try:
        return _decode(read_regular(run / TUNING_NAME, _MAX_BYTES))
    except (OSError, msgspec.DecodeError):
        return None
