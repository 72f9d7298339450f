"""Every family of the registry, served: killed stages change no token of what it sees and hears, also under guidance."""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest

from mmrt.models.config import load_model_config
from mmrt.models.families.registry import FAMILIES
from mmrt.tests.end_to_end.conftest import Server, launching
from mmrt.tests.end_to_end.test_media import image_part, picture, sound, text

pytestmark = pytest.mark.slow
OPTIONS: dict[str, Any] = {"max_tokens": 48, "extra_body": {"ignore_eos": True}}


@pytest.fixture(params=[family for family in FAMILIES if family != "null"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, checkpoints: Callable[..., Any]
) -> Iterator[Server]:
    with launching(tmp_path_factory, checkpoints) as start:
        yield start(request.param)


def question(kinds: Collection[str], seed: int) -> list[dict[str, Any]]:
    """With a picture and a sound, where the model takes them."""
    seen = [image_part(picture(seed, 90, 120))] if "image" in kinds else []
    heard = [sound(1.3, 300 + seed)[0]] if "audio" in kinds else []
    return [*seen, *heard, text("What is it? " * 5)]


def ids_of(stream: Any, at_the_first: Callable[[], None]) -> list[int]:
    """The ids of a stream; calls when the first has come."""
    found: list[int] = []
    for chunk in stream:
        ids = [id for choice in chunk.choices for id in (getattr(choice, "token_ids", None) or [])]
        if ids and not found:
            at_the_first()
        found += ids
    return found


def killed(server: Server, content: list[dict[str, Any]], options: dict[str, Any]) -> list[int]:
    """The ids of an answer: the encoder is killed as soon as it is asked, prefill and decode when the first token comes."""

    def kill() -> None:
        server.kill("prefill")
        server.kill("decode")

    stream = server.stream(content, **options)
    server.kill("encoder")
    return ids_of(stream, kill)


def test_killed_stages_change_no_token(server: Server) -> None:
    content = question(load_model_config(server.checkpoint).media_kinds, 1)
    plain = server.chat(content, **OPTIONS)[1]
    guided = {**OPTIONS, "extra_body": {**OPTIONS["extra_body"], "guidance_scale": 2.0, "negative_prompt": "a blue square"}}
    pair = server.chat(content, **guided)[1]
    assert len(plain) == len(pair) == OPTIONS["max_tokens"] and plain != pair
    assert killed(server, content, OPTIONS) == plain
    assert killed(server, content, guided) == pair
    assert server.chat(content, **OPTIONS)[1] == plain
    server.wait_until_empty()
