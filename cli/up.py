"""``mmrt up``: start a run and supervise it until it ends."""

import asyncio
import ipaddress
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, TextIO

import msgspec
import typer

from ..models.config import weight_bytes
from ..models.gguf.made import unused_towers
from ..runtime.config.runtime_config import RuntimeConfig
from ..runtime.environment import Environment, read_environment
from ..runtime.errors import ConfigError, RunError
from ..runtime.process.listening import open_listeners
from ..runtime.process.memory_layout import MemoryLayout
from ..runtime.process.run import RunInfo, fit_to_machine, free_port, run_info
from ..runtime.stage_table import devices_of
from ..runtime.supervisor.launcher import ZYGOTE_STAGES
from ..runtime.supervisor.specs import actor_specs, child_environment
from ..runtime.supervisor.supervisor import Reporter, RunSetup, Supervisor
from ..shm.run_directory import RunDirectory, foreign_parent
from .checkpoints import origin_of, whole_checkpoint
from .daemon import detach
from .hub_models import with_cached, with_fetched
from .layout import pages_elsewhere
from .options import (
    Adapter,
    ApiKey,
    Autoscale,
    ConfigFile,
    Device,
    Dtype,
    Host,
    MaxContext,
    Mmproj,
    ModelDir,
    Port,
    RunName,
    Yes,
    check_files,
    configuration,
    override,
    run_path,
)
from .plan import Plan, check_tensors, layout_of, model_of
from .terminal import JsonReporter, TerminalReporter

PACKAGE_DIRECTORY = Path(__file__).parents[1]


def register(app: typer.Typer) -> None:
    @app.command()
    def up(
        directory: Annotated[str | None, typer.Argument(metavar="MODEL", help="As --model.")] = None,
        config: ConfigFile = None,
        model: ModelDir = None,
        mmproj: Mmproj = None,
        adapter: Adapter = None,
        name: Annotated[
            str | None, typer.Option("--served-model-name", metavar="NAME", help="What clients call it (model.name).")
        ] = None,
        max_context: MaxContext = None,
        dtype: Dtype = None,
        device: Device = None,
        host: Host = None,
        port: Port = None,
        api_key: ApiKey = None,
        preset: Annotated[str | None, typer.Option("--preset", metavar="NAME", help="A baseline: monolithic or split.")] = None,
        autoscale: Autoscale = False,
        detached: Annotated[bool, typer.Option("--detach", "-d", help="Return when the run is ready.")] = False,
        reload: Annotated[
            bool, typer.Option("--reload", help="Restart the actors that import what is edited in mmrt's own source.")
        ] = False,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be started.")] = False,
        front: Annotated[str, typer.Option("--of-front", hidden=True)] = "",
        yes: Yes = False,
        run: RunName = None,
    ) -> None:
        """Start all actors and serve. Ctrl-C ends the run after its requests; a second one at once.

        Without MODEL the demo model is served. Options replace what the configuration says.
        """
        if None not in (directory, model) and directory != model:
            raise typer.BadParameter(f"MODEL is {directory!r} and --model is {model!r}: give one of them")
        environment = read_environment()
        settings = configuration(config, environment)
        if preset is not None and settings.scheduling.preset not in ("", preset):
            raise ConfigError(f"--preset {preset}: the configuration has scheduling.preset = {settings.scheduling.preset!r}")
        options = {
            "model.path": directory if model is None else model,
            "model.mmproj": mmproj,
            "model.adapter": adapter,
            "model.name": name,
            "model.max_context": max_context,
            "model.dtype": dtype,
            "model.device": device,
            "server.host": host,
            "server.port": port,
            "server.api_key": api_key,
            "scheduling.preset": preset,
            "autoscale.enabled": autoscale or None,
        }
        path, chosen = run_path(run), override(settings, options)
        if not RunDirectory.is_alive(path):  # which is refused below
            reporter = reporter_of(chosen, environment, sys.stdout)
            chosen = with_cached(chosen) if dry_run else with_fetched(chosen, environment, reporter, yes=yes)
        plan = make_plan(path, chosen, environment)
        plan = msgspec.structs.replace(plan, watched_source=PACKAGE_DIRECTORY if reload else None, front=front)
        raise typer.Exit(_show(plan) if dry_run else bring_up(plan, detached=detached))


