"""Judge what ``mmrt doctor`` has found (pure): one check for each thing that a run needs, and what is missing for what."""

import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from ..runtime.process.host_room import HostRoom
from ..runtime.process.listening import MIN_OPEN_FILES

State = Literal["ok", "note", "warning", "failed"]
_GIB, _MIB = 1 << 30, 1 << 20
_USUAL_FILES = 1024  # each connection and each stage needs some
_CUDA = "cuda"  # the extra


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that the configured run would take, in bytes. ``weights_bytes``: 0 on a CUDA device."""

    model: str
    tables_bytes: int
    weights_bytes: int


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What was found on this machine. Texts that name a problem are empty where there is none."""

    system: str
    machine: str
    kernel: str
    python: str
    python_bounds: str
    requirements: Sequence[str]  # as the package's metadata has them
    installed: Mapping[str, str]  # version by name; a package that is not installed is not here
    import_problem: str
    config_problem: str
    need: Need | None  # None if the configuration or the model cannot be read
    device: str
    room: HostRoom
    place: str  # where the run's shared memory is
    place_problem: str
    is_tmpfs: bool
    run_endpoint: str  # of the run that is up here
    address: str
    address_problem: str
    open_files: int
    processor: str
    num_cores: int
    processor_flags: frozenset[str]
    has_bfloat16: bool
    choices: Mapping[str, str]  # of kernels that were tried on this machine: what was tried, and what was found
    gpus: Sequence[str]
    gpu_driver: str
    sandbox_problem: str
    namespace_problem: str
    logs: str
    logs_problem: str
    dead_runs: Mapping[str, int]  # bytes by name


class Check(msgspec.Struct, frozen=True):
    """``failed``: mmrt cannot run here. ``note``: nothing is wrong, and something is off that could be on."""

    name: str
    state: State
    text: str


def diagnose(facts: Facts) -> list[Check]:
    """Return all checks, in the order in which a start would meet them."""
    return [
        _system(facts),
        _python(facts),
        *_packages(facts),
        _imports(facts),
        _model(facts),
        *_memory(facts),
        _port(facts),
        _open_files(facts),
        _processor(facts),
        _choices(facts),
        _gpu(facts),
        _sandbox(facts),
        _logs(facts),
        *_dead_runs(facts),
    ]


def _system(facts: Facts) -> Check:
    text = f"{facts.system} {facts.kernel} on {facts.machine}"
    if facts.system != "Linux":
        return Check("system", "failed", f"{text}: mmrt needs Linux")
    if facts.machine != "x86_64":
        return Check("system", "warning", f"{text}: mmrt is tested on x86_64 only")
    return Check("system", "ok", text)


def _python(facts: Facts) -> Check:
    if facts.python_bounds and not SpecifierSet(facts.python_bounds).contains(facts.python, prereleases=True):
        return Check("python", "failed", f"{facts.python}, mmrt needs {facts.python_bounds}")
    return Check("python", "ok", facts.python)


def _packages(facts: Facts) -> Iterator[Check]:
    """Versions against bounds. The packages of the extra for GPUs count where the model is on one."""
    wrong = list(_wrong_packages(facts, extra=""))
    if facts.device != "cpu":
        wrong += _wrong_packages(facts, extra=_CUDA)
    if not facts.requirements:
        yield Check("packages", "warning", "mmrt is not installed (it runs from its source): versions cannot be compared with bounds")
    elif wrong:
        extra = "" if facts.device == "cpu" else f", with its extra {_CUDA}"
        yield Check("packages", "failed", f"{'; '.join(wrong)}: install mmrt anew{extra}")
    else:
        yield Check("packages", "ok", f"{', '.join(f'{name} {facts.installed[name]}' for name in ('torch', 'tokenizers'))} and others")


def _wrong_packages(facts: Facts, extra: str) -> Iterator[str]:
    for text in facts.requirements:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        if requirement.marker is None and extra:
            continue
        installed = facts.installed.get(requirement.name)
        if installed is None:
            yield f"{requirement.name} is missing ({requirement.specifier})"
        elif not requirement.specifier.contains(installed, prereleases=True):
            yield f"{requirement.name} is {installed}, not {requirement.specifier}"


def _imports(facts: Facts) -> Check:
    if facts.import_problem:
        return Check("imports", "failed", facts.import_problem)
    return Check("imports", "ok", "all packages can be loaded")


def _model(facts: Facts) -> Check:
    if facts.config_problem:
        return Check("configuration", "failed", facts.config_problem)
    assert facts.need is not None
    return Check("configuration", "ok", f"{facts.need.model} on {facts.device}")


