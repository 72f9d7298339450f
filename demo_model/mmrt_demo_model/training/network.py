"""The thinker of Qwen2.5-Omni as a plain network for training: padded tensors instead of packed ones, many samples at once.

Parameters carry the checkpoint's names, so ``state_dict`` is the checkpoint, and transformers computes the same from it. All vision
blocks attend to a whole temporal patch (``fullatt_block_indexes`` names every block). The training loop calls it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmrt.models.architecture import LanguageConfig, ModelConfig
from mmrt.models.media_config import AudioConfig, VisionConfig

VISION_ROPE_THETA = 10000.0
AUDIO_TIMESCALE = 10000.0
NORM_EPS = 1e-6
FAR_BELOW = -30000.0


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float = NORM_EPS) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class _GatedMlp(nn.Module):
    def __init__(self, hidden: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def _heads(x: Tensor, num_heads: int) -> Tensor:
    return x.view(*x.shape[:-1], num_heads, -1).transpose(1, 2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    rotated: Tensor = (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
    return rotated


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """What is seen, and the weights. Spelt out: on a CPU its backward takes two thirds of the time of torch's fused one."""
    scores = (q @ k.to(q.dtype).transpose(-1, -2)) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask, FAR_BELOW).softmax(-1)
    out: Tensor = weights.to(q.dtype) @ v.to(q.dtype)
    return out.transpose(1, 2).flatten(2), weights


# --------------------------------------------------------------------------------------------------------------- vision


