"""An actor that the run does without for now."""

from typing import Self

import msgspec

MAX_REASON_BYTES = 300


class Outage(msgspec.Struct, frozen=True):
    """``actor`` is broken for ``reason``. It is tried again at ``next_probe_s`` (CLOCK_MONOTONIC; 0: unknown)."""

    actor: str
    reason: str
    next_probe_s: float = 0.0

    def shortened(self) -> Self:
        """Return it with a reason of at most MAX_REASON_BYTES in UTF-8."""
        return msgspec.structs.replace(self, reason=self.reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore"))
