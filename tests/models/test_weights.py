"""Reading checkpoints into one buffer, and every way in which a checkpoint can be broken."""

import json
import re
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrt.models.checkpoint.jobs import do_all
from mmrt.models.checkpoint.weights import WeightIndex, attach_weights, check_weights, read_weights, write_weights
from mmrt.models.config import load_model_config, weight_bytes
from mmrt.models.errors import CheckpointError
from mmrt.models.families import qwen2_5_omni
from mmrt.models.families.registry import family_of

MATRICES = ("qkv", "o", "gate_up", "down")
Load = Callable[..., tuple[Any, dict[str, torch.Tensor]]]


@pytest.fixture
def directory(checkpoints: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint that a test may break."""
    for file in checkpoints("qwen2_5_vl").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def refused(path: Path, message: str) -> None:
    allocated = []
    config = load_model_config(path)
    with pytest.raises(CheckpointError, match=message):
        write_weights(path, config, lambda n: memoryview(allocated.append(n) or bytearray(n)))
    assert not allocated


def test_layout(checkpoints: Callable[[str], Path], load: Load) -> None:
    path = checkpoints("qwen2_5_omni")
    stored = load_file(path / "model.safetensors")
    config, weights = load(path)
    layer = "model.layers.2."
    expected = torch.cat([stored[f"{layer}self_attn.{part}_proj.weight"] for part in "qkv"])
    torch.testing.assert_close(weights["layers.2.qkv"], expected, rtol=0, atol=0)
    expected = torch.cat([stored[f"{layer}mlp.{part}_proj.weight"] for part in ("gate", "up")])
    torch.testing.assert_close(weights["layers.2.gate_up"], expected, rtol=0, atol=0)
    for name, tensor in stored.items():
        ours = family_of(config).canonical_name(name)
        if ours.startswith(("vision.", "audio.")):
            torch.testing.assert_close(weights[ours], tensor, rtol=0, atol=0)


def test_one_allocation_aligned_views_and_progress(checkpoints: Callable[[str], Path]) -> None:
    path = checkpoints("qwen2_5_vl")
    config = load_model_config(path, dtype="bfloat16")
    sizes: list[int] = []
    buffers: list[bytearray] = []

    def allocate(num_bytes: int) -> memoryview:
        sizes.append(num_bytes)
        buffers.append(bytearray(num_bytes))
        return memoryview(buffers[0])

    done: list[tuple[int, int]] = []
    index = write_weights(path, config, allocate, lambda *progress: done.append(progress))
    assert sizes == [index.num_bytes] and {entry.dtype for entry in index.entries} == {"bfloat16"}
    assert [d for d, _ in done] == sorted(d for d, _ in done) and {t for _, t in done} == {index.num_bytes}
    assert index.num_bytes - done[-1][0] < 64
    assert all(entry.offset % 64 == 0 for entry in index.entries)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(index), type=WeightIndex) == index
    views = attach_weights(memoryview(buffers[0]).toreadonly(), index)
    assert set(views) == {entry.name for entry in index.entries}
    start = torch.frombuffer(buffers[0], dtype=torch.uint8).data_ptr()
    for entry in index.entries:
        assert views[entry.name].data_ptr() == start + entry.offset and views[entry.name].shape == entry.shape
    stored = load_file(path / "model.safetensors")["visual.merger.ln_q.weight"]
    torch.testing.assert_close(views["vision.merger.ln_q.weight"], stored.bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize(("family", "weights"), [("qwen3_5_moe", "int4"), ("qwen3_moe", "int8g"), ("qwen2_5_vl", "auto")])
def test_threads_write_what_one_writes(
    checkpoints: Callable[[str], Path], family: str, weights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In jobs so small that matrices are cut."""
    monkeypatch.setattr("mmrt.models.checkpoint.filling._JOB_VALUES", 1 << 13)
    config, found = load_model_config(checkpoints(family), weights=weights), []
    for num_threads in (1, 3):
        buffers, shown = list[bytearray](), list[int]()

        def allocate(num_bytes: int, buffers: list[bytearray] = buffers) -> memoryview:
            buffers.append(bytearray(num_bytes))
            return memoryview(buffers[0])

        index = write_weights(checkpoints(family), config, allocate, lambda done, _, shown=shown: shown.append(done), num_threads)
        assert shown == [entry.offset + entry.num_bytes for entry in index.entries]
        found.append(buffers[0])
    assert found[0] == found[1] and any(found[0])
    plain = attach_weights(memoryview(found[0]), index)
    whole = read_weights(checkpoints(family), config)
    assert all(torch.equal(plain[name], whole[name]) for name in whole)


def test_jobs_run_at_once_and_end_with_the_first_error() -> None:
    both, done = threading.Barrier(2, timeout=30), list[str]()
    do_all([("a", [both.wait, both.wait]), ("b", [both.wait, both.wait])], done.append, 2)  # type: ignore[list-item]
    assert done == ["a", "b"]

    def fail() -> None:
        raise CheckpointError("x")

    with pytest.raises(CheckpointError, match="x"):
        do_all([("c", [fail]), ("d", [])], done.append, 1)
    assert done == ["a", "b"]
    with pytest.raises(KeyboardInterrupt):
        do_all([("a", []), ("b", [])], interrupt, 1)


def interrupt(_: object) -> None:
    raise KeyboardInterrupt


def test_sharded_checkpoint_and_names_of_other_versions(directory: Path, checkpoints: Callable[[str], Path], load: Load) -> None:
    stored = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    renamed = {
        f"model.{name}" if name.startswith("visual.") else name.replace("model.", "model.language_model."): tensor
        for name, tensor in stored.items()
    }
    names = sorted(renamed)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: renamed[name] for name in members}, directory / file)
    weight_map = {name: file for file, members in shards.items() for name in members}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    _, ours = load(directory)
    _, expected = load(checkpoints("qwen2_5_vl"))
    assert ours.keys() == expected.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)
    (directory / "b.safetensors").unlink()
    refused(directory, "b.safetensors: missing, though model.safetensors.index.json names it")
    index.write_text(json.dumps({"weight_map": {"x": "../a.safetensors"}}))
    refused(directory, "names a shard outside of the model directory")
    index.write_text("{}")
    refused(directory, "not an index of safetensors shards")


