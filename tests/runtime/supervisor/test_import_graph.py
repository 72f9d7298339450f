"""Which modules a source imports, as read; and that what actors import when they run is among what was read."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import mmrt
from mmrt.runtime.stage_table import ACTORS
from mmrt.runtime.supervisor.import_graph import closure, imports_of
from mmrt.runtime.supervisor.reload import SUPERVISOR_ROOTS, actor_roots
from mmrt.runtime.supervisor.source_tree import SourceTree

ROOT = Path(mmrt.__file__).parent


def imports(source: str, module: str = "p.a.b", is_package: bool = False) -> set[str]:
    return set(imports_of(ast.parse(source), module, is_package))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import x.y, z as q", {"x.y", "z"}),
        ("from x import y", {"x", "x.y"}),
        ("from . import c", {"p.a", "p.a.c"}),
        ("from .c import d", {"p.a.c", "p.a.c.d"}),
        ("from ..c import d", {"p.c", "p.c.d"}),
        ("def f():\n    from .late import x", {"p.a.late", "p.a.late.x"}),
        ("if TYPE_CHECKING:\n    import never\nelse:\n    import then", {"then"}),
        ("import typing\nif typing.TYPE_CHECKING:\n    import never", {"typing"}),
        ("importlib.import_module('p.late').main()", {"p.late"}),
        ("import_module('.late', __package__)", {"p.a.late"}),
        ("importlib.import_module('..late', __name__)", {"p.late"}),
        ("importlib.import_module(f'..{name}', __name__)", set()),
        ("importlib.import_module()", set()),
        ("x = 1", set()),
    ],
)
def test_imports(source: str, expected: set[str]) -> None:
    assert imports(source) == expected


def test_a_package_is_relative_to_itself() -> None:
    assert imports("from .c import d", "p.a", is_package=True) == {"p.a.c", "p.a.c.d"}


def test_a_closure_has_packages_and_cycles_and_nothing_foreign() -> None:
    known = {"p": frozenset({"p.base"}), "p.base": frozenset(), "p.a": frozenset({"p.b.c", "json"}), "p.b": frozenset({"p.d"})}
    known |= {"p.b.c": frozenset({"p.a"}), "p.d": frozenset(), "p.unrelated": frozenset({"p.a"})}
    assert closure(["p.a"], known) == {"p", "p.base", "p.a", "p.b", "p.b.c", "p.d"}
    assert closure(["p.missing"], known) == {"p", "p.base"}


@pytest.fixture(scope="module")
def graph() -> dict[str, frozenset[str]]:
    tree = SourceTree(ROOT, "mmrt")
    assert set(tree.load()) >= {"mmrt", "mmrt.actors", "mmrt.actors.gateway.serve", "mmrt.models.families"}
    assert not tree.errors and not tree.scan()
    return tree.imports


IMPORTS = """
import importlib, json, os, sys
import torch, numpy, aiohttp.web, av, jinja2, llvmlite.binding, PIL.Image, safetensors, tokenizers, uvloop, zmq  # once, as by a zygote
for actor, roots in json.loads(sys.argv[1]).items():
    if not os.fork():
        for name in roots:
            importlib.import_module(name)
        print(json.dumps({actor: [name for name in sys.modules if name.split(".")[0] == "mmrt"]}))
        assert "transformers" not in sys.modules, "a reference for tests and benches, not for a run"
        sys.stdout.flush()
        os._exit(0)  # without what torch does at the end
    assert os.wait()[1] == 0, actor
"""


def test_what_actors_import_was_foreseen(graph: dict[str, frozenset[str]]) -> None:
    roots = {actor: list(actor_roots([actor], True, graph)) for actor in ACTORS}
    done = subprocess.run([sys.executable, "-c", IMPORTS, json.dumps(roots)], capture_output=True, text=True, check=True)
    imported = {actor: names for line in done.stdout.splitlines() for actor, names in json.loads(line).items()}
    assert list(imported) == list(ACTORS)
    for actor, names in imported.items():
        strangers = set(names) - closure(roots[actor], graph)
        assert not strangers, f"{actor} imports {strangers}, which was not foreseen"


def test_edits_reach_those_whom_they_concern_only(graph: dict[str, frozenset[str]]) -> None:
    concerned = {actor: closure(actor_roots([actor], True, graph), graph) for actor in ACTORS}

    def importers(module: str) -> set[str]:
        return {actor for actor in ACTORS if f"mmrt.{module}" in concerned[actor]}

    assert importers("actors.decode.loop") == {"decode"}
    assert importers("actors.decode.running_set") == {"decode"}
    assert importers("actors.host.plan_loop") == {"video", "encoder", "prefill"}
    assert importers("actors.gateway.apis.completions") == {"gateway"}
    assert importers("runtime.controller.machine") == {"controller"}
    assert importers("actors.host.actor") == importers("runtime.bus.messages") == set(ACTORS)
    assert importers("runtime.supervisor.supervisor") == set()
    assert importers("actors.host.device") == {"memory", "video", "encoder", "prefill", "decode"}
    assert importers("models.families.qwen2_5.towers") == {"encoder"}
    assert importers("models.families.qwen2_5_vl.made_checkpoint") == set()
    shared = closure(actor_roots(["encoder", "decode"], True, graph), graph)
    assert "mmrt.actors.host.shared_process" in shared and importers("actors.host.shared_process") == set()
    assert "mmrt.runtime.supervisor.managed_actor" in closure(SUPERVISOR_ROOTS, graph)
