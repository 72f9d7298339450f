"""Responses in the background as OpenAI's own client sees them: their states, events that come again, another gateway, limits."""

import asyncio
import json
import os
import signal
from types import SimpleNamespace
from typing import Any

import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrt.actors.gateway.answers.requests import RequestRegistry
from mmrt.actors.gateway.apis import background
from mmrt.actors.gateway.apis.openai.background import STARTED, End, Form, Rendering, entry_of, failed, texts_of
from mmrt.actors.gateway.keeping.kept_answers import KeptAnswers
from mmrt.actors.gateway.keeping.state import Place
from mmrt.runtime.errors import RequestError
from mmrt.shm.kept_records import KeptRecords
from mmrt.shm.workplace import Workplace
from mmrt.tests.actors.gateway.test_tool_calls import CALL

TEXT = "Hello, größer 😀 world"
ASKED: dict[str, Any] = {"model": "tiny", "input": "hi", "background": True}
BEGINNING = ["response.created", "response.queued", "response.in_progress"]


async def until(scene: Any, id: str, *statuses: str) -> Any:
    async with asyncio.timeout(10):
        while (found := await scene.client.responses.retrieve(id)).status not in statuses:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        return found


def held(scene: Any, *texts: str) -> asyncio.Event:
    """Let requests begin, say these texts, and end once the event is set."""
    go_on = asyncio.Event()

    async def script(play: Any) -> None:
        play.queue()
        await play.grant()
        play.prepare()
        for text in texts:
            play.text(text)
            await asyncio.sleep(0.02)
        await go_on.wait()
        play.text(" end", "stop")

    scene.controller.script = script
    return go_on


async def events_of(stream: Any) -> list[dict[str, Any]]:
    return [event.to_dict() async for event in stream]


def test_it_goes_through_its_states(stage: Any) -> None:
    async def test(scene: Any) -> None:
        responses, go_on, end = scene.client.responses, asyncio.Event(), asyncio.Event()

        async def script(play: Any) -> None:
            play.queue()
            await go_on.wait()
            await play.grant()
            play.prepare()
            await end.wait()
            play.text("Hello", "stop")

        scene.controller.script = script
        made = await responses.create(**ASKED)
        assert (made.status, made.background, made.output, made.usage) == ("queued", True, [], None)
        assert (await responses.retrieve(made.id)).status == "queued"
        with pytest.raises(openai.BadRequestError, match="has not ended: wait until its status is completed"):
            await responses.create(model="tiny", input="And?", previous_response_id=made.id)
        assert (await responses.input_items.list(made.id)).data[0].content[0].text == "hi"
        go_on.set()
        await until(scene, made.id, "in_progress")
        end.set()
        ended = await until(scene, made.id, "completed")
        assert ended.output_text == "Hello" and ended.usage.output_tokens == 1 and ended.created_at == made.created_at
        await asyncio.wait_for(scene.controller.play.delivered.wait(), 5)
        assert not scene.controller.play.cancelled.is_set()
        again = await responses.create(model="tiny", input="And?", previous_response_id=made.id)
        assert again.status == "completed" and again.background is False
        assert (await responses.cancel(made.id)).status == "completed", "it has ended"
        await responses.delete(made.id)
        for ask in (responses.retrieve, responses.cancel, responses.delete):
            with pytest.raises(openai.NotFoundError):
                await ask(made.id)
        with pytest.raises(openai.BadRequestError, match="cannot be cancelled: the response was not made with background"):
            await responses.cancel(again.id)

    stage.run(test)


