"""A warm process behind the gateway: it takes over at a death, gives way to a restart, and does not hide a gateway that is broken."""

import os
import signal
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .conftest import ToyRun


def wait_for_starts(toy: "ToyRun", what: str, count: int) -> None:
    deadline = time.monotonic() + 30
    while toy.history().count(f"{what} gateway") < count:
        assert time.monotonic() < deadline, toy.history()
        time.sleep(0.01)


def test_it_takes_over_and_gets_a_successor(toy: "ToyRun") -> None:
    toy.start("memory", "gateway", gateway_standby=True)
    wait_for_starts(toy, "ready", 2)
    os.kill(toy.pid("gateway"), signal.SIGKILL)
    toy.wait_for("message", lambda event: event["text"] == "gateway ended with SIGKILL; its standby takes over")
    wait_for_starts(toy, "ready", 3)
    assert toy.history().count("active gateway") == 2 and toy.history().count("ready memory") == 1
    assert toy.actor("gateway").generation == 2
    assert toy.process is not None
    toy.process.send_signal(signal.SIGTERM)
    assert toy.end() == 0
    toy.assert_nothing_left()


def test_a_restart_takes_a_fresh_process(toy: "ToyRun") -> None:
    """A standby may have old code."""
    toy.start("memory", "gateway", gateway_standby=True)
    wait_for_starts(toy, "ready", 2)
    reply = toy.restart("gateway")
    assert reply.ok and reply.generation == 3, reply
    wait_for_starts(toy, "ready", 4)
    assert toy.actor("gateway").generation == 3


def test_a_gateway_that_dies_again_and_again_is_broken(toy: "ToyRun") -> None:
    toy.start("memory", "gateway", gateway_standby=True, restart_limit=3)
    wait_for_starts(toy, "ready", 2)
    toy.behave("gateway", "dies")  # those that start from now on, once they serve
    os.kill(toy.pid("gateway"), signal.SIGKILL)
    wait_for_starts(toy, "ready", 3)
    os.kill(toy.pid("gateway"), signal.SIGKILL)
    toy.wait_for_state("gateway", "broken")
    toy.behave("gateway")
    assert toy.restart("gateway").ok
