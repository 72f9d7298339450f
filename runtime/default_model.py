"""The model that a run serves when none is configured: made once with random weights, cached per version of mmrt.

The supervisor runs ``make`` in a process of its own, since it takes torch: forked from the zygote, or plainly as
``python -m mmrt.runtime.default_model PATH``.
"""

import importlib
import os
import shutil
import sys
from pathlib import Path

from .. import __version__
from .config import Environment
from .launcher import PYTHON, TORCH_STAGE
from .supervised import ActorSpec

SHAPE = "tiny"
FAMILY = "qwen2_5_omni"


def path(environment: Environment) -> Path:
    """Where it is cached."""
    return environment.cache_home / "models" / f"{SHAPE}-{__version__}"


def is_made(model: Path) -> bool:
    """Whether the model is there: it appears whole or not at all."""
    return (model / "config.json").is_file()


def spec(model: Path) -> ActorSpec:
    """How the supervisor has it made."""
    return ActorSpec(
        name="model",
        command=(*PYTHON, "-m", "mmrt.runtime.default_model", str(model)),
        needs=TORCH_STAGE,
        entry="mmrt.runtime.default_model:make",
        argument=str(model),
    )


def make(target: str) -> int:
    """Make the model in ``target``. Two at once do not collide: each makes its own, and the first to finish wins."""
    model = Path(target)
    print(f"making the {SHAPE} default model in {model} (random weights)")
    partial = model.with_name(f".{model.name}.{os.getpid()}")
    model.parent.mkdir(parents=True, exist_ok=True)
    try:
        importlib.import_module("mmrt.models.make").make_checkpoint(SHAPE, partial, FAMILY)
        try:
            partial.rename(model)
        except OSError:
            if not is_made(model):
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(make(sys.argv[1]))
