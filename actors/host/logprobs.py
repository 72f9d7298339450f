"""Log-probabilities on their way from a model's device to the table (prefill and decode)."""

import numpy as np

from ...models.sampling.logprobs import TokenLogprobs
from ...shm.logprob_file import Logprobs


def to_host(found: TokenLogprobs) -> Logprobs:
    """Copy them from the device. Waits for it."""
    own, values = found.own.cpu().numpy(), found.values.cpu().numpy()
    return Logprobs(own, found.rank.cpu().numpy().astype(np.int32), found.ids.cpu().numpy().astype(np.int32), values)
