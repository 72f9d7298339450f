"""Prometheus metrics of the gateway: its own as ``mmrt_…``, and again under the names that vLLM's dashboards and routers look for.

Own registry, so nothing of the process's other libraries leaks in. The controller's counts are read from shared memory.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import get_args

import msgspec
import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from ....runtime.bus.messages import MediaItem
from ....runtime.errors import RequestError
from ....runtime.pools import SEQUENCE_POOLS, kind_of_pool
from ....schema.gap_buckets import BEGINS_S, NUM_BUCKETS, OCTAVE
from ....schema.media import MediaKind
from ....shm.controller_stats import WAITING_FOR, PoolUse, StatsSnapshot
from ..answers.client_request import CLIENT_GONE, ClientRequest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)

# Our family name, without _total: the names that others know it by.
ALIASES: dict[str, tuple[str, ...]] = {
    "mmrt_http_requests": ("http_requests",),
    "mmrt_requests": ("vllm:request_success",),
    "mmrt_prompt_tokens": ("vllm:prompt_tokens",),
    "mmrt_generation_tokens": ("vllm:generation_tokens",),
    "mmrt_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "mmrt_inter_token_latency_seconds": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "mmrt_e2e_request_latency_seconds": ("vllm:e2e_request_latency_seconds",),
    "mmrt_request_queue_time_seconds": ("vllm:request_queue_time_seconds",),
    "mmrt_request_prefill_time_seconds": ("vllm:request_prefill_time_seconds",),
    "mmrt_request_decode_time_seconds": ("vllm:request_decode_time_seconds",),
    "mmrt_admission_rejections": ("vllm:admission_rejections",),
    "mmrt_num_requests_running": ("vllm:num_requests_running",),
    "mmrt_num_requests_waiting": ("vllm:num_requests_waiting",),
    "mmrt_prefix_cache_queries": ("vllm:prefix_cache_queries",),
    "mmrt_prefix_cache_hits": ("vllm:prefix_cache_hits",),
    "mmrt_media_cache_queries": ("vllm:mm_cache_queries",),
    "mmrt_media_cache_hits": ("vllm:mm_cache_hits",),
    "mmrt_preemptions": ("vllm:num_preemptions",),
    "mmrt_kv_cache_usage_perc": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
}

_POOL_GAUGES: tuple[tuple[str, str, Callable[[PoolUse], int]], ...] = (
    ("mmrt_pool_pages", "Pages of a pool.", lambda pool: pool.pages),
    ("mmrt_pool_pages_used", "Pages in use.", lambda pool: pool.used),
    ("mmrt_pool_pages_cached", "Pages with contents that a cache knows, in use or not.", lambda pool: pool.cached),
    ("mmrt_pool_pages_evictable", "Pages that a cache alone holds; they are not in use.", lambda pool: pool.evictable),
)


class Family(msgspec.Struct, frozen=True, array_like=True):
    """A family of metrics on its way to another gateway. ``samples``: name, labels and value of each."""

    name: str
    help: str
    type: str
    samples: list[tuple[str, dict[str, str], float]]


class Metrics:
    """Counters and histograms fed by the handlers, and ``render`` for the endpoint."""

    def __init__(self, model_name: str, stats: Callable[[], StatsSnapshot], generations: Callable[[], Mapping[str, int]]) -> None:
        """``generations``: of each actor of the run."""
        own = self._own = CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"mmrt_{name}", help, labels, registry=own)

        self._http_requests = counter("http_requests", "Answered HTTP requests.", "handler", "method", "status")
        self._requests = counter("requests", "Finished requests, by reason; refused ones excluded.", "finished_reason")
        self._rejections = counter("admission_rejections", "Requests for work that were refused, by HTTP status.", "reason")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that got text, of aborted ones too.")
        self._generation_tokens = counter("generation_tokens", "Completion tokens, of aborted requests too.")

        self._media_items = counter("media_items", "Media of requests that were taken.", "kind")
        self._media_bytes = counter("media_bytes", "Bytes of these media, as received.", "kind")
        self._media_refused = counter("media_refused", "Media for which a request was refused.", "kind")
        for family in (self._media_items, self._media_bytes, self._media_refused):
            for kind in get_args(MediaKind):
                family.labels(kind)

        def histogram(name: str, help: str, *labels: str) -> Histogram:
            return Histogram(f"mmrt_{name}_seconds", help, labels, buckets=_SECONDS, registry=own)

        self._first_token = histogram("time_to_first_token", "Submission to the first text.")
        self._inter_token = _TokenTimes("inter_token_latency", "Time between texts, per token in them; counted once per token.")
        own.register(self._inter_token)
        self._fetch = histogram("media_fetch", "Fetching all media of a request that came as URLs, before its submission.")
        self._whole = histogram("e2e_request_latency", "Submission to the end.")
        self._queue = histogram("request_queue_time", "Submission to admission.")
        self._prefill = histogram("request_prefill_time", "Admission to the first text, or to the end without one; media included.")
        self._decode = histogram("request_decode_time", "First text to the end.")
        self._stages = histogram("ttft_stage", "Parts of the time to the first text; a stage counts requests that pass it.", "stage")
        self._run = CollectorRegistry()
        self._run.register(_StatsCollector(stats, generations))
        self._model_name = model_name

    def add(self, collector: Collector, *, of_run: bool = False) -> None:
        """Render these metrics as well. ``of_run``: each gateway would tell the same."""
        (self._run if of_run else self._own).register(collector)

    def on_http(self, handler: str, method: str, status: int) -> None:
        """Count an answered HTTP request; ``handler`` is its route, not its path."""
        self._http_requests.labels(handler, method, f"{status // 100}xx").inc()

    def on_first_text(self, request: ClientRequest) -> None:
        if request.first_text_s is not None:
            self._first_token.observe(request.first_text_s - request.submitted_s)

    def on_stages(self, stages: Mapping[str, float]) -> None:
        """Count the seconds until a request's first text, by stage. Call it in any thread."""
        for stage, seconds in stages.items():
            if seconds > 0:
                self._stages.labels(stage).observe(seconds)

    def on_text(self, gap_s: float, num_tokens: int) -> None:
        """Count text of ``num_tokens`` tokens that came ``gap_s`` after the previous text."""
        self._inter_token.observe(gap_s, max(1, num_tokens))

    def on_fetched(self, seconds: float) -> None:
        """Count the time in which all media of a request were fetched."""
        self._fetch.observe(seconds)

    def on_media(self, items: Sequence[MediaItem]) -> None:
        """Count the media of a request that is submitted."""
        for item in items:
            self._media_items.labels(item.kind).inc()
            self._media_bytes.labels(item.kind).inc(item.num_bytes)

    def on_rejected(self, error: RequestError) -> None:
        self._rejections.labels(str(error.status)).inc()
        if error.medium is not None:
            self._media_refused.labels(error.medium).inc()

    def on_over(self, choices: Sequence[ClientRequest], num_prompt_tokens: int, now_s: float) -> None:
        """Count a request answered by its text or by an error, with all its choices as one. A refusal of the controller's counts as
        those of the gateway do."""
        failed = [choice for choice in choices if choice.error is not None]  # the others of one that fails are cancelled
        request = min(failed, key=lambda choice: choice.error is not None and choice.error.status == CLIENT_GONE, default=choices[0])
        if request.error is not None:
            if request.first_text_s is None and _is_refusal(request.error.status):
                at_fault = (item.kind for item in request.spec.items if item.path == request.error.param)
                request.error.medium = next(at_fault, None)
                self.on_rejected(request.error)
                return
            reason = "abort" if request.error.status == CLIENT_GONE else "error"
        else:
            reason = request.finish or "abort"
        if request.error is None or request.first_text_s is not None:
            self._prompt_tokens.inc(num_prompt_tokens)
        self._requests.labels(reason).inc()
        self._generation_tokens.inc(sum(choice.num_tokens for choice in choices))
        self._whole.observe(now_s - request.submitted_s)
        if request.granted_s is not None:
            self._queue.observe(request.granted_s - request.submitted_s)
            prefilled_s = request.finished_s if request.first_text_s is None else request.first_text_s
            if prefilled_s is not None:
                self._prefill.observe(prefilled_s - request.granted_s)
        if request.first_text_s is not None:
            self._decode.observe(now_s - request.first_text_s)

    def render(self, gateways: Mapping[str, list[Family]] | None = None) -> bytes:
        """Render Prometheus's text format. ``gateways``: the families of each, this one included, where there are several."""
        registry = CollectorRegistry()
        of_gateways = self._own if gateways is None else _Joined(gateways)
        registry.register(_Renamer((of_gateways, self._run), self._model_name))
        return prometheus_client.generate_latest(registry)

    def families(self) -> list[Family]:
        """Return this gateway's own."""
        return [
            Family(metric.name, metric.documentation, metric.type, [(one.name, one.labels, one.value) for one in metric.samples])
            for metric in self._own.collect()
        ]


