"""A run that logs JSON, read back by ``mmrt logs``, and sends traces: to a collector in this process."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from mmrt.runtime.observe.request_stages import STEPS, TTFT_STAGES
from mmrt.tests.end_to_end.conftest import Server
from mmrt.tests.end_to_end.test_media import image_part, picture, text

STAGES = {*STEPS, *TTFT_STAGES}
SETTINGS = """
[logging]
format = "json"

[tracing]
otlp_endpoint = "{url}"
"""
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
WAIT_S = 30


class Collector:
    """Takes OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, str]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf"
                for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    collector.resources.append({one.key: one.value.string_value for one in of_resource.resource.attributes})
                    for of_scope in of_resource.scope_spans:
                        collector.spans += of_scope.spans
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def of_request(self, request_id: str) -> tuple[Span, list[Span]]:
        """The span of a request and those below it, once they are there."""
        deadline = time.monotonic() + WAIT_S
        while not (roots := [span for span in self.spans if attributes(span).get("gen_ai.response.id") == request_id]):
            assert time.monotonic() < deadline, f"no span of {request_id}"
            time.sleep(0.05)
        (root,) = roots
        return root, [span for span in self.spans if span.parent_span_id == root.span_id]


def attributes(span: Span) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with closing(Collector()) as collector:
        yield collector


@pytest.fixture(scope="module")
def observed(launch: Callable[..., Server], collector: Collector) -> Server:
    return launch("qwen2_5_omni", SETTINGS.format(url=collector.url))


def ask(server: Server, content: Any = "hi", **headers: str) -> Any:
    messages = [{"role": "user", "content": content}]
    return server.client.chat.completions.create(
        model=server.checkpoint.name, messages=messages, max_tokens=3, extra_body={"ignore_eos": True}, extra_headers=headers
    )


def test_the_spans_of_a_request(observed: Server, collector: Collector) -> None:
    began_ns = time.time_ns()
    answer = ask(observed, [text("See:"), image_part(picture(1, 90, 120)), text("?")], traceparent=f"00-{TRACE}-{PARENT}-01")
    ended_ns = time.time_ns()
    root, stages = collector.of_request(answer.id)
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT), "it goes on with its client's trace"
    assert root.name == "POST /v1/chat/completions" and root.kind == Span.SPAN_KIND_SERVER
    found = attributes(root)
    assert found["gen_ai.usage.input_tokens"] == answer.usage.prompt_tokens and found["gen_ai.usage.output_tokens"] == 3
    assert found["mmrt.media"] == 1 and found["gen_ai.request.model"] == observed.checkpoint.name and "error.type" not in found
    names = {span.name for span in stages}
    assert {"admission", "media_write", "media_decode", "encode", "prefill", "first_step", "text"} <= names <= {*STAGES}
    stages.sort(key=lambda span: span.start_time_unix_nano)
    edges = [span.start_time_unix_nano for span in stages] + [root.end_time_unix_nano]
    assert edges[0] == root.start_time_unix_nano and [span.end_time_unix_nano for span in stages] == edges[1:], "without gaps"
    assert began_ns - 1e6 < root.start_time_unix_nano and root.end_time_unix_nano < ended_ns + 1e6, "of the wall clock"
    assert [event.name for event in root.events] == ["first text"]
    assert {span.trace_id.hex() for span in stages} == {TRACE}
    assert collector.resources[0]["service.name"] == "mmrt" and collector.resources[0]["service.version"]


MALFORMED = (
    "",
    "no",
    f"00-{TRACE}-{PARENT}",
    f"00-{'0' * 32}-{PARENT}-01",
    f"00-{TRACE}-{'0' * 16}-01",
    f"ff-{TRACE}-{PARENT}-01",
    f"00-{TRACE}-{PARENT}-01-more",
    "x" * 5000,
)


def test_a_malformed_trace_context_is_ignored(observed: Server, collector: Collector) -> None:
    ids = {traceparent: ask(observed, traceparent=traceparent, tracestate="=,=").id for traceparent in MALFORMED}
    for traceparent, id in ids.items():
        root, _ = collector.of_request(id)
        assert root.trace_id.hex() != TRACE and not root.parent_span_id, traceparent


def test_a_client_that_does_not_trace_gets_no_spans(observed: Server, collector: Collector) -> None:
    quiet = ask(observed, traceparent=f"00-{TRACE}-{PARENT}-00")
    collector.of_request(ask(observed).id)
    assert quiet.id not in {attributes(span).get("gen_ai.response.id") for span in collector.spans}


def log_lines(server: Server) -> list[tuple[str, dict[str, Any]]]:
    folder = Path(server.environment["XDG_STATE_HOME"]) / "mmrt" / server.run_path.name
    return [(path.stem, json.loads(line)) for path in folder.glob("*.log") for line in path.read_text().splitlines()]


def test_every_line_is_an_object_and_logs_shows_it_as_text(observed: Server) -> None:
    server = observed
    answer = ask(server)
    server.kill("decode")
    server.wait(lambda _: any(line["message"].startswith("decode ended with SIGKILL") for _, line in log_lines(server)), "a line")
    lines = log_lines(server)
    assert {"gateway", "controller", "supervisor"} <= {file for file, _ in lines}
    for file, line in lines:
        assert {"time", "level", "actor", "pid", "message"} <= line.keys() and line["actor"] == file
    (request,) = [line for _, line in lines if line.get("request_id") == answer.id and line["message"].startswith("POST ")]
    assert (request["actor"], request["level"], request["generation"]) == ("gateway", "INFO", 1)
    shown = server.mmrt("logs", "gateway").stdout
    assert f"{request['time']} INFO mmrt.actors.gateway.request_log: {request['message']}" in shown and '{"time"' not in shown
