"""The accuracy bench on a tiny checkpoint: in float32 our logits are transformers'; in bfloat16 both are about equally far."""

import json
from pathlib import Path

import msgspec
import pytest

from mmrt.models.make.checkpoint import make_checkpoint
from mmrt_lab.accuracy import AccuracyBench, main


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("accuracy") / "tiny"
    make_checkpoint("tiny", path)
    return path


def run(checkpoint: Path, out: Path, dtype: str) -> AccuracyBench:
    assert main([str(checkpoint), "--dtype", dtype, "--sequences", "4", "--tokens", "12", "--json", str(out)]) == 0
    return msgspec.json.decode(out.read_bytes(), type=AccuracyBench)


def test_float32_is_the_reference(checkpoint: Path, tmp_path: Path) -> None:
    ours = run(checkpoint, tmp_path / "out.json", "float32").differences[1]
    assert ours.num_tokens == 48
    assert ours.max_error < 1e-3
    assert ours.flips == 0


def test_packed_pages_are_off_by_what_their_bits_lose(checkpoint: Path, tmp_path: Path) -> None:
    _, ours, *_, int8, int4 = run(checkpoint, tmp_path / "out.json", "float32").differences
    assert ours.mean_error < int8.mean_error < int4.mean_error / 4
    assert (ours.kv_bytes, int8.kv_bytes, int4.kv_bytes) == (2048, 576, 320)


def test_bfloat16_is_as_close_as_transformers(checkpoint: Path, tmp_path: Path) -> None:
    peer, ours, int8, fp8, *_ = run(checkpoint, tmp_path / "out.json", "bfloat16").differences
    assert ours.mean_error < 1.5 * peer.mean_error
    assert ours.mean_error < int8.mean_error < fp8.mean_error
    assert int8.kv_bytes == fp8.kv_bytes < 0.63 * ours.kv_bytes


def test_a_quantized_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers has nothing to read it with."""
    directory = tmp_path / "awq"
    make_checkpoint("tiny", directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq", "bits": 4}}))
    with pytest.raises(SystemExit):
        main([str(directory)])
    assert f"{directory} is quantized" in capsys.readouterr().err