def _is_refusal(status: int) -> bool:
    """Return whether the error lies with the request or its moment, not with the server."""
    return status != CLIENT_GONE and (status < 500 or status == 503)


class _StatsCollector(Collector):
    """Metrics that the controller publishes in shared memory."""

    def __init__(self, stats: Callable[[], StatsSnapshot], generations: Callable[[], Mapping[str, int]]) -> None:
        self._stats, self._generations = stats, generations

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield GaugeMetricFamily("mmrt_num_requests_running", "Sequences being decoded.", stats.running)
        yield GaugeMetricFamily("mmrt_num_requests_preparing", "Admitted, not yet decoded.", stats.preparing)
        yield GaugeMetricFamily("mmrt_num_requests_waiting", "Journaled, not yet admitted.", stats.waiting)
        waits = GaugeMetricFamily("mmrt_waiting_for", "1 for what requests lack that wait.", labels=["resource"])
        for resource in dict.fromkeys(WAITING_FOR.values()):
            waits.add_metric([resource], resource in stats.waiting_for)
        yield waits
        yield CounterMetricFamily("mmrt_preemptions", "Sequences that gave their KV pages to others.", stats.preempted_total)
        handed_over = "Sequences that went from one decode to another, without a copy."
        yield CounterMetricFamily("mmrt_sequences_handed_over", handed_over, stats.handed_over_total)
        transferred = "Bytes of KV pages copied from the pool of one device to that of another."
        yield CounterMetricFamily("mmrt_kv_transferred_bytes", transferred, stats.transferred_bytes_total)
        overruled = "Times that the scheduling policy failed and unified acted in its place."
        yield CounterMetricFamily("mmrt_policy_overruled", overruled, stats.overruled_total)
        yield CounterMetricFamily(
            "mmrt_policy_illegal_choices", "Choices of the scheduling policy dropped.", stats.illegal_choices_total
        )
        policy = GaugeMetricFamily("mmrt_policy", "1 for the scheduling policy in charge.", labels=["policy", "version"])
        policy.add_metric([stats.policy.name, stats.policy.version], 1)
        yield policy
        yield GaugeMetricFamily("mmrt_policy_call_p99_seconds", "99 % of its last calls took at most this.", stats.policy.p99_s)
        yield GaugeMetricFamily("mmrt_policy_call_max_seconds", "Longest call since it took over.", stats.policy.longest_s)
        queries, hits = "Prompt tokens looked up in the prefix cache.", "Prompt tokens whose KV pages were in the prefix cache."
        yield CounterMetricFamily("mmrt_prefix_cache_queries", queries, stats.looked_up_tokens_total)
        yield CounterMetricFamily("mmrt_prefix_cache_hits", hits, stats.cached_tokens_total)
        queries, hits = "Segments of media looked up in the embedding cache.", "Segments whose embedding pages were there."
        yield CounterMetricFamily("mmrt_media_cache_queries", queries, stats.media_queries_total)
        yield CounterMetricFamily("mmrt_media_cache_hits", hits, stats.media_hits_total)
        yield from _step_gaps(stats)
        yield from _pool_pages(stats)
        broken = GaugeMetricFamily("mmrt_actor_broken", "1 for an actor that the run does without for now.", labels=["actor"])
        generation = GaugeMetricFamily("mmrt_actor_generation", "Number of the process that is this actor now.", labels=["actor"])
        for name, number in self._generations().items():
            broken.add_metric([name], name in stats.broken)
            generation.add_metric([name], number)
        yield from (broken, generation)
        help = "Share in use, 0 to 1, of the fullest kind of pages that a sequence needs."
        yield GaugeMetricFamily("mmrt_kv_cache_usage_perc", help, _kv_usage(stats))


