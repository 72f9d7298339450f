"""The sound tower of Gemma 4's small models (arXiv 2303.01037): convolutions make a row of four mel frames, then conformer layers, in
which a row sees some rows before it. Weights are views, never copied. All of it is torch's.

Shapes: N rows of a clip, H hidden, D values of a head, W rows that a row sees.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...architecture import ModelConfig
from ...lm.decoder import AfterLayer
from ...lm.layer_ops import rms_norm
from ...towers.interface import TowerInput
from ...towers.linear import Linear
from .bounded import Bounded
from .towers_config import Conformer

_EPSILON = torch.tensor(1e-6)  # of the norms around attention and feed-forwards
_LONGEST_PERIOD = 1e4


class SoundTower:
    """``Tower``, computing where its weights lie."""

    def __init__(self, model: ModelConfig, weights: dict[str, Tensor], device: torch.device) -> None:
        """Uses those ``weights`` whose names start with ``audio.``."""
        assert isinstance(model.audio, Conformer)
        config = model.audio
        self._device, self._epsilon = device, config.norm_eps
        names = [f"audio.subsample_conv_projection.layer{number}." for number in (0, 1)]
        self._convolutions = [(weights[f"{name}conv.weight"], weights[f"{name}norm.weight"]) for name in names]
        self._dtype = self._convolutions[0][0].dtype
        self._input = Linear(weights["audio.subsample_conv_projection.input_proj_linear.weight"], None)
        self._output, self._project = Linear.of(weights, "audio.output_proj"), Linear(weights["audio.projection.weight"], None)
        self._ones = torch.ones(config.own_size, device=device)
        distances = _sinusoids(config.num_seen, config.hidden_size).to(device, self._dtype)
        self._layers = [_Layer(config, weights, f"audio.layers.{i}.", distances) for i in range(config.num_layers)]

    def encode(self, parts: Sequence[TowerInput], after_layer: AfterLayer | None = None) -> list[Tensor]:
        clips = [self._convolved(torch.from_numpy(part.rows.view(np.float32).copy())) for part in parts]
        for layer in self._layers:
            clips = [layer(clip) for clip in clips]
            if after_layer is not None:
                after_layer()
        epsilon = torch.tensor(self._epsilon)
        return [self._project(rms_norm(self._output(clip), self._ones, epsilon)) for clip in clips]

    def _convolved(self, mel: Tensor) -> Tensor:
        """Mel frames [n, bins] -> rows [ceil(ceil(n / 2) / 2), H]."""
        x = mel.to(self._device, self._dtype)[None, None]
        for kernel, norm in self._convolutions:
            x = F.conv2d(x, kernel, stride=2, padding=1).permute(0, 2, 3, 1)
            x = F.layer_norm(x, norm.shape, norm, eps=self._epsilon).relu_().permute(0, 3, 1, 2)
        return self._input(x[0].permute(1, 2, 0).flatten(1))


class _Layer:
    """One layer's weights, looked up once."""

    def __init__(self, config: Conformer, weights: dict[str, Tensor], name: str, distances: Tensor) -> None:
        self._first, self._second = (_FeedForward(config, weights, f"{name}feed_forward{number}.") for number in (1, 2))
        self._attention = _Attention(config, weights, f"{name}self_attn.", distances)
        self._convolution = _Convolution(config, weights, f"{name}lconv1d.")
        self._norms = [weights[f"{name}norm_{norm}.weight"] for norm in ("pre_attn", "post_attn", "out")]
        self._most = config.most

    def __call__(self, hidden: Tensor) -> Tensor:
        """Rows [N, H] of a clip."""
        before, behind, last = self._norms
        hidden = self._first(hidden)
        attended = self._attention(rms_norm(_within(hidden, self._most), before, _EPSILON))
        hidden = hidden + rms_norm(_within(attended, self._most), behind, _EPSILON)
        hidden = self._second(self._convolution(hidden))
        return rms_norm(_within(hidden, self._most), last, _EPSILON)


