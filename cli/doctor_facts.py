"""Find out what ``mmrt doctor`` judges. Nothing is changed on the machine; packages are loaded in a process of their own."""

import platform
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from ..cpu_kernels import kernel_files
from ..cpu_kernels.processor import processor_flags, processor_name
from ..models.config import weight_bytes
from ..runtime.config.runtime_config import RuntimeConfig
from ..runtime.environment import Environment
from ..runtime.errors import RunError, UserError
from ..runtime.process.host_room import read_host_room
from ..runtime.process.listening import open_listeners
from ..runtime.process.number_format import has_bfloat16_units
from ..runtime.process.processors import read_processors
from ..runtime.process.run import fit_to_machine, running
from ..shm.errors import ShmError
from ..shm.run_directory import RunDirectory
from .checkpoints import whole_checkpoint
from .doctor_checks import Facts, Need, describe_import_end
from .options import log_directory
from .plan import Plan, check_tensors, layout_of, model_of

_IMPORT_S = 120.0
_MODULES = {"pyzmq": "zmq", "pillow": "PIL"}  # of packages that are imported by another name
_LOAD = "import importlib, sys\nfor name in sys.argv[1:]:\n    print(name, flush=True)\n    importlib.import_module(name)"
_ENTER = "from mmrt.actors.video.sandbox import enter_sandbox\nprint(enter_sandbox(memory_bytes=1 << 30, file_bytes=1 << 20))"
_FORK = "from mmrt.actors.video.sandbox import prepare_forker\nprint(prepare_forker().processes_problem)"


def read_facts(config: RuntimeConfig | UserError, run: Path, environment: Environment) -> Facts:
    """Return what is found for a run with this configuration, or with none that can be read."""
    problem = config if isinstance(config, UserError) else None
    config = RuntimeConfig() if isinstance(config, UserError) else config
    requirements = _requirements()
    import_problem = _import_problem(requirements)
    need = None
    if problem is None:
        try:
            need = _need(config, run, environment, can_load=not import_problem)
        except UserError as error:
            problem = error
    place = next(path for path in (run, *run.parents) if path.exists())
    logs = log_directory(run, environment)
    sandbox_problem, namespace_problem = _sandbox_problems(config.media.isolation == "process")
    return Facts(
        system=platform.system(),
        machine=platform.machine(),
        kernel=platform.release(),
        python=platform.python_version(),
        python_bounds=_python_bounds(),
        requirements=requirements,
        installed=_installed(requirements),
        import_problem=import_problem,
        config_problem=str(problem or ""),
        need=need,
        device=config.model.device,
        room=read_host_room(run),
        place=str(place),
        place_problem=_place_problem(run),
        is_tmpfs=_file_system(place) == "tmpfs",
        run_endpoint=_endpoint(run),
        address=f"{config.server.host}:{config.server.port}",
        address_problem=_address_problem(config),
        open_files=_open_files(),
        processor=processor_name(),
        num_cores=read_processors().num_cores,
        processor_flags=processor_flags(),
        has_bfloat16=has_bfloat16_units(environment.cpu_capability),
        choices=_choices(environment),
        gpus=gpu_names(),
        gpu_driver=gpu_driver(),
        sandbox_problem=sandbox_problem,
        namespace_problem=namespace_problem,
        logs=str(logs),
        logs_problem=_write_problem(logs),
        dead_runs=_dead_runs(run),
    )


def _need(config: RuntimeConfig, run: Path, environment: Environment, *, can_load: bool) -> Need:
    """Compute the memory of a run. ``can_load``: torch can be loaded, by which headers of weights are read. Raises: UserError if
    model or configuration do not allow a run."""
    model = whole_checkpoint(config)
    fitted, reason = fit_to_machine(config, model, run, environment)
    plan = Plan(run, fitted, model, config.server.port, environment, reason)
    if can_load:
        check_tensors(plan)
    weights = 0 if config.model.on_cuda else weight_bytes(model_of(plan))
    return Need(model=str(model), tables_bytes=layout_of(plan).num_bytes, weights_bytes=weights)


def _requirements() -> Sequence[str]:
    try:
        return metadata.requires("mmrt") or ()
    except metadata.PackageNotFoundError:
        return ()


