"""The dashboard and the alert rules ask for metrics and labels that a real server has, and leave none out."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import httpx2
import openai
import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from mmrt.actors.gateway.metrics import ALIASES
from mmrt.cli.dashboards import FILES, FOLDER
from mmrt.runtime.observe.request_stages import TTFT_STAGES
from mmrt.tests.end_to_end.conftest import Server
from mmrt.tests.end_to_end.test_media import image_part, picture, text

OF_PROMETHEUS = {"instance", "job"}  # it adds them to every sample
VARIABLES = {"$__rate_interval": "5m", "$instance": ".*"}


class Family(NamedTuple):
    name: str
    labels: frozenset[str]


def read_metrics(server: Server) -> tuple[dict[str, Family], dict[tuple[str, str], float]]:
    """Families by the names of their samples; the samples of one label or none, by name and value of the label."""
    families, samples = {}, {}
    for found in text_string_to_metric_families(httpx2.get(f"{server.url}/metrics").text):
        for sample in found.samples:
            known = families.get(sample.name, Family(found.name, frozenset()))
            families[sample.name] = Family(found.name, known.labels | set(sample.labels))
            samples[sample.name, ",".join(sample.labels.values())] = sample.value
    return families, samples


@pytest.fixture(scope="module")
def metrics(server: Server) -> tuple[dict[str, Family], dict[tuple[str, str], float]]:
    """As of a server that has answered about a picture, has refused a request, and is decoding."""
    server.chat([text("Look at this."), image_part(picture(1, 90, 120))])
    with pytest.raises(openai.BadRequestError):
        server.chat("hi", temperature=7)
    with server.stream("Write on.", max_tokens=2000, extra_body={"ignore_eos": True}) as stream:
        for _ in stream:
            found = read_metrics(server)
            if "mmrt_tbt_p99_seconds" in found[0] and ("mmrt_ttft_stage_seconds_count", "encode") in found[1]:
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
    families, _ = metrics
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
    left_out = {family.name for family in families.values()} - asked
    aliases = {alias for names in ALIASES.values() for alias in names}  # the same numbers under others' names
    assert left_out == aliases & left_out, "a metric that nobody shows"
    assert aliases <= {family.name for family in families.values()}
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
    _, samples = metrics
    stages = {stage: samples.get(("mmrt_ttft_stage_seconds_sum", stage), 0.0) for stage in TTFT_STAGES}
    assert all(stages[stage] > 0 for stage in ("admission", "media_write", "media_decode", "encode", "prefill", "first_step"))
    assert samples["mmrt_ttft_stage_seconds_count", "encode"] <= samples["mmrt_ttft_stage_seconds_count", "prefill"]
    assert samples["mmrt_media_items_total", "image"] >= 1 and samples["mmrt_media_bytes_total", "image"] > 0


@pytest.mark.parametrize(("name", "begin"), [("grafana", "{"), ("alerts", "# Alert rules")])
def test_the_command_prints_them(server: Server, name: str, begin: str) -> None:
    done = server.mmrt("dashboards", name)
    assert done.returncode == 0 and done.stdout == (FOLDER / FILES[name]).read_text() and done.stdout.startswith(begin)


def test_the_command_refuses_other_names(server: Server) -> None:
    done = server.mmrt("dashboards", "kibana")
    assert done.returncode == 2 and "'kibana' is not one of 'grafana', 'alerts'" in done.stderr
