"""Joined by byte offset, the deltas equal the full decode cut at its stop string, whatever dies and however often."""

import select
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmrt.actors import detokenizer as module
from mmrt.actors.detokenizer import MAX_DELTA_BYTES, REPEAT_S, Detokenizer, _head
from mmrt.actors.host.actor import Actor
from mmrt.models.text.tokenizer import Tokenizer
from mmrt.runtime.bus.messages import Delta, Generation, SequenceSpec, decode_delta
from mmrt.runtime.bus.request_keys import random_key
from mmrt.runtime.bus.sampling import Sampling
from mmrt.runtime.bus.wire import encode
from mmrt.schema.rows import EndCode, Phase
from mmrt.shm.doorbell import Ringer
from mmrt.shm.ring import Ring
from mmrt.shm.run_directory import RunDirectory
from mmrt.shm.sequence_table import SequenceTable
from mmrt.tests.actors.host.fake_actor import FakeActor
from mmrt.tests.settings import examples

NUM_ROWS = 4
MAX_CONTEXT = 512


class Bench:
    """The detokenizer's neighbours: decode writes the table, the gateway pops deltas and joins them by offset."""

    def __init__(self, run: RunDirectory, tokenizer: Tokenizer, delta_bytes: int = 1 << 20) -> None:
        self.run = run
        self.tokenizer = tokenizer
        self.table = SequenceTable.create(run, NUM_ROWS, MAX_CONTEXT, 8)
        self.deltas = Ring.create(run, "deltas", delta_bytes)
        self.consumer_of_deltas = Ring.attach(run, "deltas")
        self.now_s = 100.0
        self.texts: dict[int, bytes] = {}
        self.tokens: dict[int, int] = {}
        self.finish: dict[int, str] = {}
        self.stops: dict[int, str] = {}
        self.restart()

    def restart(self) -> None:
        self.detokenizer = Detokenizer(self.table, [self.deltas], self.tokenizer)

    def admit(self, row: int, key: int, stop: list[str] | None = None, sampling: Sampling | None = None, **more: bool) -> int:
        generation = self.table.begin(row)
        spec = SequenceSpec(
            key=key,
            generation=Generation(f"r{key}", sampling or Sampling(), stop=stop or [], **more),
            num_prompt_tokens=1,
            num_companion_tokens=0,
            max_new_tokens=100,
            spans=[],
            gateway_generation=1,
        )
        self.table.write_spec(row, encode(spec))
        self.table.set_phase(row, Phase.PREPARE)
        self.table.set_phase(row, Phase.DECODE)
        return generation

    def commit(self, row: int, ids: list[int], end: EndCode = EndCode.NONE) -> None:
        generation = self.table.phase(row)[0]
        for id in ids:
            self.table.commit(np.array([row]), np.array([generation]), np.array([id]))
        if end != EndCode.NONE:
            self.table.set_end(row, generation, end)

    def free(self, row: int) -> None:
        self.table.set_phase(row, Phase.ENDING)
        self.table.set_phase(row, Phase.FREE)

    def step(self) -> set[int]:
        return self.detokenizer.step(self.now_s)

    def receive(self) -> list[Delta]:
        """As the gateway does it: drop what is known, never accept a gap."""
        deltas = [decode_delta(record) for record in self.consumer_of_deltas.pop_all()]
        self.consumer_of_deltas.ack()
        for delta in deltas:
            text = self.texts.get(delta.key, b"")
            assert delta.byte_offset <= len(text)
            known = text[delta.byte_offset :]
            assert delta.data[: len(known)] == known[: len(delta.data)]
            delta.data.decode()
            self.texts[delta.key] = text + delta.data[len(known) :]
            self.tokens[delta.key] = max(self.tokens.get(delta.key, 0), delta.token_index)
            if delta.finish:
                assert self.finish.setdefault(delta.key, delta.finish) == delta.finish
                self.stops[delta.key] = delta.stop
                assert delta.token_index == self.tokens[delta.key]
        return deltas


@pytest.fixture
def bench(run: RunDirectory, tokenizer: Tokenizer) -> Iterator[Bench]:
    yield Bench(run, tokenizer)


