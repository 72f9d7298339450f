"""``mmrt status``: show the state of every actor. Asks the supervisor; without one it reads the run directory and the status words."""

import os
import sys
import time
from typing import TYPE_CHECKING, Annotated

import msgspec

from ..runtime.errors import RunError
from ..runtime.process.run import is_of_several
from ..runtime.supervisor.control import FrontReply, StatusReply, StatusRequest, call
from ..runtime.supervisor.run_report import ActorReport, ComputeReport, FrontReport, RunReport
from ..serving.left_runs import runs_beside
from ..shm.errors import MissingError
from ..shm.run_directory import RunDirectory

if TYPE_CHECKING:
    from pathlib import Path

    import typer
    from rich.console import Console, Group, RenderableType

_WATCH_S = 1.0
_PIPE_WIDTH = 120
_COLUMNS = ("ACTOR", "STATE", "PID", "GEN", "RESTARTS", "PSS MB", "CPU %", "QUEUE", "STEPS", "UP")
_WIDE = 80  # columns of a terminal that shows all of them
_OF_WIDE = ("GEN", "QUEUE", "STEPS", "UP")
STATE_STYLES = {
    "active": "green",
    "failed": "red",
    "broken": "red",
    "backoff": "yellow",
    "restarting": "cyan",
    "debugged": "magenta",
    "absent": "red",
}


def register(app: "typer.Typer") -> None:
    import typer  # here and not above: it loads pydantic, half of the time of a plain ``mmrt status``

    from .options import RunName, run_path

    @app.command()
    def status(
        json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
        watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it anew every second until q, Esc or Ctrl-C.")] = False,
        run: RunName = None,
    ) -> None:
        """Show actors, memory (PSS), processors, queues and pools. Exits with 1 if no run is up."""
        if watch:
            _watch(run_path(run), json)
        else:
            show(run_path(run), json)


def show(path: "Path", json: bool) -> None:
    """Print the state of the run in ``path``. Raises RunError when none is up."""
    if json:
        print(msgspec.json.encode(read_any_report(path)).decode(), flush=True)
    else:
        console = _console()
        console.print(_render(read_any_report(path), console.width))


def _watch(path: "Path", json: bool) -> None:
    while json:
        show(path, json)
        time.sleep(_WATCH_S)
    from rich.live import Live

    from .keys import Keys

    console = _console()
    with Keys() as keys, Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            live.update(_render(read_any_report(path), console.width), refresh=True)
            if keys.wait_for_end(_WATCH_S):
                return


def _console() -> "Console":
    from rich.console import Console

    return Console(file=sys.stdout, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH)


def read_report(path: "Path") -> RunReport:
    """The state of the run in ``path``. Raises RunError when none is up, or it is a front of several models."""
    report = read_any_report(path)
    if isinstance(report, FrontReport):
        raise is_of_several(path, [model.run for model in report.models])
    return report


def read_any_report(path: "Path") -> RunReport | FrontReport:
    """The state of the run, or the front of several models, in ``path``. Raises RunError when none is up."""
    try:
        reply = call(path, StatusRequest(), timeout_s=5.0)
        assert isinstance(reply, StatusReply | FrontReply)
        return reply.report
    except RunError as error:
        if not RunDirectory.is_alive(path):
            left = ", ".join(run.name for run in runs_beside(path))
            advice = (
                f"; its front is gone, and runs go on: {left} (mmrt serve finds them, mmrt down ends them)" if left else " (mmrt up)"
            )
            raise RunError(f"no run is up in {path}{advice}") from None
        supervisor_error = error
    from ..runtime.supervisor.status_report import report_without_supervisor

    try:
        with RunDirectory.attach(path) as run:
            return report_without_supervisor(run)
    except MissingError:
        raise supervisor_error from None


def _render(report: RunReport | FrontReport, width: int) -> "Group":
    return _render_front(report) if isinstance(report, FrontReport) else _render_run(report, width)


