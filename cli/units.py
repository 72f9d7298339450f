"""``mmrt units``: write systemd unit files for this installation and configuration."""

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..runtime.config.runtime_config import RuntimeConfig
from ..runtime.environment import read_environment
from ..runtime.errors import ConfigError, RunError
from ..runtime.process.processors import plan_threads, read_processors
from ..runtime.stage_table import ALL_ACTORS
from ..runtime.supervisor.systemd import TARGET, service_name, unit_files
from .checkpoints import whole_checkpoint
from .hub_models import with_cached
from .options import ConfigFile, RunName, configuration, run_path


def register(app: typer.Typer) -> None:
    @app.command()
    def units(
        out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Where to write them.")] = Path("."),
        config: ConfigFile = None,
        run: RunName = None,
    ) -> None:
        """Write units for systemctl --user.

        They are mmrt.target and one mmrt-PROCESS.service for each process.
        """
        environment = read_environment()
        effective = configuration(config, environment)
        if effective.autoscale.enabled:
            raise ConfigError("autoscale.enabled: the services are of one layout: leave it out, or serve with mmrt up")
        if effective.num_gateways > 1:
            raise ConfigError(f"actors.layout = {effective.actors.layout!r}: under systemd a run has one gateway; mmrt up has several")
        variables = {"MMRT_RUN_DIR": str(run_path(run)), **_made(effective)}
        if file := config or environment.config_file:
            variables["MMRT_CONFIG"] = str(file.absolute())
        files = unit_files(plan_threads(effective, read_processors()), _program(), variables, Path.cwd())
        try:
            out.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (out / name).write_text(text)
            others = sorted(name for name in map(service_name, ALL_ACTORS) if name not in files and (out / name).exists())
        except OSError as error:
            raise RunError(f"cannot write units to {out}: {error.strerror}") from None
        print(f"{len(files)} files in {out.absolute()}. To use them:")
        if others:
            print(f"  (of another layout, and to be removed wherever they are: {' '.join(others)})")
        names = f"{out}/mmrt.target {out}/mmrt-*.s*"
        print(f"  mkdir -p ~/.config/systemd/user && cp {names} ~/.config/systemd/user/ && systemctl --user daemon-reload")
        print(f"  systemctl --user start {TARGET}")


def _made(config: RuntimeConfig) -> dict[str, str]:
    """Variables that name the checkpoint of a configuration that names none itself: a GGUF file, a hub's model, one with an adapter.

    Raises: ConfigError.
    """
    found = with_cached(config)
    checkpoint = whole_checkpoint(found)
    if not config.model.adapter and (not config.model.path or Path(config.model.path).expanduser().absolute() == checkpoint):
        return {}
    return {"MMRT_CHECKPOINT": str(checkpoint)} | ({"MMRT_MODEL_NAME": found.model.name} if found.model.name else {})


def _program() -> str:
    """The absolute path of the mmrt command that belongs to this interpreter."""
    beside = Path(sys.executable).with_name("mmrt")
    found = str(beside) if beside.exists() else shutil.which("mmrt")
    if not found:
        raise RunError("the mmrt command is not on PATH: install the package first")
    return str(Path(found).absolute())