def test_text_then_end(bench: Bench) -> None:
    bench.admit(1, key=7)
    ids = bench.tokenizer.encode("the quick 😀 fox")
    bench.commit(1, ids[:4])
    assert bench.step()
    assert not bench.step()
    (first,) = bench.receive()
    assert (first.key, first.byte_offset, first.token_index, first.finish) == (7, 0, 4, None)
    bench.commit(1, [*ids[4:], 0], EndCode.STOP)
    assert bench.step()
    bench.receive()
    assert bench.texts[7].decode() == "the quick 😀 fox"
    assert (bench.finish[7], bench.stops[7], bench.tokens[7]) == ("stop", "", len(ids) + 1)


def test_an_end_of_sequence_id_is_hidden_but_ignored_ones_count(bench: Bench) -> None:
    bench.admit(0, key=1, ignore_eos=True)
    ids = bench.tokenizer.encode("fox")
    bench.commit(0, [*ids, 0, *ids], EndCode.LENGTH)
    bench.step()
    bench.receive()
    assert (bench.texts[1], bench.finish[1], bench.tokens[1]) == (b"foxfox", "length", 2 * len(ids) + 1)


def test_a_truncated_character_is_flushed_at_the_end(bench: Bench) -> None:
    bench.admit(0, key=1)
    partial = [id for id in range(bench.tokenizer.vocab_size) if bench.tokenizer.token_bytes[id] == b"\xf0"]
    bench.commit(0, partial)
    assert not bench.step()
    bench.commit(0, [], EndCode.LENGTH)
    bench.step()
    bench.receive()
    assert (bench.texts[1].decode(), bench.tokens[1]) == ("\ufffd", 1)


def test_a_stop_string_ends_the_text_while_decode_goes_on(bench: Bench) -> None:
    bench.admit(0, key=1, stop=["brown"])
    ids = bench.tokenizer.encode("the quick brown fox")
    for id in ids:
        bench.commit(0, [id])
        bench.step()
    bench.receive()
    assert (bench.texts[1], bench.finish[1], bench.stops[1]) == (b"the quick ", "stop", "brown")
    cut = bench.tokens[1]
    assert "brown" in bench.tokenizer.decode(ids[:cut]) and "brown" not in bench.tokenizer.decode(ids[: cut - 1])


def test_a_stop_string_within_the_least_tokens_is_text(bench: Bench) -> None:
    ids = bench.tokenizer.encode("the quick brown fox")
    bench.admit(0, key=1, stop=["brown"], sampling=Sampling(min_tokens=len(ids)))
    bench.commit(0, [*ids, *ids], EndCode.LENGTH)
    bench.step()
    bench.receive()
    assert (bench.texts[1], bench.finish[1]) == (b"the quick brown foxthe quick ", "stop")


@pytest.mark.parametrize(("end", "finish"), [(EndCode.ERROR, "error"), (EndCode.GRAMMAR, "grammar")])
def test_an_error_of_decode_is_the_finish_reason(bench: Bench, end: EndCode, finish: str) -> None:
    bench.admit(0, key=1)
    bench.commit(0, [], end)
    bench.step()
    assert bench.receive()[0].finish == finish


def test_rows_in_other_phases_are_left_alone(bench: Bench) -> None:
    generation = bench.table.begin(2)
    bench.table.set_phase(2, Phase.PREPARE)
    assert generation and not bench.step()
    bench.free(2)
    bench.admit(2, key=5)
    bench.commit(2, bench.tokenizer.encode("the"))
    assert bench.step()
    bench.free(2)
    assert not bench.step()


def test_token_ids_come_with_the_text_up_to_the_cut(bench: Bench) -> None:
    ids = bench.tokenizer.encode("the quick brown fox")
    for restarts in (False, True):
        key = 1 + restarts
        bench.admit(0, key, stop=["brown"], return_token_ids=True)
        received: list[int] = []
        for id in ids:
            bench.commit(0, [id])
            if restarts:
                bench.restart()
            bench.step()
            for delta in bench.receive():
                start = delta.token_index - len(delta.ids)
                assert start <= len(received)
                received += delta.ids[len(received) - start :]
        assert received == ids[: bench.tokens[key]]
        bench.free(0)
        bench.step()


