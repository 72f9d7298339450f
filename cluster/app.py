"""The application for Ray Serve: ``RAY_SERVE_ENABLE_HA_PROXY=1 serve run mmrt.cluster.app:build replicas=2 config=run.toml``.

A replica of ``NodeReplica`` is a run; Serve starts it again when it has ended. Each tells ``NodeDirectory`` its URL at every check of
its health. ``Front`` asks the directory. Of Ray only interfaces that it calls stable are used.
"""

import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray import serve

from ..runtime.config.runtime_config import RuntimeConfig, load_config, to_toml
from ..runtime.errors import ConfigError
from .front import Front
from .node import Node

DIRECTORY = "mmrt-node-directory"  # and the name of Serve's application
NAMESPACE = "serve"
CHECK_S = 1.0
FORGET_S = 10.0
MAX_STREAMS = 10_000  # through the front
ARGUMENTS: dict[str, Any] = {"config": "", "replicas": 1, "gpus": 0.0, "cpus": 1.0}  # of the command line, with their defaults


class NodeDirectory:
    """The nodes that have shown themselves within ``FORGET_S``."""

    def __init__(self) -> None:
        self._nodes: dict[str, tuple[str, float]] = {}

    def show(self, node: str, url: str) -> None:
        """Note that the node is there."""
        self._nodes[node] = (url, time.monotonic())

    def forget(self, node: str) -> None:
        self._nodes.pop(node, None)

    def nodes(self) -> dict[str, str]:
        """Return the URL of each."""
        oldest_s = time.monotonic() - FORGET_S
        self._nodes = {node: entry for node, entry in self._nodes.items() if entry[1] > oldest_s}
        return {node: url for node, (url, _) in self._nodes.items()}


def _directory() -> Any:
    name = f"{DIRECTORY}-{serve.get_replica_context().app_name}"
    options = {"name": name, "namespace": NAMESPACE, "get_if_exists": True, "lifetime": "detached"}
    return ray.remote(NodeDirectory).options(**options, num_cpus=0, max_restarts=-1).remote()


class NodeReplica:
    """One run of mmrt on the machine where Ray has placed the replica."""

    def __init__(self, config: str) -> None:
        self._name = uuid.uuid4().hex
        self._directory = _directory()
        self._node = Node(config)
        self._show()

    def _show(self) -> None:
        self._directory.show.remote(self._name, self._node.url)

    def check_health(self) -> None:
        """Raises: RunError once the run has ended."""
        self._node.check()
        self._show()

    def __del__(self) -> None:
        if hasattr(self, "_node"):
            self._directory.forget.remote(self._name)
            self._node.close()


def front_of(max_body_bytes: int) -> Callable[[], Front]:
    """Return what makes the ASGI application of a front. ``max_body_bytes``: that a node takes."""

    def make() -> Front:
        directory = _directory()

        async def nodes() -> dict[str, str]:
            found: dict[str, str] = await directory.nodes.remote()
            return found

        return Front(nodes, max_body_bytes)

    return make


def build(arguments: dict[str, Any]) -> serve.Application:
    """Return the application. ``arguments``: ``config``, a TOML file; ``replicas``; ``cpus`` and ``gpus`` that Ray reserves for each.

    Raises: ConfigError for unknown arguments, and for a configuration that mmrt up would refuse.
    """
    if unknown := sorted(set(arguments) - set(ARGUMENTS)):
        raise ConfigError(f"{unknown[0]} is no argument; there are {', '.join(ARGUMENTS)}")
    given = ARGUMENTS | arguments
    replicas, cpus, gpus = (_number(given, name, low) for name, low in (("replicas", 1), ("cpus", 0), ("gpus", 0)))
    node = serve.deployment(
        NodeReplica,
        name="node",
        num_replicas=int(replicas),
        health_check_period_s=CHECK_S,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
    )
    config = _node_config(given["config"])
    ingress = serve.ingress(front_of(config.server.max_body_mib << 20))()
    front = serve.deployment(ingress, name="front", max_ongoing_requests=MAX_STREAMS, ray_actor_options={"num_cpus": 0})
    return front.bind(node.bind(to_toml(config)))


def _number(arguments: dict[str, Any], name: str, low: float) -> float:
    try:
        value = float(arguments[name])
    except (TypeError, ValueError):
        raise ConfigError(f"{name} = {arguments[name]!r} is no number") from None
    if not low <= value <= 1000 or (name == "replicas" and value != int(value)):
        raise ConfigError(f"{name} = {arguments[name]} must be {'a whole number ' if name == 'replicas' else ''}from {low} to 1000")
    return value


def _node_config(file: str) -> RuntimeConfig:
    """Return the configuration of a node: that of the file, at a free port, with absolute paths of the model and its adapter."""
    config = load_config(Path(file).absolute() if file else None)
    path, adapter = (given and str(Path(given).absolute()) for given in (config.model.path, config.model.adapter))
    replace = msgspec.structs.replace
    return replace(config, model=replace(config.model, path=path, adapter=adapter), server=replace(config.server, port=0))
