"""``mmrt advise`` on a live run: it counts what the run does, and says what it would do, or does it."""

import io
import json
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import IO

import msgspec
import pytest

from mmrt.runtime.autoscale.demand import Demand
from mmrt.runtime.autoscale.observer import Observer
from mmrt.runtime.autoscale.scaler import Sample
from mmrt.runtime.errors import RunError
from mmrt.tests.end_to_end.conftest import MMRT, Server
from mmrt_lab.planner.advice import Advice, acted_on, show


def looked(observer: Observer, num_requests: int, num_tokens: int) -> tuple[Sample, Demand]:
    """Looks until the records of so many requests, of their prompts and of so many tokens are there: each comes a moment later."""
    deadline = time.monotonic() + 30
    total = Demand()
    while True:
        sample, demand = observer.look()
        total = Demand(
            num_requests=total.num_requests + demand.num_requests,
            encode_rows=total.encode_rows + demand.encode_rows,
            prompt_tokens=total.prompt_tokens + demand.prompt_tokens,
            decode_tokens=total.decode_tokens + demand.decode_tokens,
        )
        prefilled = sample.units.get("prefill", 0)
        if total.num_requests >= num_requests and total.decode_tokens >= num_tokens and prefilled >= total.prompt_tokens:
            return sample, total
        assert time.monotonic() < deadline, total
        time.sleep(0.05)


def test_an_observer_counts_what_requests_ask_for(server: Server) -> None:
    server.wait_until_empty()
    with closing(Observer(server.run_path)) as observer:
        first, _ = looked(observer, 0, 0)
        for text in ("one two three", "four five six seven"):
            server.chat(text, max_tokens=10, extra_body={"ignore_eos": True})
        sample, demand = looked(observer, 2, 20)
        assert demand.num_requests == 2 and demand.decode_tokens == 20 and demand.encode_rows == 0
        assert 10 < demand.prompt_tokens < 200
        assert sample.units["prefill"] == demand.prompt_tokens
        assert 0 < sample.busy_s["prefill"] < sample.at_s - first.at_s and sample.tbt_objective_s > 0
        server.wait_until_empty()
        (sample, _) = observer.look()
        assert (sample.rows_left, sample.tokens_left) == (0, 0)


def test_what_would_be_done_is_said_and_nothing_is_done(server: Server, tmp_path: Path) -> None:
    before = server.status()
    done = server.mmrt("advise", "--every", "0.5", "--looks", "2", "--json")
    assert done.returncode == 0, done.stderr
    looks = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(looks) == 2 and all({*look["figures"]} == {"V", "E", "P", "D"} and look["layout"] is None for look in looks)
    said = server.mmrt("advise", "--every", "0.5", "--looks", "1")
    assert "1 E: busy 0%" in said.stdout and "would run" not in said.stdout
    after = server.status()
    assert after["layout"] == before["layout"] and server.pid("prefill") == next(
        actor["pid"] for actor in before["actors"] if actor["name"] == "prefill"
    )


def test_what_is_impossible_is_refused(server: Server, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text("[]")
    refused = server.mmrt("advise", "--plan", str(plan))
    assert refused.returncode == 2 and "is no plan of mmrt plan --json" in refused.stderr


def test_a_layout_is_set_or_refused(launch: Callable[..., Server]) -> None:
    """An answer that runs meanwhile is the same; what the run refuses is said and changes nothing."""
    server = launch()
    advice = Advice(at="", figures={}, layout="E+P+D+P", why=[], drift=None)
    alone = server.chat("Count.", max_tokens=40, extra_body={"ignore_eos": True})
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(server.chat, "Count.", max_tokens=40, extra_body={"ignore_eos": True})
        done = acted_on(advice, server.run_path)
        assert asked.result() == alone
    assert done.set_in_s is not None and not done.refused and server.status()["layout"] == "E+P+D+P"
    for layout, reason in (("EP+D", "EP"), ("nonsense", "nonsense")):
        refused = acted_on(msgspec.structs.replace(advice, layout=layout), server.run_path)
        assert refused.set_in_s is None and reason in refused.refused
    said = io.StringIO()
    show(refused, said, as_json=False)
    assert "refused (" in said.getvalue() and server.status()["layout"] == "E+P+D+P"
    server.down()
    with pytest.raises(RunError):
        acted_on(advice, server.run_path)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_with_act_processes_come_with_the_work_and_go_after_it(launch: Callable[..., Server]) -> None:
    """A second process comes while work waits, goes when none has come for a while, and all answers are those of one."""
    server = launch("qwen2_5_omni", "[slo.text]\nttft_ms = 100.0")
    texts = [f"{number} " * 300 for number in range(8)]
    alone = [server.chat(text, max_tokens=3)[1] for text in texts]
    acting = subprocess.Popen(
        [*MMRT, "advise", "--act", "--most", "2", "--every", "0.5", "--calm", "4", "--looks", "400", "--json"],
        env=server.environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        has_come, deadline = threading.Event(), time.monotonic() + 120

        def ask(number: int) -> None:
            while not has_come.is_set() and time.monotonic() < deadline:
                assert server.chat(texts[number], max_tokens=3)[1] == alone[number]

        assert acting.stdout is not None
        with ThreadPoolExecutor(8) as threads:
            asked = [threads.submit(ask, number) for number in range(8)]
            came = next_change(acting.stdout)
            has_come.set()
            assert [answer.result() for answer in asked] == [None] * 8
        assert came != "E+P+D"
        while server.status()["layout"] != "E+P+D":
            assert next_change(acting.stdout)
    finally:
        acting.kill()
        acting.communicate()


def next_change(lines: IO[str]) -> str:
    """The next layout that is set."""
    looks = map(json.loads, lines)
    found: str = next(look["layout"] for look in looks if look["set_in_s"] is not None)
    return found
