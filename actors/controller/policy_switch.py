"""The choice of the policy in charge while a run goes on (controller process).

The configuration names a policy, ``mmrt policy set`` another one (``<run>/tuning``). The controller looks for an order, and for an
edit of the policy's file, every ``LOOK_S`` between two ticks. A file whose new contents cannot be loaded leaves the previous ones in
charge. A version that ended a controller is *condemned*: it is loaded again only when it is set again.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from ...runtime.controller.plans.policy_calls import swap
from ...runtime.controller.scheduling.policy import POLICIES, UNIFIED, Policy, PolicyFailure
from ...runtime.controller.state.state import ControllerState
from ...runtime.process.crash_cause import Death, ExitNote, is_from_outside
from ...runtime.process.tuning import TUNING_NAME, Tuning, read_tuning
from ...schema.policy_report import NO_POLICY_YET, PolicyReport
from .policy_file import FilePolicy, PolicyFile
from .policy_guard import PolicyGuard

log = logging.getLogger(__name__)

LOOK_S = 0.1
MAX_ENDED = 2  # controllers that end outside of a version's calls until it is condemned: some of its code may run on
_MAX_REASON = 400  # characters

Signature = tuple[int, int, int]


def inherited(before: PolicyReport, number: int, death: Death | None, ended: bool, note: ExitNote | None) -> PolicyReport:
    """Return the previous controller's report after its end, which can condemn a version under the present order ``number``.

    ``death``: in a step, which is a call of a file's policy; ``ended``: it did not end in order; ``note``: on that, if there is one.
    """

    def condemned(version: str, reason: str) -> PolicyReport:
        return replace(before, condemned=version, condemned_number=number, condemned_because=f"the controller {reason}")

    if death is not None:
        return condemned(f"{death.step:016x}", f"{death.reason} in a call of it") if death.crashed else before
    is_foreign = note is not None and not note.hang and is_from_outside(note.status, False, 0)
    if not ended or is_foreign or not before.loaded:
        return before
    if note is not None and note.hang:
        return condemned(before.loaded, "hung after it had loaded it")
    num_ended = before.ended + 1
    if num_ended < MAX_ENDED:
        return replace(before, ended=num_ended)
    return condemned(before.loaded, f"ended {num_ended} times after it had loaded it")


class PolicySwitch:
    """Puts policies in charge, and reports on the one that is."""

    def __init__(
        self,
        run: Path,
        configured: str,
        state: ControllerState,
        guard: PolicyGuard,
        before: PolicyReport = NO_POLICY_YET,
        logs: Path | None = None,
        publish: Callable[[PolicyReport], object] = lambda _: None,
    ) -> None:
        """``configured``: a name, or the absolute path of a file. ``before``: the report that the previous controller left. No file is
        loaded from ``run`` or ``logs``. ``publish`` gets a report before a file's code first runs."""
        self._publish = publish
        self._run = run
        self._exposed = [run] if logs is None else [run, logs]
        self._state = state
        self._guard = guard
        state.guard = guard
        self._order = self._configured = Tuning(configured)
        self._tuned: Signature | None = None  # of the tuning file as it was read
        self._seen: Signature | None = None  # of the policy's file, at the last look
        self._tried: Signature | None = None  # as it was loaded or refused
        self._look_at_s = 0.0
        self._since_s = time.time()
        self._version = self._loaded = ""
        self._refused = ""
        self._set_aside = ""
        self._base = PolicyReport()  # the counts of earlier controllers with this policy in charge
        self._before = before
        self._begun = False

    @property
    def name(self) -> str:
        """The policy that was last put in charge."""
        return Path(self._order.policy).name

    def look(self, now_s: float) -> bool:
        """Follow orders and edits. Returns whether there is something to report."""
        if now_s < self._look_at_s:
            return False
        self._look_at_s = now_s + LOOK_S
        ordered = self._follow_orders()
        if not ordered and not self._follow_edits():
            return self._notice_failure()
        return True

    def report(self) -> PolicyReport:
        record, base, before = self._state.policy_record, self._base, self._before
        seconds = sorted(self._guard.seconds)
        return PolicyReport(
            name=self._state.policy.name,
            wanted=self._order.policy,
            number=self._order.number,
            version=self._version,
            since_s=self._since_s,
            plans=base.plans + record.plans,
            overruled=base.overruled + record.overruled,
            illegal=base.illegal + record.illegal,
            median_s=seconds[len(seconds) // 2] if seconds else 0.0,
            p99_s=seconds[int(0.99 * len(seconds))] if seconds else 0.0,
            longest_s=self._guard.longest_s,
            error=record.error or base.error,
            refused=self._refused,
            set_aside=self._set_aside or record.set_aside,
            loaded=self._loaded,
            ended=before.ended if (before.number, before.loaded) == (self._order.number, self._loaded) else 0,
            condemned=before.condemned,
            condemned_number=before.condemned_number,
            condemned_because=before.condemned_because,
        )

    def _follow_orders(self) -> bool:
        tuned = _signature(self._run / TUNING_NAME)
        if self._begun and tuned == self._tuned:
            return False
        self._tuned = tuned
        order = read_tuning(self._run) or self._configured
        if self._begun and order == self._order:
            return False
        self._begun, self._order = True, order
        if (named := POLICIES.get(order.policy)) is not None:
            self._put_in_charge(named, None)
        else:
            self._load(is_order=True)
        return True

    def _follow_edits(self) -> bool:
        if self._order.policy in POLICIES:
            return False
        signature = _signature(Path(self._order.policy))
        if signature == self._tried:
            return False
        if signature != self._seen:  # an editor may be writing it
            self._seen = signature
            return False
        self._load(is_order=False)
        return True

    def _load(self, is_order: bool) -> None:
        path = Path(self._order.policy)
        self._seen = self._tried = _signature(path)
        try:
            file = PolicyFile.read(path, self._exposed)
        except (OSError, ValueError) as error:
            self._refuse(f"{path} cannot be read: {error.strerror if isinstance(error, OSError) else error}", is_order)
            return
        if not is_order and file.version == self._version:
            self._refused = ""
            return
        before = self._before
        if file.version == before.condemned and self._order.number == before.condemned_number:
            self._put_in_charge(UNIFIED, None)
            self._version, self._set_aside = file.version, before.condemned_because
            log.error("policy %s is not loaded again: %s", self.name, before.condemned_because)
            return
        self._loaded = file.version
        self._publish(replace(self.report(), is_loading=True))  # the next controller must know, whatever happens now
        try:
            policy: FilePolicy = self._guard.load(file, file.load)
        except PolicyFailure as error:
            self._refuse(str(error), is_order)
        else:
            self._put_in_charge(policy, file)

    def _refuse(self, reason: str, is_order: bool) -> None:
        """Keep the version in charge after an edit; after an order it is that of another policy, and ``unified`` takes its place."""
        if is_order:
            self._put_in_charge(UNIFIED, None)
        self._refused = reason[:_MAX_REASON]
        log.error("policy %s cannot be loaded: %s", self.name, self._refused)

    def _put_in_charge(self, policy: Policy, file: PolicyFile | None) -> None:
        swap(self._state, policy)
        self._guard.watch(policy)
        self._refused = self._set_aside = ""
        self._version = file.version if file is not None else ""
        before, order = self._before, self._order
        goes_on = (before.name, before.number, before.version) == (policy.name, order.number, self._version) and before.since_s > 0
        self._base = before if goes_on else PolicyReport()
        self._since_s = before.since_s if goes_on else time.time()
        log.info("policy %s%s is in charge", policy.name, f" (version {self._version})" if self._version else "")

    def _notice_failure(self) -> bool:
        """Report once that the policy was set aside."""
        reason = self._state.policy_record.set_aside
        if not reason or self._set_aside:
            return False
        self._set_aside = reason
        self._guard.watch(UNIFIED)
        log.error("policy %s is set aside, unified is in charge: %s", self.name, reason)
        return True


def _signature(path: Path) -> Signature | None:
    try:
        found = path.stat()
    except (OSError, ValueError):  # ValueError: no path can be so
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
