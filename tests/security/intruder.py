"""What a taken process of a run would try on the memory of others: put into a copy of the package, where each actor calls it."""

import ctypes
import errno
import json
import mmap
import os
import re
from pathlib import Path

libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
made: set[str] = set()


def intrude(run: Path, actor: str) -> None:
    """Once the run has a file ``intrude``: make writable what is mapped for reading; leave the outcomes in a file."""
    if actor in made or not (run / "intrude").exists():
        return
    made.add(actor)
    outcomes = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \d+ +(.*)", line)
        if found and found[4].startswith(f"{run}/") and "w" not in found[3]:
            start, end = int(found[1], 16), int(found[2], 16)
            failed = libc.mprotect(start, end - start, mmap.PROT_READ | mmap.PROT_WRITE)
            outcomes[f"{Path(found[4]).stem} {found[1]}"] = errno.errorcode[ctypes.get_errno()] if failed else "done"
    part = run / f"part-{actor}"
    part.write_text(json.dumps(outcomes))
    os.replace(part, run / f"intruded-{actor}")