def _memory(facts: Facts) -> Iterator[Check]:
    """Memory of the machine, and of the file system of the run."""
    memory, shared = facts.room
    if facts.run_endpoint:
        yield Check("run", "ok", f"one is up at {facts.run_endpoint} (mmrt status); the memory below is left beside it")
    need = facts.need if not facts.run_endpoint else None
    yield _room("memory", memory, need, f"{_size(memory)} available", "close programs, or serve a smaller model")
    where = f"{_size(shared)} free in {facts.place}"
    if facts.place_problem:
        yield Check("shared memory", "failed", f"{facts.place_problem} (MMRT_RUN_DIR)")
    elif not facts.is_tmpfs:
        yield Check("shared memory", "warning", f"{where}, which is no tmpfs: pages are written to a disk (MMRT_RUN_DIR, /dev/shm)")
    else:
        yield _room("shared memory", shared, need, where, "in Docker: --shm-size; else mount -o remount,size=… of it, as root")


def _room(name: str, room: int, need: Need | None, text: str, advice: str) -> Check:
    if need is None:
        return Check(name, "ok", text)
    needed = need.tables_bytes + need.weights_bytes
    parts = f"{_size(need.tables_bytes)} of pools and tables" + (f", {_size(need.weights_bytes)} of weights" * bool(need.weights_bytes))
    if needed > room:
        return Check(name, "failed", f"{text}, a run needs {_size(needed)} ({parts}): {advice}; [memory] has the sizes of pools")
    return Check(name, "ok", f"{text}, a run needs {_size(needed)} ({parts})")


def _port(facts: Facts) -> Check:
    if facts.run_endpoint and facts.run_endpoint.endswith(f":{facts.address.rpartition(':')[2]}"):
        return Check("port", "ok", f"{facts.address} serves the run")
    if facts.address_problem:
        return Check("port", "failed", facts.address_problem)
    host, _, port = facts.address.rpartition(":")
    return Check("port", "ok", f"any free one of {host}" if port == "0" else f"{facts.address} is free")


def _open_files(facts: Facts) -> Check:
    if facts.open_files < MIN_OPEN_FILES:
        return Check("open files", "failed", f"a process may open {facts.open_files}, a run needs {MIN_OPEN_FILES}: ulimit -n")
    if facts.open_files < _USUAL_FILES:
        return Check("open files", "warning", f"a process may open {facts.open_files}: few clients can connect at a time (ulimit -n)")
    return Check("open files", "ok", f"a process may open {facts.open_files}")


def _processor(facts: Facts) -> Check:
    cores = f"{facts.num_cores} core{'s' * (facts.num_cores != 1)}"
    text = f"{facts.processor}, {cores}"
    if facts.machine == "x86_64" and "avx2" not in facts.processor_flags:
        return Check("processor", "warning", f"{text}, without AVX2: computing takes several times as long")
    if facts.num_cores < 2:
        return Check("processor", "warning", f"{text}: pictures and text share it, so streams stall")
    if not facts.has_bfloat16:
        return Check("processor", "note", f"{text}, without bfloat16 units: models are computed in float32")
    return Check("processor", "ok", f"{text}, with bfloat16 units")


def _choices(facts: Facts) -> Check:
    found = [f"{name}: {text}" for name, text in facts.choices.items()]
    return Check("kernels", "ok", "; ".join(found) or "none was tried yet: the first run does it, once")


def _gpu(facts: Facts) -> Check:
    names = ", ".join(facts.gpus)
    if facts.device == "cpu":
        if facts.gpus:
            return Check("gpu", "note", f"{names} (driver {facts.gpu_driver}) is not used: mmrt up --device cuda")
        return Check("gpu", "note", "none found; none is needed for model.device = cpu")
    if not facts.gpus:
        return Check("gpu", "failed", f"none found, for model.device = {facts.device}: nvidia-smi must list it; in Docker: --gpus all")
    if facts.installed.get("torch", "").endswith("+cpu"):
        torch = facts.installed["torch"]
        return Check("gpu", "failed", f"torch {torch} is the build for CPUs: install mmrt anew, with its extra {_CUDA}")
    return Check("gpu", "ok", f"{names} (driver {facts.gpu_driver})")


def _sandbox(facts: Facts) -> Check:
    if facts.sandbox_problem:
        return Check("sandbox", "warning", f"{facts.sandbox_problem}: take media from clients that you trust")
    lacks = f", though in no namespaces of its own: {facts.namespace_problem}" if facts.namespace_problem else ""
    return Check("sandbox", "ok", f"media are decoded in a process without rights{lacks}")


def _logs(facts: Facts) -> Check:
    if facts.logs_problem:
        return Check("logs", "failed", f"{facts.logs} cannot be written: {facts.logs_problem} (XDG_STATE_HOME)")
    return Check("logs", "ok", facts.logs)


def _dead_runs(facts: Facts) -> Iterator[Check]:
    for name, num_bytes in facts.dead_runs.items():
        yield Check("leftovers", "warning", f"the dead run {name} holds {_size(num_bytes)}: mmrt down --run {name}")


def describe_import_end(package: str, status: int, last_line: str) -> str:
    """Return why loading a package ended its process. ``status``: as subprocess has it."""
    if status < 0:
        hint = ": the processor lacks its instructions" if -status == signal.SIGILL else ""
        return f"{package} cannot be loaded: {signal.Signals(-status).name}{hint}"
    return f"{package} cannot be loaded: {last_line or f'exit status {status}'}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.0f} MiB"
