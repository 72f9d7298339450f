"""``mmrt model``: the model that is served, and checkpoints of a known shape with random weights."""

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from ..hub.cache import find_cached
from ..models.config import load_model_config
from ..models.families.registry import FAMILIES
from ..runtime.environment import read_environment
from ..runtime.errors import UserError
from ..runtime.process.run import running
from ..runtime.supervisor.run_report import FrontReport
from .options import Adapter, ConfigFile, Device, Dtype, MaxContext, Mmproj, RunName, configuration, override, run_path
from .terminal import print_columns
from .words import aliases_of


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Models: that of the run, fetched ones, made ones.")
    app.add_typer(group, name="model")

    @group.command(epilog=_also_typed("show"))
    def show(run: RunName = None) -> None:
        """Show the model that the run serves.

        A run has one, a front (mmrt serve) several. Exits with 1 if no run is up.
        """
        info = running(run_path(run))
        if info.runs:
            _show_several(run_path(run))
            return
        takes = ", ".join(("text", *load_model_config(info.model_path).media_kinds))
        facts = {"MODEL": info.model_name, "TAKES": takes, "FROM": info.origin or info.model_path, "ADDRESS": f"{info.endpoint}/v1"}
        print_columns([list(facts), list(facts.values())], left=(0, 1, 2, 3))

    _register_check(group)
    _register_list(group)
    _register_rm(group)
    _register_make(group)


def _show_several(path: Path) -> None:
    from .status import read_any_report

    report = read_any_report(path)
    assert isinstance(report, FrontReport)
    rows = [["MODEL", "STATE", "TAKES", "DIRECTORY", "RUN"]]
    rows += [[model.name, model.state, ", ".join(model.takes), model.model, model.run] for model in report.models]
    print_columns(rows, left=range(5))


def _register_check(group: typer.Typer) -> None:
    @group.command()
    def check(
        model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint directory, GGUF file, or a hub's ORG/REPO.")],
        config: ConfigFile = None,
        mmproj: Mmproj = None,
        adapter: Adapter = None,
        max_context: MaxContext = None,
        dtype: Dtype = None,
        device: Device = None,
        memory: Annotated[
            str | None, typer.Option(metavar="SIZE", help='What it may take, as "20 GiB"; default: what the machine has left.')
        ] = None,
        json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
    ) -> None:
        """Say what a checkpoint is, and whether it is served.

        The memory that it takes, and the number of requests of each length that fit, are shown
        too. Of the weights only headers are read, or fetched. Exits with 1 if it is not served, and says why.
        """
        from ..serving.sizes import read_size
        from .draft_check import check_remote
        from .hub_models import hub_name, with_cached, with_cached_adapter
        from .model_check import check_here, print_report

        environment = read_environment()
        options = {
            **{"model.path": model, "model.mmproj": mmproj, "model.adapter": adapter, "model.max_context": max_context},
            **{"model.dtype": dtype, "model.device": device},
        }
        settings = override(configuration(config, environment), options)
        memory_bytes = None if memory is None else read_size(memory, "--memory")
        name = hub_name(settings)
        if name is None or find_cached(name) is not None:
            report = check_here(with_cached(settings), model, environment, memory_bytes)
        else:
            report = check_remote(name, with_cached_adapter(settings), environment, memory_bytes)
        print(msgspec.json.encode(report.card).decode()) if json else print_report(report, model)
        raise typer.Exit(1 if report.problems else 0)


def _register_list(group: typer.Typer) -> None:
    @group.command(name="list", epilog=_also_typed("list"))
    def list_models() -> None:
        """List the models that were fetched, and what is kept of GGUF files.

        A model that is not whole was interrupted, or refused: mmrt pull goes on.
        """
        from .model_list import print_models

        print_models(read_environment())


def _register_rm(group: typer.Typer) -> None:
    @group.command(epilog=_also_typed("rm"))
    def rm(
        model: Annotated[str, typer.Argument(metavar="MODEL", help="As mmrt model list has it: ORG/REPO, with :TAG or @REVISION one.")],
        yes: Annotated[bool, typer.Option("--yes", "-y", help="Without a question.")] = False,
    ) -> None:
        """Remove a fetched model, or what is kept of a GGUF file.

        The file itself stays. What a run serves is not removed.
        """
        from .model_list import remove

        remove(model, read_environment(), yes=yes)


def _also_typed(command: str) -> str:
    return f"Also typed: {', '.join(f'mmrt {alias}' for alias in aliases_of('model', command))}."


def _register_make(group: typer.Typer) -> None:
    @group.command()
    def make(
        what: Annotated[
            str,
            typer.Argument(
                metavar="WHAT",
                help="A family, one of a size, as qwen2_vl-2b, or a size. All have tiny; an unknown size names the others.",
            ),
        ],
        out: Annotated[Path, typer.Argument(metavar="DIR", help="The checkpoint directory to write; must not exist.")],
        family: Annotated[
            str | None,
            typer.Option(
                metavar="FAMILY", help=f"{', '.join(FAMILIES)}. qwen2_5_omni hears too; null computes nothing (to measure the runtime)."
            ),
        ] = None,
        seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of the weights.")] = 0,
    ) -> None:
        """Write a Hugging Face checkpoint with random weights.

        It has a tokenizer and a chat template of its own. Nothing is downloaded.
        """
        from rich.progress import Progress

        from ..models.make.checkpoint import make_checkpoint

        family, shape = _family_and_shape(what, family)
        with Progress(transient=True, disable=not sys.stdout.isatty()) as progress:
            task = progress.add_task(f"making {shape}", total=None)

            def show(done: int, total: int) -> None:
                progress.update(task, completed=done, total=total)

            try:
                make_checkpoint(shape, out, family, seed, show)
            except ValueError as error:
                raise typer.BadParameter(str(error), param_hint="WHAT or --family") from None
            except OSError as error:
                raise UserError(f"cannot make {out}: {error.strerror or error}") from None
        print(f"{out}: {shape} {family}, random weights")


def _family_and_shape(what: str, family: str | None) -> tuple[str, str]:
    """Return the family and the shape that FAMILY, FAMILY-SHAPE or SHAPE names; the last is of ``family``, or of the demo model's."""
    name, _, shape = what.partition("-")
    if name not in FAMILIES:
        return family or "qwen2_5_omni", what
    if family not in (None, name):
        raise typer.BadParameter(f"WHAT is {what!r} and --family is {family!r}: give one of them")
    return name, shape or "tiny"
