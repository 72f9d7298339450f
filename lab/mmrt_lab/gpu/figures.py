"""Figures that ``serve`` reports, with their targets. Pure."""

import msgspec

_AT_MOST = ("s", "times")  # units of which less is better


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One number of a section, or why there is none: a failure, where ``in_time``.

    ``target``: at most, of seconds and of times as long; at least, of a share.
    """

    section: str
    case: str
    value: float | None = None
    unit: str = ""
    target: float | None = None
    note: str = ""
    in_time: bool = True

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "FAILED" if self.in_time else ""
        if self.target is None:
            return ""
        return "reached" if (self.value <= self.target if self.unit in _AT_MOST else self.value >= self.target) else "MISSED"

    def cells(self) -> list[str]:
        value = "" if self.value is None else f"{self.value:,.4g} {self.unit}"
        target = "" if self.target is None else f"{self.target:g}"
        return [f"{self.section}: {self.case}", value, target, self.verdict, self.note]
