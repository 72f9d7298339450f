"""Log-probabilities of tokens under the model's own distribution: after guidance (CF1), before rules, penalties, the masks of
grammars and temperature.

decode takes them of the tokens that it draws, prefill of the tokens of a prompt. All operations are torch's, on the logits' device.
Shapes: L rows of logits, Q of them whose log-probabilities are asked for, V vocabulary, K alternatives.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .interface import Pairs
from .sampler import combine_guidance


class TokenLogprobs(NamedTuple):
    """Of Q tokens their own log-probability, float32 [Q], their rank, int64 [Q], 1 being the likeliest; and the K likeliest ids, int64
    [Q, K], with their log-probabilities, float32 [Q, K], in falling order."""

    own: Tensor
    rank: Tensor
    ids: Tensor
    values: Tensor


@torch.inference_mode()
def log_softmax(logits: Tensor, rows: NDArray[np.int64], pairs: Pairs | None = None) -> Tensor:
    """Return the log-probabilities of these rows of ``logits``, float32 [L, V] -> [Q, V]: a copy. Rows of pairs are guided first."""
    chosen = logits[torch.from_numpy(rows).to(logits.device)]
    if pairs is not None:
        guided = np.flatnonzero(np.isin(pairs.row, rows))
        if guided.size:
            own, theirs, scale = pairs.row[guided], pairs.companion_row[guided], torch.from_numpy(pairs.scale[guided])
            companions = logits[torch.from_numpy(theirs).to(logits.device)]
            at = torch.from_numpy(np.searchsorted(rows, own)).to(logits.device)
            chosen[at] = combine_guidance(chosen[at], companions, scale.to(logits.device))
    return chosen.log_softmax(1)


@torch.inference_mode()
def logprobs_of(tokens: Tensor, logprobs: Tensor, num_alternatives: int) -> TokenLogprobs:
    """Return those of ``tokens``, int64 [Q], and of the likeliest ones among ``logprobs``, float32 [Q, V]."""
    own = logprobs.gather(1, tokens.unsqueeze(1))
    values, ids = logprobs.topk(num_alternatives, dim=1)
    return TokenLogprobs(own.squeeze(1), (logprobs > own).sum(1) + 1, ids, values)
