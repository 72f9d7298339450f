"""Kernels that are kept: their code comes back as it was, or LLVM makes it again."""

import multiprocessing
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
import torch
from llvmlite import binding, ir

import mmrt
from mmrt.cpu_kernels import (
    attention_kernel,
    flash_items,
    flash_pairs,
    int4_kernels,
    int8_kernels,
    int8g_kernels,
    kernel,
    kernel_files,
    layer_kernels,
    object_code,
    panel_kernels,
    part_rows,
    rounding_kernel,
    row_kernels,
)
from mmrt.cpu_kernels.kernel import Kernel
from mmrt.cpu_kernels.machine_code import INT, POINTER, address, constant, load_word
from mmrt.cpu_kernels.object_code import link

CPU = torch.backends.cpu.get_cpu_capability()
KEY = bytes(range(32))

pytestmark = pytest.mark.skipif(kernel.vector_width() is None, reason="this processor has no kernels")


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where kernels are kept. A process's kernel of float32 counts as not loaded yet."""
    monkeypatch.setattr(kernel_files, "_directory", tmp_path / "kernels")
    caches = row_kernels._kernel, kernel.sources_digest
    for cached in caches:
        cached.cache_clear()
    yield tmp_path / "kernels"
    for cached in caches:
        cached.cache_clear()


