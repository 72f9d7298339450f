"""A body in the spool means what it means in memory: whatever form its base64 has, and wherever it stands."""

import asyncio
import base64
import contextlib
import json
import os
import random
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mmrt.actors.gateway.reading import bodies
from mmrt.actors.gateway.reading.cut_text import LEAST_BYTES
from mmrt.actors.gateway.reading.json_body import SpooledBody, decode_body
from mmrt.actors.gateway.reading.validation import Limits, read_chat
from mmrt.runtime.config.sections import MediaSection
from mmrt.runtime.errors import RequestError
from mmrt.shm.spool import Spool, SpooledBytes, whole

DATA = random.Random(7).randbytes(150_000)
JPEG = b"\xff\xd8\xff\xe0" + DATA[:100_000] + b"\xff\xda" * 40


def spooled(body: bytes) -> SpooledBody:
    content = Spool().new()
    content.append(body)
    return SpooledBody(content)


def lines(text: str, end: str) -> str:
    return end.join(text[at : at + 76] for at in range(0, len(text), 76))


FORMS: dict[str, Callable[[bytes], str]] = {
    "plain": lambda data: base64.b64encode(data).decode(),
    "of URLs": lambda data: base64.urlsafe_b64encode(data).decode(),
    "without padding": lambda data: base64.b64encode(data).decode().rstrip("="),
    "in lines": lambda data: lines(base64.b64encode(data).decode(), "\n"),
    "in lines of Windows": lambda data: lines(base64.b64encode(data).decode(), "\r\n"),
    "too much padding": lambda data: base64.b64encode(data).decode() + "==",
    "in a data URL": lambda data: "data:audio/wav;base64," + base64.b64encode(data).decode(),
    "percents at its end": lambda data: base64.b64encode(data).decode().replace("=", "%3D"),
    "padded in its midst": lambda data: base64.b64encode(data[:50_000]).decode() + base64.b64encode(data[:50_001]).decode(),
    "blank between": lambda data: base64.b64encode(data).decode()[:100_000] + " " + base64.b64encode(data).decode()[100_000:],
    "a wrong sign": lambda data: base64.b64encode(data).decode()[:100_000] + "*" + base64.b64encode(data).decode()[100_000:],
    "a wrong length": lambda data: "A" * 80_001,
    "a line of nothing but A": lambda data: "A" * 400_000,
    "a URL": lambda data: "https://example.com/" + "a" * 400_000,
    "in percents": lambda data: "data:audio/wav," + "a" * 400_000,
    "a scheme of its own": lambda data: "x:" + "a" * 400_000,
}

WRITERS: dict[str, Callable[[Any], bytes]] = {
    "as Python": lambda value: json.dumps(value).encode(),
    "as PHP": lambda value: json.dumps(value).replace("/", "\\/").encode(),
    "as Gson": lambda value: json.dumps(value).replace("=", "\\u003d").encode(),
}


def request_of(part: Any, text: str = "Hello") -> dict[str, Any]:
    return {"seed": 1, "messages": [{"role": "user", "content": [{"type": "text", "text": text}, part]}]}


def outcome(body: Any, limits: Limits) -> Any:
    """What is read, with the bytes of media in memory; or the error."""
    try:
        read = read_chat(body, limits)
    except RequestError as error:
        return str(error), error.status, error.param, error.medium
    media = tuple(medium._replace(data=whole(medium.data)) for medium in read.conversation.media)
    return msgspec.structs.replace(read, conversation=read.conversation._replace(media=media))


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("form", FORMS)
def test_base64_of_all_forms(form: str, writer: str, limits: Limits) -> None:
    for size in (150_000, 149_999, 149_998):
        body = WRITERS[writer](request_of({"type": "input_audio", "input_audio": {"data": FORMS[form](DATA[:size]), "format": "wav"}}))
        cut = spooled(body)
        found = outcome(cut, limits)
        assert cut.cuts
        if cut.is_used_up:
            assert found == outcome(body, limits)
        else:
            assert form in ("a wrong sign", "a URL", "in percents", "a scheme of its own", "percents at its end")


