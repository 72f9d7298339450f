"""The vision tower that the two Qwen2.5 families share, and the building of transformers' modules over shared weights.

Modules are built on the meta device and take views of the weights: none is copied. Only families import transformers,
when they build their towers.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...architecture import ModelConfig, VisionConfig
from ...errors import CheckpointError
from ...lm.decoder import AfterLayer
from ...towers.interface import TowerInput

FindModule = Callable[[dict[str, Any]], tuple[Any, Any]]
"""From a configuration's fields, transformers' module class and its configuration."""


class VisionTower:
    """The tower where its weights lie; on CUDA it is ours in place of transformers' (``triton_vision``)."""

    def __init__(self, model: ModelConfig, weights: dict[str, Tensor], device: torch.device, find_module: FindModule) -> None:
        """Uses those ``weights`` whose names start with ``vision.``. Raises: CheckpointError."""
        assert model.vision is not None and model.vision_rules is not None
        config, rules = model.vision, model.vision_rules
        self._config, self._dtype, self._device = config, getattr(torch, model.dtype), device
        frame = rules.temporal_patch_size * rules.patch_size**2
        self._mean = (torch.tensor(rules.image_mean) * 255).repeat_interleave(frame).to(device)
        self._std = (torch.tensor(rules.image_std) * 255).repeat_interleave(frame).to(device)
        self._kernels: Callable[..., Tensor] | None = None
        if device.type == "cuda":
            from .triton_vision import VisionKernels  # Triton is imported only here: never on the CPU

            self._kernels = VisionKernels(config, weights)
        else:
            self._module = build_module(*find_module(_fields(config)), "vision.", weights, device)

    def encode(self, parts: Sequence[TowerInput], after_layer: AfterLayer | None = None) -> list[Tensor]:
        rows = self._normalised([part.rows for part in parts])
        grids = torch.tensor([part.grid for part in parts])
        geometry = self._geometry(grids)
        output: Tensor
        if self._kernels is not None:
            output = self._kernels(rows, after_layer, **geometry)
        else:
            with calling(after_layer, self._module.blocks):
                output = self._module(rows, grid_thw=grids, **geometry).pooler_output
        return list(torch.split(output, (grids.prod(1) // self._config.merge_size**2).tolist()))

    def _geometry(self, grids: Tensor) -> dict[str, Any]:
        """Derive on the host what transformers' module would derive from the grids [items, 3], and send it to the device."""
        from transformers import vision_utils

        config = self._config
        windows = vision_utils.get_vision_window_index(grids, config.merge_size, config.window_size, config.patch_size)
        frames = vision_utils.get_vision_cu_seqlens(grids)
        tensors = {
            "position_ids": vision_utils.get_vision_position_ids(grids, config.merge_size),
            "window_index": windows[0],
            "cu_window_seqlens": windows[1],
            "cu_seqlens": frames,
        }
        longest = {"max_seqlen": int(frames.diff().max()), "max_window_seqlen": int(windows[1].diff().max())}
        return {name: tensor.to(self._device) for name, tensor in tensors.items()} | longest

    def _normalised(self, parts: Sequence[NDArray[Any]]) -> Tensor:
        """All rows, one part after another; for a GPU they go through pinned memory, in stream order."""
        size = sum(len(part) for part in parts), parts[0].shape[1]
        staged = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        np.concatenate(parts, out=staged.numpy())
        pixels = staged.to(self._device, non_blocking=True).float()
        return pixels.sub_(self._mean).div_(self._std).to(self._dtype)


def _fields(config: VisionConfig) -> dict[str, Any]:
    """The configuration under transformers' names."""
    return {
        "depth": config.depth,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_heads,
        "in_channels": config.in_channels,
        "patch_size": config.patch_size,
        "temporal_patch_size": config.temporal_patch_size,
        "spatial_merge_size": config.merge_size,
        "window_size": config.window_size,
        "out_hidden_size": config.out_hidden_size,
        "fullatt_block_indexes": list(config.full_attention_blocks),
        "hidden_act": config.hidden_act,
    }


@contextmanager
def calling(after_layer: AfterLayer | None, layers: Iterable[Any]) -> Iterator[None]:
    """Call ``after_layer``, if there is one, after each of a module's layers."""
    if after_layer is None:
        yield
        return

    def call(*_: object) -> None:  # what a hook returns would take the place of the layer's output
        after_layer()

    hooks = [layer.register_forward_hook(call) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def build_module(module_class: Any, config: Any, prefix: str, weights: dict[str, Tensor], device: torch.device) -> Any:
    """A module on the meta device whose parameters are replaced by the views whose names start with ``prefix``, and whose computed
    buffers are made anew. Raises: CheckpointError."""
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        module = module_class(config)
    state = {name.removeprefix(prefix): view for name, view in weights.items() if name.startswith(prefix)}
    expected = set(module.state_dict())
    if expected != set(state):
        raise CheckpointError(f"{prefix}* weights: tensors {sorted(expected ^ set(state))[:4]} are missing or unknown")
    module.load_state_dict(state, assign=True)
    _materialise_buffers(module, config, device)
    return module.eval().requires_grad_(False)


def _materialise_buffers(module: Any, config: Any, device: torch.device) -> None:
    """Buffers that checkpoints do not hold (rotary frequencies, sinusoids) are computed by the submodule that owns them."""
    for submodule in module.modules():
        for buffer_name, buffer in list(submodule.named_buffers(recurse=False)):
            if buffer.is_meta:
                submodule.register_buffer(buffer_name, _computed(submodule, buffer_name, config).to(device), persistent=False)


def _computed(submodule: Any, name: str, config: Any) -> Tensor:
    if hasattr(submodule, "compute_axial_rope_parameters"):
        frequencies: Tensor = submodule.compute_axial_rope_parameters(config)[0]
        return frequencies
    sinusoids: Tensor = submodule.compute_default_singular_positional_embedding()
    return sinusoids
