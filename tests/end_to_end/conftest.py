"""Real runs of ``mmrt up`` on tiny checkpoints and on the demo model, an openai client for each, and transformers as the oracle."""

import contextlib
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

import mmrt
from mmrt.cli.status import read_report
from mmrt.models.make.checkpoint import make_checkpoint
from mmrt.runtime.process.run import DEFAULT_MODEL
from mmrt.runtime.supervisor.control import DownRequest, call
from mmrt.shm.run_directory import RunDirectory
from mmrt.tests.end_to_end.oracle import Oracle
from mmrt.tests.settings import also_slow as also_slow

MMRT = [sys.executable, "-m", "mmrt.cli.main"]
BREAKABLE = "[supervisor]\nrestart_limit = 2\nbackoff_s = 0.05\n"
_LOOK_S = 0.05
_LAUNCH = "    def _launch(self, batch: Batch, step: _Step) -> None:\n"


class Server:
    """One run; without ``checkpoint`` of the model that comes with mmrt. ``settings`` is the text of its TOML file."""

    def __init__(self, folder: Path, checkpoint: Path | None, settings: str = "") -> None:
        self.run_path = Path(f"/dev/shm/mmrt-test-{os.getpid()}-{folder.name}"[:70])
        self.environment = {
            **os.environ,
            "MMRT_RUN_DIR": str(self.run_path),
            "XDG_STATE_HOME": str(folder / "state"),
        }
        self.checkpoint = checkpoint or DEFAULT_MODEL
        self.config = folder / "mmrt.toml"
        self.config.write_text(with_least_pools(settings))

    def mmrt(self, *arguments: str, timeout_s: float = 60) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*MMRT, *arguments], env=self.environment, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
        )

    def up(self, *arguments: str) -> None:
        model = () if self.checkpoint == DEFAULT_MODEL else ("--model", str(self.checkpoint))
        done = self.mmrt("up", "-d", *model, "--port", "0", "--config", str(self.config), *arguments, timeout_s=120)
        assert done.returncode == 0, done.stdout + done.stderr
        self.url = str(self.status()["endpoint"])
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def status(self) -> dict[str, Any]:
        """What ``mmrt status --json`` prints, without a process for each look."""
        found: dict[str, Any] = msgspec.to_builtins(read_report(self.run_path))
        return found

    def pid(self, actor: str) -> int:
        """The process of an actor, once it has one."""
        deadline = time.monotonic() + 30
        while (pid := next(found["pid"] for found in self.status()["actors"] if found["name"] == actor)) is None:
            assert time.monotonic() < deadline, f"{actor} got no process"
            time.sleep(_LOOK_S)
        return int(pid)

    def kill(self, actor: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to an actor's process; where that has just died, to the next one."""
        deadline = time.monotonic() + 30
        while True:
            try:
                os.kill(self.pid(actor), number)
                return
            except ProcessLookupError:
                assert time.monotonic() < deadline, f"{actor} is gone"
                time.sleep(_LOOK_S)

    def wait(self, condition: Callable[[dict[str, Any]], bool], what: str, timeout_s: float = 30) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while not condition(status := self.status()):
            assert time.monotonic() < deadline, f"{what} did not come true: {status}"
            time.sleep(_LOOK_S)
        return status

    def wait_until_empty(self) -> None:
        """Wait until all pages of all pools are back, by counts that are not from before the last request."""
        time.sleep(0.3)  # counts are up to 0.1 s old, on a busy machine more
        self.wait(lambda status: all(pool["used"] == 0 for pool in status["pools"].values()), "empty pools")

    def down(self) -> None:
        self.client.close()
        pids = [found["pid"] for found in self.status()["actors"]]
        self._end()
        assert not self.run_path.exists()
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()] and not ours(self.run_path)
        address = urllib.parse.urlsplit(self.url)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address.hostname, address.port), timeout=5)

    def _end(self) -> None:
        """What ``mmrt down --drain 1`` does, without a process for it."""
        gone = os.pidfd_open(self.status()["supervisor_pid"])
        try:
            call(self.run_path, DownRequest(1.0), timeout_s=None)
            assert select.select([gone], [], [], 60)[0], "a supervisor that does not end"
        finally:
            os.close(gone)

    def chat(self, content: Any, **options: Any) -> tuple[str, list[int]]:
        """A streamed answer: text and token ids."""
        text, ids = "", []
        for chunk in self.stream(content, **options):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                ids += getattr(choice, "token_ids", None) or []
        return text, ids

    def stream(self, content: Any, **options: Any) -> Any:
        """A stream of chunks. With a salt of its own, unless the test gives one: what is asked twice is computed twice."""
        extra = {"return_token_ids": True, "cache_salt": secrets.token_hex(8), **options.pop("extra_body", {})}
        messages = content if isinstance(content, list) and "role" in content[0] else [{"role": "user", "content": content}]
        return self.client.chat.completions.create(
            **{"model": self.checkpoint.name, "messages": messages, "max_tokens": 24, "temperature": 0, "stream": True, **options},
            extra_body=extra,
        )


