"""Requests without an answer, message by message: they end with their prefill, and share pages as far as what they ask for allows."""

import msgspec
import pytest

from mmrt.runtime.bus import messages as m
from mmrt.runtime.bus import plans as p
from mmrt.runtime.bus.sampling import Sampling
from mmrt.runtime.controller.recovery import recover
from mmrt.runtime.controller.rows.lifecycle import preempt
from mmrt.schema.outage import Outage
from mmrt.schema.rows import Phase
from mmrt.tests.runtime.controller.test_machine import KEY, SHAPE, Driver, phases, sent, text
from mmrt.tests.runtime.controller.test_prefix_cache import ask, cached, known_image
from mmrt.tests.runtime.controller.test_recovery import remains


def scoring(num_tokens: int = 6, last: int = 2) -> m.RequestSpec:
    return text(num_tokens, 0).asking(sampling=Sampling(prompt_logprobs=0, prompt_logprobs_last=last))


def pooling(num_tokens: int, how: m.Pooling) -> m.RequestSpec:
    return text(num_tokens, 0).asking(pooling=how)


def prefill_all(driver: Driver) -> tuple[list[m.ToActor], list[tuple[int, int]]]:
    """Let all plans of prefill be done; return what the gateway is told, and the chunks in order."""
    told, chunks = list[m.ToActor](), []
    while driver.state.plans:
        plan = driver.plan("prefill")[1]
        assert isinstance(plan, p.Prefill)
        chunks += [(chunk.start, chunk.end) for chunk in plan.chunks]
        told += sent(driver.done("prefill"), m.Computed)
    return told, chunks


@pytest.mark.parametrize(("spec", "end"), [(scoring(), 5), (pooling(6, "last"), 6), (pooling(6, "mean"), 6), (pooling(1, "last"), 1)])
def test_a_request_ends_with_its_prefill(spec: m.RequestSpec, end: int) -> None:
    driver = Driver()
    effects = driver.submit(spec)
    assert sent(effects, m.Prepared) and not sent(effects, m.Computed)
    assert driver.plan("prefill")[1] == p.Prefill([p.PrefillChunk(0, 1, 0, 0, end, [])])
    effects = driver.done("prefill")
    computed = m.Computed(3, KEY, 0, 1, len(spec.prompt_ids), 0)
    assert sent(effects, m.Computed) == [computed]
    assert not phases(effects) and not sent(effects, m.Admit), "it never goes to decode"
    driver.receive("gateway", m.Query(1, KEY))
    assert sent(driver.tick(5.0), m.Computed) == [computed], "the answer was lost"
    effects = driver.receive("gateway", m.Delivered(1, KEY)).tick()
    assert phases(effects) == [Phase.ENDING, Phase.FREE] and driver.is_empty


def test_it_does_not_need_decode() -> None:
    driver = Driver()
    driver.machine.set_outages([Outage("decode", "it crashed", 130.0), Outage("detokenizer", "it crashed", 130.0)])
    driver.submit(text(), 8)
    assert 8 not in driver.state.requests
    driver.submit(scoring())
    assert sent(driver.done("prefill"), m.Computed)
    driver.machine.set_outages([Outage("prefill", "it crashed", 130.0)])
    (failed,) = sent(driver.submit(pooling(1, "last"), 9), m.Failed)
    assert isinstance(failed, m.Failed) and failed.status == 503, "even one token is prefilled"
    assert not sent(driver.tick(), m.Failed), "what has been computed is not lost"


def test_another_controller_goes_on_with_it() -> None:
    """Killed before a result, after it, and after the answer to the gateway."""
    driver = Driver()
    driver.submit(scoring())
    for is_done in (False, True):
        driver.machine = recover(driver.state.limits, driver.state.epoch + 1, remains(driver))
        driver.state = driver.machine.state
        driver.tick()
        if not is_done:
            assert sent(driver.done("prefill"), m.Computed)
        driver.receive("gateway", m.Query(1, KEY))
        (computed,) = sent(driver.tick(), m.Computed)
        assert isinstance(computed, m.Computed) and computed.num_prompt_tokens == 6
    driver.receive("gateway", m.Delivered(1, KEY)).tick()
    assert driver.is_empty


def test_a_preempted_one_is_computed_again() -> None:
    driver = Driver()
    driver.submit(pooling(6, "mean"))
    driver.done("prefill")
    preempt(driver.state, driver.state.requests[KEY])
    driver.receive("gateway", m.Query(1, KEY))
    assert not sent(driver.tick(), m.Computed)
    assert sent(driver.done("prefill"), m.Computed)


@pytest.mark.parametrize(
    ("spec", "first"),
    [
        (scoring(30, 2), 24),  # the log-probability of token 28 comes with token 27, which is in the page from 24 on
        (scoring(30, 5), 24),
        (scoring(30, 6), 20),
        (scoring(30, 0), 0),  # of all
        (pooling(30, "last"), 28),
        (pooling(29, "last"), 28),
        (pooling(28, "last"), 24),
        (pooling(30, "mean"), 0),
    ],
)
def test_it_finds_what_it_need_not_compute(spec: m.RequestSpec, first: int) -> None:
    """Also where the pages are to come."""
    driver = cached(num_rows=4, num_kv_pages=64, prefill_budget=64)
    driver.submit(pooling(30, "last"), 1)
    driver.submit(spec, 2)
    told, chunks = prefill_all(driver)
    assert chunks[-1][0] == first and len(told) == 2
    driver.submit(spec, 3)
    told, chunks = prefill_all(driver)
    assert chunks == [(first, 30 - (spec.generation.pooling is None) if len(spec.prompt_ids) == 30 else len(spec.prompt_ids))]
    (computed,) = told
    assert isinstance(computed, m.Computed) and computed.num_cached_tokens == first


def test_questions_about_one_picture_encode_it_once() -> None:
    driver = cached(num_rows=4)
    picture = msgspec.structs.replace(known_image(), max_new_tokens=0).asking(pooling="last")
    for key in (1, 2):
        ask(driver, msgspec.structs.replace(picture, prompt_ids=[*picture.prompt_ids, 5, 5 + key]), key)
        seen: list[type[p.Plan]] = []
        while driver.state.plans:
            actor, plan = next((inflight.actor, inflight.plan) for inflight in driver.state.plans.values())
            seen.append(type(plan))
            driver.done(actor, m.Analysed(SHAPE) if isinstance(plan, p.Analyse) else None)
        assert (p.Encode in seen) == (key == 1) and seen[-1] is p.Prefill
    assert driver.state.requests[2].record.num_cached_tokens == 8
