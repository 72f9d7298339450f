"""Configuration of a storm's run. Called by ``storm``."""

from pathlib import Path
from typing import Literal

import msgspec

from mmrt.models.architecture import WeightFormat
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.config.sections import (
    ActorsSection,
    DeviceSection,
    MediaSection,
    MemorySection,
    ModelSection,
    SchedulingSection,
    ServerSection,
    SupervisorSection,
    TurnsMode,
)
from mmrt.runtime.stage_table import devices_of

Dtype = Literal["float32", "bfloat16"]
DRAIN_S = 6.0
WATCHDOG_S = 6.0


def storm_config(
    model: Path,
    layout: str,
    turns: TurnsMode = "off",
    has_default_restarts: bool = False,
    dtype: Dtype = "float32",
    weights: WeightFormat = "auto",
) -> RuntimeConfig:
    """Few rows and small budgets, so that every phase occurs, and quanta of one layer; a supervisor that restarts every actor at once
    and without limit, unless ``has_default_restarts``. The devices are those of the layout."""
    untiring = SupervisorSection(restart_limit=1_000_000, backoff_s=0.02, backoff_max_s=0.1)
    return RuntimeConfig(
        model=ModelSection(path=str(model), dtype=dtype, weights=weights, max_context=4096),
        server=ServerSection(port=0),
        devices=tuple(DeviceSection(name=name) for name in dict.fromkeys(devices_of(layout).values())),
        actors=ActorsSection(layout=layout, turns=turns),
        media=MediaSection(item_timeout_s=5.0),
        memory=MemorySection(max_sequences=6, kv_tokens=16384, media_mib=8, patch_mib=16, embedding_tokens=4096),
        scheduling=SchedulingSection(
            tbt_target_ms=0.1 if turns == "layers" else 0.0, prefill_budget_tokens=64, encode_budget_tokens=256
        ),
        supervisor=msgspec.structs.replace(
            SupervisorSection() if has_default_restarts else untiring, drain_s=DRAIN_S, watchdog_s=WATCHDOG_S
        ),
    )
