"""Repositories of GGUF files: pulled by tag, listed, served from the cache and removed."""

import shutil
from pathlib import Path

import pytest
from aiohttp import web

from mmrt.cli.checkpoints import checkpoint_of, whole_checkpoint
from mmrt.cli.main import run
from mmrt.models.make.checkpoint import make_checkpoint
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.config.sections import ModelSection
from mmrt.runtime.process.run import create_run, run_info
from mmrt.tests.hub.conftest import COMMIT, FakeHub
from mmrt.tests.models.gguf_files import write_gguf, write_tower

Captured = pytest.CaptureFixture[str]
LARGE = "m-Q8_0.gguf"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A model in two types, with factors of rope in a tensor; and what is none."""
    folder = tmp_path_factory.mktemp("gguf")
    make_checkpoint("tiny", folder / "text", "phi3")
    for kind in ("Q8_0", "F16"):
        write_gguf(folder / "text", folder / f"m-{kind}.gguf", kind)
    shutil.copy(folder / "m-F16.gguf", folder / "mmproj-m-F16.gguf")
    (folder / "README.md").write_text("# m")
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.is_file()}


@pytest.fixture
def served(hub: FakeHub, files: dict[str, bytes]) -> FakeHub:
    hub.repositories["org/m"] = dict(files)
    return hub


def lines(capsys: Captured) -> list[list[str]]:
    capsys.readouterr()
    assert run(["list"]) == 0
    return [line.split() for line in capsys.readouterr().out.splitlines()[1:]]


def test_a_tag_is_checked_pulled_listed_and_removed(served: FakeHub, tmp_path: Path, capsys: Captured) -> None:
    assert run(["model", "check", "hf.co/org/m"]) == 0
    told = capsys.readouterr().out
    assert f"to fetch    {len(served.repositories['org/m'][LARGE]) / 1e6:.1f} MB at commit {COMMIT}" in told
    assert "served      yes: mmrt up hf.co/org/m\n" in told
    assert [asked.partition("=")[2].partition("-")[0] for asked in served.ranges(LARGE)][0] == "0"
    assert not list(tmp_path.glob("state/mmrt/gguf/*"))

    for tag in ("", ":F16"):
        assert run(["pull", f"org/m{tag}"]) == 0
    assert served.ranges("mmproj-m-F16.gguf") == []
    capsys.readouterr()
    assert run(["up", "org/m:q8_0", "--dry-run", "--port", "0"]) == 0
    assert f"model          org/m:{LARGE}@{COMMIT}" in capsys.readouterr().out
    assert [(line[0], line[3]) for line in lines(capsys)] == [("org/m:m-F16", "yes"), ("org/m:m-Q8_0", "yes"), (LARGE[:-5], "yes")]

    assert run(["rm", "org/m:f16"]) == 2  # without a terminal it has to be said
    assert run(["rm", "org/m:f16", "--yes"]) == 0
    assert [line[0] for line in lines(capsys)] == ["org/m:m-Q8_0", "m-Q8_0"]
    assert run(["rm", "m-Q8_0", "--yes"]) == run(["model", "rm", "org/m", "-y"]) == 0
    assert lines(capsys) == [] and not (tmp_path / "cache" / "models--org--m").exists()
    assert run(["rm", "org/m", "--yes"]) == 2


def test_what_a_run_serves_is_not_removed(served: FakeHub, tmp_path: Path, capsys: Captured) -> None:
    assert run(["pull", "org/m:q8_0"]) == run(["pull", "org/m:f16"]) == 0
    path = tmp_path / "cache" / "models--org--m" / "snapshots" / COMMIT / LARGE
    config = RuntimeConfig(model=ModelSection(path=str(path)))
    made = whole_checkpoint(config)
    capsys.readouterr()
    with create_run(tmp_path / "run.of-front", run_info(config, made, 1)):
        for name in ("org/m", "org/m:q8_0", "m-Q8_0"):
            assert run(["rm", name, "--yes"]) == 1
            assert f"the run run.of-front serves {name}: end it with `mmrt down`" in capsys.readouterr().err
        assert run(["rm", "org/m:f16", "--yes"]) == 0
    assert made.is_dir() and path.is_file()


def test_a_directory_of_a_file_that_is_gone_is_removed_when_another_is_made(files: dict[str, bytes], tmp_path: Path) -> None:
    def made_of(name: str) -> Path:
        (tmp_path / name).write_bytes(files[LARGE])
        return checkpoint_of(RuntimeConfig(model=ModelSection(path=str(tmp_path / name))), tmp_path / "state")

    first, second = made_of("a.gguf"), made_of("b.gguf")
    assert first.is_dir() and second.is_dir()
    (tmp_path / "a.gguf").unlink()
    third = made_of("c.gguf")
    assert not first.parent.exists() and second.is_dir() and third.is_dir()


def test_units_name_what_is_made_of_a_file(served: FakeHub, tmp_path: Path, capsys: Captured) -> None:
    config = tmp_path / "mmrt.toml"
    config.write_text('[model]\npath = "org/m:Q8_0"\n')
    arguments = ["units", "--config", str(config), "--out", str(tmp_path / "units")]
    assert run(arguments) == 2
    assert "mmrt pull org/m:Q8_0 fetches it" in capsys.readouterr().err
    assert run(["pull", "org/m:Q8_0"]) == run(arguments) == 0
    (made,) = tmp_path.glob("state/mmrt/gguf/*/m-Q8_0")
    text = (tmp_path / "units" / "mmrt-memory.service").read_text()
    assert f'Environment="MMRT_CHECKPOINT={made}"\nEnvironment="MMRT_MODEL_NAME=org/m:Q8_0"\n' in text


def test_what_was_interrupted_is_listed_and_removed(served: FakeHub, tmp_path: Path, capsys: Captured) -> None:
    async def cut(request: web.Request) -> web.StreamResponse | None:
        is_whole = request.path.endswith(LARGE) and not request.headers.get("Range")
        return web.Response(status=503) if is_whole else None

    served.hook = cut
    assert run(["pull", "org/m:Q8_0"]) == 1
    (partial,) = tmp_path.glob("cache/*/blobs/*.incomplete")
    partial.write_bytes(served.repositories["org/m"][LARGE][:100_000])
    assert [line[:4] for line in lines(capsys)] == [["org/m", "0.1", "MB", "no"]]
    assert run(["rm", "org/m", "--yes"]) == 0 and lines(capsys) == []


def test_the_part_that_sees_comes_and_goes_with_its_model(hub: FakeHub, tmp_path: Path, capsys: Captured) -> None:
    """Also where models lie in folders of their own; of the parts that of 16 bits."""
    make_checkpoint("tiny", tmp_path / "vl", "qwen3_vl")
    for kind in ("F16", "Q8_0"):
        write_gguf(tmp_path / "vl", tmp_path / f"m-{kind}.gguf", kind)
        write_tower(tmp_path / "vl", tmp_path / f"mmproj-{kind}.gguf", kind)
    names = {"F16/m-F16.gguf": "m-F16.gguf", **{name: name for name in ("m-Q8_0.gguf", "mmproj-F16.gguf", "mmproj-Q8_0.gguf")}}
    hub.repositories["org/vl"] = {name: (tmp_path / file).read_bytes() for name, file in names.items()}
    assert run(["model", "check", "org/vl:F16"]) == 0
    assert "takes       text, image, video\n" in capsys.readouterr().out
    for tag in ("F16", "Q8_0"):
        assert run(["pull", f"org/vl:{tag}"]) == 0
        assert run(["model", "check", f"org/vl:{tag}"]) == 0
        assert "takes       text, image, video\n" in capsys.readouterr().out
    assert hub.ranges("mmproj-Q8_0.gguf") == []
    snapshot = tmp_path / "cache" / "models--org--vl" / "snapshots" / COMMIT
    for tag, left in (("F16", ["m-Q8_0.gguf", "mmproj-F16.gguf"]), ("Q8_0", [])):
        assert run(["rm", f"org/vl:{tag}", "--yes"]) == 0
        assert sorted(file.name for file in snapshot.rglob("*.gguf")) == left


def test_a_cache_that_cannot_be_written(served: FakeHub, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "cache").write_text("")
    assert run(["pull", "org/m:Q8_0"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: org/m: ") and line.endswith(" cannot be written: Not a directory")
