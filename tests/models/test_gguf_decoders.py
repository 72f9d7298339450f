"""GGUF files of text families whose decoders differ from Llama's or Qwen's: their configuration and values beside the checkpoints that
they were made of, logits beside transformers', and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from mmrt.models.checkpoint.weights import check_weights, read_weights
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError
from mmrt.models.gguf.directory import gguf_directory
from mmrt.models.make.checkpoint import make_checkpoint
from mmrt.tests.models.gguf_files import Tensors, with_fields, write_gguf
from mmrt.tests.models.kept import exact
from mmrt.tests.models.logits import our_logits


class Made:
    """A checkpoint, the file that was written of it, the directory that was made of that; and the checkpoint with the file's values."""

    def __init__(self, root: Path, family: str, kind: str, changes: dict[str, Any]) -> None:
        self.checkpoint, self.file, self.plain = root / "checkpoint", root / "model.gguf", root / "plain"
        make_checkpoint("tiny", self.checkpoint, family)  # type: ignore[arg-type]
        config = json.loads((self.checkpoint / "config.json").read_text())
        (self.checkpoint / "config.json").write_text(json.dumps(config | changes))
        self.values: Tensors = write_gguf(self.checkpoint, self.file, kind)
        self.directory = gguf_directory(self.file, root / "home")
        shutil.copytree(self.checkpoint, self.plain)
        tensors = load_file(self.plain / "model.safetensors")
        save_file({name: self.values.get(name, value.float()) for name, value in tensors.items()}, self.plain / "model.safetensors")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    known: dict[str, Made] = {}

    def get(family: str, kind: str = "F32", **changes: Any) -> Made:
        key = f"{family} {kind} {changes}"
        if key not in known:
            known[key] = Made(tmp_path_factory.mktemp("gguf"), family, kind, changes)
        return known[key]

    return get


LONG = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.05 * pair for pair in range(12)],
        "long_factor": [2.0 + pair for pair in range(12)],
        "partial_rotary_factor": 0.75,
        "attention_factor": 1.25,
    },
    "original_max_position_embeddings": 256,
    "sliding_window": 24,
}
STRETCHED = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    },
}
TEXTS = ("gemma3", "glm4", "phi3", "smollm3", "granite", "olmo2", "olmo3", "ernie4_5", "seed_oss")
KINDS = [*((family, {}) for family in TEXTS), ("phi3", LONG), ("gemma3", STRETCHED)]


@pytest.mark.parametrize(("family", "changes"), KINDS)
def test_a_file_is_its_checkpoint(made: Callable[..., Made], family: str, changes: dict[str, Any]) -> None:
    one = made(family, **changes)
    ours, theirs = (load_model_config(path, "float32") for path in (one.directory, one.checkpoint))
    assert (ours.family, ours.max_context, ours.media_kinds) == (family, theirs.max_context, ())
    assert replace(ours.language, ropes=()) == replace(theirs.language, ropes=())
    for rope, expected_rope in zip(ours.language.ropes, theirs.language.ropes, strict=True):
        found_factors, factors = ((*its.stretch, its.factor) for its in (rope, expected_rope))
        assert found_factors == pytest.approx(factors, rel=1e-6)  # a file has them in float32
        assert replace(rope, stretch=(), factor=1.0) == replace(expected_rope, stretch=(), factor=1.0)
    found, expected = read_weights(one.directory, ours), read_weights(one.checkpoint, theirs)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0, msg=name)
    report = check_weights(one.directory, ours)
    assert not report.problems and all(name.startswith("rope_factors_") for name in report.unread)


@torch.inference_mode()
@pytest.mark.parametrize(("family", "changes"), KINDS)
def test_logits_of_a_file_are_transformers(made: Callable[..., Made], family: str, changes: dict[str, Any]) -> None:
    """Of a checkpoint that has the values that the file's codes stand for; also behind the window."""
    import transformers

    one = made(family, "Q8_0", **changes)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(one.plain, dtype=torch.float32).eval()
    ids = torch.randint(0, 1000, (2, 80), generator=torch.Generator().manual_seed(1))
    expected = theirs(ids).logits[:, 59:-1]
    found = our_logits(one.directory, load_model_config(one.directory, "float32"), ids, 60)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(("family", "kind", "weights"), [("glm4", "Q4_0", "int4"), ("glm4", "Q5_0", "int8g"), ("phi3", "Q4_1", "int4")])
def test_codes_of_a_file_are_kept(made: Callable[..., Made], family: str, kind: str, weights: Any) -> None:
    """But for scales, which are rounded to bfloat16; also where rows of queries and keys lie in another order."""
    one = made(family, kind)
    found, expected = (
        read_weights(one.directory, load_model_config(one.directory, "float32", weights=form)) for form in (weights, "auto")
    )
    for name in ("layers.0.qkv", "layers.1.gate_up", "layers.2.down"):
        assert found[name].dtype == (torch.uint8 if weights == "int4" else torch.int8)
        values = exact(found, name)
        limit = 2**-7 * expected[name].view(len(values), -1, 32).abs().amax(2).repeat_interleave(32, 1)
        assert ((values - expected[name]).abs() <= limit + 1e-9).all(), name


def test_layers_with_windows_as_a_file_says(made: Callable[..., Made], tmp_path: Path) -> None:
    """By a number, by each layer, or by none; the largest model divides scores by another number."""
    one = made("gemma3")

    def windows(**changes: Any) -> list[bool]:
        file = with_fields(one.file, tmp_path / "model.gguf", {f"gemma3.attention.{key}": value for key, value in changes.items()})
        return [bool(layer.mixer.window) for layer in load_model_config(gguf_directory(file, tmp_path / "home")).language.layers]

    assert windows() == [True] * 5 + [False] + [True]
    assert windows(sliding_window_pattern=2) == [True, False, True, False, True, False, True]
    said = [False, True, True, False, False, True, True]
    assert windows(sliding_window_pattern=said) == said
    assert windows(sliding_window=None) == [False] * 7
    with pytest.raises(CheckpointError, match="sliding_window_pattern is no list of true or false for each of 7 layers"):
        windows(sliding_window_pattern=[True, False])


@pytest.mark.parametrize("family", ["granite", "seed_oss"])
def test_windows_and_parts_of_heads_that_are_not_read_are_refused(made: Callable[..., Made], tmp_path: Path, family: str) -> None:
    """Also in architectures that have other fields of their own."""
    for key, value in {"attention.sliding_window": 7, "rope.dimension_count": 4, "attention.causal": False}.items():
        file = with_fields(made(family).file, tmp_path / "model.gguf", {f"{family}.{key}": value})
        with pytest.raises(CheckpointError, match=f"{family}.{key} is {str(value).lower()}; .* not supported"):
            gguf_directory(file, tmp_path / "home")


def test_granite_without_what_its_logits_are_divided_by(made: Callable[..., Made], tmp_path: Path) -> None:
    file = with_fields(made("granite").file, tmp_path / "model.gguf", {"granite.logit_scale": None})
    with pytest.raises(CheckpointError, match="granite.logit_scale is missing"):
        gguf_directory(file, tmp_path / "home")


def test_a_softcap_and_another_base_are_read(made: Callable[..., Made], tmp_path: Path) -> None:
    changes = {"gemma3.final_logit_softcapping": 30.0, "gemma3.rope.freq_base_swa": 20000.0}
    language = load_model_config(gguf_directory(with_fields(made("gemma3").file, tmp_path / "model.gguf", changes), tmp_path)).language
    assert language.final_softcap == 30 and [rope.theta for rope in language.ropes] == [20000, 1e6]
