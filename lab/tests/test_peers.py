"""``mmrt bench peers``: its arithmetic, its refusals and its processes; with the extra, the same logits from llama.cpp."""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from mmrt.bench.serve.errors import BenchError
from mmrt.models.checkpoint.weights import read_weights
from mmrt.models.config import load_model_config
from mmrt.models.gguf.directory import gguf_directory
from mmrt.models.lm.decoder import Chunk
from mmrt.models.lm.language_model import build_language_model
from mmrt.models.make.checkpoint import make_checkpoint
from mmrt.tests.models.gguf_files import write_gguf
from mmrt_lab.peers.command import convert, in_format, main, take_turns
from mmrt_lab.peers.figures import Pair as PairOfFigures
from mmrt_lab.peers.figures import Times, figures_of, goal, rows_of
from mmrt_lab.peers.gguf_file import check_shape, parts_of
from mmrt_lab.peers.party import CONTEXT_TOKENS, Job, Time, prompt, started

EXTRA = ("llama_cpp", "gguf")
HAS_EXTRA = all(find_spec(name) for name in EXTRA)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("peers") / "tiny"
    make_checkpoint("tiny", path)
    return path


def test_ratios_are_of_medians_and_goals_of_the_job() -> None:
    times = {
        Job(0, 1): Times([Time(3.0, 1.0), Time(1.0, 2.0), Time(2.0, 9.0)], [Time(4.0, 4.0)] * 3),
        Job(16, 2): Times([Time(0.5, 0.25)], [Time(0.25, 0.5)]),
    }
    prefill, step = figures_of("int8", times)
    assert (prefill.own.wall_ms, prefill.own.cpu_ms, prefill.peer.cpu_ms) == (2000, 2000, 4000)
    assert (prefill.wall_ratio, prefill.cpu_ratio, prefill.goal) == (0.5, 0.5, 0.5)
    assert (step.wall_ratio, step.cpu_ratio, step.goal) == (2.0, 0.5, 0.8)
    pair = PairOfFigures(weights="int8", dtype="float32", peer_weights="Q8_0", correlation=1.0, figures=[prefill, step])
    assert rows_of(pair)[1] == ["step, 16 seq", "2", "500", "250", "250", "500", "2.00", "0.50", "0.8"]


def test_goals_are_those_of_the_width() -> None:
    assert [goal(weights, 0) for weights in ("float32", "bfloat16", "float16", "int8", "int4")] == [None, 0.9, 0.9, 0.5, None]
    assert [goal("int4", count) for count in (1, 4, 16)] == [1.1, 0.9, 0.8]


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)  # not to be found, also where it is installed
    assert main([]) == 1
    assert "the package llama_cpp is missing: pip install -e './lab[peers]'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--threads", "0"], ["--weights", "Q8_0"]])
def test_bad_options_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert arguments[1] in capsys.readouterr().err


def test_a_model_without_a_counterpart_is_refused(tmp_path: Path) -> None:
    make_checkpoint("tiny", tmp_path / "null", "null")
    with pytest.raises(BenchError, match="'null' is not of the architecture qwen2"):
        check_shape(load_model_config(tmp_path / "null"))


def test_the_file_has_every_weight_of_the_language_part(checkpoint: Path) -> None:
    config = load_model_config(checkpoint, "float32")
    weights = {name: values for name, values in read_weights(checkpoint, config).items() if not name.startswith(("vision.", "audio."))}
    parts = list(parts_of(config.language, weights))
    assert sum(part.values.numel() for part in parts) == sum(values.numel() for values in weights.values())
    assert all(part.is_matrix == (part.values.dim() == 2) for part in parts)
    named = {part.name: part.values for part in parts}
    qkv = torch.cat([named[f"blk.1.attn_{name}.weight"] for name in "qkv"])
    assert torch.equal(qkv, weights["layers.1.qkv"])
    assert torch.equal(named["blk.0.ffn_up.weight"], weights["layers.0.gate_up"][config.language.intermediate_size :])


