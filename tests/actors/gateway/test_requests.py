"""The registry's protocol, message by message: what is sent, sent again, and asked; what repeated and late answers do."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mmrt.actors.gateway.answers import client_request as module
from mmrt.actors.gateway.answers import requests as module_of_registry
from mmrt.actors.gateway.answers.client_request import ClientRequest, RequestStage
from mmrt.actors.gateway.answers.flight import GatewayFlight
from mmrt.actors.gateway.answers.link import Keeping, Link
from mmrt.actors.gateway.answers.requests import RequestRegistry
from mmrt.actors.gateway.answers.token_table import Tokens
from mmrt.actors.gateway.keeping.state import Place
from mmrt.runtime.bus.messages import (
    Cancel,
    Delivered,
    Delta,
    Failed,
    Filled,
    FinishReason,
    Generation,
    Granted,
    MediaItem,
    PageRun,
    Prepared,
    Query,
    Queued,
    Released,
    RequestSpec,
    Submit,
    ToController,
    Unknown,
)
from mmrt.runtime.bus.sampling import Sampling
from mmrt.runtime.errors import RequestError
from mmrt.shm.errors import StalePage, StaleRow
from mmrt.shm.flight_recorder import FlightRecorder
from mmrt.shm.logprob_file import Logprobs
from mmrt.shm.run_directory import RunDirectory

RUNS = [PageRun([4, 2], [7, 7])]


class Pool:
    """Records what is written where; refuses stale generations."""

    def __init__(self) -> None:
        self.written: list[tuple[list[int], bytes]] = []
        self.generation = 7

    def check(self, pages: Sequence[int], generations: Sequence[int]) -> None:
        if set(generations) != {self.generation}:
            raise StalePage("stale")

    def write_bytes(self, pages: Sequence[int], data: bytes, start: int = 0) -> None:
        if len(data) > 10 * len(pages):
            raise ValueError("too long")
        self.written.append((list(pages), data))


class Words:
    """The ids of every answer count up; every prompt is three tokens."""

    error: Exception | None = None

    def answer(self, row: int, generation: int, first: int, last: int, num_alternatives: int) -> Tokens:
        if self.error is not None:
            raise self.error
        return _tokens(first, last, num_alternatives)

    def prompt(self, row: int, generation: int, num_alternatives: int) -> Tokens:
        return _tokens(0, 3, num_alternatives)


def _tokens(first: int, last: int, num: int) -> Tokens:
    ids = np.arange(first, last, dtype=np.int32)
    values = np.zeros((len(ids), num), np.float32)
    return Tokens(ids, Logprobs(values.sum(1), ids, values.astype(np.int32), values))


class Desk:
    """A registry with everything around it."""

    def __init__(self, flight: GatewayFlight) -> None:
        self.now_s = 1000.0
        self.sent: list[ToController] = []
        self.reachable = True
        self.wakes = 0
        self.pool = Pool()
        self.tokens = Words()
        self.registry = RequestRegistry(Link(3, self._send, self.pool, flight, self.tokens))

    def _send(self, message: ToController) -> bool:
        if self.reachable:
            self.sent.append(message)
        return self.reachable

    def submit(self, media: Sequence[bytes] = (b"bytes",), deadline_s: float = 0.0, sampling: Sampling | None = None) -> ClientRequest:
        items = [MediaItem("image", len(data), "image/png") for data in media]
        spec = RequestSpec(Generation("id", sampling or Sampling(), deadline_s=deadline_s), [1, 2, 3], items, 10)
        return self.registry.submit(spec, media, self._wake, self.now_s)

    def _wake(self) -> None:
        self.wakes += 1

    def pass_time(self, seconds: float) -> list[ToController]:
        """Tick through the time; what was sent meanwhile."""
        self.sent.clear()
        end_s = self.now_s + seconds
        while self.now_s < end_s - 1e-9:
            self.now_s += 0.1
            self.registry.tick(self.now_s)
        return list(self.sent)

    def answer(self, message: Any) -> list[ToController]:
        self.sent.clear()
        self.registry.on_message(message, self.now_s)
        return list(self.sent)

    def text(
        self, request: ClientRequest, offset: int, data: str, tokens: int, finish: FinishReason | None = None
    ) -> list[ToController]:
        self.sent.clear()
        self.registry.on_delta(Delta(request.key, 1, offset, tokens, data.encode(), finish), self.now_s)
        return list(self.sent)

    def streaming(self) -> ClientRequest:
        request = self.submit()
        self.answer(Granted(1, request.key, RUNS))
        self.answer(Prepared(1, request.key, 50))
        return request


@pytest.fixture
def desk(run: RunDirectory) -> Desk:
    return Desk(GatewayFlight(FlightRecorder.create(run, "gateway", 256).writer(3)))


def test_the_plain_course(desk: Desk) -> None:
    request = desk.submit()
    assert desk.sent == [Submit(3, request.key, request.spec)]
    assert desk.answer(Queued(1, request.key, 4)) == []
    assert (request.stage, request.has_started) == (RequestStage.QUEUED, False)
    assert desk.answer(Granted(1, request.key, RUNS)) == [Filled(3, request.key)]
    assert desk.pool.written == [([4, 2], b"bytes")]
    assert request.stage is RequestStage.WAITING
    assert desk.answer(Prepared(1, request.key, 50)) == []
    assert request.has_started and request.prompt_tokens() == 50
    assert desk.text(request, 0, "héllo", 2) == []
    assert (request.take(), request.num_tokens, request.is_over) == ("héllo", 2, False)
    assert desk.text(request, 6, "!", 3, "length") == [Delivered(3, request.key)]
    assert (request.take(), request.finish, request.stage) == ("!", "length", RequestStage.DELIVERED)
    assert len(desk.registry) == 1
    assert desk.answer(Released(1, request.key)) == []
    assert len(desk.registry) == 0


def test_submit_is_sent_again_at_growing_intervals_until_answered(desk: Desk) -> None:
    request = desk.submit()
    first, later = desk.pass_time(2), desk.pass_time(10)
    assert {type(message) for message in first + later} == {Submit}
    assert 3 <= len(first) <= 4 and 4 <= len(later) <= 6
    desk.answer(Queued(1, request.key, 0))
    assert all(isinstance(message, Query) for message in desk.pass_time(3))
    assert len(desk.sent) == 3


def test_what_the_controller_may_have_missed_is_sent_again_at_its_welcome(desk: Desk) -> None:
    """A Submit that overtakes the Hello of its gateway is of an unknown one, and nobody answers it."""
    unknown, known = desk.submit(), desk.submit()
    desk.answer(Queued(1, known.key, 4))
    desk.sent.clear()
    desk.registry.on_welcome(desk.now_s)
    assert desk.sent == [Submit(3, unknown.key, unknown.spec)]


def test_media_that_a_gateway_before_has_given_are_not_there_for_another_grant(desk: Desk) -> None:
    known, prepared = list[str](), list[str]()
    keeping = Keeping(lambda: known.append("known"), Place(), lambda: prepared.append("prepared"))
    items = [MediaItem("image", 5, "image/png")]
    spec = RequestSpec(Generation("id", Sampling()), [1, 2, 3], items, 10)
    request = desk.registry.submit(spec, [b"bytes"], desk._wake, desk.now_s, 5, keeping)
    desk.answer(Granted(1, 5, RUNS))
    assert prepared == []
    desk.answer(Prepared(1, 5, 50))
    assert (known, prepared) == (["known"], ["prepared"])
    request = desk.registry.submit(spec, [], desk._wake, desk.now_s, 6, keeping)
    desk.answer(Granted(1, 6, RUNS))
    assert request.error is not None and (request.error.status, request.error.retry_after_s) == (503, 1)


def test_text_says_nothing_of_a_request_that_is_submitted_again(desk: Desk) -> None:
    """Its row is of the gateway before: the controller that this one's Submit was for may have died with it."""
    known = list[str]()
    spec = RequestSpec(Generation("id", Sampling()), [1, 2, 3], [], 10)
    request = desk.registry.submit(spec, [], desk._wake, desk.now_s, 5, Keeping(lambda: known.append("known")))
    desk.text(request, 0, "Hello", 1)
    assert Submit(3, 5, spec) in desk.pass_time(1) and known == []
    assert desk.answer(Unknown(2, 5)) == [Submit(3, 5, spec)] and known == [] and request.error is None
    desk.sent.clear()
    desk.registry.on_welcome(desk.now_s)
    assert desk.sent == [Submit(3, 5, spec)]
    desk.answer(Prepared(2, 5, 3))
    assert known == ["known"] and not any(isinstance(message, Submit) for message in desk.pass_time(3))
    desk.answer(Unknown(2, 5))
    assert request.error is not None and request.error.status == 500


