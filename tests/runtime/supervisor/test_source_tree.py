"""Changes of source files: by content, with new and removed modules, and with what does not compile."""

import importlib.util
import os
from pathlib import Path

import pytest

from mmrt.runtime.supervisor.source_tree import SourceTree


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in {
        "__init__.py": "",
        "a.py": "from . import b\n",
        "b.py": "x = 1\n",
        "sub/__init__.py": "",
        "sub/c.py": "",
    }.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "no_module.py").write_text("")
    (tmp_path / ".links").mkdir()
    (tmp_path / ".links" / "p").symlink_to(tmp_path)
    return tmp_path


def loaded(root: Path) -> SourceTree:
    tree = SourceTree(root, "p")
    assert sorted(tree.load()) == ["p", "p.a", "p.b", "p.sub", "p.sub.c"]
    return tree


def test_nothing_changes_by_itself(root: Path) -> None:
    tree = loaded(root)
    assert tree.scan() == set()
    (root / "b.py").touch()
    (root / "a.py").write_text((root / "a.py").read_text())
    assert tree.scan() == set(), "written again, with the same content"


def test_a_change_in_place_of_the_same_size_and_time(root: Path) -> None:
    tree = loaded(root)
    before = (root / "b.py").stat()
    replacement = root / "new"
    replacement.write_text("x = 2\n")
    os.utime(replacement, ns=(before.st_atime_ns, before.st_mtime_ns))
    replacement.replace(root / "b.py")
    assert tree.scan() == {"p.b"}


def test_new_and_removed_modules(root: Path) -> None:
    tree = loaded(root)
    (root / "sub" / "d.py").write_text("import p.b\n")
    (root / "sub" / "c.py").unlink()
    assert tree.scan() == {"p.sub.d", "p.sub.c"}
    assert tree.imports["p.sub.d"] == {"p.b"}
    assert tree.scan() == set()


def test_what_does_not_compile_keeps_its_imports(root: Path) -> None:
    tree = loaded(root)
    (root / "a.py").write_text("from . import b\nx = (\n")
    assert tree.scan() == {"p.a"}
    assert f'File "{root}/a.py", line 2' in tree.errors["p.a"] and "SyntaxError: '(' was never closed" in tree.errors["p.a"]
    assert tree.imports["p.a"] == {"p", "p.b"}
    (root / "a.py").write_text("x = 1\0")
    assert tree.scan() == {"p.a"} and "null bytes" in tree.errors["p.a"]
    (root / "a.py").write_text("y = 1\n")
    assert tree.scan() == {"p.a"} and not tree.errors and tree.imports["p.a"] == set()


def test_bytecode_of_changed_modules_is_removed(root: Path) -> None:
    tree = loaded(root)
    compiled = Path(importlib.util.cache_from_source(str(root / "b.py")))
    compiled.parent.mkdir(exist_ok=True)
    compiled.write_bytes(b"old")
    tree.forget_bytecode("p.b")
    tree.forget_bytecode("p.b")
    assert not compiled.exists()
    assert tree.label("p.sub.c") == "sub/c.py" and tree.label("p.gone") == "p.gone"