def _python_bounds() -> str:
    try:
        found = metadata.metadata("mmrt")
    except metadata.PackageNotFoundError:
        return ""
    return found["Requires-Python"] if "Requires-Python" in found else ""


def _installed(requirements: Sequence[str]) -> Mapping[str, str]:
    found = {}
    for name in (Requirement(text).name for text in requirements):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _choices(environment: Environment) -> dict[str, str]:
    kernel_files.keep_in(environment.cache_home / "kernels")
    return kernel_files.choices()


def _import_problem(requirements: Sequence[str]) -> str:
    """Load every package that is always needed, in a process that may die of it."""
    names = [requirement.name for requirement in map(Requirement, requirements) if requirement.marker is None]
    modules = [_MODULES.get(name, name) for name in names] or ["torch", "tokenizers"]
    try:
        done = subprocess.run([sys.executable, "-c", _LOAD, *modules], capture_output=True, text=True, timeout=_IMPORT_S)
    except subprocess.TimeoutExpired:
        return f"loading {', '.join(modules)} took more than {_IMPORT_S:.0f} s"
    if done.returncode == 0:
        return ""
    return describe_import_end((done.stdout.split() or ["python"])[-1], done.returncode, (done.stderr.splitlines() or [""])[-1])


def _place_problem(run: Path) -> str:
    """Return why the directory of the run cannot be made."""
    try:
        RunDirectory.check_place(run)
    except ShmError as error:
        return str(error)
    return "" if RunDirectory.is_alive(run) else _write_problem(run)


def _file_system(place: Path) -> str:
    """Return the type of the file system that a directory is on."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    above = [(mount[1], mount[2]) for mount in mounts if place.is_relative_to(mount[1])]
    return max(above, key=lambda mount: len(mount[0]), default=("", ""))[1]


def _endpoint(run: Path) -> str:
    try:
        return running(run).endpoint
    except RunError:
        return ""


def _address_problem(config: RuntimeConfig) -> str:
    try:
        for listener in open_listeners(config.server.host, config.server.port):
            listener.close()
    except RunError as error:
        return str(error)
    return ""


def _open_files() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if limit == resource.RLIM_INFINITY else limit


def gpu_names(proc: Path = Path("/proc")) -> Sequence[str]:
    """Return the names of NVIDIA's GPUs, as its kernel module tells them."""
    found = []
    for file in sorted((proc / "driver/nvidia/gpus").glob("*/information")):
        name = re.search(r"^Model:\s*(.*)$", file.read_text(), re.MULTILINE)
        found.append(name[1] if name else file.parent.name)
    return found


def gpu_driver(proc: Path = Path("/proc")) -> str:
    """Return the version of NVIDIA's kernel module; "" if it is not loaded."""
    try:
        found = re.search(r"\s(\d+\.[\d.]+)\s", (proc / "driver/nvidia/version").read_text())
    except OSError:
        return ""
    return found[1] if found else "unknown"


def _sandbox_problems(forks: bool) -> tuple[str, str]:
    """Enter the video process's sandbox, in a process that ends then; return what this system does not restrict, and why it gives no
    namespaces. ``forks``: decoders get one of processes as well."""
    done = subprocess.run([sys.executable, "-c", _ENTER], capture_output=True, text=True)
    problem = done.stdout.strip()
    if forks and not problem:
        problem = subprocess.run([sys.executable, "-c", _FORK], capture_output=True, text=True).stdout.strip()
    return (done.stderr.strip().splitlines() or [""])[-1], problem


def _write_problem(directory: Path) -> str:
    """Return why nothing can be written to a directory that is or could be made; nothing is made."""
    place = next(path for path in (directory, *directory.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=place):
            return ""
    except OSError as error:
        return f"{place}: {error.strerror}"


def _dead_runs(run: Path) -> Mapping[str, int]:
    """Return the sizes of runs beside this one that nobody belongs to any more."""
    found = {}
    for path in sorted(RunDirectory.default_path("default").parent.glob("*/")):
        if (path / "LOCK").exists() and not RunDirectory.is_alive(path):
            found[path.name] = sum(512 * file.stat().st_blocks for file in path.iterdir())
    return found