def test_text_of_one_request_waits_for_no_other_to_be_submitted_again(desk: Desk) -> None:
    registry = desk.registry
    registry.open(registry._link, adopts=True)
    for key, data in ((5, b"late"), (6, b"lost"), (5, b"r")):
        registry.on_delta(Delta(key, 1, 4 if data == b"r" else 0, len(data), data, None), desk.now_s)
    now = desk.submit()
    desk.text(now, 0, "at once", 2)
    assert now.take() == "at once"
    late = registry.submit(now.spec, [b"bytes"], desk._wake, desk.now_s, 5)
    assert late.take() == "later" and not registry.is_full
    registry.on_delta(Delta(7, 1, 0, 1, bytes(module_of_registry.MAX_EARLY_BYTES), None), desk.now_s)
    assert registry.is_full
    registry.adopted()
    assert not registry.is_full


def test_what_could_not_be_sent_is_tried_at_the_first_interval(desk: Desk) -> None:
    desk.reachable = False
    request = desk.submit()
    assert desk.pass_time(5) == []
    desk.reachable = True
    assert desk.pass_time(0.2) == [Submit(3, request.key, request.spec)]


def test_filled_is_sent_again_until_prepared(desk: Desk) -> None:
    request = desk.submit()
    desk.answer(Granted(1, request.key, RUNS))
    sent = desk.pass_time(1.0)
    assert sum(isinstance(message, Filled) for message in sent) >= 2
    desk.answer(Prepared(1, request.key, 9))
    assert not any(isinstance(message, Filled) for message in desk.pass_time(3))


