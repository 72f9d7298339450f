"""The memory actor: makes every segment, loads the weights once, and owns all bytes that must outlive an actor.

Segments are files: when this process dies nothing is lost, and a new generation finds everything made and only watches.
"""

import logging

import msgspec

from ..models.weights import write_weights
from ..runtime.config import ACTORS
from ..runtime.flight import RECORDERS
from ..runtime.layout import (
    DELTA_RING_BYTES,
    PLAN_SLOTS,
    ROW_DEFINITION_BYTES,
    ROW_STATE_BYTES,
    TOKEN_RING_BYTES,
    MemoryLayout,
    ModelFacts,
    plan_layout,
    read_layout,
    write_layout,
)
from ..shm.flight_recorder import FlightRecorder
from ..shm.plan_table import PlanTable
from ..shm.pool import PagePool
from ..shm.ring import Ring
from ..shm.segment import HEADER_BYTES, Segment
from ..shm.sequence_table import SequenceTable
from ..shm.status import ActorTable, ControllerStats
from .base import POLL_S, Actor, Ending
from .language_model import WEIGHTS_INDEX, WEIGHTS_SEGMENT

log = logging.getLogger(__name__)

IDLE_S = 0.5


def main(actor: Actor) -> None:
    """Entry of the memory process."""
    while read_layout(actor.run.path) is None:
        if actor.role.try_acquire():
            build(actor)
        else:
            actor.pause(POLL_S)
    actor.become_active()
    actor.serving()
    while not actor.ending:
        actor.receive()
        actor.wait(IDLE_S)


def build(actor: Actor) -> None:
    """Make all segments and fill the weights. What a killed predecessor left half-made is made again."""
    model = actor.model
    page_tokens = actor.config.memory.kv_page_tokens
    facts = ModelFacts(model.kv_page_bytes(page_tokens) // page_tokens, model.embedding_row_bytes(), model.max_context)
    layout = plan_layout(actor.config, facts, model.dtype)
    clear(actor)
    make_tables(actor, layout)
    load_weights(actor)
    write_layout(actor.run.path, layout)


def clear(actor: Actor) -> None:
    """Remove segments of a predecessor that died before it published the layout."""
    for path in actor.run.path.glob(f"*.{actor.run.run_id}"):
        path.unlink()


def make_tables(actor: Actor, layout: MemoryLayout) -> None:
    run = actor.run
    ActorTable.create(run, ACTORS)
    ControllerStats.create(run)
    for name in RECORDERS:
        FlightRecorder.create(run, name)
    for name, pool in layout.pools.items():
        PagePool.create(run, name, pool.num_pages, pool.page_bytes)
    SequenceTable.create(
        run,
        layout.num_rows,
        layout.max_context,
        layout.max_pages,
        max_definition_bytes=ROW_DEFINITION_BYTES,
        max_state_bytes=ROW_STATE_BYTES,
    )
    PlanTable.create(run, PLAN_SLOTS, layout.plan_slot_bytes)
    Ring.create(run, "tokens", TOKEN_RING_BYTES)
    Ring.create(run, "deltas", DELTA_RING_BYTES)


def load_weights(actor: Actor) -> None:
    """Write the weights in the layout that is computed with, and publish them with their index."""
    segment: Segment | None = None

    def allocate(num_bytes: int) -> memoryview:
        nonlocal segment
        path = actor.run.segment_path(WEIGHTS_SEGMENT)
        segment = Segment.create(path, HEADER_BYTES + num_bytes, kind="raw", publish=False)
        return segment.buf[HEADER_BYTES:]

    def progress(done_bytes: int, total_bytes: int) -> None:
        if actor.ending:
            raise Ending
        percent = 100 * done_bytes // max(1, total_bytes)
        actor.notifier.status(f"loading weights {percent} % of {total_bytes / 1e6:.0f} MB")
        actor.notifier.watchdog()

    index = write_weights(actor.model_path, actor.model, allocate, progress)
    assert segment is not None
    segment.publish()
    (actor.run.path / WEIGHTS_INDEX).write_bytes(msgspec.msgpack.encode(index))
