"""The command: ``python -m mmrt_demo_model.training OUT``."""

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .export import export
from .loop import BegunOtherwiseError, train
from .processes import ProcessEndedError
from .recipe import RECIPE, load_recipe
from .warm_start import begin_with


def main(
    out: Annotated[Path, typer.Argument(help="Where the checkpoint is written; training goes on where it was interrupted.")],
    recipe: Annotated[Path, typer.Option(help="The recipe.")] = RECIPE,
    processes: Annotated[int, typer.Option(help="Processes that compute; 0: two on a CPU with two cores or more.", min=0)] = 0,
    workers: Annotated[int, typer.Option(help="Processes beside each of these that make its batches; -1: one on a CPU.", min=-1)] = -1,
    threads: Annotated[int, typer.Option(help="Threads of each that computes; 0: the cores among the processes.", min=0)] = 0,
    compiled: Annotated[bool, typer.Option("--compile", help="A minute more to start, then faster; needs a C++ compiler.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda" if torch.cuda.is_available() else "cpu",
    weights: Annotated[Path | None, typer.Option(help="A checkpoint to begin with, at step --first.")] = None,
    first: Annotated[int, typer.Option(help="How many of the recipe's steps --weights have behind them.", min=0)] = 0,
) -> None:
    """Train the demo model and write its checkpoint."""
    try:
        checked = load_recipe(recipe)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {recipe}: {error}")
    cores = torch.get_num_threads()
    most = checked.smallest_batch if device == "cpu" else 1
    processes = processes or min(2, cores, most)
    if processes > most:
        sys.exit(f"error: --processes {processes}, expected at most {most}: the recipe's smallest batch on a CPU, 1 elsewhere")
    if workers < 0:
        workers = 1 if device == "cpu" else max(1, cores - 1)
    torch.set_num_threads(threads or max(1, cores // processes))
    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns) as bar:
        task = bar.add_task("", total=checked.all_steps)

        def show(step: int, steps: int, loss: float, accuracy: dict[str, float]) -> None:
            worst = sorted(accuracy.items(), key=lambda pair: pair[1])[:3]
            text = ", ".join(f"{name} {share:.0%}" for name, share in worst)
            bar.update(task, completed=step, total=steps, description=f"loss {loss:.3f}; hardest: {text}")

        try:
            if weights is not None:
                begin_with(weights, first, checked, out / "work", workers=workers, device=device)
            network = train(
                checked, out / "work", processes=processes, workers=workers, device=device, progress=show, compiled=compiled
            )
        except (BegunOtherwiseError, ProcessEndedError, OSError, ValueError) as error:
            sys.exit(f"error: {error}")
    export(network, out / "work", out)
    print(f"wrote {out}")


if __name__ == "__main__":
    typer.run(main)
