"""When an answer of /health or /ready is a lie."""

import asyncio

import pytest

from mmrt_lab.chaos.run_view import Serving
from mmrt_lab.chaos.truth import ask, judge_answer

ALL = Serving({"gateway": 1, "decode": 1})
NEXT = Serving({"gateway": 1, "decode": 2})
NO_DECODE = Serving({"gateway": 1, "decode": 0})
NO_GATEWAY = Serving({"gateway": 0, "decode": 1})
ONE_OF_TWO = Serving({"gateway": 1, "decode": 0, "decode.1": 1})
NONE_OF_TWO = Serving({"gateway": 1, "decode": 0, "decode.1": 0})


@pytest.mark.parametrize(
    ("route", "status", "before", "after", "mood", "lie"),
    [
        ("/ready", 200, ALL, ALL, "up", ""),
        ("/ready", 503, ALL, ALL, "up", "although every stage serves"),
        ("/ready", 503, ALL, ALL, "disturbed", ""),
        ("/ready", 503, NO_DECODE, NO_DECODE, "up", ""),
        ("/ready", 200, NO_DECODE, NO_DECODE, "up", "although decode does not serve"),
        ("/ready", 200, NO_DECODE, NO_DECODE, "disturbed", "although decode does not serve"),
        ("/ready", 200, ONE_OF_TWO, ONE_OF_TWO, "up", ""),
        ("/ready", 503, ONE_OF_TWO, ONE_OF_TWO, "up", "although every stage serves"),
        ("/ready", 503, NONE_OF_TWO, NONE_OF_TWO, "up", ""),
        ("/ready", 200, NONE_OF_TWO, NONE_OF_TWO, "up", "although decode, decode.1 does not serve"),
        ("/ready", 503, ALL, NEXT, "up", ""),  # it died and came back in between
        ("/ready", 200, ALL, NO_DECODE, "up", ""),
        ("/ready", 200, NO_DECODE, ALL, "up", ""),
        ("/ready", 503, ALL, ALL, "draining", ""),
        ("/health", 200, NO_DECODE, NO_DECODE, "up", ""),
        ("/health", 503, ALL, ALL, "up", "/health says 503"),
        ("/health", 0, ALL, ALL, "up", "no answer from a gateway that serves: refused"),
        ("/health", 0, NO_GATEWAY, ALL, "up", ""),
        ("/ready", 0, ALL, ALL, "disturbed", ""),
    ],
)
def test_lies(route: str, status: int, before: Serving, after: Serving, mood: str, lie: str) -> None:
    found = judge_answer(route, status, "refused" if not status else "", before, after, mood)  # type: ignore[arg-type]
    assert (lie in found) if lie else found == ""


def test_asking_a_server_of_any_manners() -> None:
    answers = [b"HTTP/1.1 503 Service Unavailable\r\n\r\n", b"", b"hello\r\n"]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answers.pop(0))
        await writer.drain()
        writer.close()

    async def talk() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            assert await ask(url, "/ready") == 503
            for _ in range(2):
                with pytest.raises(ConnectionResetError):
                    await ask(url, "/ready")
        with pytest.raises(ConnectionRefusedError):
            await ask(url, "/ready")

    asyncio.run(talk())
