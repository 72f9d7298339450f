"""The costs of plans and of decode's steps, kept on disk from run to run: ``$XDG_STATE_HOME/mmrt/costs.json``.

A line per stage for each setup: model, number formats, device, layout and threads. Whatever is wrong with the file is logged, and the
run learns anew. Runs at the same time replace the file whole, each with its own setup changed: the last one wins.
"""

import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Annotated

import msgspec

from ...cpu_kernels.processor import processor_name
from ...runtime.config.runtime_config import RuntimeConfig
from ...runtime.controller.scheduling.facts import Cost
from ...runtime.process.memory_layout import MemoryLayout

log = logging.getLogger(__name__)

COSTS_NAME = "costs.json"
MAX_SETUPS = 32  # the oldest go first
MAX_BYTES = 1 << 20
MIN_UNITS = 64  # of the largest plan: smaller ones say little of larger ones. A step of decode counts as it is
_STAGES = ("encoder", "prefill", "decode")  # those whose threads count

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class Line(msgspec.Struct, frozen=True):
    """A plan of n units takes ``base_s`` + ``unit_s`` n seconds; the largest that was measured had ``largest``."""

    base_s: _Seconds
    unit_s: _Seconds
    largest: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]


class Setup(msgspec.Struct, frozen=True):
    saved_s: float  # since 1970
    stages: dict[str, Line]


_decode = msgspec.json.Decoder(dict[str, Setup]).decode


class CostsFile:
    """The lines of one setup in the file at ``path``."""

    def __init__(self, path: Path, setup: str) -> None:
        self._path = path
        self._setup = setup
        self._is_known_to_fail = False

    @classmethod
    def of_run(cls, state_home: Path, config: RuntimeConfig, layout: MemoryLayout, model: Path) -> "CostsFile":
        """Return the file for the setup of a run."""
        return cls(state_home / COSTS_NAME, setup_of(config, layout, model))

    def load(self) -> dict[str, Cost]:
        """Return the lines by stage; none where there is no such file, or it is not one of ours."""
        found = self._read().get(self._setup)
        lines = {} if found is None else found.stages
        return {stage: Cost(line.base_s, line.unit_s, line.largest) for stage, line in lines.items()}

    def save(self, costs: Mapping[str, Cost]) -> None:
        """Write the lines; those of other setups stay."""
        lines = {stage: Line(*cost) for stage, cost in costs.items() if cost.largest >= MIN_UNITS or stage == "decode"}
        if not lines:
            return
        part = self._path.with_suffix(f".{os.getpid()}.part")
        try:
            setups = self._read()
            setups[self._setup] = Setup(time.time(), lines)
            newest = sorted(setups.items(), key=lambda item: item[1].saved_s)[-MAX_SETUPS:]
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            part.write_bytes(msgspec.json.format(msgspec.json.encode(dict(newest)), indent=1) + b"\n")
            os.replace(part, self._path)
            self._is_known_to_fail = False
        except OSError as error:
            if not self._is_known_to_fail:
                log.warning("%s is not written: %s", self._path, error.strerror)
            self._is_known_to_fail = True
            with suppress(OSError):
                part.unlink(missing_ok=True)

    def _read(self) -> dict[str, Setup]:
        try:
            with self._path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
            if len(data) > MAX_BYTES:
                raise ValueError(f"it has more than {MAX_BYTES} bytes")
            return _decode(data)
        except FileNotFoundError:
            return {}
        except OSError as error:
            log.warning("%s is ignored: %s", self._path, error.strerror)
        except (ValueError, RecursionError) as error:  # of msgspec, and of Unicode
            log.warning("%s is ignored: %s", self._path, error)
        return {}


def setup_of(config: RuntimeConfig, layout: MemoryLayout, model: Path) -> str:
    """Name all that determines what plans cost."""
    digest = blake2b((model / "config.json").read_bytes(), digest_size=4).hexdigest()
    threads = ", ".join(f"{stage} {config.actor(stage).threads}" for stage in _STAGES)
    formats = f"{layout.dtype}, weights {layout.weights}, KV {layout.kv_dtype}"
    device = f"{layout.device}, {processor_name()}" + (", videos on GPU" if config.media.gpu_decoding else "")
    layout_of_run = config.actors.layout + (" as a pipeline" if config.scheduling.prefill_pipeline else "")
    return f"{model.name} {digest}; {formats}; {device}; {layout_of_run}; threads: {threads}"
