"""The digests by which caches know media and tenants, as the controller gets them for requests over HTTP."""

import base64
import hashlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from mmrt.actors.gateway.reading import cache_keys
from mmrt.actors.gateway.reading.validation import Limits
from mmrt.models.media_config import VisionRules
from mmrt.runtime.bus.messages import RequestSpec
from mmrt.runtime.config.sections import MediaSection
from mmrt.shm.controller_stats import StatsSnapshot

PICTURE = b"\x89PNG: no one decodes it here"


@pytest.fixture
def limits(request: pytest.FixtureRequest) -> Limits:
    rules = getattr(request, "param", VisionRules())
    return Limits(model_name="tiny", kinds=("image", "video", "audio"), max_context=2048, media=MediaSection(), vision_rules=rules)


def part(data: bytes = PICTURE, kind: str = "image", mime: str = "png", **options: Any) -> dict[str, Any]:
    url = f"data:{kind}/{mime};base64,{base64.b64encode(data).decode()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}, **options}


async def spec_of(scene: Any, path: str = "/v1/chat/completions", headers: dict[str, str] | None = None, **body: Any) -> RequestSpec:
    known = set(scene.controller.plays)
    answer = await scene.http.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    (key,) = set(scene.controller.plays) - known
    spec: RequestSpec = scene.controller.plays[key].spec
    return spec


async def chat(scene: Any, *parts: Any, **more: Any) -> RequestSpec:
    return await spec_of(scene, messages=[{"role": "user", "content": [*parts, {"type": "text", "text": "hi"}]}], **more)


def test_content_tells_bytes_kind_and_options_apart(stage: Any) -> None:
    async def test(scene: Any) -> None:
        async def content(*parts: Any, **more: Any) -> list[bytes]:
            return [item.content for item in (await chat(scene, *parts, **more)).items]

        first, again, renamed, other = await content(part(), part(), part(mime="jpeg"), part(PICTURE + b"."))
        assert len(first) == hashlib.sha256().digest_size
        assert first == again == renamed != other, "within a kind, the stated type changes nothing"
        (bounded,) = await content(part(max_pixels=100_000))
        (for_all,) = await content(part(), mm_processor_kwargs={"max_pixels": 100_000})
        (smaller,) = await content(part(max_pixels=90_000))
        (video,), (sound,) = await content(part(kind="video", mime="mp4")), await content(part(kind="audio", mime="wav"))
        (heard,) = await content(part(kind="video", mime="mp4", use_audio_in_video=True))
        (half,), (idle,) = await content(part(token_share=0.5)), await content(part(token_share="auto"))
        assert idle == first, "without load a picture has all its tokens"
        assert bounded == for_all and len({first, other, bounded, smaller, video, sound, heard, half}) == 8

    stage.run(test)


