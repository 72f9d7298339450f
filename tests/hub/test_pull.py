"""``mmrt pull`` and what it leaves in the cache, against a server that speaks the hub's API."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web
from safetensors.torch import load, save

from mmrt.cli import fetching
from mmrt.cli.main import run
from mmrt.runtime.process.host_room import HostRoom
from mmrt.tests.hub.conftest import COMMIT, FakeHub, digest

Files = dict[str, bytes]
Captured = pytest.CaptureFixture[str]
WEIGHTS = "model.safetensors"
TWINS = {"one.json": b"{}", "other.json": b"{}"}  # files of one digest


@pytest.fixture
def served(hub: FakeHub, checkpoint: Files) -> FakeHub:
    others = {"README.md": b"# m", "model.py": b"print()", "pytorch_model.bin": b"\x80", "sub/x.json": b"{}"}
    hub.repositories["org/m"] = {**checkpoint, **TWINS, **others}
    return hub


def snapshot(tmp_path: Path, commit: str = COMMIT) -> Path:
    return tmp_path / "cache" / "models--org--m" / "snapshots" / commit


def test_what_is_pulled_is_what_is_served(served: FakeHub, checkpoint: Files, tmp_path: Path, capsys: Captured) -> None:
    assert run(["pull", "org/m"]) == 0
    folder = snapshot(tmp_path)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == checkpoint | TWINS  # no program, no pickle, no other folder
    assert os.readlink(folder / WEIGHTS) == f"../../blobs/{digest(checkpoint[WEIGHTS])}"
    assert (folder.parents[1] / "refs" / "main").read_text() == COMMIT
    assert [path for _, path, _, _ in served.log if path.endswith(WEIGHTS)] != []
    first = next(at for at, entry in enumerate(served.log) if entry[1].endswith(WEIGHTS))
    assert all(any(entry[1].endswith(name) for entry in served.log[:first]) for name in checkpoint if name != WEIGHTS)
    assert served.ranges(WEIGHTS)[0].startswith("bytes=0-")  # its header
    told = capsys.readouterr().out
    assert "fetching" in told and f"org/m is in {folder}: mmrt up org/m" in told
    served.log.clear()
    assert run(["pull", "org/m"]) == 0
    assert [path for _, path, _, _ in served.log] == ["/api/models/org/m"]


def library(served: FakeHub, tmp_path: Path, call: str, **environment: str) -> str:
    """What a call of huggingface_hub returns, in a process of its own: it reads its environment once."""
    own = {"HF_ENDPOINT": served.endpoint, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    program = f"from huggingface_hub import *; print({call})"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **own, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_the_library_finds_it_and_mmrt_what_the_library_has(served: FakeHub, tmp_path: Path, capsys: Captured) -> None:
    assert run(["pull", "org/m"]) == 0
    finds = f"snapshot_download('org/m'), hf_hub_download('org/m', '{WEIGHTS}')"
    assert library(served, tmp_path, finds, HF_HUB_OFFLINE="1") == f"{snapshot(tmp_path)} {snapshot(tmp_path) / WEIGHTS}"
    served.repositories["org/n"] = served.repositories["org/m"]
    library(served, tmp_path, "snapshot_download('org/n', allow_patterns=['*.json', '*.jinja', '*.safetensors'])")
    served.log.clear()
    capsys.readouterr()
    assert run(["up", "org/n", "--dry-run", "--port", "0"]) == 0
    assert f"model          org/n@{COMMIT}" in capsys.readouterr().out and not served.log
    assert run(["pull", "org/n"]) == 0
    assert served.ranges(WEIGHTS) == []


def test_a_cut_connection_goes_on_where_it_was(served: FakeHub, checkpoint: Files, tmp_path: Path) -> None:
    cuts = [200_000, 400_000]

    async def cut(request: web.Request) -> web.StreamResponse | None:
        asked = request.headers.get("Range", "")
        if not request.path.endswith(WEIGHTS) or not cuts or "-" in asked and not asked.endswith("-"):
            return None
        start = int(asked.removeprefix("bytes=").rstrip("-") or 0)
        headers = {"Content-Range": f"bytes {start}-{len(checkpoint[WEIGHTS]) - 1}/{len(checkpoint[WEIGHTS])}"} if start else {}
        response = web.StreamResponse(status=206 if start else 200, headers=headers)
        response.content_length = len(checkpoint[WEIGHTS]) - start
        await response.prepare(request)
        await response.write(checkpoint[WEIGHTS][start : cuts.pop(0)])
        assert request.transport is not None
        request.transport.close()
        return response

    served.hook = cut
    assert run(["pull", "org/m"]) == 0
    assert [asked for asked in served.ranges(WEIGHTS) if asked.endswith("-")] == ["bytes=200000-", "bytes=400000-"]
    assert (snapshot(tmp_path) / WEIGHTS).read_bytes() == checkpoint[WEIGHTS]


def test_after_ctrl_c_the_same_command_goes_on(served: FakeHub, checkpoint: Files, tmp_path: Path) -> None:
    weights = checkpoint[WEIGHTS]
    sent = threading.Event()

    async def stall(request: web.Request) -> web.StreamResponse | None:
        if not request.path.endswith(WEIGHTS) or request.headers.get("Range"):
            return None
        response = web.StreamResponse()
        response.content_length = len(weights)
        await response.prepare(request)
        await response.write(weights[:300_000])
        sent.set()
        await asyncio.sleep(60)
        return response

    served.hook = stall
    own = {"HF_ENDPOINT": served.endpoint, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "mmrt", "pull", "org/m"]
    with subprocess.Popen(command, env={**os.environ, **own}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert sent.wait(60)
        (partial,) = wait_for(lambda: [file for file in tmp_path.glob("cache/*/blobs/*.incomplete") if file.stat().st_size])
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=30)
    assert process.returncode == 130 and said.endswith("what has come of org/m stays: the same command goes on\n"), said
    assert not (snapshot(tmp_path) / WEIGHTS).exists()
    kept = partial.stat().st_size
    served.hook = None
    assert run(["pull", "org/m"]) == 0
    assert served.ranges(WEIGHTS)[-1] == f"bytes={kept}-" and 0 < kept <= 300_000
    assert (snapshot(tmp_path) / WEIGHTS).read_bytes() == weights


def wait_for(look: Callable[[], list[Path]]) -> list[Path]:
    deadline = time.monotonic() + 30
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_a_new_commit_is_pulled_and_the_old_one_served_until_then(
    served: FakeHub, checkpoint: Files, tmp_path: Path, capsys: Captured
) -> None:
    assert run(["pull", "org/m"]) == 0
    newer = COMMIT[::-1]
    served.commits["org/m"] = newer
    served.repositories["org/m"]["generation_config.json"] = b'{"temperature": 0.5}'
    served.log.clear()
    assert run(["model", "check", "org/m"]) == 0
    assert not served.log
    assert run(["pull", "org/m"]) == 0
    assert served.ranges(WEIGHTS) == [], "weights of the same digest are here"
    assert (snapshot(tmp_path, newer) / WEIGHTS).resolve() == (snapshot(tmp_path) / WEIGHTS).resolve()
    capsys.readouterr()
    for name, commit in (("org/m", newer), ("org/m@main", newer), (f"org/m@{COMMIT}", COMMIT)):
        assert run(["up", name, "--dry-run", "--port", "0"]) == 0
        assert f"model          org/m@{commit}" in capsys.readouterr().out


def test_up_asks_before_it_fetches(served: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """On a terminal, and more than a gigabyte. Without a terminal it has to be said. What is here as a path is no name."""
    assert run(["up", "org/m", "--port", "0"]) == 2
    assert "mmrt pull org/m fetches it, as do --yes and model.download = true" in capsys.readouterr().err
    assert run(["up", "org/m", "--dry-run"]) == 2 and not served.log
    capsys.readouterr()

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(fetching, "_UNASKED_BYTES", 0)
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "n")
    assert run(["up", "org/m", "--port", "0"]) == 2
    assert capsys.readouterr().err == "error: org/m is not fetched\n"
    assert asked == [f"Fetch {len(served.repositories['org/m'][WEIGHTS]) / 1e6:.1f} MB of org/m? [Y/n] "]
    assert [asked for asked in served.ranges(WEIGHTS) if not asked.startswith("bytes=0-")] == []

    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "m").mkdir(parents=True)
    served.log.clear()
    assert run(["up", "org/m", "--port", "0"]) == 2
    assert "model.path = 'org/m' has no config.json" in capsys.readouterr().err and not served.log


def test_memory_that_lacks_now_stops_up_and_not_pull(served: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr("mmrt.cli.model_check.read_host_room", lambda _: HostRoom(1 << 20, 1 << 40))
    assert run(["up", "org/m", "--yes", "--port", "0"]) == 1
    assert "org/m is not fetched, as it would not be served: memory: it takes " in capsys.readouterr().err
    assert served.ranges(WEIGHTS) == ["bytes=0-262143"]
    monkeypatch.setattr("mmrt.cli.draft_check._memory_bytes", lambda: 1 << 20)  # of the whole machine
    assert run(["pull", "org/m"]) == 1


def test_pull_tells_of_memory_that_lacks_now(served: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr("mmrt.cli.model_check.read_host_room", lambda _: HostRoom(1 << 20, 1 << 40))
    assert run(["pull", "org/m"]) == 0
    assert "it could not be served at present: memory: it takes " in capsys.readouterr().out
    assert run(["model", "rm", "org/m", "--yes"]) == 0
    capsys.readouterr()
    assert run(["pull", "org/m", "--quiet"]) == 0 and capsys.readouterr().out == "", "it decides alike"


def test_progress_is_told_where_logs_are_json(
    served: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(fetching, "_PROGRESS_S", 0.0)
    config = tmp_path / "mmrt.toml"
    config.write_text('[logging]\nformat = "json"\n')
    assert run(["pull", "org/m", "--config", str(config)]) == 0
    told = [json.loads(line)["message"] for line in capsys.readouterr().out.splitlines()]
    total = len(served.repositories["org/m"][WEIGHTS]) / 1e6
    assert any(message.startswith("fetched ") and f" of {total:.1f} MB, " in message for message in told)
    assert run(["pull", "org/m", "--quiet"]) == 0 and capsys.readouterr().out == ""


def test_of_shards_those_of_the_index_are_pulled(served: FakeHub, checkpoint: Files, tmp_path: Path, capsys: Captured) -> None:
    tensors = load(checkpoint[WEIGHTS])
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    weight_map = {tensor: names[at % 2] for at, tensor in enumerate(tensors)}
    shards = {name: save({tensor: tensors[tensor] for tensor in tensors if weight_map[tensor] == name}) for name in names}
    index = {"model.safetensors.index.json": json.dumps({"metadata": {}, "weight_map": weight_map}).encode()}
    others = {name: data for name, data in checkpoint.items() if name != WEIGHTS}
    served.repositories["org/m"] = {**others, **shards, **index, "consolidated.safetensors": checkpoint[WEIGHTS]}
    assert run(["model", "check", "org/m"]) == 0
    assert " in 2 files, " in capsys.readouterr().out
    assert run(["pull", "org/m"]) == 0
    assert {file.name for file in snapshot(tmp_path).iterdir()} == {*others, *shards, *index}
    (snapshot(tmp_path) / names[1]).unlink()
    assert run(["up", "org/m", "--dry-run", "--port", "0"]) == 2, "a part of a model is none"
    assert run(["pull", "org/m"]) == run(["up", "org/m", "--dry-run", "--port", "0"]) == 0
