"""The pages that list configuration keys: every key is there, with the default that the code has."""

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.config.sections import DeviceSection
from mmrt.serving.models_file import KV_TOKENS, FrontSection, load_models

DOCS = Path(__file__).parents[2] / "docs"
CONFIG: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(RuntimeConfig()))
BY_STAGE = {"threads": ("decode", "prefill", "encoder", "video", "memory"), "most_threads": ("decode", "prefill", "encoder")}


def rows_of(page: str) -> dict[str, dict[str, str]]:
    """The tables of keys by section: each key, and what the page says of its default."""
    found: dict[str, dict[str, str]] = {}
    for part in re.split(r"^#{2,4} ", (DOCS / page).read_text(), flags=re.MULTILINE)[1:]:
        heading, _, text = part.partition("\n")
        if not heading.startswith("["):
            continue
        for keys, default in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (.*?) \|", text, re.MULTILINE):
            found.setdefault(heading, {}).update(dict.fromkeys(re.findall(r"\w+", keys), default))
    return found


ROWS = rows_of("configuration.md")
SECTIONS = sorted(name for name in CONFIG if name not in ("slo", "actors", "devices"))


def values_of(said: str) -> Any:
    """The value that a page shows, as TOML has it."""
    return tomllib.loads(f"value = {said.strip('`')}")["value"]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_has_a_row_with_its_default(section: str) -> None:
    values = CONFIG[section]
    nested = {key for key, value in values.items() if isinstance(value, dict)}
    assert {key: values_of(said) for key, said in ROWS[f"[{section}]"].items()} == {
        key: value for key, value in values.items() if key not in nested
    }
    for key in nested:
        assert {name: values_of(said) for name, said in ROWS[f"[{section}.{key}]"].items()} == values[key]


def test_keys_of_several_sections_have_rows() -> None:
    actors = CONFIG["actors"]
    assert {key: values_of(said) for key, said in ROWS["[actors]"].items()} == {key: actors[key] for key in ("layout", "turns")}
    rows = ROWS["[actors.decode], [actors.prefill], [actors.encoder], [actors.video], [actors.memory]"]
    assert {key for section in actors.values() if isinstance(section, dict) for key in section} == {*rows}
    for key, stages in BY_STAGE.items():
        assert {actors[stage][key] for stage in stages} == {values_of(rows[key])}
    assert rows["nice"] == "decode and memory 0, prefill and encoder 2, video 4"
    assert {stage: section["nice"] for stage, section in actors.items() if isinstance(section, dict)} == {
        "decode": 0, "memory": 0, "prefill": 2, "encoder": 2, "video": 4,
    }  # fmt: skip


def test_objectives_have_rows() -> None:
    rows, slo = ROWS["[slo.text], [slo.image], [slo.video], [slo.audio]"], CONFIG["slo"]
    assert rows["ttft_ms"] == "text 1000, image and audio 4000, video 20000"
    assert {kind: part["ttft_ms"] for kind, part in slo.items()} == {"text": 1000, "image": 4000, "audio": 4000, "video": 20000}
    assert {part["tbt_ms"] for part in slo.values()} == {values_of(rows["tbt_ms"])} and {*rows} == {*slo["text"]}


def test_devices_have_rows() -> None:
    rows = ROWS["[[devices]]"]
    assert {*rows} == {*DeviceSection.__struct_fields__} and values_of(rows["cpus"]) == DeviceSection(name="a").cpus


def test_the_file_of_several_models_is_one_and_says_the_defaults(tmp_path: Path) -> None:
    found = re.search(r"^```toml\n(.*?)^```", (DOCS / "several_models.md").read_text(), re.MULTILINE | re.DOTALL)
    assert found
    (tmp_path / "models.toml").write_text(found[1])
    assert len(load_models(tmp_path / "models.toml", {}).models) == 2
    defaults = re.findall(r"^(\w+) = (\S+) +# default;", found[1], re.MULTILINE)
    assert {key: values_of(said) for key, said in defaults} == {
        key: value for key, value in msgspec.to_builtins(FrontSection()).items() if key != "memory"
    }
    assert f"# default: {KV_TOKENS}, or one context" in found[1]
