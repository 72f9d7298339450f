"""``mmrt policy``: which scheduling policy a run has, how it does, and another one in its place while the run goes on.

``set`` writes ``<run>/tuning``, which the controller looks for: it needs no supervisor. ``show`` reads the report in shared memory.
"""

import difflib
import faulthandler
import inspect
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from ..runtime.config.runtime_config import is_policy_file
from ..runtime.controller.scheduling.policy import POLICIES, PolicyFailure
from ..runtime.errors import RunError, UserError
from ..runtime.process.exit_status import describe_exit
from ..runtime.process.tuning import write_tuning
from ..schema.policy_report import PolicyReport, often
from ..shm.controller_stats import ControllerStats
from ..shm.errors import MissingError
from ..shm.run_directory import RunDirectory
from .options import RunName, completed_from, model_run_path
from .terminal import print_columns

_TRIAL_S = 20.0
_ANSWER_S = 5.0
_LOOK_S = 0.05
_OK = ": ok (version "


class PolicyError(UserError):
    """A policy that there is not, or that cannot be used."""


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="List, show or replace the scheduling policy of a run.")
    app.add_typer(group, name="policy")

    @group.command("list")
    def list_(run: RunName = None) -> None:
        """List the policies; * marks that in charge, if a run is up."""
        path = model_run_path(run)
        report = _read(path) if RunDirectory.is_alive(path) else None
        rows = [["", "POLICY", ""]]
        rows += [["*" if report and report.name == name else "", name, _headline(policy)] for name, policy in POLICIES.items()]
        if report is not None and report.wanted not in POLICIES:
            rows.append(["*" if not report.set_aside and report.version else "", report.wanted, "the policy that is set"])
        print_columns(rows, left=(0, 1, 2))

    @group.command()
    def show(
        json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False, run: RunName = None
    ) -> None:
        """Show the policy in charge: its version, what it did, how long its calls took, and why it was last overruled."""
        report = _read(model_run_path(run))
        print(msgspec.json.encode(report).decode()) if json else _print(report)

    @group.command("set")
    def set_(
        policy: Annotated[
            str,
            typer.Argument(
                metavar="NAME|FILE.py", help="One of mmrt policy list, or a file.", autocompletion=completed_from(list(POLICIES))
            ),
        ],
        run: RunName = None,
    ) -> None:
        """Put a policy in charge at the next tick. No request is lost, and edits of a file are followed from then on.

        A file is tried first; if it cannot be used, nothing changes and the exit status is 2.
        """
        path = model_run_path(run)
        wanted = _checked(policy)
        _expect_run(path)
        print(set_policy(path, wanted))

    @group.command()
    def check(file: Annotated[Path, typer.Argument(metavar="FILE.py", help="A policy's file.")]) -> None:
        """Load a policy's file and call it for two requests, without a run. The exit status is 2 if it cannot be used."""
        from .policy_trial import try_policy

        faulthandler.enable(2, all_threads=False)
        try:
            trial = try_policy(file.absolute())
        except OSError as error:
            raise PolicyError(f"{file} cannot be read: {error.strerror}") from None
        except (PolicyFailure, ValueError) as error:
            raise PolicyError(str(error)) from None
        print(f"{file}{_OK}{trial.version}): planned in {trial.num_rounds} rounds, {trial.num_illegal} illegal choices")


def set_policy(run: Path, wanted: str) -> str:
    """Order a policy, a name or the absolute path of a file, and wait for the controller. Returns what it said. Raises: RunError."""
    number = write_tuning(run, wanted).number
    give_up_s = time.monotonic() + _ANSWER_S
    while time.monotonic() < give_up_s:
        report = _read(run, may_start=True)
        if report.number == number and not report.is_loading:
            if report.refused or report.set_aside:
                raise RunError(report.refused or report.set_aside)
            return report.summary
        if report.number > number:
            raise RunError(f"another policy has been set: {report.wanted}")
        time.sleep(_LOOK_S)
    return f"the controller has not answered within {_ANSWER_S:g} s: {wanted} is in charge once it does"


def _checked(policy: str) -> str:
    """Return a policy's name, or the absolute path of its file after a trial in a process of its own. Raises: PolicyError."""
    if policy in POLICIES:
        return policy
    if not is_policy_file(policy):
        near = difflib.get_close_matches(policy, POLICIES, n=1)
        hint = f"did you mean {near[0]}? There" if near else "there"
        raise PolicyError(f"no policy {policy!r}; {hint} are {', '.join(POLICIES)}, and files NAME.py")
    path = os.path.abspath(policy)
    try:
        path.encode()
    except UnicodeEncodeError:
        raise PolicyError(f"the path {path!r} is not UTF-8") from None
    command = [sys.executable, "-m", f"{__package__}.main", "policy", "check", path]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace", timeout=_TRIAL_S
        )
    except subprocess.TimeoutExpired:
        raise PolicyError(f"{policy} did not come to an end in {_TRIAL_S:g} s") from None
    if done.returncode == 0 and _OK in done.stdout:
        return path
    said = done.stderr.strip().splitlines()
    if said and said[-1].startswith("error: "):
        raise PolicyError(said[-1].removeprefix("error: "))
    place = next((f": {line.strip()}" for line in said if path in line), "")
    raise PolicyError(f"{policy} ends its process ({describe_exit(done.returncode)}){place}")


def _expect_run(path: Path) -> None:
    if not RunDirectory.is_alive(path):
        raise RunError(f"no run is up in {path} (mmrt up)")


def _read(path: Path, may_start: bool = False) -> PolicyReport:
    """Return the controller's report. Raises: RunError when no run is up, or it is only just starting and may not be."""
    _expect_run(path)
    try:
        with RunDirectory.attach(path) as directory:
            segment = ControllerStats.attach(directory)
            report = segment.read().policy
            segment.close()
    except MissingError as error:
        if may_start:
            return PolicyReport()
        raise RunError(f"the run in {path} is only just starting, or ending ({error})") from None
    return report


def _headline(policy: object) -> str:
    return (inspect.getdoc(type(policy)) or "").partition("\n")[0]


def _print(report: PolicyReport) -> None:
    lines = [("in charge", report.name), ("set", report.wanted + ("" if report.number else " (by the configuration)"))]
    if report.version:
        lines.append(("version", report.version))
    if report.since_s:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(report.since_s))
        lines.append(("since", f"{since} ({max(0.0, time.time() - report.since_s):.0f} s)"))
    lines.append(("plans", f"{report.plans}; {report.illegal} illegal choices dropped"))
    times = (report.median_s, report.p99_s, report.longest_s)
    median_ms, p99_ms, longest_ms = (1000 * seconds for seconds in times)
    lines.append(("calls", f"P50 {median_ms:.2f} ms, P99 {p99_ms:.2f} ms, longest {longest_ms:.2f} ms"))
    lines.append(("overruled", often(report.overruled) + (f", last because of {report.error}" if report.error else "")))
    lines += [(name, reason) for name, reason in (("set aside", report.set_aside), ("refused", report.refused)) if reason]
    for name, words in lines:
        print(f"{name:<10}  {words}")
