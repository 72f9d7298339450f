"""What a command knows of a run before any process starts: configuration, checkpoint, memory."""

from pathlib import Path

import msgspec

from ..models.architecture import ModelConfig
from ..models.config import facts_of, load_model_config
from ..models.errors import CheckpointError
from ..models.text.vocabulary_check import check_vocabulary
from ..runtime.config.runtime_config import RuntimeConfig
from ..runtime.environment import Environment
from ..runtime.errors import ConfigError
from ..runtime.process.host_room import read_host_room
from ..runtime.process.memory_layout import MemoryLayout, plan_layout
from .options import log_directory


class Plan(msgspec.Struct, frozen=True):
    """All that is known before any process starts."""

    path: Path
    config: RuntimeConfig
    model: Path
    port: int
    environment: Environment
    dtype_reason: str
    watched_source: Path | None = None  # the package's directory, where edits are to restart actors
    front: str = ""  # see ``RunInfo``

    @property
    def logs(self) -> Path:
        return log_directory(self.path, self.environment)


def layout_of(plan: Plan) -> MemoryLayout:
    """Compute how ``memory`` would divide shared memory. Raises ConfigError."""
    model = model_of(plan)
    room = None if plan.config.model.on_cuda else read_host_room(plan.path)
    memory = plan.config.memory
    return plan_layout(plan.config, facts_of(model, memory.kv_page_tokens, memory.kv_transfer_dtype), model.dtype, room)


def check_tensors(plan: Plan) -> None:
    """Compare the tensors and the vocabulary of a whole checkpoint with its configuration. Raises: ConfigError."""
    from ..models.checkpoint.weights import check_weights  # it loads torch

    model = model_of(plan)
    try:
        problems = () if model.null is not None else check_weights(plan.model, model).problems
        check_vocabulary(plan.model, model)
    except CheckpointError as error:
        problems = (str(error),)
    if problems:
        more = f", and {len(problems) - 1} others" if len(problems) > 1 else ""
        raise ConfigError(f"{problems[0]}{more} (mmrt model check)")


def model_of(plan: Plan) -> ModelConfig:
    """Read the model's configuration, as actors will. Raises ConfigError."""
    section, memory = plan.config.model, plan.config.memory
    try:
        return load_model_config(plan.model, section.dtype, section.max_context, memory.kv_dtype, section.weights)
    except ValueError as error:
        raise ConfigError(str(error)) from None
