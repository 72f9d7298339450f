"""The GPU bench: its checks at tiny sizes against the real kernels, and every timing up to the launch, on tensors without memory."""

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import mmrt.triton_kernels
from mmrt.triton_kernels.paged_kv import PagedKV
from mmrt.triton_kernels.sampling import SamplingRows, SamplingWorkspace
from mmrt_lab.gpu import paged_decode, paged_extend, row_kernels, sampling, sharing, vision_attention
from mmrt_lab.gpu.case import Check, WrongResult, require_attention
from mmrt_lab.gpu.counts import Heads
from mmrt_lab.gpu.material import far_apart, make_cache
from mmrt_lab.gpu.results import judge
from mmrt_lab.gpu.section import MODULES, execute
from mmrt_lab.gpu.timing import Beside

LAUNCHES = """
import importlib, json, torch
from mmrt.tests.triton_kernels.launch_keys import record
from contextlib import nullcontext
from mmrt_lab.gpu import sharing, steps
from mmrt_lab.gpu.section import MODULES, execute
from mmrt_lab.gpu.timing import Beside, Timed

modules = {section: importlib.import_module("mmrt_lab.gpu." + name) for section, name in MODULES.items()}
found, rows = record(), {}
steps.missing_memory = sharing.missing_memory = lambda num_bytes: None
sharing.neighbour = nullcontext

class Clock:
    device = torch.device("meta")

    def time(self, launches, *, in_graph=True):
        for launch in launches:
            launch()
        return Timed(10.0 * len(launches), 0.1)

    def beside(self, first, num_first, second, num_second):
        first(), second()
        return Beside(15.0, 10.0 * (num_first + num_second))

for section, module in modules.items():
    for timing in module.timings(False):
        rows.setdefault(section, []).extend([row.case, row.failed, timing.is_peer, row.note] for row in execute(timing, Clock(), None))
print(json.dumps([rows, sorted(found)]))
"""


WITHOUT_CHECKS = ("ceilings", "sharing", "peers")


def nothing() -> None:
    pass


def test_every_operation_has_a_section() -> None:
    packages = {module.name for module in pkgutil.iter_modules(mmrt.triton_kernels.__path__) if module.ispkg}
    named = {name for section in MODULES for name in section.split(", ")}
    assert packages <= named


@pytest.mark.parametrize("name", [name for name in MODULES.values() if name not in WITHOUT_CHECKS])
def test_checks_pass(name: str, device: torch.device) -> None:
    torch.manual_seed(0)
    for check in importlib.import_module(f"mmrt_lab.gpu.{name}").checks(device, "tiny"):
        difference = check.run()
        assert 0 <= difference <= 1, check.name


