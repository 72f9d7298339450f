"""Requests to the run during a storm: a fixed catalogue of text, image, video, sound and guided requests, and of what else decode and
detokenizer keep of an answer: counts for penalties, the state of a grammar, the beginning of a stop string.

Pure. Each has one right answer: it is greedy, or seeded, and computed in float32. Called by ``storm`` and by tests, which have
transformers confirm the answers.
"""

import base64
from typing import Any

import msgspec

from mmrt.bench.serve.samples import make_audio, make_image, make_video

_WORDS = "river stone window paper orange silence engine morning letter garden bridge winter copper table signal mirror"

_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 8},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
_DRAWN = {"temperature": 1.0, "seed": 9}
_JSON = {"type": "json_schema", "json_schema": {"name": "thing", "schema": _SCHEMA}}


class ChaosRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``body`` is complete except for the model's name; ``is_whole``: not streamed."""

    name: str
    body: dict[str, Any]
    is_whole: bool = False

    @property
    def has_fixed_length(self) -> bool:
        """True if its answer has as many tokens as it asks for, whatever they are."""
        return bool(self.body["ignore_eos"])


def catalogue(max_tokens: int = 120) -> list[ChaosRequest]:
    """All requests. The longest stream has ``max_tokens`` tokens."""
    long, middle, short = max_tokens, max(8, max_tokens // 3), max(4, max_tokens // 8)
    picture, other = _image(make_image(1, 112, 84)), _image(make_image(2, 196, 140))
    film = _data("video_url", "video/mp4", make_video(3, 112, 84, 24, 4))
    sound = {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode(make_audio(4, 2.5)).decode(), "format": "wav"},
    }
    ask = _text("What is this?")
    entries = {
        "text": _body("Tell a long story.", long),
        "text-seeded": _body("Something surprising, please.", long, temperature=1.0, top_p=0.95, seed=11),
        "text-long-prompt": _body(" ".join([_WORDS] * 12), middle),
        "text-short": _body("Say something.", short),
        "image": _body([picture, ask], middle),
        "images": _body([_text("First"), picture, _text("then"), other, ask], middle, temperature=0.8, seed=5),
        "video": _body([film, _text("What moves?")], middle),
        "audio": _body([sound, _text("What do you hear?")], middle),
        "everything": _body([picture, film, sound, _text("Do they match?")], short),
        "guided": _body("A guided answer.", long, guidance_scale=2.0, negative_prompt="Nothing."),
        "guided-image": _body([picture, ask], middle, guidance_scale=1.5, temperature=0.7, seed=3),
        "penalties": _body("Say it otherwise.", long, frequency_penalty=1.5, repetition_penalty=1.3, **_DRAWN),
        "json": _body("An object.", long, ignore_eos=False, response_format=_JSON, **_DRAWN),
        "stop": _body("Stop in time.", long, ignore_eos=False, stop=["e"], min_tokens=short, **_DRAWN),
        "choices": _body("One of several.", middle, n=2, **_DRAWN),
        "conversation": {
            **_body("", middle, **_DRAWN),
            "messages": [_said("user", "Who are you?"), _said("assistant", " ".join([_WORDS] * 3)), _said("user", "And then?")],
        },
        "whole": _body("Not streamed.", middle),
    }
    return [ChaosRequest(name=name, body=body, is_whole=name == "whole") for name, body in entries.items()]


def _body(content: str | list[dict[str, Any]], max_tokens: int, **more: object) -> dict[str, Any]:
    options = {"temperature": 0.0, "ignore_eos": True, "return_token_ids": True, "max_tokens": max_tokens, **more}
    return {"messages": [{"role": "user", "content": content}], **options}


def _said(role: str, words: str) -> dict[str, Any]:
    return {"role": role, "content": words}


def _text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def _image(data: bytes) -> dict[str, Any]:
    return _data("image_url", "image/png", data)


def _data(kind: str, mime: str, data: bytes) -> dict[str, Any]:
    return {"type": kind, kind: {"url": f"data:{mime};base64,{base64.b64encode(data).decode()}"}}
