"""``mmrt model check``: what it says of whole checkpoints, and of every way in which one can be wrong, in one line each."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrt.actors.gateway.apis.ollama.answers import model_details
from mmrt.cli.main import run
from mmrt.models.make.checkpoint import make_checkpoint
from mmrt.runtime.process.run import DEFAULT_MODEL
from mmrt.serving.card import Card

Captured = pytest.CaptureFixture[str]
Change = Callable[[Path], None]
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMRT_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("MMRT_CONFIG", raising=False)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("check") / "qwen3"
    make_checkpoint("tiny", path, "qwen3")
    return path


def said(capsys: Captured) -> dict[str, str]:
    """What is printed, by the label of its line; lines without one belong to that above."""
    found: dict[str, str] = {}
    label = ""
    for line in capsys.readouterr().out.splitlines():
        label = line[:11].strip() or label
        found[label] = f"{found[label]}\n{line[12:]}" if label in found else line[12:]
    return found


def test_a_whole_checkpoint_is_told_on_one_screen(capsys: Captured) -> None:
    assert run(["model", "check", str(DEFAULT_MODEL)]) == 0
    lines = said(capsys)
    assert sum(text.count("\n") + 1 for text in lines.values()) <= 24
    assert (lines["family"], lines["takes"]) == ("qwen2_5_omni", "text, image, video, audio")
    assert "million parameters" in lines["weights"] and "in 1 file, BF16" in lines["weights"]
    assert lines["tokenizer"] == "1536 tokens, of a vocabulary of 1536"
    assert lines["served"] == f"yes: mmrt up {DEFAULT_MODEL}"
    assert lines["not read"] == "audio_tower.audio_bos_eos_token.weight"  # of prompts for the talker, which it lacks


def test_a_card_says_what_a_front_lists_of_a_model_that_is_not_loaded(qwen3: Path, tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "thinking"
    shutil.copytree(qwen3, path)
    (path / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}</think>{% endfor %}{{ tools }}<tool_call>"
    )
    capabilities = []
    for checkpoint in (qwen3, path):
        assert run(["model", "check", str(checkpoint), "--json"]) == 0
        card = msgspec.json.decode(capsys.readouterr().out, type=Card)
        capabilities.append(model_details(card.limits("m"), 0)["capabilities"])
    assert capabilities == [["completion", "tools"], ["completion", "tools", "thinking"]]


def test_rows_at_once_follow_the_pool(qwen3: Path, tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "mmrt.toml"
    file.write_text("[memory]\nkv_tokens = 20_000\nmax_sequences = 8\n")
    assert run(["model", "check", str(qwen3), "--config", str(file)]) == 0
    lines = said(capsys)
    assert [line.split()[:3:2] for line in lines["at once"].splitlines()] == [["8", "2048"], ["2", "8192"]]
    assert run(["model", "check", str(qwen3), "--max-model-len", "1024"]) == 0
    lines = said(capsys)
    assert lines["context"] == "1024 tokens; the model was trained for 8192 (--max-model-len)"
    assert lines["at once"].split()[:4:2] == ["64", "1024"]


TWO_DEVICES = '[actors]\nlayout = "EP@a+D@b"\n[[devices]]\nname = "a"\n[[devices]]\nname = "b"\n'


def test_layers_with_a_window_keep_its_tokens_alone(tmp_path: Path, capsys: Captured) -> None:
    make_checkpoint("tiny", tmp_path / "made", "gemma3")
    file = tmp_path / "mmrt.toml"
    file.write_text("[memory]\nkv_tokens = 65_536\n")
    assert run(["model", "check", str(tmp_path / "made"), "--config", str(file)]) == 0
    lines = said(capsys)
    assert "for the last 48 tokens of a request alone" in lines["KV cache"]
    rows = [line.split() for line in lines["at once"].splitlines()]
    assert [row[:3:2] for row in rows] == [["32", "2048"], ["8", "8192"]]
    token_kib = float(lines["KV cache"].split()[0])
    assert 1024 * float(rows[1][4]) < token_kib * 8192 / 5, "MiB of a context, of which one layer of seven keeps all"
    make_checkpoint("tiny", tmp_path / "all", "mistral")
    assert run(["model", "check", str(tmp_path / "all"), "--config", str(file)]) == 0
    lines = said(capsys)
    token_kib, last_kib = (float(line.replace("of these", "").split()[0]) for line in lines["KV cache"].splitlines())
    assert last_kib == token_kib, "all layers have a window"
    assert float(lines["at once"].splitlines()[1].split()[4]) < token_kib * 8192 / 1024 / 50, "MiB of a context"
    file.write_text(f'[memory]\nkv_transfer_dtype = "int8"\n{TWO_DEVICES}')
    assert run(["model", "check", str(tmp_path / "made"), "--config", str(file)]) == 0
    why = "memory.kv_transfer_dtype packs whole pages; less without"
    assert f"for all tokens, also in layers that read 48 alone: {why}" in said(capsys)["KV cache"]
    file.write_text(f"[memory]\nkv_tokens = 65_536\n{TWO_DEVICES}")
    assert run(["model", "check", str(tmp_path / "made"), "--config", str(file)]) == 0
    both = said(capsys)
    assert "for the last 48 tokens of a request alone" in both["KV cache"]
    assert [row.split()[0] for row in both["at once"].splitlines()] == ["64", "16"], "of each device as many"


def test_rows_at_once_follow_the_recurrent_states(tmp_path: Path, capsys: Captured) -> None:
    """A request has some, however short it is; more of them run only where the configuration says so."""
    make_checkpoint("tiny", tmp_path / "made", "qwen3_5")
    assert run(["model", "check", str(tmp_path / "made")]) == 0
    lines = said(capsys)
    assert (lines["family"], lines["takes"]) == ("qwen3_5", "text, image, video")
    assert [line.split()[:3:2] for line in lines["at once"].splitlines()] == [["16", "2048"], ["16", "8192"]]
    file = tmp_path / "mmrt.toml"
    file.write_text("[memory]\nmax_sequences = 40\n")
    assert run(["model", "check", str(tmp_path / "made"), "--config", str(file)]) == 0
    assert said(capsys)["at once"].split()[0] == "40"


def change_config(**fields: object) -> Change:
    def change(path: Path) -> None:
        file = path / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))

    return change


def change_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def change_file(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors", {"format": "pt"})

    return change_file


def without_half_of_the_shards(path: Path) -> None:
    names = list(load_file(path / "model.safetensors"))
    (path / "model.safetensors").rename(path / "model-00001-of-00002.safetensors")
    files = {name: f"model-0000{1 + at % 2}-of-00002.safetensors" for at, name in enumerate(names)}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def with_the_tokenizer_of_another(path: Path) -> None:
    shutil.copy(DEFAULT_MODEL / "tokenizer.json", path)


def without_the_ending_token(path: Path) -> None:
    """Its id is that of another tokenizer, and of a padded vocabulary."""
    change_config(vocab_size=2000, eos_token_id=1990)(path)
    change_weights(
        lambda tensors: tensors.update({name: torch.zeros(2000, 128) for name in ("model.embed_tokens.weight", "lm_head.weight")})
    )(path)
    (path / "generation_config.json").unlink(missing_ok=True)


WRONG = {
    "family": (change_config(model_type="mamba", architectures=["MambaForCausalLM"]), "model_type is 'mamba', expected one of"),
    "quantization": (change_config(quantization_config={"quant_method": "quip"}), "quip"),
    "shards": (without_half_of_the_shards, "model-00002-of-00002.safetensors: missing, though model.safetensors.index.json names it"),
    "missing": (
        change_weights(lambda tensors: tensors.pop(NORM)),
        "'language.layers.1.input_layernorm.weight' of shape [128] is missing",
    ),
    "shape": (
        change_weights(lambda tensors: tensors.update({NORM: torch.zeros(3)})),
        "tensor 'language.layers.1.input_layernorm.weight' has shape [3], expected [128]",
    ),
    "sizes": (change_config(intermediate_size=96), "expected [96, 128]"),
    "tokenizer": (with_the_tokenizer_of_another, "tokenizer.json is another model's: it has"),
    "ending": (without_the_ending_token, "tokens, and answers end with token 1990"),
    "letters": (lambda path: (path / "tokenizer.json").write_bytes(b'{"model":{"vocab":{"\xff":1}}}'), "is no tokenizer: "),
    "template": (lambda path: (path / "chat_template.jinja").write_text("{% if %}"), "the chat template cannot be compiled"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_is_said_before_anything_is_loaded(qwen3: Path, tmp_path: Path, capsys: Captured, kind: str) -> None:
    change, problem = WRONG[kind]
    path = tmp_path / "model"
    shutil.copytree(qwen3, path)
    change(path)
    assert run(["model", "check", str(path)]) == 1
    assert problem in said(capsys)["served"].removeprefix("no: ").splitlines()[0]
    if kind == "template":
        return  # the gateway compiles it
    assert run(["up", "--dry-run", "--port", "0", str(path)]) == 2
    assert problem in capsys.readouterr().err


def test_tensors_that_nothing_reads_are_named(qwen3: Path, tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "model"
    shutil.copytree(qwen3, path)
    more = {f"talker.{at}.weight": torch.zeros(1) for at in range(3)} | {"rope.inv_freq": torch.zeros(1)}
    change_weights(lambda tensors: tensors.update(more))(path)
    assert run(["model", "check", str(path)]) == 0
    assert said(capsys)["not read"] == "rope.inv_freq, talker.* (3 tensors)"


def test_of_many_problems_some_are_told(qwen3: Path, tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "model"
    shutil.copytree(qwen3, path)
    change_weights(lambda tensors: [tensors.pop(name) for name in list(tensors) if "layernorm" in name or "mlp" in name])(path)
    assert run(["model", "check", str(path)]) == 1
    told = said(capsys)["served"].splitlines()
    assert len(told) == 9 and told[-1].startswith("and ") and told[-1].endswith(" other tensors")
