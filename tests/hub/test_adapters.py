"""LoRA adapters by name: fetched before the model that they are for, checked with it, taken from the cache, listed and removed."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from mmrt.cli.main import run
from mmrt.tests.hub.conftest import COMMIT, FakeHub

Captured = pytest.CaptureFixture[str]
OTHER = "89abcdef0123456789abcdef0123456789abcdef"


def adapter(name: str, rows: int, columns: int) -> dict[str, bytes]:
    """Of one matrix, as peft writes it."""
    prefix = f"base_model.model.{name}"
    tensors = {f"{prefix}.lora_A.weight": torch.ones(2, columns), f"{prefix}.lora_B.weight": torch.ones(rows, 2)}
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["down_proj"], "bias": "none"}
    return {"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": save(tensors), "README.md": b"# lora"}


@pytest.fixture
def served(hub: FakeHub, checkpoint: dict[str, bytes]) -> FakeHub:
    rows, columns = load(checkpoint["model.safetensors"])["model.layers.1.mlp.down_proj.weight"].shape
    hub.repositories["org/m"] = dict(checkpoint)
    hub.repositories["org/lora"] = adapter("model.layers.1.mlp.down_proj", rows, columns)
    hub.repositories["org/wrong"] = adapter("model.layers.9.mlp.down_proj", rows, columns)
    hub.repositories["org/pickle"] = {"adapter_config.json": b"{}", "adapter_model.bin": b""}
    hub.commits["org/lora"] = OTHER
    return hub


def test_both_are_fetched_by_name_and_told(served: FakeHub, tmp_path: Path, capsys: Captured) -> None:
    assert run(["pull", "org/lora"]) == 0
    assert f"org/lora is in {tmp_path}/cache/models--org--lora/snapshots/{OTHER}: mmrt up MODEL --adapter org/lora" in (
        capsys.readouterr().out
    )
    assert served.ranges("README.md") == []
    assert run(["model", "check", "org/m", "--adapter", "org/lora"]) == 0
    assert run(["pull", "org/m"]) == 0
    capsys.readouterr()
    assert run(["up", "org/m", "--adapter", "org/lora", "--dry-run", "--port", "0"]) == 0
    assert f"model          org/m@{COMMIT} with org/lora@{OTHER}\n" in capsys.readouterr().out
    assert run(["list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]][:2] == ["org/lora", "org/m"]
    assert run(["rm", "org/lora", "--yes"]) == 0
    assert run(["up", "org/m", "--adapter", "org/lora", "--dry-run", "--port", "0"]) == 2
    told = "model.adapter = 'org/lora' is neither a path nor in the cache: mmrt pull org/lora fetches it"
    assert told in capsys.readouterr().err


def test_without_a_terminal_somebody_has_to_agree(served: FakeHub, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False)
    assert run(["up", "org/m", "--adapter", "org/lora", "--port", "0"]) == 2
    told = "model.adapter = 'org/lora' is neither a path nor in the cache: mmrt pull org/lora fetches it, as do --yes and"
    assert told in capsys.readouterr().err and served.log == []


def test_an_adapter_that_does_not_fit_ends_it_before_the_model_is_fetched(served: FakeHub, capsys: Captured) -> None:
    assert run(["up", "org/m", "--adapter", "org/wrong", "--yes", "--port", "0"]) == 1
    told = capsys.readouterr().err
    assert "org/m is not fetched, as it would not be served" in told and "layers.9.mlp.down_proj.weight', a matrix that" in told
    whole = [asked for asked in served.ranges("model.safetensors") if not asked]
    assert whole == [] and run(["list"]) == 0


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["pull", "org/pickle"], "org/pickle: is no LoRA adapter that mmrt reads: it has no adapter_model.safetensors"),
        (
            ["up", "org/m", "--adapter", "org/m", "--yes", "--port", "0"],
            "org/m: is no LoRA adapter that mmrt reads: it has no",
        ),
        (["model", "check", "org/lora"], "org/lora is a LoRA adapter: give it to --adapter, beside its model"),
        (["up", "org/m", "--adapter", "org/absent", "--yes", "--port", "0"], "has no model org/absent, or it is private"),
    ],
)
def test_what_is_no_adapter_is_named(served: FakeHub, capsys: Captured, command: list[str], message: str) -> None:
    assert run(command) != 0
    told = capsys.readouterr()
    assert message in told.err + told.out
