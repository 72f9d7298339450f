"""The supervisor over real processes: toy actors that start in milliseconds, crash, hang and refuse to end on demand."""

import os
import signal
import socket
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mmrt.runtime.errors import RunError
from mmrt.runtime.supervisor.control import DownRequest, StatusRequest, call
from mmrt.runtime.supervisor.restart_policy import PROBE_S
from mmrt.shm.outages import OutageTable
from mmrt.shm.run_directory import RunDirectory
from mmrt.tests.settings import also_slow

if TYPE_CHECKING:
    from .conftest import ToyRun

ACTORS = ("memory", "controller", "gateway", "decode")


def test_starts_everything_reports_and_stops_in_order(toy: "ToyRun") -> None:
    toy.start()
    toy.wait_for("ready")
    report = toy.report()
    assert report.ready and report.state == "ready"
    assert [actor.name for actor in report.actors] == list(ACTORS)
    for actor in report.actors:
        assert (actor.state, actor.ready, actor.generation, actor.restarts) == ("active", True, 1, 0)
        assert actor.memory_bytes and actor.memory_bytes > 1 << 20
    assert set(report.pools) == {"media", "patch", "embedding", "kv"}
    toy.call(DownRequest())
    assert toy.end() == 0
    stops = [line for line in toy.history() if line.startswith("stop")]
    assert stops == ["stop gateway", "stop decode", "stop controller", "stop memory"]
    toy.assert_nothing_left()


def test_readiness_waits_for_memory_spawning_does_not(toy: "ToyRun") -> None:
    toy.behave("memory", "slow")
    os.mkfifo(toy.toys / "memory.go")
    toy.start()
    for name in ("controller", "gateway", "decode"):
        toy.wait_for_state(name, "active")
    report = toy.report()
    assert not report.ready and report.state == "starting"
    assert not any(actor.ready for actor in report.actors)
    (toy.toys / "memory.go").write_text("")
    toy.wait_for("ready")
    assert toy.report().ready


def test_a_killed_actor_comes_back_alone(toy: "ToyRun") -> None:
    toy.start()
    toy.wait_for("ready")
    before = {actor.name: actor.pid for actor in toy.report().actors}
    toy.forget()
    os.kill(toy.pid("decode"), signal.SIGKILL)
    toy.wait_for_state("decode", "backoff")
    toy.wait_for_state("decode", "active")
    after = toy.report()
    assert after.ready
    changed = {actor.name for actor in after.actors if actor.pid != before[actor.name]}
    assert changed == {"decode"}
    decode = toy.actor("decode")
    assert (decode.restarts, decode.generation, decode.last_exit) == (1, 2, "SIGKILL")


@pytest.mark.parametrize(("word", "status"), [("crash", 1), ("exit0", 0)])
def test_a_run_that_cannot_start_fails(toy: "ToyRun", word: str, status: int) -> None:
    toy.behave("decode", word)
    toy.start(restart_limit=3)
    failed = toy.wait_for("failed")
    assert failed["reason"].startswith(f"decode failed: exit status {status}; 3 failures within 30 s")
    assert failed["tail"][0] == "decode begins"
    assert toy.end() == 1
    assert toy.history().count("start decode") == 3
    last = (toy.logs / "supervisor.log").read_text().splitlines()[-1]
    assert f"the run is over: {failed['reason']}" in last
    toy.assert_nothing_left()


def outages(toy: "ToyRun") -> dict[str, str]:
    """What the controller is told."""
    with RunDirectory.attach(toy.run) as run, closing(OutageTable.attach(run)) as table:
        return {outage.actor: outage.reason for outage in table.read()}


@pytest.mark.parametrize("word", ["crash", *also_slow("exit0", "configuration", "dies")])
def test_a_crash_loop_ends_the_actor_and_not_the_run(toy: "ToyRun", word: str) -> None:
    toy.start(restart_limit=3)
    toy.wait_for("ready")
    others = {actor.name: actor.pid for actor in toy.report().actors if actor.name != "decode"}
    toy.behave("decode", word)
    toy.forget()
    os.kill(toy.pid("decode"), signal.SIGSEGV)
    toy.wait_for_state("decode", "broken")
    report = toy.report()
    decode = toy.actor("decode")
    assert not report.ready and report.state == "degraded"
    assert decode.state == "broken" and decode.broken and decode.broken in decode.status
    assert decode.next_probe_s is None or 0 <= decode.next_probe_s <= PROBE_S
    assert outages(toy) == {"decode": decode.broken}
    assert {actor.name: actor.pid for actor in report.actors if actor.name != "decode"} == others
    toy.behave("decode")
    toy.wait_for_states("decode", "broken", "active")  # the probe
    assert toy.report().ready and not toy.actor("decode").broken and outages(toy) == {}
    toy.call(DownRequest())
    assert toy.end() == 0
    toy.assert_nothing_left()


