"""The gateway's grammar process: it compiles, says where faults are, and never delays or ends more than one request."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import uvloop

from mmrt.actors.gateway.grammar import checks as grammar_checks
from mmrt.actors.gateway.grammar.checks import GrammarChecks
from mmrt.actors.gateway.reading.ignored import collecting
from mmrt.models.grammar.call_form import CallForm, Function, source_of_calls
from mmrt.models.grammar.source import JSON_OBJECT, GrammarSource, source_of_lark, source_of_regex, source_of_schema
from mmrt.runtime.errors import RequestError
from mmrt.runtime.process.run import DEFAULT_MODEL

BOMB = source_of_regex("x(((((a{10}){10}){10}){10}){10}){10}")


@asynccontextmanager
async def checking(path: Path = DEFAULT_MODEL) -> AsyncIterator[GrammarChecks]:
    checks = GrammarChecks(path)
    try:
        yield checks
    finally:
        await checks.close()


def run(scene: Callable[[GrammarChecks], Awaitable[Any]]) -> None:
    async def play() -> None:
        async with checking() as checks:
            await scene(checks)

    uvloop.run(play())


def pid(checks: GrammarChecks) -> int:
    assert checks._process is not None
    return checks._process.pid


def is_gone(process: int) -> bool:
    return not Path(f"/proc/{process}").exists()


async def refusal(checks: GrammarChecks, source: GrammarSource) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await checks.compile(source, "field")
    return caught.value


def test_it_compiles_and_says_where_faults_are() -> None:
    async def scene(checks: GrammarChecks) -> None:
        assert '"object"' in await checks.compile(JSON_OBJECT, "field")
        assert checks._kept.keys() == {JSON_OBJECT}
        for source, said in {
            source_of_schema({"type": "object", "properties": {"a": {"type": "strin"}}}): "at /properties/a: Invalid type: strin",
            source_of_schema({"items": {"minProperties": 9}}, is_strict=True): "at /items/minProperties: only 1 can be promised",
            source_of_schema({"const": 10**400}): "number out of range",
            source_of_regex("(a"): "invalid regex",
            source_of_lark('start: "a" | foo'): 'unknown name: "foo"',
            source_of_lark('start: "a" <[1526]>'): "leads to a place where no token of a text can follow",
        }.items():
            error = await refusal(checks, source)
            assert (error.status, error.param) == (400, "field")
            assert error.message.startswith("field: cannot be compiled") and said in error.message
        error = await refusal(checks, BOMB)
        assert (error.status, error.param) == (400, "field")
        assert "a regular expression's repeats of repeats stand for 1000000 parts, the limit is 100000" in error.message

    run(scene)


def test_an_answer_that_does_not_come_in_time_ends_the_process_and_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(checks: GrammarChecks) -> None:
        await checks.compile(JSON_OBJECT, "field")
        first = pid(checks)
        with monkeypatch.context() as patch:
            patch.setattr(grammar_checks, "DEADLINE_S", 0)
            error = await refusal(checks, BOMB)
        assert (error.status, error.retry_after_s) == (503, 1)  # it may have been the machine
        assert error.message == f"compiling a regex of {len(BOMB.text)} characters took more than 0 s"
        assert is_gone(first) and checks._process is None and BOMB not in checks._kept
        assert "lark" in await checks.compile(source_of_regex("other"), "field")

    run(scene)


@pytest.mark.parametrize(
    ("number", "said"),
    [(signal.SIGXCPU, "more than 2 s of a processor"), (signal.SIGABRT, "more than 1024 MiB, or a deeper stack than there is")],
)
def test_a_source_that_ends_the_process_is_refused_at_once_and_remembered(number: int, said: str) -> None:
    """The signals of the kernel and of llguidance, from this test."""

    async def scene(checks: GrammarChecks) -> None:
        await checks.compile(JSON_OBJECT, "field")
        os.kill(pid(checks), number)
        error = await refusal(checks, BOMB)
        assert (error.status, error.message) == (400, f"field: cannot be compiled: its compilation takes {said}")
        assert checks._process is None
        assert (await refusal(checks, BOMB)).message == error.message and checks._process is None

    run(scene)


def test_a_process_that_fails_again_is_not_the_clients_fault(tmp_path: Path) -> None:
    """Without a model it does not even start."""

    async def scene() -> None:
        async with checking(tmp_path) as checks:
            error = await refusal(checks, JSON_OBJECT)
            assert (error.status, error.message) == (500, "the grammar process failed")
            assert checks._process is None and not checks._kept

    uvloop.run(scene())


def test_an_exception_of_ours_ends_its_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A source that no reader of requests makes."""
    broken = GrammarSource("json_schema", "not JSON")

    async def scene(checks: GrammarChecks) -> None:
        await checks.compile(JSON_OBJECT, "field")
        first = pid(checks)
        error = await refusal(checks, broken)
        assert (error.status, error.type, error.message) == (500, "internal_error", "the grammar process failed")
        assert "JSONDecodeError" in caplog.text and "held_text" in caplog.text
        await checks.compile(source_of_regex("a"), "field")
        assert pid(checks) == first and broken not in checks._kept

    run(scene)


