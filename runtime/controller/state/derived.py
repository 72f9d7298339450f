"""What is computed from a row, and dropped as a whole when the row changes (``ControllerState.touch``)."""

from typing import NamedTuple

import msgspec

from ..scheduling.types import RequestView


class Left(NamedTuple):
    """What is to be done until a request's first token: see ``Candidate``."""

    tokens: int = 0
    rows: int = 0
    video_rows: int = 0
    video_plans: int = 0


class Derived(msgspec.Struct, gc=False):
    """Values that are None, or 0, until they are computed."""

    view: RequestView | None = None  # the policies' view
    own_view: RequestView | None = None  # the view without work that others do, when it was last made
    left: Left | None = None
    grow_at: int = 0  # committed ids at which it needs more KV pages than it has; ``Limits.max_context`` if it has all that it can need
    short_at: int = 0  # committed ids below which its pages last for a look
