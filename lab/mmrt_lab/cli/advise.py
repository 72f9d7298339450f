"""``mmrt advise``: more or fewer processes of each kind for a live run, said or set; and when its plan is out of date."""

import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from mmrt.cli.options import RunName, run_path
from mmrt.runtime.process.processors import read_processors
from mmrt.runtime.stage_table import MAX_INSTANCES


def register(app: typer.Typer) -> None:
    @app.command()
    def advise(
        every: Annotated[float, typer.Option(metavar="S", min=0.5, help="Seconds between looks.")] = 5.0,
        calm: Annotated[float, typer.Option(metavar="S", min=1.0, help="Seconds before fewer are proposed.")] = 120.0,
        plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Of mmrt plan --json: say when it is out of date.")] = None,
        looks: Annotated[int | None, typer.Option(metavar="N", min=1, help="End after so many looks.")] = None,
        act: Annotated[bool, typer.Option("--act", help="Set each layout that is proposed.")] = False,
        most: Annotated[
            int | None, typer.Option(metavar="N", min=1, max=MAX_INSTANCES, help="Processes of a kind at most; default: the cores.")
        ] = None,
        replay: Annotated[bool, typer.Option("--replay", help="Simulate the last hour's traffic on other systems.")] = False,
        trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Of mmrt record: the traffic to replay.")] = None,
        costs: Annotated[str, typer.Option(metavar="NAME|FILE", help="Of the replay: of mmrt bench profile.")] = "demo-cpu",
        as_json: Annotated[bool, typer.Option("--json", help="Print each look as a line of JSON.")] = False,
        run: RunName = None,
    ) -> None:
        """Say what a live run needs more or fewer of, or set it.

        Every look prints figures of each kind of process, a layout to set with the reason, and whether the load is no longer that
        of the plan. With --act the layout is set; no request is lost by it. With --replay it says once which policy and layout
        would have served the traffic so far better, and how sure that is.
        """
        if replay:
            raise typer.Exit(_replay(run_path(run), trace, costs, as_json=as_json))
        from mmrt.runtime.autoscale.observer import Observer

        from ..planner.advice import Adviser, acted_on, load_plan, show

        planned = None if plan is None else load_plan(plan)
        path = run_path(run)
        with closing(Observer(path)) as observer:
            adviser = Adviser(observer.config, calm, planned, most or min(MAX_INSTANCES, read_processors().num_cores))
            adviser.look(*observer.look(), observer.config)
            number = 0
            while looks is None or number < looks:
                time.sleep(every)
                advice = adviser.look(*observer.look(), observer.config)
                if act:
                    advice = acted_on(advice, path)
                number += 1
                show(advice, sys.stdout, as_json=as_json)


def _replay(path: Path, trace: Path | None, costs: str, *, as_json: bool) -> int:
    """Replay the traffic of the run, or of the trace, and print what would have served it better. Returns the exit status."""
    import msgspec

    from mmrt.bench.output import open_console, progress
    from mmrt.runtime.errors import RunError
    from mmrt.runtime.process.run import read_run_info
    from mmrt.shm.errors import MissingError
    from mmrt.shm.run_directory import RunDirectory

    from ..planner.hindsight import replay, show
    from ..planner.past_traffic import from_file, from_run
    from ..sim.simulation import SimulationError

    try:
        with RunDirectory.attach(path, timeout_s=0.5) as directory:
            info = read_run_info(directory)
            past = from_run(directory) if trace is None else from_file(trace)
    except MissingError:
        raise RunError(f"no run is up in {path} (mmrt up): its configuration is what others are compared with") from None
    console = open_console(None)
    try:
        with progress(console) as tell:
            found = replay(past, info.config, costs, Path(info.model_path), tell)
    except (SimulationError, ValueError) as error:
        print(f"mmrt advise --replay: {error}", file=sys.stderr)
        return 1
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        show(console, found)
    return 0