def ours(run: Path) -> list[int]:
    """Processes whose environment names the run directory."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"MMRT_RUN_DIR={run}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def with_least_pools(settings: str) -> str:
    """Add the sizes that pools have at least: tests have many runs at once, and each would take its share of the memory."""
    head, table, rest = settings.partition("[memory]\n")
    sizes = {"kv_tokens": 65536, "embedding_tokens": 16384}
    lines = [f"{name} = {size}\n" for name, size in sizes.items() if name not in settings]
    return f"{head}[memory]\n{''.join(lines)}{rest}" if table else f"{settings}\n[memory]\n{''.join(lines)}"


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tiny checkpoint of a family, made once."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp("checkpoints") / f"tiny-{family}"
            make_checkpoint("tiny", made[family], family)  # type: ignore[arg-type]
        return made[family]

    return get


def copy_package(folder: Path) -> Path:
    """A copy of the package that a test may edit; a run started with ``launch(source=...)`` imports it.

    Its decode computes at most 200 tokens a second of a row: what happens to a stream happens in few of them.
    """
    root = Path(mmrt.__file__).parent
    copy = folder / "mmrt"
    for part in ("actors", "bench", "cli", "cpu_kernels", "media", "models", "runtime", "schema", "serving", "shm", "triton_kernels"):
        shutil.copytree(root / part, copy / part, ignore=shutil.ignore_patterns("*.pyc.*", "demo"))  # compiled files save seconds
    shutil.copy(root / "__init__.py", copy)
    decode = copy / "actors" / "decode" / "running_set.py"
    text = decode.read_text()
    assert text.count(_LAUNCH) == 1
    decode.write_text(text.replace(_LAUNCH, f"{_LAUNCH}        __import__('time').sleep(0.005 * (1 if step.guesses is None else 9))\n"))
    return copy


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_package(tmp_path_factory.mktemp("source"))


@contextlib.contextmanager
def launching(tmp_path_factory: pytest.TempPathFactory, checkpoints: Callable[[str], Path]) -> Iterator[Callable[..., Server]]:
    """Start runs, of a tiny checkpoint or of no configured one; those still up at the end must leave nothing."""
    servers: list[Server] = []

    def start(family: str | None = "qwen2_5_omni", settings: str = "", *arguments: str, source: Path | None = None) -> Server:
        server = Server(tmp_path_factory.mktemp("run"), checkpoints(family) if family else None, settings)
        if source is not None:
            server.environment["PYTHONPATH"] = str(source.parent)
        server.up(*arguments)
        servers.append(server)
        return server

    yield start
    for server in servers:
        if RunDirectory.is_alive(server.run_path):
            server.down()


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory, checkpoints: Callable[[str], Path]) -> Iterator[Callable[..., Server]]:
    """Start runs that end with the module: an idle one takes a hundredth of a core."""
    with launching(tmp_path_factory, checkpoints) as start:
        yield start


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, checkpoints: Callable[[str], Path]) -> Iterator[Server]:
    """The run that most tests share."""
    with launching(tmp_path_factory, checkpoints) as start:
        yield start()


@pytest.fixture(scope="session")
def own_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package that ``own`` runs; who edits it takes the edit back."""
    return copy_package(tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="session")
def _own(tmp_path_factory: pytest.TempPathFactory, checkpoints: Callable[[str], Path], own_source: Path) -> Iterator[Server]:
    with launching(tmp_path_factory, checkpoints) as start:
        yield start(settings="[supervisor]\nrestart_limit = 50\n", source=own_source)


@pytest.fixture(scope="module")
def own(_own: Server) -> Iterator[Server]:
    """The run whose actors tests kill, restart, debug and edit: whole and empty behind each module."""
    yield _own
    _own.wait(lambda status: bool(status["ready"]), "a whole run")
    _own.wait_until_empty()


@pytest.fixture(scope="session")
def breakable_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package that ``breakable`` runs."""
    return copy_package(tmp_path_factory.mktemp("breakable"))


@pytest.fixture(scope="session")
def breakable(tmp_path_factory: pytest.TempPathFactory, checkpoints: Callable[[str], Path], breakable_source: Path) -> Iterator[Server]:
    """The run whose code tests break, whose layout they change, and whose supervisor the last of them kills."""
    with launching(tmp_path_factory, checkpoints) as start:
        yield start(settings=BREAKABLE, source=breakable_source)


@pytest.fixture(scope="session")
def oracle(checkpoints: Callable[[str], Path]) -> Oracle:
    return Oracle(checkpoints("qwen2_5_omni"))
