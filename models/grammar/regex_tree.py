"""Regular expressions as trees, in the syntax that JSON schemas' ``pattern`` and Rust's ``regex`` have in common. Pure.

For what must be known before llguidance compiles one: how large it is, and what it looks ahead for (``look_ahead``).
"""

import re
from typing import NamedTuple

from ..errors import GrammarError

MAX_DEPTH = 100
MAX_SKIPS = 1000  # parts in a row that may be absent: each makes another beginning of what is left, so costs grow as their square
MAX_COPIES = 100_000  # of what repeated parts of repeated parts stand for
LAST = 0x10FFFF
_MAX_STACKED = 8  # repeats of one part
Ranges = tuple[tuple[int, int], ...]  # of code points, sorted, apart, both ends included
_DIGIT: Ranges = ((48, 57),)
_WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACE: Ranges = ((9, 13), (32, 32), (160, 160), (5760, 5760), (8192, 8202), (8232, 8233), (8239, 8239), (8287, 8287), (12288, 12288))
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}
_REPEAT = re.compile(r"\*|\+|\?|\{(\d{1,6})(,(\d{0,6}))?\}")
_HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|[xu]\{([0-9a-fA-F]{1,6})\}")
_PROPERTY = re.compile(r"[pP](\{[^}]*\}|[A-Za-z])")
_LOOK = re.compile(r"\(\?(<?)([=!])")
_GROUP = re.compile(r"\((\?:|\?P?<[A-Za-z_]\w*>|(?!\?))")


class Chars(NamedTuple):
    """One character of these. None: of a class of Unicode, which is not looked into."""

    ranges: Ranges | None


class Edge(NamedTuple):
    """``^``, ``$``, ``\\b`` or ``\\B``."""

    sign: str


class Look(NamedTuple):
    body: "Node"
    is_ahead: bool
    is_negative: bool
    start: int  # place of its text
    end: int


class Repeat(NamedTuple):
    body: "Node"
    low: int
    high: int | None  # None: without end


class Sequence(NamedTuple):
    parts: "tuple[Node, ...]"


class Choice(NamedTuple):
    options: "tuple[Node, ...]"


Node = Chars | Edge | Look | Repeat | Sequence | Choice


class Unreadable(Exception):
    """An expression that is not one of those read here; llguidance may know better."""


def parse(text: str) -> Node:
    """Return the tree of an expression. Raises: Unreadable."""
    reader = _Reader(text)
    tree = reader.choice(0)
    if reader.at < len(text):
        raise Unreadable
    return tree


def check_size(text: str) -> None:
    """Refuse an expression that would take the library seconds or more, in a time that is linear in its length.

    Raises: GrammarError.
    """
    try:
        tree = parse(text)
    except Unreadable:
        return  # llguidance's limits still hold
    skips, copies = _cost(tree)[:2]
    if skips > MAX_SKIPS:
        raise GrammarError(f"a regular expression has {skips} parts in a row that may be absent, the limit is {MAX_SKIPS}")
    if copies > MAX_COPIES:
        raise GrammarError(f"a regular expression's repeats of repeats stand for {copies} parts, the limit is {MAX_COPIES}")


def complement(ranges: Ranges) -> Ranges:
    found, begin = [], 0
    for low, high in ranges:
        if low > begin:
            found.append((begin, low - 1))
        begin = high + 1
    return (*found, (begin, LAST)) if begin <= LAST else tuple(found)


def union(ranges: list[tuple[int, int]]) -> Ranges:
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return tuple(found)


ANY: Ranges = ((0, LAST),)
DOT: Ranges = complement(((10, 10),))


class _Cost(NamedTuple):
    skips: int  # the longest run of parts that may be absent
    copies: int  # what repeats of repeats stand for
    size: int  # parts, repeats written out
    is_empty: bool  # it matches the empty text
    repeats: bool  # more than once


def _cost(node: Node) -> _Cost:
    match node:
        case Chars():
            return _Cost(0, 0, 1, False, False)
        case Edge() | Look():
            inner = _cost(node.body) if isinstance(node, Look) else None
            return _Cost(inner.skips if inner else 0, inner.copies if inner else 0, 0, True, False)
        case Repeat(body, low, high):
            inner = _cost(body)
            times = max(1, low if high is None else high)
            skips = max(1, times * max(1, inner.skips)) if inner.is_empty else max(inner.skips, 1 if low == 0 else 0)
            copies = times * inner.size if inner.repeats and times > 1 else inner.copies
            return _Cost(skips, max(copies, inner.copies), times * inner.size, low == 0 or inner.is_empty, times > 1 or inner.repeats)
        case Choice(options):
            costs = [_cost(one) for one in options]
            return _Cost(
                max(one.skips for one in costs),
                max(one.copies for one in costs),
                sum(one.size for one in costs),
                any(one.is_empty for one in costs),
                any(one.repeats for one in costs),
            )
    return _cost_of_sequence([_cost(one) for one in node.parts])


