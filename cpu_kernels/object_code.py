"""Machine code in memory: an object file of LLVM's (ELF, x86-64) as one image that runs wherever it lies.

An image needs no linker and no library: its code refers to itself alone, by distances (System V ABI for AMD64, section 4.4).
"""

import ctypes
import mmap
import struct
from collections.abc import Iterator
from typing import NamedTuple

_PROGRAM, _SYMBOLS, _RELOCATIONS = 1, 2, 4  # SHT_PROGBITS, SHT_SYMTAB, SHT_RELA
_IN_MEMORY, _WRITABLE = 2, 1  # SHF_ALLOC, SHF_WRITE
_DISTANCES = (2, 4)  # R_X86_64_PC32 and PLT32: 32 bits, from the place to a symbol
_GLOBAL = 1  # STB_GLOBAL


class Image(NamedTuple):
    code: bytes  # with its constants
    entry: int  # where its function begins


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entry_bytes: int


class _Symbol(NamedTuple):
    name: int
    info: int
    other: int
    section: int
    value: int
    size: int


def link(data: bytes) -> Image:
    """The image of an object file, entered at its one global function.

    Raises: ValueError where the code needs something that is not in the file.
    """
    first, num_sections = struct.unpack_from("<Q", data, 40)[0], struct.unpack_from("<H", data, 60)[0]
    sections = [_Section(*struct.unpack_from("<IIQQQQIIQQ", data, first + 64 * index)) for index in range(num_sections)]
    code, places = bytearray(), dict[int, int]()  # of sections
    for index, section in enumerate(sections):
        if section.kind == _PROGRAM and section.flags & _IN_MEMORY:
            if section.flags & _WRITABLE:
                raise ValueError("the code has variables")
            code += bytes(-len(code) % max(1, section.align))
            places[index] = len(code)
            code += data[section.offset : section.offset + section.size]
    symbols = [_Symbol(*entry) for table in sections if table.kind == _SYMBOLS for entry in _entries(data, table, "<IBBHQQ")]

    def place_of(symbol: _Symbol) -> int:
        if symbol.section not in places:
            raise ValueError("the code calls a function that is not in it")
        return places[symbol.section] + symbol.value

    for section in sections:
        if section.kind == _RELOCATIONS and section.info in places:
            for offset, info, added in _entries(data, section, "<QQq"):
                if info & 0xFFFFFFFF not in _DISTANCES:
                    raise ValueError(f"the code has a relocation of kind {info & 0xFFFFFFFF}")
                place = places[section.info] + offset
                struct.pack_into("<i", code, place, place_of(symbols[info >> 32]) + added - place)
    (entry,) = (symbol for symbol in symbols if symbol.info >> 4 == _GLOBAL and symbol.section)
    return Image(bytes(code), place_of(entry))


def _entries(data: bytes, section: _Section, form: str) -> Iterator[tuple[int, ...]]:
    return struct.iter_unpack(form, data[section.offset : section.offset + section.size])


class LoadedCode:
    """An image in memory that is never written again. ``address`` is that of its function."""

    def __init__(self, image: Image) -> None:
        """Raises: OSError where the system lets no process run code that it has written."""
        self._memory = mmap.mmap(-1, len(image.code))
        self._memory.write(image.code)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        if protect(start, len(image.code), mmap.PROT_READ | mmap.PROT_EXEC):
            raise OSError(ctypes.get_errno(), "memory cannot be made executable")
        self.address = start + image.entry


def may_run_code() -> bool:
    """Return whether the system lets this process run code that it has written."""
    try:
        LoadedCode(Image(b"\xc3", 0))  # return
    except OSError:
        return False
    return True
