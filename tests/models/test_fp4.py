"""Checkpoints of NVFP4 and MXFP4: values against the forms' definitions and the program that packs them, and refusals.

``nvfp4_layer.safetensors`` and ``mxfp4_layer.safetensors`` hold a matrix that compressed-tensors 0.20.1 has packed, and its values as
that unpacks them, in bfloat16.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrt.models.checkpoint.fp4 import Fp4Matrix
from mmrt.models.checkpoint.weights import check_weights, read_weights
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError
from mmrt.models.make.checkpoint import make_checkpoint
from mmrt.schema.quantization import Fp4Quantization, Fp8Quantization, find_quantization
from mmrt.tests.models.kept import exact
from mmrt.tests.models.logits import our_logits

NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": None, "ignore": ["lm_head"]}


def compressed(form: str = "nvfp4", **weights: Any) -> dict[str, Any]:
    kind = {"strategy": "tensor_group", "group_size": 16} if form == "nvfp4" else {"strategy": "group", "group_size": 32}
    found = {"num_bits": 4, "type": "float", "symmetric": True, **kind, **weights}
    group = {"targets": ["Linear"], "weights": found, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": f"{form}-pack-quantized", "config_groups": {"group_0": group}}


def pack(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers, scales, what scales were multiplied by, and float32 values."""
    whole = 448 * 6 / weight.abs().max().reshape(1)
    groups = weight.unflatten(1, (-1, 16))
    scales = (groups.abs().amax(2) / 6 * whole).to(torch.float8_e4m3fn)
    numbers, values = pack_groups(groups, scales.float() / whole)
    return numbers, scales, whole, values


