"""``mmrt model make``: a checkpoint of a known shape with random weights."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ..runtime.errors import UserError


class Shape(StrEnum):
    tiny = "tiny"
    small = "small"
    b3 = "3b"
    b7 = "7b"


class Family(StrEnum):
    qwen2_5_omni = "qwen2_5_omni"
    qwen2_5_vl = "qwen2_5_vl"
    null = "null"


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Make models.")
    app.add_typer(group, name="model")

    @group.command()
    def make(
        shape: Annotated[Shape, typer.Argument(metavar="SHAPE", help="How large it is.")],
        out: Annotated[Path, typer.Argument(metavar="DIR", help="The checkpoint directory to write; must not exist.")],
        family: Annotated[
            Family, typer.Option(help="qwen2_5_omni hears too; null computes nothing (to measure the runtime).")
        ] = Family.qwen2_5_omni,
        seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of the weights.")] = 0,
    ) -> None:
        """Write a Hugging Face checkpoint with random weights.

        It has a tokenizer and a chat template of its own. Nothing is downloaded.
        """
        from rich.progress import Progress

        from ..models.make.checkpoint import make_checkpoint

        with Progress(transient=True, disable=not sys.stdout.isatty()) as progress:
            task = progress.add_task(f"making {shape.value}", total=None)

            def show(done: int, total: int) -> None:
                progress.update(task, completed=done, total=total)

            try:
                make_checkpoint(shape.value, out, family.value, seed, show)
            except OSError as error:
                raise UserError(f"cannot make {out}: {error.strerror or error}") from None
        print(f"{out}: {shape.value} {family.value}, random weights")
