"""``mmrt layout``: the processes of encoder, prefill and decode of a run, and others of them while it serves."""

from typing import Annotated

import typer

from ..runtime.config.runtime_config import RuntimeConfig
from ..runtime.errors import RunError
from ..runtime.process.run import read_run_info
from ..runtime.stage_table import STAGES, InstanceId, devices_of, instance_id, number_of, processes_of, stage_of
from ..runtime.supervisor.control import LayoutRequest, call
from ..shm.errors import MissingError
from ..shm.run_directory import RunDirectory
from .options import RunName, run_path
from .scale import tell


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Show or change the processes of encoder, prefill and decode.")
    app.add_typer(group, name="layout")

    @group.command()
    def show(run: RunName = None) -> None:
        """Print the layout, and the actors of each process."""
        config = _config(run)
        layout = config.actors.layout
        print(layout)
        devices, found = devices_of(layout), processes_of(layout)
        several = {name for name in found if number_of(name) or instance_id(stage_of(name), 1) in found}
        for name, together in found.items():
            if STAGES[stage_of(name)].has_device or name in several:
                pages = {actor: pages_elsewhere(config, actor) for actor in together}
                names = [actor + (f" with KV pages on {home}" if home else "") for actor, home in pages.items()]
                print(f"  {' and '.join(names)}{f' on device {devices[name]}' if name in devices else ''}")

    @group.command("set")
    def set_(
        layout: Annotated[str, typer.Argument(metavar="LAYOUT", help="As actors.layout, such as 2E+P+2D.")], run: RunName = None
    ) -> None:
        """Have more or fewer of the processes in a live run.

        No request is lost. The names and stages of the others must stay: another division into processes needs another start.
        """
        tell(call(run_path(run), LayoutRequest(layout), timeout_s=None))


def pages_elsewhere(config: RuntimeConfig, actor: InstanceId) -> str:
    """Return the name of the device of an actor's KV pages, if that is not its own: of a stage of a pipeline; else ""."""
    device = config.kv_device(actor)
    return "" if device == config.actor_devices.get(actor, 0) else config.device_names[device]


def _config(run: str | None) -> RuntimeConfig:
    path = run_path(run)
    try:
        with RunDirectory.attach(path, timeout_s=0.0) as directory:
            return read_run_info(directory).config
    except MissingError:
        raise RunError(f"no run is up in {path} (mmrt up)") from None
