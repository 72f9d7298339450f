"""Media by URL through the gateway: they are what they are as base64, and errors name the part and the limit."""

import asyncio
import base64
import io
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from mmrt.actors.gateway.reading.validation import Limits
from mmrt.runtime.config.fetch import FetchSection
from mmrt.runtime.config.sections import MediaSection
from mmrt.tests.actors.gateway.conftest import MAX_CONTEXT, MODEL
from mmrt.tests.actors.gateway.fetch.conftest import Server, answer, serving


def png(width: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, 40), (200, 10, width)).save(out, "PNG")
    return out.getvalue()


PICTURE = png(64)


@pytest.fixture
def bound() -> Iterator[socket.socket]:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        yield made


@pytest.fixture
def media(bound: socket.socket) -> MediaSection:
    return MediaSection(
        max_item_mib=1,
        max_request_pixels=10_000,
        fetch=FetchSection(
            allowed_hosts=("127.0.0.1", "localhost"),
            schemes=("http",),
            ports=(bound.getsockname()[1],),
            allowed_networks=("127.0.0.1/32",),
            max_items=3,
            max_request_mib=1,
            timeout_s=10,
        ),
    )


@pytest.fixture
def limits(media: MediaSection) -> Limits:
    return Limits(model_name=MODEL, kinds=("image", "video", "audio"), max_context=MAX_CONTEXT, media=media)


@pytest.fixture
def run(stage: Any, bound: socket.socket, media: MediaSection) -> Any:
    stage.configure("media", **{field: getattr(media, field) for field in media.__struct_fields__})

    def play(test: Any) -> None:
        async def scene(scene: Any) -> None:
            async with serving(bound=bound) as server:
                server.answers["/a.png"] = answer(PICTURE)
                await test(scene, server)

        stage.run(scene)

    return play


def part(url: str, kind: str = "image_url") -> dict[str, Any]:
    return {"type": kind, kind: {"url": url}}


def as_data(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def test_a_picture_is_the_same_by_url_and_as_base64(run: Any) -> None:
    """Bytes, digest, pixels and options; between others, in their order."""
    other = png(32)

    async def test(scene: Any, server: Server) -> None:
        for urls in ([as_data(other), server.url(), as_data(other)], [as_data(other), as_data(PICTURE), as_data(other)]):
            response = await scene.post(scene.chat([part(url) for url in urls]))
            assert response.status_code == 200, response.text
        by_url, in_base64 = scene.controller.plays.values()
        strip = [[msgspec.structs.replace(item, mime="") for item in play.spec.items] for play in (by_url, in_base64)]
        assert strip[0] == strip[1]
        assert by_url.spec.prompt_ids == in_base64.spec.prompt_ids
        assert by_url.spec.items[1].num_pixels == 64 * 40
        metrics = (await scene.http.get("/metrics")).text
        assert "\nmmrt_media_fetch_seconds_count 1.0" in metrics and '\nmmrt_media_items_total{kind="image"} 6.0' in metrics

    run(test)


def test_bytes_reach_the_pages(run: Any) -> None:
    async def test(scene: Any, server: Server) -> None:
        filled: list[bytes] = []

        async def script(play: Any) -> None:
            filled.extend(await play.grant())
            play.prepare()
            play.text("Yes", "stop")

        scene.controller.script = script
        server.answers["/a.wav"] = answer(b"RIFF" + bytes(5000))
        response = await scene.post(scene.chat([part(server.url()), part(server.url("/a.wav"), "audio_url")]))
        assert response.status_code == 200
        assert filled == [PICTURE, b"RIFF" + bytes(5000)]

    run(test)


def test_errors_name_the_part_and_the_limit(run: Any) -> None:
    async def test(scene: Any, server: Server) -> None:
        server.answers |= {"/large": answer(bytes((1 << 20) + 1)), "/half": answer(bytes(600_000)), "/wide": answer(png(250))}
        port = server.port
        for urls, status, at, said in (
            ([server.url("/none")], 422, 0, "its server answers with status 404"),
            ([server.url(), server.url("/large")], 413, 1, "has 1048577 bytes, the limit is 1048576 (media.max_item_mib)"),
            ([server.url("/half")] * 2, 413, None, "makes 1200000 bytes in all media that are fetched, the limit is 1048576"),
            ([server.url()] * 4, 400, 3, "more than 3 media to fetch in one request (media.fetch.max_items)"),
            ([server.url("/wide")], 200, 0, ""),
            ([f"http://10.0.0.1:{port}/"], 400, 0, 'has the host "10.0.0.1", which is not allowed (media.fetch.allowed_hosts)'),
            ([f"http://a:b@127.0.0.1:{port}/"], 400, 0, "has a user name or a password"),
            (["http://127.0.0.1/a.png"], 400, 0, f"has the port 80, allowed are {port} (media.fetch.ports)"),
            ([f"https://127.0.0.1:{port}/"], 400, 0, 'has the scheme "https", allowed are http (media.fetch.schemes)'),
            (["file:///etc/passwd"], 400, 0, "file: URLs are not read"),
            (["ftp://127.0.0.1/"], 400, 0, "expected a data: URL"),
        ):
            response = await scene.post(scene.chat([part(url) for url in urls]))
            assert response.status_code == status, response.text
            if status != 200:
                error = response.json()["error"]
                assert said in error["message"] and error["type"] == "invalid_request_error" and error["code"] == status
                path = error["param"]
                assert path in [f"messages[0].content[{number}].image_url.url" for number in ((0, 1) if at is None else (at,))]
                assert error["message"].startswith(f"{path}: ")

    run(test)


@pytest.mark.parametrize("hosts", [(), ("127.0.0.1",)])
def test_files_under_a_root(stage: Any, limits: Limits, tmp_path: Path, hosts: tuple[str, ...]) -> None:
    """With and without hosts that are allowed; redirects never lead to them."""
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "a.png").write_bytes(PICTURE)
    (tmp_path / "secret").write_bytes(PICTURE)
    roots = (str(tmp_path / "media"),)
    fetch = FetchSection(allowed_roots=roots, allowed_hosts=hosts, schemes=("http",), allowed_networks=("127.0.0.1/32",))
    media = MediaSection(fetch=fetch)
    stage.configure("media", fetch=fetch)
    stage._text = stage._text._replace(limits=msgspec.structs.replace(limits, media=media))

    async def test(scene: Any) -> None:
        response = await scene.post(scene.chat([part(f"file://{roots[0]}/a.png")]))
        assert response.status_code == 200, response.text
        assert scene.controller.play.spec.items[0].num_pixels == 64 * 40
        for url, status, said in (
            (f"file://{roots[0]}/../secret", 422, "is no file that may be read (media.fetch.allowed_roots)"),
            (f"file://{roots[0]}/none", 422, "is no file that may be read (media.fetch.allowed_roots)"),
            ("file://host/a.png", 400, 'is "file://host/a.png", expected file:///PATH without query and fragment'),
            ("http://10.0.0.1/", 400, "allowed_hosts"),
        ):
            response = await scene.post(scene.chat([part(url)]))
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (status, "messages[0].content[0].image_url.url")
            assert said in error["message"]

    stage.run(test)


