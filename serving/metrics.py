"""The front's own metrics. Those of a model's run are the run's: ``GET /metrics?model=NAME``."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
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
