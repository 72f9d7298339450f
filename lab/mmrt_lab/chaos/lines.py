"""Orders to die at lines of the source (``mmrt.runtime.bus.line_faults``): the storm's end, one file for each process."""

import mmap
import struct
from collections.abc import Iterable
from pathlib import Path

from mmrt.runtime.bus.line_faults import FILE_BYTES, HEAD, KNOWN_AT, MAX_KNOWN, key_of, order_path


class LineOrders:
    """The files of a run's processes, made before it starts. ``lines`` are those that somebody has died at, in order."""

    def __init__(self, fault_file: Path, names: Iterable[str]) -> None:
        self.lines: list[str] = []
        self._files: dict[str, mmap.mmap] = {}
        for name in names:
            path = order_path(fault_file, name)
            path.write_bytes(bytes(FILE_BYTES))
            with path.open("r+b") as file:
                self._files[name] = mmap.mmap(file.fileno(), FILE_BYTES)

    def order(self, name: str, num_lines: int, is_at_start: bool) -> None:
        """Let the process die at the line of this number, once it looks."""
        known = sorted({key_of(line) for line in self.lines})[:MAX_KNOWN]
        struct.pack_into(f"={len(known)}I", self._files[name], KNOWN_AT, *known)
        HEAD.pack_into(self._files[name], 0, num_lines, is_at_start, len(known), 0)

    def found(self, name: str) -> str:
        """Return the line that the process has come to, "" while there is none."""
        num_bytes = HEAD.unpack_from(self._files[name])[3]
        return self._files[name][HEAD.size : HEAD.size + num_bytes].decode()

    def take_back(self, name: str) -> str:
        """End the order. Returns the line of the death, "" if there was none."""
        if line := self.found(name):
            self.lines.append(line)
        HEAD.pack_into(self._files[name], 0, 0, 0, 0, 0)
        return line

    def close(self) -> None:
        for file in self._files.values():
            file.close()
