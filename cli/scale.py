"""``mmrt scale STAGE=N``: more or fewer actors of a stage while the run serves."""

import re
from typing import Annotated

import typer

from ..runtime.stage_table import STAGES
from ..runtime.supervisor.control import LayoutReply, ScaleRequest, call
from .options import RunName, run_path

_ORDER = re.compile(r"([a-z]+)=([0-9]{1,3})")
_SCALABLE = [name for name, stage in STAGES.items() if stage.can_scale]


def register(app: typer.Typer) -> None:
    @app.command()
    def scale(
        orders: Annotated[list[str], typer.Argument(metavar="STAGE=N", help=f"Stages are {', '.join(_SCALABLE)}.")],
        run: RunName = None,
    ) -> None:
        """Change how many actors of a stage a live run has.

        No request is lost. New processes serve when the command ends. Those that leave finish their work or hand it over first.
        """
        requests = [parse_order(order) for order in orders]
        for request in requests:
            tell(call(run_path(run), request, timeout_s=None))


def parse_order(text: str) -> ScaleRequest:
    """Parse "STAGE=N". Raises: BadParameter."""
    found = _ORDER.fullmatch(text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is not STAGE=N, such as encoder=2")
    return ScaleRequest(found[1], int(found[2]))


def tell(reply: object) -> None:
    """Print what a change of the layout has done."""
    assert isinstance(reply, LayoutReply)
    for message in reply.messages:
        print(message)
    print(f"layout {reply.layout}", flush=True)
