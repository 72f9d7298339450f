"""Doorbells wake whoever listens now, and harm nobody when nobody does."""

import os
import select
import signal

from mmrt.shm.doorbell import Listener, Ringer


def _is_ringing(listener):
    return bool(select.select([listener.fd], [], [], 0)[0])


def test_ring_and_drain(run):
    with Listener(run, "gateway") as listener, Ringer(run, "gateway") as ringer:
        assert not _is_ringing(listener) and not listener.drain()
        ringer.ring()
        ringer.ring()
        assert _is_ringing(listener) and listener.drain()
        assert not _is_ringing(listener) and not listener.drain()


def test_nobody_is_there(run):
    with Ringer(run, "gateway") as ringer:
        ringer.ring()
        Listener(run, "gateway").close()
        ringer.ring()


def test_a_full_queue_is_a_ring(run):
    with Listener(run, "gateway") as listener, Ringer(run, "gateway") as ringer:
        for _ in range(5000):
            ringer.ring()
        assert listener.drain()


def test_the_next_generation_takes_the_bell_over(run):
    with Ringer(run, "gateway") as ringer, Listener(run, "gateway") as old, Listener(run, "gateway") as new:
        ringer.ring()
        assert _is_ringing(new) and not _is_ringing(old)
        old.close()
        new.drain()
        ringer.ring()
        assert new.drain()
    assert sorted(os.listdir(run.path)) == ["LOCK", "gateway.bell", "notes", "run.json"]


def test_a_killed_listener_is_replaced(run, crashes):
    def listen_and_die():
        listener = Listener(run, "gateway")
        os.kill(os.getpid(), signal.SIGKILL)
        listener.close()

    assert crashes.Child(listen_and_die).wait() == -signal.SIGKILL
    with Ringer(run, "gateway") as ringer:
        ringer.ring()
        with Listener(run, "gateway") as listener:
            ringer.ring()
            assert listener.drain()


def test_it_wakes_another_process(run, crashes):
    with Listener(run, "gateway") as listener:
        child = crashes.Child(lambda: Ringer(run, "gateway").ring())
        assert select.select([listener.fd], [], [], 10)[0]
        assert child.wait() == 0
