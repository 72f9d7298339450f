"""An attacker who has taken over the video process of a run: what control reads stays as it is, and no reader of memory dies.

The process enters the sandbox as always; then it tries in earnest what would give it other processes.
"""

import json
import select
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mmrt.actors import memory
from mmrt.actors.host.actor import Actor
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.config.sections import MemorySection, ServerSection
from mmrt.runtime.process.lifeline import Lifeline
from mmrt.runtime.process.run import DEFAULT_MODEL, create_run, run_info
from mmrt.runtime.stage_table import InstanceId
from mmrt.shm.named_socket import bind_in_place
from mmrt.shm.pool import PagePool
from mmrt.shm.role_lock import RoleLock
from mmrt.tests.actors.video.attacker import CONTROL, SOCKETS

ATTACKER = Path(__file__).with_name("attacker.py")
CONFIG = RuntimeConfig(
    memory=MemorySection(max_sequences=2, kv_tokens=512, media_mib=1, patch_mib=1, embedding_tokens=64),
    server=ServerSection(api_key="a key of the run", port=1),
)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcomes of all attacks, and what the run's directory holds before and after them."""
    place = tmp_path_factory.mktemp("attack")
    with (
        create_run(place / "run", run_info(CONFIG, DEFAULT_MODEL, 1)) as run,
        pytest.MonkeyPatch.context() as patch,
        ExitStack() as stack,
    ):
        patch.setenv("XDG_STATE_HOME", str(place / "state"))
        memory.build(Actor(InstanceId("memory"), run, Lifeline(None), None))
        for name in CONTROL:
            if not (run.path / name).exists():
                (run.path / name).write_text(name)
        for name in set(SOCKETS) & set(CONTROL):
            (run.path / name).unlink()
        listeners = [stack.enter_context(bind_in_place(run.path / name, socket.SOCK_DGRAM)) for name in SOCKETS]
        before = contents(run.path)
        done = subprocess.run([sys.executable, ATTACKER, str(run.path)], capture_output=True, text=True, timeout=60)
        assert done.stdout, done.stderr
        if "what it reads and writes" in done.stderr or "system calls" in done.stderr:
            pytest.skip(done.stderr)
        first = bytes(PagePool.attach(run, "patch", "read").page(0)[:4])
        held = RoleLock.is_held(run, "decode")
        said = [listener.recv(1 << 16) for listener in listeners if has_heard(listener)]
        yield {
            "said": said,
            "found": json.loads(done.stdout),
            "before": before,
            "after": contents(run.path),
            "patch": first,
            "held": held,
            "run": str(run.path),
        }


def has_heard(listener: socket.socket) -> bool:
    return bool(select.select([listener], [], [], 0)[0])


def contents(run: Path) -> dict[str, bytes]:
    """What lies in a run's directory, besides the words and pages that are the video process's to write."""
    own = ("actors.", "flight-video.", "pool-patch.", "video.lock", "captured-video", "weights.")
    files = [file for file in run.rglob("*") if file.is_file() and not file.name.startswith(own)]
    return {str(file.relative_to(run)): file.read_bytes() for file in files}


NO_FILE = {"EACCES", "ENOENT"}  # ENOENT where it has an empty file system of its own


def test_nothing_that_control_reads_can_be_written_or_removed(outcome: dict[str, Any]) -> None:
    found = outcome["found"]
    for what in ("replace", "overwrite"):
        assert {found[f"{what} {name}"] for name in CONTROL} <= NO_FILE
    assert {found[f"remove {name}"] for name in CONTROL} == {"EPERM"}
    assert outcome["before"] == outcome["after"]


def test_nobody_can_be_reached(outcome: dict[str, Any]) -> None:
    """By connections that it makes, and by those that it has; and nobody is told more than the supervisor."""
    found = outcome["found"]
    ways = [name for name in found if name.startswith(("connect", "send", "run", "kill", "trace", "take another", "leave", "enter"))]
    assert len(ways) == 10 and {found[way] for way in (*ways, "read another's memory")} == {"SIGSYS"}
    kinds = [name for name in found if name.startswith("make a socket")]
    assert len(kinds) == 3 and {found[kind] for kind in kinds} == {"EPERM"}
    assert all(b"X_MMRT_ACTOR=video" in datagram for datagram in outcome["said"])


def test_nothing_of_it_can_be_read(outcome: dict[str, Any]) -> None:
    found = outcome["found"]
    assert {found["list"], *(found[f"read {name}"] for name in CONTROL)} <= NO_FILE


def test_it_has_no_key(outcome: dict[str, Any]) -> None:
    assert outcome["found"]["key in its configuration"] == "none"
    assert CONFIG.server.api_key not in outcome["before"]["run.json"].decode()


def test_no_other_role_can_be_taken(outcome: dict[str, Any]) -> None:
    found = outcome["found"]
    assert {found["take the role of decode"], found["take the role of memory"]} <= NO_FILE and not outcome["held"]


def test_no_memory_can_be_cut_or_given_back_or_opened_to_be_written(outcome: dict[str, Any]) -> None:
    found = outcome["found"]
    segments = [name.removeprefix("cut ") for name in found if name.startswith("cut ") and name != "cut what is open"]
    assert {"actors", "pool-kv", "pool-patch", "plans", "sequences", "flight-video"} <= set(segments)
    for name in segments:
        assert {found[f"{what} {name}"] for what in ("read", "overwrite", "cut")} <= NO_FILE
        assert {found[f"truncate {name}"], found[f"remove {name}"]} <= NO_FILE | {"EPERM"}
    assert (found["cut what is open"], found["grow a mapping"], found["give patches back"]) == ("EPERM", "EPERM", "SIGSYS")


def test_it_maps_what_it_needs_alone(outcome: dict[str, Any]) -> None:
    mapped = {name.removeprefix("map "): rights for name, rights in outcome["found"].items() if name.startswith("map ")}
    reads, partly = ("plans", "pool-media", "sequences"), ("actors", "pool-patch")  # of the actors its own row
    assert mapped == dict.fromkeys(reads, "r--s") | dict.fromkeys(partly, "r--s rw-s") | {"flight-video": "rw-s"}


def test_of_the_patches_it_writes_the_pages_alone(outcome: dict[str, Any]) -> None:
    assert outcome["patch"] == bytes(range(4))
    words = ("generations", "_keys", "_key_generations")
    assert {outcome["found"][f"write {what} of patches"] for what in words} == {"EACCES"}
    assert outcome["found"]["write media"] == "EACCES"


def test_it_holds_the_files_that_it_needs_alone(outcome: dict[str, Any]) -> None:
    """Before its walls close; no directory, from which others could be opened, and no segment, which could be cut."""
    held = [name for what, name in outcome["found"].items() if what.startswith("hold ")]
    own = {"video.lock", "LOCK", "capture-video", "captured-video"}  # two locks, the orders for captures, and what is captured
    assert {Path(name).name for name in held if name.startswith(outcome["run"])} == own
    others = [name for name in held if not name.startswith((outcome["run"], "pipe:", "socket:", "/proc/", "/dev/null"))]
    assert not others, held
