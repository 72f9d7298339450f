"""A DeltaNet between its products: bits do not depend on cuts of the grid, nor on neighbours; the three forms of the rule are one."""

from collections.abc import Iterator

import pytest
import torch

from mmrt.cpu_kernels import delta_kernels, kernel
from mmrt.models.architecture import AttentionConfig, DeltaConfig, DType, LanguageConfig, LayerConfig, MlpConfig, ModelConfig
from mmrt.models.lm.decoder import StateRefs, StateRows
from mmrt.models.lm.delta import CpuDelta, DeltaWeights, Projected
from mmrt.models.lm.delta_pages import DeltaPages, StatePools
from mmrt.models.lm.delta_rule import Known, Tokens, block, fold, step
from mmrt.models.state_layout import GRID, state_layout
from mmrt.tests.models.guarded import guarded

IN_TORCH = DeltaConfig(num_key_heads=3, num_value_heads=6, key_dim=20, value_dim=12)
BY_KERNELS = DeltaConfig(num_key_heads=3, num_value_heads=6, key_dim=32, value_dim=48)
LENGTH, NUM_LAYERS, NUM_PAGES = 200, 2, 8
LOG = 3

with_kernels = pytest.mark.skipif(kernel.vector_width() is None, reason="this processor has no kernels")
each_way = pytest.mark.parametrize("config", [IN_TORCH, pytest.param(BY_KERNELS, marks=with_kernels)], ids=["torch", "kernels"])
each_way_and_threads = pytest.mark.parametrize(
    ("config", "threads"),
    [(IN_TORCH, 1), *(pytest.param(BY_KERNELS, number, marks=with_kernels) for number in (1, 2))],
    indirect=["threads"],
    ids=["torch", "kernels", "kernels, two threads"],
)
each_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def model_config(config: DeltaConfig, dtype: DType) -> ModelConfig:
    mlp = MlpConfig(intermediate_size=8)
    heads = AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=8)
    layers = tuple(LayerConfig(mixer=mixer, feed_forward=mlp) for mixer in (config, heads, config))
    language = LanguageConfig(vocab_size=8, hidden_size=8, rms_norm_eps=1e-6, layers=layers, ropes=())
    return ModelConfig(family="none", language=language, dtype=dtype, max_context=LENGTH, eos_token_ids=())


def make(config: DeltaConfig, dtype: DType, *, at_end: bool = True) -> tuple[CpuDelta, StatePools]:
    """Over pages of garbage, before whose beginning or behind whose end nothing can be touched."""
    model = model_config(config, dtype)
    layout = state_layout(model)
    assert layout is not None
    generator = torch.Generator().manual_seed(3)
    shapes = (NUM_PAGES, layout.base_bytes), (NUM_PAGES, layout.log_bytes)
    garbage = (torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) for shape in shapes)
    pools = StatePools(*(guarded(pages, at_end=at_end) for pages in garbage))
    return CpuDelta(config, NUM_LAYERS, 1e-6, DeltaPages(model, pools)), pools


def weights(config: DeltaConfig) -> DeltaWeights:
    generator = torch.Generator().manual_seed(4)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    heads = config.num_value_heads
    norm = 1 + 0.1 * normal(config.value_dim)
    return DeltaWeights(normal(4, config.mixed_size), -torch.logspace(-2, 1, heads), normal(heads) - 3, norm)


def projected(config: DeltaConfig, dtype: str) -> Projected:
    """As a layer's products give it: the first two are parts of one."""
    generator = torch.Generator().manual_seed(6)
    heads = config.num_value_heads
    widths = [config.mixed_size, heads * config.value_dim]
    products = (torch.randn(LENGTH, width, generator=generator).to(getattr(torch, dtype)) for width in (sum(widths), 2 * heads))
    mixed_z, ba = products
    return Projected(*torch.split(mixed_z, widths, 1), ba)


def part(tokens: Projected, rows: slice | list[int]) -> Projected:
    return Projected(*(tensor[rows] for tensor in tokens))