@pytest.fixture
def makes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The processors for which LLVM made a kernel, one by one."""
    made: list[str] = []
    compile_module = kernel._compile
    monkeypatch.setattr(kernel, "_compile", lambda module, cpu: made.append(cpu) or compile_module(module, cpu))
    return made


def product(values: torch.Tensor) -> torch.Tensor:
    """As a process computes it whose first matrix this is."""
    row_kernels._kernel.cache_clear()
    return row_kernels.multiply(torch.ones(3, values.shape[1]), values)


def test_a_kept_kernel_is_not_made_again(directory: Path, makes: list[str]) -> None:
    values = torch.randn(1500, 256)
    expected = product(values)
    assert len(makes) == 1 and [file.suffix for file in directory.glob("*.code")] == [".code"]
    assert torch.equal(product(values), expected)
    assert len(makes) == 1


def make_in_a_process(directory: Path, started: Barrier, made: "Queue[str]") -> None:
    kernel_files.keep_in(directory)
    row_kernels._kernel.cache_clear()
    compile_module = kernel._compile
    kernel._compile = lambda module, cpu: made.put(cpu) or compile_module(module, cpu)
    started.wait(30)
    product(torch.eye(16))


def test_one_of_three_processes_makes_a_kernel(directory: Path) -> None:
    context = multiprocessing.get_context("fork")
    started, made = context.Barrier(3), context.Queue()
    processes = [context.Process(target=make_in_a_process, args=(directory, started, made)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert made.get(timeout=5) and made.empty()


def test_nobody_waits_long_for_a_process_that_is_stopped(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_files, "MAKE_S", 0.05)
    waits_s = []
    with ExitStack() as stack:
        for name in ("one", "another", "one"):
            begun_s = time.monotonic()
            stack.enter_context(kernel_files.alone(name))
            waits_s.append(time.monotonic() - begun_s)
    assert max(waits_s[:2]) < 0.05 <= waits_s[2]


@pytest.mark.parametrize("change", ["cut", "bit", "empty", "others may write it", "a directory"])
def test_a_file_that_is_not_as_it_was_is_replaced(change: str, directory: Path, makes: list[str]) -> None:
    values = torch.randn(70, 64)
    expected = product(values)
    (file,) = directory.glob("*.code")
    data = bytearray(file.read_bytes())
    if change == "cut":
        file.write_bytes(data[:-1])
    elif change == "bit":
        data[-100] ^= 1
        file.write_bytes(data)
    elif change == "empty":
        file.write_bytes(b"")
    elif change == "others may write it":
        file.chmod(0o622)
    else:
        file.unlink()
        file.mkdir()
    assert torch.equal(product(values), expected) and len(makes) == 2
    if change != "a directory":
        assert torch.equal(product(values), expected) and len(makes) == 2


@pytest.mark.parametrize(
    ("source", "is_made_again"),
    [
        ("cpu_kernels/int8_kernels.py", True),  # any of them
        ("cpu_kernels/groups.py", True),
        ("schema/weight_layout.py", True),
        ("models/lm/language_model.py", False),
        ("models/lm/matrices.py", False),
        ("models/lm/experts.py", False),
    ],
)
def test_an_edit_of_a_kernel_makes_kernels_again_and_one_of_a_model_does_not(
    source: str, is_made_again: bool, directory: Path, makes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.randn(70, 64)
    product(values)
    edited = Path(mmrt.__file__).parent / source
    read = Path.read_bytes
    assert read(edited)
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b" " * (path == edited))
    kernel.sources_digest.cache_clear()
    product(values)
    assert len(makes) == 1 + is_made_again


def test_kernels_keep_to_sources_that_are_looked_at() -> None:
    """What they import besides emits no code: an edit of it changes none."""
    folder = Path(kernel.__file__).parent
    found = {match for file in folder.glob("*.py") for match in re.findall(r"^ *from \.\.(\S+) import", file.read_text(), re.MULTILINE)}
    assert found == {"schema.weight_layout", "shm.regular_file"}


def test_a_source_that_changed_since_it_was_imported_says_nothing(
    directory: Path, makes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "_IMPORTED_S", 0.0)
    product(torch.randn(70, 64))
    assert len(makes) == 1 and not directory.exists()


def test_where_nothing_can_be_written_kernels_work(directory: Path, makes: list[str]) -> None:
    directory.write_text("a file where the directory should be")
    values = torch.randn(70, 64)
    assert torch.equal(product(values), product(values)) and len(makes) == 2


def test_an_image_needs_another_key_than_its_own(directory: Path) -> None:
    image = kernel.Image(b"code", 1)
    kernel_files.save("a", KEY, image)
    assert kernel_files.load("a", KEY) == image
    assert kernel_files.load("a", KEY[::-1]) is None and kernel_files.load("b", KEY) is None
    (directory / "a").rename(directory / "b")
    assert kernel_files.load("b", KEY) is None
    kernel_files.save("a", KEY, image)
    (directory / "b").unlink()
    assert os.listdir(directory) == ["a"] and (directory / "a").stat().st_uid == os.geteuid()


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "link to a device"])
def test_what_is_no_file_is_not_waited_for(directory: Path, kind: str) -> None:
    image = kernel.Image(b"code", 1)
    directory.mkdir(mode=0o700)
    os.mkfifo(directory / "pipe")
    if kind == "pipe":
        (directory / "pipe").rename(directory / "a")
    else:
        (directory / "a").symlink_to(directory / "pipe" if "pipe" in kind else "/dev/zero")
    assert kernel_files.load("a", KEY) is None
    kernel_files.save("a", KEY, image)
    assert kernel_files.load("a", KEY) == image


@pytest.mark.parametrize("mode", [0o770, 0o722, 0o777, 0o1777])
def test_a_directory_that_others_may_write_is_not_used(directory: Path, mode: int, caplog: pytest.LogCaptureFixture) -> None:
    image = kernel.Image(b"code", 1)
    kernel_files.save("a", KEY, image)
    directory.chmod(mode)
    assert kernel_files.load("a", KEY) is None
    kernel_files.save("b", KEY, image)
    assert os.listdir(directory) == ["a"] and caplog.text.count("must belong to this user, and be writable by no other") == 1
    directory.chmod(0o755)
    assert kernel_files.load("a", KEY) == image


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory to somebody else")
def test_a_directory_of_somebody_else_is_not_used(directory: Path) -> None:
    kernel_files.save("a", KEY, kernel.Image(b"code", 1))
    os.chown(directory, 65534, 65534)
    assert kernel_files.load("a", KEY) is None


def test_what_is_too_large_to_be_read_is_not_kept(directory: Path) -> None:
    kernel_files.save("a", KEY, kernel.Image(bytes(kernel_files._MAX_BYTES), 0))
    assert not directory.exists() or not any(directory.glob("*.code"))


def test_a_file_is_not_written_through_a_link(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_files.threading, "get_native_id", lambda: 7)
    directory.mkdir()
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    (directory / "a.7.part").symlink_to(victim)
    image = kernel.Image(b"code", 1)
    kernel_files.save("a", KEY, image)
    assert kernel_files.load("a", KEY) == image and victim.read_text() == "as it was"


def test_where_no_code_may_be_run_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, image: object) -> None:
        raise PermissionError

    monkeypatch.setattr(object_code.LoadedCode, "__init__", refuse)
    kernel.vector_width.cache_clear()
    try:
        assert kernel.vector_width() is None
    finally:
        monkeypatch.undo()
        kernel.vector_width.cache_clear()
    assert kernel.vector_width() is not None


class _Calls:
    """Tiles that note which rows of the matrix each call of them has."""

    most_rows = 2

    def emit(self, builder: ir.IRBuilder, num_rows: int, arguments: Sequence[ir.Value]) -> None:
        words, row, start, stop = arguments
        noted = load_word(builder, words, 2, POINTER)
        number = builder.load(noted, align=8, typ=INT)
        place = builder.add(builder.mul(number, constant(4)), constant(1))
        for index, value in enumerate((constant(num_rows), row, start, stop)):
            builder.store(value, address(builder, noted, builder.add(place, constant(index)), INT), align=8)
        builder.store(builder.add(number, constant(1)), noted, align=8)


def calls(block_rows: int | None, num_rows: int, num_values: int) -> list[list[int]]:
    noted = torch.zeros(1000, dtype=torch.int64)
    Kernel(kernel._compile(kernel._module(_Calls(), block_rows), "haswell")).run((num_rows, num_values, noted.data_ptr()), 1)
    return noted[1 : 1 + 4 * int(noted[0])].view(-1, 4).tolist()


def test_tiles_have_blocks_or_all_that_a_thread_has() -> None:
    assert calls(8, 3, 20) == [[2, 0, 0, 8], [1, 2, 0, 8], [2, 0, 8, 16], [1, 2, 8, 16], [2, 0, 16, 20], [1, 2, 16, 20]]
    assert calls(None, 3, 20) == [[2, 0, 0, 20], [1, 2, 0, 20]]
    assert calls(None, 1, 0) == calls(8, 1, 0) == []


def objects(text: str) -> bytes:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple().create_target_machine(cpu="haswell", reloc="pic", codemodel="small")
    code: bytes = target.emit_object(binding.parse_assembly(text))
    return code


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("declare void @other()\ndefine void @f() {\n call void @other()\n ret void\n}", "calls a function that is not in it"),
        ("@v = global i32 1\ndefine internal i32 @f() {\n %x = load i32, ptr @v\n ret i32 %x\n}", "has variables"),
    ],
)
def test_code_that_needs_more_than_itself_is_refused(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        link(objects(text))


def test_every_kernel_is_an_image() -> None:
    """For each processor, whichever this is: no code that LLVM makes of ours needs a library."""
    for capability, width in kernel._WIDTHS.items():
        for tiles in (
            *(row_kernels.RowTiles(stored, width) for stored in row_kernels._STORED.values()),
            *(panel_kernels.PanelTiles(stored, panel_kernels._VECTORS * width) for stored in panel_kernels._STORED.values()),
            *(tiles(width) for tiles in int8_kernels._TILES.values()),
            int4_kernels._Tiles(width, with_vnni=False),
            int8g_kernels._Tiles(width, with_vnni=False),
            part_rows._Parts(),
            rounding_kernel._Rows(width),
            *(kind(stored, width) for kind in layer_kernels._KINDS.values() for stored in kernel.STORED.values()),
            attention_kernel._Heads(attention_kernel.Shape(2, 8, 128, 16, torch.bfloat16), width, False),
            attention_kernel._Heads(attention_kernel.Shape(8, 1, 64, 64, torch.float32), width, False),
            flash_items.Items(64, 0.125, width),
        ):
            assert kernel._compile(kernel._module(tiles, 32), kernel._CPUS[capability]).code
    for packed in (int4_kernels._Tiles, int8g_kernels._Tiles):
        assert kernel._compile(kernel._module(packed(width, with_vnni=True), 32), kernel._WITH_VNNI).code
    heads = attention_kernel._Heads(attention_kernel.Shape(2, 4, 64, 16, torch.bfloat16), width, True)
    for tiles in (heads, flash_pairs.PairItems(64, 0.125, width)):
        assert kernel._compile(kernel._module(tiles, 32), kernel._WITH_BFLOAT16).code
