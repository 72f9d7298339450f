"""Traces: off by default, refused where they cannot work, and bounded where their records or their collector are lost."""

import socket
import subprocess
import sys
import threading
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

from mmrt.actors.gateway import serve as serving
from mmrt.actors.gateway.watching import tracing as tracing_module
from mmrt.actors.gateway.watching.tracing import EXPORT_TIMEOUT_S, FLUSH_S, MAX_OPEN, MAX_STAGES, Tracing
from mmrt.runtime.bus.plan_base import PlanKind
from mmrt.runtime.config.otlp_endpoint import otlp_url
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.config.sections import TracingSection
from mmrt.runtime.errors import ConfigError
from mmrt.runtime.observe.request_follower import FollowedRequest
from mmrt.runtime.observe.request_stages import FirstText
from mmrt.runtime.observe.trace_requests import PlanSpan, RequestSpan, Stage

MS = 1_000_000
NOBODY = TracingSection(otlp_endpoint="http://127.0.0.1:1")


class Kept(SpanProcessor):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


@pytest.fixture
def tracing() -> Any:
    made = Tracing(NOBODY, "tiny")
    made._provider.add_span_processor(kept := Kept())
    yield made, kept.spans
    made.close()  # the collector is away: nothing waits for it, nothing is raised


def request(key: int, num_plans: int = 1, status: int = 0) -> FollowedRequest:
    end = 100 + 2 * num_plans
    stages = [Stage("submitted", 100 * MS, 101 * MS), Stage("prefilling", 101 * MS, end * MS), Stage("decoding", end * MS, 0)]
    plans = {n: PlanSpan(n, PlanKind.PREFILL, begin_ns=(100 + 2 * n) * MS, end_ns=(101 + 2 * n) * MS) for n in range(num_plans)}
    span = RequestSpan(key, stages=stages, num_prompt_tokens=5, num_sent=2, status=status)
    return FollowedRequest(span, plans, FirstText(end * MS, (end + 1) * MS, (end + 2) * MS))


def test_off_imports_nothing_of_opentelemetry() -> None:
    program = "import sys, mmrt.actors.gateway.serve; sys.exit(any(name.startswith('opentelemetry.sdk') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
    assert serving._import_tracing(RuntimeConfig()) is None


def test_without_the_extra_the_gateway_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mmrt.actors.gateway.watching.tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"tracing.otlp_endpoint needs OpenTelemetry: pip install 'mmrt\[otel\]'"):
        serving._import_tracing(RuntimeConfig(tracing=NOBODY))


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://a:4318", "http://a:4318/v1/traces"),
        ("https://a/", "https://a/v1/traces"),
        ("http://[::1]:4318/otlp/v1/traces", "http://[::1]:4318/otlp/v1/traces"),
    ],
)
def test_where_spans_go(endpoint: str, url: str) -> None:
    assert otlp_url(endpoint) == url


def test_a_failed_request_says_so(tracing: Any) -> None:
    made, spans = tracing
    for status, is_error in ((500, True), (499, False)):
        made.begin(1, "chatcmpl-1", "/v1/chat/completions", {})
        made.over(request(1, status=status), 120 * MS)
        assert spans[-1].attributes["error.type"] == str(status) and (spans[-1].status.status_code.name == "ERROR") is is_error


def test_further_choices_and_requests_of_others_make_no_spans(tracing: Any) -> None:
    made, spans = tracing
    made.over(request(2), 120 * MS)
    assert spans == []


def test_spans_and_contexts_are_bounded(tracing: Any) -> None:
    made, spans = tracing
    for key in range(MAX_OPEN + 5):
        made.begin(key, f"chatcmpl-{key}", "/v1/chat/completions", {})
    assert len(made._open) == MAX_OPEN and 0 not in made._open
    made.over(request(MAX_OPEN, num_plans=200), 1000 * MS)
    assert len(spans) == MAX_STAGES + 1 and spans[-1].attributes["mmrt.stages_left_out"] > 0
    assert "traceparent" not in made._open[MAX_OPEN - 1].headers


def test_a_share_of_the_requests_is_sampled() -> None:
    made = Tracing(TracingSection(otlp_endpoint="http://127.0.0.1:1", sample_ratio=0.0), "tiny")
    made._provider.add_span_processor(kept := Kept())
    asked = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    for key, headers in ((1, {}), (2, asked)):
        made.begin(key, f"chatcmpl-{key}", "/v1/chat/completions", headers)
        made.over(request(key), 120 * MS)
    made.close()
    assert {span.attributes["gen_ai.response.id"] for span in kept.spans if not span.name.islower()} == {"chatcmpl-2"}


def test_a_collector_that_never_answers_does_not_hold_up_the_end() -> None:
    """More batches wait than its patience is for: without a bound each would take its whole time."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        made = Tracing(TracingSection(otlp_endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}"), "tiny")
        for key in range(1000):
            made.begin(key, f"chatcmpl-{key}", "/v1/chat/completions", {})
            made.over(request(key), 120 * MS)
        closing = threading.Thread(target=made.close, daemon=True)
        closing.start()
        closing.join(FLUSH_S + 4 * EXPORT_TIMEOUT_S)
        assert not closing.is_alive()


def test_contexts_are_noted_while_others_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop notes them, the thread of the stages takes them."""
    monkeypatch.setattr(tracing_module, "MAX_OPEN", 8)
    made, ended = Tracing(TracingSection(otlp_endpoint=NOBODY.otlp_endpoint, sample_ratio=0.0), "tiny"), threading.Event()
    over = [request(key) for key in range(16)]

    def take() -> None:
        while not ended.is_set():
            for one in over:
                made.over(one, 200 * MS)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=take)
    thread.start()
    try:
        for number in range(200_000):
            made.begin(number % 16, "chatcmpl-1", "/v1/chat/completions", {})
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(before)
        made.close()
    assert len(made._open) <= 8