def _render_front(report: FrontReport) -> "Group":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    models = Table(box=None, header_style="bold", pad_edge=False)
    for at, name in enumerate(("MODEL", "STATE", "PID", "REQUESTS", "WAIT", "NEEDS MB", "IDLE", "RUN")):
        models.add_column(name, justify="left" if at in (0, 1, 7) else "right", no_wrap=name != "RUN", overflow="fold")
    for model in report.models:
        style = {"ready": "green", "absent": "dim"}.get(model.state, "yellow")
        models.add_row(
            f"{model.name}{' (pinned)' * model.pinned}",
            f"[{style}]{model.state}[/]",
            str(model.pid or ""),
            str(model.running),
            str(model.waiting),
            f"{model.needs_bytes / 1e6:.0f}" if model.needs_bytes else "",
            "" if model.idle_s is None else duration(model.idle_s),
            model.run,
        )
    used = sum(model.needs_bytes for model in report.models if model.state != "absent")
    state = "stopping" if report.is_ending else "ready"
    return Group(
        Text.assemble((state, "bold green"), f"  {report.endpoint}/v1  up {duration(report.uptime_s)}"),
        models,
        *(Text(f"{model.name}: {model.problem}") for model in report.models if model.problem),
        Text(f"memory: {used / 1e6:.0f} MB of {report.budget_bytes / 1e6:.0f} are taken"),
        Text("one model: mmrt status --run RUN, and so mmrt logs, top, down"),
    )


def _render_run(report: RunReport, width: int) -> "Group":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    actors = Table(box=None, header_style="bold", pad_edge=False)
    shown = [at for at, name in enumerate(_COLUMNS) if width >= _WIDE or name not in _OF_WIDE]
    for at in shown:
        actors.add_column(_COLUMNS[at], justify="left" if at < 2 else "right", no_wrap=True)
    for actor in report.actors:
        cells = _cells(actor)
        actors.add_row(*(cells[at] for at in shown))
    remarks = [Text(f"{actor.name}: {said}") for actor in report.actors if (said := _remarks(actor))]
    pools = ", ".join(f"{name} {pool.used}/{pool.pages}" for name, pool in report.pools.items())
    requests = report.requests
    memory = report.overhead_bytes + sum(actor.memory_bytes or 0 for actor in report.actors)
    parts: list[RenderableType] = [
        Text.assemble(
            (report.state, "bold green" if report.ready else "bold yellow"),
            f"  {report.endpoint}/v1  up {duration(report.uptime_s)}",
        ),
        Text(_shortened(f"model: {report.model}", width)),
        actors,
        *remarks,
        *([] if report.compute is None else [Text(_computes(report.compute))]),
        Text(f"pages used: {pools}"),
        Text(f"memory: {memory / 1e6:.0f} MB in all, {report.overhead_bytes / 1e6:.0f} of it supervisor and zygote"),
        Text(f"policy: {report.policy.summary}"),
        Text(f"requests: {requests.words}"),
    ]
    return Group(*parts)


def _shortened(text: str, width: int) -> str:
    """The text in one line: of a long path the end counts, and its label."""
    label, _, path = text.partition(": ")
    room = max(0, width - len(label) - 3)
    return text if len(text) <= width else f"{label}: …{path[len(path) - room :]}"


def _computes(compute: ComputeReport) -> str:
    shared = f"; encoder, prefill and decode share it by {compute.sharing}" if compute.sharing else ""
    why = f" ({compute.dtype_reason})" if compute.dtype_reason else ""
    return f"computes on {compute.device} in {compute.dtype}{why}, weights in {compute.weights}, KV cache in {compute.kv_dtype}{shared}"


def _cells(actor: ActorReport) -> list[str]:
    style = STATE_STYLES.get(actor.state, "yellow")
    return [
        actor.name,
        f"[{style}]{actor.state}[/]",
        "" if actor.pid is None else str(actor.pid),
        str(actor.generation or ""),
        str(actor.restarts),
        "" if actor.memory_bytes is None else f"{actor.memory_bytes / 1e6:.0f}",
        "" if actor.cpu_percent is None else f"{actor.cpu_percent:.1f}",
        str(actor.queue_depth),
        str(actor.steps),
        duration(actor.uptime_s) if actor.pid else "",
    ]


def _remarks(actor: ActorReport) -> str:
    """The end of its last process, and its remarks beyond its state."""
    status = "" if actor.status == actor.state else actor.status
    return "; ".join(filter(None, ("" if actor.broken else actor.last_exit, status)))


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s" if minutes else f"{rest}s"
