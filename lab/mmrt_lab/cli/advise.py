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
        as_json: Annotated[bool, typer.Option("--json", help="Print each look as a line of JSON.")] = False,
        run: RunName = None,
    ) -> None:
        """Say what a live run needs more or fewer of, or set it.

        Every look prints figures of each kind of process, a layout to set with the reason, and whether the load is no longer that
        of the plan. With --act the layout is set; no request is lost by it.
        """
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