def test_under_load_a_picture_has_a_share_of_its_tokens(stage: Any) -> None:
    """VL9: where the request leaves it to the load, and the usage says so. The objective is 4 s."""

    async def test(scene: Any) -> None:
        scene.stats.publish(StatsSnapshot(work_left_s=3.0))
        body = {"messages": [{"role": "user", "content": [part(token_share="auto"), part(), {"type": "text", "text": "hi"}]}]}
        answer = (await scene.http.post("/v1/chat/completions", json=body)).json()
        (play,) = scene.controller.plays.values()
        assert [item.options.token_share for item in play.spec.items] == [0.5, 1.0]
        assert answer["usage"]["prompt_tokens_details"]["media_share"] == 0.5
        ((fewer, whole),) = [[item.content for item in play.spec.items]]
        (asked,) = (await chat(scene, part(token_share=0.5))).items
        assert asked.content == fewer != whole, "a cache knows it again, whoever asked for the share"
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PICTURE).decode()}
        message = {"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "hi"}]}
        body = {"max_tokens": 4, "messages": [message], "mm_processor_kwargs": {"token_share": "auto"}}
        assert (await scene.http.post("/v1/messages", json=body)).json()["usage"]["media_share"] == 0.5
        scene.stats.publish(StatsSnapshot(work_left_s=30.0))
        (least,) = (await chat(scene, part(token_share="auto"))).items
        assert least.options.token_share == 0.25

    stage.run(test)


@pytest.mark.parametrize("limits", [VisionRules(cuts_alone=True), VisionRules()], indirect=True)
def test_a_picture_among_others_is_another_where_models_cut_only_one_alone(stage: Any, limits: Limits) -> None:
    """Whatever else there is, and however the others came; elsewhere the caches know it again."""
    assert limits.vision_rules is not None
    cuts_alone = limits.vision_rules.cuts_alone

    async def test(scene: Any) -> None:
        (alone,) = (await chat(scene, part())).items
        first, second = (await chat(scene, part(), part(PICTURE + b"."))).items
        with_video, video = (await chat(scene, part(), part(kind="video", mime="mp4"))).items
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PICTURE).decode()}
        image = {"type": "image", "source": source}
        message = {"role": "user", "content": [image, image, {"type": "text", "text": "hi"}]}
        there, again = (await spec_of(scene, "/v1/messages", max_tokens=4, messages=[message])).items
        assert [item.options.is_among_others for item in (alone, first, second, with_video, video, there, again)] == [
            *(False, cuts_alone, cuts_alone, False, False, cuts_alone, cuts_alone)
        ]
        assert alone.content == with_video.content != second.content and first.content == there.content == again.content
        assert (first.content == alone.content) is not cuts_alone

    stage.run(test)


def test_a_large_medium_is_hashed_once_and_not_in_the_loop(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    sha256 = hashlib.sha256

    def counted(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return sha256(*arguments)

    monkeypatch.setattr(cache_keys, "hashlib", SimpleNamespace(sha256=counted, blake2b=hashlib.blake2b))  # not that of other modules

    async def test(scene: Any) -> None:
        await chat(scene, part(bytes(100_000)))
        assert len(threads) == 1 and threads[0] is not threading.main_thread()

    stage.run(test)


def test_salts_tell_tenants_apart(stage: Any) -> None:
    async def test(scene: Any) -> None:
        none, null = await chat(scene), await chat(scene, cache_salt=None)
        assert none.salt == null.salt == b""
        mine, again, yours = [(await chat(scene, cache_salt=salt)).salt for salt in ("mine", "mine", "your\u0000s")]
        text = await spec_of(scene, "/v1/completions", prompt="hi", cache_salt="mine")
        assert mine == again == text.salt and len({b"", mine, yours}) == 3
        assert (await chat(scene, cache_salt="é" * 128)).salt

    stage.run(test)


def test_the_api_key_is_a_salt(stage: Any) -> None:
    stage.configure("server", api_key="mine")

    async def test(scene: Any) -> None:
        headers = {"Authorization": "Bearer mine"}
        by_key = (await chat(scene, headers=headers)).salt
        by_salt = (await chat(scene, headers=headers, cache_salt="mine")).salt
        assert by_key and b"mine" not in by_key and by_salt != by_key

    stage.run(test)


@pytest.mark.parametrize(
    ("salt", "message"),
    [
        ("", 'cache_salt: "" has 0 bytes in UTF-8, allowed are 1 to 256'),
        ("x" * 257, f'cache_salt: "{"x" * 59}… has 257 bytes in UTF-8, allowed are 1 to 256'),
        ("é" * 129, "has 258 bytes in UTF-8, allowed are 1 to 256"),
        (7, "cache_salt: expected a string, got an integer"),
        (["a"], "cache_salt: expected a string, got an array"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_bad_salts_are_refused(stage: Any, path: str, salt: Any, message: str) -> None:
    asked = {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}

    async def test(scene: Any) -> None:
        answer = await scene.http.post(path, json={**asked, "cache_salt": salt})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == "cache_salt" and message in error["message"]
        assert not scene.controller.plays

    stage.run(test)
