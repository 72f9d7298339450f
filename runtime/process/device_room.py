"""The memory of a CUDA device available to pools: a share of it, less weights and working memory (pure).

Pools cannot grow later: ``memory`` makes them once, before the processes that compute exist. So the needs of these processes are
estimated, generously, from the model's shape. No estimate has been compared with a device yet.
"""

from typing import NamedTuple

from ..config.runtime_config import MAX_STEP_TOKENS

CONTEXT_BYTES = 768 << 20  # of each process that computes: driver, kernels, workspaces, captured graphs
SLACK = 1.25  # what torch's allocator holds beyond what is in use


class DeviceRoom(NamedTuple):
    """Memory of a device in bytes: the total, and the free part once the weights are loaded."""

    total_bytes: int
    free_bytes: int


def working_bytes(num_processes: int, token_bytes: int, row_bytes: int, num_rows: int, step_bytes: int) -> int:
    """Estimate the bytes that a run needs besides weights and pools: contexts, the largest prefill or encoding, a step's experts and
    logits.

    ``token_bytes``: of a prompt's token while it is prefilled; ``row_bytes``: of the logits of one row of a step; ``step_bytes``: of
    its experts.
    """
    return num_processes * CONTEXT_BYTES + int(SLACK * (MAX_STEP_TOKENS * token_bytes + num_rows * row_bytes + step_bytes))


def pool_bytes(room: DeviceRoom, share: float, working: int) -> int:
    """Return the bytes that pools may take so that the run and all else on the device stay below ``share`` of its memory; negative
    if nothing is left."""
    return int(share * room.total_bytes) - (room.total_bytes - room.free_bytes) - working
