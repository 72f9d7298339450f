"""A run without a supervisor, as systemd makes it: plain processes, a listening socket that the gateway is given (LISTEN_FDS)."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from mmrt.runtime.process.listening import open_listeners
from mmrt.runtime.stage_table import ACTORS
from mmrt.tests.end_to_end.conftest import MMRT, Server, ours

READY_S = 90.0
ACTIVATE = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()))
os.execv(sys.argv[2], sys.argv[2:])
"""


class Services:
    """What systemd would do with the units: each actor's service, and the gateway's socket."""

    def __init__(self, server: Server) -> None:
        (self.listener,) = open_listeners("127.0.0.1", 0)
        port = self.listener.getsockname()[1]
        server.url = f"http://127.0.0.1:{port}"
        server.config.write_text(f'[model]\npath = "{server.checkpoint}"\n[server]\nport = {port}\n')
        server.client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=READY_S)
        self.environment = {**server.environment, "MMRT_CONFIG": str(server.config)}
        self.logs = server.config.with_name("logs")
        self.processes = {actor: self.start(actor) for actor in ACTORS}

    def start(self, actor: str) -> "subprocess.Popen[bytes]":
        """LISTEN_PID is the process's own: that of the program that becomes the actor. The socket lies on descriptor 3."""
        command = [*MMRT, "actor", actor]
        passed: tuple[int, ...] = ()
        if actor == "gateway":
            fd = self.listener.fileno()
            command = [sys.executable, "-c", ACTIVATE, str(fd), *command]
            passed = (fd,)
        with self.logs.open("ab") as log:
            return subprocess.Popen(command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=passed)

    def stop(self) -> list[int]:
        for actor in reversed(ACTORS):
            self.processes[actor].send_signal(signal.SIGTERM)
        return [process.wait(60) for process in self.processes.values()]


@pytest.fixture
def services(tmp_path: Path, checkpoints: Callable[[str], Path]) -> Iterator[tuple[Server, Services]]:
    server = Server(tmp_path, checkpoints("qwen2_5_omni"))
    services = Services(server)
    yield server, services
    for process in services.processes.values():
        process.kill()
        process.wait()
    server.client.close()
    services.listener.close()


@pytest.mark.slow  # eight plain starts: no zygote here
def test_a_gateway_that_is_given_its_socket(services: tuple[Server, Services]) -> None:
    server, run = services
    # Nobody accepts yet: the connection waits for the gateway, which says whether the others are there.
    deadline = time.monotonic() + READY_S
    while not server.run_path.exists() or server.mmrt("status", "--json").returncode or not server.status()["ready"]:
        assert time.monotonic() < deadline and not [p for p in run.processes.values() if p.poll() is not None], run.logs.read_text()
    text = server.chat("Hello")[0]
    assert text
    assert server.mmrt("policy", "set", "slack").stdout == "slack\n" and server.chat("Hello")[0] == text
    assert "policy: slack" in server.mmrt("status").stdout
    gateway = run.processes["gateway"]
    os.kill(gateway.pid, signal.SIGKILL)
    gateway.wait()
    run.processes["gateway"] = run.start("gateway")
    assert server.chat("Hello")[0] == text, "it waited in the queue"
    assert run.stop() == [0] * len(ACTORS), run.logs.read_text()
    assert not server.run_path.exists()


def test_kill_9_of_the_supervisor_ends_the_run(breakable: Server) -> None:
    """The last test of this run."""
    os.kill(breakable.status()["supervisor_pid"], signal.SIGKILL)
    deadline = time.monotonic() + 20
    while breakable.run_path.exists() or ours(breakable.run_path):
        assert time.monotonic() < deadline, f"left: {ours(breakable.run_path)}, {list(breakable.run_path.glob('*'))}"
        time.sleep(0.05)
    breakable.client.close()
