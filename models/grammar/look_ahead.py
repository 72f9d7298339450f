"""Regular expressions without look-ahead for those with it, which llguidance does not read. Pure.

What is looked ahead for from a place is a condition on all of the text behind it. So the texts of an expression are those of
another with *and* and *not*, whose derivatives (Brzozowski 1964) are the states of an automaton; and an automaton's texts are those
of an expression without either.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any

from .regex_tree import ANY, LAST, Chars, Choice, Edge, Look, Node, Ranges, Repeat, Sequence, Unreadable, complement, parse, union

_MAX_STATES = 64
_MAX_COPIES = 256  # of repeated parts that are written out
_MAX_CHARS = 6_000
# Terms: ("set", ranges), ("cat", one, other), ("or", terms), ("and", terms), ("not", term), ("star", term), and these.
_Term = tuple[Any, ...]
_NONE: _Term = ("none",)
_EMPTY: _Term = ("empty",)


def without_look_ahead(text: str) -> list[str] | None:
    """Return expressions all of which a text matches exactly if it matches this one; None if there is no short exact form."""
    if "(?=" not in text and "(?!" not in text:
        return [text]
    try:
        return _split(text, parse(text))
    except (Unreadable, _TooLarge, RecursionError):
        return None


def in_one(text: str) -> str | None:
    """Return the same as one expression."""
    if "(?=" not in text and "(?!" not in text:
        return text
    try:
        return _plain(parse(text))
    except (Unreadable, _TooLarge, RecursionError):
        return None


class _TooLarge(Exception):
    pass


def _split(text: str, tree: Node) -> list[str]:
    """Split off what is looked ahead for at the beginning: it may be long where the rest is, too, but needs no automaton then."""
    parts = tree.parts if isinstance(tree, Sequence) else (tree,)
    looks: list[Look] = []
    if parts[:1] == (Edge("^"),):
        for part in parts[1:]:
            if not isinstance(part, Look) or part.start != (looks[-1].end if looks else 1):
                break  # also for those in a group
            looks.append(part)
    if not looks:
        return [_plain(tree)]
    rest = parts[1 + len(looks) :]
    found = [_plain(Sequence((Edge("^"), look))) if look.is_negative else _condition(text, look) for look in looks]
    if any(map(_looks, rest)):
        return [*found, _plain(Sequence((Edge("^"), *rest)))]
    return [*found, "^" + text[looks[-1].end :]]


def _condition(text: str, look: Look) -> str:
    """Return an expression for texts that begin as it looks for."""
    body = look.body.parts if isinstance(look.body, Sequence) else (look.body,)
    if isinstance(look.body, Choice) or any(map(_looks, body)) or any(isinstance(part, Edge) for part in body[:-1]):
        return _plain(Sequence((Edge("^"), look)))
    return "^" + text[look.start + len("(?=") : look.end - 1]


def _looks(node: Node) -> bool:
    match node:
        case Look():
            return True
        case Repeat(body):
            return _looks(body)
        case Sequence(parts) | Choice(parts):
            return any(map(_looks, parts))
    return False


def _plain(tree: Node) -> str:
    """Return an expression for the same texts. Raises: Unreadable, _TooLarge."""
    term = _term(tree, _star(_set(ANY)), is_start=True)
    if not (isinstance(tree, Sequence) and tree.parts[:1] == (Edge("^"),)):
        anywhere = _term(tree, _star(_set(ANY)), is_start=False)
        term = _or(term, _cat(_star(_set(ANY)), anywhere))
    return f"^(?:{_expression(*_automaton(term))})$"


# ------------------------------------------------------------------------------------------------------------ terms


def _term(node: Node, rest: _Term, is_start: bool) -> _Term:
    """Return the term of the texts of ``node`` with ``rest`` behind them. ``is_start``: nothing stands before them."""
    match node:
        case Chars(ranges):
            if ranges is None:
                raise Unreadable
            return _cat(_set(ranges), rest)
        case Edge("^"):
            return rest if is_start else _NONE
        case Edge("$"):
            return _EMPTY if _is_empty(rest) else _NONE
        case Edge():
            raise Unreadable
        case Look(body, is_ahead, is_negative):
            if not is_ahead:
                raise Unreadable
            ahead = _term(body, _star(_set(ANY)), is_start)
            return _and(_not(ahead) if is_negative else ahead, rest)
        case Choice(options):
            return _or(*(_term(one, rest, is_start) for one in options))
        case Sequence(parts):
            return _sequence(parts, rest, is_start)
    return _repeat(node, rest, is_start)


def _sequence(parts: tuple[Node, ...], rest: _Term, is_start: bool) -> _Term:
    starts, at_start = [], is_start
    for part in parts:
        starts.append(at_start)
        at_start = at_start and isinstance(part, Edge | Look)
        if not at_start and is_start and isinstance(part, Repeat | Choice) and _has_start(parts):
            raise Unreadable  # a beginning behind what may be absent
    for part, begins in zip(reversed(parts), reversed(starts), strict=True):
        rest = _term(part, rest, begins)
    return rest


def _has_start(parts: tuple[Node, ...]) -> bool:
    return any(isinstance(part, Edge) and part.sign == "^" for part in parts[1:])


def _repeat(node: Repeat, rest: _Term, is_start: bool) -> _Term:
    body, low, high = node
    if (low, high) == (0, 1):
        return _or(rest, _term(body, rest, is_start))
    if _looks(body) or _has_edge(body):
        raise Unreadable
    one = _term(body, _EMPTY, is_start=False)
    if high is None:
        rest = _cat(_star(one), rest)
    elif high > _MAX_COPIES:
        raise _TooLarge
    else:
        skipped = rest
        for _ in range(high - low):
            rest = _or(skipped, _cat(one, rest))
    for _ in range(low):
        rest = _cat(one, rest)
    return rest


def _has_edge(node: Node) -> bool:
    match node:
        case Edge():
            return True
        case Repeat(body):
            return _has_edge(body)
        case Sequence(parts) | Choice(parts):
            return any(map(_has_edge, parts))
    return False


def _set(ranges: Ranges) -> _Term:
    return ("set", ranges) if ranges else _NONE


def _cat(one: _Term, other: _Term) -> _Term:
    if one == _NONE or other == _NONE:
        return _NONE
    if one == _EMPTY:
        return other
    if other == _EMPTY:
        return one
    if one[0] == "cat":
        return _cat(one[1], _cat(one[2], other))
    return ("cat", one, other)


def _star(one: _Term) -> _Term:
    return _EMPTY if one in (_NONE, _EMPTY) else one if one[0] == "star" else ("star", one)


_ALL = _star(_set(ANY))


def _or(*terms: _Term) -> _Term:
    found = {inner for term in terms for inner in (term[1] if term[0] == "or" else (term,))} - {_NONE}
    if _ALL in found:
        return _ALL
    return _NONE if not found else next(iter(found)) if len(found) == 1 else ("or", frozenset(found))


def _and(*terms: _Term) -> _Term:
    found = {inner for term in terms for inner in (term[1] if term[0] == "and" else (term,))} - {_ALL}
    if _NONE in found:
        return _NONE
    return _ALL if not found else next(iter(found)) if len(found) == 1 else ("and", frozenset(found))


def _not(term: _Term) -> _Term:
    return _ALL if term == _NONE else _NONE if term == _ALL else term[1] if term[0] == "not" else ("not", term)


@lru_cache(4096)
def _is_empty(term: _Term) -> bool:
    """Return whether the empty text is one of the term's."""
    match term[0]:
        case "empty" | "star":
            return True
        case "cat":
            return _is_empty(term[1]) and _is_empty(term[2])
        case "or":
            return any(map(_is_empty, term[1]))
        case "and":
            return all(map(_is_empty, term[1]))
        case "not":
            return not _is_empty(term[1])
    return False


