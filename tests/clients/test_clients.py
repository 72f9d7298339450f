"""Each client does its main things in its own environment, and leaves nothing in the server. ``.ci/clients`` makes the environments."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CLIENTS = sorted(script.parent.name for script in HERE.glob("*/client.*"))


@pytest.mark.clients
@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", CLIENTS)
def test_client(drive: Callable[[str], None], name: str) -> None:
    drive(name)


def test_the_table_has_the_versions_that_are_run() -> None:
    rows = (HERE.parents[1] / "docs/clients.md").read_text()
    listed = set(re.findall(r"`([\w@/.-]+) (\d[\w.]*)`", rows))
    pinned = set()
    for name in CLIENTS:
        if (packages := HERE / name / "package.json").exists():
            pinned |= set(json.loads(packages.read_text())["dependencies"].items())
        else:
            pinned |= set(
                re.findall(r"^([\w.-]+)(?:\[[\w,]+\])?==([\w.]+)$", (HERE / name / "requirements.txt").read_text(), re.MULTILINE)
            )
    assert listed == pinned, listed ^ pinned