def test_a_new_gateway_gets_every_text_from_its_beginning(bench: Bench) -> None:
    ids = bench.tokenizer.encode("the quick brown fox")
    bench.admit(0, key=1)
    bench.commit(0, ids[:3])
    bench.admit(1, key=2)
    bench.commit(1, ids, EndCode.LENGTH)
    bench.step()
    bench.receive()
    bench.texts.clear()
    assert not bench.step() and not bench.receive()
    bench.detokenizer.begin_again()
    bench.commit(0, ids[3:])
    assert bench.step()
    bench.receive()
    assert bench.texts == {1: b"the quick brown fox", 2: b"the quick brown fox"} and bench.finish[2] == "length"


def test_each_gateway_gets_its_own_texts(bench: Bench) -> None:
    """A new one gets them again, and the other nothing twice; one that takes none keeps nothing from the other."""
    deltas, ids = Ring.create(bench.run, "deltas.1", 4096), bench.tokenizer.encode("the quick brown fox")
    of_second = Ring.attach(bench.run, "deltas.1")
    bench.detokenizer = Detokenizer(bench.table, [bench.deltas, deltas], bench.tokenizer)
    for row, key in enumerate((7, random_key("gateway.1"))):
        bench.admit(row, key)
        bench.commit(row, ids[:3])
    assert bench.step() == {0, 1}
    bench.receive()
    assert bench.texts.keys() == {7} and of_second.pop() is not None and of_second.pop() is None
    bench.detokenizer.begin_again(1)
    assert bench.step() == {1} and of_second.pop() is not None
    while deltas.try_push(b"?"):
        pass
    for row in range(2):
        bench.commit(row, ids[3:], EndCode.LENGTH)
    assert bench.step() == {0} and bench.detokenizer.is_blocked
    bench.receive()
    assert bench.texts == {7: b"the quick brown fox"} and bench.finish == {7: "length"}


def test_a_reused_row_starts_a_new_text(bench: Bench) -> None:
    for key, text in ((1, "the quick"), (2, "fox")):
        bench.admit(0, key)
        bench.commit(0, bench.tokenizer.encode(text), EndCode.LENGTH)
        bench.step()
        bench.receive()
        bench.free(0)
    assert bench.texts == {1: b"the quick", 2: b"fox"}


def test_an_unanswered_end_is_sent_again_whole(bench: Bench) -> None:
    bench.admit(0, key=1)
    bench.commit(0, bench.tokenizer.encode("the fox"), EndCode.LENGTH)
    bench.step()
    bench.consumer_of_deltas.pop_all()
    bench.consumer_of_deltas.ack()
    bench.now_s += REPEAT_S / 2
    assert not bench.step()
    bench.now_s += REPEAT_S
    assert bench.step()
    bench.receive()
    assert (bench.texts[1], bench.finish[1]) == (b"the fox", "length")
    bench.now_s += 1.5 * REPEAT_S
    assert not bench.step()
    bench.now_s += REPEAT_S
    assert bench.step()


def test_a_full_ring_loses_nothing(run: RunDirectory, tokenizer: Tokenizer) -> None:
    bench = Bench(run, tokenizer, delta_bytes=256)
    texts = {}
    for row in range(NUM_ROWS):
        bench.admit(row, key=row + 1)
        texts[row + 1] = f"the quick brown fox number {row} is größer 😀".encode()
        bench.commit(row, tokenizer.encode(texts[row + 1].decode()), EndCode.LENGTH)
    bench.step()
    assert bench.detokenizer.is_blocked
    assert not bench.step()
    for _ in range(50):
        bench.receive()
        bench.step()
    assert bench.texts == texts
    assert len(bench.finish) == NUM_ROWS
    assert not bench.detokenizer.is_blocked


