"""When a dead actor is started again, and when not: a pure function of its history, called by the supervisor.

The window counts *running* time. Time spent waiting in backoff does not age a failure, so that backoff and limit cannot cancel each
other (with systemd's RestartSteps and StartLimitIntervalSec they can).
"""

import msgspec

CONFIGURATION_STATUS = 2  # exit status of an actor that will never start with this configuration


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """``limit`` failures within ``window_s`` of running time are a crash loop.

    Delays double from ``backoff_s`` to ``backoff_max_s``.
    """

    limit: int = 5
    window_s: float = 30.0
    backoff_s: float = 0.1
    backoff_max_s: float = 5.0


class RestartHistory(msgspec.Struct, frozen=True):
    """The recent failures of one actor, newest last: how long the process that died had lived, in seconds."""

    lifetimes_s: tuple[float, ...] = ()

    @property
    def num_failures(self) -> int:
        return len(self.lifetimes_s)


class StartAgain(msgspec.Struct, frozen=True):
    """Start it again after ``delay_s``."""

    delay_s: float


class GiveUp(msgspec.Struct, frozen=True):
    """The actor is failed, and with it the run. ``reason`` is for people."""

    reason: str


Decision = StartAgain | GiveUp


def decide(
    policy: RestartPolicy, history: RestartHistory, *, lifetime_s: float, status: int, jitter: float, in_step: bool = False
) -> tuple[Decision, RestartHistory]:
    """What follows on the death of a process that nobody asked to end, with the history that includes it.

    ``status`` is the exit status (negative: the signal); 0 is a failure too. ``jitter`` in [0, 1) shortens the delay by up to
    half, so that actors that died together do not come back together. ``in_step``: it died of the work of a request, which is
    quarantined after at most a few deaths (docs/recovery.md); such deaths are no crash loop and leave the history as it is.
    """
    if in_step and status != CONFIGURATION_STATUS:
        return StartAgain(policy.backoff_s * (1 - jitter / 2)), history
    newer_s = 0.0
    recent: list[float] = []
    for lived_s in reversed((*history.lifetimes_s, lifetime_s)):
        if newer_s > policy.window_s:
            break
        recent.append(lived_s)
        newer_s += lived_s
    after = RestartHistory(tuple(reversed(recent)))
    if status == CONFIGURATION_STATUS:
        return GiveUp("it cannot start with this configuration"), after
    if after.num_failures >= policy.limit:
        return GiveUp(f"{after.num_failures} failures within {policy.window_s:g} s of running (supervisor.restart_limit)"), after
    # The exponent is bounded since 2.0 ** 1024 overflows.
    delay_s = min(policy.backoff_max_s, policy.backoff_s * 2.0 ** min(after.num_failures - 1, 64))
    return StartAgain(delay_s * (1 - jitter / 2)), after