def test_the_same_grant_again_is_answered_without_writing(desk: Desk) -> None:
    request = desk.submit()
    desk.answer(Granted(1, request.key, RUNS))
    assert desk.answer(Granted(1, request.key, RUNS)) == [Filled(3, request.key)]
    assert len(desk.pool.written) == 1


def test_another_grant_is_filled_too_until_text_has_come(desk: Desk) -> None:
    """A controller that died between granting and journaling may grant other pages."""
    request = desk.streaming()
    moved = [PageRun([9], [7])]
    assert desk.answer(Granted(2, request.key, moved)) == [Filled(3, request.key)]
    assert desk.pool.written[-1] == ([9], b"bytes")
    desk.answer(Prepared(2, request.key, 50))
    assert not any(isinstance(message, Filled) for message in desk.pass_time(3))
    desk.text(request, 0, "x", 1)
    assert desk.answer(Granted(2, request.key, RUNS)) == []
    assert desk.registry.num_media_bytes == 0


def test_an_outdated_grant_is_not_filled_but_asked_about(desk: Desk) -> None:
    request = desk.submit()
    assert desk.answer(Granted(1, request.key, [PageRun([4], [6])])) == []
    assert desk.pool.written == []
    assert Query(3, request.key) in desk.pass_time(0.3)
    assert desk.answer(Granted(1, request.key, RUNS)) == [Filled(3, request.key)]


@pytest.mark.parametrize("runs", [[], [RUNS[0], RUNS[0]], [PageRun([], [])]])
def test_a_grant_that_does_not_fit_fails_the_request(desk: Desk, runs: list[PageRun]) -> None:
    request = desk.submit(media=[b"x" * 15])
    desk.pool.check = lambda pages, generations: None  # type: ignore[method-assign]
    assert desk.answer(Granted(1, request.key, runs)) == [Cancel(3, request.key)]
    assert request.error is not None and request.error.status == 500


