"""Kernels for a CPU, in machine code that LLVM makes for the processor at hand when a process first needs it.

A product of M rows of activations with a matrix of N rows is made of tiles: some rows of activations by one block of the matrix, which
stays in cache while all rows of activations are multiplied by it. ``row_kernels``, ``int8_kernels`` and ``int4_kernels`` emit a tile;
which tiles there are, and which thread computes them, is decided here. Products of many rows (``panel_kernels``) and kernels of other
operations (``attention_kernel``, ``flash_attention``, ``delta_kernels``, ``layer_kernels``, ``part_rows``, ``rounding_kernel``, and of
weights when they are loaded: ``block_kernels``, ``packing_kernel``) are products with M = 1: what they compute N times is the matrix.
"""

import ctypes
import logging
import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import llvmlite
import numpy as np
import torch
from llvmlite import ir
from numpy.typing import NDArray
from torch import Tensor

from . import kernel_files
from .machine_code import FLOAT, INT, POINTER, address, constant, load_word, loop, minimum
from .object_code import Image, LoadedCode, link, may_run_code
from .processor import processor_flags
from .team import Team
from .team_code import team_module

log = logging.getLogger(__name__)

_WIDTHS = {"AVX2": 8, "AVX512": 16}  # numbers in a vector of float32, by torch's name of the instructions
_CPUS = {"AVX2": "haswell", "AVX512": "skylake-avx512"}  # LLVM's names of processors that have them
_WITH_VNNI = "cascadelake"
_WITH_BFLOAT16 = "cooperlake"
_BESIDE = ("abm", "bmi1", "bmi2", "f16c", "fma", "movbe", "popcnt")  # Linux's names of instructions that both have besides

STORED = {torch.float32: FLOAT, torch.bfloat16: ir.IntType(16)}  # as LLVM reads what kernels of other operations than products take

_PARTS_OF_THREAD = 4  # of a product: with more, threads that read memory get in each other's way
_CALL_WORDS = 4  # where a team's threads take the numbers of parts, 0 without a team; how many they are; products; words of each
_LEAST_WORK = 1 << 18  # weights: fewer are left to one thread
_IMPORTED_S = time.time()
_threads = threading.local()  # ``team``: that which a thread leads; ``count``: tells how many compute its next kernel


@cache
def vector_width() -> int | None:
    """Numbers in a vector of float32 on this processor; None where no kernels are made for it."""
    is_whole = may_run_code() and processor_flags().issuperset(_BESIDE)
    return _WIDTHS.get(torch.backends.cpu.get_cpu_capability()) if is_whole else None


def has_vnni() -> bool:
    """Return whether kernels may use instructions that add up four products of bytes at once."""
    return vector_width() == 16 and "avx512_vnni" in processor_flags()


def has_bfloat16() -> bool:
    """Return whether kernels may use instructions that add up products of two pairs of bfloat16 at once (AVX512-BF16)."""
    return has_vnni() and "avx512_bf16" in processor_flags()


def set_threads(count: Callable[[], int] | None) -> None:
    """Let ``count`` tell from now on how many threads compute a kernel that this thread calls. None: as many as torch has."""
    _threads.count = count


def available_threads() -> int:
    """Threads that compute the calling thread's next kernel. Two calls can differ, and no bit of a result depends on it."""
    count: Callable[[], int] | None = getattr(_threads, "count", None)
    return torch.get_num_threads() if count is None else count()


def threads_for(num_weights: int) -> int:
    """Threads that compute products with so many weights: little work is left to one."""
    return available_threads() if num_weights >= _LEAST_WORK else 1


def check_columns(x_MK: Tensor, num_columns: int) -> None:
    """Raises: ValueError for activations that do not fit a matrix of so many columns, which a kernel would read beyond their end."""
    if not x_MK.is_cpu or x_MK.shape[1] != num_columns:
        raise ValueError(f"activations {list(x_MK.shape)} on {x_MK.device} by a matrix of {num_columns} columns on the CPU")


class Tiles(Protocol):
    most_rows: int  # of activations in a tile

    def emit(self, builder: ir.IRBuilder, num_rows: int, arguments: Sequence[ir.Value], /) -> None:
        """Emit a tile of so many rows of activations. The arguments are the address of the product's words, the first row of
        activations, and the block's first row of the matrix and its end."""
        ...