class _FeedForward:
    def __init__(self, config: Conformer, weights: dict[str, Tensor], name: str) -> None:
        self._up, self._down = (Bounded(weights, f"{name}ffw_layer_{number}") for number in (1, 2))
        self._before, self._behind = (weights[f"{name}{place}_layer_norm.weight"] for place in ("pre", "post"))
        self._most, self._residual = config.most, config.residual

    def __call__(self, hidden: Tensor) -> Tensor:
        output = self._down(F.silu(self._up(rms_norm(_within(hidden, self._most), self._before, _EPSILON))))
        return hidden + rms_norm(_within(output, self._most), self._behind, _EPSILON).mul_(self._residual)


class _Attention:
    """softmax(cap tanh(q (k + r) / cap)) v over the rows that a row sees; r depends on their distance alone (arXiv 1901.02860)."""

    def __init__(self, config: Conformer, weights: dict[str, Tensor], name: str, distances: Tensor) -> None:
        self._num_heads, self._num_seen, self._cap = config.num_heads, config.num_seen, config.score_cap
        self._qkv = [Bounded(weights, f"{name}{part}_proj") for part in "qkv"]
        self._out = Bounded(weights, f"{name}post")
        head_dim = config.hidden_size // config.num_heads
        self._q_scale = head_dim**-0.5 / math.log(2) * F.softplus(weights[f"{name}per_dim_scale"].float())
        self._k_scale = math.log(1 + math.e) / math.log(2)
        relative = Linear(weights[f"{name}relative_k_proj.weight"], None)(distances)
        self._relative = relative.float().view(-1, self._num_heads, head_dim).permute(1, 2, 0)  # [heads, D, W]

    def __call__(self, normed: Tensor) -> Tensor:
        q, k, v = (project(normed).float().view(len(normed), self._num_heads, -1) for project in self._qkv)
        q = q * self._q_scale
        keys, values = self._seen(k * self._k_scale), self._seen(v)
        scores = (q.unsqueeze(2) @ keys).squeeze(2) + (q.transpose(0, 1) @ self._relative).transpose(0, 1)
        scores = torch.tanh(scores / self._cap) * self._cap
        beyond = torch.arange(self._num_seen - 1, -1, -1, device=q.device) > torch.arange(len(q), device=q.device).unsqueeze(1)
        weights = scores.masked_fill(beyond.unsqueeze(1), -torch.inf).softmax(-1)
        attended = (values @ weights.unsqueeze(3)).flatten(1)
        return self._out(attended.to(normed.dtype))

    def _seen(self, rows: Tensor) -> Tensor:
        """Rows [N, heads, D] -> those that each sees, the farthest first, [N, heads, D, W]; a view."""
        return F.pad(rows, (0, 0, 0, 0, self._num_seen - 1, 0)).unfold(0, self._num_seen, 1)


class _Convolution:
    """Over a row and those before it, each value alone, between two projections of which the first is gated."""

    def __init__(self, config: Conformer, weights: dict[str, Tensor], name: str) -> None:
        self._start, self._end = (Bounded(weights, f"{name}linear_{place}") for place in ("start", "end"))
        self._kernel = weights[f"{name}depthwise_conv1d.weight"]
        self._before, self._behind = weights[f"{name}pre_layer_norm.weight"], weights[f"{name}conv_norm.weight"]
        self._most, self._epsilon = config.most, torch.tensor(config.norm_eps)

    def __call__(self, hidden: Tensor) -> Tensor:
        gated = F.glu(self._start(rms_norm(hidden, self._before, self._epsilon)), -1)
        padded = F.pad(gated.t(), (self._kernel.shape[2] - 1, 0))
        mixed = F.conv1d(padded.unsqueeze(0), self._kernel, groups=len(self._kernel))[0].t()
        return hidden + self._end(F.silu(rms_norm(_within(mixed, self._most), self._behind, self._epsilon)))


def _within(x: Tensor, most: float) -> Tensor:
    """Values of magnitude ``most`` at most, or of the largest that their type has."""
    bound = min(most, torch.finfo(x.dtype).max)
    return x.clamp(-bound, bound)


def _sinusoids(num_seen: int, size: int) -> Tensor:
    """float32 [num_seen, size]: sines, then cosines, of the distances of the rows that a row sees, the farthest first."""
    step = math.log(_LONGEST_PERIOD) / max(size // 2 - 1, 1)
    angles = torch.arange(num_seen - 1, -1, -1).unsqueeze(1) * torch.exp(torch.arange(size // 2) * -step)
    return torch.cat((angles.sin(), angles.cos()), -1)
