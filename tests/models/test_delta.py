"""A DeltaNet between its products: bits do not depend on cuts of the grid, nor on neighbours; the three forms of the rule are one."""

import pytest
import torch

from mmrt.models.architecture import AttentionConfig, DeltaConfig, DType, LanguageConfig, LayerConfig, MlpConfig, ModelConfig
from mmrt.models.lm.decoder import StateRefs, StateRows
from mmrt.models.lm.delta import CpuDelta, DeltaWeights, Projected
from mmrt.models.lm.delta_pages import DeltaPages, StatePools
from mmrt.models.lm.delta_rule import Known, Tokens, block, fold, step
from mmrt.models.state_layout import GRID, state_layout

DELTA = DeltaConfig(num_key_heads=3, num_value_heads=6, key_dim=20, value_dim=12)
LENGTH, NUM_LAYERS, NUM_PAGES = 200, 2, 8
SCRATCH, LOG = 7, 3


def model_config(dtype: DType) -> ModelConfig:
    mlp = MlpConfig(intermediate_size=8)
    heads = AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=8)
    layers = tuple(LayerConfig(mixer=mixer, feed_forward=mlp) for mixer in (DELTA, heads, DELTA))
    language = LanguageConfig(vocab_size=8, hidden_size=8, rms_norm_eps=1e-6, layers=layers, ropes=())
    return ModelConfig(family="none", language=language, dtype=dtype, max_context=LENGTH, eos_token_ids=())


def make(dtype: DType) -> tuple[CpuDelta, StatePools]:
    """Over pages of garbage."""
    config = model_config(dtype)
    layout = state_layout(config)
    assert layout is not None
    generator = torch.Generator().manual_seed(3)
    shapes = (NUM_PAGES, layout.base_bytes), (NUM_PAGES, layout.log_bytes)
    pools = StatePools(*(torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) for shape in shapes))
    return CpuDelta(DELTA, NUM_LAYERS, 1e-6, DeltaPages(config, pools)), pools


def weights() -> DeltaWeights:
    generator = torch.Generator().manual_seed(4)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    heads = DELTA.num_value_heads
    return DeltaWeights(normal(4, DELTA.mixed_size), -torch.logspace(-2, 1, heads), normal(heads) - 3, 1 + 0.1 * normal(12))


def projected(dtype: torch.dtype) -> Projected:
    generator = torch.Generator().manual_seed(6)
    widths = DELTA.mixed_size, 6 * 12, 2 * 6
    return Projected(*(torch.randn(LENGTH, width, generator=generator).to(dtype) for width in widths))


def part(tokens: Projected, rows: slice | list[int]) -> Projected:
    return Projected(*(tensor[rows] for tensor in tokens))


def absorb(delta: CpuDelta, tokens: Projected, cuts: tuple[int, ...], length: int = LENGTH) -> torch.Tensor:
    """Outputs of the layers after each other, the first ``length`` tokens in chunks; bases alternate between pages 0 and 1."""
    outputs = []
    for number, (start, end) in enumerate(zip((0, *cuts), (*cuts, length), strict=True)):
        source, target = (-1 if start == 0 else number % 2), (number + 1) % 2
        delta.begin_prefill([(start, end)], [StateRefs(source, target, LOG if end == length else -1)])
        outputs.append(torch.stack([delta.prefill(layer, weights(), part(tokens, slice(start, end))) for layer in range(NUM_LAYERS)]))
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cuts_on_the_grid_change_no_bit(dtype: DType) -> None:
    tokens = projected(getattr(torch, dtype))
    (whole, pools) = make(dtype)
    expected = absorb(whole, tokens, ())
    base = pools.bases[1].clone()
    for cuts in ((128,), (16, 64, 144), tuple(range(16, LENGTH, 16))):
        delta, mine = make(dtype)
        assert torch.equal(absorb(delta, tokens, cuts), expected), cuts
        assert torch.equal(mine.bases[(len(cuts) + 1) % 2], base) and torch.equal(mine.logs[LOG], pools.logs[LOG]), cuts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_continue_a_prompt_and_fold_what_they_logged(dtype: DType) -> None:
    """Prefilling all is as prefilling a part and stepping through the rest, up to rounding."""
    tokens = projected(getattr(torch, dtype))
    expected = absorb(make(dtype)[0], tokens, ())
    for length in (1, 16, 165):
        delta, _ = make(dtype)
        absorb(delta, tokens, (), length)
        base = 1
        for place in range(length, min(length + 34, LENGTH)):
            states = StateRows(torch.tensor([base]), torch.tensor([LOG]))
            delta.begin_decode(torch.tensor([place + 1]), states)
            for layer in range(NUM_LAYERS):
                found = delta.decode(layer, weights(), part(tokens, [place]))[0]
                most = 2e-2 if dtype == "bfloat16" else 2e-5
                torch.testing.assert_close(found, expected[layer, place], rtol=most, atol=most * float(expected.abs().max()))
            if (place + 1) % GRID == 0:
                delta.fold([place + 1], states, [1 - base])
                base = 1 - base