class Kernel:
    """A kernel's code."""

    def __init__(self, image: Image) -> None:
        self._code = LoadedCode(image)  # a function (call): computes the calling thread's part of a product
        self._alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._code.address)

    def run(self, words: Sequence[int], num_threads: int) -> None:
        """Compute a product: M, N, and what its tiles read."""
        self._run(1, len(words), _packer(len(words))(*words), num_threads)

    def run_all(self, words: NDArray[np.int64], num_threads: int) -> None:
        """Compute products in one call, with the words of one in each row. N is the same in all."""
        num_products, num_words = words.shape
        if num_products:
            self._run(num_products, num_words, words.tobytes(), num_threads)

    def _run(self, num_products: int, num_words: int, words: bytes, num_threads: int) -> None:
        pack = _packer(_CALL_WORDS)
        if num_threads == 1:
            self._alone(pack(0, 0, num_products, num_words) + words)
        else:
            team = _team()
            team.call(self._code.address, pack(team.next_part, num_threads, num_products, num_words) + words, num_threads)


def _team() -> Team:
    """The calling thread's."""
    team: Team | None = getattr(_threads, "team", None)
    if team is None:
        team = _threads.team = Team(_team_code())
    return team


@cache
def _team_code() -> LoadedCode:
    return LoadedCode(_image("team", team_module))


@cache
def _packer(num_words: int) -> Callable[..., bytes]:
    """Return a function that packs so many words. Arrays of ctypes take five times as long."""
    return struct.Struct(f"{num_words}q").pack


def load_kernel(name: str, tiles: Tiles, block_rows: int | None, *, with_bfloat16: bool = False) -> Kernel:
    """The kernel of these tiles, with blocks of so many rows; None: there is a block for each thread. Its name is its own among kernels
    of one processor. ``with_bfloat16``: it uses instructions that not all kernels may.

    Where no earlier process has kept it, it takes 0.2 s.
    """
    return Kernel(_image(name, lambda: _module(tiles, block_rows), _WITH_BFLOAT16 if with_bfloat16 else None))


def _image(name: str, make: Callable[[], ir.Module], cpu: str | None = None) -> Image:
    cpu = cpu or (_WITH_VNNI if has_vnni() else _CPUS[torch.backends.cpu.get_cpu_capability()])
    file = f"{name}-{cpu}.code"
    key = sources_digest()
    if key is None:
        return _compile(make(), cpu)
    if (image := kernel_files.load(file, key)) is not None:
        return image
    with kernel_files.alone(file):
        if (image := kernel_files.load(file, key)) is not None:
            return image
        begun_s = time.perf_counter()
        image = _compile(make(), cpu)
        kernel_files.save(file, key, image)
    log.info("kernel %s made in %.2f s; later processes find it in the cache directory", name, time.perf_counter() - begun_s)
    return image


@cache
def sources_digest() -> bytes | None:
    """Digest of all that determines kernels' code; None where it is not known: a source is gone, or was written since this process
    imported its own."""
    digest = blake2b(llvmlite.__version__.encode(), digest_size=32)
    own = Path(__file__).parent
    sources = [*sorted(own.glob("*.py")), own.parent / "schema" / "weight_layout.py"]  # whose constants they have
    if Path(__file__) not in sources:
        return None
    try:
        for source in sources:
            if source.stat().st_ctime >= _IMPORTED_S:  # st_mtime may be that of an archive
                return None
            digest.update(source.read_bytes())
    except OSError:
        return None
    return digest.digest()


def _compile(module: ir.Module, cpu: str) -> Image:
    from llvmlite import binding  # a library of 170 MB that a process with kept kernels does without

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple().create_target_machine(cpu=cpu, opt=3, reloc="pic", codemodel="small")
    code = binding.parse_assembly(str(module))
    passes = binding.create_new_module_pass_manager()
    passes.add_sroa_pass()  # variables to registers
    passes.add_instruction_combine_pass()
    passes.run(code, binding.create_pass_builder(target, binding.create_pipeline_tuning_options()))
    return link(target.emit_object(code))


