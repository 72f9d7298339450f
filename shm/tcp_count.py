"""How many bytes of a TCP connection the processes that held it have put into the kernel, and taken out of it.

The kernel counts exactly, whatever the instruction at which a process was killed. Ask when no other process reads or writes the
connection: between the two counts that make one up, nothing else may move.
"""

import array
import ctypes
import fcntl
import socket
import struct
import termios

_INFO_BYTES = 232  # of struct tcp_info, up to tcpi_bytes_retrans
_ACKED_AT, _RECEIVED_AT = 120, 128
_LEAST_BYTES = 136  # with both of them: Linux 4.2
_FIN_SEEN = frozenset({6, 8, 9, 11})  # TIME_WAIT, CLOSE_WAIT, LAST_ACK, CLOSING: the peer's FIN counts as a byte received
_FIN_SENT = frozenset({4, 5, 6, 9, 11})  # FIN_WAIT1 and 2, TIME_WAIT, LAST_ACK, CLOSING: our own counts, once it is acknowledged
_libc = ctypes.CDLL(None, use_errno=True)


def bytes_put(connection: socket.socket) -> int:
    """Return the bytes for the peer that processes have put into an accepted connection. Raises: OSError."""
    while True:
        _, acked, _ = _info(connection)
        queued = _queued(connection, termios.TIOCOUTQ)
        state, acked_then, _ = _info(connection)
        if acked == acked_then:
            return acked + queued - (state in _FIN_SENT)


def bytes_taken(connection: socket.socket) -> int:
    """Return the bytes of the peer that processes have taken out. Raises: OSError."""
    while True:
        state, _, received = _info(connection)
        queued = _queued(connection, termios.FIONREAD)
        state_then, _, received_then = _info(connection)
        if (state, received) == (state_then, received_then):
            return received - queued - (state in _FIN_SEEN)


def reset(connection: socket.socket) -> None:
    """Drop the connection with a TCP reset at once, even though other processes hold it open. Raises: OSError."""
    nowhere = struct.pack("H14x", socket.AF_UNSPEC)
    if _libc.connect(connection.fileno(), nowhere, len(nowhere)):
        raise OSError(ctypes.get_errno(), "connect(AF_UNSPEC)")


def why_inexact() -> str:
    """Return why this kernel's counts cannot be used; "" if they are exact on a connection made for this."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as peer:
            accepted, _ = listener.accept()
            with accepted:
                peer.sendall(b"12345")
                accepted.sendall(b"123")
                accepted.recv(2, socket.MSG_WAITALL)
                found = bytes_put(accepted), bytes_taken(accepted)
    except (OSError, ValueError) as error:
        return f"the kernel does not count the bytes of connections: {error}"
    return "" if found == (3, 2) else f"the kernel miscounts the bytes of connections: {found} after 3 and 2"


def _info(connection: socket.socket) -> tuple[int, int, int]:
    """Return the state, the bytes acknowledged, and the bytes received."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _LEAST_BYTES:
        raise OSError(f"TCP_INFO has {len(info)} bytes, {_LEAST_BYTES} are needed")
    acked, received = (struct.unpack_from("=Q", info, at)[0] for at in (_ACKED_AT, _RECEIVED_AT))
    return info[0], acked, received


def _queued(connection: socket.socket, request: int) -> int:
    found = array.array("i", [0])
    fcntl.ioctl(connection, request, found, True)
    return found[0]
