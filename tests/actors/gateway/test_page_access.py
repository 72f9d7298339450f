"""Whose a connection is, by the kernel: the user of the run sees its page without a key; others need the key or the token."""

import asyncio
import os
import pwd
import secrets
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

from mmrt.actors.gateway.page.guard import Access, check_reader
from mmrt.actors.gateway.page.peers import user_of
from mmrt.runtime.config.sections import ServerSection
from mmrt.runtime.errors import RequestError
from mmrt.runtime.process.page_token import TOKEN_NAME, is_token_needed, page_token

NOBODY = pwd.getpwnam("nobody").pw_uid
PYTHON = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable  # another user may not reach ours
ASK = """
import http.client, sys
method, port, path, *headers = sys.argv[1:]
connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=10)
connection.request(method, path, headers=dict(header.split(": ") for header in headers), body=b"{}" if method == "POST" else None)
answer = connection.getresponse()
print(answer.status, answer.read().decode())
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def pair(address: str) -> tuple[socket.socket, socket.socket]:
    """A client's socket, and the server's end of it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server(
        ("127.0.0.1" if "ffff" in address else address, 0), family=socket.AF_INET if "ffff" in address else family
    ) as door:
        client = socket.socket(family)
        client.connect((address, door.getsockname()[1]))
        return client, door.accept()[0]


def user_at(end: socket.socket) -> int | None:
    return user_of(end.getpeername(), end.getsockname())


@pytest.mark.parametrize("address", ["127.0.0.1", "127.5.5.5", "::1", "::ffff:127.0.0.1"])
def test_the_kernel_knows_the_user_at_the_other_end(address: str) -> None:
    client, end = pair(address)
    with end, client:
        assert user_at(end) == os.geteuid()
        client.shutdown(socket.SHUT_WR)
        assert user_at(end) is None, "it is being closed: soon its user is forgotten, which the kernel gives as 0"
    time.sleep(0.05)


def test_a_socket_that_listens_at_the_same_address_is_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        assert user_of(door.getsockname(), ("127.0.0.1", 9)) is None
        assert user_of(("192.0.2.1", 7), door.getsockname()) is None and user_of(("fe80::1%lo", 7), ("::1", 8)) is None


def as_nobody(*arguments: str) -> str:
    command = [PYTHON, "-c", ASK, *arguments]
    return subprocess.run(command, user=NOBODY, cwd="/", capture_output=True, text=True, timeout=30, check=True).stdout


@needs_root
@pytest.mark.parametrize("api_key", ["", "secret"])
def test_another_user_of_this_machine_needs_the_key_or_the_token(stage: Any, api_key: str) -> None:
    stage.configure("server", api_key=api_key)

    async def test(scene: Any) -> None:
        port, token = scene.url.rpartition(":")[2], page_token(scene.actor.run.path)
        asks = [("GET", "/page/state"), ("GET", "/page/trace/1"), ("POST", "/page/kill/decode"), ("POST", "/page/restart/decode")]
        for method, path in asks:
            refused = await asyncio.to_thread(as_nobody, method, port, path, "Content-Type: application/json")
            assert refused.startswith("401 " if api_key else "403 "), refused
            assert api_key or "you seem to be another one; open the address with #token=" in refused
            right = f"Authorization: Bearer {api_key}" if api_key else f"X-Mmrt-Token: {token}"
            let_in = await asyncio.to_thread(as_nobody, method, port, path, "Content-Type: application/json", right)
            assert let_in.startswith({"/page/state": "200 ", "/page/trace/1": "404 "}.get(path, "503 ")), (
                let_in
            )  # no supervisor is there
        wrong = await asyncio.to_thread(as_nobody, "GET", port, "/page/state", f"X-Mmrt-Token: {token}x")
        assert wrong.startswith("401 " if api_key else "403 ")
        if not api_key:
            assert (await scene.http.get("/page/state")).status_code == 200, "the run's own user"
            open_to_all = await asyncio.to_thread(as_nobody, "GET", port, "/v1/models")
            assert open_to_all.startswith("200 "), "the API itself is open to programs of this machine"

    stage.run(test)


def test_no_token_opens_nothing() -> None:
    """As where the run directory has no room for one."""
    http = make_mocked_request("GET", "/page/state", headers={"Host": "192.0.2.7", "X-Mmrt-Token": ""})
    with pytest.raises(RequestError, match="the token is not this run's"):
        check_reader(http, Access(False, "", lambda _: True))


def test_a_token_opens_what_comes_from_elsewhere(stage: Any) -> None:
    """As through the published port of a container: by another name, behind a proxy. Other pages stay out."""

    async def test(scene: Any) -> None:
        token = {"X-Mmrt-Token": page_token(scene.actor.run.path)}
        elsewhere = {"Host": "192.0.2.7:8000", "X-Forwarded-For": "10.0.0.1"}
        assert (await scene.http.get("/page/state", headers=elsewhere)).status_code == 403
        assert (await scene.http.get("/page/state", headers={**elsewhere, **token})).status_code == 200
        for wrong in ("", "x", token["X-Mmrt-Token"][:-1]):
            assert (await scene.http.get("/page/state", headers={"X-Mmrt-Token": wrong})).status_code == 403
        assert (await scene.http.get("/page/state", headers={**token, "Origin": "https://evil.example"})).status_code == 403

    stage.run(test)


def test_the_token_is_made_once_and_for_its_user_alone(tmp_path: Path) -> None:
    token = page_token(tmp_path)
    assert len(token) >= 32 and page_token(tmp_path) == token
    assert stat.S_IMODE((tmp_path / TOKEN_NAME).stat().st_mode) == 0o600 and len(list(tmp_path.iterdir())) == 1
    assert page_token(tmp_path / "gone") == ""


@pytest.mark.parametrize(
    ("fields", "is_needed"),
    [
        ({}, False), ({"host": "localhost"}, False), ({"host": "::1"}, False), ({"host": "0.0.0.0"}, True), ({"host": "::"}, True),
        ({"host": "box"}, True), ({"host": "0.0.0.0", "api_key": "k"}, False), ({"host": "0.0.0.0", "page": False}, False),
    ],
)  # fmt: skip
def test_where_a_token_is_needed(fields: Any, is_needed: bool) -> None:
    assert is_token_needed(ServerSection(**fields)) == is_needed


@pytest.fixture
def other_network() -> Iterator[tuple[str, str]]:
    """Another network namespace of this machine, as a container has: its name, and our address for it."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    name = f"mmrt-{secrets.token_hex(3)}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        pytest.skip("no network namespace can be made")
    net = f"10.213.{secrets.randbelow(250)}"
    try:
        for line in (
            f"link add {name} type veth peer name e0 netns {name}",
            f"addr add {net}.1/30 dev {name}",
            f"link set {name} up",
            f"-n {name} addr add {net}.2/30 dev e0",
            f"-n {name} link set e0 up",
        ):
            if subprocess.run(["ip", *line.split()], capture_output=True).returncode:
                pytest.skip(f"ip {line}")
        yield name, f"{net}.1"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def test_the_user_of_another_network_namespace_is_unknown(other_network: tuple[str, str]) -> None:
    name, address = other_network
    with socket.create_server((address, 0)) as door:
        door.settimeout(20)
        code = f"import socket; socket.create_connection(({address!r}, {door.getsockname()[1]})).recv(1)"
        with subprocess.Popen(["ip", "netns", "exec", name, PYTHON, "-c", code]) as client:
            end, _ = door.accept()
            with end:
                assert user_at(end) is None
            client.wait(10)
