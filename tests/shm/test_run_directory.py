"""Run directory and role locks, with real processes that are really killed."""

import mmap
import os
import resource
import signal
import stat
import threading
import time

import pytest

from mmrt.shm import run_directory as module
from mmrt.shm.errors import BusyError, MissingError, ShmError
from mmrt.shm.file_lock import EXCLUSIVE, is_current, open_lock, wait_for_lock
from mmrt.shm.role_lock import RoleLock, next_generation
from mmrt.shm.run_directory import RunDirectory, foreign_parent, sweep_dead_run, sweep_dead_runs
from mmrt.shm.segment import HEADER_BYTES, Segment


def shared_words(count):
    """Words that forked children write and this process reads."""
    return memoryview(mmap.mmap(-1, 8 * count)).cast("Q")


class Member:
    """A child that does something, says so, and stays until it is told to go or killed."""

    def __init__(self, crashes, body):
        ready, self._ready = os.pipe()
        self._go, go = os.pipe()

        def live():
            os.close(ready)
            os.close(go)
            kept = body()
            os.write(self._ready, b"r")
            os.read(self._go, 1)
            del kept

        self.child = crashes.Child(live)
        os.close(self._ready)
        os.close(self._go)
        self._pipes = [ready, go]
        self.is_ready = os.read(ready, 1) == b"r"

    @property
    def pid(self):
        return self.child.pid

    def close(self):
        while self._pipes:
            os.close(self._pipes.pop())

    def let_go(self):
        os.write(self._pipes[1], b"g")
        assert self.child.wait() == 0

    def kill(self):
        assert self.child.kill() == -signal.SIGKILL


@pytest.fixture
def member(crashes):
    members = []

    def start(body):
        members.append(Member(crashes, body))
        assert members[-1].is_ready
        return members[-1]

    yield start
    for each in members:
        each.child.kill()
        each.close()


def test_create_and_attach(place):
    with RunDirectory.create(place / "run", {"config": {"a": [1]}, "model_path": "x", "pair": (1, 2)}) as run:
        with RunDirectory.attach(place / "run") as again:
            assert again.info == run.info
            assert again.run_id == run.run_id
            assert run.info["config"] == {"a": [1]}
            assert run.info["creator_pid"] == os.getpid()
        assert run.segment_path("kv") == place / "run" / f"kv.{run.run_id}"
        assert stat.S_IMODE((place / "run").stat().st_mode) == 0o700
        modes = {name: stat.S_IMODE((place / "run" / name).stat().st_mode) for name in os.listdir(place / "run")}
        assert modes.pop("notes") == 0o700 and modes and set(modes.values()) == {0o600}
        run.destroy()
    assert os.listdir(place) == []


def test_run_ids_differ(place):
    with RunDirectory.create(place / "a", {}) as a, RunDirectory.create(place / "b", {}) as b:
        assert a.run_id != b.run_id


def test_live_run_is_busy(place, member, monkeypatch):
    monkeypatch.setattr(module, "_BUSY_RETRY_S", 0.0)
    other = member(lambda: RunDirectory.create(place / "run", {"x": 1}))
    with pytest.raises(BusyError, match=f"{place / 'run'} is in use by a live run \\(pid {other.pid}\\)") as caught:
        RunDirectory.create(place / "run", {"x": 2})
    assert caught.value.pids == (other.pid,)
    assert RunDirectory.is_alive(place / "run")
    assert not sweep_dead_run(place / "run")
    with RunDirectory.attach(place / "run") as run:
        assert run.info["x"] == 1
        assert run.pids() == tuple(sorted((os.getpid(), other.pid)))


def test_run_lives_as_long_as_any_member(place, member):
    creator = member(lambda: RunDirectory.create(place / "run", {}))
    actor = member(lambda: RunDirectory.attach(place / "run"))
    creator.kill()
    assert RunDirectory.is_alive(place / "run")
    actor.kill()
    assert not RunDirectory.is_alive(place / "run")


def test_dead_run_is_swept_by_the_next(place, member):
    def body():
        run = RunDirectory.create(place / "run", {})
        (run.path / "deep" / "er").mkdir(parents=True)
        (run.path / "deep" / "er" / "file").write_bytes(b"x")
        (run.path / "link").symlink_to(place)
        return run, Segment.create(run.segment_path("s"), HEADER_BYTES)

    dead = member(body)
    old = os.listdir(place / "run")
    dead.kill()
    with RunDirectory.create(place / "run", {}) as run:
        assert len(old) == 6
        assert sorted(os.listdir(run.path)) == ["LOCK", "notes", "run.json"]
        assert place.exists()