def _kv_usage(stats: StatsSnapshot) -> float:
    """Return the share in use of the fullest kind of pages that a sequence needs, each over all devices. vLLM's layers of all kinds
    take blocks from one pool, so that its 1 means no room for more; of several pools the fullest says so."""
    shares = [0.0]
    for kind in SEQUENCE_POOLS:
        uses = [use for name, use in stats.pools.items() if kind_of_pool(name) == kind]
        if num_pages := sum(use.pages for use in uses):
            shares.append(sum(use.used for use in uses) / num_pages)
    return max(shares)


def _step_gaps(stats: StatsSnapshot) -> Iterator[Metric]:
    """Yield the times between tokens in decode, by octave, and what the last seconds of them say."""
    counts = stats.gaps or [0] * NUM_BUCKETS
    buckets = [(str(BEGINS_S[end]), float(sum(counts[:end]))) for end in range(OCTAVE, NUM_BUCKETS, OCTAVE)]
    buckets.append(("+Inf", float(sum(counts))))
    yield HistogramMetricFamily("mmrt_step_gap_seconds", "Time between the commits of a sequence's tokens.", buckets, stats.gaps_s)
    yield GaugeMetricFamily("mmrt_tbt_objective_seconds", "Objective of the time between tokens.", stats.tbt_objective_s)
    if stats.tbt_p99_s is not None and stats.late_share is not None:
        yield GaugeMetricFamily("mmrt_tbt_p99_seconds", "99 % of the last seconds' times between tokens.", stats.tbt_p99_s)
        yield GaugeMetricFamily("mmrt_tbt_late_share", "Share of them over the objective, 0 to 1.", stats.late_share)