class Layers:
    """All layers of a model, each with the same tokens; bases alternate between pages 0 and 1."""

    def __init__(self, config: DeltaConfig, dtype: DType, *, at_end: bool = True) -> None:
        self.delta, self.pools = make(config, dtype, at_end=at_end)
        self._weights, self.base = weights(config), 0

    def absorb(self, tokens: Projected, cuts: tuple[int, ...] = (), length: int = LENGTH) -> torch.Tensor:
        """Outputs of the layers after each other, the first ``length`` tokens in chunks."""
        outputs = []
        for number, (start, end) in enumerate(zip((0, *cuts), (*cuts, length), strict=True)):
            self.base = (number + 1) % 2
            refs = StateRefs(-1 if start == 0 else number % 2, self.base, LOG if end == length else -1)
            self.delta.begin_prefill([(start, end)], [refs])
            chunk = part(tokens, slice(start, end))
            outputs.append(torch.stack([self.delta.prefill(layer, self._weights, chunk) for layer in range(NUM_LAYERS)]))
        return torch.cat(outputs, 1)

    def step(self, tokens: Projected, place: int) -> torch.Tensor:
        """Outputs of the layers for one token, and the fold behind it, if it fills the log."""
        states = StateRows(torch.tensor([self.base]), torch.tensor([LOG]))
        self.delta.begin_decode(torch.tensor([place + 1]), states)
        found = [self.delta.decode(layer, self._weights, part(tokens, [place]))[0] for layer in range(NUM_LAYERS)]
        if (place + 1) % GRID == 0:
            self.delta.fold([place + 1], states, [1 - self.base])
            self.base = 1 - self.base
        return torch.stack(found)


@pytest.fixture
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With two, work is shared however little it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr(delta_kernels, "_LEAST_WORK", 1)
    yield
    torch.set_num_threads(before)


@each_way_and_threads
@each_dtype
def test_cuts_on_the_grid_change_no_bit(config: DeltaConfig, dtype: DType, threads: None) -> None:
    tokens = projected(config, dtype)
    whole = Layers(config, dtype)
    expected, base = whole.absorb(tokens), whole.pools.bases[1].clone()
    for cuts in ((16, 64, 144), tuple(range(16, LENGTH, 16))):
        mine = Layers(config, dtype, at_end=False)
        assert torch.equal(mine.absorb(tokens, cuts), expected), cuts
        assert torch.equal(mine.pools.bases[mine.base], base) and torch.equal(mine.pools.logs[LOG], whole.pools.logs[LOG]), cuts


@each_way
@each_dtype
def test_a_snapshot_has_the_bits_of_a_chunk_that_ends_there(config: DeltaConfig, dtype: DType) -> None:
    """In a call with another sequence; some are at the end of their chunk."""
    tokens = projected(config, dtype)
    whole = Layers(config, dtype)
    expected, base = whole.absorb(tokens), whole.pools.bases[1].clone()
    mine, outputs = Layers(config, dtype), []
    for start, end, refs in (
        (0, 64, StateRefs(-1, 1, -1, ((16, 2), (48, 5), (64, 3)))),
        (64, LENGTH, StateRefs(3, 0, LOG, ((112, 4),))),
    ):
        both = Projected(*(torch.cat((tensor[:32], tensor[start:end])) for tensor in tokens))
        mine.delta.begin_prefill([(0, 32), (start, end)], [StateRefs(-1, 6, -1, ((32, 7),)), refs])
        found = [mine.delta.prefill(layer, weights(config), both) for layer in range(NUM_LAYERS)]
        outputs.append(torch.stack(found)[:, 32:])
    assert torch.equal(torch.cat(outputs, 1), expected) and torch.equal(mine.pools.bases[0], base)
    assert torch.equal(mine.pools.logs[LOG], whole.pools.logs[LOG])
    for page, length in ((2, 16), (5, 48), (3, 64), (4, 112), (7, 32)):
        alone = Layers(config, dtype)
        alone.absorb(tokens, (), length)
        assert torch.equal(mine.pools.bases[page], alone.pools.bases[1]), length