def _cost_of_sequence(costs: list[_Cost]) -> _Cost:
    longest = run = 0
    for one in costs:
        longest = max(longest, one.skips)
        run = run + max(1, one.skips) if one.is_empty and one.size else run if one.is_empty else 0
        longest = max(longest, run)
    size = sum(one.size for one in costs)
    copies = max((one.copies for one in costs), default=0)
    return _Cost(longest, copies, size, all(one.is_empty for one in costs), any(one.repeats for one in costs))


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def _next(self) -> str:
        return self.text[self.at] if self.at < len(self.text) else ""

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self.text, self.at)
        if found is not None:
            self.at = found.end()
        return found

    def choice(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise Unreadable
        options = [self._sequence(depth)]
        while self._next() == "|":
            self.at += 1
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while self._next() not in ("", "|", ")"):
            part, num_repeats = self._atom(depth), 0
            while (found := self._take(_REPEAT)) is not None:
                num_repeats += 1
                if num_repeats > _MAX_STACKED:
                    raise Unreadable
                part = self._repeat(part, found)
            parts.append(part)
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _repeat(self, body: Node, found: re.Match[str]) -> Node:
        if self._next() == "?":  # lazy: the same texts
            self.at += 1
        if isinstance(body, Edge | Look):
            raise Unreadable
        if found[0] in "*+?":
            return Repeat(body, int(found[0] == "+"), 1 if found[0] == "?" else None)
        low = int(found[1])
        high = low if not found[2] else int(found[3]) if found[3] else None
        if high is not None and high < low:
            raise Unreadable
        return Repeat(body, low, high)

    def _atom(self, depth: int) -> Node:
        sign = self._next()
        if sign == "(":
            return self._group(depth)
        self.at += 1
        if sign in "^$":
            return Edge(sign)
        if sign == ".":
            return Chars(DOT)
        if sign == "[":
            return self._class()
        if sign == "\\":
            if self._next() in ("b", "B"):
                self.at += 1
                return Edge("\\" + self.text[self.at - 1])
            return Chars(self._escape())
        if sign in "*+?{":
            raise Unreadable
        return Chars(((ord(sign), ord(sign)),))

    def _group(self, depth: int) -> Node:
        start = self.at
        look = self._take(_LOOK)
        if look is None and self._take(_GROUP) is None:
            raise Unreadable
        body = self.choice(depth + 1)
        if self._next() != ")":
            raise Unreadable
        self.at += 1
        return body if look is None else Look(body, not look[1], look[2] == "!", start, self.at)

    def _escape(self) -> Ranges | None:
        """Read what follows a backslash."""
        if self._take(_PROPERTY) is not None:
            return None
        if (found := self._take(_HEX)) is not None:
            code = int(found[1] or found[2] or found[3], 16)
            if code > LAST:
                raise Unreadable
            return ((code, code),)
        sign = self._next()
        self.at += 1
        if (known := _CLASSES.get(sign.lower())) is not None:
            return known if sign.islower() else complement(known)
        if sign in _CONTROLS:
            return ((_CONTROLS[sign], _CONTROLS[sign]),)
        if not sign or sign.isalnum():
            raise Unreadable  # say, of an earlier group
        return ((ord(sign), ord(sign)),)

    def _class(self) -> Chars:
        """Read what follows an opening bracket. Rust's operations on classes are not read."""
        is_negative = self._next() == "^"
        self.at += is_negative
        found: list[tuple[int, int]] = []
        is_opaque = False
        if self._next() == "]":
            raise Unreadable  # dialects differ
        while (sign := self._next()) != "]":
            if sign in ("", "[") or self.text[self.at : self.at + 2] in ("&&", "--", "~~"):
                raise Unreadable
            one = self._one_of_class()
            if one is None:
                is_opaque = True
            elif one[0][0] == one[-1][1] and self._next() == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                last = self._one_of_class()
                if last is None or last[0][0] != last[-1][1] or last[0][0] < one[0][0]:
                    raise Unreadable
                found.append((one[0][0], last[0][0]))
            else:
                found += one
        self.at += 1
        if is_opaque:
            return Chars(None)
        ranges = union(found)
        return Chars(complement(ranges) if is_negative else ranges)

    def _one_of_class(self) -> Ranges | None:
        sign = self._next()
        self.at += 1
        if sign == "\\":
            if self._next() == "b":
                self.at += 1
                return ((8, 8),)
            return self._escape()
        return ((ord(sign), ord(sign)),)
