"""A load in steps: texts at a low and at a high rate, and pictures in a burst, as a trace (pure; MS4). Called by ``followed_load``."""

import json
import random
from typing import NamedTuple


class Step(NamedTuple):
    """Requests per second in a part of the load."""

    name: str
    seconds: float
    texts: float
    pictures: float


STEPS = (
    Step("calm", 20.0, 0.4, 0.0),
    Step("texts", 40.0, 2.4, 0.0),
    Step("calm", 30.0, 0.4, 0.1),
    Step("pictures", 40.0, 0.4, 1.6),
    Step("calm", 50.0, 0.4, 0.0),
)
_TEXT_TOKENS, _ANSWER_TOKENS, _SIDE, _PICTURE_TOKENS = (300, 900), 32, 448, 256


def trace_of(seed: int, rate: float = 1.0, times: float = 1.0) -> str:
    """Return the requests as lines of a trace. ``rate`` and ``times``: factors of the steps' rates and seconds."""
    rng, begin_s = random.Random(f"{seed}/steps"), 0.0
    rows: list[tuple[float, str]] = []
    for step in STEPS:
        for kind, per_s in (("text", step.texts), ("picture", step.pictures)):
            at_s = 0.0
            while per_s > 0 and (at_s := at_s + rng.expovariate(per_s * rate)) < step.seconds * times:
                rows.append((begin_s + at_s, kind))
        begin_s += step.seconds * times
    return "".join(f"{json.dumps(_row(at_s, kind, rng))}\n" for at_s, kind in sorted(rows))


def _row(at_s: float, kind: str, rng: random.Random) -> dict[str, object]:
    row: dict[str, object] = {"timestamp": round(1000 * at_s, 3), "output_length": _ANSWER_TOKENS}
    if kind == "text":
        return row | {"input_length": rng.randint(*_TEXT_TOKENS), "hash_ids": []}
    medium = {"type": "image", "tokens": _PICTURE_TOKENS, "width": _SIDE, "height": _SIDE}
    return row | {"input_length": _PICTURE_TOKENS + 20, "hash_ids": [], "media": [medium]}
