"""What may become of a request in a storm, and what may not."""

from typing import Any

import pytest

from mmrt_lab.chaos.faults import Cell, Fault
from mmrt_lab.chaos.verdict import Outcome, Reference, Trouble, judge

REFERENCE = Reference("one two three", [1, 2, 3], "length")


def outcome(**changes: Any) -> Outcome:
    whole = {"end": "complete", "text": REFERENCE.text, "ids": REFERENCE.ids, "finish": "length", "usage_tokens": 3}
    return Outcome(**{"request": "text", "began_s": 10.0, "ended_s": 20.0, **whole, **changes})


def trouble(kind: str, target: str, phase: str = "mid-stream", began_s: float = 15.0, ended_s: float = 16.0) -> Trouble:
    cell = Cell(kind, target, phase)  # type: ignore[arg-type]
    return Trouble(Fault(seed=1, index=1, cell=cell, delay_s=0, length_s=0), began_s, ended_s)


def test_the_reference_itself() -> None:
    assert judge(outcome(), REFERENCE, []) == ""


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"text": "one twice three"}, "text differs from the reference at character 6"),
        ({"text": REFERENCE.text + "!"}, "differs from the reference at character 13"),
        ({"ids": [1, 2, 2, 3]}, "ids differ from the reference at token 2"),
        ({"ids": [1, 2, 3, 4]}, "ids differ from the reference at token 3"),
        ({"ids": [1, 2]}, "lacks an end: 2 of 3 ids"),
        ({"text": "one two"}, "lacks an end"),
        ({"finish": "stop"}, "finish reason is 'stop'"),
        ({"usage_tokens": 4}, "usage says 4"),
        ({"usage_tokens": None}, "usage says None"),
        ({"end": "silent"}, "ended silent"),
        ({"end": "overdue"}, "ended overdue"),
        ({"end": "garbled", "detail": "what?"}, "what?"),
        ({"end": "broken", "text": "one", "ids": [1]}, "ended broken"),
        ({"end": "error", "status": 500}, "ended error"),
        ({"end": "refused", "status": 503, "text": "", "ids": []}, "ended refused"),
    ],
)
def test_what_is_a_failure_whatever_has_died(changes: dict[str, Any], problem: str) -> None:
    around = [trouble("kill", "decode"), trouble("late", "gateway"), trouble("pause", "gateway")]
    assert problem in judge(outcome(**changes), REFERENCE, around)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"text": "one twice", "ids": [1, 4, 3]}, ""),
        ({"end": "cancelled", "text": "other", "ids": [4]}, ""),
        ({"end": "cancelled", "ids": [4, 4, 4, 4]}, "has 4 ids, at most 3 were asked for"),
        ({"text": "one", "ids": [1, 4], "usage_tokens": 2}, "lacks an end: 2 of 3 ids"),
        ({"ids": [4, 4, 4], "finish": "stop"}, "finish reason is 'stop'"),
        ({"ids": [4, 4, 4], "usage_tokens": 4}, "usage says 4"),
        ({"end": "silent"}, "ended silent"),
    ],
)
def test_where_rounding_depends_on_the_batch_only_contents_may_change(changes: dict[str, Any], problem: str) -> None:
    found = judge(outcome(**changes), REFERENCE, [], is_exact=False)
    assert problem in found and bool(found) is bool(problem)


def test_a_cancelled_request_has_a_prefix() -> None:
    assert judge(outcome(end="cancelled", text="one t", ids=[1], finish="", usage_tokens=None), REFERENCE, []) == ""
    assert judge(outcome(end="cancelled", text="one x", ids=[1]), REFERENCE, []) != ""


@pytest.mark.parametrize("kind", ["kill", "stop", "exit", "restart"])
def test_the_death_of_the_gateway_excuses_nothing(kind: str) -> None:
    for one in (outcome(end="broken", text="one", ids=[1]), outcome(end="broken", text="", ids=[]), outcome(end="error", status=503)):
        assert judge(one, REFERENCE, [trouble(kind, "gateway")]) != ""


@pytest.mark.parametrize("kind", ["term", "oom"])
def test_an_end_of_the_gateway_excuses_its_connections_at_that_time(kind: str) -> None:
    broken = outcome(end="broken", text="one", ids=[1])
    assert judge(broken, REFERENCE, [trouble(kind, "gateway")]) == ""
    assert judge(broken, REFERENCE, [trouble(kind, "gateway", began_s=1, ended_s=9.9)]) != ""
    assert judge(broken, REFERENCE, [trouble(kind, "decode")]) != ""
    assert judge(outcome(end="silent"), REFERENCE, [trouble(kind, "gateway")]) != ""
    assert judge(outcome(end="broken", text="two"), REFERENCE, [trouble(kind, "gateway")]) != ""


def test_nothing_makes_a_good_request_a_bad_one() -> None:
    refused = outcome(end="refused", status=404, text="", ids=[])
    for kind, target in (("kill", "gateway"), ("restart", "gateway"), ("enospc", "all"), ("oom", "prefill")):
        assert "ended refused (404" in judge(refused, REFERENCE, [trouble(kind, target)])


def test_drain_memory_and_space() -> None:
    refused = outcome(end="refused", status=503, text="", ids=[])
    assert judge(refused, REFERENCE, [trouble("kill", "decode", phase="drain")]) == ""
    for began_s, is_excused in ((15.5, True), (14.0, False)):
        unanswered = outcome(end="broken", text="", ids=[], began_s=began_s)
        assert (judge(unanswered, REFERENCE, [trouble("term", "decode", phase="drain")]) == "") is is_excused
    assert judge(refused, REFERENCE, [trouble("enospc", "all")]) == ""
    assert judge(outcome(end="error", status=500, text="one", ids=[1]), REFERENCE, [trouble("enospc", "all")]) != ""
    assert judge(outcome(end="error", status=500, text="one", ids=[1]), REFERENCE, [trouble("oom", "prefill")]) == ""


def test_quarantine_needs_two_deaths_that_look_like_guilt() -> None:
    failed = outcome(end="error", status=500, text="one", ids=[1])
    assert judge(failed, REFERENCE, [trouble("stop", "decode")]) != ""
    assert judge(failed, REFERENCE, [trouble("stop", "decode"), trouble("exit", "decode")]) == ""
    assert judge(failed, REFERENCE, [trouble("kill", "decode"), trouble("kill", "decode")]) != ""