def test_a_wrong_result_is_a_failed_row(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    right = row_kernels.silu_reference.silu_mul

    def wrong(gate_up: torch.Tensor, out: torch.Tensor) -> None:
        right(gate_up, out)
        out[1, 2] += 1

    monkeypatch.setattr(row_kernels.silu_reference, "silu_mul", wrong)
    check = next(check for check in row_kernels.checks(device, "tiny") if check.name.startswith("silu_mul"))
    (row,) = execute(check, None, nothing)
    assert row.failed and row.note.startswith("WrongResult: out[1, 2] is ") and row.note.endswith("; 1 of 144 are wrong")
    assert judge(row, {}, "H200").verdict == "FAILED"


def test_a_result_of_nan_is_a_failed_row(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(row_kernels, "silu_mul", lambda gate_up, out: None)
    check = next(check for check in row_kernels.checks(device, "tiny") if check.name.startswith("silu_mul"))
    (row,) = execute(check, None, nothing)
    assert row.failed and "is nan" in row.note


HEADS = Heads(num_heads=4, num_kv_heads=2, head_dim=64)
Fake = Callable[[int], Callable[..., None]]


def fake_decode(lost: int) -> Callable[..., None]:
    """The reference in place of the kernel, over rows whose last ``lost`` tokens are missing."""

    def fake(q: Tensor, kv: PagedKV, table: Tensor, workspace: object, *, out: Tensor) -> None:
        out.copy_(paged_decode.paged_decode_reference(q, kv, table, torch.tensor([5003 - lost])))

    return fake


def fake_extend(lost: int) -> Callable[..., None]:
    def fake(q: Tensor, k: Tensor, v: Tensor, kv: PagedKV, table: Tensor, plan: object, *, out: Tensor) -> None:
        out.copy_(paged_extend.paged_extend_reference(q, k, v, kv, table, [(4096 - lost, 4097 - lost)]))

    return fake


def fake_vision(lost: int) -> Callable[..., None]:
    def fake(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, max_length: int, *, out: Tensor) -> None:
        weights = torch.einsum("qhd,khd->hqk", q.float(), k[lost:].float()) * vision_attention.HEAD_DIM**-0.5
        out.copy_(torch.einsum("hqk,khd->qhd", weights.softmax(-1), v[lost:].float()))

    return fake


ATTENTION: dict[str, tuple[ModuleType, str, Fake, list[Any]]] = {
    "decode": (paged_decode, "paged_decode", fake_decode, [(5003,), HEADS, torch.bfloat16, torch.bfloat16]),
    "extend": (paged_extend, "paged_extend", fake_extend, [((4096, 4097),), HEADS, torch.bfloat16, torch.bfloat16]),
    "vision": (vision_attention, "attend", fake_vision, [(2000,), 1, torch.bfloat16]),
}


@pytest.mark.parametrize(("module", "kernel", "fake", "material"), ATTENTION.values(), ids=ATTENTION)
def test_tokens_that_attention_loses_are_noticed(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, module: ModuleType, kernel: str, fake: Fake, material: list[Any]
) -> None:
    """One tile of a long row, and all of it; without a loss the check passes."""
    check = partial(module._check, device, *material)
    torch.manual_seed(0)
    monkeypatch.setattr(module, kernel, fake(0))
    assert check() < 1e-3
    monkeypatch.setattr(module, kernel, fake(16))
    with pytest.raises(WrongResult, match=r"out\["):
        check()
    monkeypatch.setattr(module, kernel, lambda *given, out: out.zero_())
    with pytest.raises(WrongResult, match=r"is 0, expected"):
        check()


def test_rounded_weights_of_tokens_pass() -> None:
    """What tensor cores are given: each token's weight, in the type of the result. 64 of 70,001 tokens fewer do not."""
    torch.manual_seed(0)
    num_tokens, lost = 70001, 64
    v = torch.randn(num_tokens, 128).to(torch.bfloat16).float()
    weights = torch.randn(4, num_tokens).exp()
    expected = (weights @ v / weights.sum(-1, keepdim=True))[None]
    for dtype in (torch.bfloat16, torch.float16):
        require_attention((weights.to(dtype).float() @ v / weights.sum(-1, keepdim=True))[None].to(dtype), expected)
        fewer = weights[:, lost:] @ v[lost:] / weights[:, lost:].sum(-1, keepdim=True)
        with pytest.raises(WrongResult):
            require_attention(fewer[None].to(dtype), expected)


def test_a_row_over_no_tokens_is_exactly_0() -> None:
    empty = torch.zeros(1, 2, 16)
    assert require_attention(empty.to(torch.float16), empty) == 0
    with pytest.raises(WrongResult):
        require_attention((empty + 1e-6).to(torch.float16), empty)


@pytest.mark.parametrize("name", ["plain", "min-p", "top-k", "greedy, plain", "more candidates"])
def test_another_token_is_noticed(monkeypatch: pytest.MonkeyPatch, device: torch.device, name: str) -> None:
    right = sampling.reference.sample

    def next_draw(logits: Tensor, rows: SamplingRows, workspace: object, *, out: Tensor, **tables: Tensor | None) -> None:
        rows.index += 1
        out.copy_(right(logits, rows, **tables))
        rows.index -= 1

    check = next(check for check in sampling.checks(device, "tiny") if check.name.startswith(name))
    torch.manual_seed(0)
    monkeypatch.setattr(sampling, "sample", next_draw)
    with pytest.raises(WrongResult, match="tokens are"):
        check.run()


def test_every_path_of_a_draw_is_checked(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Greedy, padding, and draws from the whole vocabulary, from candidates, and past more candidates than there is room for."""
    paths: set[tuple[str, ...]] = set()

    def path(rows: SamplingRows, workspace: SamplingWorkspace, row: int) -> str:
        if rows.logits_row[row] < 0 or rows.temperature[row] == 0:
            return "padding" if rows.logits_row[row] < 0 else "greedy"
        if rows.top_k[row] == 0 and rows.top_p[row] == 1:
            return "whole, min-p" if rows.min_p[row] > 0 else "whole"
        return "too many" if rows.top_k[row] > workspace.max_candidates else "candidates"

    def record(logits: Tensor, rows: SamplingRows, workspace: SamplingWorkspace, *, out: Tensor, **tables: Tensor | None) -> None:
        paths.add(tuple(path(rows, workspace, row) for row in range(rows.num_rows)))
        out.copy_(sampling.reference.sample(logits, rows, **tables))

    monkeypatch.setattr(sampling, "sample", record)
    for check in sampling.checks(device, "tiny"):
        check.run()
    alone = {"greedy", "whole", "whole, min-p", "candidates", "too many"}
    assert paths == {(name,) * 4 for name in alone} | {("greedy", "whole", "candidates", "padding")}


def test_a_draw_at_a_border_may_fall_to_either_side(device: torch.device) -> None:
    rows = sampling._make_rows(1, [{"temperature": 1.0}], False, device)
    place = sampling.reference.uniform(int(rows.seed[0]), int(rows.index[0]))
    at_border = torch.tensor([place, 1 - place, 1e-9], device=device).log()
    assert [sampling._is_at_border(at_border, rows, 0, token) for token in range(4)] == [True, True, False, False]
    inside = torch.tensor([place / 2, 1 - place / 2, 1e-9], device=device).log()
    assert [sampling._is_at_border(inside, rows, 0, token) for token in range(3)] == [False, True, False]


def test_pages_far_apart_are_the_same_pages() -> None:
    cache = make_cache([40, 5], 2, 16, 16, torch.int8, torch.device("cpu"))
    far = far_apart(cache)
    assert torch.equal(far.kv.k_pages, cache.kv.k_pages) and torch.equal(far.kv.v_pages, cache.kv.v_pages)
    num_pages = far.kv.k_pages.shape[0]
    assert num_pages == 7 and far.kv.k_pages.stride(0) * (num_pages // 2) >= 2**31


def test_the_first_of_two_runs_pays_for_compiling(device: torch.device) -> None:
    runs: list[int] = []
    (row,) = execute(Check("op", lambda: float(len(runs)) + (runs.append(1) or 0)), None, nothing)  # type: ignore[func-returns-value]
    assert len(runs) == 2 and row.difference == 1.0 and row.first_s is not None and judge(row, {}, "").verdict == "ok"


def test_a_quick_run_times_some_of_it() -> None:
    for name in MODULES.values():
        module = importlib.import_module(f"mmrt_lab.gpu.{name}")
        whole, quick = ([timing.name for timing in module.timings(is_quick)] for is_quick in (False, True))
        assert set(quick) <= set(whole) and quick


@pytest.mark.slow
def test_every_timing_launches_what_it_says() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", LAUNCHES], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows, kernels = json.loads(done.stdout)
    assert set(rows) == set(MODULES)
    for section, found in rows.items():
        for case, failed, is_peer, note in found:
            assert not failed, (section, case, note)
            assert case and (section == "peers") <= is_peer
    expected = {"attend_kernel", "plan_kernel", "reduce_kernel", "extend_kernel", "copy_rows", "rotate_and_write_heads"}
    expected |= {"norm_row", "silu_mul_rows", "prepare_kernel", "draw_kernel", "sequences_kernel", "windows_kernel"}
    assert expected | {"rotate_kernel"} <= set(kernels)


def test_how_sharing_is_reckoned() -> None:
    """A decode step of 4 ms alone, 6 ms beside an encode of 10 ms; both together take 15 ms where in turn they take 4 * 2 + 10."""
    asked: list[tuple[int, int]] = []

    class Clock:
        def beside(self, first: object, num_first: int, second: object, num_second: int) -> Beside:
            asked.append((num_first, num_second))
            return Beside(6000.0, 15000.0)

    decode, encode = sharing.Phase("decode", nothing), sharing.Phase("encode", nothing)
    slowed = sharing.slowed(Clock(), decode, 4000.0, encode, 10000.0)  # type: ignore[arg-type]
    assert (slowed.time_us, slowed.rate, asked.pop()) == (6000.0, 1.5, (1, 2)), "two encodes outlast three steps"
    turns = sharing.two_streams(Clock(), decode, 4000.0, encode, 10000.0)  # type: ignore[arg-type]
    assert (turns.time_us, turns.rate, asked.pop()) == (15000.0, 1.2, (2, 1))