def test_long_texts_go_out_in_pieces_cut_between_characters(run: RunDirectory, tokenizer: Tokenizer) -> None:
    bench = Bench(run, tokenizer)
    id = tokenizer.token_bytes.index("😀".encode())
    bench.admit(0, key=1)
    bench.commit(0, [id] * 500, EndCode.LENGTH)
    bench.step()
    bench.receive()
    assert bench.texts[1].decode() == "😀" * 500

    data = b"x" + "😀".encode() * MAX_DELTA_BYTES
    assert len(_head(data)) == MAX_DELTA_BYTES - 3
    _head(data).decode()


class Killed(BaseException):
    """The process died at this line."""


def dying_at(line: int) -> Callable[..., Any]:
    """A trace function that raises at the line-th line that the detokenizer or its ring runs."""
    left = line

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        nonlocal left
        if not frame.f_code.co_filename.endswith(("detokenizer.py", "ring.py")):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise Killed
        return trace

    return trace


def test_dying_at_any_source_line_changes_nothing(bench: Bench) -> None:
    text = "the quick 😀 brown fox"
    ids = bench.tokenizer.encode(text)
    deaths = 0
    for line in range(1, 400):
        key = line
        bench.admit(0, key, stop=["fox"])
        bench.commit(0, ids[:9])
        previous = sys.gettrace()
        sys.settrace(dying_at(line))
        try:
            bench.step()
            bench.commit(0, ids[9:], EndCode.LENGTH)
            bench.step()
        except Killed:
            deaths += 1
            sys.settrace(previous)
            bench.restart()
        finally:
            sys.settrace(previous)
        if bench.table.end(0, bench.table.phase(0)[0]) == EndCode.NONE:
            bench.commit(0, ids[bench.table.committed(0, bench.table.phase(0)[0]) :], EndCode.LENGTH)
        bench.step()
        bench.receive()
        assert (bench.texts[key], bench.finish[key]) == (b"the quick \xf0\x9f\x98\x80 brown ", "stop")
        bench.free(0)
        bench.step()
    assert 50 < deaths < 399


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), st.integers(1, 5)),
        st.just(("step", 0)),
        st.just(("receive", 0)),
        st.just(("restart", 0)),
        st.just(("wait", 0)),
    ),
    max_size=40,
)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ids=st.lists(st.integers(1, 399), max_size=60),
    stops=st.lists(st.text("e 😀thö", min_size=1, max_size=4), max_size=3),
    events=EVENTS,
    ending=st.sampled_from([EndCode.STOP, EndCode.LENGTH]),
)
def test_any_interleaving_gives_the_whole_text(
    shared_bench: Bench, ids: list[int], stops: list[str], events: list[tuple[str, int]], ending: EndCode
) -> None:
    """Random ids (so broken UTF-8 too), stop strings, restarts and a slow gateway: the text is the decode up to the first stop."""
    bench = shared_bench
    key = len(bench.texts) + len(bench.finish) + 1
    bench.texts[key] = b""
    bench.admit(3, key, stop=stops)
    rest = [id for id in ids if id < bench.tokenizer.vocab_size]
    committed = list(rest)
    for event, count in events:
        if event == "commit":
            bench.commit(3, rest[:count])
            rest = rest[count:]
        elif event == "restart":
            bench.restart()
        elif event == "wait":
            bench.now_s += 1.0
        else:
            getattr(bench, event)()
    if ending == EndCode.STOP:
        rest.append(0)
        committed.append(0)
    bench.commit(3, rest, ending)
    bench.step()
    bench.receive()
    whole = bench.tokenizer.decode(committed)
    cuts = [(at + len(stop), at) for stop in stops if (at := whole.find(stop)) >= 0]
    expected = whole[: min(cuts)[1]] if cuts else whole
    assert bench.texts[key].decode() == expected
    assert bench.finish[key] == ("stop" if cuts or ending == EndCode.STOP else "length")
    if not cuts:
        assert bench.tokens[key] == len(committed)
    bench.free(3)
    bench.step()


@pytest.fixture
def shared_bench(run: RunDirectory, tokenizer: Tokenizer) -> Bench:
    return Bench(run, tokenizer)


