"""Listening sockets: one port on every address, given to children as they are, refused when they are something else."""

import os
import re
import resource
import socket

import pytest

from mmrt.runtime.environment import read_environment
from mmrt.runtime.errors import RunError
from mmrt.runtime.process.listening import inherited_listeners, open_listeners


def test_a_free_port_and_a_queue() -> None:
    (listener,) = open_listeners("127.0.0.1", 0)
    with listener:
        port = listener.getsockname()[1]
        assert port and not os.get_inheritable(listener.fileno())
        # Nobody accepts: the connection is made all the same, and waits.
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            client.sendall(b"GET / HTTP/1.1\r\n\r\n")


def test_every_address_of_a_name_has_the_same_port() -> None:
    listeners = open_listeners("localhost", 0)
    try:
        assert len({listener.getsockname()[1] for listener in listeners}) == 1
    finally:
        for listener in listeners:
            listener.close()


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RunError, match=rf"cannot serve on 127\.0\.0\.1:{port} .*server\.port.*--port"):
            open_listeners("127.0.0.1", port)


def test_a_limit_of_open_files_that_is_too_low_is_named() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        with pytest.raises(RunError, match=r"may open 64 files here \(ulimit -n\), a run needs at least 128"):
            open_listeners("127.0.0.1", 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a..b", "x" * 64])
def test_an_unknown_host_is_named(host: str) -> None:
    with pytest.raises(RunError, match=rf"cannot serve on {re.escape(host)}:1"):
        open_listeners(host, 1)


def test_addresses_of_a_name_that_the_machine_lacks_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """localhost is often ::1, too, where there is no IPv6."""

    def infos(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        addresses = ["192.0.2.1", "127.0.0.1"] if host == "both" else ["192.0.2.1"]
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", infos)
    (listener,) = open_listeners("both", 0)
    with listener:
        assert listener.getsockname()[0] == "127.0.0.1" and listener.getsockname()[1]
    with pytest.raises(RunError, match="Cannot assign requested address"):
        open_listeners("neither", 0)


def test_what_a_child_was_given() -> None:
    (listener,) = open_listeners("127.0.0.1", 0)
    with listener:
        copy = os.dup(listener.fileno())
        os.set_inheritable(copy, True)
        (given,) = inherited_listeners([copy])
        with given:
            assert given.getsockname() == listener.getsockname()
            assert not os.get_inheritable(copy)


@pytest.mark.parametrize("kind", ["pipe", "not listening", "unix"])
def test_descriptors_that_are_no_listening_sockets(kind: str) -> None:
    if kind == "pipe":
        fd, other = os.pipe()
        os.close(other)
    else:
        made = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
        if kind == "unix":
            made.bind("\0mmrt-test-listening")
            made.listen()
        fd = made.detach()
    try:
        with pytest.raises(RunError, match=f"descriptor {fd} should be a listening"):
            inherited_listeners([fd])
    finally:
        os.close(fd)


def test_where_they_are_found() -> None:
    assert read_environment({"MMRT_LISTEN_FDS": "2"}).listen_fds == (4, 5)
    assert read_environment({"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid())}).listen_fds == (3,)
    assert read_environment({"LISTEN_FDS": "1", "LISTEN_PID": "1"}).listen_fds == (), "meant for another process"
    assert read_environment({}).listen_fds == ()