def test_media_lie_in_the_spool_and_frames_too(limits: Limits) -> None:
    """Pictures, and a video as a list of pictures: one URL, or several."""
    picture, url = base64.b64encode(JPEG).decode(), "data:image/jpeg;base64,"
    frames = f"data:video/jpeg;base64,{picture},{picture},{base64.b64encode(JPEG[:1000]).decode()}"
    for part in (
        {"type": "image_url", "image_url": {"url": url + picture}},
        {"type": "video_url", "video_url": {"url": frames}},
        {"type": "video", "video": [url + picture, url + base64.b64encode(JPEG[:500]).decode(), url + picture]},
    ):
        body = json.dumps(request_of(part)).encode()
        cut = spooled(body)
        read = read_chat(cut, limits)
        assert cut.is_used_up and isinstance(read.conversation.media[0].data, SpooledBytes)
        assert outcome(spooled(body), limits) == outcome(body, limits)


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(temperature=-1),
        lambda body: body["messages"].append({"role": "nobody"}),
        lambda body: body["messages"][0]["content"].append({"type": "input_audio", "input_audio": {"data": "*"}}),
        lambda body: body["messages"][0].update(role="assistant"),
        lambda body: body.update(user="A" * 200_000),
        lambda body: body["messages"][0]["content"].append({"type": "text", "text": "B" * 200_000}),
        lambda body: body.update({"C" * 200_000: 1}),
    ],
)
def test_other_readers_of_long_runs(change: Callable[[Any], None], limits: Limits) -> None:
    """Errors, and texts that look like base64: where a mark was left over, the caller parses the body whole."""
    value = request_of({"type": "input_audio", "input_audio": {"data": base64.b64encode(DATA).decode()}})
    change(value)
    body = json.dumps(value).encode()
    cut = spooled(body)
    found = outcome(cut, limits)
    assert not cut.is_used_up or found == outcome(body, limits)


def test_limits_on_one_medium(limits: Limits) -> None:
    limits = msgspec.structs.replace(limits, media=MediaSection(max_item_mib=1))
    for size in (1 << 20, (1 << 20) + 1, (1 << 20) + 2, (1 << 20) + 3, 3 << 20):
        for end in ("", "\n"):
            data = lines(base64.b64encode(bytes(size)).decode(), end)
            body = json.dumps(request_of({"type": "input_audio", "input_audio": {"data": data}})).encode()
            cut = spooled(body)
            assert outcome(cut, limits) == outcome(body, limits) and cut.is_used_up


def test_percents_in_a_medium_that_nearly_breaks_its_limit(limits: Limits) -> None:
    limits = msgspec.structs.replace(limits, media=MediaSection(max_item_mib=1))
    data = lines(base64.b64encode(bytes((1 << 20) - 8)).decode(), "\n").replace("=", "%3D")
    body = json.dumps(request_of({"type": "input_audio", "input_audio": {"data": data}})).encode()
    cut = spooled(body)
    found = outcome(cut, limits)
    assert not cut.is_used_up or found == outcome(body, limits)


