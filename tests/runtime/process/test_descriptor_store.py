"""systemd's store, played by a socket that takes what sd_notify(3) says and gives it back as sd_listen_fds(3) does."""

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmrt.runtime.environment import read_environment
from mmrt.runtime.process.descriptor_store import DescriptorStore
from mmrt.runtime.supervisor.connection_keeper import ConnectionKeeper
from mmrt.shm.connection_records import RecordSizes
from mmrt.shm.kept_records import KeptRecords
from mmrt.tests.runtime.supervisor.test_connection_keeper import Gateway

SIZES = RecordSizes(4, 4096, 4096)


class Manager:
    """As much of systemd as has a store: by name, the newest of equal ones last, and none that has been shut down."""

    def __init__(self, path: Path) -> None:
        self.address = str(path)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.address)
        self.socket.setblocking(False)
        self.stored: list[tuple[str, int]] = []
        self.said: list[str] = []

    def take(self) -> bool:
        """Take one datagram; False if there is none."""
        try:
            data, fds, _, _ = socket.recv_fds(self.socket, 8192, 8)
        except BlockingIOError:
            return False
        lines = dict(line.split("=", 1) for line in data.decode().split("\n"))
        self.said.append(data.decode())
        assert bool(fds) == ("FDSTORE" in lines)
        if "FDSTORE" in lines:
            assert lines["FDSTORE"] == "1" and not any(character in lines["FDNAME"] for character in ":\0")
            self.stored += [(lines["FDNAME"], fd) for fd in fds]
        if "FDSTOREREMOVE" in lines:
            self.remove(lines["FDNAME"])
        return True

    def remove(self, name: str) -> None:
        for one in [one for one in self.stored if one[0] == name]:
            os.close(one[1])
            self.stored.remove(one)

    def settle(self) -> None:
        while self.take():
            pass

    def stored_again(self) -> dict[str, int]:
        """What the next process gets: descriptors of its own, names without their prefix."""
        names = [name for name, _ in self.stored]
        environ = {"LISTEN_FDS": str(len(names) + 1), "LISTEN_PID": str(os.getpid()), "LISTEN_FDNAMES": ":".join(["web", *names])}
        environment = read_environment(environ)
        assert environment.listen_fds == (3,)
        return {name: os.dup(self.stored[fd - 4][1]) for name, fd in environment.stored_fds.items()}

    def close(self) -> None:
        for _, fd in self.stored:
            os.close(fd)
        self.socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(tmp_path / "notify")
    yield manager
    manager.close()


def connections() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        client.settimeout(5)
        return client, listener.accept()[0]


def test_what_is_stored_comes_back_and_what_is_removed_does_not(manager: Manager) -> None:
    store = DescriptorStore(manager.address, {})
    records, answers = store.records(SIZES), store.answers()
    assert store.connections(records) == {}
    pairs = [connections() for _ in range(3)]
    for number, (_, accepted) in enumerate(pairs):
        store.put(number, accepted)
        records.record(number).commit(b"state %d" % number)
    store.remove(1)
    manager.settle()
    assert [name for name, _ in manager.stored] == ["kept-records", "kept-answers", "kept-connection-0", "kept-connection-2"]
    store.close()

    store = DescriptorStore(manager.address, manager.stored_again())
    again = store.records(SIZES)
    held = store.connections(again)
    assert sorted(held) == [0, 2]
    assert [again.record(number).load() for number in range(3)] == [b"state 0", b"", b"state 2"], "who is gone has no record"
    for number, connection in held.items():
        assert not os.get_inheritable(connection.fileno())
        connection.sendall(b"%d" % number)
        assert pairs[number][0].recv(1) == b"%d" % number
    assert os.fstat(store.answers()._fd).st_ino == os.fstat(answers._fd).st_ino
    manager.settle()
    assert len(manager.stored) == 4, "nothing is stored twice"
    store.close()
    for one in (*held.values(), *(end for pair in pairs for end in pair)):
        one.close()


def test_connections_whose_records_do_not_fit_are_reset(manager: Manager) -> None:
    """server.max_connections or server.max_body_mib has changed."""
    store = DescriptorStore(manager.address, {})
    store.records(SIZES)
    client, accepted = connections()
    store.put(3, accepted)
    manager.settle()
    store.close()
    store = DescriptorStore(manager.address, manager.stored_again())
    records = store.records(SIZES._replace(number=8))
    assert store.connections(records) == {} and records.sizes.number == 8
    manager.settle()
    assert [name for name, _ in manager.stored] == ["kept-records"]
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    store.close()
    client.close()
    accepted.close()


def test_answers_of_another_size_begin_anew(manager: Manager) -> None:
    other = os.memfd_create("other")
    store = DescriptorStore(manager.address, {"answers": other})
    assert isinstance(store.answers(), KeptRecords)
    manager.settle()
    assert manager.said[0] == "FDSTOREREMOVE=1\nFDNAME=kept-answers" and [name for name, _ in manager.stored] == ["kept-answers"]
    store.close()


def test_without_systemds_ear_all_goes_on_and_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = DescriptorStore(str(tmp_path / "nobody"), {})
    store.records(SIZES)
    store.answers()
    assert [record.getMessage() for record in caplog.records if "does not store it" in record.getMessage()].__len__() == 1
    store.close()


def test_clients_wait_once_for_a_systemd_that_takes_nothing(manager: Manager, caplog: pytest.LogCaptureFixture) -> None:
    store = DescriptorStore(manager.address, {})
    began_s = time.monotonic()
    for number in range(1000):  # a queue has 10 to 512 places
        store.remove(number)
        assert time.monotonic() - began_s < 5
    assert time.monotonic() - began_s > 0.5 and len(caplog.records) == 1
    manager.settle()
    store.remove(1000)
    assert manager.take() and "connection-1000" in manager.said[-1]
    store.close()


def test_a_keeper_goes_on_with_the_connections_of_one_that_died(manager: Manager) -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            store = DescriptorStore(manager.address, {})
            first = ConnectionKeeper([listener], SIZES, store)
            gateway = await Gateway(first).adopt()
            with socket.create_connection(listener.getsockname()) as client:
                client.settimeout(5)
                await gateway.until(lambda: gateway.held)
                manager.settle()
                assert [name for name, _ in manager.stored] == ["kept-records", "kept-connection-0"]
                again = DescriptorStore(manager.address, manager.stored_again())
                second = ConnectionKeeper([listener], SIZES, again)
                successor = await Gateway(second).adopt()
                assert list(successor.held) == [0] and second.num_held == 1
                successor.release(0)
                await successor.until(lambda: not second.num_held)
                assert client.recv(1) == b""
                manager.settle()
                assert [name for name, _ in manager.stored] == ["kept-records"]
            for keeper, one, its in ((first, gateway, store), (second, successor, again)):
                one.close()
                keeper.close()
                its.close()

    asyncio.run(test())
