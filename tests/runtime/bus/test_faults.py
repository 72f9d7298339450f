"""Lost and late messages, on purpose and only then."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmrt.runtime.bus import faults as bus_faults_module
from mmrt.runtime.bus.faults import EXIT_SIGNAL, BusFaults, FaultFile, bus_faults
from mmrt.runtime.bus.messages import Hello, Welcome
from mmrt.runtime.bus.transport import ActorSocket, ControllerSocket


@pytest.fixture
def file(tmp_path: Path) -> Iterator[FaultFile]:
    file = FaultFile(tmp_path / "faults")
    yield file
    file.close()


def test_nothing_happens_between_episodes(file: FaultFile) -> None:
    faults = BusFaults(file.path, "decode")
    sent: list[int] = []
    assert faults.outgoing(lambda: not sent.append(1)) and sent == [1]
    assert faults.incoming([1, 2, 3]) == [1, 2, 3]
    assert not faults.outgoing(lambda: False)


def test_lost_messages_are_lost_for_the_actor_that_is_meant(file: FaultFile) -> None:
    decode, prefill = BusFaults(file.path, "decode"), BusFaults(file.path, "prefill")
    file.begin("decode", seed=1, lost=1.0)
    assert decode.outgoing(lambda: False)  # its sender does not know
    assert decode.incoming([1, 2]) == []
    assert prefill.incoming([1, 2]) == [1, 2]
    file.end()
    assert decode.incoming([3]) == [3]


def test_half_an_episode_is_none(file: FaultFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks while the storm writes sees the episode before, and all of the new one later."""
    faults = BusFaults(file.path, "decode")
    seen: list[list[int]] = []

    class Late:
        def pack_into(self, buffer: object, offset: int, episode: int) -> None:
            seen.append(faults.incoming([1]))
            written.pack_into(buffer, offset, episode)

    written = bus_faults_module._EPISODE
    monkeypatch.setattr(bus_faults_module, "_EPISODE", Late())
    Late.unpack_from = staticmethod(written.unpack_from)  # type: ignore[attr-defined]
    file.begin("decode", seed=1, lost=1.0)
    assert (seen, faults.incoming([2])) == ([[1]], [])
    file.end()
    assert (seen, faults.incoming([3])) == ([[1], []], [3])


def test_a_share_is_lost_and_the_seed_says_which(file: FaultFile) -> None:
    def survivors(seed: int) -> list[int]:
        faults = BusFaults(file.path, "decode")
        file.begin("decode", seed=seed, lost=0.5)
        return faults.incoming(list(range(1000)))

    assert survivors(1) == survivors(1) != survivors(2)
    assert 400 < len(survivors(1)) < 600


def test_late_messages_come_in_the_end_each_once(file: FaultFile) -> None:
    faults = BusFaults(file.path, "decode")
    file.begin("decode", seed=1, late=0.7, max_delay_s=0.02)
    sent: list[int] = []
    for number in range(100):
        faults.outgoing(lambda number=number: not sent.append(number))  # type: ignore[misc]
    received = faults.incoming(list(range(100)))
    assert len(sent) < 100 and len(received) < 100
    file.end()
    deadline_s = time.monotonic() + 5
    while time.monotonic() < deadline_s and (len(sent) < 100 or len(received) < 100):
        received += faults.incoming([])
    assert sorted(sent) == sorted(received) == list(range(100))
    assert sent != sorted(sent) and received != sorted(received)


def test_it_is_off_without_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MMRT_FAULTS", raising=False)
    assert bus_faults("decode") is None


def test_the_bus_with_faults(file: FaultFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMRT_FAULTS", str(file.path))
    controller, actor = ControllerSocket(tmp_path), ActorSocket(tmp_path, "decode", 1)
    try:
        deadline_s = time.monotonic() + 10

        def exchange() -> bool:
            actor.send(Hello("decode", 1, os.getpid(), True))
            actor.poll(0.02)
            return bool(controller.receive())

        while not exchange():
            assert time.monotonic() < deadline_s
        assert controller.send("decode", 1, Welcome(1))
        while not actor.receive():
            assert time.monotonic() < deadline_s
        file.begin("decode", seed=1, lost=1.0)
        while controller.receive():
            pass
        assert not any(exchange() for _ in range(20))
        file.end()
        while not exchange():
            assert time.monotonic() < deadline_s
    finally:
        actor.close()
        controller.close()


def test_exit_0_out_of_the_blue(file: FaultFile) -> None:
    code = (
        "import signal; from mmrt.runtime.bus.faults import exit_when_told; from mmrt.runtime.environment import read_environment;"
        "exit_when_told(read_environment()); print(1, flush=True); signal.pause()"
    )
    environment = {**os.environ, "MMRT_FAULTS": str(file.path)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"1\n"
        process.send_signal(EXIT_SIGNAL)
        assert process.wait(10) == 0