def test_without_media_the_grant_is_empty(desk: Desk) -> None:
    request = desk.submit(media=())
    assert desk.answer(Granted(1, request.key, [])) == [Filled(3, request.key)]


def test_queries_are_frequent_until_text_comes_then_rare(desk: Desk) -> None:
    request = desk.streaming()
    assert len(desk.pass_time(5)) == 5
    desk.text(request, 0, "x", 1)
    assert len(desk.pass_time(10)) == 2
    assert all(isinstance(message, Query) for message in desk.sent)


def test_a_failure_at_any_time(desk: Desk) -> None:
    for at in range(4):
        request = desk.submit()
        for message in [Queued(1, request.key, 0), Granted(1, request.key, RUNS), Prepared(1, request.key, 5)][:at]:
            desk.answer(message)
        assert desk.answer(Failed(1, request.key, 429, "full", "overloaded", "messages", 7)) == [Delivered(3, request.key)]
        error = request.error
        assert error is not None
        assert (error.status, error.message, error.type, error.param, error.retry_after_s) == (
            429,
            "full",
            "overloaded",
            "messages",
            7,
        )
        assert desk.answer(Failed(1, request.key, 400, "again", "x")) == []
        assert error.status == 429
        desk.answer(Unknown(1, request.key))
    assert len(desk.registry) == 0


@pytest.mark.parametrize("at", range(4))
def test_cancel_is_sent_again_until_released(desk: Desk, at: int) -> None:
    request = desk.submit()
    for message in [Queued(1, request.key, 0), Granted(1, request.key, RUNS), Prepared(1, request.key, 5)][:at]:
        desk.answer(message)
    desk.sent.clear()
    request.cancel(desk.now_s)
    assert desk.sent == [Cancel(3, request.key)]
    for late in (Queued(1, request.key, 0), Granted(1, request.key, RUNS), Prepared(1, request.key, 5)):
        assert desk.answer(late) == []
    assert desk.text(request, 0, "late", 1, "stop") == []
    assert set(map(type, desk.pass_time(3))) == {Cancel}
    desk.answer(Released(1, request.key))
    assert desk.pass_time(3) == [] and len(desk.registry) == 0


def test_cancelling_what_is_over_does_nothing(desk: Desk) -> None:
    request = desk.streaming()
    desk.text(request, 0, "x", 1, "stop")
    desk.sent.clear()
    request.cancel(desk.now_s)
    assert desk.sent == [] and request.error is None


def test_unknown_before_acceptance_submits_again(desk: Desk) -> None:
    request = desk.submit()
    assert desk.answer(Unknown(2, request.key)) == [Submit(3, request.key, request.spec)]
    assert request.error is None


@pytest.mark.parametrize("kind", [Unknown, Released])
def test_unknown_after_acceptance_is_an_error(desk: Desk, kind: type[Unknown] | type[Released]) -> None:
    request = desk.submit()
    desk.answer(Queued(1, request.key, 0))
    desk.answer(kind(2, request.key))
    assert request.error is not None and request.error.status == 500
    assert desk.wakes


def test_a_new_epoch_changes_nothing(desk: Desk) -> None:
    request = desk.streaming()
    desk.text(request, 0, "x", 1)
    desk.answer(Prepared(9, request.key, 50))
    assert request.stage is RequestStage.STREAMING and not request.is_over
    assert desk.text(request, 1, "y", 2, "stop") == [Delivered(3, request.key)]


def test_what_is_left_to_another_gateway_is_not_ended(desk: Desk) -> None:
    request = desk.streaming()
    desk.registry.forget(request.key)
    assert desk.answer(Prepared(1, request.key, 5)) == desk.answer(Failed(1, request.key, 400, "x", "y")) == desk.pass_time(10) == []


def test_strangers_are_told_to_end(desk: Desk) -> None:
    """The controller may still know what this gateway has forgotten."""
    assert desk.answer(Granted(1, 99, RUNS)) == [Cancel(3, 99)]
    assert desk.answer(Queued(1, 99, 1)) == [Cancel(3, 99)]
    assert desk.answer(Prepared(1, 99, 1)) == [Cancel(3, 99)]
    assert desk.answer(Failed(1, 99, 400, "x", "y")) == [Delivered(3, 99)]
    assert desk.answer(Released(1, 99)) == desk.answer(Unknown(1, 99)) == []
    desk.registry.on_delta(Delta(99, 1, 0, 1, b"x", "stop"), 0.0)


