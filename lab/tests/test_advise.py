"""``mmrt advise`` on a live run: it counts what the run does, says what it would do, and changes nothing."""

import json
import time
from contextlib import closing
from pathlib import Path

from mmrt.tests.end_to_end.conftest import Server
from mmrt_lab.planner.demand import Demand
from mmrt_lab.planner.live import Observer
from mmrt_lab.planner.scaler import Sample


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
        prefilled = sample.units.get("prefill", 0)  # decode takes the last token of each
        if total.num_requests >= num_requests and total.decode_tokens >= num_tokens and prefilled >= total.prompt_tokens - num_requests:
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
        assert sample.units["prefill"] == demand.prompt_tokens - 2
        assert 0 < sample.busy_s["prefill"] < sample.at_s - first.at_s and sample.tbt_objective_s > 0
        server.wait_until_empty()
        (sample, _) = observer.look()
        assert (sample.rows_left, sample.tokens_left) == (0, 0)


def test_what_would_be_done_is_said_and_nothing_is_done(server: Server, tmp_path: Path) -> None:
    before = server.status()
    done = server.mmrt("advise", "--every", "0.5", "--looks", "2", "--json")
    assert done.returncode == 0, done.stderr
    looks = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(looks) == 2 and all({*look["figures"]} == {"E", "P", "D"} and look["layout"] is None for look in looks)
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