def test_bodies_cut_anywhere_are_the_same_json(limits: Limits) -> None:
    """Strings that end and escape wherever they like, around windows' borders: what is cut out fits into its place."""
    luck = random.Random(3)
    for _ in range(60):
        strings = []
        for _ in range(luck.randrange(1, 5)):
            length = luck.choice([10, 4096, LEAST_BYTES, 3 * LEAST_BYTES, 20 * LEAST_BYTES]) + luck.randrange(64)
            text = base64.b64encode(luck.randbytes(length * 3 // 4)).decode()
            places = sorted(luck.sample(range(len(text)), len(text) // luck.choice([100, 1000, 100_000])), reverse=True)
            for at in places:
                text = text[:at] + luck.choice(["\\/", "\\n", "\\u002b"]) + text[at:]
            strings.append(f'"{text}"')
        body = b'{"a":[%b]}' % ",".join(strings).encode()
        expected, cut = decode_body(body, limits.body), spooled(body)
        found = decode_body(cut, limits.body)
        for text, value in zip(expected["a"], found["a"], strict=True):
            assert text == value or b"".join(_bytes_of(value)).decode() == text


def _bytes_of(value: Any) -> list[bytes]:
    return [piece for part in value.parts() for piece in ((part.encode(),) if isinstance(part, str) else part.pieces())]


def test_errors_of_the_text_are_the_same(limits: Limits) -> None:
    for body in (
        b'{"a":"' + b"A" * 200_000 + b'","b":"' + b"a b" * 3_000_000 + b'"}',
        b'{"a":"' + b"A" * 200_000 + b'","b":' + b"[" * 200_000 + b"}",
        b'{"a":"' + b"A" * 200_000 + b'","b":' + b'{"a":[' * 400 + b"]}" * 400 + b"}",
        b"A" * 200_000,
        b" " * 200_000,
        b'{"a":"' + secrets.token_hex(100_000).encode() + b"\xff" + b'"}',
        b"[" + b'"' + b"A" * 200_000 + b'"]',
    ):
        cut = spooled(body)
        outcomes = [decoded(form, limits) for form in (cut, body)]
        assert outcomes[0] == outcomes[1] or not cut.is_used_up


def decoded(body: Any, limits: Limits) -> Any:
    try:
        return decode_body(body, limits.body)
    except RequestError as error:
        return str(error)


def memory_of_spools() -> int:
    """What this process, the gateway of these tests, has in spools."""
    links = [entry for entry in Path("/proc/self/fd").iterdir() if os.path.islink(entry) and "mmrt-spool" in os.readlink(entry)]
    return sum(os.stat(entry).st_blocks * 512 for entry in links)


def test_a_gateway_with_its_bodies_in_the_spool(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of JSON, a form, and a prompt that looks like base64: what is read is what was sent, and nothing of it stays."""
    monkeypatch.setattr(bodies, "_SPOOLED_BYTES", 1 << 16)
    heard: list[bytes] = []
    kept: list[int] = []

    async def test(scene: Any) -> None:
        async def script(play: Any) -> None:
            play.queue()
            heard.extend(await play.grant())
            kept.append(memory_of_spools())  # until its first text the pages may be lost
            play.prepare()
            play.text("Hello", "stop")

        scene.controller.script = script
        sound = base64.b64encode(DATA).decode()
        part = {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}}
        assert (await scene.post(scene.chat([part]))).status_code == 200
        assert (await scene.post(scene.chat([{"type": "text", "text": "A" * 200_000}, part]))).status_code == 400
        await scene.client.audio.transcriptions.create(model="tiny", file=("a.wav", DATA, "audio/wav"))
        before = len(scene.controller.plays)
        answer = await scene.post({"model": "tiny", "messages": [{"role": "user", "content": "A" * 200_000}]})
        assert "context" in answer.json()["error"]["message"] and len(scene.controller.plays) == before
        answer = await scene.post(scene.chat([part], user="A" * 200_000))
        assert answer.status_code == 400 or heard.pop() == DATA
        await asyncio.sleep(0.1)

    stage.run(test)
    assert heard == [DATA, DATA] and memory_of_spools() == 0 and min(kept[:2]) >= len(DATA)


def test_a_response_whose_body_is_read_twice(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that looks like base64 is text, and the items of the input are kept once."""
    monkeypatch.setattr(bodies, "_SPOOLED_BYTES", 1 << 16)
    items: list[list[Any]] = []

    async def test(scene: Any) -> None:
        async def script(play: Any) -> None:
            play.queue()
            play.prepare()
            play.text("Hello", "stop")

        scene.controller.script = script
        call = {"type": "function_call", "call_id": "one", "name": "f", "arguments": "{}", "status": "A" * 100_000}
        result = {"type": "function_call_output", "call_id": "one", "output": "Yes"}
        for given, more in ((["Hi"], {"user": "A" * 200_000}), (["Hi", call, result], {})):
            asked = [{"role": "user", "content": one} if isinstance(one, str) else one for one in given]
            answer = await scene.http.post("/v1/responses", json={"model": "tiny", "input": asked, **more})
            assert answer.status_code == 200, answer.text
            items.append((await scene.http.get(f"/v1/responses/{answer.json()['id']}/input_items")).json()["data"])
        long = await scene.http.post("/v1/responses", json={"model": "tiny", "input": "A" * 200_000})
        assert long.status_code == 400 and "context" in long.json()["error"]["message"], long.text

    stage.run(test)
    assert list(map(len, items)) == [1, 3]


@pytest.mark.parametrize("kind", ["whole", "stream", "response", "transcription"])
def test_media_are_given_back_once_the_answer_begins(kind: str, stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer may take minutes, and the bounds on memory no longer count them then."""
    monkeypatch.setattr(bodies, "_SPOOLED_BYTES", 1 << 16)
    kept: list[int] = []

    async def test(scene: Any) -> None:
        async def script(play: Any) -> None:
            play.queue()
            await play.grant()
            kept.append(memory_of_spools())
            play.prepare()
            play.text("Hello")
            with contextlib.suppress(TimeoutError):
                await scene.until(lambda: kept.append(memory_of_spools()) or not kept[-1])
            play.text(" you", "stop")

        scene.controller.script = script
        part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(DATA).decode(), "format": "wav"}}
        if kind == "transcription":
            await scene.client.audio.transcriptions.create(model="tiny", file=("a.wav", DATA, "audio/wav"))
        elif kind == "response":
            given = [{"role": "user", "content": [part]}]
            answer = await scene.http.post("/v1/responses", json={"model": "tiny", "input": given, "store": False})
            assert answer.status_code == 200, answer.text
        else:
            answer = await scene.post(scene.chat([part], stream=kind == "stream"))
            assert answer.status_code == 200, answer.text

    stage.run(test)
    assert kept[0] >= len(DATA) and kept[-1] == 0
