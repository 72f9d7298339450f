"""Downloads from a real server on loopback, which its rules allow; names have the answers that a test gives."""

import asyncio
import gzip
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest
import trustme
import uvloop

from mmrt.actors.gateway.fetch import download
from mmrt.actors.gateway.fetch.download import UNREACHABLE, Downloader, SystemNames
from mmrt.actors.gateway.reading.url_rules import FetchError
from mmrt.runtime.config.fetch import FetchSection
from mmrt.tests.actors.gateway.fetch.conftest import PICTURE, Misbehave, Server, answer, serving

MIB = 1 << 20


class Names:
    """A name server of the test's: the answers to a name, one after another; the last one stays."""

    def __init__(self, **answers: Sequence[list[str]]) -> None:
        self.answers = {name.replace("_", "."): list(lists) for name, lists in answers.items()}
        self.asked: list[str] = []

    async def addresses_of(self, name: str) -> list[str]:
        self.asked.append(name)
        if name == "slow.test":
            await asyncio.sleep(100)
        if not (answers := self.answers.get(name)):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return answers.pop(0) if len(answers) > 1 else answers[0]


class Scene:
    def __init__(self, server: Server, names: Names, tls: ssl.SSLContext | None) -> None:
        self.server = server
        self.names = names
        self.tls = tls
        ports = (80, 443, server.port)
        schemes = ("https", "http")
        self.rules = FetchSection(allowed_hosts=("*",), schemes=schemes, ports=ports, allowed_networks=("127.0.0.0/8",), timeout_s=10)

    async def get(self, url: str, **rules: Any) -> bytes:
        downloader = Downloader(msgspec.structs.replace(self.rules, **rules), self.names.addresses_of, self.tls)
        try:
            data = await downloader.download(url, MIB)
            downloader.release(len(data))
            return bytes(data)
        finally:
            assert downloader._num_bytes == 0
            await downloader.close()

    async def refusal(self, url: str, **rules: Any) -> tuple[int, str]:
        with pytest.raises(FetchError) as caught:
            await self.get(url, **rules)
        return caught.value.status, caught.value.message


def run(
    test: Callable[[Scene], Awaitable[None]],
    names: Names | None = None,
    tls: tuple[ssl.SSLContext | None, ssl.SSLContext | None] = (None, None),
) -> None:
    async def play() -> None:
        async with serving(tls[0]) as server:
            await test(Scene(server, names or Names(), tls[1]))

    uvloop.run(play())


def test_a_picture_and_its_request() -> None:
    async def test(scene: Scene) -> None:
        assert await scene.get(scene.server.url()) == PICTURE
        assert await scene.get(scene.server.url(host="pictures.test")) == PICTURE
        last = scene.server.requests[-1]
        assert f"Host: pictures.test:{scene.server.port}\r\n" in last
        assert "Accept-Encoding: identity\r\n" in last and "Python" not in last and "Cookie" not in last

    run(test, Names(pictures_test=[["127.0.0.1"]]))


@pytest.mark.parametrize(
    ("host", "networks"),
    [
        ("127.0.0.1", ()),
        ("[::1]", ("127.0.0.0/8",)),
        ("[::ffff:127.0.0.1]", ("127.0.0.0/8",)),
        ("[64:ff9b::7f00:1]", ("127.0.0.0/8",)),
        ("169.254.169.254", ("0.0.0.0/0",)),
        ("[fd00:ec2::254]", ("::/0",)),
    ],
)
def test_no_address_in_a_url_is_connected_to_unless_it_is_public(host: str, networks: tuple[str, ...]) -> None:
    async def test(scene: Scene) -> None:
        assert await scene.refusal(scene.server.url(host=host), allowed_networks=networks) == (422, UNREACHABLE)
        assert scene.server.requests == [] and scene.names.asked == []

    run(test)


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        ["8.8.8.8", "127.0.0.1"],
        ["::ffff:127.0.0.1"],
        ["169.254.169.254"],
        ["fe80::1%lo"],
        ["0.0.0.0"],
        ["2002:7f00:1::"],
    ],
)
def test_a_name_of_which_one_address_is_not_public(addresses: list[str]) -> None:
    async def test(scene: Scene) -> None:
        assert await scene.refusal(scene.server.url(host="inside.test"), allowed_networks=()) == (422, UNREACHABLE)
        assert scene.server.requests == [] and scene.names.asked == ["inside.test"]

    run(test, Names(inside_test=[addresses]))


def test_one_address_that_is_refused_refuses_the_name() -> None:
    """Even if the first one is allowed and answers."""

    async def test(scene: Scene) -> None:
        refused = await scene.refusal(scene.server.url(host="mixed.test"), allowed_networks=("127.0.0.1/32",))
        assert refused == (422, UNREACHABLE) and scene.server.requests == []

    run(test, Names(mixed_test=[["127.0.0.1", "10.0.0.1"]]))