def test_sweep_of_dead_siblings(place, member):
    parent = place / f"mmrt-{os.getuid()}"
    live = member(lambda: RunDirectory.create(parent / "live", {}))
    dead = member(lambda: RunDirectory.create(parent / "dead", {}))
    dead.kill()
    (parent / "empty").mkdir()
    foreign = parent / "foreign"
    foreign.mkdir()
    (foreign / "LOCK").touch()
    (foreign / "thesis").write_text("mine")
    (parent / "link").symlink_to(foreign)
    assert sweep_dead_runs(parent) == [parent / "dead", parent / "empty"]
    assert sorted(os.listdir(parent)) == ["foreign", "link", "live"]
    assert os.listdir(foreign) == ["LOCK", "thesis"] or os.listdir(foreign) == ["thesis", "LOCK"]
    live.kill()
    (parent / "link").unlink()
    (foreign / "thesis").unlink()
    assert sweep_dead_runs(parent) == [foreign, parent / "live"]
    assert not parent.exists()
    assert sweep_dead_runs(parent) == []


def test_the_parent_goes_with_the_last_run(place):
    parent = place / f"mmrt-{os.getuid()}"
    one, two = RunDirectory.create(parent / "one", {}), RunDirectory.create(parent / "two", {})
    assert stat.S_IMODE(parent.stat().st_mode) == 0o700
    one.destroy()
    assert os.listdir(parent) == ["two"]
    two.destroy()
    assert os.listdir(place) == []


@pytest.mark.parametrize("files", [["thesis"], ["LOCK", "thesis"]])
def test_a_directory_of_somebody_else_is_not_swept(place, files):
    for name in files:
        (place / name).write_text("mine")
    with pytest.raises(ShmError, match="not empty and not a run directory"):
        RunDirectory.create(place, {})
    assert sorted(os.listdir(place)) == files


def test_paths_that_cannot_be(place):
    with pytest.raises(ShmError, match="sockets allow 74"):
        RunDirectory.create(place / ("x" * 90), {})
    for missing in ("no/run", "no/such/run", f"no/mmrt-{os.getuid()}/run"):
        with pytest.raises(MissingError, match=f"no directory {place}/no"):
            RunDirectory.create(place / missing, {})
    (place / "file").touch()
    with pytest.raises(ShmError, match="not a directory of user"):
        RunDirectory.create(place / "file", {})
    (place / "link").symlink_to(place)
    with pytest.raises(ShmError, match="not a directory of user"):
        RunDirectory.create(place / "link", {})
    for path in (place / "nothing", place / "file"):
        with pytest.raises(MissingError):
            RunDirectory.attach(path)
        assert not RunDirectory.is_alive(path)


def test_open_permissions_are_closed(place):
    (place / "run").mkdir(mode=0o755)
    with RunDirectory.create(place / "run", {}) as run:
        assert stat.S_IMODE(run.path.stat().st_mode) == 0o700


def test_incomplete_run_is_no_run(place, member):
    member(lambda: RunDirectory.create(place / "run", {})).kill()
    (place / "run" / "run.json").unlink()
    with pytest.raises(MissingError, match="not complete"):
        RunDirectory.attach(place / "run", timeout_s=0.05)
    with RunDirectory.create(place / "run", {}):
        pass


def test_destroy_waits_for_the_others(place, member):
    run = RunDirectory.create(place / "run", {})
    other = member(lambda: RunDirectory.attach(place / "run"))
    with pytest.raises(BusyError, match=str(other.pid)):
        run.destroy(timeout_s=0.05)
    assert RunDirectory.is_alive(place / "run")
    other.let_go()
    run.destroy()
    assert os.listdir(place) == []


def test_one_that_waits_for_another_to_end_removes_everything(place, member):
    run = RunDirectory.create(place / "run", {})
    other = member(lambda: RunDirectory.attach(place / "run"))
    threading.Timer(0.2, other.kill).start()
    assert run.leave(patience_s=60.0) and not (place / "run").exists()


