"""A run directory on tmpfs, a tiny checkpoint, and a ``Bench`` with the tiny model or with one that counts."""

import os
from pathlib import Path

import pytest
import torch

from mmrt.models.architecture import ModelConfig
from mmrt.models.checkpoint.weights import attach_weights, write_weights
from mmrt.models.config import load_model_config
from mmrt.models.make.checkpoint import make_checkpoint
from mmrt.shm.run_directory import RunDirectory
from mmrt.tests.actors.bench import Bench, Counting, Weights

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@pytest.fixture(scope="session", autouse=True)
def torch_as_in_actors() -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with both towers, in float32."""
    path = tmp_path_factory.mktemp("checkpoints") / "tiny"
    make_checkpoint("tiny", path, "qwen2_5_omni")
    return path


@pytest.fixture(scope="session")
def tiny(checkpoint: Path) -> tuple[ModelConfig, Weights]:
    """Its configuration and weights."""
    return load(checkpoint)


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelConfig, Weights]:
    """Of a tiny checkpoint whose embedding rows have several parts."""
    make_checkpoint("tiny", path := tmp_path_factory.mktemp("checkpoints") / "deep", "qwen3_vl")
    return load(path)


def load(checkpoint: Path) -> tuple[ModelConfig, Weights]:
    config = load_model_config(checkpoint)
    buffer = bytearray()

    def allocate(num_bytes: int) -> memoryview:
        buffer.extend(bytes(num_bytes))
        return memoryview(buffer)

    index = write_weights(checkpoint, config, allocate)
    return config, attach_weights(memoryview(buffer), index)


@pytest.fixture
def launches_ahead() -> bool:
    """Whether decode launches a step before it commits the one before: tests of both ways have it as a parameter."""
    return False


@pytest.fixture
def bench(run: RunDirectory, tiny: tuple[ModelConfig, Weights], launches_ahead: bool) -> Bench:
    """With the tiny model."""
    return Bench(run, *tiny, launches_ahead=launches_ahead)


@pytest.fixture
def counting(run: RunDirectory, tiny: tuple[ModelConfig, Weights], launches_ahead: bool) -> Bench:
    """With a model that counts."""
    config, weights = tiny
    return Bench(run, config, weights, Counting(config.language.vocab_size), launches_ahead=launches_ahead)