def test_events_come_again_with_the_same_numbers(stage: Any) -> None:
    """From any of them on, while it is under way and afterwards, to several clients, though the first one has gone."""

    async def test(scene: Any) -> None:
        responses, go_on = scene.client.responses, held(scene, "Hello", ", größer", " 😀")
        stream = await responses.create(**ASKED, stream=True)
        first: list[dict[str, Any]] = []
        async for event in stream:
            first.append(event.to_dict())
            if len(first) == 6:
                break
        await stream.close()  # its client goes
        id = first[0]["response"]["id"]
        assert [event["type"] for event in first[:3]] == BEGINNING
        readers = [
            asyncio.create_task(events_of(await responses.retrieve(id, stream=True, starting_after=after))) for after in (0, 5, 3)
        ]
        await asyncio.sleep(0.1)
        go_on.set()
        live = [await reader for reader in readers]
        whole = await events_of(await responses.retrieve(id, stream=True))
        assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
        assert whole[:6] == first and whole[-1]["type"] == "response.completed"
        assert live == [whole[1:], whole[6:], whole[4:]]
        for after in range(len(whole)):
            assert await events_of(await responses.retrieve(id, stream=True, starting_after=after)) == whole[after + 1 :]
        assert await events_of(await responses.retrieve(id, stream=True, starting_after=10_000)) == []
        text = "".join(event["delta"] for event in whole if event["type"] == "response.output_text.delta")
        assert text == "Hello, größer 😀 end" == whole[-1]["response"]["output"][0]["content"][0]["text"]
        assert (await responses.retrieve(id)).to_dict() == whole[-1]["response"]
        for number in ("-1", "x", "1" * 20):
            refused = await scene.http.get(f"/v1/responses/{id}?stream=true&starting_after={number}")
            assert refused.status_code == 400 and "expected the sequence_number" in refused.json()["error"]["message"]
        for word in ("", "True", "1"):
            refused = await scene.http.get(f"/v1/responses/{id}?stream={word}")
            assert refused.status_code == 400 and "expected true or false" in refused.text
        assert "needs stream=true" in (await scene.http.get(f"/v1/responses/{id}?starting_after=1")).text

    stage.run(test)


def test_it_is_cancelled(stage: Any) -> None:
    async def test(scene: Any) -> None:
        responses = scene.client.responses
        held(scene, "Hello")
        made = await responses.create(**ASKED)
        await until(scene, made.id, "in_progress")
        reader = asyncio.create_task(events_of(await responses.retrieve(made.id, stream=True)))
        cancelled = await responses.cancel(made.id)
        assert (cancelled.status, cancelled.error) == ("cancelled", None)
        assert (await responses.cancel(made.id)).status == "cancelled"
        await asyncio.wait_for(scene.controller.play.cancelled.wait(), 5)
        events = await reader
        assert events[-1]["type"] == "response.cancelled" and events[-1]["response"]["status"] == "cancelled"
        assert await events_of(await responses.retrieve(made.id, stream=True)) == events
        with pytest.raises(openai.BadRequestError, match="has no answer, its status is cancelled"):
            await responses.create(model="tiny", input="And?", previous_response_id=made.id)
        removed = await responses.create(**ASKED)
        await responses.delete(removed.id)
        await asyncio.wait_for(list(scene.controller.plays.values())[-1].cancelled.wait(), 5)
        with pytest.raises(openai.NotFoundError):
            await responses.retrieve(removed.id)

    stage.run(test)


def test_one_that_reaches_its_clients_limit_can_be_cancelled(stage: Any) -> None:
    file = stage._run.path / "keys.toml"
    file.write_text('[[key]]\nname = "one"\nkey = "one-key-of-sixteen"\nmax_requests = 1\n')
    file.chmod(0o600)
    stage.configure("server", api_keys_file=str(file))

    async def test(scene: Any) -> None:
        held(scene)
        responses = scene.client.with_options(api_key="one-key-of-sixteen").responses
        made = await responses.create(**ASKED)
        with pytest.raises(openai.RateLimitError, match="1 requests at a time"):
            await responses.create(**ASKED)
        assert (await responses.cancel(made.id)).status == "cancelled"

    stage.run(test)


def test_it_fails(stage: Any) -> None:
    """At once where the controller refuses it; later it has failed, which its events say as others do."""

    async def test(scene: Any) -> None:
        responses = scene.client.responses

        async def refuse(play: Any) -> None:
            play.fail(429, "17 requests wait", error_type="overloaded_error", retry_after_s=3)

        async def fail(play: Any) -> None:
            play.queue()
            await play.grant()
            play.prepare()
            play.text("Hello")
            await asyncio.sleep(0.1)
            play.fail(500, "the model failed on this request", error_type="internal_error")

        scene.controller.script = refuse
        with pytest.raises(openai.RateLimitError, match="17 requests wait"):
            await responses.create(**ASKED)
        scene.controller.script = fail
        made = await responses.create(**ASKED)
        found = await until(scene, made.id, "failed")
        assert found.error is not None and found.error.message == "the model failed on this request"
        with pytest.raises(openai.APIError, match="the model failed"):
            await events_of(await responses.retrieve(made.id, stream=True))
        text = (await scene.http.get(f"/v1/responses/{made.id}?stream=true")).text
        assert [line for line in text.splitlines() if line.startswith("event")][-2:] == ["event: response.failed", "event: error"]

    stage.run(test)