def test_exactly_one_of_those_who_leave_together_is_the_last(place, crashes):
    for _ in range(12):
        run = RunDirectory.create(place / "run", {})
        start, go = os.pipe()
        joined, last = os.pipe(), os.pipe()

        def leave(start=start, go=go, joined=joined[1], last=last[1]):
            os.close(go)
            with RunDirectory.attach(place / "run") as mine:
                os.write(joined, b"j")
                os.read(start, 1)
                if mine.leave():
                    os.write(last, b"l")

        children = [crashes.Child(leave) for _ in range(4)]
        run.close()
        for _ in children:
            os.read(joined[0], 1)
        os.close(go)
        assert [child.wait() for child in children] == [0] * 4
        assert not (place / "run").exists()
        assert os.read(last[0], 10) == b"l"
        for fd in (start, *joined, *last):
            os.close(fd)


def test_creators_killed_anywhere_never_share_a_run(place, crashes, monkeypatch):
    """Many create and destroy one path at once and die at random lines: at most one is ever in it, and the next can start."""
    monkeypatch.setattr(module, "_BUSY_RETRY_S", 0.02)
    path = place / f"mmrt-{os.getuid()}" / "run"

    def body():
        while True:
            try:
                run = RunDirectory.create(path, {})
            except BusyError:
                continue
            with RunDirectory.attach(path, timeout_s=1.0) as again:
                assert again.run_id == run.run_id
            os.mkdir(path / "inside")
            os.rmdir(path / "inside")
            run.destroy(timeout_s=60)
            destroyed[0] += 1

    destroyed = shared_words(1)
    functions = (RunDirectory.create, RunDirectory._lock_exclusively, RunDirectory.destroy)
    helpers = (module._remove, module._remove_contents, module._write_whole, is_current, module._make_private)
    codes = crashes.codes(body, *functions, *helpers)
    rivals = [crashes.victim(body, codes) for _ in range(3)]

    def observe():
        for index, rival in enumerate(rivals):
            if rival.poll() is not None:
                assert rival.status == -signal.SIGKILL, f"seed {crashes.seed}"
                rivals[index] = crashes.victim(body, codes)
        time.sleep(0.001)

    crashes.storm(lambda: crashes.victim(body, codes), observe, kills=25, enough=lambda: destroyed[0] > 5)
    for rival in rivals:
        rival.kill()
    RunDirectory.create(path, {}).destroy()
    assert os.listdir(place) == []
    print(f"{destroyed[0]} whole lives")
    assert destroyed[0] > 5


def test_default_path(monkeypatch, place):
    monkeypatch.setenv("MMRT_RUN_DIR", str(place / "mine"))
    assert RunDirectory.default_path() == place / "mine"
    assert RunDirectory.default_path("other").parts[-2:] == (f"mmrt-{os.getuid()}", "other"), "who names a run means that one"
    monkeypatch.delenv("MMRT_RUN_DIR")
    assert RunDirectory.default_path().parts[-2:] == (f"mmrt-{os.getuid()}", "default")


def _block(shared, kind):
    """Somebody else's work where our directory should be."""
    path = shared / f"mmrt-{os.getuid()}"
    if kind == "directory":
        path.mkdir()
        os.chown(path, os.getuid() + 1, -1)
    elif kind == "link":
        path.symlink_to(shared)
    else:
        path.touch()
    return path


