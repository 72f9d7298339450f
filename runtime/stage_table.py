"""The stages of a run: one record for each, the lists and orders derived from the records, and the actors of a layout.

Every process of a run reads it. A new stage is one more record: nothing else lists stages.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NewType

import msgspec

from .errors import ConfigError

MAX_INSTANCES = 8  # of a stage
_NUMBER = re.compile(f"[1-{MAX_INSTANCES - 1}]")
_PART = re.compile(r"([1-9][0-9]{0,2})?([A-Z]+)(?:@([a-z0-9:*]+))?")


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage: its actor, and how that actor is configured, started and stopped."""

    name: str  # also the actor's
    module: str  # below mmrt.actors; has ``main``
    stop_rank: int  # a run stops the lowest first: producers before the consumers that they write to
    restart_rank: int  # a rolling restart begins with the lowest: receivers of a new message before its senders
    letter: str = ""  # in layouts (TI1)
    has_device: bool = False  # it computes the model, on a device, and may share a process with others that do; layouts have to name it
    inputs: tuple[str, ...] = ()  # pools and rings that it reads
    output: str = ""  # the pool or ring that it fills
    takes_plans: bool = False  # the controller gives it plans
    loop: Literal["plain", "asyncio"] = "plain"
    imports_torch: bool = False  # it computes with torch: its threads and niceness can be configured
    builds_towers: bool = False  # it imports the families' towers, by their names
    core_share: float = 0.0  # of the cores, for its threads unless configured; at least one thread
    nice: int = 0  # unless configured; decode has priority
    step_limit_s: float = (
        0.0  # of one step, until the watchdog kills it; actors that read media also get the time of an item. 0: no long steps
    )
    listens: bool = False  # clients connect to it: it inherits their sockets and drains before it ends
    is_essential: bool = False  # the run ends with it: its data cannot be recovered
    for_media: bool = False  # text is served without it

    @property
    def can_scale(self) -> bool:
        """Return whether their number can change in a live run."""
        return bool(self.letter) and not self.listens

    @property
    def max_count(self) -> int:
        """How many actors of it a layout can have."""
        return MAX_INSTANCES if self.letter else 1


# The order gives the numbers of a run's actors in shared memory.
# fmt: off
_RECORDS = (
    Stage(name="memory", module="memory", stop_rank=3, restart_rank=0, is_essential=True, imports_torch=True),
    Stage(name="controller", module="controller.serve", stop_rank=2, restart_rank=2, is_essential=True, loop="asyncio"),
    Stage(name="gateway", letter="G", module="gateway.serve", stop_rank=0, restart_rank=3, listens=True, loop="asyncio",
          inputs=("deltas",), output="media"),
    Stage(name="video", letter="V", module="video.worker", stop_rank=1, restart_rank=1, takes_plans=True, imports_torch=True,
          inputs=("media",), output="patch", core_share=0.25, nice=4, step_limit_s=30.0, for_media=True),
    Stage(name="encoder", letter="E", has_device=True, module="encoder", stop_rank=1, restart_rank=1, takes_plans=True,
          imports_torch=True, builds_towers=True, inputs=("patch",), output="embedding", core_share=0.5, nice=2,
          step_limit_s=300.0, for_media=True),
    Stage(name="prefill", letter="P", has_device=True, module="prefill", stop_rank=1, restart_rank=1, takes_plans=True,
          imports_torch=True, inputs=("embedding",), output="kv", core_share=0.5, nice=2, step_limit_s=300.0),
    Stage(name="decode", letter="D", has_device=True, module="decode.loop", stop_rank=1, restart_rank=1, imports_torch=True,
          inputs=("kv",), core_share=0.5, step_limit_s=120.0),
    Stage(name="detokenizer", module="detokenizer", stop_rank=1, restart_rank=1, output="deltas"),
)
# fmt: on
STAGES: Mapping[str, Stage] = {stage.name: stage for stage in _RECORDS}
SUPERVISOR = "supervisor"  # has a flight recorder, as every actor has


InstanceId = NewType("InstanceId", str)
"""The name of an actor: "encoder" for the first of its stage, usually the only one, then "encoder.1" and so on.

It names the actor wherever there is one: its role lock, status row, flight recorder, log, metrics, messages and commands.
"""


def instance_id(stage: str, number: int) -> InstanceId:
    """Return the name of the stage's actor with this number, from 0."""
    return InstanceId(f"{stage}.{number}" if number else stage)


def parse_instance(text: str) -> InstanceId:
    """Check the name of an actor. Raises ConfigError if no actor can have it."""
    stage, dot, number = text.partition(".")
    if stage not in STAGES:
        raise ConfigError(f"no actor {text!r}; there are {', '.join(STAGES)}")
    if dot and STAGES[stage].max_count == 1:
        raise ConfigError(f"no actor {text!r}: a run has one {stage}")
    if dot and not _NUMBER.fullmatch(number):
        raise ConfigError(f"no actor {text!r}: {number!r} is no number from 1 to {MAX_INSTANCES - 1}")
    return InstanceId(text)


