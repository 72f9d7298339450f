"""``mmrt replay``: capture plans of a live run with all that they read, and do them again in this process, without a run."""

import os
import shutil
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from ..runtime.bus.messages import Analysed, ItemError, Result
from ..runtime.environment import read_environment
from ..runtime.errors import RunError, UserError
from ..runtime.observe.capture import SUFFIX, Capture, captures_in
from ..runtime.observe.dumps import actors_of_run
from ..runtime.observe.replay_capture import (
    NUM_KEPT,
    CaptureOrder,
    capture_live,
    collect,
    is_carried_out,
    is_ordered,
    withdraw_order,
    write_order,
)
from ..runtime.process.run import read_run_info
from ..runtime.stage_table import WORKERS, stage_of
from ..shm.errors import ShmError
from ..shm.run_directory import RunDirectory
from .options import RunName, check_actor, completed_from, log_directory, model_run_path

MAX_REPEAT = 10_000
_POLL_S = 0.05
_ID_DIGITS = 20  # of 64 bits
_HAVE_PLANS = f"{', '.join(WORKERS[:-1])} or {WORKERS[-1]}"


def register(app: typer.Typer) -> None:
    @app.command()
    def replay(
        plan: Annotated[str | None, typer.Argument(metavar="PLAN", help="A captured plan: its file, or its id's beginning.")] = None,
        last: Annotated[
            str | None,
            typer.Option(
                "--last",
                metavar="ACTOR",
                help=f"The plan captured last of {_HAVE_PLANS}.",
                autocompletion=completed_from(WORKERS),
            ),
        ] = None,
        capture: Annotated[
            str | None,
            typer.Option(
                "--capture",
                metavar="ACTOR",
                help=f"Capture the next plans of {_HAVE_PLANS} in a live run instead.",
                autocompletion=completed_from(WORKERS),
            ),
        ] = None,
        count: Annotated[int, typer.Option("--count", "-n", metavar="N", help=f"How many to capture, at most {NUM_KEPT}.")] = 1,
        out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Where the captured plan goes.")] = None,
        wait: Annotated[float, typer.Option("--wait", metavar="SECONDS", help="How long to wait for plans to capture.")] = 60.0,
        model: Annotated[Path | None, typer.Option("--model", "-m", metavar="DIR", help="The checkpoint, if it has moved.")] = None,
        repeat: Annotated[int, typer.Option("--repeat", metavar="N", help="Run it N times and report the time.")] = 1,
        pdb: Annotated[bool, typer.Option("--pdb", help="Step through it; at an exception look around where it was raised.")] = False,
        run: RunName = None,
    ) -> None:
        """Run a captured plan again, alone, and compare. Exit status 1: the output differs from the run's."""
        if sum(choice is not None for choice in (plan, last, capture)) != 1:
            raise typer.BadParameter("give one of PLAN, --last ACTOR, --capture ACTOR")
        for value, limit, option in ((count, NUM_KEPT, "--count"), (repeat, MAX_REPEAT, "--repeat")):
            if not 1 <= value <= limit:
                raise typer.BadParameter(f"{value} is not from 1 to {limit}", param_hint=option)
        path = model_run_path(run)
        directory = log_directory(path, read_environment()) / "captures"
        if capture is not None:
            _check_actor(capture, "--capture")
            if out is not None and count > 1:
                raise typer.BadParameter(f"--out names one file, --count asks for {count}", param_hint="--out")
            _capture(path, capture, count, directory, out, wait)
            return
        if last is not None:
            _check_actor(last, "--last")
        file = find_capture(plan, last, directory)
        raise typer.Exit(_replay(Capture.load(file), file, model, repeat, pdb))


def _check_actor(actor: str, option: str) -> None:
    if stage_of(actor) not in WORKERS:
        raise typer.BadParameter(f"{actor!r} does no plans; {', '.join(WORKERS)} do", param_hint=option)
    check_actor(actor)


def find_capture(plan: str | None, last: str | None, directory: Path) -> Path:
    """The file of a captured plan. Raises UserError when there is none."""
    if last is not None:
        if not (found := captures_in(directory, last)):
            raise UserError(f"no plan of {last} has been captured in {directory} (mmrt replay --capture {last})")
        return found[-1]
    assert plan is not None
    if os.path.exists(plan):
        return Path(plan)
    wanted = plan.removeprefix("0x").removesuffix(SUFFIX)
    names = {wanted, f"{int(wanted):x}"} if wanted.isascii() and wanted.isdigit() and len(wanted) <= _ID_DIGITS else {wanted}
    for path in captures_in(directory):
        if {path.stem, path.stem.partition("-")[2]} & names:
            return path
    begins = [path for path in captures_in(directory) if path.stem.partition("-")[2].startswith(wanted)] if wanted else []
    if len(begins) == 1:
        return begins[0]
    known = ", ".join(path.stem for path in begins or captures_in(directory)) or "none"
    if begins:
        raise UserError(f"{plan!r} is ambiguous: {known}")
    raise UserError(f"no captured plan {plan!r}: neither a file nor one in {directory} (there are: {known})")


# ------------------------------------------------------------------------------------------------------------- capturing


