"""The processors that a run may use, and their division among its stages where the configuration leaves it open."""

import math
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..config.runtime_config import RuntimeConfig, numbers_in
from ..config.sections import SharingSection
from ..config.toml_text import show
from ..errors import ConfigError
from ..stage_table import STAGES, InstanceId, stage_of
from .control_groups import groups_above


class Processors(NamedTuple):
    """``num_cores``: cores, not their hardware threads, that this process may use. ``num_local``: the most of them on one NUMA node."""

    num_cores: int
    num_local: int


def read_processors(
    usable: Collection[int] | None = None,
    system: Path = Path("/sys/devices/system"),
    proc: Path = Path("/proc"),
    cgroups: Path = Path("/sys/fs/cgroup"),
) -> Processors:
    """Read them from Linux. ``usable``: numbers of the processors that this process may run on; by default, its affinity."""
    usable = os.sched_getaffinity(0) if usable is None else usable
    cores = {cpu: _text(system / f"cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in usable}
    nodes = [numbers_in(_text(path)) for path in system.glob("node/node[0-9]*/cpulist")]
    local = [len({cores[cpu] for cpu in node & cores.keys()}) for node in nodes]
    num_cores, quota = len({*cores.values()}), _quota(proc, cgroups)
    if quota is not None:
        num_cores = max(1, min(num_cores, math.floor(quota)))
    return Processors(num_cores, min(num_cores, max([*local, 0]) or num_cores))


def check_processors(config: RuntimeConfig, usable: Collection[int] | None = None) -> None:
    """Raise ConfigError if a device has processors that this process may not use."""
    usable = os.sched_getaffinity(0) if usable is None else usable
    for device in config.devices:
        if missing := sorted(numbers_in(device.cpus).difference(usable)):
            raise ConfigError(f"device {device.name!r}: processor {missing[0]} of cpus = {show(device.cpus)} cannot be used here")


def keep_to(config: RuntimeConfig, actor: InstanceId) -> None:
    """Keep this process to the processors of the actor's device: all threads that start from now on. Raises ConfigError."""
    number = config.actor_devices.get(actor)
    if number is not None and (cpus := numbers_in(config.devices[number].cpus)):
        check_processors(config)
        os.sched_setaffinity(0, cpus)


def plan_threads(config: RuntimeConfig, processors: Processors) -> RuntimeConfig:
    """Return the configuration with a number of threads for each stage that computes, and its niceness where that changes.

    Where none is configured, a stage gets its share of one node's cores, divided among its actors. The shares of decode and of what
    works beside it add up to all of them: encoder and prefill take turns while decode runs. With ``actors.turns`` each actor of these
    gets all, or its device's part of them, and decode's niceness unless another one is configured: decode waits for them, so what they
    wait for, it does as well.

    A stage whose threads are planned may have more while others do not compute (``divide``): up to all of the node.
    """
    changes = {}
    for name, stage in STAGES.items():
        section = config.actor(name)
        share, num_actors = stage.core_share, sum(stage_of(actor) == name for actor in config.instances)
        if stage.has_device and config.actors.turns != "off":
            share, num_actors = 1.0, config.num_kv_pools
            if section.nice == stage.nice:
                changes[name] = section = msgspec.structs.replace(section, nice=config.actor("decode").nice)
        if stage.imports_torch and not section.threads:
            threads = max(1, int(processors.num_local * share) // num_actors)
            if isinstance(section, SharingSection):
                most = section.most_threads or max(threads, processors.num_local // config.num_kv_pools)
                section = msgspec.structs.replace(section, most_threads=most)
                threads = min(threads, most)
            changes[name] = msgspec.structs.replace(section, threads=threads)
    return msgspec.structs.replace(config, actors=msgspec.structs.replace(config.actors, **changes))


def num_shared_cores(config: RuntimeConfig, actor: InstanceId) -> int:
    """Return the number of cores that the actors on the device of this one share. For its process, once it is kept to them."""
    device, num_local = config.actor_devices.get(actor), read_processors().num_local
    return num_local if device is None or config.devices[device].cpus else max(1, num_local // config.num_kv_pools)


class Claim(NamedTuple):
    """What an actor that computes wants of the cores: ``share``, and up to ``most`` of them where others leave some idle."""

    share: int
    most: int


def divide(num_cores: int, claims: Sequence[Claim]) -> list[int]:
    """Return how many threads each of those that compute now has: its share, and of the cores that are left an equal part, where it may
    have more; the first get what cannot be divided. So together they have no more than there are cores, unless their shares are."""
    threads = [claim.share for claim in claims]
    idle = num_cores - sum(threads)
    while idle > 0 and (open_ := [index for index, claim in enumerate(claims) if threads[index] < claim.most]):
        for index in open_[:idle]:
            threads[index] += 1
        idle -= len(open_)
    return threads


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _quota(proc: Path, cgroups: Path) -> float | None:
    """Return the processors' time per time that the strictest control group allows; None without a limit."""
    quotas = []
    for version, directory in groups_above("cpu", proc, cgroups):
        if version == 2:
            words = _text(directory / "cpu.max").split()
        else:
            words = [_text(directory / "cpu.cfs_quota_us"), _text(directory / "cpu.cfs_period_us")]
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):  # else "max", -1, or not here
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)
