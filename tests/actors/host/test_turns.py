"""Turns of the actors of a process: one at a time, in the order in which they asked."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from mmrt.actors.host import turns as module
from mmrt.actors.host.turns import Turn, Turns


def no_beat() -> None:
    pass


@pytest.fixture
def in_thread() -> Iterator[Callable[[Callable[[], object]], threading.Thread]]:
    threads: list[threading.Thread] = []

    def begin(work: Callable[[], object]) -> threading.Thread:
        threads.append(threading.Thread(target=work, daemon=True))
        threads[-1].start()
        return threads[-1]

    yield begin
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_one_at_a_time_in_the_order_in_which_they_asked(in_thread: Callable[..., threading.Thread]) -> None:
    """A lock would let decode, which asks again at once, keep the others out."""
    turns, done = Turns(), []

    def plan(name: str) -> Callable[[], None]:
        def work() -> None:
            with Turn(turns, no_beat):
                done.append(name)

        return work

    decode = Turn(turns, no_beat)
    with decode:
        for number, name in enumerate(("encode", "prefill"), 2):
            in_thread(plan(name))
            wait_until(lambda number=number: turns._last == number)  # type: ignore[misc]
        assert done == []
    for _ in range(3):
        with decode:
            done.append("step")
    assert done == ["encode", "prefill", "step", "step", "step"]


def test_whoever_waits_shows_that_it_lives(in_thread: Callable[..., threading.Thread], monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog must not take it for one that hangs while another's plan takes long."""
    monkeypatch.setattr(module, "BEAT_S", 0.001)
    turns, beats = Turns(), []

    def wait() -> None:
        with Turn(turns, lambda: beats.append(1)):
            pass

    with Turn(turns, no_beat):
        in_thread(wait)
        wait_until(lambda: len(beats) >= 3)


def test_an_error_ends_a_turn(in_thread: Callable[..., threading.Thread]) -> None:
    turn = Turn(Turns(), no_beat)
    with pytest.raises(ValueError, match="failed"), turn:
        raise ValueError("failed")
    with turn:
        pass
