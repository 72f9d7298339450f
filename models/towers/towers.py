"""Vision and audio towers: patch and mel rows in, embedding rows out. The only module that imports transformers, when it is used.

The encoder actor calls it. Modules are built on the meta device and take views of the shared weights: no private copy of any. They
compute where the weights lie; on CUDA the vision tower is ours in place of transformers' (``triton_vision``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...schema.media import MediaKind
from ..architecture import AudioConfig, ModelConfig, VisionConfig, VisionRules
from ..checkpoint.weights import torch_dtype
from ..errors import CheckpointError

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class TowerInput:
    """A segment for a tower.

    ``rows`` of vision: uint8 [t x h x w, 3 x T x P x P] in transformers' patch order, not normalised. ``rows`` of audio: mel frames
    as float32 [frames, num_mel_bins], or their bytes uint8 [frames, 4 x num_mel_bins]. ``grid`` as in the segment.
    """

    kind: MediaKind
    rows: NDArray[np.uint8] | NDArray[np.float32]
    grid: tuple[int, int, int]


class _Tower(Protocol):
    def encode(self, parts: Sequence[TowerInput]) -> list[Tensor]: ...


class Towers:
    """The model's towers. ``weights`` are the views whose names start with ``vision.`` and ``audio.``, all on one device."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], device: torch.device = CPU) -> None:
        """Raises: CheckpointError if the weights are not those of the towers, or the device's kernels do not do what the towers do."""
        dtype = torch_dtype(config.dtype)
        vision = audio = None
        if config.vision is not None and config.vision_rules is not None:
            vision = _VisionTower(config.family, config.vision, config.vision_rules, weights, dtype, device)
        if config.audio is not None:
            audio = _AudioTower(config.audio, weights, dtype, device)
        self._towers: dict[MediaKind, _Tower | None] = {"image": vision, "video": vision, "audio": audio}

    @torch.inference_mode()
    def encode(self, parts: Sequence[TowerInput]) -> list[Tensor]:
        """Embedding rows [num_tokens, hidden] in the model's dtype, one tensor per part, in order; one forward per tower.

        Attention stays within a temporal patch and within an audio window, so parts do not see each other, and the segments of an
        item encode as the whole item would.
        """
        outputs: list[Tensor | None] = [None] * len(parts)
        for tower in {id(tower): tower for tower in self._towers.values() if tower is not None}.values():
            mine = [i for i, part in enumerate(parts) if self._towers[part.kind] is tower]
            if mine:
                for i, output in zip(mine, tower.encode([parts[i] for i in mine]), strict=True):
                    outputs[i] = output
        missing = [part.kind for part, output in zip(parts, outputs, strict=True) if output is None]
        if missing:
            raise ValueError(f"this model has no tower for {missing[0]}")
        return [output for output in outputs if output is not None]


class _VisionTower:
    def __init__(
        self,
        family: str,
        config: VisionConfig,
        rules: VisionRules,
        weights: dict[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._config, self._dtype, self._device = config, dtype, device
        frame = rules.temporal_patch_size * rules.patch_size**2
        self._mean = (torch.tensor(rules.image_mean) * 255).repeat_interleave(frame).to(device)
        self._std = (torch.tensor(rules.image_std) * 255).repeat_interleave(frame).to(device)
        self._kernels: Callable[..., Tensor] | None = None
        if device.type == "cuda":
            from .triton_vision import VisionKernels  # the only way to Triton: nothing of it is loaded on the CPU

            self._kernels = VisionKernels(config, weights)
        else:
            self._module = _vision_module(family, config, weights)

    def encode(self, parts: Sequence[TowerInput]) -> list[Tensor]:
        rows = self._normalised([part.rows for part in parts])
        grids = torch.tensor([part.grid for part in parts])
        geometry = self._geometry(grids)
        output: Tensor
        if self._kernels is not None:
            output = self._kernels(rows, **geometry)
        else:
            output = self._module(rows, grid_thw=grids, **geometry).pooler_output
        return list(torch.split(output, (grids.prod(1) // self._config.merge_size**2).tolist()))

    def _geometry(self, grids: Tensor) -> dict[str, Any]:
        """What transformers' module would derive from the grids [items, 3], derived on the host and sent to the device."""
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
        """All rows, one part behind the other; to a GPU they go by way of pinned memory, in the order of the stream."""
        size = sum(len(part) for part in parts), parts[0].shape[1]
        staged = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        np.concatenate(parts, out=staged.numpy())
        pixels = staged.to(self._device, non_blocking=True).float()
        return pixels.sub_(self._mean).div_(self._std).to(self._dtype)


class _AudioTower:
    def __init__(self, config: AudioConfig, weights: dict[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as omni
        from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniAudioEncoderConfig

        fields = Qwen2_5OmniAudioEncoderConfig(
            num_mel_bins=config.num_mel_bins,
            encoder_layers=config.num_layers,
            encoder_attention_heads=config.num_heads,
            encoder_ffn_dim=config.ffn_size,
            d_model=config.hidden_size,
            output_dim=config.out_hidden_size,
            max_source_positions=config.max_source_positions,
            n_window=config.n_window,
            scale_embedding=config.scale_embedding,
            activation_function=config.activation,
        )
        self._dtype, self._device = dtype, device
        self._omni = omni
        self._module = _build(omni.Qwen2_5OmniAudioEncoder, fields, "audio.", weights, device)

    def encode(self, parts: Sequence[TowerInput]) -> list[Tensor]:
        mels = [torch.from_numpy(part.rows.view(np.float32).copy()) for part in parts]
        lengths = torch.tensor([mel.shape[0] for mel in mels])
        chunks, chunk_lengths = self._omni.chunk_and_pad_features(torch.cat(mels).T.to(self._dtype), lengths, self._module.n_window)
        tensors = {
            "padded_feature": chunks,
            "chunk_lengths": chunk_lengths,
            "valid_indices": self._omni.get_valid_indices(chunk_lengths),
            "pool_indices": self._omni.get_pool_indices(lengths),
        }
        sent = {name: tensor.to(self._device) for name, tensor in tensors.items()}
        # each layer reads these, in order to split the batch: they stay on the host
        borders = self._omni.get_audio_cu_seqlens(chunk_lengths)
        output: Tensor = self._module(feature_lens=lengths, cu_seqlens=borders, **sent).last_hidden_state
        return list(torch.split(output, (((lengths - 1) // 2 + 1 - 2) // 2 + 1).tolist()))


def _vision_module(family: str, config: VisionConfig, weights: dict[str, Tensor]) -> Any:
    fields = {
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
    if family == "qwen2_5_omni":
        from transformers.models.qwen2_5_omni import configuration_qwen2_5_omni as omni_configs
        from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as omni

        omni_fields = omni_configs.Qwen2_5OmniVisionEncoderConfig(**fields)
        return _build(omni.Qwen2_5OmniVisionEncoder, omni_fields, "vision.", weights, CPU)
    from transformers.models.qwen2_5_vl import configuration_qwen2_5_vl as vl_configs
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as vl

    vl_fields = vl_configs.Qwen2_5_VLVisionConfig(**fields)
    return _build(vl.Qwen2_5_VisionTransformerPretrainedModel, vl_fields, "vision.", weights, CPU)


def _build(module_class: Any, config: Any, prefix: str, weights: dict[str, Tensor], device: torch.device) -> Any:
    """A module on the meta device whose parameters are replaced by the views, and whose computed buffers are made anew."""
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
