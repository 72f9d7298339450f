"""Do a captured plan again, alone: one actor's worker in this process, on pools with just the plan's pages. No run.

Called by ``mmrt replay``. The worker is the actor's own; only what surrounds it (run directory, pools, rows) is made
here, in a temporary directory.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..actors.encoder import EncoderWorker
from ..actors.host.device import Completion
from ..actors.host.embedding_pages import HostEmbeddingPages
from ..actors.prefill import PrefillWorker
from ..actors.video.worker import VideoWorker
from ..models.architecture import ModelConfig
from ..models.checkpoint.weights import read_weights, torch_dtype
from ..models.config import load_model_config
from ..models.errors import CheckpointError
from ..models.lm.kv_pages import KvPages
from ..models.lm.language_model import build_language_model
from ..models.state_layout import state_layout
from ..models.towers.dispatch import Towers
from ..runtime.bus.messages import ItemError, Result
from ..runtime.bus.plans import Plan
from ..runtime.bus.wire import encode
from ..runtime.errors import UserError
from ..runtime.observe.capture import Capture
from ..runtime.process.memory_layout import EMPTY_PAGE_BYTES
from ..runtime.stage_table import STAGES, WORKERS, stage_of
from ..schema.rows import Phase
from ..shm.pool import PagePool
from ..shm.run_directory import RunDirectory
from ..shm.sequence_table import SequenceTable

Execute = Callable[[Plan], Result]


class Difference(NamedTuple):
    """The difference between a pool's pages and the captured ones. ``largest`` is of values in the model's type, None for bytes."""

    pool: str
    num_pages: int
    num_different: int
    num_bytes: int
    largest: float | None


class Outcome(NamedTuple):
    """The outcome of a replay. ``error``: the exception that the worker raised; ``differences`` None: nothing to compare with."""

    result: Result | None
    error: Exception | None
    seconds: list[float]
    differences: list[Difference] | None


class Replay:
    """A captured plan, ready to be done. ``open`` makes one and cleans up behind it."""

    def __init__(self, capture: Capture, model: ModelConfig, pools: dict[str, PagePool], worker: Callable[[], Execute]) -> None:
        """Use ``open``. ``worker`` gives a worker's ``execute``, as it is before its first plan where that makes a difference."""
        self._capture = capture
        self._model = model
        self._pools = pools
        self._worker = worker
        self.plan = capture.renumbered_plan()

    @classmethod
    @contextmanager
    def open(cls, capture: Capture, model_path: Path | None = None) -> "Iterator[Replay]":
        """Make the surroundings. ``model_path``: another place of the checkpoint than the capture's.

        Raises: UserError, CheckpointError; ShmError if the pages do not fit into memory.
        """
        header = capture.header
        if stage_of(header.actor) not in WORKERS:
            raise UserError(f"plans of {header.actor!r} cannot be done again, those of {', '.join(WORKERS)} can")
        stage, config = STAGES[stage_of(header.actor)], capture.config
        path = model_path or Path(header.model_path)
        formats = config.model
        model = load_model_config(path, formats.dtype, formats.max_context, config.memory.kv_dtype, formats.weights)
        if stage_of(header.actor) == "prefill" and state_layout(model) is not None:
            raise UserError("plans of prefill for a model with recurrent states cannot be done again: a capture has no states")
        torch.set_num_threads(config.actor(header.actor).threads or 1)  # 0: recorded before threads were planned
        base = Path(tempfile.mkdtemp(prefix="mmrt-replay-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        try:
            run = RunDirectory.create(base / "run", {})
            try:
                pools = {name: _make_pool(run, name, capture) for name in (*stage.inputs, stage.output)}
                table = _make_rows(run, capture, config.memory.kv_page_tokens)
                with torch.no_grad(), ExitStack() as workers:
                    yield cls(capture, model, pools, _worker(capture, path, model, pools, table, workers))
            finally:
                run.close()
        finally:
            shutil.rmtree(base, ignore_errors=True)

    def reset(self) -> None:
        """Put the pages back as they were before."""
        for name, pages in self._capture.header.inputs.items():
            self._pools[name].data[: len(pages)] = self._capture.tensors[f"before.{name}"]

    def run(self, repeat: int = 1, call: Callable[[Execute, Plan], Result] | None = None) -> Outcome:
        """Do the plan, ``repeat`` times, and compare. ``call`` calls the worker in our place (a debugger)."""
        seconds: list[float] = []
        result: Result | None = None
        for _ in range(repeat):
            self.reset()
            execute = self._worker()
            began_s = time.perf_counter()
            try:
                result = execute(self.plan) if call is None else call(execute, self.plan)
            except Exception as error:
                return Outcome(None, error, seconds, None)
            seconds.append(time.perf_counter() - began_s)
        return Outcome(result, None, seconds, self._compare())

    def _compare(self) -> list[Difference] | None:
        header = self._capture.header
        if header.result is None or isinstance(header.result, ItemError):
            return None
        indices = self._capture.page_indices()
        found = []
        for pool, pages in header.outputs.items():
            now = self._pools[pool].data[np.array([indices[pool][page] for page in pages], dtype=np.int64)]
            then = self._capture.tensors[f"after.{pool}"]
            different = (now != then).any(axis=1)
            largest = self._largest(pool, now[different], then[different]) if pool in ("embedding", "kv") and different.any() else None
            found.append(Difference(pool, len(pages), int(different.sum()), int((now != then).sum()), largest))
        return found

    def _largest(self, pool: str, now: NDArray[Any], then: NDArray[Any]) -> float:
        first, second = (self._numbers(pool, torch.from_numpy(pages)) for pages in (now, then))
        return float((first - second).abs().nan_to_num(float("inf")).max())

    def _numbers(self, pool: str, pages: torch.Tensor) -> torch.Tensor:
        model = self._model
        dtype = torch_dtype(model.dtype)
        if pool == "embedding":
            return pages.view(dtype).float()
        groups = KvPages.of_groups(model.language, pages, self._capture.config.memory.kv_page_tokens, dtype, model.kv_dtype)
        every = torch.arange(len(pages))
        found = [kv.gather(layer, every).to(torch.float32, copy=True).flatten() for kv in groups for layer in range(kv.num_layers)]
        return torch.cat(found)


def same_result(first: Result | None, second: Result | None) -> bool:
    """Return whether two results say the same."""
    return first is not None and second is not None and encode(first) == encode(second)


def _make_pool(run: RunDirectory, name: str, capture: Capture) -> PagePool:
    header = capture.header
    num_pages = max(1, len(header.inputs.get(name, ())))
    pool = PagePool.create(run, name, num_pages, header.page_bytes.get(name, 1))
    pool.generations[:] = 1
    return pool


def _make_rows(run: RunDirectory, capture: Capture, page_tokens: int) -> SequenceTable:
    """The captured rows, from row 0 on, on the captured pages."""
    header = capture.header
    specs = [encode(row.spec) for row in header.rows]
    table = SequenceTable.create(
        run,
        max(1, len(header.rows)),
        header.max_context,
        -(-header.max_context // page_tokens),
        max_spec_bytes=max(map(len, specs), default=1),
        max_state_bytes=1,
    )
    kv = capture.page_indices().get("kv", {})
    for index, (row, spec) in enumerate(zip(header.rows, specs, strict=True)):
        generation = table.begin(index)
        assert generation == 1
        for member, pages in enumerate(row.block_tables):
            table.write_prompt(index, member, capture.tensors[f"prompt.{row.row}.{member}"])
            table.append_pages(index, member, [kv[page] for page in pages])
        table.ids[index, : row.committed] = capture.tensors[f"ids.{row.row}"]
        table.counts[index] = generation << 32 | row.committed
        table.write_spec(index, spec)
        table.set_phase(index, Phase.PREPARE)
    return table


def _worker(
    capture: Capture, path: Path, model: ModelConfig, pools: dict[str, PagePool], table: SequenceTable, workers: ExitStack
) -> Callable[[], Execute]:
    """A function that gives the ``execute`` of the actor's own worker on these pools. The video worker's keeps items open: each gets
    its own, which ends with ``workers``."""
    config = capture.config
    if stage_of(capture.header.actor) == "video":
        return lambda: workers.enter_context(closing(VideoWorker(pools["media"], pools["patch"], model, config.media))).execute
    weights = read_weights(path, model)
    completion = Completion(torch.device("cpu"))
    if stage_of(capture.header.actor) == "encoder":
        towers = Towers(model, weights)
        encoder = EncoderWorker(towers, pools["patch"], HostEmbeddingPages(model, pools["embedding"]), completion)
        return lambda: encoder.execute
    page_tokens = config.memory.kv_page_tokens
    expected, apart = model.kv_page_bytes(page_tokens), model.window_page_bytes(page_tokens)
    if apart and pools["kv"].page_bytes == (expected - apart or EMPTY_PAGE_BYTES):
        raise UserError(
            "plans of prefill cannot be done again where layers with a window have pages of their own: a capture has none;"
            " memory.kv_transfer_dtype keeps pages whole, and so does a model.max_context of less than two windows and a chunk"
        )
    if pools["kv"].page_bytes != expected:
        raise CheckpointError(f"{path}: its KV pages have {expected} bytes, those of the capture {pools['kv'].page_bytes}")
    language_model = build_language_model(model, weights, torch.from_numpy(pools["kv"].data), page_tokens)
    prefill = PrefillWorker(model, language_model, table, HostEmbeddingPages(model, pools["embedding"]), page_tokens, completion)
    return lambda: prefill.execute