class _VisionAttention(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_heads
        self.q, self.k, self.v, self.proj = (nn.Linear(size, size) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (_heads(layer(x), self.num_heads) for layer in (self.q, self.k, self.v))
        out: Tensor = self.proj(_attend(_rotate(q, cos, sin), _rotate(k, cos, sin), v, mask)[0])
        return out


class _VisionBlock(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = _Norm(config.hidden_size), _Norm(config.hidden_size)
        self.attn = _VisionAttention(config)
        self.mlp = _GatedMlp(config.hidden_size, config.intermediate_size, bias=True)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin, mask)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class _Merger(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.inner = config.hidden_size * config.merge_size**2
        self.ln_q = _Norm(config.hidden_size)
        self.mlp = nn.Sequential(nn.Linear(self.inner, self.inner), nn.GELU(), nn.Linear(self.inner, config.out_hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.ln_q(x).view(len(x), -1, self.inner))
        return out


class _PatchEmbed(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        kernel = (config.temporal_patch_size, config.patch_size, config.patch_size)
        self.proj = nn.Conv3d(config.in_channels, config.hidden_size, kernel, stride=kernel, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self.proj.weight.flatten(1))


class VisionTower(nn.Module):
    """Normalised rows of temporal patches, padded to the most: [groups, patches, row values] -> [groups, tokens, hidden]."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.patch_embed = _PatchEmbed(config)
        self.blocks = nn.ModuleList([_VisionBlock(config) for _ in range(config.depth)])
        self.merger = _Merger(config)
        quarter = config.hidden_size // config.num_heads // 4
        self._frequencies = nn.Buffer(VISION_ROPE_THETA ** (-torch.arange(quarter) / quarter), persistent=False)

    def forward(self, rows: Tensor, positions: Tensor, lengths: Tensor) -> Tensor:
        """positions int64 [groups, patches, 2]: row and column of each patch; lengths int64 [groups]: how many are no padding."""
        angles = (positions[..., None] * self._frequencies).flatten(2)
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        cos, sin = angles.cos(), angles.sin()
        mask = (torch.arange(rows.shape[1], device=rows.device) < lengths[:, None])[:, None, None, :]
        x = self.patch_embed(rows)
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        out: Tensor = self.merger(x)
        return out


# ---------------------------------------------------------------------------------------------------------------- audio


class _AudioAttention(nn.Module):
    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_heads
        self.k_proj = nn.Linear(size, size, bias=False)
        self.v_proj, self.q_proj, self.out_proj = (nn.Linear(size, size) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (_heads(layer(x), self.num_heads) for layer in (self.q_proj, self.k_proj, self.v_proj))
        out: Tensor = self.out_proj(_attend(q, k, v, mask)[0])
        return out


class _AudioLayer(nn.Module):
    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.self_attn = _AudioAttention(config)
        self.self_attn_layer_norm = nn.LayerNorm(config.hidden_size)
        self.fc1 = nn.Linear(config.hidden_size, config.ffn_size)
        self.fc2 = nn.Linear(config.ffn_size, config.hidden_size)
        self.final_layer_norm = nn.LayerNorm(config.hidden_size)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x), mask)
        out: Tensor = x + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))
        return out


class AudioTower(nn.Module):
    """Mel windows, each padded to the longest: [windows, bins, frames] -> [windows, tokens, hidden]."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.conv1 = nn.Conv1d(config.num_mel_bins, size, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(size, size, kernel_size=3, stride=2, padding=1)
        self.audio_bos_eos_token = nn.Embedding(2, config.out_hidden_size)  # in the checkpoint, used by nobody
        self.layers = nn.ModuleList([_AudioLayer(config) for _ in range(config.num_layers)])
        self.ln_post = nn.LayerNorm(size)
        self.proj = nn.Linear(size, config.out_hidden_size)
        half = size // 2
        angles = torch.arange(config.max_source_positions)[:, None] * AUDIO_TIMESCALE ** (-torch.arange(half) / (half - 1))
        self._sinusoids = nn.Buffer(torch.cat((angles.sin(), angles.cos()), dim=1), persistent=False)

    def forward(self, mel: Tensor, lengths: Tensor) -> Tensor:
        """lengths int64 [windows]: how many frames are no padding."""
        valid = torch.arange(mel.shape[2], device=mel.device) < lengths[:, None]
        x = F.gelu(self.conv1(mel)) * valid[:, None]
        x = F.gelu(self.conv2(x)).transpose(1, 2)
        x = x + self._sinusoids[: x.shape[1]]
        mask = (torch.arange(x.shape[1], device=x.device) < ((lengths + 1) // 2)[:, None])[:, None, None, :]
        for layer in self.layers:
            x = layer(x, mask)
        even = x.shape[1] // 2 * 2
        pairs = (x[:, 0:even:2] + x[:, 1:even:2]) / 2
        out: Tensor = self.proj(self.ln_post(pairs))
        return out


# ------------------------------------------------------------------------------------------------------------- language


class _Attention(nn.Module):
    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.heads.num_heads, config.heads.num_kv_heads
        self.q_proj = nn.Linear(config.hidden_size, config.heads.num_heads * config.heads.head_dim)
        self.k_proj = nn.Linear(config.hidden_size, config.heads.num_kv_heads * config.heads.head_dim)
        self.v_proj = nn.Linear(config.hidden_size, config.heads.num_kv_heads * config.heads.head_dim)
        self.o_proj = nn.Linear(config.heads.num_heads * config.heads.head_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        q = _rotate(_heads(self.q_proj(x), self.num_heads), cos, sin)
        k = _rotate(_heads(self.k_proj(x), self.num_kv_heads), cos, sin)
        v = _heads(self.v_proj(x), self.num_kv_heads)
        repeat = self.num_heads // self.num_kv_heads
        out, weights = _attend(q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1), mask)
        return self.o_proj(out), weights


class _DecoderLayer(nn.Module):
    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _GatedMlp(config.hidden_size, config.intermediate_size, bias=False)
        self.input_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        seen, weights = self.self_attn(self.input_layernorm(x), cos, sin, mask)
        x = x + seen
        return x + self.mlp(self.post_attention_layernorm(x)), weights


class Thought(NamedTuple):
    """hidden [batch, length, hidden] after the final norm; of each layer the states behind it and its attention's weights."""

    hidden: Tensor
    states: list[Tensor]
    attention: list[Tensor]  # [batch, heads, length, length]


class LanguageModel(nn.Module):
    """Embeddings [batch, length, hidden] with M-RoPE positions and a mask -> ``Thought``."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([_DecoderLayer(config) for _ in range(config.num_layers)])
        self.norm = _Norm(config.hidden_size, config.rms_norm_eps)
        half = config.heads.head_dim // 2
        self._frequencies = nn.Buffer(config.ropes[0].theta ** (-torch.arange(half) / half), persistent=False)
        self._axis = nn.Buffer(torch.tensor(config.ropes[0].axes), persistent=False)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Thought:
        """positions int64 [batch, 3, length]; mask bool [batch, length, length], True where a row may look at a column."""
        angles = positions.transpose(1, 2)[..., self._axis] * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        cos, sin = angles.cos(), angles.sin()
        states, attention = [], []
        for layer in self.layers:
            x, weights = layer(x, cos, sin, mask[:, None])
            states.append(x)
            attention.append(weights)
        return Thought(self.norm(x), states, attention)


class Network(nn.Module):
    """The whole thinker, with tied embeddings. ``config`` must have both towers."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.vision is not None and config.audio is not None and config.language.tie_embeddings
        self.visual = VisionTower(config.vision)
        self.audio_tower = AudioTower(config.audio)
        self.model = LanguageModel(config.language)
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv3d):
                nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.05)
        for layers, name in ((self.visual.blocks, "attn.proj mlp.down_proj"), (self.model.layers, "self_attn.o_proj mlp.down_proj")):
            _shrink(layers, name.split(), (2 * len(layers)) ** -0.5)

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor, media: "Sequence[tuple[Tensor, Tensor]]") -> Thought:
        """``media``: (where bool [batch, length], rows [tokens, hidden]) replace embeddings, in order."""
        x = self.model.embed_tokens(ids)
        for where, rows in media:
            x = x.masked_scatter(where[..., None], rows.to(x.dtype))
        thought: Thought = self.model(x, positions, mask)
        return thought

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)


def _shrink(layers: nn.ModuleList, names: Sequence[str], factor: float) -> None:
    """Residual branches begin small, so that depth does not blow up the stream."""
    with torch.no_grad():
        for layer in layers:
            for name in names:
                linear = layer.get_submodule(name)
                assert isinstance(linear, nn.Linear)
                linear.weight.mul_(factor)