def test_a_restart_on_purpose_mends_a_broken_actor(toy: "ToyRun") -> None:
    toy.start(restart_limit=1)
    toy.wait_for("ready")
    toy.behave("decode", "crash")
    os.kill(toy.pid("decode"), signal.SIGSEGV)
    toy.wait_for_state("decode", "broken")
    reply = toy.restart("decode")
    assert not reply.ok and "Traceback: the toy is broken" in reply.log
    toy.wait_for("message", lambda event: event["text"].startswith("decode is broken: exit status 1; 1 failures"))
    assert toy.actor("decode").state == "broken"
    toy.behave("decode")
    assert toy.restart("decode").ok
    assert toy.report().ready and outages(toy) == {}


@pytest.mark.parametrize("name", ["controller", "memory"])
def test_who_nobody_can_do_without_ends_the_run(toy: "ToyRun", name: str) -> None:
    toy.start(restart_limit=2)
    toy.wait_for("ready")
    toy.behave(name, "crash")
    os.kill(toy.pid(name), signal.SIGKILL)
    assert toy.wait_for("failed")["reason"].startswith(f"{name} failed: exit status 1; 2 failures within 30 s")
    assert toy.end() == 1
    last = (toy.logs / "supervisor.log").read_text().splitlines()[-1]
    assert f"the run is over: {name} failed: exit status 1; 2 failures" in last
    toy.assert_nothing_left()


def test_a_restart_on_purpose_ages_failures(toy: "ToyRun") -> None:
    """What has served for longer than the window, and made room, has made up for the failures before it."""
    toy.start("memory", "decode", restart_limit=2, restart_window_s=0.001)
    toy.wait_for("ready")
    for _ in range(3):
        toy.forget()
        os.kill(toy.pid("decode"), signal.SIGSEGV)
        toy.wait_for_states("decode", "backoff", "active")
        assert toy.restart("decode").ok
    assert toy.report().ready


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, *also_slow(signal.SIGHUP)])
def test_kills_from_outside_never_count(toy: "ToyRun", number: signal.Signals) -> None:
    """Not even of whom nobody can do without. SIGTERM is obeyed: the toy says so, and ends with status 0."""
    toy.start("memory", "controller", restart_limit=2)
    toy.wait_for("ready")
    for count in range(1, 6):
        toy.forget()
        os.kill(toy.pid("controller"), number)
        toy.wait_for_states("controller", "backoff", "active")
        assert toy.actor("controller").restarts == count
    assert toy.report().ready


def test_a_program_that_is_not_there_fails_the_run(toy: "ToyRun") -> None:
    toy.environment["TOY_PROGRAM"] = str(toy.toys / "nothing")
    toy.start("memory", restart_limit=2)
    reason = toy.wait_for("failed")["reason"]
    assert reason.startswith(f"memory failed: cannot start {toy.toys / 'nothing'}: No such file or directory; 2 failures")
    assert toy.end() == 1


def test_a_configuration_error_is_not_tried_again(toy: "ToyRun") -> None:
    toy.behave("decode", "configuration")
    toy.start()
    assert "cannot start with this configuration" in toy.wait_for("failed")["reason"]
    assert toy.end() == 1
    assert toy.history().count("start decode") == 1


def test_an_actor_that_is_never_ready_is_killed(toy: "ToyRun") -> None:
    """And given up after a while, however long each start takes: the window counts time in which it served."""
    toy.behave("decode", "mute")
    toy.start("memory", "decode", ready_timeout_s=0.3, restart_limit=3, restart_window_s=0.2)
    reason = toy.wait_for("failed")["reason"]
    assert "SIGKILL (not ready within 0.3 s); 3 failures" in reason
    assert toy.end() == 1


def test_a_hung_actor_is_killed_and_started_again(toy: "ToyRun") -> None:
    toy.behave("decode", "hang")
    toy.start("memory", "decode", watchdog_s=0.4)
    toy.wait_for("ready")
    toy.behave("decode")
    toy.wait_for_states("decode", "backoff", "active")
    assert toy.actor("decode").last_exit == "SIGKILL (hang: no sign of life for 0.4 s)"


def test_hot_restart_replaces_a_warm_generation(toy: "ToyRun") -> None:
    toy.start()
    toy.wait_for("ready")
    old = toy.pid("decode")
    reply = toy.restart("decode")
    assert reply.ok and reply.generation == 2
    decode = toy.actor("decode")
    assert decode.pid != old and decode.state == "active" and decode.ready and decode.restarts == 1
    history = toy.history()
    ready = [index for index, line in enumerate(history) if line == "ready decode"]
    assert ready[1] < history.index("stop decode"), "the new one is warm before the old one ends"
    assert toy.restart("decode").generation == 3


def test_a_restart_that_does_not_come_up_leaves_the_old_one(toy: "ToyRun") -> None:
    toy.start()
    toy.wait_for("ready")
    old = toy.pid("decode")
    toy.behave("decode", "crash")
    reply = toy.restart("decode")
    assert not reply.ok
    assert "exit status 1" in reply.message and "the old one keeps serving" in reply.message
    assert "Traceback: the toy is broken" in reply.log
    assert toy.report().ready and toy.pid("decode") == old
    with pytest.raises(RunError, match="no actor 'decoed'; there are memory"):
        toy.restart("decoed")