def test_a_row_has_its_bits_beside_any_others() -> None:
    tokens, rows = projected(torch.float32), [5, 16, 33]
    alone = []
    for number, length in enumerate(rows):
        delta, _ = make("float32")
        delta.begin_prefill([(0, length)], [StateRefs(-1, number, number)])
        delta.prefill(0, weights(), part(tokens, slice(0, length)))
        delta.begin_decode(torch.tensor([length + 1]), StateRows(torch.tensor([number]), torch.tensor([number])))
        alone.append(delta.decode(0, weights(), part(tokens, [length])))
    delta, _ = make("float32")
    delta.begin_prefill([(0, length) for length in rows], [StateRefs(-1, number, number) for number in range(3)])
    delta.prefill(0, weights(), part(tokens, [place for length in rows for place in range(length)]))
    delta.begin_decode(torch.tensor(rows) + 1, StateRows(torch.arange(3), torch.arange(3)))
    assert torch.equal(delta.decode(0, weights(), part(tokens, rows)), torch.cat(alone))


def test_a_request_with_numbers_that_are_none_spoils_no_page() -> None:
    tokens = projected(torch.float32)
    delta, _ = make("float32")
    expected = absorb(delta, tokens, (), 40)
    absorb(delta, Projected(*(torch.full_like(tensor, float("nan")) for tensor in tokens)), (), 40)
    assert torch.equal(absorb(delta, tokens, (), 40), expected)


def test_the_forms_of_the_rule_are_the_definition() -> None:
    generator = torch.Generator().manual_seed(8)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    keys = torch.nn.functional.normalize(normal(GRID, 2, 5), dim=-1)
    tokens = Tokens(normal(GRID, 2, 5), keys, normal(GRID, 4, 3), -normal(GRID, 4).exp(), normal(GRID, 4).sigmoid())
    base = normal(4, 5, 3)
    state, expected = base, []
    for q, k, v, g, beta in zip(*tokens, strict=True):
        q, k = q.repeat_interleave(2, 0), k.repeat_interleave(2, 0)
        state = state * g.exp()[:, None, None]
        u = beta.unsqueeze(1) * (v - (state * k.unsqueeze(2)).sum(1))
        state = state + k.unsqueeze(2) * u.unsqueeze(1)
        expected.append((state * q.unsqueeze(2)).sum(1))
    out, known = block(base, tokens)
    torch.testing.assert_close(out, torch.stack(expected))
    torch.testing.assert_close(fold(base, known), state)
    seen = Known(*(tensor[:0] for tensor in known))
    for place in range(GRID):
        out, new = step(base, seen, Tokens(*(tensor[place : place + 1] for tensor in tokens)))
        torch.testing.assert_close(out[0], expected[place])
        seen = Known(*(torch.cat(pair) for pair in zip(seen, new, strict=True)))
    torch.testing.assert_close(fold(base, seen), state)
