"""How memory is divided between the host and a device."""

import msgspec
import pytest

from mmrt.runtime.config import MemorySection, ModelSection, RuntimeConfig, parse_config
from mmrt.runtime.errors import ConfigError
from mmrt.runtime.layout import ModelFacts, plan_layout, write_layout
from mmrt.runtime.report import ComputeReport
from mmrt.runtime.status_report import compute_of
from mmrt.shm.run_directory import RunDirectory

FACTS = ModelFacts(kv_page_bytes=16 * 512, embedding_row_bytes=128, max_context=1000)


def test_on_cuda_the_pools_of_the_model_leave_shared_memory() -> None:
    host = plan_layout(RuntimeConfig(), FACTS, "float32")
    device = plan_layout(RuntimeConfig(model=ModelSection(device="cuda:1")), FACTS, "float32")
    assert [name for name, pool in device.pools.items() if pool.on_device] == ["embedding", "kv"]
    assert not any(pool.on_device for pool in host.pools.values())
    moved = host.pools["embedding"].num_bytes + host.pools["kv"].num_bytes
    assert moved > 0 and device.num_bytes == host.num_bytes - moved
    assert device.plan_slot_bytes == host.plan_slot_bytes


def test_status_says_what_the_model_is_computed_on(run: RunDirectory) -> None:
    assert compute_of(run) is None
    config = RuntimeConfig(model=ModelSection(device="cuda:1"), memory=MemorySection(kv_dtype="int8"))
    write_layout(run.path, plan_layout(RuntimeConfig(), FACTS, "float32"))
    assert compute_of(run) == ComputeReport("cpu", "float32", "float32")
    write_layout(run.path, msgspec.structs.replace(plan_layout(config, FACTS, "bfloat16"), sharing="MPS"))
    assert compute_of(run) == ComputeReport("cuda:1", "bfloat16", "int8", "MPS")


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "CUDA", "cpu:0", ""])
def test_other_devices_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.device = \"{name}\""):
        parse_config(f'[model]\ndevice = "{name}"')
