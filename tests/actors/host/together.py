"""Three threads that share this process, as ``test_shared_process`` wants them: BEHAVIOUR of the first, NOTIFY_SOCKET of all."""

import ctypes
import faulthandler
import logging
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mmrt.actors.host.shared_process import run_together
from mmrt.runtime.config.runtime_config import parse_config
from mmrt.runtime.process.lifeline import Lifeline
from mmrt.runtime.process.notify import Notifier


class Status:
    """Says that the process has turned a few times since a step began: each turn looks at its deadline."""

    step_start_ns = 1 << 62
    _deadline_ns = 0
    _num_looks = 0

    @property
    def step_deadline_ns(self) -> int:
        self._num_looks += self._deadline_ns > 0
        if self._num_looks == 12:  # two looks in a turn of half a second, so three seconds, with a watchdog of one
            print("turned", flush=True)
        return self._deadline_ns

    @step_deadline_ns.setter
    def step_deadline_ns(self, deadline_ns: int) -> None:
        self._deadline_ns = deadline_ns


class Threaded:
    """What ``run_together`` needs of an actor."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.config = parse_config("[supervisor]\nwatchdog_s = 1.0\n[actors.encoder]\nnice = 7\n")
        self.notifier = Notifier(address, name, 4)
        self.run = SimpleNamespace(path=Path(address).parent)
        self.failure: Exception | None = None
        self.status = None if sys.argv[1] == "cold" and name != "encoder" else Status()
        self.told = threading.Event()

    def end(self) -> None:
        self.told.set()


def live(actor: Any) -> int:
    behaviour = sys.argv[1] if actor.name == "encoder" else ""
    actor.notifier.ready("standby")
    time.sleep(0.2 if behaviour else 0.0)
    if behaviour in ("step", "overdue"):
        actor.status.step_deadline_ns = time.monotonic_ns() + (1 if behaviour == "overdue" else 60_000_000_000)
    actor.notifier.active()
    if behaviour in ("fail", "cold"):
        return 7
    if behaviour == "crash":
        ctypes.CDLL(None).memset(0, 0, 1)
    if behaviour == "exit":
        sys.exit(3)
    if behaviour in ("raise", "lose"):
        raise RuntimeError("CUDA error: an illegal memory access was encountered" if behaviour == "lose" else "on purpose")
    while not actor.told.wait(0.1):
        if behaviour not in ("step", "overdue", "hang"):
            actor.notifier.watchdog()
    print(f"{actor.name} ends\n", end="", flush=True)  # one write: threads that print words of a line mix them
    return 0


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stderr)
    faulthandler.enable(all_threads=False)
    sys.exit(run_together([Threaded(name, sys.argv[2]) for name in ("encoder", "prefill", "decode")], Lifeline(None), live))  # type: ignore[misc]
