"""The kernel's counts of connections, against processes that are killed while they read or write."""

import os
import random
import signal
import socket
import time

import pytest

from mmrt.shm import tcp_count
from mmrt.shm.tcp_count import bytes_put, bytes_taken, reset, why_inexact
from mmrt.tests.settings import examples


def pair(buffer_bytes: int = 0) -> tuple[socket.socket, socket.socket]:
    """A client and the connection that was accepted of it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if buffer_bytes:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        client = socket.socket()
        if buffer_bytes:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        client.connect(listener.getsockname())
        return client, listener.accept()[0]


def killed(work, seconds: float) -> None:
    pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            os._exit(0)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_killed_writer_has_put_what_the_client_gets() -> None:
    chance = random.Random(5)
    for _ in range(examples(24)):
        client, connection = pair(chance.choice((0, 2048)))
        size = chance.choice((100, 3000, 100_000))

        def write(connection=connection, size=size) -> None:
            while True:
                connection.sendall(b"x" * size)

        killed(write, chance.random() * 0.01)
        put, got = bytes_put(connection), 0
        connection.shutdown(socket.SHUT_WR)
        client.settimeout(10)
        while data := client.recv(1 << 16):
            got += len(data)
        assert put == got
        assert bytes_put(connection) == put, "our own FIN does not count"
        client.close()
        connection.close()


def test_a_killed_reader_has_taken_what_is_not_there_any_more() -> None:
    chance = random.Random(6)
    for _ in range(examples(24)):
        client, connection = pair()
        size = chance.choice((1, 777, 50_000))
        client.sendall(b"y" * 200_000)

        def read(connection=connection, size=size) -> None:
            while True:
                connection.recv(size)

        killed(read, chance.random() * 0.004)
        taken = bytes_taken(connection)
        ends_early = chance.random() < 0.5
        if ends_early:
            client.shutdown(socket.SHUT_WR)
        else:
            client.sendall(b"z")
            client.shutdown(socket.SHUT_WR)
        left = 0
        while data := connection.recv(1 << 16):
            left += len(data)
        assert taken + left == 200_000 + (not ends_early)
        assert bytes_taken(connection) == taken + left, "the client's FIN does not count"
        client.close()
        connection.close()


def test_a_reset_reaches_the_client_although_others_hold_the_connection() -> None:
    client, connection = pair()
    other = connection.dup()
    reset(connection)
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    for one in (client, connection, other):
        one.close()


def test_a_kernel_that_miscounts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_inexact() == ""
    monkeypatch.setattr(tcp_count, "bytes_put", lambda _: 4)
    assert "miscounts" in why_inexact() and "(4, 2)" in why_inexact()
    monkeypatch.setattr(tcp_count, "_INFO_BYTES", 104)
    monkeypatch.setattr(tcp_count, "bytes_put", bytes_put)
    assert "TCP_INFO has 104 bytes" in why_inexact()
