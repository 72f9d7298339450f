"""A server of pictures that can misbehave in every way, as raw bytes: a handler gets the path, the headers, and the connection."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

PICTURE = b"picture " * 20_000
Misbehave = Callable[[asyncio.StreamWriter], Awaitable[None]]


def answer(body: bytes = PICTURE, status: str = "200 OK", **headers: str) -> bytes:
    fields = {"Content-Length": str(len(body))} | {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode() + body


class Server:
    """On a free port of 127.0.0.1. ``answers``: by path, bytes or a function that writes them. ``requests``: the headers of each."""

    def __init__(self) -> None:
        self.port = 0
        self.answers: dict[str, bytes | Misbehave] = {"/a.png": answer()}
        self.requests: list[str] = []
        self.readers: list[asyncio.StreamReader] = []

    @property
    def paths(self) -> list[str]:
        return [request.split(" ")[1] for request in self.requests]

    def url(self, path: str = "/a.png", host: str = "127.0.0.1", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(head)
            self.readers.append(reader)
            found = self.answers.get(head.split(" ")[1], answer(b"", "404 Not Found"))
            if isinstance(found, bytes):
                writer.write(found)
                await writer.drain()
            else:
                await found(writer)
        except (OSError, EOFError, RuntimeError):  # the last is uvloop's, for a connection that has ended
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(tls: ssl.SSLContext | None = None, bound: socket.socket | None = None) -> AsyncIterator[Server]:
    """``bound``: to the address to listen on."""
    server = Server()
    if bound is None:
        listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
    else:
        listener = await asyncio.start_server(server.serve, sock=bound)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()
