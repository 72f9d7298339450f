"""Plans to find the shape of an item."""

from ....bus.messages import Analysed, Result
from ....bus.plans import Analyse
from ...caches.media_sharing import learn_large, learn_shape
from ...rows.intake import set_shape
from ...rows.poison import absolve
from ...state.request import Request
from ...state.state import ControllerState
from ..plan_dispatch import place_video_plan
from .base import Encoded, Kind


def issue_analysis(state: ControllerState, request: Request, item: int, now: float) -> None:
    """Have an item analysed."""
    source = request.record.items[item].source
    place_video_plan(state, request, Analyse(*request.key_in_table, item, request.spec.items[item], source), now)


class AnalyseKind(Kind[Analyse]):
    """The first result gives the item its shape, and other rows with equal media theirs."""

    def apply(self, state: ControllerState, plan: Analyse, live: list[Request], result: Result) -> Encoded:
        if isinstance(result, Analysed):
            for request in live:
                if request.record.items[plan.item].shape is None:
                    absolve(request, plan)
                    if set_shape(state, request, plan.item, result.shape):
                        learn_shape(state, request, plan.item, result.shape)
        return ()

    def correct_work(self, state: ControllerState, plan: Analyse, request: Request) -> None:
        learn_large(state, request, plan.item)