@each_way
@each_dtype
def test_steps_continue_a_prompt_and_fold_what_they_logged(config: DeltaConfig, dtype: DType) -> None:
    """Prefilling all is as prefilling a part and stepping through the rest, up to rounding."""
    tokens = projected(config, dtype)
    expected = Layers(config, dtype).absorb(tokens)
    for length in (1, 16, 165):
        layers = Layers(config, dtype, at_end=length == 16)
        layers.absorb(tokens, (), length)
        for place in range(length, min(length + 34, LENGTH)):
            found, most = layers.step(tokens, place), 2e-2 if dtype == "bfloat16" else 2e-5
            torch.testing.assert_close(found, expected[:, place], rtol=most, atol=most * float(expected.abs().max()))


@with_kernels
@each_dtype
def test_kernels_step_with_the_bits_of_a_prompt(dtype: DType) -> None:
    tokens = projected(BY_KERNELS, dtype)
    whole = Layers(BY_KERNELS, dtype)
    expected = whole.absorb(tokens)
    for length in (1, 17, 40):
        layers = Layers(BY_KERNELS, dtype)
        layers.absorb(tokens, (), length)
        for place in range(length, LENGTH):
            assert torch.equal(layers.step(tokens, place), expected[:, place]), (length, place)
        assert torch.equal(layers.pools.bases[layers.base], whole.pools.bases[whole.base])
        whole_log, log = (DeltaPages(model_config(BY_KERNELS, dtype), pools) for pools in (whole.pools, layers.pools))
        for layer in range(NUM_LAYERS):
            entries = (pages.known(layer, LOG, LENGTH // GRID * GRID, LENGTH) for pages in (whole_log, log))
            assert all(torch.equal(*pair) for pair in zip(*entries, strict=True))


@with_kernels
@each_dtype
def test_kernels_compute_what_torch_does(dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = projected(BY_KERNELS, dtype)
    extremes = [-torch.inf, -90.0, -1e-6, 30.0, 90.0, 1e4]  # where sums of log decays end: behind such a number they have few digits
    tokens.ba[GRID - 1 : 6 * GRID : GRID] = torch.tensor(extremes, dtype=tokens.ba.dtype)[:, None]
    most = 2e-2 if dtype == "bfloat16" else 1e-5
    ours = Layers(BY_KERNELS, dtype)
    monkeypatch.setattr(delta_kernels, "vector_width", lambda: None)
    theirs = Layers(BY_KERNELS, dtype)
    monkeypatch.undo()
    found, expected = (layers.absorb(tokens, (64,), 100) for layers in (ours, theirs))
    for place in range(100, 140):
        found = torch.cat((found, ours.step(tokens, place).unsqueeze(1)), 1)
        expected = torch.cat((expected, theirs.step(tokens, place).unsqueeze(1)), 1)
    torch.testing.assert_close(found, expected, rtol=most, atol=most * float(expected.abs().max()))
    of_both = [DeltaPages(model_config(BY_KERNELS, dtype), layers.pools) for layers in (ours, theirs)]
    for layer in range(NUM_LAYERS):
        states, columns = zip(*(pages.base(layer, ours.base) for pages in of_both), strict=True)
        torch.testing.assert_close(*states, rtol=most, atol=most * float(states[1].abs().max()))
        assert torch.equal(*columns)
        assert torch.equal(*(pages.columns(layer, LOG, 137, 140) for pages in of_both))


@each_way_and_threads
def test_a_row_has_its_bits_beside_any_others(config: DeltaConfig, threads: None) -> None:
    tokens, rows = projected(config, "float32"), [5, 16, 33]
    alone = []
    for number, length in enumerate(rows):
        delta, _ = make(config, "float32")
        delta.begin_prefill([(0, length)], [StateRefs(-1, number, number)])
        delta.prefill(0, weights(config), part(tokens, slice(0, length)))
        delta.begin_decode(torch.tensor([length + 1]), StateRows(torch.tensor([number]), torch.tensor([number])))
        alone.append(delta.decode(0, weights(config), part(tokens, [length])))
    delta, _ = make(config, "float32")
    delta.begin_prefill([(0, length) for length in rows], [StateRefs(-1, number, number) for number in range(3)])
    delta.prefill(0, weights(config), part(tokens, [place for length in rows for place in range(length)]))
    delta.begin_decode(torch.tensor(rows) + 1, StateRows(torch.arange(3), torch.arange(3)))
    assert torch.equal(delta.decode(0, weights(config), part(tokens, rows)), torch.cat(alone))


@each_way
def test_prompts_whose_states_nobody_keeps_write_no_page(config: DeltaConfig) -> None:
    tokens = projected(config, "float32")
    expected = Layers(config, "float32").absorb(tokens)[0]
    delta, pools = make(config, "float32")
    before = [pool.clone() for pool in pools]
    delta.begin_prefill([(0, 40), (0, 100)], [StateRefs(), StateRefs()])
    found = delta.prefill(0, weights(config), part(tokens, [*range(40), *range(100)]))
    assert torch.equal(found, torch.cat((expected[:40], expected[:100])))
    assert all(torch.equal(*pair) for pair in zip(pools, before, strict=True))


@each_way
def test_a_request_with_numbers_that_are_none_spoils_no_page(config: DeltaConfig) -> None:
    tokens = projected(config, "float32")
    layers = Layers(config, "float32")
    expected = layers.absorb(tokens, (), 40)
    layers.absorb(Projected(*(torch.full_like(tensor, float("nan")) for tensor in tokens)), (), 40)
    assert torch.equal(layers.absorb(tokens, (), 40), expected)


@with_kernels
def test_kernels_refuse_what_is_beyond_their_memory() -> None:
    delta, _ = make(BY_KERNELS, "float32")
    states = StateRows(torch.tensor([0]), torch.tensor([NUM_PAGES]))
    with pytest.raises(ValueError, match="page 8 of a pool of 8"):
        delta.begin_decode(torch.tensor([3]), states)
    with pytest.raises(ValueError, match=r"without a log: pages \[-1\]"):
        delta.begin_decode(torch.tensor([3]), StateRows(torch.tensor([0]), torch.tensor([-1])))
    with pytest.raises(ValueError, match="page 9 of a pool of 8"):
        delta.begin_prefill([(16, 20)], [StateRefs(9, 1, -1)])
    for wrong_cuts in (((16, -1),), ((20, 2),), ((32, 2),), ((0, 2),)):  # no page, no border, behind the tokens, before them
        with pytest.raises(ValueError, match=r"snapshots \[.*\], as \(border, page\), of tokens 0 to 20"):
            delta.begin_prefill([(0, 20)], [StateRefs(-1, 1, -1, wrong_cuts)])
    with pytest.raises(ValueError, match=r"snapshots \[\(16, 2\)\]"):  # the state of the tokens is kept nowhere
        delta.begin_prefill([(0, 16)], [StateRefs(-1, -1, -1, ((16, 2),))])
    with pytest.raises(ValueError, match=r"into pages \[-1\]"):
        delta.fold([16], StateRows(torch.tensor([0]), torch.tensor([0])), [-1])
    delta.begin_prefill([(0, 20)], [StateRefs(-1, 0, -1)])
    tokens = part(projected(BY_KERNELS, "float32"), slice(0, 20))
    with pytest.raises(ValueError, match=r"torch.float32 \[20, 12\], not torch.float32 \[20, 288\] in rows"):
        delta.prefill(0, weights(BY_KERNELS), tokens._replace(z=tokens.ba))
    wrong = weights(BY_KERNELS)._replace(norm=torch.ones(32))
    with pytest.raises(ValueError, match=r"weights torch.float32 \[32\], not float32 \[48\]"):
        delta.prefill(0, wrong, tokens)


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
