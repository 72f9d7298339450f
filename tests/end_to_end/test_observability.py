"""A run that is watched: traces, sent to a collector in this process; the dashboard and the alerts, which ask for metrics and labels
that there are and leave none out; and logs as JSON."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import openai
import promql_parser
import pytest
import yaml
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client.parser import text_string_to_metric_families

from mmrt.actors.gateway.watching.metrics import ALIASES
from mmrt.cli.dashboards import FILES, FOLDER
from mmrt.runtime.observe.request_stages import STEPS, TTFT_STAGES
from mmrt.tests.end_to_end.conftest import Server
from mmrt.tests.end_to_end.test_media import image_part, picture, text

STAGES = {*STEPS, *TTFT_STAGES}
KEY, LIMITED_KEY = "a-key-for-the-tests", "a-key-with-a-limit"
KEYS = f"""
[[key]]
name = "tests"
key = "{KEY}"

[[key]]
name = "limited"
key = "{LIMITED_KEY}"
requests_per_minute = 1
"""
SETTINGS = """
[server]
api_keys_file = "{keys}"

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
def observed(launch: Callable[..., Server], collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Server:
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.touch(0o600)
    keys.write_text(KEYS)
    server = launch("qwen2_5_omni", SETTINGS.format(url=collector.url, keys=keys))
    server.client = server.client.with_options(api_key=KEY)
    return server


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
    assert {"admission", "media_write", "prefill", "first_step"} <= names <= {*STAGES}
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


OF_PROMETHEUS = {"instance", "job"}  # it adds them to every sample
VARIABLES = {"$__rate_interval": "5m", "$instance": ".*"}


class Family(NamedTuple):
    name: str
    labels: frozenset[str]


Metrics = tuple[dict[str, Family], set[str], dict[tuple[str, str], float]]


def read_metrics(server: Server) -> Metrics:
    """Families by the names of their samples, the names of all families, and the samples by name and values of their labels."""
    families, names, samples = {}, set(), {}
    for found in text_string_to_metric_families(httpx2.get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text):
        names.add(found.name)
        for sample in found.samples:
            known = families.get(sample.name, Family(found.name, frozenset()))
            families[sample.name] = Family(found.name, known.labels | set(sample.labels))
            samples[sample.name, ",".join(sample.labels.values())] = sample.value
    return families, names, samples


@pytest.fixture(scope="module")
def metrics(observed: Server) -> Metrics:
    """As of a server that has answered about a picture, has refused requests, and is decoding."""
    server = observed
    server.chat([text("Look at this."), image_part(picture(1, 90, 120))])
    with pytest.raises(openai.BadRequestError):
        server.chat("hi", temperature=7)
    with pytest.raises(openai.RateLimitError):
        for _ in range(2):
            server.client.with_options(api_key=LIMITED_KEY).completions.create(model=server.checkpoint.name, prompt="hi", max_tokens=1)
    with server.stream("Write on.", max_tokens=2000, extra_body={"ignore_eos": True}) as stream:
        for _ in stream:
            found = read_metrics(server)
            if "mmrt_tbt_p99_seconds" in found[0] and ("mmrt_ttft_stage_seconds_count", "encode") in found[2]:
                break
    server.wait_until_empty()
    return found


def nodes(node: Any) -> Iterator[Any]:
    """An expression and all below it."""
    yield node
    for name in ("expr", "lhs", "rhs", "param", "vector_selector", "args"):
        below = getattr(node, name, None)
        for one in below if isinstance(below, Sequence) else () if below is None else (below,):
            yield from nodes(one)


def check(expression: str, families: dict[str, Family], legend: str = "") -> set[str]:
    """Check an expression, and the labels in its legend; return the families that it asks for."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    found = list(nodes(promql_parser.parse(expression)))
    selectors = [node for node in found if isinstance(node, promql_parser.VectorSelector)]
    assert selectors, expression
    grouped: set[str] = set()
    for node in found:
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            grouped |= set(node.modifier.labels)
    for selector in selectors:
        assert selector.name in families, f"there is no metric {selector.name}: {expression}"
        labels = families[selector.name].labels | OF_PROMETHEUS
        asked = {matcher.name for matcher in selector.matchers.matchers}
        assert asked <= labels, f"{selector.name} has no label {asked - labels}: {expression}"
    known = frozenset().union(*(families[selector.name].labels for selector in selectors)) | OF_PROMETHEUS
    assert grouped <= known, f"no metric has {grouped - known}: {expression}"
    assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= grouped, f"{legend} of {expression}"
    return {families[selector.name].name for selector in selectors}


def test_dashboard_and_alerts_ask_for_what_there_is_and_leave_nothing_out(metrics: Any) -> None:
    families, names, _ = metrics
    asked: set[str] = set()
    board = json.loads((FOLDER / FILES["grafana"]).read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    for panel in panels:
        assert panel["targets"]
        for target in panel["targets"]:
            asked |= check(target["expr"], families, target["legendFormat"])
    for variable in board["templating"]["list"][1:]:
        name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]).groups()  # type: ignore[union-attr]
        assert name in families and label in families[name].labels | OF_PROMETHEUS
    left_out = names - asked
    aliases = {alias for names in ALIASES.values() for alias in names}  # the same numbers under others' names
    assert left_out == aliases & left_out, "a metric that nobody shows"
    assert aliases <= names
    for rule in yaml.safe_load((FOLDER / FILES["alerts"]).read_text())["groups"][0]["rules"]:
        check(rule["expr"], families)
        assert rule["labels"]["severity"] in ("critical", "warning", "info") and rule["annotations"]["summary"]


def test_panels_do_not_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    panels = json.loads((FOLDER / FILES["grafana"]).read_text())["panels"]
    for panel in panels:
        place = panel["gridPos"]
        mine = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & mine and place["x"] + place["w"] <= 24, panel["title"]
        cells |= mine
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_a_picture_passes_all_stages_and_they_sum_to_the_time(metrics: Any) -> None:
    *_, samples = metrics
    stages = {stage: samples.get(("mmrt_ttft_stage_seconds_sum", stage), 0.0) for stage in TTFT_STAGES}
    assert all(stages[stage] > 0 for stage in ("admission", "media_write", "media_decode", "encode", "prefill", "first_step"))
    assert samples["mmrt_ttft_stage_seconds_count", "encode"] <= samples["mmrt_ttft_stage_seconds_count", "prefill"]
    assert samples["mmrt_media_items_total", "image"] >= 1 and samples["mmrt_media_bytes_total", "image"] > 0


@pytest.mark.parametrize(("name", "begin"), [("grafana", "{"), ("alerts", "# Alert rules")])
def test_the_command_prints_them(observed: Server, name: str, begin: str) -> None:
    done = observed.mmrt("dashboards", name)
    assert done.returncode == 0 and done.stdout == (FOLDER / FILES[name]).read_text() and done.stdout.startswith(begin)


def test_the_command_refuses_other_names(observed: Server) -> None:
    done = observed.mmrt("dashboards", "kibana")
    assert done.returncode == 2 and "'kibana' is not one of 'grafana', 'alerts'" in done.stderr


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
    assert f"{request['time']} INFO mmrt.actors.gateway.watching.request_log: {request['message']}" in shown and '{"time"' not in shown