def _capture(path: Path, actor: str, count: int, directory: Path, out: Path | None, wait_s: float) -> None:
    """Order a capture, wait until it is done, and return its place. Raises RunError."""
    if not RunDirectory.is_alive(path):
        raise RunError(f"no run is up in {path} (mmrt up)")
    _expect_in_run(path, actor)
    order = CaptureOrder(str(directory), count)
    before = {file: file.stat().st_mtime_ns for file in captures_in(directory, actor)}
    try:
        write_order(path, actor, order)
    except FileNotFoundError:
        raise RunError(f"no run is up in {path} (mmrt up)") from None
    plans = "next plan" if count == 1 else f"next {count} plans"
    print(f"waiting up to {wait_s:g} s (--wait) for the {plans} of {actor}: ask the server something", file=sys.stderr)
    try:
        deadline_s = time.monotonic() + wait_s
        # Not attached meanwhile: a run that ends removes its memory only when no process is attached.
        while is_ordered(path, actor) and not is_carried_out(path, actor, order) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        is_done = is_carried_out(path, actor, order)
    finally:
        withdraw_order(path, actor, order)
    with suppress(OSError):  # the run has ended
        collect(path, actor, directory)
    new = [file for file in captures_in(directory, actor) if before.get(file) != file.stat().st_mtime_ns]
    if not is_done and not new:
        new = _from_outside(path, actor, directory)
    if not new and not RunDirectory.is_alive(path):
        raise RunError(f"the run in {path} has ended meanwhile")
    if not new:
        raise RunError(f"{actor} was given no plan within {wait_s:g} s (--wait)")
    if out is not None:
        try:
            shutil.move(new[-1], out)
        except OSError as error:
            raise UserError(f"cannot write {out}: {error.strerror}; the plan is in {new[-1]}") from None
        new = [out]
    for file in new:
        captured = Capture.load(file)
        print(f"{file}: {captured.about}, {_say(captured.header.result)}")


def _expect_in_run(path: Path, actor: str) -> None:
    """Raise RunError if the run has no such actor, or its plans cannot be captured. Best effort: a run that begins or ends is asked as
    if it had."""
    with suppress(ShmError, OSError), RunDirectory.attach(path, timeout_s=0.5) as run:
        if actor not in (actors := actors_of_run(run)):
            raise RunError(f"no actor {actor!r} in this run; there are {', '.join(actors)}")
        if stage_of(actor) == "prefill" and read_run_info(run).config.prefill_ranks > 1:
            raise RunError(f"{actor} is a stage of scheduling.prefill_pipeline: its plans cannot be done again alone")


def _from_outside(path: Path, actor: str, directory: Path) -> list[Path]:
    """The actor took no notice: it may be dead, or hang in a plan. Copy what its plans read."""
    try:
        with RunDirectory.attach(path, timeout_s=0.5) as run:
            found = capture_live(run, actor, read_run_info(run).config.memory.kv_page_tokens, directory)
    except (OSError, ShmError) as error:
        raise RunError(f"the plans of {actor} cannot be captured: {error}") from None
    if found:
        print(f"{actor} did not capture anything: its plans were copied from outside", file=sys.stderr)
    return found


# -------------------------------------------------------------------------------------------------------------- replaying


def _replay(capture: Capture, file: Path, model: Path | None, repeat: int, debug: bool) -> int:
    """Replay a capture and print the outcome. Returns the exit status. Raises UserError."""
    header = capture.header
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from .replay_worker import Replay, same_result

    print(f"{file}: {capture.about}, captured in run {header.run_id}")
    try:
        with Replay.open(capture, model) as replay:
            outcome = replay.run(repeat, _under_pdb if debug else None)
    except ShmError as error:
        raise RunError(f"the plan's memory cannot be made: {error}") from None
    except ValueError as error:
        raise UserError(str(error)) from None
    print(f"  in the run   {_say(header.result)}{f' after {1000 * header.elapsed_s:.2f} ms' if header.result is not None else ''}")
    if outcome.error is not None:
        print(f"  here         {type(outcome.error).__name__}: {outcome.error}")
        traceback.print_exception(outcome.error)
        return 1
    times = [f"{1000 * seconds:.2f}" for seconds in outcome.seconds]
    shown = f"{times[0]} ms" if repeat == 1 else f"{min(times, key=float)} ms at best, {times[0]} at first, of {repeat}"
    print(f"  here         {_say(outcome.result)} after {shown}")
    if header.result is None:
        return 0
    same = same_result(outcome.result, header.result)
    if not same:
        print("  the results differ")
    for difference in outcome.differences or ():
        if difference.num_different:
            largest = "" if difference.largest is None else f", by {difference.largest:.3g} at most"
            where = f"{difference.num_different} of {difference.num_pages} pages differ in {difference.num_bytes} bytes{largest}"
        else:
            where = f"{difference.num_pages} pages, identical"
        print(f"  {difference.pool:<12} {where}")
    return 0 if same and not any(difference.num_different for difference in outcome.differences or ()) else 1


def _under_pdb(execute: Any, plan: Any) -> Any:
    """Stop at the worker's first line; after an exception, where it was raised."""
    from pdb import Pdb, post_mortem

    try:
        return Pdb().runcall(execute, plan)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
        post_mortem(error.__traceback__)
        raise


def _say(result: Result | None) -> str:
    if result is None:
        return "not done to its end"
    if isinstance(result, ItemError):
        return f"error {result.status}: {result.message}"
    if isinstance(result, Analysed):
        shape = result.shape
        return f"analysed: {shape.kind}, grid {shape.grid}, {shape.num_tokens} tokens in {len(shape.segments)} segments"
    return type(result).__name__.lower()
