"""The memory actor's building: whatever a killed predecessor left, the layout is published last and names whole segments."""

import os
import re
import select
import threading
from pathlib import Path

import msgspec
import pytest
import torch

from mmrt.actors import memory
from mmrt.actors.host.actor import Ending
from mmrt.actors.host.shared_tensors import WEIGHTS_SEGMENT, SharedTensors
from mmrt.models.architecture import RopeConfig
from mmrt.models.config import gpu_fault, load_model_config, pipeline_fault
from mmrt.models.make.checkpoint import make_checkpoint
from mmrt.runtime.config.runtime_config import RuntimeConfig, parse_config
from mmrt.runtime.config.sections import MemorySection, ModelSection
from mmrt.runtime.errors import ConfigError, UserError
from mmrt.runtime.process.memory_layout import DEVICE_SOCKET, SPARE_SOCKET, read_layout
from mmrt.runtime.process.notify import Notifier
from mmrt.runtime.stage_table import ACTORS
from mmrt.shm.descriptors import Descriptor, DescriptorServer
from mmrt.shm.errors import SpaceError
from mmrt.shm.pool import PagePool
from mmrt.shm.run_directory import RunDirectory
from mmrt.shm.sequence_table import SequenceTable
from mmrt.shm.status import ActorTable

SMALL = RuntimeConfig(memory=MemorySection(max_sequences=2, kv_tokens=512, media_mib=1, patch_mib=1, embedding_tokens=64))


class Builder:
    """What ``build`` needs of its process."""

    name = "memory"

    def __init__(self, run: RunDirectory, checkpoint: Path, config: RuntimeConfig = SMALL) -> None:
        self.run = run
        self.config = config
        self.model_path = checkpoint
        self.model = load_model_config(checkpoint)
        self.notifier = Notifier(None, "memory")
        self.ending = False


def build(builder: Builder) -> None:
    memory.build(builder)  # type: ignore[arg-type]


def check(run: RunDirectory, builder: Builder) -> None:
    layout = read_layout(run.path)
    assert layout is not None
    for name, pool in layout.pools.items():
        found = PagePool.attach(run, name)
        assert (found.num_pages, found.page_bytes) == (pool.num_pages, pool.page_bytes)
        assert not found.generations.any() and not found.data[0].any()
    table = SequenceTable.attach(run)
    assert (table.num_rows, table.max_context) == (2, layout.max_context) and not table.generation.any()
    assert ActorTable.attach(run).actors == ACTORS
    weights = SharedTensors(builder).weights()  # type: ignore[arg-type]
    assert weights["embed"].any() and weights["norm"].any()


def test_build(run: RunDirectory, checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    builder = Builder(run, checkpoint)
    build(builder)
    check(run, builder)
    assert re.search(r"\d+ of \d+ MB for weights are in huge pages", caplog.text)


@pytest.mark.parametrize("step", ["make_tables", "load_weights", "write_layout"])
@pytest.mark.parametrize("before", [True, False])
def test_what_a_killed_predecessor_left_is_made_anew(
    run: RunDirectory, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, step: str, before: bool
) -> None:
    class Killed(BaseException):
        pass

    original = getattr(memory, step)

    def killed(*arguments: object) -> None:
        if not before and step != "write_layout":
            original(*arguments)
            PagePool.attach(run, "kv", "grant").generations[:] = 9
        raise Killed

    monkeypatch.setattr(memory, step, killed)
    with pytest.raises(Killed):
        build(Builder(run, checkpoint))
    assert read_layout(run.path) is None
    monkeypatch.undo()
    builder = Builder(run, checkpoint)
    build(builder)
    check(run, builder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"window": 48}, ""),
        ({"scale": 1.0}, ""),
        ({"owner": 0}, ""),
        ({"sees_pictures": True}, ""),
        ({"head_dim": 512, "rope": 1}, ""),
        ({"head_dim": 96}, "heads of 96 values, not 16, 32"),
        ({"has_joint_norms": True}, "norms of all query heads together"),
        ({"rope": 2}, "heads of 32 values of which 12 turn"),
    ],
)
def test_a_model_without_kernels_for_a_gpu_is_refused_there(
    run: RunDirectory, checkpoint: Path, change: dict[str, float], said: str
) -> None:
    builder = Builder(run, checkpoint, msgspec.structs.replace(SMALL, model=ModelSection(device="cuda:0")))
    assert gpu_fault(builder.model) == ""
    first, last = builder.model.language.layers[0], builder.model.language.layers[-1]
    changed = msgspec.structs.replace(last, mixer=msgspec.structs.replace(last.mixer, **change))
    ropes = (*builder.model.language.ropes, RopeConfig(theta=1e4), RopeConfig(theta=1e4, axes=(0,) * 6))
    language = msgspec.structs.replace(builder.model.language, layers=(first, changed), ropes=ropes)
    builder.model = msgspec.structs.replace(builder.model, language=language)
    if not said:
        assert gpu_fault(builder.model) == ""
        return
    with pytest.raises(ConfigError, match=f"model.device is 'cuda:0', but the model has .*{said}.*: it runs on a CPU only"):
        build(builder)


