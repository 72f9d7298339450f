"""One run of the demo model for all clients, and what has to hold after each of them."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mmrt.models.make.checkpoint import make_checkpoint
from mmrt.tests.end_to_end.conftest import Server, checkpoints, launch

__all__ = ["checkpoints", "launch"]

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / ".clients"
_LIMIT_S = 400
AGENTS = {"codex"}
"""Clients whose prompts are longer than the demo model's context."""
LONG_CONTEXT = 131072


@pytest.fixture(scope="module")
def server(launch: Callable[..., Server]) -> Server:
    return launch(None)


@pytest.fixture(scope="module")
def long_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The null model, with room for the prompts of agents. Its answers end after some thirty tokens."""
    model = tmp_path_factory.mktemp("checkpoints") / "null"
    make_checkpoint("small", model, "null")
    config = json.loads((model / "config.json").read_text())
    ends = [*range(40, 256, 32), *config["eos_token_id"]]
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": LONG_CONTEXT, "eos_token_id": ends}))
    server = Server(tmp_path_factory.mktemp("run"), model, f"[memory]\nkv_tokens = {LONG_CONTEXT}\n")
    server.up()
    yield server
    server.down()


@pytest.fixture
def drive(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], None]:
    """Run a client's script in its environment; afterwards the server has nothing left of it, and each of its processes lives."""

    def run(name: str) -> None:
        server: Server = request.getfixturevalue("long_server" if name in AGENTS else "server")
        before = _processes(server)
        environment = {
            **os.environ,
            "MMRT_URL": server.url,
            "MMRT_CONTEXT": str(LONG_CONTEXT),
            "MMRT_PYTHON": sys.executable,
            "PYTHONPATH": str(HERE / "support"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OPENAI_API_KEY": "none",
            "TMPDIR": str(tmp_path),
        }
        done = subprocess.run(_command(name), env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=_LIMIT_S)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        print(done.stdout)
        server.wait(lambda _: _requests(server) == 0, "no request is left")
        server.wait_until_empty()
        assert _processes(server) == before

    return run


def _command(name: str) -> list[str]:
    folder = ENVIRONMENTS / name
    if not folder.exists():
        pytest.skip(f".ci/clients {name} makes its environment")
    python = folder / "bin/python"
    if python.exists():
        return [str(python), str(HERE / name / "client.py")]
    script = folder / "client.mjs"  # Node looks for packages beside the script
    script.unlink(missing_ok=True)
    script.write_text((HERE / name / "client.mjs").read_text())
    return ["node", str(script)]


def _processes(server: Server) -> dict[str, Any]:
    return {actor["name"]: (actor["pid"], actor["generation"], actor["restarts"]) for actor in server.status()["actors"]}


def _requests(server: Server) -> float:
    """Waiting, preparing and running."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
        found = re.findall(r"^mmrt_num_requests_\w+ ([\d.]+)$", answer.read().decode(), re.MULTILINE)
    assert len(found) == 3
    return sum(map(float, found))
