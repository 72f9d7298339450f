"""Quanta of a plan: as long as they may be, and no longer where layers take the same time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrt.actors.host.quantum import Quantum, quantum_s


def lengths(layers_s: list[float], length_s: float) -> list[float]:
    """Compute these layers. Returns the lengths of the quanta, except for the last one, which is cut off."""
    now_s = begun_s = 100.0
    quantum, found = Quantum(now_s, length_s), []
    for layer_s in layers_s:
        now_s += layer_s
        if not quantum.has_layers() and quantum.is_over(now_s):
            found.append(now_s - begun_s)
            begun_s = now_s
            quantum.begin(now_s, length_s)
    return found


@given(layer_s=st.floats(1e-5, 1.0), num_layers=st.integers(1, 80), layers=st.floats(0.0, 100.0))
def test_equal_layers_fill_a_quantum(layer_s: float, num_layers: int, layers: float) -> None:
    length_s = layer_s * layers
    for found_s in lengths([layer_s] * num_layers, length_s):
        assert found_s <= max(length_s, layer_s) * (1 + 1e-6)
        assert found_s >= length_s - 2.001 * layer_s, "another two would fit"


@given(layers_s=st.lists(st.floats(1e-4, 0.1), min_size=1, max_size=80), length_s=st.floats(0.0, 0.5))
def test_a_longer_layer_is_reckoned_with_from_then_on(layers_s: list[float], length_s: float) -> None:
    for number, found_s in enumerate(lengths([max(layers_s), *layers_s], length_s)):
        assert found_s <= max(length_s, max(layers_s)) * (1 + 1e-6), number


def test_the_time_that_an_objective_leaves() -> None:
    assert quantum_s(0.12, 0.06) == pytest.approx(0.048)
    assert quantum_s(0.05, 0.0) == pytest.approx(0.04)
    assert quantum_s(0.05, 0.05) == quantum_s(0.05, 0.4) == 0.0
    assert lengths([0.02] * 4, 0.0) == pytest.approx([0.02] * 4), "a plan gets on in any case"
