"""An actor that the run does without for now."""

import msgspec


class Outage(msgspec.Struct, frozen=True):
    """``actor`` is broken for ``reason``. It is tried again at ``next_probe_s`` (CLOCK_MONOTONIC; 0: unknown)."""

    actor: str
    reason: str
    next_probe_s: float = 0.0
