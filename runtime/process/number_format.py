"""The dtype that a model computes in on a CPU, where the configuration leaves it open.

Processors without units for bfloat16 compute it by way of float32 one number at a time: prefill takes five times as long. There the
weights are converted to float32 when they are loaded, if twice their memory is there.
"""

from pathlib import Path

import msgspec

from ..config import RuntimeConfig

WEIGHTS_SHARE = 0.5  # of the memory that is available, for weights in float32

_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # the last on Arm
_LESS_CAPABLE = frozenset({"default", "avx2"})  # ATEN_CPU_CAPABILITY: torch is told to leave the units alone


def has_bfloat16_units(capability: str = "", proc: Path = Path("/proc")) -> bool:
    """Return whether torch can compute bfloat16 with this processor's own instructions. ``capability``: ATEN_CPU_CAPABILITY."""
    if capability in _LESS_CAPABLE:
        return False
    lines = (proc / "cpuinfo").read_text().splitlines()
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return not _FLAGS.isdisjoint(flags)


def plan_dtype(config: RuntimeConfig, model: Path, has_units: bool, free_bytes: int) -> tuple[RuntimeConfig, str]:
    """Return the configuration with the dtype that suits the processor, and the reason in words; "" if the checkpoint's own stays.

    ``free_bytes``: memory that is available.
    """
    if config.model.dtype != "auto" or config.model.on_cuda or has_units or _dtype_of(model) == "float32":
        return config, ""
    why = "the processor has no bfloat16 units"
    num_bytes = 2 * sum(path.stat().st_size for path in model.glob("*.safetensors"))
    if num_bytes > WEIGHTS_SHARE * free_bytes:
        return config, f"{why}, but float32 weights would take {num_bytes >> 20} of {free_bytes >> 20} MiB"
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, dtype="float32")), why


def _dtype_of(model: Path) -> str:
    """Return the dtype that a checkpoint names; "" if that is for its family to say."""
    try:
        found = msgspec.json.decode((model / "config.json").read_bytes())
        return str(found.get("dtype") or found.get("torch_dtype") or "")
    except (OSError, msgspec.DecodeError, AttributeError):
        return ""  # reported when the model's configuration is read
