"""Rows of ``mmrt_lab.peers.rows`` and their table in markdown (pure)."""

from collections.abc import Mapping, Sequence

import msgspec

TEXT_TOKENS = 100
PICTURE = "one picture"
CLIP = "one clip of 10 s"
TEXT = f"one request of {TEXT_TOKENS} tokens"
_TITLES = ["family", f"{PICTURE}: TTFT", f"{CLIP}: TTFT", f"{TEXT_TOKENS} tokens: TTFT", "tokens/s", "same", "load"]
_RULE = f"|{'---|' * len(_TITLES)}"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """``values``: of each figure of ``mmrt bench sides``, of mmrt and of llama.cpp; None where there is none. ``same``: whether both
    gave the same greedy answer to one prompt, in words. ``reasons``: why figures are missing. ``load``: average number of processes
    that wanted a processor meanwhile."""

    family: str
    shape: str
    values: dict[str, tuple[float | None, float | None]] = {}
    same: str = ""
    reasons: list[str] = []
    load: float = 0.0


def table(rows: Sequence[Row]) -> str:
    """The table, the shapes below it, and the reasons."""
    lines = [f"| {' | '.join(_TITLES)} |", _RULE]
    lines += [f"| {' | '.join(_cells(row))} |" for row in rows if row.values]
    lines += ["", "Shapes:", "", *(f"- `{row.family}`: {row.shape}" for row in rows if row.values)]
    reasons = [f"- `{row.family}`: {reason}" for row in rows for reason in row.reasons]
    return "\n".join([*lines, *(["", "Without a figure:", "", *reasons] if reasons else [])]) + "\n"


def _cells(row: Row) -> list[str]:
    texts = [_times(row.values, f"{name}: TTFT, ms") for name in (PICTURE, CLIP, TEXT)]
    texts = [f"{text}{_tokens(row.values, name)}" for text, name in zip(texts, (PICTURE, CLIP, ""), strict=True)]
    return [f"`{row.family}`", *texts, _rates(row.values.get(f"{TEXT}: mean TBT, ms")), row.same, f"{row.load:.1f}"]


def _times(values: Mapping[str, tuple[float | None, float | None]], figure: str) -> str:
    """Seconds or milliseconds of both, and mmrt's over llama.cpp's: "1.20, 1.41 s (0.85)"."""
    own, peer = values.get(figure, (None, None))
    if own is None and peer is None:
        return "–"
    in_s = max(own or 0, peer or 0) >= 1000
    shown = ["–" if value is None else f"{value / 1000:.2f}" if in_s else f"{value:.0f}" for value in (own, peer)]
    return f"{', '.join(shown)} {'s' if in_s else 'ms'}{_ratio(own, peer)}"


def _rates(times_ms: tuple[float | None, float | None] | None) -> str:
    """Tokens per second of one stream of both; the ratio is of times."""
    own, peer = times_ms or (None, None)
    return ", ".join(f"{1000 / value:.0f}" if value else "–" for value in (own, peer)) + _ratio(own, peer)


def _ratio(own: float | None, peer: float | None) -> str:
    return f" ({own / peer:.2f})" if own and peer else ""


def _tokens(values: Mapping[str, tuple[float | None, float | None]], name: str) -> str:
    """Of the prompts with media: both numbers, or one if they are alike."""
    found = [f"{value:.0f}" for value in values.get(f"{name}: tokens of a prompt", ()) if value]
    return f", {' and '.join(dict.fromkeys(found))} tokens" if found else ""
