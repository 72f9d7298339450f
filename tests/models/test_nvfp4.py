"""NVFP4 checkpoints: values against the form's definition and the program that packs them, and refusals.

``nvfp4_layer.safetensors`` holds a matrix that compressed-tensors 0.20.1 has packed, and its values as that unpacks them, in bfloat16.
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

from mmrt.models.checkpoint.nvfp4 import Nvfp4Matrix
from mmrt.models.checkpoint.weights import check_weights, read_weights
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError
from mmrt.models.make.checkpoint import make_checkpoint
from mmrt.schema.quantization import Fp8Quantization, Nvfp4Quantization, find_quantization
from mmrt.tests.models.logits import our_logits

LAYER_FILE = Path(__file__).with_name("nvfp4_layer.safetensors")
NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": None, "ignore": ["lm_head"]}


def compressed(**weights: Any) -> dict[str, Any]:
    found = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16, **weights}
    group = {"targets": ["Linear"], "weights": found, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {"group_0": group}}


def pack(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers, scales, what scales were multiplied by, and float32 values."""
    whole = 448 * 6 / weight.abs().max().reshape(1)
    groups = weight.unflatten(1, (-1, 16))
    scales = (groups.abs().amax(2) / 6 * whole).to(torch.float8_e4m3fn)
    steps = (scales.float() / whole).unsqueeze(2)
    codes = ((groups / steps).abs().unsqueeze(3) - NUMBERS).abs().argmin(3)
    values = (NUMBERS[codes] * groups.sign() * steps).flatten(1)
    codes = (codes + 8 * (groups < 0)).flatten(1).to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales, whole, values


FORMS: dict[str, tuple[dict[str, Any], tuple[str, str, str]]] = {
    "compressed": (compressed(), ("weight_packed", "weight_scale", "weight_global_scale")),
    "modelopt": (MODELOPT, ("weight", "weight_scale", "weight_scale_2")),
}
Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """A small Llama in a form of NVFP4, but for a matrix that is spared, and with the values of that."""
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
            numbers, scales, whole, theirs[key] = pack(theirs[key])
            del ours[key]
            parts = numbers, scales, (whole if name == "compressed" else (1 / whole).reshape(()))
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
        torch.testing.assert_close(found[key], expected[key], rtol=0 if name == "compressed" else 2e-7, atol=0)
    report = check_weights(nvfp4, load_model_config(nvfp4))
    assert report.problems == report.unread == ()


def test_values_are_those_of_the_program_that_packed_them() -> None:
    tensors = load_file(LAYER_FILE)
    parts = {"numbers": tensors["weight_packed"], "scales": tensors["weight_scale"], "whole": tensors["weight_global_scale"]}
    matrix = Nvfp4Matrix((32, 64), parts, Nvfp4Quantization(packing="compressed-tensors"))
    torch.testing.assert_close(matrix.values(slice(0, 32)), tensors["expected"].float(), rtol=2**-7, atol=0)


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
        (MODELOPT, Nvfp4Quantization(packing="modelopt")),
        ({**MODELOPT, "quant_algo": "FP8"}, Fp8Quantization(block=None)),
        ({**MODELOPT, "quant_algo": "W4A16_AWQ"}, "quant_algo is 'W4A16_AWQ', expected 'FP8' or 'NVFP4'"),
        ({**MODELOPT, "group_size": 32}, "group_size is 32, expected 16"),
        (compressed(), Nvfp4Quantization(packing="compressed-tensors")),
        (compressed(group_size=32), "group_size is 32, expected 16"),
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
