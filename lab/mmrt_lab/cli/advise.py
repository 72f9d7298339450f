"""``mmrt advise``: what more or fewer processes of each kind a live run would have, and when its plan is out of date."""

import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from mmrt.cli.options import RunName, run_path


def register(app: typer.Typer) -> None:
    @app.command()
    def advise(
        every: Annotated[float, typer.Option(metavar="S", min=0.5, help="Seconds between looks.")] = 5.0,
        calm: Annotated[float, typer.Option(metavar="S", min=1.0, help="Seconds before fewer are proposed.")] = 120.0,
        plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Of mmrt plan --json: say when it is out of date.")] = None,
        looks: Annotated[int | None, typer.Option(metavar="N", min=1, help="End after so many looks.")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print each look as a line of JSON.")] = False,
        run: RunName = None,
    ) -> None:
        """Say what a live run should have more or fewer of.

        Every look prints figures of each kind of process, a layout to set with the reason, and whether the load is no longer that
        of the plan. Nothing is changed.
        """
        from ..planner.advice import Adviser, load_plan, show
        from ..planner.live import Observer

        planned = None if plan is None else load_plan(plan)
        with closing(Observer(run_path(run))) as observer:
            adviser = Adviser(observer.config, calm, planned)
            adviser.look(*observer.look(), observer.config)
            number = 0
            while looks is None or number < looks:
                time.sleep(every)
                advice = adviser.look(*observer.look(), observer.config)
                number += 1
                show(advice, sys.stdout, as_json=as_json)