@lru_cache(256)
def stage_of(actor: str) -> str:
    """Return the stage of an actor, by its name."""
    return actor.partition(".")[0]


def number_of(actor: str) -> int:
    """Return the number of an actor within its stage, from 0."""
    return int(actor.partition(".")[2] or 0)


ACTORS = tuple(map(InstanceId, STAGES))  # of a run with one of each
ALL_ACTORS = tuple(instance_id(name, number) for name, stage in STAGES.items() for number in range(stage.max_count))  # of any run


def workers(stages: Mapping[str, Stage] = STAGES) -> tuple[str, ...]:
    """Return the stages that are given plans."""
    return tuple(name for name, stage in stages.items() if stage.takes_plans)


def torch_actors(stages: Mapping[str, Stage] = STAGES) -> tuple[str, ...]:
    """Return the stages that compute with torch."""
    return tuple(name for name, stage in stages.items() if stage.imports_torch)


def replaceable(stages: Mapping[str, Stage] = STAGES) -> tuple[str, ...]:
    """Return the stages without which a run goes on, refusing the requests that need them."""
    return tuple(name for name, stage in stages.items() if not stage.is_essential and not stage.listens)


WORKERS = workers()


def restart_order(actors: Iterable[InstanceId]) -> list[InstanceId]:
    """Return the actors in the order of a rolling restart."""
    return sorted(actors, key=lambda actor: STAGES[stage_of(actor)].restart_rank)


def starts_after(name: str, stages: Mapping[str, Stage] = STAGES) -> list[str]:
    """Return the stages to start before this one, for a service manager that stops services in reverse order of their start.

    Stages that are given plans delay no other stage.
    """
    rank = stages[name].stop_rank
    return [other for other, stage in stages.items() if stage.stop_rank > rank and not stage.takes_plans]


def device_pools(stages: Mapping[str, Stage] = STAGES) -> frozenset[str]:
    """Return the pools on the model's device."""
    return frozenset(stage.output for stage in stages.values() if stage.has_device and stage.takes_plans)


class ProcessSpec(msgspec.Struct, frozen=True):
    """``count`` processes of these stages, on ``device`` ("": where the model is; "*": on each device in turn)."""

    stages: tuple[str, ...]
    count: int = 1
    device: str = ""


def parse_layout(text: str, stages: Mapping[str, Stage] = STAGES) -> tuple[ProcessSpec, ...]:
    """Parse a layout into processes, such as "E+PD": ``[count]STAGES[@device]``, joined by "+". Raises ConfigError."""
    names = {stage.letter: name for name, stage in stages.items() if stage.letter}
    processes = []
    for part in text.split("+"):
        found = _PART.fullmatch(part)
        if found is None:
            raise ConfigError(f"{part!r} is not [COUNT]STAGES[@DEVICE], such as EP")
        count, letters, device = found.groups()
        if unknown := [letter for letter in letters if letter not in names]:
            raise ConfigError(f"{part!r}: no stage {unknown[0]!r}, there are {', '.join(names)}")
        together = tuple(name for letter, name in names.items() for _ in range(letters.count(letter)))  # in the order of the stages
        processes.append(ProcessSpec(together, int(count or 1), device or ""))
    return tuple(processes)


DEFAULT_LAYOUT = "+".join(stage.letter for stage in STAGES.values() if stage.has_device)  # each in a process of its own


def spread_layout(text: str, devices: Sequence[str] = ()) -> str:
    """Return the layout with the device of each process that has one by name, where a run has ``devices``: "2EPD@*" on devices 0 and 1
    is "EPD@0+EPD@1". Of processes on "*" the first is on the first device, the next on the next, and so on in turn; processes without a
    device are on the first. Without ``devices`` it stays as it is. Raises ConfigError if it is malformed."""
    if not devices:
        return text
    spread = []
    for part in parse_layout(text):
        if not any(STAGES[stage].has_device for stage in part.stages):
            spread.append(part)
            continue
        for number in range(part.count):
            device = devices[number % len(devices)] if part.device == "*" else part.device or devices[0]
            spread.append(ProcessSpec(part.stages, 1, device))
    return format_layout(spread)


def check_layout(text: str, devices: Sequence[str] = ()) -> None:
    """Check a layout, as ``spread_layout`` returns it. Raises ConfigError if it is malformed or not one that a run with these devices
    can have."""
    counts = {name: 0 for name, stage in STAGES.items() if stage.letter}
    for process in parse_layout(text):
        for stage in process.stages:
            if not STAGES[stage].has_device and (len(process.stages) > 1 or process.device):
                raise ConfigError(f"{text!r}: {stage} ({STAGES[stage].letter}) has a process of its own, on no device")
        if process.device and process.device not in devices:
            there = f"there are {', '.join(devices)}" if devices else "there are none ([[devices]])"
            raise ConfigError(f"{' and '.join(process.stages)} on {process.device!r}: no such device, {there}")
        for stage in process.stages:
            counts[stage] += process.count
            if process.stages.count(stage) > 1:
                raise ConfigError(f"{text!r} has a process with {stage} twice")
    for stage, count in counts.items():
        if not count and STAGES[stage].has_device:
            raise ConfigError(f"{text!r} has no {stage} ({STAGES[stage].letter})")
        if count > (limit := STAGES[stage].max_count):
            raise ConfigError(f"{text!r} has {count} of {stage}, a run has at most {limit}")


