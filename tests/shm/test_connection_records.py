"""Records of connections: what a successor finds is what was committed last, whole, wherever its writer stopped."""

import os
import socket
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from mmrt.shm import connection_records
from mmrt.shm.connection_records import MAX_STATE_BYTES, ConnectionRecords, RecordSizes
from mmrt.shm.tcp_count import bytes_put, bytes_taken
from mmrt.tests.settings import examples

SIZES = RecordSizes(2, 4096, 4096)


class Stopped(Exception):
    """The writer was killed."""


class ConnectionMachine(RuleBasedStateMachine):
    """A server that answers each byte of its client with itself, over a real connection, and dies between any two of its steps.

    Its state is (base of what was received, bytes answered, base of what was sent, bytes committed for the client).
    """

    @initialize()
    def begin(self) -> None:
        self.records = ConnectionRecords.create(SIZES)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.client = socket.create_connection(listener.getsockname())
            self.connection, _ = listener.accept()
        self.client.settimeout(5)
        self.connection.setblocking(False)
        self.asked, self.got = b"", b""
        self.adopt()

    def adopt(self) -> None:
        self.record = self.records.record(1)
        state = self.record.load()
        numbers = [int(word) for word in state.split()] or [0, 0, 0, 0]
        self.record.received.base, self.answered, self.record.sent.base, self.written = numbers
        self.read, self.put = bytes_taken(self.connection), bytes_put(self.connection)
        assert self.record.sent.base <= self.put <= self.written and self.answered <= self.read <= len(self.asked)

    def commit(self) -> None:
        numbers = (self.record.received.base, self.answered, self.record.sent.base, self.written)
        self.record.commit(" ".join(map(str, numbers)).encode())

    @rule(data=st.binary(min_size=1, max_size=900))
    def ask(self, data: bytes) -> None:
        self.client.sendall(data)
        self.asked += data

    @rule(most=st.integers(1, 2000))
    def receive(self, most: int) -> None:
        room = SIZES.in_bytes - (self.read - self.record.received.base)
        if room:
            try:
                self.read += self.connection.recv_into(self.record.received.space(self.read, min(most, room)))
            except BlockingIOError:
                pass

    @rule(most=st.integers(1, 1500), step=st.integers(0, 3))
    def answer(self, most: int, step: int) -> None:
        """Put an answer into the ring, commit it; killed after ``step`` of that."""
        end = min(self.read, self.answered + most)
        if self.written == self.put:
            self.record.sent.empty(self.written)
        if end - self.answered > SIZES.out_bytes - (self.written - self.record.sent.base):
            return
        if self.answered == self.read:
            self.record.received.empty(self.read)
            self.commit()
            return
        data = self.record.received.get(self.answered, end)
        self.record.sent.put(self.written, data if step else data[: len(data) // 2])
        if step > 1:
            self.answered, self.written = end, self.written + len(data)
            self.commit()
        if step < 3:
            self.adopt()

    @rule(most=st.integers(1, 3000))
    def send(self, most: int) -> None:
        end = min(self.written, self.put + most)
        self.put += self.connection.send(self.record.sent.get(self.put, end)) if end > self.put else 0

    @rule()
    def die(self) -> None:
        self.adopt()

    @precondition(lambda self: self.asked)
    @rule()
    def read_answer(self) -> None:
        self.client.setblocking(False)
        try:
            self.got += self.client.recv(1 << 16)
        except BlockingIOError:
            pass
        self.client.settimeout(5)
        assert self.asked.startswith(self.got)

    def teardown(self) -> None:
        if not hasattr(self, "records"):
            return
        while len(self.got) < len(self.asked):
            for _ in range(3):
                self.receive(2000)
                self.answer(1500, 3)
                self.send(3000)
            self.read_answer()
        assert self.got == self.asked
        self.client.close()
        self.connection.close()
        self.records.close()


def test_every_byte_is_answered_once_whenever_the_server_dies() -> None:
    run_state_machine_as_test(ConnectionMachine, settings=settings(max_examples=examples(60), stateful_step_count=40, deadline=None))


def test_a_state_is_replaced_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    records = ConnectionRecords.create(SIZES)
    record = records.record(0)
    assert record.load() == b""
    record.commit(b"first")

    def stop() -> None:
        raise Stopped

    with monkeypatch.context() as patched:
        patched.setattr(connection_records, "fence", stop)
        with pytest.raises(Stopped):
            record.commit(b"second, longer")
    assert ConnectionRecords(os.dup(records.descriptor), SIZES).record(0).load() == b"first"
    record.commit(b"third")
    assert records.record(0).load() == b"third" and records.record(1).load() == b""
    with pytest.raises(ValueError, match=f"state of {MAX_STATE_BYTES + 1} bytes, the limit is {MAX_STATE_BYTES}"):
        record.commit(b"x" * (MAX_STATE_BYTES + 1))
    assert record.load() == b"third"
    record.clear()
    assert records.record(0).load() == b""
    records.close()


def test_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    records = ConnectionRecords.create(RecordSizes.of(64, 64 << 20))

    def used() -> Any:
        return os.fstat(records.descriptor).st_blocks * 512

    record = records.record(63)
    assert used() == 0
    record.received.put(0, b"a" * (1 << 20))
    record.sent.put(0, b"b" * (1 << 20))
    record.commit(b"state")
    assert used() > 2 << 20
    record.received.empty(1 << 20)
    assert (1 << 20) + 4096 < used() < (1 << 20) + (1 << 18)
    record.clear()
    assert used() == 0
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(records.descriptor, 0)
    with pytest.raises(ValueError, match="record 64 of 64"):
        records.record(64)
    records.close()


def test_a_mark_is_found_wherever_it_lies() -> None:
    records = ConnectionRecords.create(RecordSizes(1, 1 << 16, 4096))
    ring = records.record(0).received
    for at in (0, 4090, 4093, 20_000, (1 << 16) - 2, 70_000):  # the first look ends at 4096, the ring at 65,536
        ring.base = 0
        ring.put(0, b"." * (1 << 16))
        ring.put(at, b"mark")
        begin = max(0, at - 60_000)
        assert ring.find(b"mark", begin, begin + (1 << 16)) == at
        assert ring.find(b"mark", begin, at + 3) == -1 and ring.find(b"mark", at + 1, begin + (1 << 16)) == -1
    records.close()


def test_a_core_of_a_process_has_none_of_it() -> None:
    records = ConnectionRecords.create(SIZES)
    with open("/proc/self/smaps") as file:
        _, _, maps = file.read().partition("mmrt-connections")
    (flags, *_) = [line for line in maps.splitlines() if line.startswith("VmFlags")]
    assert "dd" in flags.split()
    records.close()
