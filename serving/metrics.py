"""The metrics of a front: its own, and those of its runs with the label ``model``."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from .fleet import Member
from .residency import State


class FrontMetrics(Collector):
    """Counts answers, and reads the rest from the models when it is asked."""

    def __init__(self, members: Callable[[], Iterable[Member]]) -> None:
        self._members = members
        self._registry = CollectorRegistry(auto_describe=False)
        self._http = Counter(
            "http_requests", "Answered HTTP requests.", ["handler", "method", "status"], namespace="mmrt_front", registry=self._registry
        )
        self._registry.register(self)

    def on_http(self, handler: str, method: str, status: int) -> None:
        self._http.labels(handler, method, f"{status // 100}xx").inc()

    def render(self) -> bytes:
        """Return the front's own."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        states = GaugeMetricFamily("mmrt_front_model_state", "1 for the state that the model is in.", labels=["model", "state"])
        running = GaugeMetricFamily("mmrt_front_requests_running", "Requests at the model's run.", labels=["model"])
        waiting = GaugeMetricFamily("mmrt_front_requests_waiting", "Requests that wait for the model.", labels=["model"])
        starts = CounterMetricFamily("mmrt_front_starts", "Runs of the model that have become ready.", labels=["model"])
        for member in self._members():
            for state in State:
                states.add_metric([member.name, state], float(member.residence.state is state))
            running.add_metric([member.name], member.residence.num_running)
            waiting.add_metric([member.name], member.num_waiting)
            starts.add_metric([member.name], member.num_starts)
        yield from (states, running, waiting, starts)


def merge(of_runs: Mapping[str, str]) -> bytes:
    """Return the metrics of all runs, each sample with its model. ``of_runs``: what each has answered, by model; what are no metrics is
    left out."""
    families: dict[str, Metric] = {}
    for model, text in of_runs.items():
        for family in _read(text):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            merged.samples += [sample._replace(labels={**sample.labels, "model": model}) for sample in family.samples]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Given(families.values()))
    return generate_latest(registry)


def _read(text: str) -> list[Metric]:
    try:
        return list(text_string_to_metric_families(text))
    except ValueError:
        return []


class _Given(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
