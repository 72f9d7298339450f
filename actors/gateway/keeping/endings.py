"""Ends of connections: by a reset, and by the answer to a request that is given up."""

import asyncio
import socket
import struct

_MESSAGE = b'{"error":{"message":"the server has died twice over this request","type":"internal_error","param":null,"code":null}}'
GIVEN_UP = (
    b"HTTP/1.1 500 Internal Server Error\r\nServer: mmrt\r\nContent-Type: application/json\r\nX-Should-Retry: false\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(_MESSAGE), _MESSAGE)
)


def reset(transport: asyncio.Transport | None) -> None:
    """Drop a connection with a TCP reset: unsent bytes are lost, and the client can tell that from an end."""
    if transport is None or transport.is_closing():
        return
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
