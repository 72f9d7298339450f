"""Pictures whose tokens see each other, also those behind them: where they stand in a prompt. Pure."""

from collections.abc import Sequence

from ..schema.media import MediaSpan
from .architecture import LanguageConfig

Run = tuple[int, int]
"""Tokens [start, end) of a picture or a frame. Text stands between those of families whose pictures see themselves."""


def whole_runs(language: LanguageConfig, spans: Sequence[MediaSpan]) -> list[Run]:
    """The runs of a prompt's pictures and frames, in order: no chunk may end within one. None if the model's tokens see none behind
    them."""
    if not language.sees_pictures:
        return []
    runs = list[Run]()
    for span in spans:
        end = span.start
        for segment in span.shape.segments:
            start = end + len(segment.lead)
            if segment.kind != "audio":
                runs.append((start, start + segment.num_tokens))
            end = start + segment.num_tokens + len(segment.trail)
    return runs


def within(runs: Sequence[Run], start: int, end: int) -> tuple[Run, ...]:
    """Those that have tokens in [start, end)."""
    return tuple(run for run in runs if run[0] < end and start < run[1])
