"""sd_notify, both ends: what arrives is what was sent, and nothing breaks where nobody listens."""

import os
import socket
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from mmrt.runtime.process.notify import Notification, Notifier, NotifyListener, parse


def test_every_assignment_arrives_with_the_senders_pid(tmp_path: Path) -> None:
    listener = NotifyListener(tmp_path / "notify")
    notifier = Notifier(str(tmp_path / "notify"), "decode", 7)
    notifier.status("loading\nweights  50 %")
    notifier.ready("standby")
    notifier.active()
    notifier.watchdog()
    notifier.extend(2.5)
    notifier.stopping()
    received = listener.drain()
    assert {(n.pid, n.actor, n.generation) for n in received} == {(os.getpid(), "decode", 7)}
    status, ready, active, beat, extend, stopping = received
    assert status.status == "loading weights 50 %" and not status.ready
    assert ready.ready and not ready.active and ready.status == "standby"
    assert active.ready and active.active
    assert beat.watchdog and beat.status is None and beat.ready and beat.active, "a beat repeats what may have been lost"
    assert extend.extend_s == 2.5 and extend.watchdog
    assert stopping.stopping
    assert listener.drain() == []
    assert (tmp_path / "notify").stat().st_mode & 0o777 == 0o600
    notifier.close()
    listener.close()
    assert not (tmp_path / "notify").exists()


def test_nobody_listens(tmp_path: Path) -> None:
    for address in (None, "", str(tmp_path / "gone")):
        notifier = Notifier(address, "decode")
        notifier.ready()
        notifier.close()
        notifier.watchdog()


def test_a_full_queue_blocks_nobody_for_a_beat(tmp_path: Path) -> None:
    listener = NotifyListener(tmp_path / "notify")
    notifier = Notifier(str(tmp_path / "notify"), "decode")
    for _ in range(1000):
        notifier.watchdog()
    assert 0 < len(listener.drain()) < 1000
    notifier.close()
    listener.close()


def test_systemds_abstract_address() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        name = f"mmrt-test-{os.getpid()}"
        manager.bind(f"\0{name}")
        notifier = Notifier(f"@{name}", "memory", 1)
        notifier.ready("up")
        assert manager.recv(1000).split(b"\n")[:2] == [b"READY=1", b"STATUS=up"]
        notifier.close()


@settings(deadline=None)  # the machine may be busy
@given(st.binary(max_size=300))
def test_any_datagram_parses(datagram: bytes) -> None:
    assert parse(1, datagram).pid == 1


def test_what_systemd_ignores_is_ignored() -> None:
    assert parse(5, b"READY=0\nFDSTORE=1\nrubbish\nX_MMRT_GENERATION=-3\nEXTEND_TIMEOUT_USEC=soon") == Notification(5)
