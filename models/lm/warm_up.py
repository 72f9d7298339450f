"""First launches on a CUDA device, made while no request waits: kernels are compiled or loaded.

All rows are padding and store nothing: a standby may do it while another generation writes the same pages.
"""

import numpy as np
import torch

from ..architecture import ModelConfig
from ..sampling.interface import Sampler, SamplingRows
from ..sampling.penalties import History, Penalties
from ..towers.dispatch import Towers
from ..towers.interface import TowerInput
from .decoder import Chunk, Decoder

_CHUNKS = (1, 512)  # tokens: a chunk of each choice of tiles
_PICTURES = ((2, 2), (2, 4), (4, 4), (4, 8))  # tokens of 2 x 2 patches: the attention of each is launched with tiles of its own


def warm_up_prefill(model: Decoder, page_tokens: int) -> None:
    """Launch prefill on chunks of page -1, which belongs to no sequence."""
    for num_tokens in _CHUNKS:
        nowhere = torch.full((-(-num_tokens // page_tokens),), -1)
        ids = torch.zeros(num_tokens, dtype=torch.int64)
        model.prefill([Chunk(model.embed(ids), _positions(num_tokens), 0, nowhere, ids=ids)])


def warm_up_towers(towers: Towers, config: ModelConfig) -> None:
    """Encode a picture for each choice of tiles, and the shortest sound, whose tower uses no kernel of ours."""
    if config.vision_rules is not None:
        rules = config.vision_rules
        merge = rules.merge_size
        side = rules.tile // rules.patch_size // merge  # a tower of tiles sees no others
        for height, width in ((side, side),) if side else _PICTURES:
            rows = np.zeros((height * width * merge**2, rules.row_bytes), np.uint8)
            towers.encode([TowerInput("image", rows, (1, height * merge, width * merge))])
    if config.audio_rules is not None:
        frames = 4  # one token of the tower
        towers.encode([TowerInput("audio", np.zeros((frames, config.audio_rules.num_mel_bins), np.float32), (frames, 0, 0))])


def warm_up_decode(model: Decoder, sampler: Sampler) -> None:
    """Run a step of one row of length 0, and draw a token from it, with and without penalties."""
    zero, one = torch.zeros(1, dtype=torch.int64), np.ones(1)
    logits = model.decode(zero, _positions(1), zero, zero.unsqueeze(1))
    rows = SamplingRows(
        temperature=one.astype(np.float32),
        top_k=one.astype(np.int64),
        top_p=one.astype(np.float32),
        min_p=one.astype(np.float32),
        seed=one.astype(np.uint64),
        index=one.astype(np.int64),
    )
    sampler.sample(logits, rows).cpu()
    sampler.remember([History(np.zeros(1, np.int64), np.zeros(1, np.int64))])
    ones = one.astype(np.float32)
    sampler.sample(logits, rows, penalties=Penalties(np.zeros(1, np.int64), ones, ones, ones)).cpu()


def _positions(num_tokens: int) -> torch.Tensor:
    return torch.arange(num_tokens).expand(3, -1)
