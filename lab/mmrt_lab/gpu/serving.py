"""Runs for the sections of ``serve``: checkpoints, made once, and a run that stays up while sections need the same one."""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mmrt.bench.own_run import OwnRun
from mmrt.models.config import load_model_config
from mmrt.models.families.qwen2_5.made_checkpoint import SHAPES
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.config.sections import (
    ActorSection,
    ActorsSection,
    MemorySection,
    ModelSection,
    SchedulingSection,
    ServerSection,
    SupervisorSection,
)

TIMEOUT_S = 600.0
STEERED = SchedulingSection()


def target_of(target: float, model: Path) -> float | None:
    """Targets are written for the 7B shape; any other has none."""
    return target if load_model_config(model).language.hidden_size == SHAPES["7b"].text["hidden_size"] else None


def checkpoint_of(run: OwnRun, options: argparse.Namespace) -> Path:
    """The checkpoint of the timed model."""
    path: Path | None = options.model
    return made_of_shape(run, options.shape) if path is None else path.absolute()


def made_of_shape(run: OwnRun, shape: str) -> Path:
    """A checkpoint of this shape, made when it is first asked for."""
    path = run.home / shape
    if not path.exists():
        run.command("model", "make", shape, str(path))
    return path


@contextmanager
def serving(
    run: OwnRun,
    model: Path,
    device: str,
    dtype: str = "auto",
    scheduling: SchedulingSection = STEERED,
    layout: str = "E+P+D",
    anew: bool = False,
) -> Iterator[tuple[str, float]]:
    """(where it answers, seconds until it was ready). Every death counts as a first one.

    It stays up for sections that need the same, as large models take long to load; ``anew``: for this one it is started in any case.
    """
    threads = ActorSection(threads=max(1, (os.cpu_count() or 1) // 4))
    config = RuntimeConfig(
        model=ModelSection(path=str(model), device=device, dtype="float32" if dtype == "float32" else "auto"),
        memory=MemorySection(max_sequences=64, kv_tokens=16384 if device == "cpu" else 131072),
        server=ServerSection(port=0),
        scheduling=scheduling,
        actors=ActorsSection(decode=threads, layout=layout) if device == "cpu" else ActorsSection(layout=layout),
        supervisor=SupervisorSection(restart_limit=1 << 30, backoff_s=0.05, backoff_max_s=0.05, ready_timeout_s=TIMEOUT_S),
    )
    ready_s = 0.0
    if anew or run.config != config:
        end(run)
        ready_s = run.up(config)
    try:
        yield run.report().endpoint, ready_s
    except BaseException:
        end(run)
        raise


def end(run: OwnRun) -> None:
    """Take down the run that ``serving`` left up."""
    if run.config is not None:
        run.down()