def test_tied_embeddings_are_one_tensor(directory: Path, load: Load) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["tie_word_embeddings"] = True
    (directory / "config.json").write_text(json.dumps(config))
    said = r"the output head \(lm_head.weight\) is not the vocabulary, and config.json says tie_word_embeddings: true"
    refused(directory, said)
    (problem,) = check_weights(directory, load_model_config(directory)).problems
    assert re.search(said, problem)
    rewrite(directory, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    _, weights = load(directory)
    assert "embed" in weights and "lm_head" not in weights, "the same twice is no other head"
    rewrite(directory, lambda tensors: tensors["lm_head.weight"][-1].add_(1))
    refused(directory, said)
    rewrite(directory, lambda tensors: tensors["lm_head.weight"][0].add_(1))
    assert check_weights(directory, load_model_config(directory)).problems
    whole = (directory / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    start, stop = (header + place for place in json.loads(whole[8:header])["lm_head.weight"]["data_offsets"])
    with (directory / "model.safetensors").open("wb") as file:  # a draft in which a value is not here yet
        file.write(whole[:start])
        file.seek(stop)
        file.write(whole[stop:])
        file.truncate(len(whole))
    assert check_weights(directory, load_model_config(directory)).problems == ()
    (directory / "model.safetensors").write_bytes(whole)
    rewrite(directory, lambda tensors: tensors.pop("lm_head.weight"))
    assert "lm_head" not in load(directory)[1]


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def test_missing_tensor(directory: Path) -> None:
    rewrite(directory, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.bias"))
    refused(directory, r"tensor 'language.layers.1.self_attn.k_proj.bias' of shape \[64\] is missing")


def test_missing_head(directory: Path) -> None:
    rewrite(directory, lambda tensors: tensors.pop("lm_head.weight"))
    refused(directory, r"tensor 'lm_head.weight' of shape \[1216, 128\] is missing; tie_word_embeddings: true in config.json lets the ")


def test_misshaped_tensor(directory: Path) -> None:
    rewrite(directory, lambda tensors: tensors.update({"visual.merger.ln_q.weight": torch.zeros(3)}))
    refused(directory, r"tensor 'vision.merger.ln_q.weight' has shape \[3\], expected \[64\]")


def test_unknown_dtype(directory: Path) -> None:
    rewrite(directory, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(128, dtype=torch.int64)}))
    refused(directory, "tensor 'language.norm.weight' has dtype I64, expected one of F64, F32, F16, BF16")


@pytest.mark.parametrize(
    ("weights", "value", "message"),
    [
        ("int8", float("nan"), "has a value that is not finite, which int8 cannot hold"),
        ("float16", 1e5, "has 100000, float16 holds at"),
    ],
)
def test_numbers_that_a_format_does_not_have(directory: Path, weights: Any, value: float, message: str) -> None:
    rewrite(directory, lambda tensors: tensors["model.layers.1.self_attn.k_proj.weight"][3].fill_(value))
    config = load_model_config(directory, "float32", weights=weights)
    with pytest.raises(CheckpointError, match=f"tensor 'language.layers.1.self_attn.k_proj.weight' {message}"):
        write_weights(directory, config, lambda n: memoryview(bytearray(n)))


def test_matrices_in_int8_take_a_quarter(checkpoints: Callable[[str], Path]) -> None:
    """Matrices have scales beside them; towers, norms and biases stay in the dtype."""
    path = checkpoints("qwen2_5_vl")
    config = load_model_config(path, weights="int8")
    plain, small = (read_weights(path, c) for c in (load_model_config(path), config))
    matrices = {name.removesuffix(".scales") for name in small.keys() - plain.keys()}
    assert matrices == {"embed", "lm_head"} | {f"layers.{i}.{n}" for i in range(config.language.num_layers) for n in MATRICES}
    assert all(small[name].dtype == torch.int8 for name in matrices)
    in_groups = {name for name in matrices if small[f"{name}.scales"].dim() == 2}
    assert in_groups == {"embed", "lm_head"}  # answers depend on them most
    assert all(torch.equal(small[name], plain[name]) for name in plain.keys() - matrices)
    assert weight_bytes(config) == sum(tensor.nbytes for tensor in small.values()) < 0.6 * weight_bytes(load_model_config(path))


def test_unused_tensors_of_any_dtype_are_ignored(directory: Path, load: Load) -> None:
    rewrite(directory, lambda tensors: tensors.update({"talker.codes": torch.zeros(3, dtype=torch.int8)}))
    load(directory)


def test_truncated_file(directory: Path) -> None:
    file = directory / "model.safetensors"
    content = file.read_bytes()
    cuts = {len(content) - 5: "truncated: tensor", 1000: "truncated or not safetensors", 3: "truncated: 3 bytes"}
    for kept, message in cuts.items():
        file.write_bytes(content[:kept])
        refused(directory, message)
    file.unlink()
    refused(directory, "holds no .*safetensors file")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"no json", "header is not JSON"),
        (b"[]", "header is not a JSON object"),
        (b'{"a": 3}', "header entry of tensor 'a' is malformed"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', r"tensor 'a' of shape \[2\] takes 8 bytes, found 4"),
        (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}', "tensor 'a' of shape"),
        (b'{"a": {"dtype": "F32", "shape": [99], "data_offsets": [0, 396]}}', "truncated: tensor 'a' ends at byte"),
    ],
)
def test_bad_header(directory: Path, header: bytes, message: str) -> None:
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    refused(directory, message)


def test_tensor_in_two_files(directory: Path) -> None:
    (directory / "other.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    refused(directory, "is also in model.safetensors")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("model.layers.0.mlp.up_proj.weight", "language.layers.0.mlp.up_proj.weight"),
        ("model.language_model.norm.weight", "language.norm.weight"),
        ("language_model.model.norm.weight", "language.norm.weight"),
        ("thinker.model.embed_tokens.weight", "language.embed_tokens.weight"),
        ("thinker.visual.blocks.0.attn.q.weight", "vision.blocks.0.attn.q.weight"),
        ("model.audio_tower.proj.bias", "audio.proj.bias"),
        ("thinker.lm_head.weight", "lm_head.weight"),
        ("talker.model.norm.weight", "talker.model.norm.weight"),
    ],
)
def test_names(theirs: str, ours: str) -> None:
    assert qwen2_5_omni.canonical_name(theirs) == ours