@pytest.mark.parametrize("num_lost", [0, 3])
def test_another_gateway_goes_on(stage: Any, num_lost: int) -> None:
    """It submits the request again by its key, drops the text that it has, whose cuts stay, and ends it."""
    stage.answers_fd = KeptRecords.create()
    known: dict[str, Any] = {}
    texts = ["Hello", ", größer", " 😀"]

    async def before(scene: Any) -> None:
        held(scene, *texts)
        known["made"] = made = await scene.client.responses.create(**ASKED)
        stream = await scene.client.responses.retrieve(made.id, stream=True)
        async for event in stream:
            known.setdefault("events", []).append(event.to_dict())
            if len(known["events"]) == 8:
                break
        await stream.close()
        known["play"] = scene.controller.play
        os.kill(os.getpid(), signal.SIGUSR1)  # a successor is ready
        await scene.until(lambda: scene.actor.ending)

    async def after(scene: Any) -> None:
        await scene.until(lambda: scene.controller.plays)
        play, made = scene.controller.play, known["made"]
        assert play.key == known["play"].key and play.spec == known["play"].spec
        assert (await scene.client.responses.retrieve(made.id)).status == "in_progress"
        await scene.until(lambda: scene.actor.has_adopted)
        reader = asyncio.create_task(events_of(await scene.client.responses.retrieve(made.id, stream=True)))
        await asyncio.sleep(0.1)
        scene.controller.play.go_on.set()
        events = await reader
        assert events[:8] == known["events"] and events[-1]["type"] == "response.completed"
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == "".join(texts) + " end"
        assert events == await events_of(await scene.client.responses.retrieve(made.id, stream=True))

    async def script(play: Any) -> None:
        play.go_on = asyncio.Event()
        for _ in range(num_lost):
            play.queue()
        await play.grant()
        play.prepare()
        play.text("".join(texts))
        await play.go_on.wait()
        play.text(" end", "stop")

    stage.run(before)
    stage.script = script
    stage.run(after)
    os.close(stage.answers_fd)


