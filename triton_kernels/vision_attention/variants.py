"""What of vision attention is compiled ahead of time, and what it may cost."""

from ..ahead_of_time import Budget, Variant
from ..launch import Launch
from . import config, kernel

_STRIDES = tuple(f"stride_{tensor}{axis}" for tensor in "qkvo" for axis in "th")


def _variant(name: str, launch: Launch, budgets: dict[int, Budget]) -> Variant:
    function = kernel.sequences_kernel if "TILE" in launch.tiles else kernel.windows_kernel
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16") | dict.fromkeys(_STRIDES, "i64")
    types |= {"bounds_ptr": "*i32", "num_sequences": "i32", "scale": "fp32"}
    return Variant(name, function, types, launch.tiles, _STRIDES, launch.num_warps, launch.num_stages, budgets)


_CP_ASYNC = ("cp_async", "wide_loads")
_FRAMES = {  # sm_100 is not guarded: Triton 3.7.1 spills 8 bytes there
    80: Budget(255, 61_440, ("mma", *_CP_ASYNC)),
    90: Budget(154, 82_000, ("wgmma", *_CP_ASYNC)),
}
_WINDOWS = {
    80: Budget(124, 12_300, ("mma", "wide_loads")),
    90: Budget(86, 18_500, ("wgmma", "wide_loads")),
    100: Budget(72, 18_500, ("tcgen05", "wide_loads")),
}
_FRAMES_64 = {
    80: Budget(206, 49_200, ("mma", *_CP_ASYNC)),
    90: Budget(124, 66_000, ("wgmma", *_CP_ASYNC)),
    100: Budget(138, 66_100, ("tcgen05", *_CP_ASYNC)),
}
_FRAMES_128 = {
    80: Budget(255, 98_400, ("mma", *_CP_ASYNC)),
    90: Budget(195, 131_100, ("wgmma", *_CP_ASYNC)),
    100: Budget(202, 131_700, ("tcgen05", *_CP_ASYNC)),
}
VARIANTS = (
    _variant("frames_d64", config.sequences_launch(64, 2), _FRAMES_64),
    _variant("frames_d80", config.sequences_launch(80, 2), _FRAMES),
    _variant("windows_d80", config.windows_launch(80, 2, config.MAX_WINDOW), _WINDOWS),
    _variant("frames_d128", config.sequences_launch(128, 2), _FRAMES_128),
)