def test_a_restart_that_fails_when_it_takes_over_is_started_again(toy: "ToyRun") -> None:
    toy.start()
    toy.wait_for("ready")
    toy.behave("decode", "takeover-crash")
    toy.forget()
    reply = toy.restart("decode")
    assert not reply.ok and "when it took over" in reply.message
    toy.behave("decode")
    toy.wait_for_state("decode", "backoff")
    toy.wait_for("progress", lambda event: event["actor"] == "decode" and event["state"] == "active")
    assert toy.report().ready


def test_an_actor_that_ignores_sigterm_is_killed(toy: "ToyRun") -> None:
    toy.behave("gateway", "stubborn")
    toy.start("memory", "gateway", drain_s=0.1)
    toy.wait_for("ready")
    toy.call(DownRequest(drain_s=0.0))
    assert toy.end() == 0
    toy.assert_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, *also_slow(signal.SIGINT, signal.SIGHUP)])
def test_a_signal_ends_the_run_cleanly(toy: "ToyRun", number: signal.Signals) -> None:
    start_with_hang_up(toy, signal.SIG_DFL)  # these tests may run under nohup themselves
    toy.wait_for("ready")
    assert toy.process is not None
    toy.process.send_signal(number)
    assert toy.end() == 0
    toy.assert_nothing_left()


def start_with_hang_up(toy: "ToyRun", inherited: signal.Handlers) -> None:
    before = signal.signal(signal.SIGHUP, inherited)
    try:
        toy.start("memory", "decode")
    finally:
        signal.signal(signal.SIGHUP, before)


def test_under_nohup_the_run_outlives_its_terminal(toy: "ToyRun") -> None:
    start_with_hang_up(toy, signal.SIG_IGN)
    toy.wait_for("ready")
    assert toy.process is not None
    toy.process.send_signal(signal.SIGHUP)
    assert toy.report().ready
    toy.call(DownRequest(drain_s=0.0))
    assert toy.end() == 0


def test_a_shorter_drain_hurries_one_that_has_begun(toy: "ToyRun") -> None:
    toy.behave("gateway", "drains")
    toy.start(drain_s=1000.0)
    toy.wait_for("ready")
    assert toy.process is not None
    toy.process.send_signal(signal.SIGINT)
    toy.wait_for("message", lambda event: event["text"] == "stopping")
    toy.call(DownRequest(drain_s=0.0))
    assert toy.end() == 0
    toy.assert_nothing_left()


def test_a_second_interrupt_forces(toy: "ToyRun") -> None:
    toy.behave("gateway", "stubborn")
    toy.start(drain_s=1000.0)
    toy.wait_for("ready")
    assert toy.process is not None
    toy.process.send_signal(signal.SIGINT)
    toy.wait_for("message", lambda event: event["text"] == "stopping")
    toy.process.send_signal(signal.SIGINT)
    assert toy.end() == 130
    toy.assert_nothing_left()


def test_a_killed_supervisor_leaves_nothing(toy: "ToyRun") -> None:
    toy.start()
    toy.wait_for("ready")
    assert toy.process is not None
    toy.process.kill()
    toy.process.wait()
    toy.wait_until_gone()
    # Toys do not sweep; whoever looks next finds a dead run and removes it.
    assert not RunDirectory.is_alive(toy.run)
    RunDirectory.attach(toy.run).leave()
    assert not toy.run.exists()


def test_output_goes_to_reporter_and_files(toy: "ToyRun") -> None:
    toy.start("memory", "decode")
    toy.wait_for("ready")
    toy.wait_for("lines", lambda event: event["actor"] == "decode" and event["lines"] == ["decode begins"])
    toy.call(DownRequest())
    toy.end()
    stamp, _, line = (toy.logs / "decode.log").read_text().splitlines()[0].partition(" ")
    assert line == "decode begins" and stamp.endswith("Z") and len(stamp) == 27
    assert "ready after" in (toy.logs / "supervisor.log").read_text()
    assert (toy.logs / "decode.log").stat().st_mode & 0o777 == 0o600


def test_a_second_run_in_the_same_directory_is_refused(toy: "ToyRun") -> None:
    toy.start("memory")
    toy.wait_for("ready")
    second = toy.beside()
    second.start("memory")
    refusal = second.wait_for("refused")
    assert f"a run is already up in {toy.run}" in refusal["reason"] and "mmrt down" in refusal["reason"]
    assert second.end() == 1
    second.close()
    assert toy.report().ready


def test_the_control_socket_is_private_and_refuses_nonsense(toy: "ToyRun") -> None:
    toy.start("memory")
    toy.wait_for("ready")
    path = toy.run / "control"
    assert path.stat().st_mode & 0o777 == 0o600
    assert toy.run.stat().st_mode & 0o777 == 0o700
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(b'{"type":"format-disk"}\n')
        assert b"error" in connection.recv(1000)
    assert toy.report().ready


def test_control_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no supervisor answers"):
        call(tmp_path, StatusRequest())