@lru_cache(8192)
def _derivative(term: _Term, code: int) -> _Term:
    """Return the term of what may follow a character."""
    match term[0]:
        case "set":
            return _EMPTY if any(low <= code <= high for low, high in term[1]) else _NONE
        case "cat":
            after = _cat(_derivative(term[1], code), term[2])
            return _or(after, _derivative(term[2], code)) if _is_empty(term[1]) else after
        case "or":
            return _or(*(_derivative(one, code) for one in term[1]))
        case "and":
            return _and(*(_derivative(one, code) for one in term[1]))
        case "not":
            return _not(_derivative(term[1], code))
        case "star":
            return _cat(_derivative(term[1], code), term)
    return _NONE


# -------------------------------------------------------------------------------------------------------- automata


def _automaton(start: _Term) -> tuple[list[dict[int, Ranges]], set[int]]:
    """Return the steps of each state, by the next state, and the states where a text may end. State 0 is the first. Raises:
    _TooLarge."""
    cuts = sorted({0, LAST + 1, *(cut for ranges in _sets(start) for low, high in ranges for cut in (low, high + 1))})
    numbers, steps, queue = {start: 0}, list[dict[int, Ranges]](), [start]
    for term in queue:
        found: dict[int, list[tuple[int, int]]] = {}
        for low, end in pairwise(cuts):
            after = _derivative(term, low)
            if after == _NONE:
                continue
            if after not in numbers:
                numbers[after] = len(numbers)
                queue.append(after)
                if len(numbers) > _MAX_STATES:
                    raise _TooLarge
            found.setdefault(numbers[after], []).append((low, end - 1))
        steps.append({state: union(ranges) for state, ranges in found.items()})
    return _smallest(steps, {number for term, number in numbers.items() if _is_empty(term)})