def test_a_name_is_asked_for_once_and_its_answer_used() -> None:
    """DNS rebinding: the first answer is allowed, later ones are another machine's."""

    async def test(scene: Scene) -> None:
        assert await scene.get(scene.server.url(host="rebinding.test"), allowed_networks=("127.0.0.1/32",)) == PICTURE
        assert scene.names.asked == ["rebinding.test"]
        # Another request asks anew, and the new answer is checked.
        refused = await scene.refusal(scene.server.url(host="rebinding.test"), allowed_networks=("127.0.0.1/32",))
        assert refused == (422, UNREACHABLE) and len(scene.server.requests) == 1

    run(test, Names(rebinding_test=[["127.0.0.1"], ["127.0.0.2"]]))


def test_a_redirect_to_the_same_name_is_checked_anew() -> None:
    """Rebinding between a request and its redirect."""

    async def test(scene: Scene) -> None:
        scene.server.answers["/r"] = answer(b"", "302 Found", Location="/a.png")
        refused = await scene.refusal(scene.server.url("/r", "rebinding.test"), allowed_networks=("127.0.0.1/32",))
        assert refused == (422, UNREACHABLE)
        assert scene.server.paths == ["/r"] and len(scene.names.asked) == 2

    run(test, Names(rebinding_test=[["127.0.0.1"], ["127.0.0.2"]]))


def test_a_refused_address_one_without_a_server_and_no_name_read_alike() -> None:
    """A request cannot map the network."""

    async def test(scene: Scene) -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            nobody = closed.getsockname()[1]
            said = [
                await scene.refusal(f"http://127.0.0.1:{nobody}/", ports=(nobody,)),
                await scene.refusal(f"http://127.0.0.1:{nobody}/", ports=(nobody,), allowed_networks=()),
                await scene.refusal(scene.server.url(), allowed_networks=()),
                await scene.refusal(scene.server.url(host="unknown.test")),
            ]
        assert said == [(422, UNREACHABLE)] * 4

    run(test)


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See", "307 Temporary", "308 Permanent"])
def test_redirects_are_followed(status: str) -> None:
    async def test(scene: Scene) -> None:
        last = answer(b"", status, Location=scene.server.url())
        scene.server.answers |= {"/1": answer(b"x" * 100_000, status, Location="/2"), "/2": last}
        assert await scene.get(scene.server.url("/1")) == PICTURE
        assert scene.server.paths == ["/1", "/2", "/a.png"]

    run(test)


@pytest.mark.parametrize(
    "location",
    [
        "file:///etc/passwd",
        "ftp://127.0.0.1/a",
        "data:image/png;base64,iVBORw0KGgo=",
        "gopher://127.0.0.1/",
        "http://user:secret@127.0.0.1/",
        "http://127.0.0.1:22/",
        "//127.0.0.1:22/",
        "http://2130706433/",
        "http://127.0.0.1\\@other.test/",
        "http://[::1",
        "",
    ],
)
def test_redirects_to_what_may_not_be_fetched(location: str) -> None:
    async def test(scene: Scene) -> None:
        scene.server.answers["/r"] = answer(b"", "302 Found", Location=location)
        assert await scene.refusal(scene.server.url("/r")) == (422, "is redirected to a URL that may not be fetched")
        assert len(scene.server.requests) == 1

    run(test)


def test_redirects_to_hosts_and_addresses_that_are_not_allowed() -> None:
    async def test(scene: Scene) -> None:
        scene.server.answers["/r"] = answer(b"", "302 Found", Location=scene.server.url(host="inside.test"))
        said = await scene.refusal(scene.server.url("/r"), allowed_hosts=("127.0.0.1",))
        assert said == (422, "is redirected to a URL that may not be fetched") and scene.names.asked == []
        assert await scene.refusal(scene.server.url("/r"), allowed_networks=("127.0.0.1/32",)) == (422, UNREACHABLE)
        assert set(scene.server.paths) == {"/r"}

    run(test, Names(inside_test=[["127.0.0.3"]]))


def test_too_many_redirects() -> None:
    async def test(scene: Scene) -> None:
        scene.server.answers["/r"] = answer(b"", "302 Found", Location="/r")
        said = await scene.refusal(scene.server.url("/r"), max_redirects=2)
        assert said == (422, "is redirected more than 2 times (media.fetch.max_redirects)") and len(scene.server.requests) == 3
        assert (await scene.refusal(scene.server.url("/r"), max_redirects=0))[1].startswith("is redirected more than 0 times")

    run(test)


