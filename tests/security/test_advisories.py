"""Published classes of faults: each has tests (``lab/docs/advisories.md``), and here are those that stand in no other file."""

import ast
import io
import json
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mmrt.actors.gateway.reading.ignored import collecting
from mmrt.actors.gateway.reading.validation import Limits, read_chat
from mmrt.media.errors import MediaError
from mmrt.media.image import decode_image
from mmrt.media.limits import MediaLimits
from mmrt.models.checkpoint.files import weight_files
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError
from mmrt.runtime.errors import RequestError

ROOT = Path(__file__).parents[2]
LIMITS = Limits(model_name="tiny", kinds=("image",), max_context=2048)
ODD: tuple[Any, ...] = (
    None, True, 0, -1, 1, 1 << 31, 1 << 63, 10**30, 1e308, -0.5, float("inf"), float("nan"), "", "x" * 5000, [], {}, [[[]]], [0] * 1000,
    {"a": 1}, "../../etc/passwd", "\ud800",
)  # fmt: skip


def test_each_class_has_its_tests() -> None:
    rows = [line for line in (ROOT / "lab/docs/advisories.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 25
    for row in rows:
        tests = re.findall(r"([\w/]+\.py)::(\w+)", row)
        assert tests, row
        for file, name in tests:
            tree = ast.parse((ROOT / "tests" / file).read_text())
            names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
            assert name in names, f"{file}::{name}"


@pytest.fixture
def copied(checkpoints: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a checkpoint's configuration."""

    def copy(family: str) -> Path:
        folder = tmp_path / family
        folder.mkdir()
        for file in checkpoints(family).glob("*.json"):
            shutil.copy(file, folder)
        return folder

    return copy


def test_code_in_a_checkpoint_is_not_run(copied: Callable[[str], Path]) -> None:
    folder = copied("qwen2_5_omni")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("configuration_own.py", "modeling_own.py"):
        (folder / name).write_text(f"open({str(folder / 'was-run')!r}, 'w')\nraise SystemExit\n")
    load_model_config(folder)
    assert not (folder / "was-run").exists() and not {"configuration_own", "modeling_own"} & set(sys.modules)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", 7])
def test_an_index_names_files_of_its_folder_alone(tmp_path: Path, name: object) -> None:
    (tmp_path.parent / "other.safetensors").write_bytes(b"")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError):
        weight_files(tmp_path)


@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_5", "internvl", "llava_next", "llava_onevision", "gemma4"])
def test_mutated_configurations(copied: Callable[[str], Path], family: str) -> None:
    """A value of any kind in any place is read, or refused by one short error."""
    folder, luck = copied(family), random.Random(5)
    files = [file for file in sorted(folder.glob("*.json")) if file.name not in ("tokenizer.json", "vocab.json")]
    for _ in range(120):
        file = luck.choice(files)
        original = file.read_text()
        data = json.loads(original)
        holder, place = luck.choice(list(places(data)))
        if luck.random() < 0.1:
            del holder[place]
        else:
            holder[place] = luck.choice(ODD)
        file.write_text(json.dumps(data))
        try:
            load_model_config(folder)
        except CheckpointError as error:
            assert len(str(error)) < 1500
        file.write_text(original)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a value of JSON: what holds it, and its key or index."""
    for place in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, place
        if isinstance(value[place], dict | list):
            yield from places(value[place])


@pytest.mark.parametrize("head", [b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"GIF89a", b"RIFF\x10\0\0\0WEBP", b"II*\0", b"BM"])
def test_errors_about_media_tell_no_addresses(head: bytes) -> None:
    """Pillow names the object that it cannot read, with its address: with that an attacker knows where libraries lie."""
    with pytest.raises(MediaError) as error:
        decode_image(io.BytesIO(head + bytes(range(256))), MediaLimits())
    assert not re.search(r"0x[0-9a-f]{6,}|object at", str(error.value))


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 10**9}, {"n": 1 << 70}, {"n": -1}, {"max_tokens": 1 << 70}, {"logprobs": True, "top_logprobs": 10**6},
        {"stop": ["x"] * 10**4},
        {"logit_bias": {str(at): 1 for at in range(100_000)}}, {"seed": 1 << 70}, {"temperature": 1e300}, {"top_k": -(1 << 70)},
        {"bad_words": ["x"] * 10**5}, {"stop_token_ids": [1] * 10**5}, {"priority": 1 << 70}, {"min_tokens": 1 << 70},
    ],
)  # fmt: skip
def test_numbers_have_bounds(fields: dict[str, Any]) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode()
    with pytest.raises(RequestError) as error:
        read_chat(body, LIMITS)
    assert error.value.status == 400 and len(str(error.value)) < 1000


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template": "{% for _ in range(10**9) %}{% endfor %}"},
        {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        {"prompt_embeds": "AAAA"},
    ],
)
def test_templates_and_tensors_of_clients_are_refused(fields: dict[str, Any]) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode()
    with pytest.raises(RequestError) as error:
        read_chat(body, LIMITS)
    assert error.value.status == 400 and next(iter(fields)) in str(error.value)


def test_names_of_fields_make_no_headers() -> None:
    """What is taken without effect is named in a header: a name with a line's end in it must not end that line."""
    body = json.dumps(
        {"messages": [{"role": "user", "content": "hi"}], "user\r\nSet-Cookie: a=1\r\nX": 1, "metadata": {"\n": "\r"}}
    ).encode()
    with collecting() as ignored:
        try:
            read_chat(body, LIMITS)
        except RequestError as error:
            assert not re.search(r"[\r\n]", str(error))
    assert not re.search(r"[\r\n]", ignored.header)
