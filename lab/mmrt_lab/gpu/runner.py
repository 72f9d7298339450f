"""Starts each section in its own process, one after another, and reads its rows. Called by ``__main__``."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from .results import Row
from .section import LOST

_MOST_STARTS = 6  # of a section whose kernels fault
_LEAST_S = 20.0  # below which a section is not started


@dataclass(slots=True)
class Written:
    """Output of a section: its rows, and the last case that it began: number (-1: none), name, and whether it may fail."""

    rows: list[Row] = field(default_factory=list)
    begun: int = -1
    case: str = "start"
    is_peer: bool = False


def run_section(section: str, command: Sequence[str], file: Path, environment: Mapping[str, str], end_s: float) -> list[Row]:
    """All rows of a section until ``end_s`` of the monotonic clock, for whose end there is a row where it did not come to its own.

    ``command`` starts its process; the section's name, ``--rows`` and ``--skip`` are added. ``file`` does not exist yet. A process that
    dies is started again for the cases after the one it died in.
    """
    skip, lost, written = 0, list[Row](), Written()
    for _ in range(_MOST_STARTS):
        left_s = end_s - time.monotonic()
        if left_s < _LEAST_S:
            lost.append(Row(section=section, case=section, note="not run: no time left" if not skip else "no time left for the rest"))
            break
        status = _wait([*command, section, "--rows", str(file), "--skip", str(skip)], environment, left_s)
        written = read_rows(file)
        if status == 0:
            break
        if status is None:
            lost.append(Row(section=section, case=written.case, note="the section's time was over"))
            break
        is_told = status == LOST and written.rows and (written.is_peer or written.rows[-1].failed)
        if not is_told:
            lost.append(Row(section=section, case=written.case, failed=not written.is_peer, note=_ending(status)))
        if written.begun < skip:
            break
        skip = written.begun + 1
    return [*written.rows, *lost]


def read_rows(file: Path) -> Written:
    """A killed process may have left half a line: it is skipped."""
    written = Written()
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "begun" in found:
            written.begun, written.case, written.is_peer = found["begun"], found["case"], found["is_peer"]
        else:
            written.rows.append(Row(**found))
    return written


def _wait(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> int | None:
    """The exit status, or None where the limit was reached. The process's children, such as compilers, end with it."""
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _ending(status: int) -> str:
    if status == -signal.SIGALRM:
        return "took too long and was ended"
    return f"the process ended with signal {-status}" if status < 0 else f"the process ended with status {status}"