def test_an_error_in_the_second_that_waits_for_the_prompt_s_tokens_is_the_end(desk: Desk) -> None:
    request = desk.submit(deadline_s=desk.now_s + 0.5)
    desk.text(request, 0, "all", 1, "stop")
    assert not request.is_over
    desk.pass_time(3)
    assert request.error is not None and request.error.status == 504
    assert request.finish is None and request.stage is RequestStage.DELIVERED


def test_the_deadline(desk: Desk) -> None:
    request = desk.submit(deadline_s=desk.now_s + 2)
    desk.pass_time(1.8)
    assert not request.is_over
    assert Cancel(3, request.key) in desk.pass_time(0.4)
    assert request.error is not None and request.error.status == 504


def test_who_finds_that_time_is_over_makes_no_difference(desk: Desk) -> None:
    request = desk.submit(deadline_s=desk.now_s + 2)
    desk.pass_time(1.8)
    desk.answer(Failed(1, request.key, 504, "late", "timeout_error"))
    assert str(request.error) == "the request was not finished after 2 s (server.request_timeout_s)"


def test_text_before_prepared_settles_with_it(desk: Desk) -> None:
    request = desk.submit()
    desk.answer(Granted(1, request.key, RUNS))
    assert desk.text(request, 0, "x", 1) == []
    assert desk.text(request, 1, "y", 2, "stop") == [] and not request.is_over
    assert desk.answer(Prepared(1, request.key, 77)) == [Delivered(3, request.key)]
    assert (request.finish, request.prompt_tokens()) == ("stop", 77)


@pytest.mark.parametrize("finish", [None, "stop"])
def test_a_prepared_that_text_has_overtaken_is_asked_for_only_when_it_stays_away(desk: Desk, finish: FinishReason | None) -> None:
    request = desk.submit()
    assert desk.text(request, 0, "x", 1, finish) == []
    assert desk.pass_time(0.1) == [Query(3, request.key)]
    streaming = desk.submit()
    assert desk.text(streaming, 0, "x", 1) == []
    assert desk.answer(Prepared(1, streaming.key, 77)) == [], "it was on its way"
    assert Query(3, streaming.key) not in desk.pass_time(module.STREAMING_QUERY_S - 0.2)


@pytest.mark.parametrize("media", [(), (b"bytes",)])
def test_an_answer_that_overtakes_the_number_of_cached_tokens_waits_for_it(desk: Desk, media: Sequence[bytes]) -> None:
    request = desk.submit(media)
    if media:
        desk.answer(Granted(1, request.key, RUNS))
        desk.answer(Prepared(1, request.key, 50, -1))
    assert desk.text(request, 0, "all", 1, "stop") == []
    assert request.take() == "all" and not request.is_over
    assert desk.answer(Prepared(1, request.key, 50, -1)) == [], "said before it had KV pages"
    assert desk.answer(Prepared(1, request.key, 50, 32)) == [Delivered(3, request.key)]
    assert (request.finish, request.num_cached_tokens) == ("stop", 32)


def test_the_number_of_cached_tokens_is_not_forgotten(desk: Desk) -> None:
    request = desk.submit()
    for num_cached_tokens in (-1, 32, -1):
        desk.answer(Prepared(1, request.key, 50, num_cached_tokens))
    assert desk.text(request, 0, "all", 1, "stop") == [Delivered(3, request.key)]
    assert request.num_cached_tokens == 32


def test_a_lost_prepared_delays_the_end_for_a_moment_only(desk: Desk) -> None:
    request = desk.submit()
    desk.text(request, 0, "x", 1, "stop")
    assert not request.is_over
    sent = desk.pass_time(module.SETTLE_S + 0.1)
    assert Delivered(3, request.key) in sent and sent.count(Query(3, request.key)) >= 3, "one of them may be answered"
    assert (request.finish, request.prompt_tokens(), request.num_cached_tokens) == ("stop", 3, -1)


