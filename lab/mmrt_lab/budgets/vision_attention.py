"""Variants of vision attention for ahead-of-time compilation, with budgets."""

from collections.abc import Iterator

from mmrt.triton_kernels.launch import Launch
from mmrt.triton_kernels.vision_attention import config, kernel

from .ahead_of_time import Budget, Variant, everywhere

_STRIDES = tuple(f"stride_{tensor}{axis}" for tensor in "qkvo" for axis in "th")
_PRODUCTS = {80: "mma", 90: "wgmma", 100: "tcgen05"}
_Limits = dict[int, tuple[int, int]]


def _variant(name: str, launch: Launch, architecture: int, budget: Budget) -> Variant:
    function = kernel.sequences_kernel if "TILE" in launch.tiles else kernel.windows_kernel
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16") | dict.fromkeys(_STRIDES, "i64")
    types |= {"bounds_ptr": "*i32", "num_sequences": "i32", "scale": "fp32"}
    return Variant(name, function, types, {}, _STRIDES, launch, {architecture: budget})


def _frames(head_dim: int, limits: _Limits) -> Iterator[Variant]:
    """One variant for each architecture, since the launch depends on it. ``limits``: registers and bytes of shared memory."""
    for architecture, numbers in limits.items():
        launch = config.sequences_launch(head_dim, 2, architecture)
        yield _variant(
            f"frames_d{head_dim}", launch, architecture, Budget(*numbers, (_PRODUCTS[architecture], "cp_async", "wide_loads"))
        )


def _windows(head_dim: int, max_length: int, limits: _Limits) -> Iterator[Variant]:
    """Windows of fewer than 64 tokens are too few rows for wgmma and tcgen05."""
    launch = config.windows_launch(head_dim, 2, max_length)
    for architecture, numbers in limits.items():
        product = _PRODUCTS[architecture] if max_length == config.MAX_WINDOW else "mma"
        yield _variant(f"windows_d{head_dim}_{max_length}", launch, architecture, Budget(*numbers, (product, "wide_loads")))


def _rotation(head_dim: int, registers: int) -> Variant:
    """Of 16 heads."""
    launch = config.rotation_launch(16, head_dim)
    types = {"q_ptr": "*bf16", "k_ptr": "*bf16", "cos_ptr": "*fp32", "sin_ptr": "*fp32"} | dict.fromkeys(_STRIDES[:4], "i64")
    constants, budgets = {"NUM_HEADS": 16, "HALF": head_dim // 2}, everywhere(registers, 0, "wide_loads")
    return Variant(f"rotate_d{head_dim}", kernel.rotate_kernel, types, constants, _STRIDES[:4], launch, budgets)


VARIANTS = (
    *_frames(32, {80: (238, 27_000), 90: (185, 36_000), 100: (176, 36_000)}),
    *_frames(64, {80: (206, 49_200), 90: (124, 66_000), 100: (138, 66_100)}),
    *_frames(80, {80: (255, 61_440), 90: (154, 82_000), 100: (141, 62_100)}),
    *_frames(128, {80: (255, 98_400), 90: (195, 131_100), 100: (202, 131_700)}),
    *_windows(64, 64, {80: (106, 10_300), 90: (82, 16_500), 100: (62, 16_500)}),
    *_windows(80, 64, {80: (124, 12_300), 90: (86, 18_500), 100: (72, 18_500)}),
    *_windows(80, 32, {80: (71, 7_200), 90: (71, 7_200), 100: (72, 7_200)}),
    *_windows(80, 16, {80: (60, 4_700), 90: (62, 4_700), 100: (51, 4_700)}),
    *_windows(128, 64, {80: (153, 24_600), 90: (137, 32_800), 100: (106, 32_800)}),
    _rotation(64, 48),
    _rotation(80, 48),
    _rotation(128, 48),
)