def test_our_party_answers_jobs_and_says_the_models_logits(checkpoint: Path) -> None:
    config = in_format(checkpoint, "float32")
    with started("own", [str(checkpoint), config.dtype, config.weights], os.environ) as child:
        (prefill,), steps = child.do(Job(0, 1)), child.do(Job(4, 1))
        assert prefill.wall_s > 0 and prefill.cpu_s > 0 and len(steps) == 6
    ids = torch.tensor(prompt(config.language.vocab_size))
    kv = torch.zeros((17, config.kv_page_bytes(16)), dtype=torch.uint8)
    model = build_language_model(config, read_weights(checkpoint, config), kv, 16)
    chunk = Chunk(model.embed(ids), torch.arange(len(ids)).expand(3, -1), 0, torch.arange(17))
    (hidden,) = model.prefill([chunk], wanted={0})
    torch.testing.assert_close(torch.tensor(child.hello.logits), model.logits(hidden[CONTEXT_TOKENS:])[0], atol=1e-3, rtol=1e-3)


def test_a_party_that_cannot_load_ends_the_comparison(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="llama_cpp ended with status 1"):
        with started("llama_cpp", [str(tmp_path / "absent.gguf")], os.environ):
            pass


@pytest.mark.skipif(not HAS_EXTRA, reason="needs the extra peers")
@pytest.mark.parametrize(("form", "least"), [("F32", 0.99999), ("F16", 0.9999), ("Q8_0", 0.99)])
def test_llama_cpp_computes_the_same_model(checkpoint: Path, tmp_path: Path, form: str, least: float) -> None:
    convert(checkpoint, tmp_path / f"{form}.gguf")
    ours = [str(checkpoint), "float32", "auto"]
    with started("own", ours, os.environ) as own, started("llama_cpp", [str(tmp_path / f"{form}.gguf")], os.environ) as peer:
        logits = torch.tensor([own.hello.logits, peer.hello.logits])
        assert torch.corrcoef(logits)[0, 1] > least
        times = {Job(16, 1): Times([], [])}
        take_turns(own, peer, times)
        assert len(times[Job(16, 1)].peer) == 6


@pytest.mark.skipif(not HAS_EXTRA, reason="needs the extra peers")
@pytest.mark.parametrize("family", ["gemma3", "glm4", "phi3", "smollm3"])
def test_both_sides_read_files_of_other_families(tmp_path: Path, family: str) -> None:
    """Beyond windows, and with parts of heads that turn: the same logits. llama.cpp leaves Phi-3's window out."""
    make_checkpoint("tiny", tmp_path / "checkpoint", family)  # type: ignore[arg-type]
    config = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps(config | ({"sliding_window": None} if family == "phi3" else {})))
    write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf")
    directory = gguf_directory(tmp_path / "model.gguf", tmp_path)
    ours = [str(directory), "float32", "auto"]
    with started("own", ours, os.environ) as own, started("llama_cpp", [str(tmp_path / "model.gguf")], os.environ) as peer:
        assert torch.corrcoef(torch.tensor([own.hello.logits, peer.hello.logits]))[0, 1] > 0.9999


@pytest.mark.skipif(not HAS_EXTRA, reason="needs the extra peers")
def test_the_command_reads_a_file_on_both_sides(tmp_path: Path) -> None:
    make_checkpoint("tiny", tmp_path / "checkpoint", "gemma3")
    write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", "Q8_0")
    out = tmp_path / "out.json"
    assert main(["--file", str(tmp_path / "model.gguf"), "--threads", "1", "--rounds", "1", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["checkpoint"] == "model.gguf" and [pair["peer_weights"] for pair in found["pairs"]] == ["model"]
    assert found["pairs"][0]["correlation"] > 0.99


@pytest.mark.skipif(not HAS_EXTRA, reason="needs the extra peers")
def test_the_command_writes_its_figures(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["--checkpoint", str(checkpoint), "--weights", "int8", "--threads", "1", "--rounds", "1", "--json", str(out)]
    assert main(arguments) == 0
    (pair,) = json.loads(out.read_text())["pairs"]
    assert [figure["job"]["num_sequences"] for figure in pair["figures"]] == [0, 1, 4, 16]
