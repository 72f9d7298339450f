"""A trial of a policy's file without a run: it is loaded, and called for two requests in a controller that has no actors.

``mmrt policy check`` does so, and ``mmrt policy set`` in a process of its own before it changes anything.
"""

import time
from pathlib import Path
from typing import NamedTuple

from ..actors.controller.policy_file import PolicyFile
from ..actors.controller.policy_guard import PolicyGuard
from ..runtime.bus.messages import Filled, Generation, Hello, MediaItem, RequestSpec, Submit
from ..runtime.controller.machine import Controller
from ..runtime.controller.plans.policy_calls import swap
from ..runtime.controller.scheduling.policy import UNIFIED, PolicyFailure
from ..runtime.controller.scheduling.types import Limits
from ..runtime.stage_table import ACTORS, InstanceId

_IMAGE = 1  # the placeholder's id
_LIMITS = Limits(
    num_rows=4, max_context=1024, kv_page_tokens=16, num_kv_pages=256, media_page_bytes=65536, num_media_pages=8,
    patch_page_bytes=65536, num_patch_pages=8, embedding_page_tokens=32, num_embedding_pages=8, placeholder_ids={"image": _IMAGE},
)  # fmt: skip


class Trial(NamedTuple):
    """``num_rounds``: those in which it planned something legal. ``num_illegal``: choices that were dropped."""

    version: str
    num_rounds: int
    num_illegal: int


def try_policy(path: Path) -> Trial:
    """Try a policy's file. Raises: OSError; ValueError, PolicyFailure if it cannot be used."""
    file = PolicyFile.read(path)
    guard = PolicyGuard()
    policy = guard.load(file, file.load)
    controller = Controller.start(_LIMITS, epoch=1)
    state = controller.state
    state.guard = guard
    guard.watch(policy)
    swap(state, policy)
    now, gateway = time.monotonic(), InstanceId("gateway")
    for actor in ACTORS:
        controller.on_message(actor, 1, Hello(actor, 1, 1, True), now)
    text = RequestSpec(Generation("text"), list(range(2, 34)), [], 16)
    image = RequestSpec(Generation("image"), [2, _IMAGE, 3], [MediaItem("image", 1000)], 16)
    for key, spec in enumerate((text, image), 1):
        controller.on_message(gateway, 1, Submit(1, key, spec), now)
    controller.tick(now)
    controller.on_message(gateway, 1, Filled(1, 2), now)
    controller.tick(now)
    guard.watch(UNIFIED)
    record = state.policy_record
    if record.error:
        raise PolicyFailure(record.error)
    return Trial(file.version, record.plans, record.illegal)
