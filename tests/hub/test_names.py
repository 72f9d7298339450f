"""Names as people type them, and the files that a tag chooses."""

from pathlib import Path

import pytest

from mmrt.hub.errors import ModelNotFoundError
from mmrt.hub.names import HubName, parse_name
from mmrt.hub.repository import RemoteFile, Repository, choose_gguf, gguf_files, safetensors_files
from mmrt.models.checkpoint.files import best_tower

NAMES = {
    "Qwen/Qwen3-8B": HubName("Qwen/Qwen3-8B"),
    "Qwen/Qwen3-8B@main": HubName("Qwen/Qwen3-8B", "", "main"),
    "Qwen/Qwen3-8B@refs/pr/1": HubName("Qwen/Qwen3-8B", "", "refs/pr/1"),
    "unsloth/Qwen3-8B-GGUF:Q4_K_M": HubName("unsloth/Qwen3-8B-GGUF", "Q4_K_M"),
    "hf.co/unsloth/Qwen3-8B-GGUF:UD-Q4_K_XL": HubName("unsloth/Qwen3-8B-GGUF", "UD-Q4_K_XL"),
    "hf.co/unsloth/Qwen3-8B-GGUF:latest": HubName("unsloth/Qwen3-8B-GGUF"),
    "huggingface.co/a/b": HubName("a/b"),
    "https://huggingface.co/a/b/": HubName("a/b"),
    "https://huggingface.co/a/b/tree/v1": HubName("a/b", "", "v1"),
    "https://huggingface.co/a/b/blob/main/sub/m-Q8_0.gguf?download=true": HubName("a/b", "m-Q8_0.gguf", "main"),
    "a/b:Q4_0@0123456": HubName("a/b", "Q4_0", "0123456"),
}
PATHS = (
    "model",
    "./a/b",
    "/a/b",
    "a/b/c",
    "../b",
    "a/..",
    "a/b/",
    "~/b",
    "a/b@../x",
    "a/b:",
    "a--b/c",
    "a b/c",
    "é/b",
    "-a/b",
    f"a/{'b' * 200}",
    "",
)


@pytest.mark.parametrize("text", NAMES)
def test_names(text: str) -> None:
    assert parse_name(text) == NAMES[text]


def test_what_can_be_a_path_alone_is_no_name() -> None:
    assert [text for text in PATHS if parse_name(text) is not None] == []


FILES = [
    "m-Q2_K.gguf",
    "m-Q4_K_M.gguf",
    "m-Q4_K_S.gguf",
    "m-UD-Q4_K_XL.gguf",
    "m-q8_0.gguf",
    "m.f16.gguf",
    "mmproj-m-f16.gguf",
    "README.md",
] + ["imatrix_unsloth.gguf", "BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf"]
TAGS = {
    "": "m-Q4_K_M.gguf",
    "Q4_K_M": "m-Q4_K_M.gguf",
    "q4_k_s": "m-Q4_K_S.gguf",
    "Q4_K_XL": "m-UD-Q4_K_XL.gguf",
    "Q8_0": "m-q8_0.gguf",
    "F16": "m.f16.gguf",
    "Q2": "m-Q2_K.gguf",
    "bf16": "BF16/m-BF16-00001-of-00002.gguf",
    "m-Q4_K_M.gguf": "m-Q4_K_M.gguf",
    "m-Q4_K_M": "m-Q4_K_M.gguf",
}


@pytest.mark.parametrize("tag", TAGS)
def test_a_tag_chooses_a_file(tag: str) -> None:
    assert choose_gguf(HubName("a/b", tag), FILES) == TAGS[tag]


def test_all_shards_of_a_model_are_taken_and_what_sees() -> None:
    repository = Repository("a/b", "0" * 40, tuple(RemoteFile(name, 1, "0" * 64) for name in FILES))
    assert [file.name for file in gguf_files(HubName("a/b", "bf16"), repository)] == [
        *(name for name in FILES if name.startswith("BF16/")),
        "mmproj-m-f16.gguf",
    ]


def test_of_several_parts_that_see_that_of_the_model_is_taken() -> None:
    model = Path("a/Qwen2.5-VL-7B-Instruct-Q8_0.gguf")
    towers = [
        "a/mmproj-Qwen2.5-VL-7B-Instruct-Q8_0.gguf",
        "a/mmproj-Qwen2.5-VL-7B-Instruct-f16.gguf",
        "a/mmproj-Qwen2.5-VL-3B-bf16.gguf",
    ]
    assert best_tower(model, map(Path, towers)) == Path(towers[1])
    near = ["mmproj-F16.gguf", "a/mmproj-F32.gguf", "a/mmproj-BF16.gguf"]
    assert best_tower(model, map(Path, near)) == Path(near[2]) and best_tower(model, []) is None


def test_a_tag_of_several_files_or_none_lists_them() -> None:
    with pytest.raises(ModelNotFoundError, match=r"^a/b:Q4_K: several of its files are :Q4_K: m-Q4_K_M, m-Q4_K_S, m-UD-Q4_K_XL; name"):
        choose_gguf(HubName("a/b", "Q4_K"), FILES)
    with pytest.raises(
        ModelNotFoundError, match="^a/b:Q7: it has bf16, q2_k, q4_k_m, q4_k_s, ud-q4_k_xl, q8_0, f16; name one as a/b:NAME"
    ):
        choose_gguf(HubName("a/b", "Q7"), FILES)
    with pytest.raises(ModelNotFoundError, match=r"^a/b: several of its files are alike: x-Q4_K_M, y-Q4_K_M; name one"):
        choose_gguf(HubName("a/b"), ["y-Q4_K_M.gguf", "x-Q4_K_M.gguf"])
    assert choose_gguf(HubName("a/b"), ["y-Q5_0.gguf", "x-Q6_K.gguf"]) == "x-Q6_K.gguf"


def test_of_weights_in_two_forms_one_is_taken() -> None:
    def taken(names: list[str], index: bytes | None = None) -> list[str]:
        repository = Repository("a/b", "0" * 40, tuple(RemoteFile(name, 1, "0" * 64) for name in sorted(names)))
        return [file.name for file in safetensors_files(repository, index)]

    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = b'{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    assert taken([*shards, "consolidated.safetensors"], index) == shards
    assert taken([*shards, "consolidated.safetensors"]) == shards
    assert taken(["model.safetensors", "adapter_model.safetensors", "onnx/model.safetensors", "x.safetensors"]) == ["model.safetensors"]
