"""kill -9 of any stage in mid-stream leaves the text as it was: nothing lost, nothing doubled."""

import os
import signal

import pytest

from mmrt.tests.end_to_end.conftest import Server, also_slow

PROMPT = "Write a long text about nothing in particular."


@pytest.fixture(scope="module")
def expected(server: Server) -> list[int]:
    return server.chat(PROMPT, max_tokens=300, extra_body={"ignore_eos": True})[1]


@pytest.mark.parametrize("victim", ["decode", "controller", "detokenizer", "memory", *also_slow("prefill", "encoder", "video")])
def test_kill_in_mid_stream_changes_nothing(server: Server, expected: list[int], victim: str) -> None:
    before = {found["name"]: found["pid"] for found in server.status()["actors"]}
    ids: list[int] = []
    killed = False
    for chunk in server.stream(PROMPT, max_tokens=300, extra_body={"ignore_eos": True}):
        ids += [token for choice in chunk.choices for token in (getattr(choice, "token_ids", None) or [])]
        if len(ids) > 5 and not killed:
            os.kill(before[victim], signal.SIGKILL)  # at once: looking it up would take longer than the text
            killed = True
    assert killed
    assert ids == expected
    status = server.wait(lambda status: bool(status["ready"]) and status_pid(status, victim) != before[victim], victim)
    after = {found["name"]: found["pid"] for found in status["actors"]}
    assert {name for name in after if after[name] != before[name]} == {victim}
    server.wait_until_empty()


def status_pid(status: dict[str, object], name: str) -> object:
    return next(found["pid"] for found in status["actors"] if found["name"] == name)  # type: ignore[attr-defined]
