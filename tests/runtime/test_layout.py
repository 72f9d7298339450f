"""How memory is divided between the host and a device."""

import pytest

from mmrt.runtime.config import ModelSection, RuntimeConfig, parse_config
from mmrt.runtime.errors import ConfigError
from mmrt.runtime.layout import ModelFacts, plan_layout

FACTS = ModelFacts(kv_bytes_per_token=512, embedding_row_bytes=128, max_context=1000)


def test_on_cuda_the_pools_of_the_model_leave_shared_memory() -> None:
    host = plan_layout(RuntimeConfig(), FACTS, "float32")
    device = plan_layout(RuntimeConfig(model=ModelSection(device="cuda:1")), FACTS, "float32")
    assert [name for name, pool in device.pools.items() if pool.on_device] == ["embedding", "kv"]
    assert not any(pool.on_device for pool in host.pools.values())
    moved = host.pools["embedding"].num_bytes + host.pools["kv"].num_bytes
    assert moved > 0 and device.num_bytes == host.num_bytes - moved
    assert device.plan_slot_bytes == host.plan_slot_bytes


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "CUDA", "cpu:0", ""])
def test_other_devices_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.device = \"{name}\""):
        parse_config(f'[model]\ndevice = "{name}"')
