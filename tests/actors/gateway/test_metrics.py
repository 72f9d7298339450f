"""Metrics of media: what was taken, and what requests were refused for."""

import base64
from typing import Any

import pytest

from mmrt.actors.gateway.watching.actor_metrics import ActorMetrics
from mmrt.actors.gateway.watching.metrics import Metrics
from mmrt.shm.controller_stats import StatsSnapshot
from mmrt.shm.run_directory import RunDirectory
from mmrt.shm.status import ActorTable


def data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


IMAGE = {"type": "image_url", "image_url": {"url": data_url("image/png", b"x" * 1000)}}
SOUND = {"type": "audio_url", "audio_url": {"url": data_url("audio/wav", b"y" * 500)}}
TEXT = {"type": "text", "text": "what is it"}


async def samples_of(scene: Any) -> dict[str, str]:
    text = (await scene.http.get("/metrics")).text
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))


def test_media_that_are_taken(stage: Any) -> None:
    async def script(play: Any) -> None:
        await play.grant()
        play.prepare(100)
        play.text("a cat", "length")

    async def test(scene: Any) -> None:
        scene.controller.script = script
        found = await samples_of(scene)
        assert found['mmrt_media_items_total{kind="video"}'] == "0.0", "rates begin with zero"
        assert (await scene.post(scene.chat([TEXT, IMAGE, SOUND, IMAGE], n=2))).status_code == 200
        found = await samples_of(scene)
        assert found['mmrt_media_items_total{kind="image"}'] == "2.0", "the choices share them"
        assert found['mmrt_media_bytes_total{kind="image"}'] == "2000.0"
        assert found['mmrt_media_items_total{kind="audio"}'] == "1.0" and found['mmrt_media_bytes_total{kind="audio"}'] == "500.0"
        assert found['mmrt_media_refused_total{kind="image"}'] == found['mmrt_media_refused_total{kind="audio"}'] == "0.0"

    stage.run(test)


@pytest.mark.parametrize(
    ("part", "kind", "status"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,!"}}, "image", 400),
        ({"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}}, "video", 400),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "audio", 400),
    ],
)
def test_media_refused_by_the_gateway(stage: Any, part: dict[str, Any], kind: str, status: int) -> None:
    async def test(scene: Any) -> None:
        assert (await scene.post(scene.chat([TEXT, part]))).status_code == status
        found = await samples_of(scene)
        refused = {name: value for name, value in found.items() if name.startswith("mmrt_media_refused_total") and value != "0.0"}
        assert refused == {f'mmrt_media_refused_total{{kind="{kind}"}}': "1.0"}
        assert found[f'mmrt_media_items_total{{kind="{kind}"}}'] == "0.0"
        assert found[f'mmrt_admission_rejections_total{{reason="{status}"}}'] == "1.0"

    stage.run(test)


@pytest.mark.parametrize(("param", "num_refused"), [("messages[0].content[2].audio_url.url", 1), ("messages", 0)])
def test_media_refused_when_they_are_decoded(stage: Any, param: str, num_refused: int) -> None:
    async def script(play: Any) -> None:
        await play.grant()
        play.fail(400, "not a sound", param=param)

    async def test(scene: Any) -> None:
        scene.controller.script = script
        assert (await scene.post(scene.chat([TEXT, IMAGE, SOUND]))).status_code == 400
        found = await samples_of(scene)
        assert found['mmrt_media_refused_total{kind="audio"}'] == f"{num_refused}.0"
        assert found['mmrt_media_refused_total{kind="image"}'] == "0.0"

    stage.run(test)


def test_what_actors_count(run: RunDirectory) -> None:
    table = ActorTable.create(run, ["gateway", "encoder", "decode", "decode.1"])
    table.writer("decode", 1).set_guesses(70, 50)
    table.writer("encoder", 3).set_borrowed(1_500_000_000)
    metrics = Metrics("tiny", StatsSnapshot, dict[str, int])
    metrics.add(ActorMetrics(table))
    lines = [line for line in metrics.render().decode().splitlines() if "guesses" in line or "borrowed" in line]
    assert [line for line in lines if not line.startswith("#")] == [
        'mmrt_guesses_checked_total{actor="decode"} 70.0',
        'mmrt_guesses_checked_total{actor="decode.1"} 0.0',
        'mmrt_guesses_right_total{actor="decode"} 50.0',
        'mmrt_guesses_right_total{actor="decode.1"} 0.0',
        'mmrt_borrowed_core_seconds_total{actor="encoder"} 1.5',
        'mmrt_borrowed_core_seconds_total{actor="decode"} 0.0',
        'mmrt_borrowed_core_seconds_total{actor="decode.1"} 0.0',
    ]
    table.close()
