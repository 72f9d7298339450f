"""After warm-up nothing compiles: whatever changes from step to step asks for no new variant of a kernel."""

import pytest

from mmrt.tests.triton_kernels.launch_keys import count

pytestmark = pytest.mark.slow  # by day test_warm_up launches the same kernels, of whole models

DECODE = """
import json, torch
from mmrt.tests.triton_kernels.launch_keys import record
from mmrt.triton_kernels.paged_decode import DecodeWorkspace, paged_decode, plan_decode
from mmrt.triton_kernels.paged_kv import PagedKV

found = record()
for num_pages in (7, 16):
    pool = torch.zeros(num_pages, 3, 16, 2, 2, 64, dtype=torch.bfloat16)[:, 1]
    kv = PagedKV(pool[:, :, 0], pool[:, :, 1])
    for rows in (1, 2, 3, 16, 33):
        workspace = DecodeWorkspace.allocate(rows, 8, 2, 64, 132, torch.device("cpu"))
        plan_decode(torch.zeros(rows + 3, dtype=torch.int32)[3:], workspace)
        q = torch.zeros(rows, 12, 64, dtype=torch.bfloat16)[:, :8]
        for width in (1, 3, 16):
            paged_decode(q, kv, torch.zeros(rows + 1, width, dtype=torch.int32)[1:], workspace)
print(json.dumps({name: len(keys) for name, keys in found.items()}))
"""
EXTEND = """
import json, torch
from mmrt.tests.triton_kernels.launch_keys import record
from mmrt.triton_kernels.paged_extend import paged_extend, plan_extend
from mmrt.triton_kernels.paged_kv import PagedKV

found = record()
pool = torch.zeros(9, 3, 16, 2, 2, 64, dtype=torch.bfloat16)[:, 1]
kv = PagedKV(pool[:, :, 0], pool[:, :, 1])
for spans in ([(0, 1)], [(16, 32)], [(1, 300)], [(0, 0)], [(40, 41), (0, 16), (2, 99)]):
    for width in (4, 7, 16):
        plan = plan_extend(spans, 8, 2, 64, torch.bfloat16, torch.device("cpu"))
        q, k, v = torch.zeros(plan.num_tokens, 12, 64, dtype=torch.bfloat16).split([8, 2, 2], 1)
        paged_extend(q, k, v, kv, torch.zeros(len(spans) + 1, width, dtype=torch.int32)[1:], plan)
print(json.dumps({name: len(keys) for name, keys in found.items()}))
"""


def test_decode_has_one_variant_of_each_kernel() -> None:
    assert count(DECODE) == {"plan_kernel": 1, "attend_kernel": 1, "reduce_kernel": 1}


def test_extend_has_one_variant_for_long_chunks_and_one_for_short() -> None:
    assert count(EXTEND) == {"extend_kernel": 2}
