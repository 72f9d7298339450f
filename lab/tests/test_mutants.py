"""One edit breaks one promise, or one mechanism of the coverage table: ordinary tests find it. Each is made in a copy of the tree."""

import os
import shutil
import subprocess
import sys
import tomllib
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
CREW = "tests/runtime/supervisor/test_crew_world.py"  # eleven old defects of the supervisor
MUTANTS = {
    "budgets": Mutant(
        f"{RULES}/scheduling/batches.py", "budget - num_planned))", "budget))", "tests/runtime/controller/test_batches.py"
    ),
    "pairs": Mutant(
        f"{RULES}/scheduling/guidance.py", "return all([done >=", "return any([done >=", "tests/runtime/controller/test_guidance.py"
    ),
    "pages": Mutant(
        f"{RULES}/state/pages.py", "owners[pages[place]] += 1", "owners[pages[place]] += 0", "tests/runtime/controller/test_pages.py"
    ),
    "handover": Mutant(
        f"{RULES}/rows/ownership.py",
        "    request.record.join(actor)\n",
        "",
        "tests/runtime/controller/test_ownership.py",
    ),
    "states": Mutant("actors/decode/state_pages.py", "1 - slot_B[full]", "slot_B[full]", "tests/actors/decode/test_state_pages.py"),
    "grid": Mutant(f"{RULES}/scheduling/batches.py", "% self._grid", "% 1", "tests/runtime/controller/test_state_grants.py"),
    "commit": Mutant("shm/sequence_table.py", "if not current.all():", "if False:", "tests/shm/test_sequence_table.py"),
    "caches": Mutant(
        f"{RULES}/scheduling/page_keys.py", "blake2b(salt, ", 'blake2b(b"", ', "tests/runtime/controller/test_page_keys.py"
    ),
    "restart policy": Mutant(
        "runtime/supervisor/restart_policy.py",
        "len(failures) >= policy.limit",
        "len(failures) > policy.limit",
        "tests/runtime/supervisor/test_restart_policy.py",
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
    "restart beside a debugger": Mutant(
        "runtime/supervisor/handover.py", "if actor.debugger is not None:\n        raise", "if False:\n        raise", CREW
    ),
    "restart whose predecessor died": Mutant(
        "runtime/supervisor/handover.py", "or actor.is_being_restarted:", 'or actor.state == "restarting":', CREW
    ),
    "debugger that has gone": Mutant(
        "runtime/supervisor/handover.py",
        "    if actor.candidate is debugger:\n        actor.candidate = None\n    if actor.current is None and",
        "    if actor.current is None and",
        CREW,
    ),
    "deaf at the end": Mutant(
        "runtime/supervisor/managed_actor.py",
        "await instance.process.stop(0.0 if self._is_forced else self.spec.stop_grace_s)",
        "instance.process.signal(signal.SIGTERM)",
        CREW,
    ),
    "pause at a start": Mutant(
        "runtime/supervisor/managed_actor.py", "instance.beat_s = instance.waiting_since_s = now_s", "instance.beat_s = now_s", CREW
    ),
    "sandbox": Mutant("actors/host/seccomp.py", "network else _END", "network else _PERMIT", "tests/actors/video/test_sandbox.py"),
    "fields": Mutant(
        "actors/gateway/reading/sampling_fields.py", '"top_p", 0, 1)', '"top_p", 0, 9)', "tests/actors/gateway/test_validation.py"
    ),
    "masks": Mutant(
        "models/grammar/matcher.py", "first + number * num_bytes, num_bytes", "first, num_bytes", "tests/models/grammar/test_answers.py"
    ),
    "kernels": Mutant(
        "triton_kernels/rms_norm/kernel.py",
        "tl.sum(x * x, 0) / SIZE",
        "tl.sum(x * x, 0) / BLOCK",
        "tests/triton_kernels/test_rms_norm.py",
    ),
}

SCHEDULING = f"{RULES}/scheduling"
MECHANISMS = {  # by their ids
    "FC2": Mutant(
        "media/segments.py",
        "        return Group(int(self.key[start]), last,",
        "        return Group(0, last,",
        "tests/media/test_segments.py",
    ),
    "FC3": Mutant(
        "media/segments.py",
        "index.timeline[np.asarray(wanted, np.int64)]",
        "index.timeline[np.arange(len(wanted))]",
        "tests/media/test_segments.py",
    ),
    "FC5": Mutant(
        "media/segments.py",
        "    return -(groups[-1].stop - groups[0].start) % temporal_patch_size",
        "    return 0",
        "tests/media/test_segments.py",
    ),
    "FC6": Mutant(
        "media/segments.py",
        "            or waiting[0].stop - waiting[0].start <= _num_missing(taken, temporal_patch_size)\n",
        "",
        "tests/media/test_segments.py",
    ),
    "FC7": Mutant(
        "media/dispatch.py",
        "key=lambda request: not request.is_awaited):",
        "key=lambda request: request.is_awaited):",
        "tests/media/test_dispatch.py",
    ),
    "FC8": Mutant("media/dispatch.py", "has_room or (number == 0 and not run.frames)", "True", "tests/media/test_dispatch.py"),
    "FC9": Mutant(
        "media/dispatch.py", "run.state in (State.WAITING, State.PARKED)", "run.state is State.WAITING", "tests/media/test_dispatch.py"
    ),
    "US3": Mutant(
        f"{RULES}/state/embedding_tracker.py",
        "first_row=first - part.start - skipped * self._page_tokens",
        "first_row=first - part.start",
        "tests/runtime/controller/test_embedding_tracker.py",
    ),
    "US4": Mutant(
        f"{RULES}/state/embedding_tracker.py",
        "            return -(-part.num_tokens // self._page_tokens)",
        "            return part.num_tokens // self._page_tokens",
        "tests/runtime/controller/test_embedding_tracker.py",
    ),
    "US7": Mutant(
        f"{SCHEDULING}/batches.py",
        "if self._segments and (self.num_rows + rows > self._max_rows or",
        "if (self.num_rows + rows > self._max_rows or",
        "tests/runtime/controller/test_scheduling.py",
    ),
    "US8": Mutant(
        f"{SCHEDULING}/budgets.py",
        "    if tbt_s > target_s:\n        share *= 0.8",
        "    if tbt_s > target_s:\n        share *= 1.1",
        "tests/runtime/controller/test_scheduling.py",
    ),
    "US9": Mutant(
        f"{SCHEDULING}/batches.py",
        "        room = self._max_tokens - self.num_tokens\n",
        "        room = self._max_tokens\n",
        "tests/runtime/controller/test_scheduling.py",
    ),
    "US11": Mutant(
        f"{SCHEDULING}/budgets.py",
        "        return self.fixed or self.value",
        "        return self.value",
        "tests/runtime/controller/test_scheduling.py",
    ),
    "TI3": Mutant(
        f"{SCHEDULING}/stage_level.py",
        "        tau_t = max(low_t, tau_t - view.num_decode_tokens)",
        "        pass",
        "tests/runtime/controller/test_policy_texts.py",
    ),
    "TI4": Mutant(
        f"{SCHEDULING}/stage_level.py",
        "key=lambda request: not is_running(request))",
        "key=is_running)",
        "tests/runtime/controller/test_policy_texts.py",
    ),
    "TI6": Mutant(
        f"{RULES}/plans/kinds/transfer.py",
        " or not request.kv.is_copied(request.targets)",
        "",
        "tests/runtime/controller/test_migration.py",
    ),
    "TI7": Mutant(
        f"{SCHEDULING}/routing.py",
        "return min(near, key=lambda place: (-known",
        "return max(near, key=lambda place: (-known",
        "tests/runtime/controller/test_migration.py",
    ),
    "TI8": Mutant(
        f"{RULES}/rows/placement.py",
        "pools = [source, *(home for home in homes if home not in sources)] if source in homes else homes",
        "pools = homes",
        "tests/runtime/controller/test_migration.py",
    ),
    "TI10": Mutant(
        "lab/mmrt_lab/planner/candidates.py",
        "    for first in range(1, total - parts + 2):",
        "    for first in range(1, total - parts + 1):",
        "lab/tests/planner/test_candidates.py",
    ),
    "TI13": Mutant("bench/serve/slo.py", ">= TBT_SHARE * len(tbts_s)", ">= len(tbts_s)", "tests/bench/test_report.py"),
    "TI22": Mutant(
        "runtime/observe/breakdown.py",
        '(step, "migration"), -1)]',
        '(step, "migration"), 0)]',
        "tests/runtime/observe/test_breakdown.py",
    ),
    "RS1": Mutant(
        "actors/host/pipeline.py", "return relay * (self.num_ranks - 1) + rank", "return relay", "tests/actors/test_pipeline.py"
    ),
    "RS2": Mutant(
        f"{RULES}/state/embedding_tracker.py",
        "self._first_unready = min(self._first_unready, index)",
        "pass",
        "tests/runtime/controller/test_embedding_tracker.py",
    ),
    "RS3": Mutant(f"{SCHEDULING}/overlap.py", "encode.num_rows >= least", "True", "tests/runtime/controller/test_policy_texts.py"),
    "RS4": Mutant(
        f"{RULES}/state/embedding_tracker.py",
        "        return target if target <= start else self._border(start)",
        "        return target",
        "tests/runtime/controller/test_embedding_tracker.py",
    ),
    "RS5": Mutant(
        f"{SCHEDULING}/batches.py",
        "key=lambda request: not request.is_partial and request.key not in early)",
        "key=lambda request: request.key not in early)",
        "tests/runtime/controller/test_scheduling.py",
    ),
    "RS6": Mutant(
        f"{RULES}/plans/plan_dispatch.py",
        "if not (rank := inflight.plan.rank):",
        "if (rank := inflight.plan.rank) or not rank:",
        "tests/runtime/controller/test_pipelines.py",
    ),
    "MS2": Mutant(
        f"{SCHEDULING}/routing.py",
        "        places = sorted(pending)\n",
        "        places = sorted(pending)[:1]\n",
        "tests/runtime/controller/test_routing.py",
    ),
    "MS3": Mutant(
        f"{SCHEDULING}/slack.py",
        'if request.kind == "text" and left <= SHORT_TOKENS',
        "if left <= 0",
        "tests/runtime/controller/test_policy_texts.py",
    ),
    "MS4": Mutant("runtime/autoscale/scaler.py", "and calm_s >= self._rules.calm_s", "", "lab/tests/planner/test_scaler.py"),
    "VL7": Mutant(
        f"{RULES}/state/pages.py", "owners[pages[place]] += 1", "owners[pages[place]] += 0", "tests/runtime/controller/test_pages.py"
    ),
    "CW1": Mutant(
        f"{SCHEDULING}/weighted.py",
        "    return facts.encode.unit_s / facts.prefill.unit_s",
        "    return 1.0",
        "tests/runtime/controller/test_policy_texts.py",
    ),
    "CW2": Mutant(
        f"{SCHEDULING}/weighted.py",
        "budget - view.num_decode_tokens)",
        "budget)",
        "tests/runtime/controller/test_policy_texts.py",
    ),
    "CW4": Mutant(
        f"{SCHEDULING}/weighted.py",
        "min(self._chunk_tokens, limits.max_prefill_tokens)",
        "limits.prefill_tokens",
        "tests/runtime/controller/test_policy_texts.py",
    ),
    "PC1": Mutant(
        f"{SCHEDULING}/weighted.py",
        "left - min(texts, int(TEXT_SHARE * left))",
        "left",
        "tests/runtime/controller/test_policy_texts.py",
    ),
    "PC2": Mutant(
        f"{SCHEDULING}/weighted.py",
        'request.kind == "video" and now -',
        "False and now -",
        "tests/runtime/controller/test_policy_texts.py",
    ),
    "CF1": Mutant(
        "models/sampling/sampler.py",
        "torch.addcmul(unconditional, conditional",
        "torch.addcmul(conditional, conditional",
        "tests/models/test_sampler.py",
    ),
    "CF4": Mutant(
        f"{SCHEDULING}/guidance.py",
        "[num_pages(length + max_new_tokens - 1, page_tokens) for length in lengths]",
        "[num_pages(lengths[0] + max_new_tokens - 1, page_tokens) for length in lengths]",
        "tests/runtime/controller/test_guidance.py",
    ),
    "KQ1": Mutant("models/lm/kv_pages.py", "    whole = heads.round_() if", "    whole = heads if", "tests/models/test_kv_pages.py"),
    "KQ2": Mutant("models/lm/kv_packing.py", "(codes & 15, codes >> 4)", "(codes >> 4, codes & 15)", "tests/models/test_kv_pages.py"),
    "KT1": Mutant(
        "actors/decode/page_copier.py",
        "if at is not None and at.generation != generation:",
        "if at is not None and generation < 0:",
        "tests/actors/decode/test_page_copier.py",
    ),
    "KT2": Mutant(
        "actors/decode/recomputing.py",
        "0 < num_tokens * token_s < copy_s",
        "0 < copy_s < num_tokens * token_s",
        "tests/actors/decode/test_recomputing.py",
    ),
}
"""By the mechanism's id."""


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
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", *files]
    environment = {**os.environ, "PYTHONPATH": f"{copy.parent}{os.pathsep}{copy / 'lab'}"}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("id", MECHANISMS)
def test_its_tests_are_those_of_the_coverage_table(id: str) -> None:
    table = tomllib.loads((ROOT / "lab/docs/coverage.toml").read_text())
    tests = [test if test.startswith("lab/") else f"tests/{test}" for test in table[id]["test"]]
    assert f"{MECHANISMS[id].found_by.removesuffix('.py')}" in tests


def test_without_an_edit_nothing_is_found(copy: Path) -> None:
    status, output = outcome(copy, *sorted({mutant.found_by for mutant in (MUTANTS | MECHANISMS).values()}))
    assert status == 0, output[-3000:]


@pytest.mark.parametrize("promise", [*MUTANTS, *MECHANISMS])
def test_it_is_found(copy: Path, promise: str) -> None:
    mutant = (MUTANTS | MECHANISMS)[promise]
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
