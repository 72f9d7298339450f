"""``mmrt pull`` and what it leaves in the cache, against a server that speaks the hub's API."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web

from mmrt.cli.main import run
from mmrt.tests.hub.conftest import COMMIT, FakeHub, digest

Files = dict[str, bytes]
Captured = pytest.CaptureFixture[str]
WEIGHTS = "model.safetensors"


@pytest.fixture
def served(hub: FakeHub, checkpoint: Files) -> FakeHub:
    hub.repositories["org/m"] = {
        **checkpoint,
        "README.md": b"# m",
        "model.py": b"print()",
        "pytorch_model.bin": b"\x80",
        "sub/x.json": b"{}",
    }
    return hub


def snapshot(tmp_path: Path, commit: str = COMMIT) -> Path:
    return tmp_path / "cache" / "models--org--m" / "snapshots" / commit


def test_what_is_pulled_is_what_is_served(served: FakeHub, checkpoint: Files, tmp_path: Path, capsys: Captured) -> None:
    assert run(["pull", "org/m"]) == 0
    folder = snapshot(tmp_path)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == checkpoint  # no program, no pickle, no other folder
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
