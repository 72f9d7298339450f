"""Headers of safetensors files: taken when the library takes them and all elements are aligned, refused with a reason otherwise."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from mmrt.models.checkpoint.safetensors_files import SafetensorsFiles
from mmrt.models.errors import CheckpointError
from mmrt.tests.settings import examples


def packed(header: dict[str, Any], num_bytes: int) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(num_bytes)


def read(directory: Path, data: bytes) -> dict[str, tuple[str, tuple[int, ...], int]]:
    (directory / "model.safetensors").write_bytes(data)
    with SafetensorsFiles(directory) as files:
        return {name: (tensor.dtype, tensor.shape, tensor.num_bytes) for name, tensor in files.tensors.items()}


def entry(shape: Any, begin: Any, end: Any, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, 12, "tensor 'b' overlaps tensor 'a'"),
    ({"a": entry([2], 0, 8), "b": entry([2], 0, 8)}, 8, "tensor 'b' overlaps tensor 'a'"),
    ({"a": entry([2], 0, 8), "b": entry([2], 12, 20)}, 20, "tensor 'b' begins 4 bytes behind the end of tensor 'a'"),
    ({"a": entry([2], 4, 12)}, 12, "tensor 'a' begins 4 bytes behind the end of the header"),
    ({"a": entry([2], 0, 8)}, 9, "1 bytes behind tensor 'a' belong to no tensor"),
    ({"a": entry([1], 0, 1, "U8"), "b": entry([1], 1, 5)}, 5, "tensor 'b' of F32 begins at byte 1, which is no multiple of 4"),
    ({"a": entry([2.0], 0, 8)}, 8, "header entry of tensor 'a' is malformed"),
    ({"a": entry([2], 0.0, 8)}, 8, "header entry of tensor 'a' is malformed"),
    ({"a": entry([True], 0, 4)}, 4, "header entry of tensor 'a' is malformed"),
    ({"a": entry(["2"], 0, 8)}, 8, "header entry of tensor 'a' is malformed"),
    ({"a": entry("2", 0, 8)}, 8, "header entry of tensor 'a' is malformed"),
    ({"a": entry([3], 0, 2, "F4")}, 2, r"tensor 'a' of shape \[3\] takes 12 bits, found 2"),
    ({"a": entry([1 << 62] * 1000, 0, 8)}, 8, "takes 73786976294838206464 bytes, found 8"),
    ({"a": entry([1 << 64, 0], 0, 0)}, 0, "header entry of tensor 'a' is malformed"),
]


@pytest.mark.parametrize(("header", "num_bytes", "message"), BAD)
def test_what_is_refused(tmp_path: Path, header: dict[str, Any], num_bytes: int, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, packed(header, num_bytes))


SIZES = {"F64": 8, "F32": 4, "BF16": 2, "U8": 1, "I64": 8, "BOOL": 1}
ODD = st.sampled_from([-1, 0, 1, 2.0, True, "2", None])


@st.composite
def files(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """Tensors that lie one behind the other, of which some numbers may then be changed."""
    header: dict[str, Any] = {}
    at = 0
    for name in draw(st.lists(st.sampled_from("abcdef"), max_size=4, unique=True)):
        dtype = draw(st.sampled_from(sorted(SIZES)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        size = SIZES[dtype]
        for n in shape:
            size *= n
        header[name] = entry(shape, at, at + size, dtype)
        at += size
    for name in draw(st.lists(st.sampled_from(sorted(header)), max_size=2) if header else st.just([])):
        numbers = header[name][draw(st.sampled_from(["shape", "data_offsets"]))]
        if numbers:
            i = draw(st.integers(0, len(numbers) - 1))
            numbers[i] = draw(st.integers(0, 40) | ODD)
    return header, max(0, at + draw(st.sampled_from([0, 0, 0, -1, 1])))


@settings(max_examples=examples(400), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files())
def test_as_the_library(tmp_path: Path, file: tuple[dict[str, Any], int]) -> None:
    data = packed(*file)
    try:
        theirs = {name: (tensor["dtype"], tuple(tensor["shape"]), len(tensor["data"])) for name, tensor in deserialize(data)}
        assert all(file[0][name]["data_offsets"][0] % SIZES[file[0][name]["dtype"]] == 0 for name in theirs), "misaligned"
    except (SafetensorError, AssertionError):
        with pytest.raises(CheckpointError):
            read(tmp_path, data)
    else:
        assert read(tmp_path, data) == theirs