def pack_powers(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers, scales as bytes, and float32 values of MXFP4."""
    groups = weight.unflatten(1, (-1, 32))
    exponents = (groups.abs().amax(2) / 6).log2().ceil()
    numbers, values = pack_groups(groups, torch.exp2(exponents))
    return numbers, (exponents + 127).to(torch.uint8), values


def pack_groups(groups: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    steps = scales.unsqueeze(2)
    codes = ((groups / steps).abs().unsqueeze(3) - NUMBERS).abs().argmin(3)
    values = (NUMBERS[codes] * groups.sign() * steps).flatten(1)
    codes = (codes + 8 * (groups < 0)).flatten(1).to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, values


FORMS: dict[str, tuple[dict[str, Any], tuple[str, str, str]]] = {
    "compressed": (compressed(), ("weight_packed", "weight_scale", "weight_global_scale")),
    "modelopt": (MODELOPT, ("weight", "weight_scale", "weight_scale_2")),
    "mxfp4": (compressed("mxfp4"), ("weight_packed", "weight_scale")),
}
Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """A small Llama in one of the forms, but for a matrix that is spared, and with the values of that."""
    source = tmp_path_factory.mktemp("source") / "tiny"
    make_checkpoint("tiny", source, "llama")
    made: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name in made:
            return made[name]
        config, endings = FORMS[name]
        root = tmp_path_factory.mktemp("form")
        nvfp4, plain = (Path(shutil.copytree(source, root / part)) for part in ("nvfp4", "plain"))
        ours = load_file(source / "model.safetensors")
        theirs = {key: value.float() for key, value in ours.items()}
        for key in [key for key in ours if key.endswith("_proj.weight") and "layers.3.self_attn.o" not in key]:
            parts: tuple[torch.Tensor, ...]
            if name == "mxfp4":
                *parts, theirs[key] = pack_powers(theirs[key])
            else:
                numbers, scales, whole, theirs[key] = pack(theirs[key])
                parts = numbers, scales, (whole if name == "compressed" else (1 / whole).reshape(()))
            del ours[key]
            ours |= {key.removesuffix("weight") + ending: part for ending, part in zip(endings, parts, strict=True)}
        save_file(ours, nvfp4 / "model.safetensors")
        save_file(theirs, plain / "model.safetensors")
        given = json.loads((source / "config.json").read_text())
        (nvfp4 / "config.json").write_text(json.dumps({**given, "quantization_config": config}))
        made[name] = nvfp4, plain
        return made[name]

    return get


@pytest.mark.parametrize("name", FORMS)
def test_a_checkpoint_has_the_values_that_it_says(pair: Callable[[str], Pair], name: str) -> None:
    nvfp4, plain = pair(name)
    found, expected = (read_weights(path, load_model_config(path, "float32")) for path in (nvfp4, plain))
    assert found.keys() == expected.keys()
    for key in found:  # a multiplication by the inverse is rounded in another way
        torch.testing.assert_close(found[key], expected[key], rtol=2e-7 if name == "modelopt" else 0, atol=0)
    report = check_weights(nvfp4, load_model_config(nvfp4))
    assert report.problems == report.unread == ()


@pytest.mark.parametrize(("packing", "rounding"), [("nvfp4", 2**-7), ("mxfp4", 0)])
def test_values_are_those_of_the_program_that_packed_them(packing: Any, rounding: float) -> None:
    tensors = load_file(Path(__file__).with_name(f"{packing}_layer.safetensors"))
    roles = {"numbers": "weight_packed", "scales": "weight_scale", "whole": "weight_global_scale"}
    parts = {role: tensors[name] for role, name in roles.items() if name in tensors}
    expected = tensors["expected"].float()
    matrix = Fp4Matrix(tuple(expected.shape), parts, Fp4Quantization(packing=packing))
    torch.testing.assert_close(matrix.values(slice(0, 32)), expected, rtol=rounding, atol=0)


def test_int8g_holds_the_numbers_of_mxfp4(pair: Callable[[str], Pair]) -> None:
    """And its scales, which are powers of two: every value is the same."""
    path, _ = pair("mxfp4")
    found, expected = (read_weights(path, load_model_config(path, "float32", weights=weights)) for weights in ("int8g", "auto"))
    for name in ("layers.0.qkv", "layers.1.gate_up", "layers.2.down"):
        assert torch.equal(exact(found, name), expected[name]), name


Tensors = dict[str, torch.Tensor]


def stack(tensors: Tensors, is_turned: bool) -> tuple[Tensors, Tensors]:
    """A layer's experts in one tensor each of numbers and scales, as ModelOpt writes them; and the values by the experts' names. Those
    of gate and up share a scale of the matrix."""
    ours, theirs = dict(tensors), dict(tensors)
    for experts in (f"model.layers.{layer}.mlp.experts." for layer in range(4)):
        for name, parts in {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.items():
            keys = [[f"{experts}{expert}.{part}.weight" for part in parts] for expert in range(8)]
            packed = [pack(torch.cat([ours.pop(key) for key in own]).float()) for own in keys]
            for own, (_, _, _, values) in zip(keys, packed, strict=True):
                theirs |= dict(zip(own, values.chunk(len(own)), strict=True))
            numbers, scales = (torch.stack([one[at] for one in packed]) for at in (0, 1))
            if is_turned:
                numbers, scales = (part.transpose(1, 2).contiguous() for part in (numbers, scales))
            ours |= {experts + name: numbers, f"{experts}{name}_weight_scale": scales}
            ours[f"{experts}{name}_weight_scale_2"] = torch.cat([1 / one[2] for one in packed])
    return ours, theirs


@pytest.mark.parametrize("is_turned", [False, True])
def test_experts_in_one_tensor_have_the_values_that_files_say(tmp_path: Path, is_turned: bool) -> None:
    path = tmp_path / "tiny"
    make_checkpoint("tiny", path, "qwen3_moe")
    plain = Path(shutil.copytree(path, tmp_path / "plain"))
    ours, theirs = stack(load_file(path / "model.safetensors"), is_turned)
    save_file(ours, path / "model.safetensors")
    save_file(theirs, plain / "model.safetensors")
    given = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**given, "quantization_config": MODELOPT}))
    found, expected = (read_weights(each, load_model_config(each, "float32")) for each in (path, plain))
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], rtol=2e-7, atol=0)
    report = check_weights(path, load_model_config(path))
    assert report.problems == report.unread == ()
    ours["model.layers.2.mlp.experts.down_proj_weight_scale_2"] = torch.ones(3)
    save_file(ours, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"down_proj_weight_scale_2' has dtype F32 and shape \[3\], expected F32 and \[8\] or"):
        read_weights(path, load_model_config(path))


def test_int8g_computes_what_the_values_say(pair: Callable[[str], Pair]) -> None:
    nvfp4, plain = pair("compressed")
    known = load_model_config(nvfp4).quantization
    assert known is not None and known.form == "int8g"
    ids = torch.randint(0, 1000, (2, 48), generator=torch.Generator().manual_seed(1))
    expected = our_logits(plain, load_model_config(plain, "float32"), ids, 40)
    found = our_logits(nvfp4, load_model_config(nvfp4, "float32", weights=known.form), ids, 40)
    assert 0 < float((found - expected).abs().mean() / expected.std()) < 0.05


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (MODELOPT, Fp4Quantization(packing="modelopt")),
        ({**MODELOPT, "quant_algo": "FP8"}, Fp8Quantization(block=None)),
        ({**MODELOPT, "quant_algo": "W4A16_AWQ"}, "quant_algo is 'W4A16_AWQ', expected 'FP8' or 'NVFP4'"),
        ({**MODELOPT, "group_size": 32}, "group_size is 32, expected 16"),
        (compressed(), Fp4Quantization(packing="nvfp4")),
        (compressed(group_size=32), "group_size is 32, expected 16"),
        (compressed("mxfp4"), Fp4Quantization(packing="mxfp4")),
        (compressed("mxfp4", group_size=16), "group_size is 16, expected 32"),
        (compressed(symmetric=False), "symmetric is False, expected True"),
        (compressed(num_bits=8), "num_bits is 8, expected 4"),
        (compressed(type="int"), "type is 'int', expected 'float'"),
    ],
    ids=str,
)
def test_what_config_json_says(config: dict[str, Any], expected: Any) -> None:
    if not isinstance(expected, str):
        assert find_quantization({"quantization_config": config}) == expected
        return
    with pytest.raises(ValueError, match=re.escape(expected)):
        find_quantization({"quantization_config": config})


@pytest.mark.parametrize(
    ("ending", "change", "said"),
    [
        ("weight_scale", None, r"up_proj.weight_scale' of shape \[{rows}, {groups}\] is missing"),
        (
            "weight_global_scale",
            lambda found: found.expand(2).contiguous(),
            r"has dtype F32 and shape \[2\], expected F32 and \[1\] or \[\]",
        ),
        ("weight_global_scale", lambda found: found * 0, "up_proj.weight' has a scale that is not finite"),
        ("weight_packed", lambda found: found[:, :3].contiguous(), r"has dtype U8 and shape \[{rows}, 3\], expected U8 and"),
    ],
)
def test_broken_tensors_are_refused(pair: Callable[[str], Pair], tmp_path: Path, ending: str, change: Any, said: str) -> None:
    broken = Path(shutil.copytree(pair("compressed")[0], tmp_path / "broken"))
    tensors = load_file(broken / "model.safetensors")
    key = "model.layers.1.mlp.up_proj."
    rows, groups = tensors[f"{key}weight_scale"].shape
    changed = tensors.pop(key + ending)
    if change is not None:
        tensors[key + ending] = change(changed)
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(CheckpointError, match=said.format(rows=rows, groups=groups)):
        read_weights(broken, load_model_config(broken))
