"""FP8 checkpoints: values and logits against transformers where it reads a form, against the form's definition elsewhere; refusals."""

import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrt.models.checkpoint.weights import check_weights, read_weights
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError
from mmrt.schema.quantization import Fp8Quantization, find_quantization
from mmrt.tests.models.logits import our_logits
from mmrt.tests.models.test_qwen3_5 import save as save_hybrid
from mmrt.tests.models.test_text_families import save

MATRICES = ("_proj.weight", ".in_proj_qkv.weight", ".in_proj_z.weight")
LARGEST = torch.finfo(torch.float8_e4m3fn).max
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def floats(strategy: str, **more: Any) -> dict[str, Any]:
    """compressed-tensors' configuration."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **more}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


class Form:
    """One way to publish FP8: config.json's field, rows and columns of a block (0: all of them), and how a scale is stored."""

    def __init__(self, config: dict[str, Any], rows: int, columns: int, ending: str, shape: str = "blocks", exponents: bool = False):
        self.config, self.rows, self.columns, self.ending = config, rows, columns, ending
        self.shape, self.exponents = shape, exponents

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Numbers, scales as they are stored, and the float32 values of both."""
        rows, columns = self.rows or weight.shape[0], self.columns or weight.shape[1]
        counts = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
        padded = torch.zeros(counts[0] * rows, counts[1] * columns)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        scales = (padded.view(counts[0], rows, counts[1], columns).abs().amax((1, 3)) / LARGEST).clamp(min=1e-12)
        if self.exponents:
            scales = torch.exp2(scales.log2().ceil())
        spread = scales.repeat_interleave(rows, 0)[: weight.shape[0]].repeat_interleave(columns, 1)[:, : weight.shape[1]]
        numbers = (weight / spread).to(torch.float8_e4m3fn)
        stored = (scales.log2() + 127).to(torch.uint8) if self.exponents else scales
        shapes = {"blocks": stored.shape, "number": (), "one": (1,), "vector": (counts[0],)}
        return numbers, stored.reshape(shapes[self.shape]).contiguous(), numbers.float() * spread


FORMS = {
    "blocks": Form(BLOCKS, 128, 128, "weight_scale_inv"),
    "edges": Form({**BLOCKS, "weight_block_size": [96, 112]}, 96, 112, "weight_scale_inv"),
    "exponents": Form({**BLOCKS, "scale_fmt": "ue8m0"}, 128, 128, "weight_scale_inv", exponents=True),
    "mx": Form({**BLOCKS, "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}, 1, 32, "weight_scale", exponents=True),
    "tensor": Form({"quant_method": "fp8", "activation_scheme": "static"}, 0, 0, "weight_scale", "number"),
    "compressed tensor": Form(floats("tensor"), 0, 0, "weight_scale", "one"),
    "compressed channel": Form(floats("channel"), 1, 0, "weight_scale"),
    "vector": Form(floats("channel"), 1, 0, "weight_scale", "vector"),
    "compressed block": Form(floats("block", block_structure=[128, 128]), 128, 128, "weight_scale"),
}
Pair = tuple[Path, Path]


def write(source: Path, root: Path, form: Form) -> Pair:
    """Copies of a checkpoint: with the decoder's matrices in FP8, and with the values of that in float32."""
    fp8, plain = (Path(shutil.copytree(source, root / name)) for name in ("fp8", "plain"))
    ours = load_file(source / "model.safetensors")
    theirs = {name: value.float() for name, value in ours.items()}
    for name in [name for name in ours if name.endswith(MATRICES)]:
        numbers, scales, theirs[name] = form.quantize(theirs[name])
        ours |= {name: numbers, name.removesuffix("weight") + form.ending: scales}
        if form.config.get("activation_scheme") == "static":
            ours[name.removesuffix("weight") + "input_scale"] = torch.ones(())
    save_file(ours, fp8 / "model.safetensors", {"format": "pt"})
    save_file(theirs, plain / "model.safetensors", {"format": "pt"})
    given = json.loads((source / "config.json").read_text())
    (fp8 / "config.json").write_text(json.dumps({**given, "quantization_config": form.config}))
    return fp8, plain


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """A small Llama in a form of FP8, and with the values of that. Rows of k and v fill half a block."""
    source = tmp_path_factory.mktemp("source")
    save(source, "llama", hidden_size=256, intermediate_size=384, num_attention_heads=4, num_key_value_heads=1)
    made: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in made:
            made[name] = write(source, tmp_path_factory.mktemp("form"), FORMS[name])
        return made[name]

    return get


@pytest.mark.parametrize("name", FORMS)
def test_a_checkpoint_has_the_values_that_it_says(pair: Callable[[str], Pair], name: str) -> None:
    fp8, plain = pair(name)
    for dtype in ("float32", "bfloat16"):
        found = read_weights(fp8, load_model_config(fp8, dtype))  # type: ignore[arg-type]
        expected = read_weights(plain, load_model_config(plain, dtype))  # type: ignore[arg-type]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in found)
    assert not check_weights(fp8, load_model_config(fp8)).problems


EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 40}
QUARTERS = Form({**BLOCKS, "weight_block_size": [32, 32]}, 32, 32, "weight_scale_inv")


def stack(path: Path, is_turned: bool) -> dict[str, torch.Tensor]:
    """Put the matrices of a layer's experts, and their scales, into one tensor each."""
    tensors = load_file(path / "model.safetensors")
    for experts in (f"model.layers.{layer}.mlp.experts." for layer in range(4)):
        for ending, own in ((".weight", ""), (".weight_scale_inv", "_scale_inv")):
            gate, up, down = (
                torch.stack([tensors.pop(f"{experts}{expert}.{name}_proj{ending}") for expert in range(3)])
                for name in ("gate", "up", "down")
            )
            for name, values in (("gate_up", torch.cat((gate, up), 1)), ("down", down)):
                tensors[f"{experts}{name}_proj{own}"] = values.transpose(1, 2).contiguous() if is_turned else values
    return tensors


@pytest.fixture(scope="module")
def with_experts(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Qwen3.5: rows of queries and gates by turns, within blocks; both parts of the mixed columns."""
    source = tmp_path_factory.mktemp("source")
    save_hybrid(source, **EXPERTS, hidden_size=96, num_hidden_layers=4)
    return write(source, tmp_path_factory.mktemp("form"), QUARTERS)


@pytest.mark.parametrize("form", ["apart", "stacked", "turned"])
def test_experts_have_the_values_that_files_say(with_experts: Pair, tmp_path: Path, form: str) -> None:
    fp8, plain = with_experts
    path = Path(shutil.copytree(fp8, tmp_path / "copy"))
    if form != "apart":
        save_file(stack(path, form == "turned"), path / "model.safetensors", {"format": "pt"})
    found, expected = (read_weights(each, load_model_config(each, "float32")) for each in (path, plain))
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)
    checked = check_weights(path, load_model_config(path))
    assert not checked.problems and not checked.unread


STACKED = "model.layers.2.mlp.experts."
BROKEN_STACKS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], list[int]]] = {
    r"experts.gate_up_proj_scale_inv' of shape \[3, 4, 3\] is missing": (
        lambda tensors: tensors.pop(f"{STACKED}gate_up_proj_scale_inv"),
        [32, 32],
    ),
    r"experts.down_proj' has shape \[2, 96, 64\], expected \[3, 96, 64\]": (
        lambda tensors: tensors.update({f"{STACKED}down_proj": tensors[f"{STACKED}down_proj"][:2].clone()}),
        [32, 32],
    ),
    r"gate_up_proj' has blocks of \[48, 32\], expected blocks .* that divide 64 rows of an expert": (lambda tensors: None, [48, 32]),
}


@pytest.mark.parametrize("message", BROKEN_STACKS)
def test_broken_stacks_of_experts(with_experts: Pair, tmp_path: Path, message: str) -> None:
    change, block = BROKEN_STACKS[message]
    path = Path(shutil.copytree(with_experts[0], tmp_path / "copy"))
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = block
    (path / "config.json").write_text(json.dumps(config))
    tensors = stack(path, is_turned=False)
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    assert any(re.search(message, problem) for problem in check_weights(path, load_model_config(path)).problems)


@pytest.mark.parametrize("size", [1 << 40, 1 << 70])
def test_a_block_may_be_stated_larger_than_a_matrix(pair: Callable[[str], Pair], tmp_path: Path, size: int) -> None:
    """Nothing of that size is allocated."""
    fp8, plain = pair("compressed channel")
    copy = shutil.copytree(fp8, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"] = {**BLOCKS, "weight_block_size": [1, size]}
    (copy / "config.json").write_text(json.dumps(config))
    found, expected = (read_weights(path, load_model_config(path, "float32")) for path in (copy, plain))
    assert all(torch.equal(found[key], expected[key]) for key in found)


def test_transformers_reads_the_same_values_and_logits(tmp_path: Path) -> None:
    """It needs shapes that fill blocks: rows of k and v are 256 here."""
    import transformers

    source = tmp_path / "source"
    source.mkdir()
    save(source, "llama", hidden_size=256, intermediate_size=384, num_attention_heads=4, num_key_value_heads=4)
    fp8, _ = write(source, tmp_path, FORMS["blocks"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs, exact = (
            transformers.AutoModelForCausalLM.from_pretrained(fp8, dtype=dtype).eval() for dtype in (torch.bfloat16, torch.float32)
        )
    state = theirs.state_dict()
    ours = read_weights(fp8, load_model_config(fp8, "bfloat16"))
    for layer in range(theirs.config.num_hidden_layers):
        name = f"model.layers.{layer}."
        qkv = torch.cat([state[f"{name}self_attn.{part}_proj.weight"] for part in "qkv"])
        gate_up = torch.cat([state[f"{name}mlp.{part}_proj.weight"] for part in ("gate", "up")])
        assert torch.equal(ours[f"layers.{layer}.qkv"], qkv)
        assert torch.equal(ours[f"layers.{layer}.gate_up"], gate_up)
        assert torch.equal(ours[f"layers.{layer}.down"], state[f"{name}mlp.down_proj.weight"])
        assert torch.equal(ours[f"layers.{layer}.o"], state[f"{name}self_attn.o_proj.weight"])
    ids = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = exact(ids).logits[:, 29:-1]
        found = our_logits(fp8, load_model_config(fp8, "float32"), ids, 30)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_other_formats_round_the_values(pair: Callable[[str], Pair], weights: str) -> None:
    fp8, plain = pair("edges")
    found = read_weights(fp8, load_model_config(fp8, "float32", weights=weights))  # type: ignore[arg-type]
    expected = read_weights(plain, load_model_config(plain, "float32", weights=weights))  # type: ignore[arg-type]
    for name in ("layers.0.qkv", "layers.2.down"):
        assert torch.equal(found[name], expected[name]) and torch.equal(found[f"{name}.scales"], expected[f"{name}.scales"])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**BLOCKS, "fmt": "e5m2"}, "method 'fp8': fmt is 'e5m2', expected 'e4m3'"),
        ({**BLOCKS, "scale_fmt": "e3m2"}, "scale_fmt is 'e3m2', expected 'float' or 'ue8m0'"),
        ({**BLOCKS, "weight_block_size": [128]}, "weight_block_size is [128], expected numbers of rows and columns"),
        ({**BLOCKS, "weight_block_size": [0, 128]}, "weight_block_size is [0, 128], expected"),
        ({**BLOCKS, "weight_block_size": 128}, "Expected `array | null`, got `int`"),
        (floats("group"), "strategy is 'group', expected 'tensor' or 'channel' or 'block'"),
        (floats("block"), "block_structure is [], expected numbers of rows and columns"),
        (floats("tensor", num_bits=4), "num_bits is 4, expected 8"),
        (floats("tensor", type="int"), "type is 'int', expected 'float'"),
        (floats("tensor", symmetric=False), "symmetric is False, expected True"),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        find_quantization({"quantization_config": config})


def test_what_a_checkpoint_says() -> None:
    assert find_quantization({"quantization_config": BLOCKS}) == Fp8Quantization(block=(128, 128))
    assert find_quantization({"quantization_config": {"quant_method": "fp8", "weight_block_size": None}}) == Fp8Quantization(block=None)


NAME = "model.layers.1.mlp.up_proj.weight"


def _number(tensors: dict[str, torch.Tensor], byte: int) -> None:
    tensors[NAME].view(torch.uint8)[3, 5] = byte


def _set(tensors: dict[str, torch.Tensor], name: str, value: torch.Tensor) -> None:
    tensors[name] = value


BROKEN: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "missing": ("blocks", lambda t: t.pop(f"{NAME}_scale_inv"), r"up_proj.weight_scale_inv' of shape \[3, 2\] is missing"),
    "blocks": (
        "blocks",
        lambda t: _set(t, f"{NAME}_scale_inv", torch.ones(2, 2)),
        r"up_proj.weight_scale_inv' has dtype F32 and shape \[2, 2\], expected F32 or .* and \[3, 2\] by quantization_config",
    ),
    "per row": (
        "tensor",
        lambda t: _set(t, f"{NAME}_scale", torch.ones(7)),
        r"up_proj.weight_scale' has dtype F32 and shape \[7\], expected .* and \[\] or \[1\] or \[384, 1\] or",
    ),
    "rows": (
        "blocks",
        lambda t: _set(t, NAME, torch.zeros(8, 256, dtype=torch.float8_e4m3fn)),
        r"up_proj.weight' has shape \[8, 256\], expected \[384, 256\]",
    ),
    "dtype": (
        "blocks",
        lambda t: _set(t, f"{NAME}_scale_inv", torch.ones(3, 2, dtype=torch.int32)),
        "up_proj.weight_scale_inv' has dtype I32 and",
    ),
    "infinite scale": (
        "blocks",
        lambda t: t[f"{NAME}_scale_inv"].fill_(torch.inf),
        "up_proj.weight' has a scale that is not finite",
    ),
    "scale of 255": (
        "exponents",
        lambda t: t[f"{NAME}_scale_inv"].fill_(255),
        "up_proj.weight' has a scale that is not finite",
    ),
    "NaN": ("blocks", lambda t: _number(t, 0x7F), "up_proj.weight' has a value that is not finite"),
    "-NaN": ("tensor", lambda t: _number(t, 0xFF), "up_proj.weight' has a value that is not finite"),
    "another kind": (
        "blocks",
        lambda t: _set(t, NAME, t[NAME].view(torch.float8_e5m2)),
        "up_proj.weight' has dtype F8_E5M2, expected one of",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_matrices(pair: Callable[[str], Pair], tmp_path: Path, fault: str) -> None:
    form, change, message = BROKEN[fault]
    broken = Path(shutil.copytree(pair(form)[0], tmp_path / "broken"))
    tensors = load_file(broken / "model.safetensors")
    change(tensors)
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        read_weights(broken, load_model_config(broken))
