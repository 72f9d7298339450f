"""Every message and record survives the wire; what is no message is refused by an error that receivers expect."""

import random
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from mmrt.runtime.bus import messages as m
from mmrt.runtime.bus import plans as p
from mmrt.runtime.bus.plan_base import ChunkPlan, PlanBase
from mmrt.runtime.bus.wire import Wire, encode
from mmrt.schema.media import ItemShape, SegmentShape
from mmrt.tests.settings import examples

DECODERS = {
    "to actor": m.decode_to_actor,
    "to controller": m.decode_to_controller,
    "plan": p.decode_plan,
    "spec": m.decode_sequence_spec,
    "delta": m.decode_delta,
}
LEAVES = {
    int: st.integers(0, 2**63 - 1) | st.integers(-(2**31), 0),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=20),
    bool: st.booleans(),
    bytes: st.binary(max_size=20),
    type(None): st.none(),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    if kind in LEAVES:
        return LEAVES[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        kind, bounds = arguments
        within = {int: st.integers, float: st.floats}
        return within[kind](bounds.ge, bounds.le) if kind in within else values(kind)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, types.UnionType):
        return st.one_of([values(argument) for argument in arguments])
    if origin is list:
        return st.lists(values(arguments[0]), max_size=3)
    if origin is tuple and arguments[1:] == (...,):
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    assert isinstance(kind, type) and issubclass(kind, msgspec.Struct), kind
    hints = get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{name: values(hints[name]) for name in kind.__struct_fields__})


TO_ACTOR = get_args(m.ToActor)
TO_CONTROLLER = get_args(m.ToController)
PLANS = get_args(p.Plan)
CASES = (
    [("to actor", kind) for kind in TO_ACTOR]
    + [("to controller", kind) for kind in TO_CONTROLLER]
    + [("plan", kind) for kind in PLANS]
    + [("spec", m.SequenceSpec), ("delta", m.Delta)]
)


def test_the_unions_hold_every_wire_type() -> None:
    inner = set(get_args(m.Result))
    assert {*TO_ACTOR, *TO_CONTROLLER, *inner} == set(Wire.__subclasses__()) - {PlanBase}
    assert set(PLANS) == {*PlanBase.__subclasses__(), *ChunkPlan.__subclasses__()} - {ChunkPlan}


@pytest.mark.parametrize(("decoder", "kind"), CASES, ids=lambda case: getattr(case, "__name__", case))
def test_round_trip(decoder: str, kind: type[msgspec.Struct]) -> None:
    @settings(max_examples=examples(15), deadline=None)
    @given(values(kind))
    def check(message: msgspec.Struct) -> None:
        decoded = DECODERS[decoder](encode(message))
        assert decoded == message and type(decoded) is kind

    check()


@pytest.mark.parametrize("kind", [kind for _, kind in CASES], ids=lambda kind: kind.__name__)
def test_messages_are_immutable(kind: type[msgspec.Struct]) -> None:
    assert kind.__struct_config__.frozen and kind.__struct_config__.array_like


def test_older_senders_are_understood() -> None:
    """Types evolve by appending defaulted fields."""
    assert m.decode_to_controller(msgspec.msgpack.encode(["Dropped", 1, 2, 3])) == m.Dropped(1, 2, 3, 0)
    analyse = ["Analyse", 1, 2, 3, ["image", 4, "image/png"], [[5], [6]]]
    assert p.decode_plan(msgspec.msgpack.encode(analyse)) == p.Analyse(
        1, 2, 3, m.MediaItem("image", 4, "image/png"), m.PageRun([5], [6])
    )
    assert m.decode_to_actor(msgspec.msgpack.encode(["Drop", 1, 2, 3, 4, "a later field"])) == m.Drop(1, 2, 3, 4)


def refuses(data: bytes) -> None:
    for decode in DECODERS.values():
        try:
            decode(data)
        except msgspec.DecodeError:
            pass


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    refuses(data)


@settings(max_examples=examples(150), deadline=None)
@given(st.sampled_from(CASES).flatmap(lambda case: values(case[1])), st.integers(0, 2**32))
def test_damaged_messages(message: msgspec.Struct, seed: int) -> None:
    rng = random.Random(seed)
    whole = encode(message)
    for _ in range(10):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            match rng.randrange(4):
                case 0 if data:
                    data[rng.randrange(len(data))] = rng.randrange(256)
                case 1 if data:
                    del data[rng.randrange(len(data)) :]
                case 2:
                    data[(at := rng.randint(0, len(data))) : at] = rng.randbytes(rng.randint(1, 4))
                case _:
                    data += rng.choice((b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\x7f\xff\xff\xff", b"\x91" * 50))
        refuses(bytes(data))


@pytest.mark.parametrize("nested", [b"\x91", b"\x81\x01", b"\x92\xa7Welcome"])
def test_deep_nesting(nested: bytes) -> None:
    """A field too many is skipped by recursion."""
    refuses(nested * 200_000)
    refuses(b"\x93\xa7Welcome\x01" + nested * 200_000)


@pytest.mark.parametrize("elapsed_s", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("result", [m.ItemError(400, "x"), m.Done()])
def test_a_time_that_is_none_is_not_learned_from(elapsed_s: float, result: m.Result) -> None:
    with pytest.raises(msgspec.ValidationError, match="float"):
        m.decode_to_controller(encode(m.PlanDone("video", 1, 1, elapsed_s, result)))


@pytest.mark.parametrize("result", [m.ItemError(200, "x"), m.ItemError(600, "x"), m.ItemError(400, "x" * 70_000)])
def test_an_error_is_one(result: m.Result) -> None:
    with pytest.raises(msgspec.ValidationError):
        m.decode_to_controller(encode(m.PlanDone("video", 1, 1, 0.1, result)))


@pytest.mark.parametrize("change", [{"num_rows": -1}, {"row_bytes": 0}, {"num_tokens": 1 << 40}, {"grid": (1, -2, 2)}])
def test_a_shape_has_numbers_within_bounds(change: dict[str, object]) -> None:
    segment = msgspec.structs.replace(SegmentShape("image", (1, 2, 2), 4, 1176, 1), **change)
    done = m.PlanDone("video", 1, 1, 0.1, m.Analysed(ItemShape("image", (1, 2, 2), 1, [segment])))
    with pytest.raises(msgspec.ValidationError):
        m.decode_to_controller(encode(done))