def test_it_has_failed_where_two_gateways_die_at_work_on_it(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is under way beside it goes on."""
    stage.answers_fd = KeptRecords.create()
    made: list[str] = []

    async def before(scene: Any) -> None:
        held(scene, "Hello")
        for _ in range(2):
            made.append((await scene.client.responses.create(**ASKED)).id)
            await until(scene, made[-1], "in_progress")

    async def leave(scene: Any) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        await scene.until(lambda: scene.actor.ending)

    async def first(scene: Any) -> None:
        await before(scene)
        await leave(scene)

    async def second(scene: Any) -> None:
        assert [(await scene.client.responses.retrieve(id)).status for id in made] == ["in_progress"] * 2
        await leave(scene)

    async def third(scene: Any) -> None:
        found = await scene.client.responses.retrieve(made[0])
        assert (found.status, found.error.message) == ("failed", "the server has died 2 times over this answer")
        text = (await scene.http.get(f"/v1/responses/{found.id}?stream=true")).text
        assert [line for line in text.splitlines() if line.startswith("event")][-2:] == ["event: response.failed", "event: error"]
        assert len(scene.controller.plays) == 1
        await until(scene, made[1], "completed")

    async def script(play: Any) -> None:
        await play.grant()
        play.prepare()
        play.text("Hello", "stop" if finish else None)

    def crash() -> None:
        number = next(iter(KeptRecords(stage.answers_fd).used()))
        KeptRecords(stage.answers_fd).set_at_work(number, Workplace.LOOP, True)
        stage.follows_a_crash = True

    def entry(text: str) -> bytes:
        records = KeptRecords(stage.answers_fd)
        at_work.append([records.is_at_work(number, Workplace.LOOP) for number in records.used()])
        return entry_of(text)

    finish, at_work = False, list[list[bool]]()
    monkeypatch.setattr(background, "entry_of", entry)
    stage.run(first)
    assert at_work == [[True], [False, True]]
    crash()
    stage.script = script
    stage.run(second)
    crash()
    finish = True
    stage.run(third)
    os.close(stage.answers_fd)


def test_one_that_is_forgotten_does_not_begin_anew_in_the_midst_of_its_stream() -> None:
    """It was deleted while a client read it slowly, then its gateway died."""
    kept = KeptAnswers(KeptRecords.own())
    answers = background.BackgroundAnswers(kept, RequestRegistry(None), None, None, 5.0, 5.0)  # type: ignore[arg-type]
    record: Any = SimpleNamespace(id="resp_1", shown=[Place(has_begun=True)], open=lambda *_: None, request=lambda _: (1, None))
    with pytest.raises(RequestError, match="is forgotten"):
        asyncio.run(answers.begin(b"", record, None, 0, lambda: pytest.fail("it begins")))


def test_limits_of_what_is_under_way(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MAX_UNFINISHED", 2)

    async def test(scene: Any) -> None:
        held(scene)
        made = [await scene.client.responses.create(**ASKED) for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match="2 answers in the background are under way, the limit is 2") as caught:
            await scene.client.responses.create(**ASKED)
        assert caught.value.code == "rate_limit_exceeded" and caught.value.response.headers["Retry-After"] == "1"
        await scene.client.responses.cancel(made[0].id)
        monkeypatch.setattr(background, "TENANT_SHARE", background.MAX_KEPT_BYTES // 8300)
        with pytest.raises(openai.RateLimitError, match="would keep .* bytes, media included, the limit is"):
            await scene.client.responses.create(**ASKED)
        await scene.client.responses.cancel(made[1].id)
        monkeypatch.setattr(background, "TENANT_SHARE", 1 << 20)
        with pytest.raises(openai.APIStatusError, match="would keep .* bytes, media included, the limit is 64") as alone:
            await scene.client.responses.create(**ASKED)
        assert alone.value.status_code == 413, "no room will ever do"

    stage.run(test)


def test_its_deadline_holds(stage: Any) -> None:
    stage.configure("server", request_timeout_s=0.5)

    async def test(scene: Any) -> None:
        held(scene, "Hello")
        made = await scene.client.responses.create(**ASKED)
        found = await until(scene, made.id, "failed")
        assert "was not finished after" in found.error.message

    stage.run(test)


def end_of(form: Form, reason: Any) -> End:
    if reason is None:
        return failed(form, RequestError("it failed", status=500), False)
    return End("incomplete" if reason == "length" else "completed", b"{}", reason, None)


shown = msgspec.json.encode({"text": None, "tools": [], "model": "tiny"})
marks = ["<think>", "</think>", "a", "😀", " ", "\n", CALL, CALL[:9], CALL[9:], "{", "}", "<"]
pieces = st.lists(st.sampled_from(marks), min_size=1, max_size=5).map("".join)


@given(
    st.lists(st.one_of(st.none(), pieces), max_size=12),
    st.booleans(),
    st.sampled_from([None, True, False]),
    st.booleans(),
    st.sampled_from(["stop", "length", None]),
    st.integers(0, 40),
    st.integers(0, 12),
)
def test_any_cuts_make_the_same_events(
    texts: list[str | None], has_tools: bool, is_thinking: bool | None, drops: bool, reason: Any, first: int, waits: int
) -> None:
    """Whether they are read as they come or afterwards, and from whichever event on."""
    form = Form("resp_1", shown, ["weather"] if has_tools else None, is_thinking, drops)
    log = b"".join(entry_of(text) if text else STARTED for text in texts)
    assert list(texts_of(log)) == [text or "" for text in texts]

    def events(rendering: Rendering) -> bytes:
        return b"".join([rendering.begin(), *map(rendering.text, texts_of(log)), rendering.end(end_of(form, reason))])

    whole = events(Rendering(form))
    data = [json.loads(line[6:]) for line in whole.decode().splitlines() if line.startswith("data: ")]
    assert [event["sequence_number"] for event in data] == list(range(len(data)))
    parts = whole.split(b"\n\n")[:-1]
    assert events(Rendering(form, first)) == b"".join(part + b"\n\n" for part in parts[first:])
