"""Captured plans: a plan with its inputs and outputs, as a file that can be replayed anywhere.

Written by ``replay_capture`` in the actor (or from outside, if the actor hangs), read by ``mmrt replay``. The file is safetensors:
pages of the pools before and after as tensors, the rest as one JSON object in its metadata. Nothing in it is executed.
"""

import os
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..bus.messages import PageRun, Result, SequenceSpec
from ..bus.plans import Plan
from ..config.runtime_config import RuntimeConfig, convert_config, to_data
from ..errors import ConfigError, UserError
from ..pools import PoolName
from ..process.run import RunInfo, with_key
from .flight import PLAN_NAMES, UNIT_NAMES

SUFFIX = ".safetensors"
_FORMAT = "mmrt capture 3"
_METADATA = "mmrt"


class CapturedRow(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a row that a prefill plan reads. Its prompts and ids are tensors of the file."""

    row: int
    generation: int
    spec: SequenceSpec
    block_tables: tuple[list[int], list[int]]
    committed: int


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Everything except the arrays."""

    format: str
    actor: str
    plan_id: int
    plan: Plan
    run_id: str
    model_path: str
    config: dict[str, Any]
    page_bytes: dict[str, int]  # by pool
    inputs: dict[str, list[int]]  # by pool: page numbers, in the order of the tensor
    outputs: dict[str, list[int]]
    rows: list[CapturedRow]
    max_context: int
    captured_s: float  # wall clock
    result: Result | None = None  # None: the plan was not done or not finished
    elapsed_s: float = 0.0


_decode_header = msgspec.json.Decoder(Header).decode


class Capture(msgspec.Struct, frozen=True):
    """``tensors``: ``before.POOL`` and ``after.POOL`` uint8 [pages, page_bytes]; ``prompt.ROW.MEMBER``, ``ids.ROW`` int32."""

    header: Header
    tensors: dict[str, NDArray[Any]]

    @property
    def about(self) -> str:
        """Describe the plan in a few words."""
        plan = self.header.plan
        name, unit = PLAN_NAMES[plan.KIND], UNIT_NAMES[plan.KIND]
        return f"{self.header.actor} plan {self.header.plan_id:#x} ({name}, {plan.units} {unit})"

    @property
    def file_name(self) -> str:
        return f"{self.header.actor}-{self.header.plan_id:x}{SUFFIX}"

    @property
    def config(self) -> RuntimeConfig:
        """Return the configuration of the run. Raises UserError if this version does not accept it."""
        try:
            return convert_config(self.header.config)
        except ConfigError as error:
            raise UserError(f"the capture's configuration: {error}") from None

    def encoded(self) -> bytes:
        """Return the contents of its file."""
        from safetensors.numpy import save

        tensors = {name: np.ascontiguousarray(tensor) for name, tensor in self.tensors.items()}
        data: bytes = save(tensors, {_METADATA: msgspec.json.encode(self.header).decode()})
        return data

    def save(self, path: Path) -> None:
        """Write the file atomically. Raises OSError."""
        data = self.encoded()
        part = path.with_name(f".{path.name}.{os.getpid()}")
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "wb") as file:
                file.write(data)
            os.replace(part, path)
        except OSError:
            part.unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file. Raises UserError that names the defect."""
        from safetensors import SafetensorError, safe_open

        if not path.is_file():
            raise UserError(f"{path} is {'a directory' if path.is_dir() else 'not there'}")
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                names = file.keys() if _METADATA in metadata else ()  # not all of a checkpoint
                tensors = {name: file.get_tensor(name) for name in names}
        except (SafetensorError, OSError, TypeError, AttributeError) as error:  # the last two: types that numpy does not have
            raise UserError(f"{path} cannot be read as safetensors: {error}") from None
        if _METADATA not in metadata:
            raise UserError(f"{path} is no captured plan: its metadata have no {_METADATA!r}")
        try:
            header = _decode_header(metadata[_METADATA])
        except (msgspec.DecodeError, RecursionError) as error:
            raise UserError(f"{path}: its description cannot be read: {error}") from None
        if header.format != _FORMAT:
            raise UserError(f"{path} is a {header.format!r}, this version reads {_FORMAT!r}")
        capture = cls(header, tensors)
        capture._check(path)
        return capture

    def _check(self, path: Path) -> None:
        """Raise UserError unless every tensor is present with the size given in the header, and the plan names no other page."""
        header = self.header
        wanted: dict[str, tuple[tuple[int, ...], str]] = {}
        for when, pages_by_pool in (("before", header.inputs), ("after", header.outputs if header.result is not None else {})):
            for pool, pages in pages_by_pool.items():
                if pool not in header.page_bytes:
                    raise UserError(f"{path} has pages of pool {pool!r}, whose page size it does not say")
                wanted[f"{when}.{pool}"] = (len(pages), header.page_bytes[pool]), "uint8"
        for row in header.rows:
            spec = row.spec
            for member, length in enumerate((spec.num_prompt_tokens, spec.num_companion_tokens)):
                wanted[f"prompt.{row.row}.{member}"] = (length,), "int32"
            wanted[f"ids.{row.row}"] = (row.committed,), "int32"
        for name, (shape, dtype) in wanted.items():
            tensor = self.tensors.get(name)
            if tensor is None or tensor.shape != shape or tensor.dtype != dtype:
                found = "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
                raise UserError(f"{path}: tensor {name!r} is {found}, expected {dtype} {list(shape)}")
        indices = self.page_indices()
        try:
            self.renumbered_plan()
            tables = [("kv", table) for row in header.rows for table in row.block_tables]
            for pool, pages in (*header.outputs.items(), *tables):
                if missing := set(pages) - indices.get(pool, {}).keys():
                    raise KeyError(min(missing))
        except KeyError as error:
            raise UserError(f"{path}: the plan names {error.args[0]!r}, which was not captured") from None

    def page_indices(self) -> dict[str, dict[int, int]]:
        """Return, by pool, the index of each captured page in its tensor."""
        return {pool: {page: index for index, page in enumerate(pages)} for pool, pages in self.header.inputs.items()}

    def renumbered_plan(self) -> Plan:
        """Return the plan for pools that hold only the captured pages, all of generation 1, and rows from 0 on of generation 1.

        Raises: KeyError for a page or row that was not captured.
        """
        indices = self.page_indices()
        rows = {row.row: index for index, row in enumerate(self.header.rows)}

        def run(pool: PoolName, source: PageRun) -> PageRun:
            return PageRun([indices[pool][page] for page in source.pages], [1] * len(source.pages))

        return self.header.plan.renumbered(run, rows.__getitem__)


def make_header(
    *,
    actor: str,
    plan_id: int,
    plan: Plan,
    run_id: str,
    info: RunInfo,
    page_bytes: dict[str, int],
    pages: tuple[dict[str, list[int]], dict[str, list[int]]],
    rows: list[CapturedRow],
    max_context: int,
    captured_s: float,
) -> Header:
    """Make the header of a plan not done yet. ``info`` is the run's; ``pages`` are those before and after.

    Captures may be shared: the run's API key is left out.
    """
    config = with_key(info, "").config
    return Header(
        format=_FORMAT,
        actor=actor,
        plan_id=plan_id,
        plan=plan,
        run_id=run_id,
        model_path=info.model_path,
        config=to_data(config),
        page_bytes=page_bytes,
        inputs=pages[0],
        outputs=pages[1],
        rows=rows,
        max_context=max_context,
        captured_s=captured_s,
    )


def captures_in(directory: Path, actor: str = "") -> list[Path]:
    """Return the captured plans in a directory, of one actor or of all, the newest last."""
    found = directory.glob(f"{actor or '*'}-*{SUFFIX}")
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name))
