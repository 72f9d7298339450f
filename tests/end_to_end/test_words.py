"""Words that newcomers type, in a real run: serve, show, ps, run and stop, and the options of other servers."""

import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmrt.runtime.process.run import DEFAULT_MODEL
from mmrt.tests.end_to_end.conftest import MMRT, Server

KEY = "sk-of-this-test-alone"


@pytest.fixture
def words(tmp_path: Path) -> Iterator[Server]:
    """A server that is not up."""
    server = Server(tmp_path, None)
    server.environment |= {"MMRT_CONFIG": str(server.config), "MMRT_API_KEY": KEY}
    yield server
    server.mmrt("down", "--drain", "0")


@pytest.mark.slow  # a model by name is served, shown, run and stopped in test_hub
def test_serve_show_ps_run_and_stop(words: Server) -> None:
    options = ["--served-model-name", "mine", "--max-model-len", "2048", "--dtype", "float32", "--port", "0", "-d"]
    done = words.mmrt("serve", str(DEFAULT_MODEL), *options, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    url = str(words.status()["endpoint"])
    assert f"open {url}/ in a browser; OpenAI's API is at {url}/v1" in done.stdout

    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{url}/v1/models")
    request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request) as response:
        (model,) = json.load(response)["data"]
    assert (model["id"], model["max_model_len"]) == ("mine", 2048)
    for actor in words.status()["actors"]:
        assert KEY.encode() not in Path(f"/proc/{actor['pid']}/environ").read_bytes(), actor["name"]

    name, *takes, path, served_at = words.mmrt("show").stdout.splitlines()[1].split()
    assert (name, path, served_at) == ("mine", str(DEFAULT_MODEL), f"{url}/v1") and " ".join(takes).startswith("text, ")
    assert "computes on cpu in float32" in words.mmrt("ps").stdout
    done = words.mmrt("run", str(DEFAULT_MODEL), "Hello!")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.strip()
    other = words.mmrt("run", os.devnull, "Hello!")
    assert other.returncode == 2 and "model.path = '/dev/null' is not a directory" in other.stderr
    assert words.mmrt("stop").stdout == "the run is down\n"
    assert not words.run_path.exists()


@pytest.mark.slow  # the other test serves, and runs at what is up
def test_run_starts_the_server_and_leaves_it_up(words: Server) -> None:
    words.config.write_text(words.config.read_text() + "[server]\nport = 0\n")
    asked = subprocess.run([*MMRT, "run"], input="Hello!\n", env=words.environment, capture_output=True, text=True, timeout=300)
    assert asked.returncode == 0, asked.stderr
    assert "ready after" in asked.stderr and asked.stdout.strip() and "mmrt |" not in asked.stdout
    assert words.status()["ready"]
    assert words.mmrt("shutdown").returncode == 0
