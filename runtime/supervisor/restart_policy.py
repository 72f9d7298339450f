"""Decide when to restart a dead actor: a pure function of its history, called by the supervisor.

A process that keeps failing by itself is *broken*: the run goes on without it, and it is tried at growing intervals (*probes*) until
one of them serves for long enough. The window counts *running* time. Time spent waiting in backoff does not age a failure, so
that backoff and limit cannot cancel each other (with systemd's RestartSteps and StartLimitIntervalSec they can).
"""

from typing import Literal

import msgspec

CONFIGURATION_STATUS = 2  # exit status of an actor that cannot start with this configuration
PROBE_S, PROBE_MAX_S = 5.0, 60.0  # from becoming broken to the first probe, doubled with each; and the longest wait

# Cause of the end: the process itself, or its supervisor because of its fault; the work of a request, which is quarantined
# after a few deaths (docs/recovery.md); a signal from outside.
Cause = Literal["itself", "work", "outside"]


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """``limit`` failures within ``window_s`` of running time are a crash loop.

    Delays double from ``backoff_s`` to ``backoff_max_s``. After a first kill from outside the actor is restarted at once.
    """

    limit: int = 5
    window_s: float = 30.0
    backoff_s: float = 0.1
    backoff_max_s: float = 5.0


class RestartHistory(msgspec.Struct, frozen=True):
    """The recent past of one actor. Ages are seconds of running time since then, oldest first.

    ``failure_ages_s``: of its own failures; ``kill_ages_s``: of kills from outside, which only delay the next start.
    ``num_probes``: starts since it became broken, none long enough for the failures to expire. ``reason``: why it is broken; ""
    if it is not.
    """

    failure_ages_s: tuple[float, ...] = ()
    kill_ages_s: tuple[float, ...] = ()
    num_probes: int = 0
    reason: str = ""

    def aged(self, lifetime_s: float, window_s: float) -> "RestartHistory":
        """Return the history after another ``lifetime_s`` of running and a requested end."""
        failures = _aged(self.failure_ages_s, lifetime_s, window_s)
        kills = _aged(self.kill_ages_s, lifetime_s, window_s)
        return RestartHistory(failures, kills, self.num_probes if failures else 0, self.reason if lifetime_s == 0.0 else "")

    def mended(self) -> "RestartHistory":
        """Return the history of an actor that is not broken any more: the next death that is not its own starts it again."""
        return RestartHistory(self.failure_ages_s, self.kill_ages_s, self.num_probes)


class StartAgain(msgspec.Struct, frozen=True):
    """Start it again after ``delay_s``."""

    delay_s: float


class Broken(msgspec.Struct, frozen=True):
    """Do without it, and try again after ``delay_s``. ``reason`` is for users."""

    reason: str
    delay_s: float


Decision = StartAgain | Broken


def decide(
    policy: RestartPolicy, history: RestartHistory, *, lifetime_s: float, status: int, jitter: float, cause: Cause = "itself"
) -> tuple[Decision, RestartHistory]:
    """Decide what follows the unrequested death of a process; also return the history that includes it.

    ``lifetime_s`` is how long it lived, 0 if it never served; for any cause of death, its time ages earlier failures.
    ``status`` is the exit status (negative: the signal); 0 is a failure too. ``jitter`` in [0, 1) shortens the delay by up to half, so
    that actors that died together do not restart together. Only its own failures can make it broken.
    """
    before = history.aged(lifetime_s, policy.window_s)
    failures, kills, num_probes = before.failure_ages_s, before.kill_ages_s, before.num_probes
    cannot_start = status == CONFIGURATION_STATUS and cause != "outside"
    if cause == "itself" or cannot_start:
        failures = (*failures, 0.0)[-policy.limit :]
        if cannot_start:
            reason = "it cannot start with this configuration"
        elif len(failures) >= policy.limit:
            reason = f"{len(failures)} failures within {policy.window_s:g} s of running (supervisor.restart_limit)"
        else:
            reason = ""
    else:
        kills = (*kills, 0.0)[-policy.limit :] if cause == "outside" else kills
        reason = before.reason
    shortened = 1 - jitter / 2
    if reason:
        delay_s = min(PROBE_MAX_S, PROBE_S * 2.0 ** min(num_probes, 16))
        return Broken(reason, delay_s * shortened), RestartHistory(failures, kills, num_probes + (cause != "outside"), reason)
    after = RestartHistory(failures, kills, num_probes)
    num_deaths = 1 if cause == "work" else len(failures) + len(kills) - (cause == "outside")
    if not num_deaths:
        return StartAgain(0.0), after
    # The exponent is bounded since 2.0 ** 1024 overflows.
    delay_s = min(policy.backoff_max_s, policy.backoff_s * 2.0 ** min(num_deaths - 1, 64))
    return StartAgain(delay_s * shortened), after


def _aged(ages_s: tuple[float, ...], lifetime_s: float, window_s: float) -> tuple[float, ...]:
    """Return the ages still within the window after another ``lifetime_s`` of running."""
    return tuple(age_s + lifetime_s for age_s in ages_s if age_s + lifetime_s <= window_s)
