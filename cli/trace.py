"""``mmrt trace``: the latest work of all processes of a run, as a trace for https://ui.perfetto.dev; also of a run that crashed."""

import os
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from ..runtime.environment import read_environment
from ..runtime.errors import RunError, UserError
from ..runtime.observe.dumps import SUFFIX, Recording, saved_recordings
from ..runtime.observe.trace import make_trace, num_requests
from ..shm.errors import MissingError
from ..shm.run_directory import RunDirectory
from .options import RunName, log_directory, model_run_path

LATEST = "latest"


def register(app: typer.Typer) -> None:
    @app.command()
    def trace(
        last: Annotated[
            float | None, typer.Option("--last", metavar="SECONDS", help="Only the last SECONDS; default: everything recorded.")
        ] = None,
        out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where to write it; - is standard output.")] = Path(
            "mmrt-trace.json"
        ),
        request: Annotated[str | None, typer.Option(metavar="REQUEST", help="Show no other request: its id, or how it begins.")] = None,
        crash: Annotated[
            str | None,
            typer.Option("--crash", metavar="NAME", help="What was saved when something died: latest, a name, or a file."),
        ] = None,
        crashes: Annotated[bool, typer.Option("--crashes", help="List what was saved.")] = False,
        run: RunName = None,
    ) -> None:
        """Write what a run has done lately as a trace for Perfetto.

        Requests, steps, waits and pools: open it in https://ui.perfetto.dev.
        """
        if last is not None and not 0 < last <= 1e9:
            raise typer.BadParameter(f"{last:g} is not a number of seconds above 0", param_hint="--last")
        path = model_run_path(run)
        directory = log_directory(path, read_environment())
        if crashes:
            for saved in saved_recordings(directory):
                print(f"{saved.stem}  {_reason(saved)}")
            return
        recording = Recording.load(find_crash(crash, directory)) if crash is not None else take_recording(path)
        made = make_trace(recording, last, request)
        if request is not None and not num_requests(made):
            raise RunError(f"no request {request!r} is recorded" + ("" if last is None else f" of the last {last:g} s"))
        data = msgspec.json.encode(made)
        if str(out) == "-":
            sys.stdout.buffer.write(data + b"\n")
            return
        try:
            out.write_bytes(data)
        except OSError as error:
            raise UserError(f"cannot write {out}: {error.strerror}") from None
        about = f" ({recording.facts.reason})" if recording.facts.reason else ""
        print(f"{out}: {len(made['traceEvents'])} events, {num_requests(made)} requests{about}; open it in https://ui.perfetto.dev")


def take_recording(path: Path) -> Recording:
    """Copy the recorders of the run in ``path``, also of one whose processes are dead. Raises RunError."""
    try:
        with RunDirectory.attach(path, timeout_s=0.5) as run:
            return Recording.take(run)
    except MissingError:
        raise RunError(f"no run is up in {path} (mmrt up); what was saved at crashes: mmrt trace --crashes") from None


def find_crash(name: str, directory: Path) -> Path:
    """The saved recording of this name. Raises UserError when there is none."""
    saved = saved_recordings(directory)
    if name == LATEST:
        if not saved:
            raise UserError(f"nothing was saved in {directory}")
        return saved[-1]
    if (named := directory / f"{name}{SUFFIX}") in saved:
        return named
    if os.path.isfile(name):
        return Path(name)
    known = ", ".join(path.stem for path in saved) or "none"
    raise UserError(f"no saved recording {name!r} in {directory} (there are: {known})")


def _reason(path: Path) -> str:
    try:
        return Recording.load(path).facts.reason
    except UserError as error:
        return str(error)
