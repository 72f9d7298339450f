"""The stages of a run: one record for each, and the lists and orders derived from the records.

Every process of a run reads it. A new stage is one more record: nothing else lists stages.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Literal, Self

import msgspec

from .errors import ConfigError


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage: its actor, and how that actor is configured, started and stopped."""

    name: str  # also the actor's
    module: str  # below mmrt.actors; has ``main``
    stop_rank: int  # a run stops the lowest first: producers before the consumers that they write to
    restart_rank: int  # a rolling restart begins with the lowest: receivers of a new message before its senders
    letter: str = ""  # in layouts (TI1): it computes the model, on the model's device, and may share a process with others that do
    inputs: tuple[str, ...] = ()  # pools and rings that it reads
    output: str = ""  # the pool or ring that it fills
    takes_plans: bool = False  # the controller gives it plans
    loop: Literal["plain", "asyncio"] = "plain"
    imports: Literal["base", "torch", "towers"] = "base"  # what the zygote must have imported before it can be forked
    threads: int = 1  # unless configured
    nice: int = 0  # unless configured; decode has priority
    cpu_weight: int = 100  # under systemd, whose default is 100: between services it counts instead of niceness
    step_limit_s: float = (
        0.0  # of one step, until the watchdog kills it; actors that read media also get the time of an item. 0: no long steps
    )
    listens: bool = False  # clients connect to it: it inherits their sockets and drains before it ends
    is_essential: bool = False  # the run ends with it: its data cannot be recovered

    @property
    def imports_torch(self) -> bool:
        """True if the stage computes with torch. Its threads and niceness can be configured."""
        return self.imports != "base"


# The order gives the actors' numbers in shared memory.
# fmt: off
_RECORDS = (
    Stage(name="memory", module="memory", stop_rank=3, restart_rank=0, is_essential=True, imports="torch"),
    Stage(name="controller", module="controller.serve", stop_rank=2, restart_rank=2, is_essential=True, loop="asyncio",
          cpu_weight=1000),
    Stage(name="gateway", module="gateway.serve", stop_rank=0, restart_rank=3, listens=True, loop="asyncio",
          inputs=("deltas",), output="media", cpu_weight=500),
    Stage(name="video", module="video.worker", stop_rank=1, restart_rank=1, takes_plans=True, imports="torch",
          inputs=("media",), output="patch", nice=8, cpu_weight=15, step_limit_s=30.0),
    Stage(name="encoder", letter="E", module="encoder", stop_rank=1, restart_rank=1, takes_plans=True, imports="towers",
          inputs=("patch",), output="embedding", nice=5, cpu_weight=30, step_limit_s=300.0),
    Stage(name="prefill", letter="P", module="prefill", stop_rank=1, restart_rank=1, takes_plans=True, imports="torch",
          inputs=("embedding",), output="kv", nice=5, step_limit_s=300.0),
    Stage(name="decode", letter="D", module="decode.loop", stop_rank=1, restart_rank=1, imports="torch",
          inputs=("kv",), cpu_weight=1000, step_limit_s=120.0),
    Stage(name="detokenizer", module="detokenizer", stop_rank=1, restart_rank=1,
          output="deltas", cpu_weight=500),
)
# fmt: on
STAGES: Mapping[str, Stage] = {stage.name: stage for stage in _RECORDS}
ACTORS = tuple(STAGES)
SUPERVISOR = "supervisor"
RECORDERS = (*ACTORS, SUPERVISOR)  # owners of flight recorders


def workers(stages: Mapping[str, Stage] = STAGES) -> tuple[str, ...]:
    """Return the stages that are given plans."""
    return tuple(name for name, stage in stages.items() if stage.takes_plans)


def torch_actors(stages: Mapping[str, Stage] = STAGES) -> tuple[str, ...]:
    """Return the stages that compute with torch."""
    return tuple(name for name, stage in stages.items() if stage.imports_torch)


WORKERS = workers()


def restart_order(stages: Mapping[str, Stage] = STAGES) -> list[str]:
    """Return all stages in the order of a rolling restart."""
    return sorted(stages, key=lambda name: stages[name].restart_rank)


def starts_after(name: str, stages: Mapping[str, Stage] = STAGES) -> list[str]:
    """Return the stages to start before this one, for a service manager that stops services in reverse order of their start.

    Stages that are given plans delay no other stage: text is served without them.
    """
    rank = stages[name].stop_rank
    return [other for other, stage in stages.items() if stage.stop_rank > rank and not stage.takes_plans]


def device_pools(stages: Mapping[str, Stage] = STAGES) -> frozenset[str]:
    """Return the pools on the model's device."""
    return frozenset(stage.output for stage in stages.values() if stage.letter and stage.takes_plans)


class InstanceId(msgspec.Struct, frozen=True):
    """One of the actors of a stage. The first, usually the only one, is named "encoder", the next "encoder.1" and so on."""

    stage: str
    index: int = 0

    def __str__(self) -> str:
        return f"{self.stage}.{self.index}" if self.index else self.stage

    @classmethod
    def parse(cls, text: str, stages: Mapping[str, Stage] = STAGES) -> Self:
        """Return the instance of this name, the inverse of ``str``. Raises ConfigError."""
        stage, dot, number = text.partition(".")
        if stage not in stages:
            raise ConfigError(f"{text!r}: no stage {stage!r}, there are {', '.join(stages)}")
        if dot and not _INDEX.fullmatch(number):
            raise ConfigError(f"{text!r}: {number!r} is no number from 1 to 999")
        return cls(stage, int(number or 0))


class ProcessSpec(msgspec.Struct, frozen=True):
    """``count`` processes of these stages, on ``device`` ("": where the model is)."""

    stages: tuple[str, ...]
    count: int = 1
    device: str = ""

    @property
    def name(self) -> str:
        """The process's name: that of the last of its stages."""
        return self.stages[-1]


_INDEX = re.compile("[1-9][0-9]{0,2}")
_PART = re.compile(r"([1-9][0-9]{0,2})?([A-Z]+)(?:@([a-z0-9:*]+))?")


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
        processes.append(ProcessSpec(tuple(names[letter] for letter in letters), int(count or 1), device or ""))
    return tuple(processes)


def _groupings(letters: str) -> Iterator[list[str]]:
    """Yield every way to divide the letters into groups that keep their order."""
    if not letters:
        yield []
        return
    first = letters[0]
    for groups in _groupings(letters[1:]):
        yield [first, *groups]
        for index, group in enumerate(groups):
            yield [first + group, *groups[:index], *groups[index + 1 :]]


def layouts(stages: Mapping[str, Stage] = STAGES) -> tuple[str, ...]:
    """Return the layouts that a run can have: every stage once, on the model's device, alone in its process or with others."""
    return tuple(map("+".join, _groupings("".join(stage.letter for stage in stages.values()))))


LAYOUTS = layouts()


def check_layout(text: str) -> None:
    """Check a layout. Raises ConfigError if it is malformed or not one that a run can have."""
    for process in parse_layout(text):
        if process.count > 1:
            raise ConfigError(f"{process.count} processes of {' and '.join(process.stages)}: a run has one of each stage")
        if process.device:
            raise ConfigError(f"{' and '.join(process.stages)} on {process.device!r}: model.device places all stages")
    if text not in LAYOUTS:
        raise ConfigError(f"expected one of {', '.join(map(repr, LAYOUTS))}")


def process_in(layout: str, actor: str) -> str:
    """Return the name of the process that the actor runs in."""
    return next((process.name for process in parse_layout(layout) if actor in process.stages), actor)
