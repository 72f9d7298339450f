"""``mmrt up``: start a run and supervise it until it ends."""

import asyncio
import ipaddress
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from ..actors.host.model_facts import facts_of
from ..models.architecture import ModelConfig
from ..models.config import load_model_config
from ..runtime.config import RuntimeConfig, convert_config, to_data
from ..runtime.environment import Environment, read_environment
from ..runtime.errors import ConfigError, RunError
from ..runtime.process.host_room import read_host_room
from ..runtime.process.listening import open_listeners
from ..runtime.process.memory_layout import MemoryLayout, plan_layout
from ..runtime.process.run import fit_to_machine, free_port, model_path, run_info
from ..runtime.stage_table import devices_of
from ..runtime.supervisor.launcher import ZYGOTE_STAGES
from ..runtime.supervisor.specs import actor_specs, child_environment
from ..runtime.supervisor.supervisor import Reporter, RunSetup, Supervisor
from ..shm.run_directory import RunDirectory, foreign_parent
from .daemon import detach
from .options import ConfigFile, RunName, check_files, configuration, log_directory, run_path
from .terminal import JsonReporter, TerminalReporter

PACKAGE_DIRECTORY = Path(__file__).parents[1]


class Plan(msgspec.Struct, frozen=True):
    """All that is known before any process starts."""

    path: Path
    config: RuntimeConfig
    model: Path
    port: int
    environment: Environment
    dtype_reason: str
    watched_source: Path | None = None  # the package's directory, where edits are to restart actors

    @property
    def logs(self) -> Path:
        return log_directory(self.path, self.environment)


