"""Schemathesis asks a real server with the demo model what its own description allows, and what it forbids."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mmrt.tests.end_to_end.conftest import Server

SECONDS = 50
CONVERSATIONS = "^/v1/(chat|messages|responses)|^/tokenize"  # whose schemas are large
# An answer is short, so many fit into the time.
SETTINGS = "[model]\nmax_context = 256\n[memory]\nmax_sequences = 16\n"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "missing_required_header",
    "unsupported_method",
)


@pytest.fixture(scope="module")
def fuzzed(launch: Callable[..., Server]) -> Server:
    pytest.importorskip("schemathesis", reason="pip install -e '.[fuzz]'")
    return launch(None, SETTINGS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [
        {"--phases": "examples,coverage", "--include-path-regex": CONVERSATIONS},  # each field at its limits
        {"--phases": "examples,coverage", "--exclude-path-regex": CONVERSATIONS},
        {"--phases": "fuzzing"},  # all fields at random
    ],
    ids=["limits-of-conversations", "limits", "random"],
)
def test_requests_made_of_the_description(fuzzed: Server, tmp_path: Path, what: dict[str, str]) -> None:
    options = {
        **what,
        "--checks": ",".join(CHECKS),
        "--max-time": str(SECONDS),
        "--max-examples": "15",  # of a route at a time
        "--seed": "1",
        "--request-timeout": "30",
        "--generation-database": "none",
        "--suppress-health-check": "all",  # large schemas take long to make requests of
    }
    arguments = [
        f"{fuzzed.url}/openapi.json",
        "--continue-on-failure",
        "--no-color",
        *(part for option in options.items() for part in option),
    ]
    command = [str(Path(sys.executable).with_name("st")), "run", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS + 100)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    found = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert found is not None and int(found[2]) > 50, done.stdout
    fuzzed.wait_until_empty()