async def endless(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while not writer.is_closing():
        writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        await writer.drain()


async def without_length(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + PICTURE)


BROKEN = "its server broke the answer off, or sent no valid HTTP"
MISBEHAVIOURS: list[tuple[bytes | Misbehave, int, str]] = [
    (endless, 413, "has more than 1048576 bytes, the limit (media.max_item_mib)"),
    (answer(b"x" * (MIB + 1)), 413, "has 1048577 bytes, the limit is 1048576 (media.max_item_mib)"),
    (answer(b"x", Content_Length=str(1 << 50)), 413, f"has {1 << 50} bytes, the limit is"),
    (answer(b"short", Content_Length="5000"), 422, BROKEN),
    (answer(b"x", Content_Length="-5"), 422, UNREACHABLE),
    (answer(b"x", Content_Length="5, 6"), 422, UNREACHABLE),
    (answer(b""), 422, "is empty"),
    (answer(gzip.compress(bytes(8 * MIB)), Content_Encoding="gzip"), 422, "sends Content-Encoding 'gzip'"),
    (answer(b"x", Content_Encoding="br"), 422, "sends Content-Encoding 'br'"),
    (answer(b"no", "404 Not Found"), 422, "its server answers with status 404"),
    (answer(b"no", "500 Error"), 422, "status 500"),
    (answer(b"part", "206 Partial Content"), 422, "status 206"),
    (b"SSH-2.0-OpenSSH_9.9\r\n", 422, UNREACHABLE),
    (b"", 422, UNREACHABLE),
    (answer(b"x", X=("y" * 100_000)), 422, UNREACHABLE),
    (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200_000 + b"\r\n", 422, UNREACHABLE),
]


@pytest.mark.parametrize(("misbehaviour", "status", "said"), MISBEHAVIOURS, ids=range(len(MISBEHAVIOURS)))
def test_servers_that_misbehave(misbehaviour: bytes | Misbehave, status: int, said: str) -> None:
    async def test(scene: Scene) -> None:
        scene.server.answers["/a.png"] = misbehaviour
        got = await scene.refusal(scene.server.url())
        assert got[0] == status and said in got[1]

    run(test)


def test_bodies_of_unknown_length() -> None:
    async def test(scene: Scene) -> None:
        scene.server.answers["/a.png"] = without_length
        assert await scene.get(scene.server.url()) == PICTURE

    run(test)


async def trickle(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    while not writer.is_closing():
        writer.write(b"x")
        await asyncio.sleep(0.02)


async def silence(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3)


async def half_headers(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nA: ")
    while not writer.is_closing():
        writer.write(b"x")
        await asyncio.sleep(0.02)


async def hops(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(0.1)
    writer.write(answer(b"", "302 Found", Location="/a.png"))


@pytest.mark.parametrize(
    ("slowness", "said"),
    [
        (trickle, "did not arrive within 0.5 s (media.fetch.timeout_s)"),
        (silence, UNREACHABLE),
        (half_headers, UNREACHABLE),
        (hops, UNREACHABLE),  # each redirect is quick enough; all of them are not
    ],
)
def test_slow_servers_have_one_deadline_for_all(slowness: Misbehave, said: str) -> None:
    async def test(scene: Scene) -> None:
        scene.server.answers["/a.png"] = slowness
        assert await scene.refusal(scene.server.url(), timeout_s=0.5, max_redirects=20) == (422, said)

    run(test)


def test_slow_name_servers_as_well() -> None:
    async def test(scene: Scene) -> None:
        assert await scene.refusal(scene.server.url(host="slow.test"), timeout_s=0.2) == (422, UNREACHABLE)

    run(test)


def test_the_environment_names_no_proxy_and_no_password(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    os.chmod(tmp_path / "netrc", 0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))

    async def test(scene: Scene) -> None:
        async with serving() as proxy:
            for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
                monkeypatch.setenv(name, proxy.url(""))
            assert await scene.get(scene.server.url()) == PICTURE
            assert proxy.requests == [] and "Authorization" not in scene.server.requests[0]

    run(test)


def test_media_that_are_held_have_a_common_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "MAX_HELD_BYTES", len(PICTURE) + 10)

    async def test(scene: Scene) -> None:
        downloader = Downloader(scene.rules, scene.names.addresses_of)
        first = await downloader.download(scene.server.url(), MIB)
        with pytest.raises(FetchError, match="too many large media") as caught:
            await downloader.download(scene.server.url(), MIB)
        assert caught.value.status == 503
        downloader.release(len(first))
        assert await downloader.download(scene.server.url(), MIB) == PICTURE
        await downloader.close()

    run(test)


def test_tls_keeps_the_name_for_sni_and_the_certificate() -> None:
    authority, asked = trustme.CA(), list[str | None]()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("pictures.test").configure_cert(server)
    authority.configure_trust(client)
    server.sni_callback = lambda connection, name, context: asked.append(name)

    async def test(scene: Scene) -> None:
        url = scene.server.url(host="pictures.test", scheme="https")
        assert await scene.get(url) == PICTURE and asked == ["pictures.test"]
        assert await scene.refusal(scene.server.url(host="other.test", scheme="https")) == (422, UNREACHABLE)
        scene.tls = None  # the system's authorities do not know this one
        assert await scene.refusal(url) == (422, UNREACHABLE)
        assert len(scene.server.requests) == 1

    run(test, Names(pictures_test=[["127.0.0.1"]], other_test=[["127.0.0.1"]]), (server, client))


def test_the_system_resolves_names() -> None:
    async def test(scene: Scene) -> None:
        assert "127.0.0.1" in await SystemNames(1).addresses_of("localhost")

    run(test)