def format_layout(processes: Iterable[ProcessSpec]) -> str:
    """Return the text of a layout; equal processes in a row are counted together. One that every layout has is left out."""
    parts: list[ProcessSpec] = []
    for process in _without_sole(processes):
        if parts and (parts[-1].stages, parts[-1].device) == (process.stages, process.device):
            process = ProcessSpec(process.stages, parts.pop().count + process.count, process.device)
        parts.append(process)
    letters = ["".join(STAGES[stage].letter for stage in part.stages) + (part.device and f"@{part.device}") for part in parts]
    return "+".join(f"{part.count if part.count > 1 else ''}{text}" for part, text in zip(parts, letters, strict=True))


def _without_sole(processes: Iterable[ProcessSpec]) -> list[ProcessSpec]:
    """Return the processes but that of a stage which layouts need not name, if it is the only one."""
    found = list(processes)
    sole = {stages for stages in _unnamed() if sum(process.count for process in found if process.stages == stages) == 1}
    return [process for process in found if process.stages not in sole]


def _unnamed() -> list[tuple[str, ...]]:
    """Return the stages of each process that every layout has, though it need not name it."""
    return [(name,) for name, stage in STAGES.items() if stage.letter and not stage.has_device]


def expand_layout(layout: str) -> list[ProcessSpec]:
    """Return each process of a layout, also those that it need not name."""
    return [process for _, process in _numbered(layout)]


def scale_layout(layout: str, stage: str, count: int) -> str:
    """Return the layout with so many actors of a stage: more or fewer processes of that stage alone, the last ones, on the device of
    the last. The names of all others stay. Raises ConfigError if there is no such layout."""
    scalable = [name for name, record in STAGES.items() if record.can_scale]
    if stage not in scalable:
        raise ConfigError(f"{stage}={count}: no stage {stage!r} to scale, there are {', '.join(scalable)}")
    if not 1 <= count <= STAGES[stage].max_count:
        raise ConfigError(f"{stage}={count}: a run has 1 to {STAGES[stage].max_count} of {stage}")
    processes = expand_layout(layout)
    while len(having := [place for place, process in enumerate(processes) if stage in process.stages]) != count:
        if len(having) < count:
            processes.insert(having[-1] + 1, ProcessSpec((stage,), 1, processes[having[-1]].device))
            continue
        last = processes.pop(having[-1])
        if len(last.stages) > 1:
            name, others = instance_id(stage, len(having) - 1), [other for other in last.stages if other != stage]
            raise ConfigError(f"{stage}={count}: {name} shares its process with {' and '.join(others)}, which would go as well")
    return format_layout(processes)


def join_layouts(first: str, second: str) -> str:
    """Return the layout with the processes of both. The names of those of the first stay."""
    return format_layout(dict([*_numbered(first), *_numbered(second)]).values())


def _numbered(layout: str) -> list[tuple[tuple[InstanceId, ...], ProcessSpec]]:
    """Return each process of a layout, in its order, with the names of its actors; last those that it need not name."""
    numbers, found, parts = dict.fromkeys(STAGES, 0), [], parse_layout(layout)
    named = {part.stages for part in parts}
    for part in (*parts, *(ProcessSpec(stages) for stages in _unnamed() if stages not in named)):
        for _ in range(part.count):
            found.append((tuple(instance_id(stage, numbers[stage]) for stage in part.stages), ProcessSpec(part.stages, 1, part.device)))
            for stage in part.stages:
                numbers[stage] += 1
    return found


def processes_of(layout: str) -> dict[InstanceId, tuple[InstanceId, ...]]:
    """Return the actors of each process of a run, by the name of the process: that of the last of them."""
    found: dict[InstanceId, tuple[InstanceId, ...]] = {actor: (actor,) for actor in ACTORS if not STAGES[stage_of(actor)].letter}
    found |= {together[-1]: together for together, _ in _numbered(layout)}
    order = list(STAGES)
    return dict(sorted(found.items(), key=lambda item: (order.index(stage_of(item[1][0])), item[1][0])))


def devices_of(layout: str) -> dict[InstanceId, str]:
    """Return the device of each actor that has one in the layout."""
    return {actor: process.device for together, process in _numbered(layout) for actor in together if process.device}


def actors_of(layout: str) -> tuple[InstanceId, ...]:
    """Return all actors of a run, in the order of the stages. Their places are their numbers in shared memory."""
    order = list(STAGES)
    actors = [actor for together in processes_of(layout).values() for actor in together]
    return tuple(sorted(actors, key=lambda actor: (order.index(stage_of(actor)), actor)))


def process_in(layout: str, actor: str) -> str:
    """Return the name of the process that the actor runs in."""
    return next((process for process, together in processes_of(layout).items() if actor in together), actor)