def _pool_pages(stats: StatsSnapshot) -> Iterator[Metric]:
    for name, help, count in _POOL_GAUGES:
        family = GaugeMetricFamily(name, help, labels=["pool"])
        for pool, use in stats.pools.items():
            family.add_metric([pool], count(use))
        yield family


class _TokenTimes(Collector):
    """A histogram that takes all tokens of a text at once."""

    def __init__(self, name: str, help: str) -> None:
        self._name, self._help = f"mmrt_{name}_seconds", help
        self._counts = [0] * (len(_SECONDS) + 1)
        self._sum_s = 0.0

    def observe(self, gap_s: float, num_tokens: int) -> None:
        """Count so many tokens that came together, so long after those before."""
        self._counts[bisect_left(_SECONDS, gap_s / num_tokens)] += num_tokens
        self._sum_s += gap_s

    def collect(self) -> Iterator[Metric]:
        ends = [*(str(float(end)) for end in _SECONDS), "+Inf"]
        yield HistogramMetricFamily(self._name, self._help, [*zip(ends, accumulate(self._counts), strict=True)], self._sum_s)


class _Joined(Collector):
    """The metrics of several gateways, each with its name as a label."""

    def __init__(self, gateways: Mapping[str, list[Family]]) -> None:
        self._gateways = gateways

    def collect(self) -> Iterator[Metric]:
        joined: dict[str, Metric] = {}
        for gateway, families in self._gateways.items():
            for family in families:
                metric = joined.setdefault(family.name, Metric(family.name, family.help, family.type))
                metric.samples += [Sample(name, {**labels, "gateway": gateway}, value) for name, labels, value in family.samples]
        yield from joined.values()


class _Renamer(Collector):
    """Yields every metric under our name, and again under its alias if any, with ``model_name`` as in vLLM."""

    def __init__(self, all_of_them: Sequence[Collector], model_name: str) -> None:
        self._all = all_of_them
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        for metric in chain.from_iterable(one.collect() for one in self._all):
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric
            for alias in ALIASES.get(metric.name, ()):
                renamed = Metric(alias, metric.documentation, metric.type)
                renamed.samples = [self._rename(sample, metric.name, alias) for sample in metric.samples]
                yield renamed

    def _rename(self, sample: Sample, name: str, alias: str) -> Sample:
        labels = {**sample.labels, "model_name": self._model_name}
        return sample._replace(name=alias + sample.name.removeprefix(name), labels=labels)
