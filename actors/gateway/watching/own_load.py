"""Says in the log that the gateway is the limit of its run: its event loop has one core. Called in that loop, now and then."""

import logging

from ....runtime.config.runtime_config import RuntimeConfig
from ....runtime.stage_table import STAGES, ProcessSpec, expand_layout, format_layout

log = logging.getLogger(__name__)

WINDOW_S = 10.0
FULL = 0.7  # of a core: above it requests wait noticeably
REPEAT_S = 600.0  # until it is said again


class OwnLoad:
    """Of one gateway. ``advice``: the next step. Times: by the clock, and processor time of the loop's thread, in seconds."""

    def __init__(self, now_s: float, used_s: float, advice: str) -> None:
        self._since_s, self._used_s, self._advice = now_s, used_s, advice
        self._said_s = -REPEAT_S

    def tick(self, now_s: float, used_s: float) -> None:
        """Look at the load since the last look, if that was a while ago."""
        if (seconds := now_s - self._since_s) < WINDOW_S:
            return
        share = (used_s - self._used_s) / seconds
        self._since_s, self._used_s = now_s, used_s
        if share >= FULL and now_s - self._said_s >= REPEAT_S:
            self._said_s = now_s
            log.warning("this gateway computed for %.0f %% of the last %.0f s: it is the limit; %s", 100 * share, seconds, self._advice)


def advice_for(config: RuntimeConfig, *, has_supervisor: bool) -> str:
    """Return how the run gets more gateways, or why it cannot."""
    if config.server.scheme == "https":
        return "a run with TLS has one gateway (server.tls_cert)"
    if not has_supervisor:
        return "under systemd a run has one gateway; mmrt up has several (actors.layout)"
    if config.num_gateways == STAGES["gateway"].max_count:
        return f"a run has at most {config.num_gateways} gateways"
    others = [process for process in expand_layout(config.actors.layout) if process.stages != ("gateway",)]
    layout = format_layout([ProcessSpec(("gateway",), config.num_gateways + 1), *others])
    return f'the next start can have one more: actors.layout = "{layout}"'