def bring_up(plan: Plan, *, detached: bool, stream: TextIO = sys.stdout) -> int:
    """Start the run and supervise it to its end; ``detached``: until it is ready, which ``stream`` is told.

    Returns the exit status. Raises: RunError.
    """
    _check_room(plan, layout_of(plan))
    if detached:
        reporter = TerminalReporter(stream, plan.environment)
        return detach(lambda pipe: supervise(plan, pipe, hang_up_ends=False), plan.logs / "supervisor.log", reporter)
    return supervise(plan, reporter_of(plan.config, plan.environment, stream))


def reporter_of(config: RuntimeConfig, environment: Environment, stream: TextIO) -> Reporter:
    """Return the reporter of a stream: it writes objects where logs are JSON, else lines for people."""
    return JsonReporter(stream) if config.logging.is_json else TerminalReporter(stream, environment)


def _show(plan: Plan) -> int:
    """--dry-run: say what would be started, and whether there is room for it. Raises: RunError."""
    check_tensors(plan)
    layout = layout_of(plan)
    _describe(plan, layout)
    _check_room(plan, layout)
    return 0


def make_plan(path: Path, config: RuntimeConfig, environment: Environment) -> Plan:
    """Check all that can be checked beforehand. Raises RunError, ConfigError."""
    if RunDirectory.is_alive(path):
        raise RunError(
            f"a run is already up in {path} (pids {pids_of(path)}): see `mmrt status`, end it with `mmrt down`, or use --run NAME"
        )
    model = whole_checkpoint(config)
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
    for said in unused_towers(plan.model):
        reporter.message(said)
    if not plan.config.server.needs_key and _is_reachable(plan.config.server.host):
        reporter.message(f"whoever reaches {plan.config.server.host} can use this server: it has no API key (--api-key, MMRT_API_KEY)")
    if "*" in plan.config.server.allow_origins and not plan.config.server.needs_key:
        reporter.message("every web page that is open in a browser can use this server: it has no API key (--api-key, MMRT_API_KEY)")
    if (foreign := foreign_parent()) is not None and plan.environment.run_dir is None:
        reporter.message(f"{foreign} is not a directory of this user, so the run directory is {plan.path}")
    listeners = open_listeners(plan.config.server.host, plan.port)
    if plan.watched_source is not None:
        reporter.message(f"watching {plan.watched_source}: actors that import what is edited are restarted")

    setup = RunSetup(
        path=plan.path,
        info=_info(plan),
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


def _info(plan: Plan) -> RunInfo:
    found = run_info(plan.config, plan.model, plan.port, plan.dtype_reason)
    return msgspec.structs.replace(found, front=plan.front, origin=origin_of(plan.config, plan.model))


def _is_reachable(host: str) -> bool:
    """Return whether other machines may reach it."""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def _describe(plan: Plan, layout: MemoryLayout) -> None:
    """--dry-run: describe the processes to start, and the shared memory they would take."""
    print(f"run directory  {plan.path}")
    print(f"model          {origin_of(plan.config, plan.model)}")
    info = run_info(plan.config, plan.model, plan.port)
    print(f"it takes       {', '.join(('text', *model_of(plan).media_kinds))}")
    for said in unused_towers(plan.model):
        print(f"               {said}")
    print(f"endpoint       {info.endpoint}/v1" + (f", and the page {info.page}" if info.page else ""))
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
    weights = weight_bytes(model_of(plan)) / 2**20
    on_device = plan.config.model.on_cuda
    print(f"tables, rings  {tables / 2**20:.0f} MiB")
    print(f"weights        {weights:.0f} MiB on {plan.config.model.device}" if on_device else f"weights        {weights:.0f} MiB")
    print(f"shared memory  {layout.num_bytes / 2**20:.0f} MiB" + ("" if on_device else f", and the weights: {weights:.0f} MiB"))
    devices = devices_of(plan.config.actors.layout)
    for device in plan.config.devices:
        print(f"device         {device.name:<12} processors {device.cpus or 'any'}")
    for name in plan.config.instances:
        section, process = plan.config.actor(name), plan.config.process_of(name)
        shared = f", in the process of {process}" if process != name else ""
        shared += f", on device {devices[name]}" if name in devices else ""
        shared += f", KV pages on {home}" if (home := pages_elsewhere(plan.config, name)) else ""
        most = plan.config.most_threads(name)
        threads = f"{section.threads}" + (f" to {most}" if most > section.threads else "")
        print(f"actor          {name:<12} threads {threads}, nice {section.nice}{shared}")