# texts that cannot be made


def test_a_text_that_raises_ends_with_an_error_and_the_others_go_on(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.admit(0, key=1)
    bench.admit(1, key=2)
    ids = bench.tokenizer.encode("fox")
    bench.commit(0, ids)
    bench.commit(1, ids)
    bench.step()
    bench.receive()
    bench.detokenizer._texts[0]._decoder = None  # type: ignore[assignment]
    bench.commit(0, ids)
    bench.commit(1, [*ids, 0], EndCode.STOP)
    bench.step()
    assert bench.detokenizer.is_blocked, "it is to be told of soon"
    bench.step()
    bench.receive()
    assert bench.finish == {1: "error", 2: "stop"} and bench.texts == {1: b"fox", 2: b"foxfox"}
    assert "row 0" in caplog.text and not bench.detokenizer.is_blocked
    bench.free(0)
    bench.step()
    bench.admit(0, key=3)
    bench.commit(0, [*ids, 0], EndCode.STOP)
    bench.step()
    bench.receive()
    assert bench.finish[3] == "stop", "the row's next request is another one"


def test_a_text_that_was_given_up_is_never_begun(bench: Bench) -> None:
    generation = bench.admit(0, key=1)
    bench.table.write_spec(0, encode(SequenceSpec(1, Generation("r"), 1, 0, 100, [], 1)))
    bench.commit(0, bench.tokenizer.encode("fox"))
    bench.detokenizer.give_up((0, generation))
    bench.step()
    bench.receive()
    assert bench.finish == {1: "error"} and bench.texts == {1: b""}
    bench.now_s += REPEAT_S
    bench.step()
    assert [delta.finish for delta in bench.receive()] == ["error"], "said again until somebody answers"


def test_a_text_that_was_given_up_stays_so_through_a_preemption(bench: Bench) -> None:
    generation = bench.admit(0, key=1)
    bench.table.set_phase(0, Phase.PREPARE)
    bench.commit(0, bench.tokenizer.encode("fox"))
    bench.detokenizer.give_up((0, generation))
    bench.step()
    bench.table.set_phase(0, Phase.DECODE)
    bench.step()
    bench.receive()
    assert bench.finish == {1: "error"} and bench.texts == {1: b""}


def test_one_text_alone_leaves_the_others_for_later(bench: Bench) -> None:
    ids = bench.tokenizer.encode("fox")
    for row in (0, 1):
        bench.admit(row, key=row)
        bench.commit(row, ids)
    assert bench.detokenizer.step(bench.now_s, 1)
    assert [delta.key for delta in bench.receive()] == [1]
    assert bench.detokenizer.is_blocked
    bench.step()
    assert [delta.key for delta in bench.receive()] == [0]


class RungActor(FakeActor):
    """Calls ``ring`` whenever the loop waits, and waits for its descriptors alone: no time ends a wait."""

    model_path = None
    model = SimpleNamespace(eos_token_ids=(0,))

    def __init__(self, run: RunDirectory, num_turns: int, ring: Callable[[], None]) -> None:
        super().__init__(run, "detokenizer", [[]] * num_turns)
        self.ring = ring

    def wait_for_layout(self) -> None:
        pass

    def wait(self, timeout_s: float, extra_fds: Sequence[int] = ()) -> None:
        self.ring()
        assert select.select(extra_fds, [], [], 10)[0] or self.ending


def test_a_ring_is_all_that_new_text_needs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.admit(0, key=5)
    ids = bench.tokenizer.encode("the quick")
    received: list[int] = []
    with Ringer(bench.run, "detokenizer") as bell:

        def ring() -> None:
            received.append(len(bench.receive()))
            if len(received) <= len(ids):
                bench.commit(0, [ids[len(received) - 1]])
                bell.ring()

        monkeypatch.setattr(module.Tokenizer, "load", lambda *_, **__: bench.tokenizer)
        module.main(cast(Actor, RungActor(bench.run, len(ids) + 1, ring)))
    assert received == [0] + [1] * len(ids)
    assert bench.texts == {5: b"the quick"}