def test_a_gap_waits_for_the_repetition(desk: Desk) -> None:
    request = desk.streaming()
    desk.text(request, 5, "later", 3, "stop")
    assert request.take() == "" and not request.is_over
    desk.text(request, 0, "firstlater", 3, "stop")
    assert (request.take(), request.finish) == ("firstlater", "stop")


def test_any_repetition_of_deltas_gives_the_text_once(desk: Desk) -> None:
    text = "Grüße, 😀 und so weiter"
    data = text.encode()
    borders = [len(text[:i].encode()) for i in range(len(text) + 1)]
    rng = random.Random(5)
    for _ in range(100):
        request = desk.streaming()
        received, shown = 0, ""
        while not request.is_over:
            start = rng.choice([border for border in borders if border <= received])
            end = rng.choice([border for border in borders if border >= start])
            finish: FinishReason | None = "stop" if end == len(data) else None
            desk.text(request, start, data[start:end].decode(), end, finish)
            received = max(received, end)
            shown += request.take()
        assert (shown, request.num_tokens) == (text, len(data))


def test_a_client_that_does_not_read_is_cancelled(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PENDING_BYTES", 10)
    request = desk.streaming()
    desk.text(request, 0, "x" * 10, 1)
    assert not request.is_too_slow
    assert desk.text(request, 10, "y", 2) == [Cancel(3, request.key)]
    assert request.is_too_slow and request.is_over


def test_an_error_of_decode(desk: Desk) -> None:
    request = desk.streaming()
    assert desk.text(request, 0, "x", 1, "error") == [Delivered(3, request.key)]
    assert request.error is not None and request.error.status == 500


def test_fail_all_ends_what_is_running(desk: Desk) -> None:
    running, over = desk.streaming(), desk.streaming()
    desk.text(over, 0, "x", 1, "stop")
    desk.registry.fail_all(RequestError("bye", status=503), desk.now_s)
    assert running.error is not None and running.error.status == 503
    assert over.error is None


def test_log_probabilities_are_read_up_to_each_delta_once(desk: Desk) -> None:
    request = desk.submit([], sampling=Sampling(logprobs=2, prompt_logprobs=1))
    desk.answer(Prepared(1, request.key, 3))
    assert request.findings.prompt is None and request.findings.take() is None
    desk.text(request, 0, "ab", 2)
    assert request.findings.prompt is not None and request.findings.prompt.logprobs.ids.shape == (3, 1)
    first = request.findings.take()
    assert first is not None and first.ids.tolist() == [0, 1] and first.logprobs.ids.shape == (2, 2)
    desk.text(request, 0, "ab", 2)  # a new detokenizer begins anew
    assert request.findings.take() is None
    for offset, text, num_tokens in ((0, "abc", 4), (3, "d", 5)):
        desk.text(request, offset, text, num_tokens)
    rest = request.findings.take()
    assert rest is not None and rest.ids.tolist() == [2, 3, 4]
    desk.text(request, 4, "", 6, "stop")
    assert request.finish == "stop" and [t.ids.tolist() for t in [request.findings.take()] if t is not None] == [[5]]


def test_text_of_a_row_that_is_another_s_by_now_is_dropped(desk: Desk) -> None:
    """Its request has failed, and the message that says so is on its way."""
    request = desk.submit([], sampling=Sampling(logprobs=0))
    desk.tokens.error = StaleRow("another's")
    assert desk.text(request, 0, "late", 1, "stop") == []
    assert not request.is_over and request.take() == ""
    desk.answer(Failed(1, request.key, 500, "the model failed", "internal_error"))
    assert request.error is not None and request.error.status == 500


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), ValueError("row 1 has no records")])
def test_log_probabilities_that_cannot_be_read_fail_the_request(desk: Desk, error: Exception) -> None:
    """Neither the gateway, nor the request after its timeout."""
    request = desk.submit([], sampling=Sampling(logprobs=0))
    desk.tokens.error = error
    assert desk.text(request, 0, "word", 1) == [Cancel(3, request.key)]
    assert request.error is not None and (request.error.status, request.error.message) == (500, "internal error")
