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
from mmrt.tests.runtime.process.test_descriptor_store import Manager

READY_S = 90.0
ACTIVATE = """
import os, sys
given, names = map(int, sys.argv[1].split(",")), sys.argv[2]
high = [os.dup2(fd, 1000 + number) for number, fd in enumerate(given)]
for number, fd in enumerate(high):
    os.dup2(fd, 3 + number)
os.closerange(3 + len(high), 2000)
os.environ.update(LISTEN_FDS=str(len(high)), LISTEN_PID=str(os.getpid()), LISTEN_FDNAMES=names)
os.execv(sys.argv[3], sys.argv[3:])
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
        self.manager = Manager(server.config.with_name("notify"))
        self.logs = server.config.with_name("logs")
        self.processes = {actor: self.start(actor) for actor in ACTORS}

    def start(self, actor: str) -> "subprocess.Popen[bytes]":
        """LISTEN_PID is the process's own: that of the program that becomes the actor. The socket lies on descriptor 3."""
        command = [*MMRT, "actor", actor]
        passed, environment = list[int](), self.environment
        if actor == "gateway":
            self.manager.settle()
            names, stored = [name for name, _ in self.manager.stored], [fd for _, fd in self.manager.stored]
            passed = [self.listener.fileno(), *stored]
            command = [sys.executable, "-c", ACTIVATE, ",".join(map(str, passed)), ":".join(["mmrt-gateway.socket", *names]), *command]
            environment = {**environment, "NOTIFY_SOCKET": self.manager.address, "FDSTORE": "100"}
        with self.logs.open("ab") as log:
            return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=passed)

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
    services.manager.close()


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
    _kill_it_under_a_stream(server, run)
    assert run.stop() == [0] * len(ACTORS), run.logs.read_text()
    assert not server.run_path.exists()


def _kill_it_under_a_stream(server: Server, run: Services) -> None:
    """systemd gives the next one its connections: the stream goes on, and so does its connection."""
    options = {"max_tokens": 300, "extra_body": {"ignore_eos": True, "cache_salt": "one"}}
    expected = server.chat("Tell a story.", **options)
    for _ in range(3):
        chunks = iter(server.stream("Tell a story.", **options))
        found = [next(chunks)]
        gateway = run.processes["gateway"]
        os.kill(gateway.pid, signal.SIGKILL)
        gateway.wait()
        run.processes["gateway"] = run.start("gateway")
        found += chunks
        choices = [choice for chunk in found for choice in chunk.choices]
        assert "".join(choice.delta.content or "" for choice in choices) == expected[0]
        assert [id for choice in choices for id in getattr(choice, "token_ids", None) or []] == expected[1]
    run.manager.settle()
    assert [name for name, _ in run.manager.stored][:2] == ["kept-answers", "kept-records"]


def test_kill_9_of_the_supervisor_ends_the_run(breakable: Server) -> None:
    """The last test of this run."""
    os.kill(breakable.status()["supervisor_pid"], signal.SIGKILL)
    deadline = time.monotonic() + 20
    while breakable.run_path.exists() or ours(breakable.run_path):
        assert time.monotonic() < deadline, f"left: {ours(breakable.run_path)}, {list(breakable.run_path.glob('*'))}"
        time.sleep(0.05)
    breakable.client.close()
