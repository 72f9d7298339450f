"""Find the cause of a process's end, for its successor and the restart policy. Called by the supervisor at every end."""

from collections.abc import Mapping
from pathlib import Path

from ..process.crash_cause import MAX_UNEXPLAINED, ExitNote, crashed_in, is_from_outside, leave_notes, oom_kills, read_exit_note
from .managed_actor import Instance, SupervisedActor
from .status_report import ActorWords


def conclude(run: Path, actor: SupervisedActor, instance: Instance, words: Mapping[str, ActorWords]) -> list[str]:
    """Leave notes for the successor of ``instance``, which has ended, and set its ``cause``. Returns the roles whose work is the cause.

    ``words``: the status words of each of its roles, as far as they are its own.
    """
    status, pid = instance.process.exit_status, instance.process.pid
    roles = actor.spec.roles
    suspects = instance.suspects or crashed_in(roles, instance.tail)
    note = ExitNote(pid, status, instance.killed_because.startswith("hang"), instance.is_debugger)
    own_words = any(read_exit_note(run, role, pid) is not None for role in roles)  # of its own end, or of that of others in it
    blamed = leave_notes(run, note, words, suspects)
    if any(words[role].step_deadline_s > 0 and words[role].crashes < MAX_UNEXPLAINED for role in blamed):
        instance.cause = "work"
    elif not instance.killed_because and not own_words and is_from_outside(status, instance.obeys, oom_kills() - instance.oom_kills):
        instance.cause = "outside"
    return blamed
