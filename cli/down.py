"""``mmrt down``: end the run, and return when nothing of it is left."""

import os
import select
from typing import Annotated

import typer

from ..runtime.errors import RunError
from ..runtime.process.lifeline import sweep
from ..runtime.supervisor.control import DownRequest, StatusReply, StatusRequest, call
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

        New requests are refused meanwhile.
        """
        path = run_path(run)
        if not RunDirectory.is_alive(path):
            sweep(str(path))
            print(f"no run is up in {path}")
            return
        try:
            status = call(path, StatusRequest())
        except RunError as error:
            raise RunError(f"{error}; if systemd runs it: systemctl --user stop mmrt.target") from None
        assert isinstance(status, StatusReply)
        pid = status.report.supervisor_pid
        try:
            pidfd = os.pidfd_open(pid) if pid else None
        except ProcessLookupError:  # it has ended by itself
            pidfd = None
        requests = status.report.requests
        if num := requests.waiting + requests.preparing + requests.running:
            print(f"requests that still run: {num}", flush=True)
        call(path, DownRequest(drain), timeout_s=None)
        if pidfd is not None:
            select.select([pidfd], [], [])
            os.close(pidfd)
        if RunDirectory.is_alive(path):
            raise RunError(f"processes are left in {path}: they joined after it ended, or another run is up there by now")
        print("the run is down")
