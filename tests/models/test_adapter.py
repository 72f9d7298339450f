"""LoRA adapters that peft writes, merged as peft merges them; and what is refused."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrt.models.checkpoint.files import adapted_directory, files_of_tensors
from mmrt.models.checkpoint.weights import check_weights, read_weights
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError
from mmrt.tests.models.test_fp8 import FORMS, write
from mmrt.tests.models.test_text_families import save

TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]


class Adapted:
    """A base, an adapter that peft wrote for it, and the base with that merged by peft."""

    def __init__(self, root: Path, **options: Any) -> None:
        import peft
        import transformers

        self.base, self.adapter, self.merged = (root / name for name in ("base", "adapter", "merged"))
        self.base.mkdir()
        save(self.base, "llama")
        torch.manual_seed(3)
        config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=TARGETS, init_lora_weights=False, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft asks transformers in a deprecated way
            model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32), config)
            model.save_pretrained(self.adapter)
            model.merge_and_unload().save_pretrained(self.merged)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(tmp_path_factory.mktemp("adapted"))


def weights_of(path: Path, **formats: Any) -> dict[str, torch.Tensor]:
    return read_weights(path, load_model_config(path, "float32", **formats))


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 2}}], ids=str)
def test_weights_are_those_that_peft_merges(tmp_path: Path, options: dict[str, Any]) -> None:
    one = Adapted(tmp_path, **options)
    found, expected = weights_of(adapted_directory(one.base, one.adapter, tmp_path / "home")), weights_of(one.merged)
    base = weights_of(one.base)
    changed = {name for name in base if not torch.equal(found[name], base[name])}
    assert changed == {f"layers.{layer}.{part}" for layer in range(3) for part in ("qkv", "o", "gate_up", "down")}
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weights", ["bfloat16", "int8", "int4"])
def test_the_sum_is_rounded_once(adapted: Adapted, tmp_path: Path, weights: str) -> None:
    """As the merged checkpoint is; a last bit of a sum may round to another side."""
    found = weights_of(adapted_directory(adapted.base, adapted.adapter, tmp_path), weights=weights)
    expected = weights_of(adapted.merged, weights=weights)
    for name in ("layers.0.qkv", "layers.2.down"):
        assert (found[name] != expected[name]).float().mean() < 0.01


def test_a_quantized_base_is_computed_and_changed(adapted: Adapted, tmp_path: Path) -> None:
    fp8, plain = write(adapted.base, tmp_path, FORMS["edges"])
    found = weights_of(adapted_directory(fp8, adapted.adapter, tmp_path / "home"))
    expected = weights_of(adapted_directory(plain, adapted.adapter, tmp_path / "home"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_directory_is_made_of_both(adapted: Adapted, tmp_path: Path) -> None:
    made = adapted_directory(adapted.base, adapted.adapter, tmp_path)
    assert made.name == "base+adapter" and (made / "config.json").is_file()
    assert adapted_directory(adapted.base, adapted.adapter, tmp_path) == made
    assert {file.name for file in files_of_tensors(made)} == {"model.safetensors", "adapter_model.safetensors"}
    with pytest.raises(CheckpointError, match="has an adapter already"):
        adapted_directory(made, adapted.adapter, tmp_path)
    with pytest.raises(CheckpointError, match="no-such is not a directory: expected an adapter that peft has written"):
        adapted_directory(adapted.base, tmp_path / "no-such", tmp_path)


def _fields(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        config = json.loads((path / "adapter_config.json").read_text())
        (path / "adapter_config.json").write_text(json.dumps({**config, **changes}))

    return change


def _tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        tensors = load_file(path / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, path / "adapter_model.safetensors")

    return apply


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "kind": (_fields(peft_type="LOHA"), "peft_type is 'LOHA', expected 'LORA'"),
    "no kind": (lambda path: (path / "adapter_config.json").write_text("[1]"), "peft_type is None, expected 'LORA'"),  # type: ignore[dict-item]
    "no JSON": (lambda path: (path / "adapter_config.json").write_text("{"), "not valid JSON"),  # type: ignore[dict-item]
    "no configuration": (lambda path: (path / "adapter_config.json").unlink(), "an adapter is a directory that peft has written"),
    "DoRA": (_fields(use_dora=True), "use_dora is True, which is not supported"),
    "biases": (_fields(bias="all"), "bias is 'all', which is not supported"),
    "modules": (_fields(modules_to_save=["lm_head"]), r"modules_to_save is \['lm_head'\], which is not supported"),
    "alphas": (_fields(alpha_pattern={"q_proj": 2}), "alpha_pattern is {'q_proj': 2}, which is not supported"),
    "PiSSA": (_fields(init_lora_weights="pissa_niter_4"), "init_lora_weights is 'pissa_niter_4', for which the base has other weights"),
    "LoRA-GA": (_fields(init_lora_weights="lora_ga"), "init_lora_weights is 'lora_ga', for which the base has other weights"),
    "activated": (_fields(alora_invocation_tokens=[1, 2]), r"alora_invocation_tokens is \[1, 2\], which is not supported"),
    "a field of later": (_fields(use_tomorrow=True), "use_tomorrow is True, which is not supported"),
    "twice": (_tensors(lambda t: t.update({f"{Q}A.default.weight": t[f"{Q}A.weight"] + 1})), "is there twice, by another name"),
    "nothing": (_tensors(lambda t: t.clear()), "has no tensors"),
    "no rank": (_tensors(lambda t: t.update({f"{Q}A.weight": torch.zeros(0, 64)})), "is not supported, only A and B"),
    "gone": (lambda path: shutil.rmtree(path), "an adapter is a directory that peft has written"),
    "alpha": (_fields(lora_alpha="8"), "lora_alpha is '8', expected a number"),
    "no weights": (lambda path: (path / "adapter_model.safetensors").unlink(), "holds no .*safetensors file"),
    "A alone": (_tensors(lambda t: t.pop(f"{Q}B.weight")), "has A or B alone for 'language.layers.0.self_attn.q_proj.weight'"),
    "rows": (
        _tensors(lambda t: t.update({f"{Q}B.weight": torch.zeros(8, 4)})),
        r"B of \[8, 4\] for .*q_proj.weight' of shape \[64, 64\]",
    ),
    "ranks": (_tensors(lambda t: t.update({f"{Q}B.weight": torch.zeros(64, 3)})), r"A of shape \[4, 64\] and B of \[64, 3\]"),
    "another model": (
        _tensors(lambda t: t.update({name.replace("layers.0", "layers.9"): t.pop(name) for name in list(t) if "layers.0" in name})),
        "changes 'language.layers.9.*', a matrix that the model does not have",
    ),
    "vocabulary": (
        _tensors(lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 8)})),
        "lora_embedding_A' with dtype F32 and shape .* is not supported",
    ),
    "NaN": (_tensors(lambda t: t[f"{Q}A.weight"].fill_(torch.nan)), "has a value that is not finite"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_merged_is_refused_by_name(adapted: Adapted, tmp_path: Path, fault: str) -> None:
    change, message = FAULTS[fault]
    broken = Path(shutil.copytree(adapted.adapter, tmp_path / "broken"))
    made = adapted_directory(adapted.base, broken, tmp_path / "home")
    change(broken)
    with pytest.raises(CheckpointError, match=message):
        weights_of(made)
    assert any(check_weights(made, load_model_config(made)).problems)
