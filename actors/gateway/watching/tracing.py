"""OpenTelemetry traces: a span for each request, and one below it for each of its stages, sent to a collector by OTLP over HTTP.

Off unless ``tracing.otlp_endpoint`` is set; only then OpenTelemetry's SDK is imported (extra ``otel``). The event loop only notes the
trace context of a request (``begin``). Spans are made from flight records when a request is over, in ``StageWatch``'s thread, and sent
by the SDK's: to a collector that is away they are lost, and nothing waits for it.
"""

import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from .... import __version__
from ....runtime.config.otlp_endpoint import otlp_url
from ....runtime.config.sections import TracingSection
from ....runtime.observe.request_follower import FollowedRequest
from ....runtime.observe.request_stages import stage_of_stretch, stages_to_end

MAX_OPEN = 4096  # requests whose context is remembered: those that were lost with their records must not gather
MAX_STAGES = 128  # spans below a request's; a long video has many chunks
QUEUE_SPANS = 8192  # that wait for the collector; more are lost
BATCH_SPANS = 512
SEND_EVERY_MS = 1000
EXPORT_TIMEOUT_S = 2  # of a batch
FLUSH_S = 2.0  # for all batches at the end of the gateway
_PROPAGATED = ("traceparent", "tracestate")


class _Context(NamedTuple):
    """A request as its client knows it. ``headers``: those of W3C's trace context that it has sent."""

    request_id: str
    path: str
    headers: dict[str, str]


class Tracing:
    """The traces of one gateway generation."""

    def __init__(self, section: TracingSection, model_name: str) -> None:
        resource = Resource.create({SERVICE_VERSION: __version__})
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):  # OTEL_SERVICE_NAME is not set
            resource = resource.merge(Resource({SERVICE_NAME: "mmrt"}))
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(section.sample_ratio)), resource=resource, shutdown_on_exit=False
        )
        self._exporter = OTLPSpanExporter(endpoint=otlp_url(section.otlp_endpoint), timeout=EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter, max_queue_size=QUEUE_SPANS, max_export_batch_size=BATCH_SPANS, schedule_delay_millis=SEND_EVERY_MS
            )
        )
        self._tracer = self._provider.get_tracer("mmrt", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name
        self._open: dict[int, _Context] = {}
        self._lock = threading.Lock()  # of ``_open``

    def begin(self, key: int, request_id: str, path: str, headers: Mapping[str, str]) -> None:
        """Note the context of a request, in the event loop. ``key``: that of its first choice."""
        context = _Context(request_id, path, {name: headers[name] for name in _PROPAGATED if name in headers})
        with self._lock:
            while len(self._open) >= MAX_OPEN:
                del self._open[next(iter(self._open))]
            self._open[key] = context

    def over(self, request: FollowedRequest, end_ns: int) -> None:
        """Make the spans of a request that is over; ``end_ns`` of CLOCK_MONOTONIC. Without effect for further choices."""
        span = request.span
        with self._lock:
            context = self._open.pop(span.key, None)
        if context is None:
            return
        to_wall_ns = time.time_ns() - time.monotonic_ns()
        made = self._tracer.start_span(
            f"POST {context.path}",
            self._propagator.extract(context.headers),  # what is malformed in them counts as absent
            SpanKind.SERVER,
            {
                "http.request.method": "POST",
                "url.path": context.path,
                "gen_ai.request.model": self._model_name,
                "gen_ai.response.id": context.request_id,
                "gen_ai.usage.input_tokens": span.num_prompt_tokens,
                "gen_ai.usage.output_tokens": span.num_sent,
                "mmrt.cached_tokens": span.num_cached_tokens,
                "mmrt.media": max(0, span.num_items),
            },
            start_time=span.begin_ns + to_wall_ns,
        )
        if made.is_recording():
            parent = set_span_in_context(made)
            stretches = stages_to_end(span, request.plans.values(), request.first, end_ns)
            for stretch in stretches[:MAX_STAGES]:
                stage = self._tracer.start_span(stage_of_stretch(stretch), parent, start_time=stretch.begin_ns + to_wall_ns)
                stage.end(stretch.end_ns + to_wall_ns)
            if len(stretches) > MAX_STAGES:
                made.set_attribute("mmrt.stages_left_out", len(stretches) - MAX_STAGES)
            if request.first is not None:
                made.add_event("first text", timestamp=request.first.time_ns + to_wall_ns)
            if span.status:
                made.set_attribute("error.type", str(span.status))
                if span.status >= 500:
                    made.set_status(Status(StatusCode.ERROR))
        made.end(end_ns + to_wall_ns)

    def close(self) -> None:
        """Send what is left, if the collector takes it soon. The SDK's own flush waits for each batch."""
        flushing = threading.Thread(target=self._provider.force_flush, daemon=True)
        flushing.start()
        flushing.join(FLUSH_S)
        if flushing.is_alive():
            self._exporter.shutdown()  # type: ignore[no-untyped-call]  # further batches fail at once
        self._provider.shutdown()
