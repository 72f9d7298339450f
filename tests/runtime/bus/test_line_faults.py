"""Real processes that die at lines of mmrt: at the one of that number, at none where another has died, or not at all."""

import mmap
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from mmrt.runtime.bus.line_faults import FILE_BYTES, HEAD, KNOWN_AT, LINE_SIGNAL, key_of, order_path

PROGRAM = """
import os, sys
from mmrt.runtime.bus.line_faults import die_at_lines
from mmrt.runtime.environment import read_environment
from mmrt.runtime.supervisor.restart_policy import RestartHistory, RestartPolicy, decide
die_at_lines("decode", read_environment())
print("there", flush=True)
while sys.stdin.readline():
    decide(RestartPolicy(), RestartHistory(), lifetime_s=1.0, status=1, jitter=0.0)
    print("still there", flush=True)
"""
POLICY = "runtime/supervisor/restart_policy.py:"


class Victim:
    """One process and its order."""

    def __init__(self, faults: Path) -> None:
        path = order_path(faults, "decode")
        path.write_bytes(bytes(FILE_BYTES))
        with path.open("r+b") as file:
            self.order = mmap.mmap(file.fileno(), FILE_BYTES)
        self._environment = {**os.environ, "MMRT_FAULTS": str(faults)}

    def tell(self, num_lines: int, known: tuple[str, ...] = (), from_start: bool = False) -> None:
        struct.pack_into(f"={len(known)}I", self.order, KNOWN_AT, *map(key_of, known))
        HEAD.pack_into(self.order, 0, num_lines, from_start, len(known), 0)

    def live(self, is_told: bool = True) -> tuple[int, str]:
        """(exit status, the line of its death)."""
        command = [sys.executable, "-c", PROGRAM]
        with subprocess.Popen(command, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None and process.stdout is not None
            if process.stdout.readline() and is_told:
                process.send_signal(LINE_SIGNAL)
            try:
                process.stdin.write("go\n" * 3)
                process.stdin.close()
            except BrokenPipeError:
                pass
            process.wait(30)
        num_bytes = HEAD.unpack_from(self.order)[3]
        return process.returncode, self.order[HEAD.size : HEAD.size + num_bytes].decode()


@pytest.fixture
def victim(tmp_path: Path) -> Victim:
    return Victim(tmp_path / "faults")


def test_one_line_after_the_other(victim: Victim) -> None:
    lines: list[str] = []
    for _ in range(3):
        victim.tell(1, tuple(lines))
        status, line = victim.live()
        assert status == -signal.SIGKILL and line.startswith(POLICY) and line not in lines
        lines.append(line)
    victim.tell(3)
    assert victim.live() == (-signal.SIGKILL, lines[2])  # counted from the first


def test_from_the_start_on(victim: Victim) -> None:
    victim.tell(2, from_start=True)
    status, line = victim.live(is_told=False)
    assert status == -signal.SIGKILL and line.startswith(POLICY)


def test_who_comes_to_no_such_line_lives_on(victim: Victim) -> None:
    victim.tell(10_000)
    assert victim.live() == (0, "")
    victim.tell(0)
    assert victim.live() == (0, "")
    victim.tell(1)
    assert victim.live(is_told=False) == (0, "")
