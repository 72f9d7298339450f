"""``mmrt serve FILE``: several models behind one endpoint."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..runtime.environment import read_environment
from ..runtime.errors import RunError
from ..runtime.supervisor.supervisor import Reporter
from ..shm.run_directory import RunDirectory
from .daemon import detach
from .options import Host, Port, RunName, check_files, log_directory, run_path
from .terminal import JsonReporter, TerminalReporter


def register(app: typer.Typer) -> None:
    @app.command()
    def serve(
        file: Annotated[Path, typer.Argument(metavar="FILE", help="TOML: [[model]] for each model, [front], [server].")],
        host: Host = None,
        port: Port = None,
        api_key: Annotated[
            str | None, typer.Option(metavar="KEY", help="Key that clients must send (server.api_key); default $MMRT_API_KEY.")
        ] = None,
        detached: Annotated[bool, typer.Option("--detach", "-d", help="Return when the front serves.")] = False,
        run: RunName = None,
    ) -> None:
        """Serve several models behind one endpoint.

        Each has a run of its own, which is started when it is asked for. Without FILE, or with a
        checkpoint in its place, this is mmrt up.
        """
        from ..runtime.config.runtime_config import RuntimeConfig
        from ..serving.models_file import load_models
        from ..serving.server import FrontSetup, serve_front

        environment, path = read_environment(), run_path(run)
        options = {"host": host, "port": port, "api_key": api_key or environment.server_key or None}
        models = load_models(file, {name: value for name, value in options.items() if value is not None})
        check_files(RuntimeConfig(server=models.server))
        if RunDirectory.is_alive(path):
            raise RunError(f"a run is already up in {path}: see `mmrt status`, end it with `mmrt down`, or use --run NAME")
        logs = log_directory(path, environment)

        def supervise(reporter: Reporter) -> int:
            import uvloop

            os.umask(0o077)  # files written by this front are its user's alone
            setup = FrontSetup(
                path=path, file=models, log_directory=logs, notify_socket=environment.notify_socket, hang_up_ends=not detached
            )
            return uvloop.run(serve_front(setup, reporter))

        terminal = TerminalReporter(sys.stdout, environment)
        if detached:
            raise typer.Exit(detach(supervise, logs / "front.log", terminal))
        raise typer.Exit(supervise(JsonReporter(sys.stdout) if models.logging.is_json else terminal))
