"""A file system of one's own: full when it is to be, and seen by nobody else. In processes of their own, as the storm is one."""

import subprocess
import sys
from pathlib import Path

PROBE = """
import errno, os, sys
from pathlib import Path
from mmrt_lab.chaos.private_tmpfs import enter
path = Path(sys.argv[1])
try:
    tmpfs = enter(path, 64 << 20)
except OSError as error:
    print("refused", error); raise SystemExit(0)
(path / "file").write_bytes(b"x" * 100_000)
tmpfs.limit(1 << 20)
tmpfs.fill()
try:
    (path / "more").write_bytes(b"x" * 8192); print("there was room")
except OSError as error:
    print(errno.errorcode[error.errno])
(path / "more").unlink(missing_ok=True)
tmpfs.free()
(path / "more").write_bytes(b"x" * 8192)
print(sorted(entry.name for entry in path.iterdir()), os.stat(path).st_dev != os.stat(path.parent).st_dev)
tmpfs.close()
print(os.listdir(path))
"""


def probe(path: Path, *prefix: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*prefix, sys.executable, "-c", PROBE, str(path)], capture_output=True, text=True, timeout=30)


def test_full_and_free_again_and_nowhere_else(tmp_path: Path) -> None:
    done = probe(tmp_path)
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith("refused"):
        return  # this system lets users have none: the storm says so and goes without
    assert done.stdout == "ENOSPC\n['file', 'more'] True\n[]\n"
    assert list(tmp_path.iterdir()) == []


def test_the_command_starts_no_thread_before_it_has_entered() -> None:
    """A process with threads may not make a user namespace: numpy and the openai client come later."""
    code = "import os, mmrt_lab.chaos.command; print(len(os.listdir('/proc/self/task')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "1\n"
