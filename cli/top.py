"""``mmrt top``: a run at work in the terminal: its processes, pages, tokens per second and latest requests, anew every second."""

import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING

import typer

from .keys import Keys
from .options import RunName, run_path

if TYPE_CHECKING:
    from rich.console import Console

_LOOK_S = 1.0
_PIPE_WIDTH = 120


def register(app: typer.Typer) -> None:
    @app.command()
    def top(run: RunName = None) -> None:
        """Show a run at work: processes, pages, speed and requests.

        It is drawn anew every second until q, Esc or Ctrl-C; without a terminal it is printed once. Exits with 1 if no run is up, or
        none any more.
        """
        path = run_path(run)
        from rich.console import Console
        from rich.live import Live

        from .top_view import render
        from .top_watch import Watch

        is_terminal = sys.stdout.isatty()
        console = Console(file=sys.stdout, width=None if is_terminal else _PIPE_WIDTH)
        with closing(Watch(path)) as watch:
            time.sleep(_LOOK_S)  # rates are of the time between two looks
            if not is_terminal:
                console.print(render(watch.look(), console.width, has_colours=False))
                return
            with Keys() as keys, Live(console=console, auto_refresh=False, screen=True, vertical_overflow="crop") as live:
                while True:
                    live.update(render(watch.look(), console.width, has_colours=_has_colours(console)), refresh=True)
                    if keys.wait_for_end(_LOOK_S):
                        return


def _has_colours(console: "Console") -> bool:
    """Without: NO_COLOR is set, or the terminal has none."""
    return console.color_system is not None and not console.no_color
