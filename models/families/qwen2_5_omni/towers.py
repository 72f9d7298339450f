"""Qwen2.5-Omni's towers: vision as in Qwen2.5-VL except for the attention's projections, and audio. The encoder actor builds them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....schema.media import MediaKind
from ...architecture import ModelConfig
from ...lm.decoder import AfterLayer
from ...towers.interface import Tower, TowerInput
from ..qwen2_5.vision_tower import VisionTower, build_module, calling


def build_towers(config: ModelConfig, weights: dict[str, Tensor], device: torch.device) -> dict[MediaKind, Tower]:
    """See ``Family``."""
    vision = VisionTower(config, weights, device, _find_vision)
    return {"image": vision, "video": vision, "audio": AudioTower(config, weights, device)}


def _find_vision(fields: dict[str, Any]) -> tuple[Any, Any]:
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniVisionEncoderConfig
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniVisionEncoder

    return Qwen2_5OmniVisionEncoder, Qwen2_5OmniVisionEncoderConfig(**fields)


class AudioTower:
    """The tower where its weights lie."""

    def __init__(self, model: ModelConfig, weights: dict[str, Tensor], device: torch.device) -> None:
        """Uses those ``weights`` whose names start with ``audio.``. Raises: CheckpointError."""
        assert model.audio is not None
        config = model.audio
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
        self._dtype, self._device = getattr(torch, model.dtype), device
        self._omni = omni
        self._module = build_module(omni.Qwen2_5OmniAudioEncoder, fields, "audio.", weights, device)

    def encode(self, parts: Sequence[TowerInput], after_layer: AfterLayer | None = None) -> list[Tensor]:
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
        with calling(after_layer, self._module.layers):
            output: Tensor = self._module(feature_lens=lengths, cu_seqlens=borders, **sent).last_hidden_state
        return list(torch.split(output, (((lengths - 1) // 2 + 1 - 2) // 2 + 1).tolist()))
