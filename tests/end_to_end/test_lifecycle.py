"""``mmrt`` as a user types it: up, status, restart, logs, down; what cannot start says why; nothing is left behind."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmrt.tests.end_to_end.conftest import Server, also_slow

STORY: dict[str, Any] = {"max_tokens": 600, "extra_body": {"ignore_eos": True}}  # longer than a restart takes


@pytest.fixture(scope="module")
def story(own: Server) -> list[int]:
    return own.chat("A long story, please.", **STORY)[1]


@pytest.mark.parametrize("actor", also_slow("decode", "controller", "prefill", "encoder", "video", "detokenizer", "memory"))
def test_hot_restart_changes_one_process_and_no_text(own: Server, story: list[int], actor: str) -> None:
    before = {found["name"]: (found["pid"], found["generation"]) for found in own.status()["actors"]}
    ids: list[int] = []
    done = None
    for chunk in own.stream("A long story, please.", **STORY):
        ids += [token for choice in chunk.choices for token in (getattr(choice, "token_ids", None) or [])]
        if len(ids) > 5 and done is None:
            done = own.mmrt("restart", actor)
    assert done is not None
    assert done.returncode == 0, done.stdout + done.stderr
    assert ids == story
    after = {found["name"]: (found["pid"], found["generation"]) for found in own.status()["actors"]}
    assert {name for name in after if after[name] != before[name]} == {actor}
    assert after[actor][1] > before[actor][1]


@pytest.mark.slow
def test_hot_restart_of_the_gateway_keeps_the_address(own: Server) -> None:
    text = own.chat("Hello")[0]
    assert own.mmrt("restart", "gateway").returncode == 0
    assert own.chat("Hello")[0] == text


def test_restart_of_an_unknown_actor_is_refused(own: Server) -> None:
    done = own.mmrt("restart", "decoder")
    assert done.returncode == 2
    assert "no actor 'decoder'" in done.stdout + done.stderr


def test_a_second_up_is_refused(own: Server) -> None:
    done = own.mmrt("up", "-d", "--model", str(own.checkpoint), "--port", "0")
    assert done.returncode == 1
    assert str(own.run_path) in done.stdout + done.stderr
    assert own.status()["ready"]


def test_processes_have_names(own: Server) -> None:
    names = {found["name"]: Path(f"/proc/{found['pid']}/comm").read_text().strip() for found in own.status()["actors"]}
    assert names == {name: f"mmrt-{name}"[:15] for name in names}


def test_logs_are_kept(own: Server) -> None:
    assert "listening on" in own.mmrt("logs", "gateway").stdout


def test_only_the_gateway_listens(own: Server) -> None:
    listening = set()
    for found in own.status()["actors"]:
        sockets = {os.readlink(fd) for fd in Path(f"/proc/{found['pid']}/fd").glob("*") if fd.is_symlink()}
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                listening.add((found["name"], fields[1].split(":")[0]))
    assert listening == {("gateway", "0100007F")}


@pytest.mark.slow
def test_down_leaves_nothing(launch: Callable[..., Server]) -> None:
    """Nor does any other run of these tests."""
    server = launch()
    server.down()
    assert server.mmrt("status").returncode == 1


def up(server: Server, *arguments: str) -> str:
    done = server.mmrt("up", "-d", "--port", "0", *arguments, timeout_s=100)
    assert done.returncode != 0, done.stdout
    assert not server.run_path.exists()
    return done.stdout + done.stderr


@pytest.fixture
def idle(tmp_path: Path, checkpoints: Callable[[str], Path]) -> Server:
    """A server that is not up."""
    return Server(tmp_path, checkpoints("qwen2_5_omni"))


@pytest.mark.slow  # by day in the process of tests/cli/test_cli.py, as are the next but one and the last
def test_a_config_with_a_typo(idle: Server) -> None:
    idle.config.write_text("[server]\nprot = 8000\n")
    found = up(idle, "--model", str(idle.checkpoint), "--config", str(idle.config))
    assert "prot" in found
    assert "port" in found


def test_a_port_in_use(idle: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert str(port) in up(idle, "--model", str(idle.checkpoint), "--port", str(port))


@pytest.mark.slow
def test_no_checkpoint(idle: Server, tmp_path: Path) -> None:
    assert "config.json" in up(idle, "--model", str(tmp_path))


@pytest.mark.parametrize("damage", also_slow("truncated", "missing"))
def test_a_damaged_checkpoint(idle: Server, tmp_path: Path, damage: str) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in idle.checkpoint.iterdir():
        data = file.read_bytes()
        if file.suffix == ".safetensors":
            if damage == "missing":
                continue
            data = data[: len(data) // 2]
        (broken / file.name).write_bytes(data)
    assert "safetensors" in up(idle, "--model", str(broken))


@pytest.mark.slow
def test_memory_that_does_not_fit(idle: Server) -> None:
    idle.config.write_text("[memory]\nkv_tokens = 100000000000\n")
    found = up(idle, "--model", str(idle.checkpoint), "--config", str(idle.config))
    assert "available" in found
