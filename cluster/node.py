"""A node: one whole run of mmrt, started as ``mmrt up`` in a run directory of its own, which ends with the process that owns it."""

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time

from ..runtime.errors import RunError
from ..runtime.process.lifeline import sweep
from ..runtime.supervisor.control import DownRequest, StatusReply, StatusRequest, call
from ..shm.run_directory import RunDirectory

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.1
_END_S = 30.0
_PREFIX = "node-"
_LOG_LINES, _LOG_BYTES = 20, 16384


class Node:
    """A run that is ready. ``url`` is where its gateway serves."""

    def __init__(self, config: str, ready_s: float = 600.0) -> None:
        """Start it and wait. ``config``: its configuration in TOML; the port should be 0. Raises: RunError if it does not come up."""
        _sweep_dead_nodes()
        self._name = f"{_PREFIX}{secrets.token_hex(4)}"
        self._run = RunDirectory.default_path(self._name)
        self._log = tempfile.TemporaryFile(buffering=0, prefix="mmrt-node-")
        self._process: subprocess.Popen[bytes] | None = None
        started = threading.Event()
        # A configuration may hold keys: it is gone once the run has read it.
        with tempfile.NamedTemporaryFile("w", prefix="mmrt-node-", suffix=".toml") as file:
            file.write(config)
            file.flush()
            # The kernel ends the run with the thread that started it, so that thread lives as long as this process.
            threading.Thread(target=self._own, args=(file.name, started), name="mmrt up", daemon=True).start()
            started.wait()
            try:
                self.url = self._wait_until_ready(time.monotonic() + ready_s)
            except BaseException:
                self.close()
                raise

    def _own(self, file: str, started: threading.Event) -> None:
        mine = [sys.executable, "-P", "-m"]
        command = [*mine, "mmrt.cluster.node", str(os.getpid()), *mine, "mmrt", "up", "--run", self._name, "--config", file]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)
        except OSError as error:
            self._log.write(f"it cannot be started: {error}".encode())
        finally:
            started.set()
        if self._process is not None:
            self._process.wait()

    def _wait_until_ready(self, deadline_s: float) -> str:
        while time.monotonic() < deadline_s:
            self.check()
            try:
                reply = call(self._run, StatusRequest())
            except RunError:  # not yet
                time.sleep(_POLL_S)
                continue
            assert isinstance(reply, StatusReply)
            if reply.report.ready:
                return reply.report.endpoint
            time.sleep(_POLL_S)
        raise RunError(f"the run was not ready in time:\n{self._last_lines()}")

    def check(self) -> None:
        """Raise RunError if the run has ended. A run repairs its own actors, so nothing less is a fault of the node."""
        if self._process is None or self._process.poll() is not None:
            raise RunError(f"the run has ended:\n{self._last_lines()}")

    def close(self) -> None:
        """End the run; its requests may finish, for as long as its configuration says."""
        try:
            call(self._run, DownRequest(None), None)
        except RunError:
            pass  # it has ended
        if self._process is not None:
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._log.close()

    def _last_lines(self) -> str:
        """The end of what the run has printed. Its position in the file is not moved."""
        file = self._log.fileno()
        end = os.pread(file, _LOG_BYTES, max(0, os.fstat(file).st_size - _LOG_BYTES))
        return "\n".join(end.decode(errors="replace").splitlines()[-_LOG_LINES:])


def _sweep_dead_nodes() -> None:
    """Remove what nodes have left that were killed with all of their processes."""
    for path in RunDirectory.default_path(_PREFIX).parent.glob(f"{_PREFIX}*"):
        sweep(str(path))


if __name__ == "__main__":
    # Become the program, which the kernel asks to end when its parent's thread does. A parent that has ended before is another by now.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    parent, *command = sys.argv[1:]
    if os.getppid() != int(parent):
        sys.exit("the parent has ended")
    os.execv(command[0], command)
