"""llama.cpp's server, started for a bench and ended with it."""

import http.client
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mmrt.bench.serve.errors import BenchError

_READY_S = 120.0
_LOOK_S = 0.1
_SHOWN_CHARS = 600  # of what a server said that did not start


@contextmanager
def llama_server(program: Path, model: Path, mmproj: Path | None, options: Sequence[str], log: Path) -> Iterator[str]:
    """Its address once it answers. ``log``: where it writes what it says. Raises: BenchError if it does not become ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    towers = () if mmproj is None else ("--mmproj", str(mmproj))
    command = [str(program), "-m", str(model), *towers, "--host", "127.0.0.1", "--port", str(port), *options]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
        try:
            _wait(process, port, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    latest_s = time.monotonic() + _READY_S
    while not _is_ready(port):
        if (status := process.poll()) is not None:
            raise BenchError(f"llama-server ended with status {status}: {last_words(log)}")
        if time.monotonic() > latest_s:
            raise BenchError(f"llama-server was not ready after {_READY_S:g} s: {last_words(log)}")
        time.sleep(_LOOK_S)


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_READY_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except OSError:
        return False
    finally:
        connection.close()


def last_words(log: Path) -> str:
    """The lines of a log that name an error, or else its last ones."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() or " E " in line]
    return "; ".join(errors or lines)[-_SHOWN_CHARS:]
