"""A model by name through all processes, from a server that speaks the hub's API."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mmrt.tests.end_to_end.conftest import Server
from mmrt.tests.hub.conftest import COMMIT, FakeHub, checkpoint

__all__ = ["checkpoint"]


@pytest.fixture(scope="module")
def served(checkpoint: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    hub = FakeHub()
    hub.repositories["org/m"] = checkpoint
    hub.start()
    folder = tmp_path_factory.mktemp("by-name")
    server = Server(folder, Path("org/m"), '[model]\ndtype = "float32"\ndownload = true\n')
    server.environment |= {"HF_ENDPOINT": hub.endpoint, "HF_HUB_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "0"}
    server.up()
    hub.stop()  # nothing of a run asks it
    yield server
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
