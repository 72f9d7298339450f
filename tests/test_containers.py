"""Dockerfile and compose.yaml name only commands, options, extras and paths that exist. No Docker runs here."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from packaging.specifiers import SpecifierSet

from mmrt.cli.main import build_app
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.environment import read_environment

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
HOME = "/home/mmrt"


def instructions(name: str) -> list[str]:
    return re.findall(rf"^ *{name} (.*)$", DOCKERFILE, re.MULTILINE)


def check_command(arguments: list[str]) -> dict[str, Any]:
    """Parse a command line of mmrt without running it; return its options."""
    program: Any = typer.main.get_command(build_app(arguments[:1] + ["version"]))
    command = program.commands[arguments[0]]
    options: dict[str, Any] = command.make_context(arguments[0], arguments[1:]).params
    return options


def test_commands_parse() -> None:
    (started,) = [json.loads(line) for line in instructions("CMD") if "python" not in line]
    (entry,) = map(json.loads, instructions("ENTRYPOINT"))
    assert entry[-1] in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert check_command(started)["host"] == "0.0.0.0", "else nobody reaches it from outside the container"
    for service in COMPOSE["services"].values():
        assert check_command(service["command"])["host"] == "0.0.0.0"
    assert check_command(COMPOSE["services"]["mmrt-cuda"]["command"])["device"] == "cuda"
    with pytest.raises(Exception, match="No such option"):
        check_command(["up", "--nothing"])


def test_ports_and_paths_are_those_of_mmrt() -> None:
    port = RuntimeConfig().server.port
    (exposed,) = instructions("EXPOSE")
    assert int(exposed) == port and f":{port}/ready" in DOCKERFILE
    assert all(publish.endswith(f":{port}") for service in COMPOSE["services"].values() for publish in service["ports"])
    state = str(read_environment({"HOME": HOME}).state_home)
    (volumes,) = map(json.loads, instructions("VOLUME"))
    mounted = {re.sub(r":ro$", "", one).rpartition(":")[2] for one in COMPOSE["services"]["mmrt"]["volumes"]}
    assert mounted == set(volumes) and state in volumes
    assert all(folder in " ".join(instructions("RUN")) for folder in volumes), "they belong to the user"


def test_the_image_is_built_of_what_there_is() -> None:
    (python,) = re.findall(r"^ARG PYTHON=(.*)$", DOCKERFILE, re.MULTILINE)
    assert python in SpecifierSet(PROJECT["requires-python"])
    extras = {extra for found in re.findall(r"'\.\[([\w,]+)\]'", DOCKERFILE) for extra in found.split(",")}
    assert extras == {"otel", "cuda"} and extras <= PROJECT["optional-dependencies"].keys()
    (variants,) = set(re.findall(r"allowed are (\w+) and (\w+)", DOCKERFILE))
    assert {service["build"]["args"]["VARIANT"] for service in COMPOSE["services"].values()} == set(variants)
    user, *_ = instructions("USER")[0].split(":")
    assert int(user) > 0 and f"--uid {user}" in DOCKERFILE
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    needed = {"pyproject.toml", "setup.py", "README.md", "LICENSE", "cli", "models", "dashboards"}
    assert needed.isdisjoint(ignored) and all((ROOT / name).exists() for name in needed)
