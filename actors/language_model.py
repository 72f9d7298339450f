"""Opens what ``memory`` made for those that compute: weights and KV pages as tensors that lie in shared memory."""

import msgspec
import torch

from ..models.decoder import Decoder
from ..models.lm import build_language_model
from ..models.weights import WeightIndex, attach_weights
from ..shm.pool import PagePool
from ..shm.segment import HEADER_BYTES, Segment
from .base import Actor

WEIGHTS_SEGMENT = "weights"
WEIGHTS_INDEX = "weights.index"


def shared_weights(actor: Actor, prefix: str = "") -> dict[str, torch.Tensor]:
    """Views of the weights whose names start with ``prefix``. Nothing is copied."""
    index = msgspec.msgpack.decode((actor.run.path / WEIGHTS_INDEX).read_bytes(), type=WeightIndex)
    segment = Segment.attach(actor.run.segment_path(WEIGHTS_SEGMENT), writable=False)
    return attach_weights(segment.buf[HEADER_BYTES:], index, prefix)


def open_language_model(actor: Actor, kv: PagePool, page_tokens: int) -> Decoder:
    """The decoder of the run's model on the KV pool, or the null model."""
    return build_language_model(actor.model, shared_weights(actor), torch.from_numpy(kv.data), page_tokens)
