"""One edit breaks one promise: the ordinary tests of the runtime find it. Each is made in a copy of the tree."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import mmrt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
ROOT = Path(mmrt.__file__).parent


class Mutant(NamedTuple):
    """``text`` stands once in ``file``; a test in ``found_by`` fails when it is ``edited``."""

    file: str
    text: str
    edited: str
    found_by: str


RULES = "runtime/controller"
CREW = "runtime/supervisor/test_crew_world.py"  # six old defects of the supervisor
MUTANTS = {
    "budgets": Mutant(f"{RULES}/scheduling/batches.py", "budget - num_planned))", "budget))", "runtime/controller/test_batches.py"),
    "pairs": Mutant(
        f"{RULES}/scheduling/guidance.py", "return all([done >=", "return any([done >=", "runtime/controller/test_guidance.py"
    ),
    "pages": Mutant(
        f"{RULES}/state/pages.py", "owners[pages[place]] += 1", "owners[pages[place]] += 0", "runtime/controller/test_pages.py"
    ),
    "handover": Mutant(
        f"{RULES}/rows/ownership.py",
        "    request.record.join(actor)\n",
        "",
        "runtime/controller/test_ownership.py",
    ),
    "states": Mutant("actors/decode/state_pages.py", "1 - slot_B[full]", "slot_B[full]", "actors/decode/test_state_pages.py"),
    "grid": Mutant(f"{RULES}/scheduling/batches.py", "% self._grid", "% 1", "runtime/controller/test_state_grants.py"),
    "commit": Mutant("shm/sequence_table.py", "if not current.all():", "if False:", "shm/test_sequence_table.py"),
    "caches": Mutant(f"{RULES}/scheduling/page_keys.py", "blake2b(salt, ", 'blake2b(b"", ', "runtime/controller/test_page_keys.py"),
    "restart policy": Mutant(
        "runtime/supervisor/restart_policy.py",
        "len(failures) >= policy.limit",
        "len(failures) > policy.limit",
        "runtime/supervisor/test_restart_policy.py",
    ),
    "ages by making room": Mutant(
        "runtime/supervisor/managed_actor.py",
        "elif self.current is not None or instance.is_debugger:",
        "elif self.current is not None or instance.is_debugger:\n                lifetime_s = 0.0",
        CREW,
    ),
    "ages by every death": Mutant(
        "runtime/supervisor/restart_policy.py",
        "before = history.aged(lifetime_s, policy.window_s)",
        'before = history.aged(lifetime_s, policy.window_s) if cause == "itself" else history',
        CREW,
    ),
    "slow starts": Mutant(
        "runtime/supervisor/managed_actor.py",
        "instance.process.lifetime_s if instance.active.is_set() else 0.0  #",
        "instance.process.lifetime_s  #",
        CREW,
    ),
    "ready after the end": Mutant(
        "runtime/supervisor/crew.py", "not self.was_ready and not self._end.is_set()", "not self.was_ready", CREW
    ),
    "leaving at the end": Mutant("runtime/supervisor/crew.py", "actors = dict(self.actors)", "actors = self.actors", CREW),
    "stopped supervisor": Mutant("runtime/supervisor/crew.py", "if late:", "if False:", CREW),
    "sandbox": Mutant("actors/host/seccomp.py", "network else _END", "network else _PERMIT", "actors/video/test_sandbox.py"),
    "fields": Mutant(
        "actors/gateway/reading/sampling_fields.py", '"top_p", 0, 1)', '"top_p", 0, 9)', "actors/gateway/test_validation.py"
    ),
    "masks": Mutant(
        "models/grammar/matcher.py", "first + number * num_bytes, num_bytes", "first, num_bytes", "models/grammar/test_answers.py"
    ),
    "kernels": Mutant(
        "triton_kernels/rms_norm/kernel.py", "tl.sum(x * x, 0) / SIZE", "tl.sum(x * x, 0) / BLOCK", "triton_kernels/test_rms_norm.py"
    ),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree, as the package ``mmrt`` of another folder."""
    copy = tmp_path_factory.mktemp("mutants") / "mmrt"
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if not (ROOT / name).is_symlink() and (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    return copy


def outcome(copy: Path, *files: str) -> tuple[int, str]:
    """(exit status, output) of these files of the copy's tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", *(f"tests/{file}" for file in files)]
    environment = {**os.environ, "PYTHONPATH": str(copy.parent)}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_without_an_edit_nothing_is_found(copy: Path) -> None:
    status, output = outcome(copy, *sorted({mutant.found_by for mutant in MUTANTS.values()}))
    assert status == 0, output[-3000:]


@pytest.mark.parametrize("promise", MUTANTS)
def test_it_is_found(copy: Path, promise: str) -> None:
    mutant = MUTANTS[promise]
    file = copy / mutant.file
    before = file.read_text()
    assert before.count(mutant.text) == 1, f"{mutant.file} has changed: break the promise in another way"
    file.write_text(before.replace(mutant.text, mutant.edited))
    try:
        status, output = outcome(copy, mutant.found_by)
    finally:
        file.write_text(before)
    print(output[-3000:])
    assert status == 1 and "1 failed" in output, f"no test has seen what is wrong: {promise}"
