"""How much of a CUDA device's memory pools may take: what is left of a share of it after weights and working memory (pure).

Nobody can ask for more later: pools are made once, by ``memory``, before the processes that compute exist. So what these will need is
estimated, generously, from the model's shape. No estimate was compared with a device yet.
"""

from typing import NamedTuple

from ..config import MAX_STEP_TOKENS

CONTEXT_BYTES = 768 << 20  # of each process that computes: driver, kernels, workspaces, captured graphs
SLACK = 1.25  # what torch's allocator holds beyond what is in use


class DeviceRoom(NamedTuple):
    """Memory of a device in bytes: all of it, and what is free once the weights are there."""

    total_bytes: int
    free_bytes: int


def working_bytes(num_processes: int, token_bytes: int, row_bytes: int, num_rows: int) -> int:
    """What the processes of a run need beside weights and pools: contexts, the largest prefill or encoding, and the logits of a step.

    ``token_bytes``: of a prompt's token while it is prefilled; ``row_bytes``: of the logits of one row of a step.
    """
    return num_processes * CONTEXT_BYTES + int(SLACK * (MAX_STEP_TOKENS * token_bytes + num_rows * row_bytes))


def pool_bytes(room: DeviceRoom, share: float, working: int) -> int:
    """What pools may take so that the run, and whatever else is on the device, stay below ``share`` of its memory; less than 0 if
    nothing is left."""
    return int(share * room.total_bytes) - (room.total_bytes - room.free_bytes) - working
