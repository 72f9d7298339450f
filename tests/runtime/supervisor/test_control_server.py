"""The control socket when something goes wrong: whoever asks gets an answer or the end of the connection, never silence."""

import asyncio
import errno
import socket
import threading
from pathlib import Path

import pytest

from mmrt.runtime.errors import RunError
from mmrt.runtime.supervisor.control import MAX_LINE_BYTES, SOCKET_NAME, ErrorReply, StatusRequest, call, encode
from mmrt.runtime.supervisor.control_server import ControlServer

REQUEST = encode(StatusRequest()) + b"\n"


async def ask(path: Path, data: bytes, failure: Exception) -> bytes:
    """What a server whose handler fails sends back until it closes, or has answered once."""

    async def handler(request: object, pid: int) -> None:
        raise failure

    server = ControlServer(path, handler)  # type: ignore[arg-type]
    await server.start()
    try:
        async with asyncio.timeout(20):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(data)
            answer = await reader.readline()
            writer.close()
            return answer
    except ConnectionError:
        return b""
    finally:
        await server.close()


@pytest.mark.parametrize(
    "data, failure, answer",
    [
        (REQUEST, OSError(errno.EMFILE, "Too many open files"), encode(ErrorReply("[Errno 24] Too many open files")) + b"\n"),
        (REQUEST, AssertionError("a bug"), b""),
        (b"x" * (3 * MAX_LINE_BYTES) + b"\n", AssertionError("never called"), b""),
    ],
    ids=["no descriptors", "bug", "line too long"],
)
def test_nobody_waits_without_end(tmp_path: Path, data: bytes, failure: Exception, answer: bytes) -> None:
    assert asyncio.run(ask(tmp_path / "control", data, failure)) == answer


@pytest.mark.parametrize("said", [b"", b'{"type":"down"'])
def test_a_supervisor_that_ends_in_the_middle_of_its_answer(tmp_path: Path, said: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / SOCKET_NAME))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                connection.sendall(said)

        supervisor = threading.Thread(target=answer)
        supervisor.start()
        with pytest.raises(RunError, match="ended before it answered"):
            call(tmp_path, StatusRequest())
        supervisor.join()
