"""How memory is divided between the host and a device."""

from pathlib import Path

import pytest

from mmrt.runtime.config import MemorySection, ModelSection, RuntimeConfig, parse_config, to_data
from mmrt.runtime.errors import ConfigError
from mmrt.runtime.layout import ModelFacts, plan_layout, write_layout
from mmrt.runtime.report import ComputeReport
from mmrt.runtime.status_report import compute_of
from mmrt.shm.run_directory import RunDirectory

FACTS = ModelFacts(kv_bytes_per_token=512, embedding_row_bytes=128, max_context=1000)


def test_on_cuda_the_pools_of_the_model_leave_shared_memory() -> None:
    host = plan_layout(RuntimeConfig(), FACTS, "float32")
    device = plan_layout(RuntimeConfig(model=ModelSection(device="cuda:1")), FACTS, "float32")
    assert [name for name, pool in device.pools.items() if pool.on_device] == ["embedding", "kv"]
    assert not any(pool.on_device for pool in host.pools.values())
    moved = host.pools["embedding"].num_bytes + host.pools["kv"].num_bytes
    assert moved > 0 and device.num_bytes == host.num_bytes - moved
    assert device.plan_slot_bytes == host.plan_slot_bytes


def test_status_says_what_computes_and_how_a_device_is_shared(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compute_of(run) is None
    config = RuntimeConfig(model=ModelSection(device="cuda:1"), memory=MemorySection(kv_dtype="int8"))
    for name, chosen, found in (
        ("host", RuntimeConfig(), ComputeReport("cpu", "float32", "float32")),
        ("device", config, ComputeReport("cuda:1", "bfloat16", "int8", "time slices")),
    ):
        with RunDirectory.create(tmp_path / name, {"config": to_data(chosen)}) as place:
            write_layout(place.path, plan_layout(chosen, FACTS, found.dtype))
            monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
            assert compute_of(place) == found
            (tmp_path / "control").touch()
            shared = compute_of(place)
            (tmp_path / "control").unlink()
            assert shared is not None and shared.sharing == ("MPS" if name == "device" else "")


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "CUDA", "cpu:0", ""])
def test_other_devices_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.device = \"{name}\""):
        parse_config(f'[model]\ndevice = "{name}"')