def _sets(term: _Term) -> Iterator[Ranges]:
    seen, stack = set[_Term](), [term]
    while stack:
        one = stack.pop()
        if one in seen:
            continue
        seen.add(one)
        if one[0] == "set":
            yield one[1]
        elif one[0] in ("or", "and"):
            stack += one[1]
        else:
            stack += one[1:]


def _smallest(steps: list[dict[int, Ranges]], ends: set[int]) -> tuple[list[dict[int, Ranges]], set[int]]:
    """Merge states with the same texts behind them, and leave out those with none."""
    groups = [int(state in ends) for state in range(len(steps))]
    while True:
        behind = [(groups[state], frozenset(_by_group(steps[state], groups).items())) for state in range(len(steps))]
        names = {key: number for number, key in enumerate(dict.fromkeys(behind))}
        merged = [names[key] for key in behind]
        if len(names) == len(set(groups)):
            break
        groups = merged
    alive = {groups[state] for state in ends}
    small = {groups[state]: _by_group(steps[state], groups) for state in range(len(steps))}
    while more := {one for one, found in small.items() if one not in alive and alive & found.keys()}:
        alive |= more
    order = {one: number for number, one in enumerate(sorted(alive, key=lambda one: (one != groups[0], one)))}
    if groups[0] not in alive:
        raise _TooLarge  # no text at all: llguidance says so of the expression
    kept = [{order[to]: ranges for to, ranges in small[one].items() if to in alive} for one in order]
    return kept, {order[groups[state]] for state in ends}


def _by_group(steps: dict[int, Ranges], groups: list[int]) -> dict[int, Ranges]:
    found: dict[int, list[tuple[int, int]]] = {}
    for state, ranges in steps.items():
        found.setdefault(groups[state], []).extend(ranges)
    return {group: union(ranges) for group, ranges in found.items()}


def _expression(steps: list[dict[int, Ranges]], ends: set[int]) -> str:
    """Return the expression of an automaton, from which state after state is taken away. Raises: _TooLarge."""
    first, last = -1, -2
    arcs = {(here, to): _shown(ranges) for here, found in enumerate(steps) for to, ranges in found.items()}
    arcs |= {(first, 0): "", **{(end, last): "" for end in ends}}
    left = set(range(len(steps)))
    while left:
        state = min(left, key=lambda one: _price(arcs, one))
        left.remove(state)
        loop = arcs.pop((state, state), None)
        again = "" if loop is None else _grouped(loop) + "*"
        into = [(here, arcs.pop((here, to))) for here, to in list(arcs) if to == state]
        out = [(to, arcs.pop((here, to))) for here, to in list(arcs) if here == state]
        for here, before in into:
            for to, after in out:
                way = _joined(before) + again + _joined(after)
                known = arcs.get((here, to))
                arcs[here, to] = way if known is None else f"{known}|{way}"
                if len(arcs[here, to]) > _MAX_CHARS:
                    raise _TooLarge
    return arcs[first, last]


def _price(arcs: dict[tuple[int, int], str], state: int) -> int:
    """How much text taking a state away writes."""
    into = [len(text) for (here, to), text in arcs.items() if to == state != here]
    out = [len(text) for (here, to), text in arcs.items() if here == state != to]
    return sum(into) * len(out) + sum(out) * len(into) + len(arcs.get((state, state), "")) * len(into) * len(out)


def _joined(text: str) -> str:
    return f"(?:{text})" if "|" in text else text


def _grouped(text: str) -> str:
    is_one = len(text) == 1 or (text[0] == "[" and text.index("]") == len(text) - 1) or (len(text) == 2 and text[0] == "\\")
    return text if is_one else f"(?:{text})"


def _shown(ranges: Ranges) -> str:
    """A class of characters as Rust reads it."""
    if ranges == ANY:
        return "[\\x{0}-\\x{10FFFF}]"
    rest = complement(ranges)
    is_negative = len(rest) < len(ranges)
    return f"[{'^' * is_negative}{''.join(_shown_range(*one) for one in (rest if is_negative else ranges))}]"


def _shown_range(low: int, high: int) -> str:
    return _shown_code(low) if low == high else f"{_shown_code(low)}-{_shown_code(high)}"


def _shown_code(code: int) -> str:
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\x{{{code:X}}}"