@pytest.mark.parametrize(
    "kind",
    ["file", "link", pytest.param("directory", marks=pytest.mark.skipif(os.getuid() != 0, reason="only root gives directories away"))],
)
def test_a_parent_of_somebody_else_is_no_obstacle(monkeypatch, place, kind):
    shared, runtime = place / "shm", place / "runtime"
    for folder in (shared, runtime):
        folder.mkdir()
    monkeypatch.setattr("mmrt.shm.run_directory._SHARED_MEMORY", str(shared))
    monkeypatch.delenv("MMRT_RUN_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert RunDirectory.default_path().parent.parent == shared and foreign_parent() is None
    blocked = _block(shared, kind)
    path = RunDirectory.default_path("mine")
    assert path == runtime / f"mmrt-{os.getuid()}" / "mine" and foreign_parent() == blocked
    run = RunDirectory.create(path, {})
    blocked.rmdir() if kind == "directory" else blocked.unlink()
    assert RunDirectory.default_path("mine") == path, "it is found where it is"
    assert RunDirectory.default_path("other").parent.parent == shared
    run.destroy()
    _block(shared, kind)
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    with pytest.raises(ShmError, match=f"{blocked} is not a directory of user .*set MMRT_RUN_DIR"):
        RunDirectory.default_path()


def _holding(run, actor):
    lock = RoleLock(run, actor)
    assert lock.try_acquire()
    return lock


def test_one_holder_at_a_time(run, member):
    assert not RoleLock.is_held(run, "decode")
    old = member(lambda: _holding(run, "decode"))
    assert RoleLock.holder(run, "decode") == old.pid
    assert not RoleLock.is_held(run, "prefill")
    with RoleLock(run, "decode") as new:
        assert not new.try_acquire()
        assert not new.acquire(poll_s=0.001, timeout_s=0.01)
        assert not new.held
        old.kill()
        assert new.acquire(timeout_s=5)
        assert new.try_acquire() and new.held
        assert RoleLock.holder(run, "decode") == os.getpid()
    assert not new.held and not RoleLock.is_held(run, "decode")


def test_a_successor_that_has_not_written_its_pid_is_not_its_predecessor(run, member):
    old = member(lambda: _holding(run, "decode"))
    assert RoleLock.acts(run, "decode", old.pid) and not RoleLock.acts(run, "decode", os.getpid())
    old.kill()
    lock = open_lock(run.path / "decode.lock")
    wait_for_lock(lock, EXCLUSIVE)
    assert RoleLock.holder(run, "decode") == old.pid
    assert not RoleLock.acts(run, "decode", old.pid)
    os.close(lock)


def test_probes_do_not_count_as_holders(run, crashes):
    def probe():
        while True:
            assert RoleLock.holder(run, "decode") in (None, os.getpid(), os.getppid())

    prober = crashes.Child(probe)
    for _ in range(50):
        with RoleLock(run, "decode") as lock:
            assert lock.acquire(poll_s=0.0001, timeout_s=5)
    assert prober.kill() == -signal.SIGKILL


def test_a_forked_child_does_not_hold_its_parents_role(run, member, crashes):
    """A holder that forks and dies is dead, although its child lives; and a child that ends takes nothing from its parent."""
    end, told = os.pipe()

    def hold_and_fork():
        lock = _holding(run, "decode")
        return lock, crashes.Child(lambda: os.read(end, 1))

    try:
        holder = member(hold_and_fork)
        assert RoleLock.is_held(run, "decode")
        holder.kill()
        with RoleLock(run, "decode") as lock:
            assert lock.acquire(timeout_s=5)
            inherited = crashes.Child(lambda: 1 / 0 if lock.held else lock.release())
            assert inherited.wait() == 0
            assert lock.held and RoleLock.is_held(run, "decode")
    finally:
        os.write(told, b"e")
        os.close(told)
        os.close(end)


def test_descriptors_are_closed_on_exec(run):
    with RoleLock(run, "decode") as lock:
        lock.acquire()
        assert not os.get_inheritable(lock._fd)
        assert not os.get_inheritable(run._lock_fd)


def test_generations_are_never_given_twice(run, crashes):
    given, taken = os.pipe()

    def take():
        for _ in range(40):
            os.write(taken, next_generation(run, "decode").to_bytes(4, "little"))

    children = [crashes.Child(take) for _ in range(4)]
    assert [child.wait() for child in children] == [0] * 4
    numbers = [int.from_bytes(os.read(given, 4), "little") for _ in range(160)]
    assert sorted(numbers) == list(range(1, 161))
    assert next_generation(run, "prefill") == 1
    os.close(given)
    os.close(taken)


def test_generations_survive_kills(run, crashes):
    last = [0]

    def take():
        while True:
            next_generation(run, "decode")

    def observe():
        generation = next_generation(run, "decode")
        assert generation > last[0]
        last[0] = generation

    crashes.storm(lambda: crashes.victim(take, crashes.codes(next_generation)), observe, kills=20)


def test_a_path_that_cannot_be_used_is_said(place):
    with pytest.raises(ShmError, match="cannot be used: File name too long"):
        RunDirectory.is_alive(place / ("x" * 300))
    (place / "file").write_text("")
    with pytest.raises(ShmError, match="cannot be made: Not a directory"):
        RunDirectory.create(place / "file" / "run", {})


def test_who_acts_is_known_beside_a_thousand_descriptors(run):
    """As in a gateway with that many connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        with RoleLock(run, "decode") as role:
            assert role.try_acquire() and RoleLock.acts(run, "decode", os.getpid()) and not RoleLock.acts(run, "decode", 1)
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
