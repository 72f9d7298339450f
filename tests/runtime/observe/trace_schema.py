"""What a trace must be for viewers to show it: the legacy JSON format's fields, order, nesting and arrows."""

import json
from collections import defaultdict
from typing import Any

Event = dict[str, Any]

_TOLERANCE_US = 0.0021  # two nanoseconds, and what floats make of them


def check_trace(trace: dict[str, Any]) -> list[Event]:
    """Raise AssertionError unless it is well-formed. Returns its events without the names of tracks."""
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    events: list[Event] = trace["traceEvents"]
    json.dumps(trace, allow_nan=False)
    for event in events:
        _check_fields(event)
    timed = [event for event in events if event["ph"] != "M"]
    times = [event["ts"] for event in timed]
    assert times == sorted(times), "events are in order of time"
    named = {event["pid"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
    assert {event["pid"] for event in timed} <= named, "every process has a name"
    slices = _check_slices(timed)
    _check_nesting(timed)
    _check_flows(timed, slices)
    return timed


def _check_fields(event: Event) -> None:
    assert isinstance(event["name"], str) and event["name"]
    assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
    assert isinstance(event["ts"], int | float) and event["ts"] >= 0, event
    assert not [name for name in event if name.startswith("_")], event
    assert isinstance(event.get("args", {}), dict)
    match event["ph"]:
        case "X":
            assert event["dur"] >= 0
        case "b" | "e" | "n":
            assert event["cat"] and isinstance(event["id"], str)
        case "C":
            assert event["args"] and all(isinstance(value, int | float) for value in event["args"].values())
        case "i":
            assert event["s"] in ("g", "p", "t")
        case "s":
            assert event["cat"] and isinstance(event["id"], int)
        case "f":
            assert event["cat"] and isinstance(event["id"], int) and event["bp"] == "e"
        case "M":
            assert event["args"]
        case other:
            raise AssertionError(f"unexpected phase {other!r}")


def _check_slices(events: list[Event]) -> dict[int, list[tuple[float, float]]]:
    """Slices of a thread do not overlap. Returns (begin, end) of all, by process."""
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    found: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for (pid, _), spans in tracks.items():
        for (_, end), (begin, _) in zip(spans, spans[1:], strict=False):
            assert begin >= end - _TOLERANCE_US, f"process {pid}: a slice begins at {begin}, the one before ends at {end}"
        found[pid] += spans
    return found


def _check_nesting(events: list[Event]) -> None:
    """Asynchronous slices of an id open and close like brackets."""
    stacks: dict[tuple[str, str], list[str]] = defaultdict(list)
    for event in events:
        if event["ph"] == "b":
            stacks[event["cat"], event["id"]].append(event["name"])
        elif event["ph"] == "e":
            stack = stacks[event["cat"], event["id"]]
            assert stack and stack.pop() == event["name"], f"{event} closes what is not open: {stack}"
        elif event["ph"] == "n":
            assert stacks[event["cat"], event["id"]], f"{event} is outside of everything"
    assert not [key for key, stack in stacks.items() if stack], "everything is closed"


def _check_flows(events: list[Event], slices: dict[int, list[tuple[float, float]]]) -> None:
    """Each arrow has a beginning and a later end, both inside of slices."""
    ends: dict[int, dict[str, Event]] = defaultdict(dict)
    for event in events:
        if event["ph"] in ("s", "f"):
            assert event["ph"] not in ends[event["id"]]
            ends[event["id"]][event["ph"]] = event
            inside = any(begin - _TOLERANCE_US <= event["ts"] <= end + _TOLERANCE_US for begin, end in slices[event["pid"]])
            assert inside, f"{event} is bound to no slice"
    for flow in ends.values():
        assert set(flow) == {"s", "f"} and flow["s"]["ts"] <= flow["f"]["ts"]