def _module(tiles: Tiles, block_rows: int | None) -> ir.Module:
    """One global function (call), whose words are those of ``_CALL_WORDS`` and the products' words. The products' rows of the matrix
    are numbered on from one product to the next; each product begins with a new block."""
    module = ir.Module()
    of_rows = {num_rows: _function_of_tile(module, tiles, num_rows) for num_rows in range(1, tiles.most_rows + 1)}
    unit, parts_of_thread = constant(block_rows or 1), constant(_PARTS_OF_THREAD if block_rows else 1)
    span = _emit_span(module, _emit_part(module, of_rows, block_rows), unit)
    member = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER]), "member")
    (call,) = member.args
    builder = ir.IRBuilder(member.append_basic_block())
    next_part, num_threads, num_products = load_word(builder, call, 0, POINTER), *(load_word(builder, call, index) for index in (1, 2))
    num_values = builder.mul(num_products, _in_blocks(builder, call, unit))
    is_alone = builder.icmp_unsigned("==", builder.ptrtoint(next_part, INT), constant(0))
    with builder.if_else(is_alone) as (alone, in_team):
        with alone, builder.if_then(builder.icmp_signed("<", constant(0), num_values)):
            builder.call(span, [call, constant(0), num_values])
        with in_team:
            num_parts = builder.mul(num_threads, parts_of_thread)
            size = builder.mul(_divided(builder, num_values, builder.mul(unit, num_parts)), unit)
            take, work, done = (builder.append_basic_block() for _ in range(3))
            builder.branch(take)
            builder.position_at_end(take)
            start = builder.mul(builder.atomic_rmw("add", next_part, constant(1), "monotonic"), size)
            builder.cbranch(builder.icmp_signed("<", start, num_values), work, done)
            builder.position_at_end(work)
            builder.call(span, [call, start, minimum(builder, builder.add(start, size), num_values)])
            builder.branch(take)
            builder.position_at_end(done)
    builder.ret_void()
    return module


def _in_blocks(builder: ir.IRBuilder, call: ir.Value, unit: ir.Value) -> ir.Value:
    """The rows of the matrix that a product has, rounded up to whole blocks."""
    return builder.mul(_divided(builder, load_word(builder, call, _CALL_WORDS + 1), unit), unit)


def _emit_span(module: ir.Module, part: ir.Function, unit: ir.Value) -> ir.Function:
    """A function (call, start, stop): the parts of products that these rows are, which are some."""
    span = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER, INT, INT]), "span")
    span.linkage = "internal"
    call, start, stop = span.args
    builder = ir.IRBuilder(span.append_basic_block())
    of_product, num_values = _in_blocks(builder, call, unit), load_word(builder, call, _CALL_WORDS + 1)
    with loop(builder, builder.udiv(start, of_product), _divided(builder, stop, of_product), 1) as product:
        before = builder.mul(product, of_product)
        first, last = (builder.sub(bound, before) for bound in (start, stop))
        first = builder.select(builder.icmp_signed("<", first, constant(0)), constant(0), first)
        place = builder.add(constant(_CALL_WORDS), builder.mul(product, load_word(builder, call, 3)))
        builder.call(part, [address(builder, call, place, INT), first, minimum(builder, last, num_values)])
    builder.ret_void()
    return span


def _function_of_tile(module: ir.Module, tiles: Tiles, num_rows: int) -> ir.Function:
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER, INT, INT, INT]), f"tile_{num_rows}")
    function.linkage = "internal"
    builder = ir.IRBuilder(function.append_basic_block())
    tiles.emit(builder, num_rows, function.args)
    builder.ret_void()
    return function


def _emit_part(module: ir.Module, tiles: dict[int, ir.Function], block_rows: int | None) -> ir.Function:
    """A function (words, start, stop): the tiles of all rows of activations with these rows of the matrix."""
    part = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER, INT, INT]), "part")
    part.linkage = "internal"
    words, start, stop = part.args
    builder = ir.IRBuilder(part.append_basic_block())
    if block_rows is None:
        with builder.if_then(builder.icmp_signed("<", start, stop)):
            _emit_block(builder, tiles, words, start, stop)
    else:
        with loop(builder, start, stop, block_rows) as first:
            _emit_block(builder, tiles, words, first, minimum(builder, builder.add(first, constant(block_rows)), stop))
    builder.ret_void()
    return part


def _emit_block(builder: ir.IRBuilder, tiles: dict[int, ir.Function], words: ir.Value, start: ir.Value, stop: ir.Value) -> None:
    """Emit the tiles of all rows of activations with the matrix's rows from ``start`` to ``stop``."""
    num_rows, most_rows = load_word(builder, words, 0), max(tiles)
    whole = builder.sub(num_rows, builder.urem(num_rows, constant(most_rows)))
    with loop(builder, constant(0), whole, most_rows) as row:
        builder.call(tiles[most_rows], [words, row, start, stop])
    for left in range(1, most_rows):
        with builder.if_then(builder.icmp_unsigned("==", builder.sub(num_rows, whole), constant(left))):
            builder.call(tiles[left], [words, whole, start, stop])


def _divided(builder: ir.IRBuilder, value: ir.Value, by: ir.Value) -> ir.Value:
    """Rounded up."""
    return builder.udiv(builder.add(value, builder.sub(by, constant(1))), by)
