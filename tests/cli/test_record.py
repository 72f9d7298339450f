"""``mmrt record`` at its end, and where it looked too late."""

import io
import time
from pathlib import Path

from mmrt.cli.record import _record, _Recording
from mmrt.runtime.observe.flight import Kind
from mmrt.runtime.observe.live import RecordFollower
from mmrt.runtime.observe.traffic import Traffic
from mmrt.shm.flight_recorder import FlightRecorder
from mmrt.shm.run_directory import RunDirectory

NUM_RECORDS = 64


def recorded(place: Path, num_lost: int = 0) -> tuple[str, bytes]:
    """What is said and written of a request that is over when the time for it is over as well. So many events come behind its end."""
    with RunDirectory.create(place, {}) as run:
        recorder = FlightRecorder.create(run, "gateway", NUM_RECORDS)
        follower, traffic, file = RecordFollower(run, ("gateway",), num_first=1), Traffic(time.monotonic_ns()), io.BytesIO()
        follower.take()
        writer = recorder.writer(1)
        for kind, tokens in ((Kind.RECEIVED, 0), (Kind.PREPARED, 30), (Kind.OVER, 5)):
            writer.event(kind, 7, tokens)
        for _ in range(num_lost):
            writer.event(Kind.RECEIVED, 8)
        said = _record(_Recording(run.path, follower, traffic, 1e-9), file)
        follower.close()
        recorder.close()
        return said, file.getvalue()


def test_what_came_just_before_the_end_is_written(tmp_path: Path) -> None:
    said, written = recorded(tmp_path / "run")
    assert said == "1 requests" and written.endswith(b'"input_length":30,"output_length":5,"hash_ids":[]}\n')


def test_requests_whose_ends_were_overwritten_are_not_waited_for(tmp_path: Path) -> None:
    assert recorded(tmp_path / "run", NUM_RECORDS) == ("0 requests; some are missing: they came faster than they could be read", b"")
