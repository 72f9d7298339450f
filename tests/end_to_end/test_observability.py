"""A run that logs JSON: every line of every process, read back by ``mmrt logs``."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmrt.tests.end_to_end.conftest import Server

SETTINGS = """
[logging]
format = "json"
"""


@pytest.fixture(scope="module")
def observed(launch: Callable[..., Server]) -> Server:
    return launch("qwen2_5_omni", SETTINGS)


def log_lines(server: Server) -> list[tuple[str, dict[str, Any]]]:
    folder = Path(server.environment["XDG_STATE_HOME"]) / "mmrt" / server.run_path.name
    return [(path.stem, json.loads(line)) for path in folder.glob("*.log") for line in path.read_text().splitlines()]


def test_every_line_is_an_object_and_logs_shows_it_as_text(observed: Server) -> None:
    server = observed
    answer = server.client.chat.completions.create(
        model=server.checkpoint.name, messages=[{"role": "user", "content": "hi"}], max_tokens=2
    )
    server.kill("decode")
    server.wait(lambda _: any(line["message"].startswith("decode ended with SIGKILL") for _, line in log_lines(server)), "a line")
    lines = log_lines(server)
    assert {"gateway", "controller", "supervisor"} <= {file for file, _ in lines}
    for file, line in lines:
        assert {"time", "level", "actor", "pid", "message"} <= line.keys() and line["actor"] == file
    (request,) = [line for _, line in lines if line.get("request_id") == answer.id and line["message"].startswith("POST ")]
    assert (request["actor"], request["level"], request["generation"]) == ("gateway", "INFO", 1)
    shown = server.mmrt("logs", "gateway").stdout
    assert f"{request['time']} INFO mmrt.actors.gateway.request_log: {request['message']}" in shown and '{"time"' not in shown
