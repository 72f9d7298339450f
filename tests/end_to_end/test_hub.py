"""A model by name through all processes, from a server that speaks the hub's API; served, shown, run and stopped by their words."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from mmrt.tests.end_to_end.conftest import Server
from mmrt.tests.hub.conftest import COMMIT, FakeHub, checkpoint

__all__ = ["checkpoint"]
KEY = "sk-of-this-test-alone"


@pytest.fixture(scope="module")
def served(checkpoint: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    hub = FakeHub()
    hub.repositories["org/m"] = checkpoint
    hub.start()
    folder = tmp_path_factory.mktemp("by-name")
    server = Server(folder, Path("org/m"), '[model]\ndtype = "float32"\ndownload = true\n')
    server.environment |= {"HF_ENDPOINT": hub.endpoint, "HF_HUB_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "0"}
    server.environment |= {"MMRT_CONFIG": str(server.config), "MMRT_API_KEY": KEY}
    done = server.mmrt("serve", "org/m", "--max-model-len", "256", "--port", "0", "-d", timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    server.url = str(server.status()["endpoint"])
    assert f"open {server.url}/ in a browser; OpenAI's API is at {server.url}/v1" in done.stdout
    hub.stop()  # nothing of a run asks it
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60) as server.client:
        yield server
    if server.run_path.exists():
        server.down()


def test_the_run_has_the_models_name_and_says_its_commit(served: Server) -> None:
    assert served.status()["model"] == f"org/m@{COMMIT}"
    assert f"model: org/m@{COMMIT}\n" in served.mmrt("status").stdout
    shown = served.mmrt("model", "show").stdout
    assert f"org/m@{COMMIT}" in shown and shown.splitlines()[1].startswith("org/m ")
    (model,) = served.client.models.list()
    assert model.id == "org/m" and served.client.models.retrieve("org/m").id == "org/m"


def test_its_actors_are_restarted_without_the_hub(served: Server) -> None:
    answers = []
    for actor in ("memory", "detokenizer", "decode"):
        answers.append(served.chat("What is the colour of the sky?", model="org/m")[1])
        served.kill(actor)
    answers.append(served.chat("What is the colour of the sky?", model="org/m")[1])
    assert answers == answers[:1] * 4


def test_show_ps_run_and_stop(served: Server) -> None:
    """The last test of this run."""
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{served.url}/v1/models")
    request = urllib.request.Request(f"{served.url}/v1/models", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request) as response:
        (model,) = json.load(response)["data"]
    assert (model["id"], model["max_model_len"]) == ("org/m", 256)
    for actor in served.status()["actors"]:
        assert KEY.encode() not in Path(f"/proc/{actor['pid']}/environ").read_bytes(), actor["name"]
    name, *takes, _, served_at = served.mmrt("show").stdout.splitlines()[1].split()
    assert (name, served_at) == ("org/m", f"{served.url}/v1") and takes[0] == "text"
    assert "computes on cpu in float32" in served.mmrt("ps").stdout
    done = served.mmrt("run", "org/m", "Hello!")
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    assert done.stderr in ("", "(cut off at the limit of its length: max_tokens, or the model's context)\n")
    other = served.mmrt("run", os.devnull, "Hello!")
    assert other.returncode == 2 and "model.path = '/dev/null' is not a directory" in other.stderr
    assert served.mmrt("stop").stdout == "the run is down\n"
    assert not served.run_path.exists()