def test_tokens_of_a_prompt_need_no_fetch(run: Any) -> None:
    async def test(scene: Any, server: Server) -> None:
        response = await scene.http.post("/tokenize", json=scene.chat([part(server.url())]))
        assert response.status_code == 200 and server.requests == []

    run(test)


def fetch_process() -> int:
    """The pid of the fetch process of the gateway in this process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    (pid,) = [int(pid) for pid in children if b"gateway.fetch.process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return pid


def test_a_client_that_goes_ends_its_fetch(run: Any) -> None:
    async def test(scene: Any, server: Server) -> None:
        opened, closed = asyncio.Event(), asyncio.Event()

        async def slow(writer: asyncio.StreamWriter) -> None:
            opened.set()
            await server.readers[-1].read()
            closed.set()

        server.answers["/slow"] = slow
        asking = asyncio.ensure_future(scene.post(scene.chat([part(server.url("/slow"))])))
        await opened.wait()
        asking.cancel()
        await closed.wait()
        assert scene.controller.plays == {}

    run(test)


def test_a_fetch_process_that_is_killed_harms_nobody(run: Any) -> None:
    """Killed in the middle: the picture is fetched again. Killed twice: an error of this request alone."""

    async def test(scene: Any, server: Server) -> None:
        opened, go_on = asyncio.Event(), asyncio.Event()

        async def slow(writer: asyncio.StreamWriter) -> None:
            writer.write(answer(PICTURE)[:100])
            opened.set()
            await go_on.wait()
            writer.write(answer(PICTURE)[100:])

        server.answers["/slow"] = slow
        for num_kills, status in ((1, 200), (2, 500)):
            go_on.clear()
            opened.clear()
            asking = asyncio.ensure_future(scene.post(scene.chat([part(server.url("/slow"))])))
            for _ in range(num_kills):
                await opened.wait()
                opened.clear()
                os.kill(fetch_process(), signal.SIGKILL)
                assert (await scene.post(scene.chat("Hi"))).status_code == 200
            go_on.set()
            response = await asking
            assert response.status_code == status, response.text
        error = response.json()["error"]
        assert error["message"] == "messages[0].content[0].image_url.url: the fetch process failed"
        assert (await scene.post(scene.chat([part(server.url())]))).status_code == 200

    run(test)


def test_it_is_off_by_default() -> None:
    assert FetchSection().allowed_hosts == () and MediaSection().fetch == FetchSection()
