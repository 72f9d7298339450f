"""Pixel rows of transformers' image and video processors. Importing these takes seconds: one process does it for all calls."""

import multiprocessing
from collections.abc import Mapping
from pathlib import Path

import numpy as np

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["mmrt.tests.media.processor_process"])


def processed(media: Mapping[str, np.ndarray], folder: Path, checkpoint: Path | None = None) -> dict[str, np.ndarray]:
    """Rows and grids of images and videos, named NAME and NAME_grid, by a process of its own; files go to ``folder``."""
    np.savez(folder / "in.npz", **media)
    process = _FORKS.Process(target=_process, args=(folder, checkpoint))
    process.start()
    process.join(100)
    assert process.exitcode == 0, f"the processors ended with status {process.exitcode}"
    process.close()
    with np.load(folder / "out.npz") as arrays:
        return dict(arrays)


def _process(folder: Path, checkpoint: Path | None) -> None:
    from mmrt.tests.media.processor_process import main  # here alone: it stands in for torchvision

    main(str(folder / "in.npz"), str(folder / "out.npz"), checkpoint and str(checkpoint))
