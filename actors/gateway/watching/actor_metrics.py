"""Prometheus metrics of the run's actors, from their status words. They begin anew with each process that takes an actor over."""

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from ....runtime.stage_table import STAGES, InstanceId, stage_of
from ....shm.status import ActorTable


class ActorMetrics(Collector):
    """Of guesses in decode, and of cores that were lent."""

    def __init__(self, table: ActorTable) -> None:
        self._table = table

    def collect(self) -> Iterator[Metric]:
        checked = CounterMetricFamily("mmrt_guesses_checked", "Guesses of tokens that decode has checked.", labels=["actor"])
        right = CounterMetricFamily("mmrt_guesses_right", "Those of them that were right.", labels=["actor"])
        borrowed = "Time of cores beyond an actor's share, which others left idle, while it computed."
        lent = CounterMetricFamily("mmrt_borrowed_core_seconds", borrowed, labels=["actor"])
        for name in self._table.present:
            stage, reading = stage_of(InstanceId(name)), self._table.read(name)
            if stage == "decode":
                checked.add_metric([name], reading.num_guesses)
                right.add_metric([name], reading.num_right_guesses)
            if STAGES[stage].has_device:
                lent.add_metric([name], reading.borrowed_ns / 1e9)
        yield from (checked, right, lent)
