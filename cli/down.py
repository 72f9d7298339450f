"""``mmrt down``: end the run, and return when nothing of it is left."""

import os
import select
from pathlib import Path
from typing import Annotated

import typer

from ..runtime.errors import RunError
from ..runtime.process.lifeline import sweep
from ..runtime.supervisor.control import DownRequest, FrontReply, Reply, StatusReply, StatusRequest, call
from ..serving.left_runs import runs_beside
from ..shm.run_directory import RunDirectory
from .options import RunName, run_path


def register(app: typer.Typer) -> None:
    @app.command()
    def down(
        drain: Annotated[
            float | None,
            typer.Option(
                min=0, metavar="S", help="Seconds that running requests get to finish, at most supervisor.drain_s (the default)."
            ),
        ] = None,
        run: RunName = None,
    ) -> None:
        """End the run after its requests; nothing of it is left.

        New requests are refused meanwhile. A front of several models ends with all of its runs.
        """
        path = run_path(run)
        if RunDirectory.is_alive(path):
            _end(path, drain)
        else:
            sweep(str(path))
            print(f"no run is up in {path}")
        for left in runs_beside(path):  # the front has died without them
            print(f"{left.name}: its front is gone", flush=True)
            _end(left, drain)


def _end(path: Path, drain: float | None) -> None:
    try:
        status = call(path, StatusRequest())
    except RunError as error:
        raise RunError(f"{error}; if systemd runs it: systemctl --user stop mmrt.target") from None
    pid, num_requests = _facts_of(status)
    try:
        pidfd = os.pidfd_open(pid) if pid else None
    except ProcessLookupError:  # it has ended by itself
        pidfd = None
    if num_requests:
        print(f"requests that still run: {num_requests}", flush=True)
    call(path, DownRequest(drain), timeout_s=None)
    if pidfd is not None:
        select.select([pidfd], [], [])
        os.close(pidfd)
    if RunDirectory.is_alive(path):
        raise RunError(f"processes are left in {path}: they joined after it ended, or another run is up there by now")
    print("the run is down" if isinstance(status, StatusReply) else "the front and its runs are down")


def _facts_of(status: Reply) -> tuple[int | None, int]:
    """Return the process that ends it, and how many requests there are."""
    if isinstance(status, FrontReply):
        return status.report.pid, sum(model.running + model.waiting for model in status.report.models)
    assert isinstance(status, StatusReply)
    requests = status.report.requests
    return status.report.supervisor_pid, requests.waiting + requests.preparing + requests.running