def test_the_search_for_a_fault_ends_in_time() -> None:
    """Each of the properties compiles the definitions again: 60 of them would take all the time that a source has."""
    heavy = {"enum": [f"value {number:04}" for number in range(1500)]}
    schema = {
        "$defs": {"heavy": heavy},
        "properties": {f"p{n}": {"$ref": "#/$defs/heavy"} for n in range(190)} | {"z": {"type": "strin"}},
    }

    async def scene(checks: GrammarChecks) -> None:
        error = await refusal(checks, source_of_schema(schema))
        assert "Invalid type: strin" in error.message

    run(scene)


def test_a_process_that_dies_is_replaced_unnoticed() -> None:
    async def scene(checks: GrammarChecks) -> None:
        await checks.compile(JSON_OBJECT, "field")
        first = pid(checks)
        os.kill(first, signal.SIGKILL)
        await checks.compile(source_of_regex("a"), "field")
        assert pid(checks) != first
        second = pid(checks)
        await checks.close()
        assert is_gone(second)

    run(scene)


def test_equal_sources_are_compiled_once_and_many_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checks, "MAX_JOBS", 3)
    monkeypatch.setattr(grammar_checks, "MAX_KEPT_CHARS", 150)

    async def scene(checks: GrammarChecks) -> None:
        asked = [asyncio.create_task(checks.compile(source_of_regex(text), "field")) for text in ["a", "b", "a", "c", "a"]]
        gone = asyncio.create_task(checks.compile(source_of_regex("b"), "field"))
        await asyncio.sleep(0)
        assert len(checks._jobs) == 3
        error = await refusal(checks, source_of_regex("d"))
        assert (error.status, error.retry_after_s) == (503, 1)
        assert error.message == "3 grammars wait to be compiled, the limit is 3"
        gone.cancel()
        texts = await asyncio.gather(*asked)
        assert len(set(texts)) == 3 and texts[0] == texts[2] == texts[4]
        assert not checks._jobs
        assert len(checks._kept) == 1 and await checks.compile(source_of_regex("a"), "field") == texts[0]

    run(scene)


def test_the_grammar_goes_with_the_request(stage: Any) -> None:
    async def test(scene: Any) -> None:
        asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1, 2]}}}
        messages = [{"role": "user", "content": "Hi"}]
        await scene.client.chat.completions.create(model="tiny", messages=messages, response_format=asked)
        assert '"enum":[1,2]' in scene.controller.play.spec.generation.sampling.grammar
        with pytest.raises(openai.BadRequestError, match="schema: cannot be compiled: anyOf is empty|Unsatisfiable") as caught:
            asked["json_schema"]["schema"] = {"enum": []}  # type: ignore[index]
            await scene.client.chat.completions.create(model="tiny", messages=messages, response_format=asked)
        assert caught.value.param == "response_format.json_schema.schema"

    stage.run(test)


def test_what_is_dropped_is_named_each_time() -> None:
    values = {"type": "array", "items": {"type": "string", "format": "color"}, "uniqueItems": True}
    source = source_of_schema({"type": "object", "properties": {"a b": values}})
    function = Function("/3/function/parameters", "f", values)
    calls = source_of_calls(CallForm(functions=[function], is_required=True, is_single=True))

    async def scene(checks: GrammarChecks) -> None:
        for _ in range(2):
            with collecting() as found:
                await checks.compile(source, "field")
                await checks.compile(calls, "tools")
            assert list(found.reasons) == [
                "field.properties.a%20b.items.format",
                "field.properties.a%20b.uniqueItems",
                "tools[].function.parameters.items.format",
                "tools[].function.parameters.uniqueItems",
            ]
        with collecting(is_strict=True), pytest.raises(RequestError, match="format: no grammar is known for 'color'"):
            await checks.compile(source, "field")

    run(scene)


@pytest.mark.parametrize("is_open", [False, True])
def test_objects_are_closed_unless_configured(is_open: bool) -> None:
    async def scene() -> None:
        checks = GrammarChecks(DEFAULT_MODEL, is_open=is_open)
        try:
            text = await checks.compile(source_of_schema({"type": "object", "properties": {"a": {"type": "null"}}}), "field")
        finally:
            await checks.close()
        assert ('"additionalProperties":false' in text) != is_open

    uvloop.run(scene())


def test_the_process_ends_with_its_gateway() -> None:
    async def scene(checks: GrammarChecks) -> None:
        await checks.compile(JSON_OBJECT, "field")
        limits = Path(f"/proc/{pid(checks)}/limits").read_text()  # noqa: ASYNC240  nobody waits
        assert not re.search("Max (data size|cpu time) *unlimited", limits) and re.search("Max core file size *0 ", limits)
        process = checks._process
        assert process is not None and process.stdin is not None
        process.stdin.close()
        assert await process.wait() == 0
        checks._process = None

    run(scene)