def register(app: typer.Typer) -> None:
    @app.command()
    def up(
        config: ConfigFile = None,
        model: Annotated[str | None, typer.Option("--model", "-m", metavar="DIR", help="Checkpoint directory.")] = None,
        device: Annotated[str | None, typer.Option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N.")] = None,
        host: Annotated[str | None, typer.Option("--host", metavar="HOST", help="Where to serve; 0.0.0.0 is everywhere.")] = None,
        port: Annotated[int | None, typer.Option("--port", "-p", metavar="N", help="The port; 0 picks a free one.")] = None,
        preset: Annotated[str | None, typer.Option("--preset", metavar="NAME", help="A baseline: monolithic or split.")] = None,
        detached: Annotated[bool, typer.Option("--detach", "-d", help="Return when the run is ready.")] = False,
        reload: Annotated[
            bool, typer.Option("--reload", help="Restart the actors that import what is edited in mmrt's own source.")
        ] = False,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be started.")] = False,
        run: RunName = None,
    ) -> None:
        """Start all actors and serve. Ctrl-C ends the run after its requests; a second one at once."""
        environment = read_environment()
        plan = make_plan(run_path(run), override(configuration(config, environment), model, device, host, port, preset), environment)
        plan = msgspec.structs.replace(plan, watched_source=PACKAGE_DIRECTORY if reload else None)
        layout = layout_of(plan)
        if dry_run:
            _describe(plan, layout)
        _check_room(plan, layout)
        if dry_run:
            return
        reporter = TerminalReporter(sys.stdout, environment)
        if detached:
            status = detach(lambda pipe: supervise(plan, pipe, hang_up_ends=False), plan.logs / "supervisor.log", reporter)
        else:
            status = supervise(plan, JsonReporter(sys.stdout) if plan.config.logging.is_json else reporter)
        raise typer.Exit(status)


def override(
    config: RuntimeConfig, model: str | None, device: str | None, host: str | None, port: int | None, preset: str | None = None
) -> RuntimeConfig:
    configured = config.scheduling.preset
    if preset is not None and configured not in ("", preset):
        raise ConfigError(f"--preset {preset}: the configuration has scheduling.preset = {configured!r}")
    if model == "":
        raise typer.BadParameter("is empty; leave it out for the demo model", param_hint="--model")
    data = to_data(config)
    options = {"model.path": model, "model.device": device, "server.host": host, "server.port": port, "scheduling.preset": preset}
    for key, value in options.items():
        if value is not None:
            section, _, name = key.partition(".")
            data[section][name] = value
    return convert_config(data)


def make_plan(path: Path, config: RuntimeConfig, environment: Environment) -> Plan:
    """Check all that can be checked beforehand. Raises RunError, ConfigError."""
    if RunDirectory.is_alive(path):
        raise RunError(
            f"a run is already up in {path} (pids {pids_of(path)}): see `mmrt status`, end it with `mmrt down`, or use --run NAME"
        )
    model = model_path(config)
    check_files(config)
    config, dtype_reason = fit_to_machine(config, model, path, environment)
    return Plan(path, config, model, free_port(config), environment, dtype_reason)


def _check_room(plan: Plan, layout: MemoryLayout) -> None:
    """Check that pools and tables fit, weights aside. Sweeps the remains of a dead run of this name first. Raises: RunError."""
    usage = shutil.disk_usage(next(path for path in (plan.path, *plan.path.parents) if path.exists()))
    available = usage.free + sum(512 * file.stat().st_blocks for file in plan.path.glob("*"))
    if usage.total and layout.num_bytes > available:
        raise RunError(
            f"pools and tables need {layout.num_bytes >> 20} MiB of shared memory, {plan.path.parent} has {available >> 20} MiB "
            "available; their sizes are in [memory] of the configuration"
        )


def pids_of(path: Path) -> str:
    """The processes of the run in ``path``, for a message."""
    with RunDirectory.attach(path) as run:
        pids = [pid for pid in run.pids() if pid != os.getpid()]
    return ", ".join(map(str, pids)) or "unknown"


def supervise(plan: Plan, reporter: Reporter, *, hang_up_ends: bool = True) -> int:
    """Be the supervisor of a run, to its end. Returns the exit status."""
    os.umask(0o077)  # files written by this run are its user's alone
    if not plan.config.model.path:
        reporter.message("no model is configured: serving the demo model, which knows simple pictures, clips and sounds")
    if not plan.config.server.needs_key and _is_reachable(plan.config.server.host):
        reporter.message(f"whoever reaches {plan.config.server.host} can use this server: it has no API key (server.api_key)")
    if "*" in plan.config.server.allow_origins and not plan.config.server.needs_key:
        reporter.message("every web page that is open in a browser can use this server: it has no API key (server.api_key)")
    if (foreign := foreign_parent()) is not None and plan.environment.run_dir is None:
        reporter.message(f"{foreign} is not a directory of this user, so the run directory is {plan.path}")
    listeners = open_listeners(plan.config.server.host, plan.port)
    if plan.watched_source is not None:
        reporter.message(f"watching {plan.watched_source}: actors that import what is edited are restarted")

    setup = RunSetup(
        path=plan.path,
        info=run_info(plan.config, plan.model, plan.port, plan.dtype_reason),
        specs=actor_specs(plan.config),
        environment=child_environment(os.environ),
        log_directory=plan.logs,
        zygote_stages=ZYGOTE_STAGES,
        notify_socket=plan.environment.notify_socket,
        hang_up_ends=hang_up_ends,
        listeners=listeners,
        watched_source=plan.watched_source,
    )

    async def serve() -> int:
        return await Supervisor(setup, reporter).serve()

    return asyncio.run(serve())


def _is_reachable(host: str) -> bool:
    """Return whether other machines may reach it."""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def _describe(plan: Plan, layout: MemoryLayout) -> None:
    """--dry-run: describe the processes to start, and the shared memory they would take."""
    print(f"run directory  {plan.path}")
    print(f"model          {plan.model}")
    print(f"endpoint       {run_info(plan.config, plan.model, plan.port).endpoint}/v1")
    print(f"logs           {plan.logs}")
    why = f" ({plan.dtype_reason})" if plan.dtype_reason else ""
    print(f"dtype          {layout.dtype}{why}, weights in {layout.weights}, KV cache in {layout.kv_dtype}")
    for name, pool in layout.pools.items():
        where = f" on {plan.config.model.device}" if pool.on_device else ""
        why = f" ({pool.reason})" if pool.reason and not pool.on_device else ""
        print(f"{name + ' pool':<14} {pool.num_bytes / 2**20:.0f} MiB{where}: {pool.num_pages} pages of {pool.page_bytes} bytes{why}")
    if plan.config.model.on_cuda and not plan.config.memory.kv_tokens:
        share = plan.config.memory.gpu_memory_utilization
        print(f"               (at the start the kv pool takes what is left of {share:.0%} of the device's memory)")
    tables = layout.num_bytes - sum(pool.num_bytes for pool in layout.pools.values() if not pool.on_device)
    weights = "" if plan.config.model.on_cuda else ", and the weights"
    print(f"tables, rings  {tables / 2**20:.0f} MiB")
    print(f"shared memory  {layout.num_bytes / 2**20:.0f} MiB{weights}")
    devices = devices_of(plan.config.actors.layout)
    for device in plan.config.devices:
        print(f"device         {device.name:<12} processors {device.cpus or 'any'}")
    for name in plan.config.instances:
        section, process = plan.config.actor(name), plan.config.process_of(name)
        shared = f", in the process of {process}" if process != name else ""
        shared += f", on device {devices[name]}" if name in devices else ""
        print(f"actor          {name:<12} threads {section.threads}, nice {section.nice}{shared}")


def layout_of(plan: Plan) -> MemoryLayout:
    """Compute how ``memory`` would divide shared memory. Raises ConfigError."""
    model = model_of(plan)
    room = None if plan.config.model.on_cuda else read_host_room(plan.path)
    memory = plan.config.memory
    return plan_layout(plan.config, facts_of(model, memory.kv_page_tokens, memory.kv_transfer_dtype), model.dtype, room)


def model_of(plan: Plan) -> ModelConfig:
    """Read the model's configuration, as actors will. Raises ConfigError."""
    section, memory = plan.config.model, plan.config.memory
    try:
        return load_model_config(plan.model, section.dtype, section.max_context, memory.kv_dtype, section.weights)
    except ValueError as error:
        raise ConfigError(str(error)) from None
