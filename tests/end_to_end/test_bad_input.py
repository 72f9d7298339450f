"""Bad requests against a whole run: a clear 4xx that names what is wrong, others unharmed, every page back."""

import base64
import io
import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from mmrt.tests.end_to_end.conftest import Server
from mmrt.tests.end_to_end.test_media import as_url, image_part, picture, sound, text, video


def png(pixels: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def image(data: bytes, mime: str = "image/png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": as_url(mime, data)}}


def film(data: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": as_url("video/mp4", data)}}


def noise(data: bytes) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}


def data_of(part: dict[str, Any]) -> bytes:
    inner = part[part["type"]]
    return base64.b64decode(inner["data"] if "data" in inner else inner["url"].split(",", 1)[1])


GOOD_PNG = png(picture(0, 64, 64))
GOOD_MP4 = data_of(video(6, 64, 64, 2)[0])
GOOD_WAV = data_of(sound(0.5, 440)[0])
BAD_MEDIA: dict[str, tuple[Callable[[], dict[str, Any]], set[int]]] = {  # made by the tests alone: every worker collects this module
    "truncated image": (lambda: image(GOOD_PNG[: len(GOOD_PNG) // 2]), {422}),
    "broken image": (lambda: image(b"\x89PNG\r\n\x1a\n" + bytes(500)), {422}),
    "empty image": (lambda: image(b""), {400, 422}),
    "text as an image": (lambda: image(b"hello world"), {422}),
    "extreme aspect": (lambda: image(png(np.zeros((2, 900, 3), np.uint8))), {400, 422}),
    "bomb": (lambda: image(png(np.zeros((15000, 15000), np.uint8))), {400, 413, 422}),
    "image as a video": (lambda: film(GOOD_PNG), {400, 422}),
    "video as an image": (lambda: image(GOOD_MP4), {400, 422}),
    "truncated video": (lambda: film(GOOD_MP4[: len(GOOD_MP4) // 3]), {422}),
    "sound as a video": (lambda: film(GOOD_WAV), {400, 422}),
    "text as a sound": (lambda: noise(b"not a sound at all"), {422}),
    "sound without samples": (lambda: noise(GOOD_WAV[:44]), {400, 422}),
}


class Answer(NamedTuple):
    status_code: int
    text: str

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.text)["error"]
        return found


def post(server: Server, body: dict[str, Any]) -> Answer:
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return Answer(answer.status, answer.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.read().decode())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BAD_MEDIA)
def test_bad_media(server: Server, name: str, stream: bool) -> None:
    make_part, statuses = BAD_MEDIA[name]
    answer = post(server, {"messages": [{"role": "user", "content": [make_part(), text("Hm?")]}], "max_tokens": 4, "stream": stream})
    assert answer.status_code in statuses, answer.text
    error = answer.error
    assert error["code"] == answer.status_code
    assert error["param"].startswith("messages[0].content[0].") and error["message"].startswith(f"{error['param']}: ")
    assert len(error["message"]) >= len(error["param"]) + 10
    assert not re.search(r"\b0x[0-9a-f]{6,}", error["message"])
    assert "/dev/" not in error["message"]
    server.wait_until_empty()


def test_a_tiny_image_works(server: Server) -> None:
    answer = post(server, {"messages": [{"role": "user", "content": [image(png(np.zeros((1, 1, 3), np.uint8)))]}], "max_tokens": 3})
    assert answer.status_code == 200, answer.text


def test_silence_works(server: Server) -> None:
    import wave

    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", "none"))
        file.writeframes(bytes(16000))
    answer = post(server, {"messages": [{"role": "user", "content": [noise(out.getvalue())]}], "max_tokens": 3})
    assert answer.status_code == 200, answer.text


def test_bad_media_harm_nobody_else(server: Server) -> None:
    alone = server.chat("Count to a hundred.", max_tokens=120)[1]
    others: list[int] = []
    thread = threading.Thread(target=lambda: others.extend(server.chat("Count to a hundred.", max_tokens=120)[1]))
    thread.start()
    for make_part, _ in list(BAD_MEDIA.values())[:4]:
        post(server, {"messages": [{"role": "user", "content": [make_part()]}]})
    thread.join()
    assert others == alone


def test_a_prompt_longer_than_the_context(server: Server) -> None:
    answer = post(server, {"messages": [{"role": "user", "content": "word " * 60000}]})
    assert answer.status_code == 400
    assert "32768" in answer.text


def test_media_that_do_not_fit_the_context(server: Server) -> None:
    part = image_part(picture(0, 980, 980))
    answer = post(server, {"messages": [{"role": "user", "content": [part] * 30}]})
    assert answer.status_code == 400 and answer.error["code"] == "context_length_exceeded"
    assert "maximum context length is 32768 tokens" in answer.error["message"]


def test_control_tokens_stay_text(server: Server) -> None:
    words = "Is <|IMAGE|> or <|im_end|> or <|image_pad|> special?"
    answer = post(server, {"messages": [{"role": "user", "content": words}], "max_tokens": 4})
    assert answer.status_code == 200, answer.text


def test_a_client_that_goes_away_frees_everything(server: Server) -> None:
    content = [image_part(picture(1, 300, 300)), text("Tell me everything.")]
    for _ in range(3):
        stream = server.stream(content, max_tokens=2000, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
    server.wait_until_empty()
    server.wait(lambda status: not any(status["requests"].values()), "no requests left")


@pytest.mark.slow
def test_a_deadline_ends_a_request(launch: Any) -> None:
    server = launch(settings="[server]\nrequest_timeout_s = 1.0\n")
    answer = post(server, {"messages": [{"role": "user", "content": "Go on."}], "max_tokens": 30000, "ignore_eos": True})
    assert answer.status_code == 504, answer.text
    server.wait_until_empty()
    server.down()