def test_recurrent_states_are_refused_on_a_gpu(run: RunDirectory, tmp_path: Path) -> None:
    make_checkpoint("tiny", tmp_path / "made", "qwen3_5")
    builder = Builder(run, tmp_path / "made", msgspec.structs.replace(SMALL, model=ModelSection(device="cuda:0")))
    with pytest.raises(ConfigError, match="the model has recurrent states: it runs on a CPU only"):
        build(builder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"window": 48}, r"a window \(48 tokens\)"),
        ({"owner": 0}, "share keys and values"),
    ],
)
def test_a_model_whose_layers_cannot_be_divided_is_refused_in_a_pipeline(
    run: RunDirectory, checkpoint: Path, change: dict[str, int], said: str
) -> None:
    settings = '[actors]\nlayout = "E+2P+D"\n[scheduling]\nprefill_pipeline = true\n[memory]\nkv_tokens = 4096'
    builder = Builder(run, checkpoint, parse_config(settings))
    assert pipeline_fault(builder.model) == ""
    first, last = builder.model.language.layers[0], builder.model.language.layers[-1]
    changed = msgspec.structs.replace(last, mixer=msgspec.structs.replace(last.mixer, **change))
    language = msgspec.structs.replace(builder.model.language, layers=(first, changed))
    builder.model = msgspec.structs.replace(builder.model, language=language)
    with pytest.raises(ConfigError, match=f"scheduling.prefill_pipeline: the model has .*{said}.*leave it out"):
        build(builder)


def test_without_room_it_says_what_is_needed(run: RunDirectory, checkpoint: Path) -> None:
    builder = Builder(run, checkpoint, msgspec.structs.replace(SMALL, memory=MemorySection(kv_tokens=1 << 40)))
    with pytest.raises(SpaceError, match="available"):
        build(builder)
    assert read_layout(run.path) is None


def test_told_to_end_it_stops_loading(run: RunDirectory, checkpoint: Path) -> None:
    builder = Builder(run, checkpoint)
    builder.ending = True
    with pytest.raises(Ending):
        build(builder)
    assert read_layout(run.path) is None
    assert not run.segment_path(WEIGHTS_SEGMENT).exists()


@pytest.mark.parametrize("name", [DEVICE_SOCKET, SPARE_SOCKET])
def test_a_successor_takes_over_what_lies_on_the_device(run: RunDirectory, checkpoint: Path, name: str) -> None:
    """From the generation before, or, when that is dead, from the supervisor."""
    builder = Builder(run, checkpoint, msgspec.structs.replace(SMALL, model=ModelSection(device="cuda")))
    with pytest.raises(UserError, match="memory died; its weights and pages on cuda"):
        memory.take_over(builder)  # type: ignore[arg-type]
    fd = os.memfd_create("kv")
    DescriptorServer(run.path / DEVICE_SOCKET, {"kv": Descriptor(fd, 9)}).close()  # that of one that is dead
    with DescriptorServer(run.path / name, {"kv": Descriptor(fd, 9)}) as server:
        taken: list[dict[str, Descriptor]] = []
        standby = threading.Thread(target=lambda: taken.append(memory.take_over(builder)))  # type: ignore[arg-type]
        standby.start()
        assert select.select([server.fd], [], [], 20)[0] and server.serve() == 1
        standby.join()
    ((pool, descriptor),) = taken[0].items()
    assert (pool, descriptor.num_bytes) == ("kv", 9) and os.path.sameopenfile(fd, descriptor.fd)
    os.close(fd)
    os.close(descriptor.fd)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_nothing_is_made(run: RunDirectory, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        build(Builder(run, checkpoint, msgspec.structs.replace(SMALL, model=ModelSection(device="cuda"))))
    assert not list(run.path.glob("pool-*")) and read_layout(run.path) is None
