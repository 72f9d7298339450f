"""The documents for Kubernetes name options and metrics that exist."""

from pathlib import Path
from typing import Any

import typer
import yaml

from mmrt.actors.gateway.watching.metrics import ALIASES
from mmrt.cli.up import register

DOCUMENT = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()


def documents() -> dict[str, Any]:
    text = DOCUMENT.partition("```yaml\n")[2].partition("```")[0]
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def test_pods_start_with_options_of_the_command_line() -> None:
    container = documents()["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    command, *arguments = container["args"]
    app = typer.Typer()
    register(app)
    up = typer.main.get_command(app)
    options = {name for parameter in up.params for name in parameter.opts}
    assert command == up.name and {argument for argument in arguments if argument.startswith("--")} <= options
    port = int(arguments[arguments.index("--port") + 1])
    probes = [container["readinessProbe"], container["livenessProbe"]]
    assert {port, *(probe["httpGet"]["port"] for probe in probes)} == {container["ports"][0]["containerPort"]}
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in documents()["Deployment"]["spec"]["template"]["spec"]["volumes"]}


def test_the_pool_is_that_of_the_pods() -> None:
    found = documents()
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert found["InferencePool"]["spec"]["selector"]["matchLabels"] == labels
    assert found["InferencePool"]["spec"]["targetPorts"] == [{"number": 8000}]
    assert found["HTTPRoute"]["spec"]["rules"][0]["backendRefs"][0]["name"] == found["InferencePool"]["metadata"]["name"]


def test_the_metrics_have_their_names() -> None:
    known = {alias for aliases in ALIASES.values() for alias in aliases}
    named = {word.strip("`,()") for word in DOCUMENT.split() if word.strip("`,()").startswith("vllm:")}
    assert named and named <= known
