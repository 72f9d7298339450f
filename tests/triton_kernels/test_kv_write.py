from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrt.models.architecture import AttentionConfig, LanguageConfig, LayerConfig, MlpConfig, RopeConfig
from mmrt.models.lm.attention import CpuAttention
from mmrt.models.lm.kv_pages import KvPages
from mmrt.models.lm.rope import Rope, rotate
from mmrt.tests.settings import examples
from mmrt.triton_kernels.kv_write import QkNorm, Rotary, reference, rotate_and_write_kv
from mmrt.triton_kernels.paged_kv import PagedKV

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
QUANTIZED = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EPSILON = 1e-6
NUM_PAGES, PAGE_TOKENS = 5, 3


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def make_pages(num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> PagedKV:
    """The middle layer of a pool laid out as the language model's: [page, layer, token, K or V, head, element]; poisoned."""
    pool = torch.full((NUM_PAGES, 3, PAGE_TOKENS, 2, num_kv_heads, head_dim), float("nan"), device=device)
    if dtype in QUANTIZED:
        pool = torch.full_like(pool, 99.0)
    pool = pool.to(dtype)
    if dtype not in QUANTIZED:
        return PagedKV(pool[:, 1, :, 0], pool[:, 1, :, 1])
    scales = torch.full((NUM_PAGES, 3, 2, PAGE_TOKENS, num_kv_heads), float("nan"), device=device)
    return PagedKV(pool[:, 1, :, 0], pool[:, 1, :, 1], scales[:, 1, 0], scales[:, 1, 1])


def cloned(pages: PagedKV) -> PagedKV:
    return PagedKV(*(None if tensor is None else tensor.clone() for tensor in pages))


def make_slots(num_tokens: int, device: torch.device) -> torch.Tensor:
    """Random, some skipped."""
    slots = torch.randperm(NUM_PAGES * PAGE_TOKENS)[:num_tokens]
    slots[torch.rand(num_tokens) < 0.2] = -1
    return slots.to(device)


def assert_same_pages(actual: PagedKV, expected: PagedKV) -> None:
    """Equal but for roundings; what was not written still poisoned."""
    for got, want, got_scales, want_scales in zip(actual[:2], expected[:2], actual[2:], expected[2:], strict=True):
        assert got is not None and want is not None
        if got_scales is None or want_scales is None:
            torch.testing.assert_close(got, want, rtol=TOLERANCE[got.dtype], atol=TOLERANCE[got.dtype], equal_nan=True)
            continue
        tolerance = 1.6e-2  # the head that scales come from may be rounded to bfloat16
        torch.testing.assert_close(got_scales, want_scales, rtol=tolerance, atol=0, equal_nan=True)
        step = 1.0 if got.dtype == torch.int8 else 0.0
        rtol = {torch.int8: 0.02, torch.float8_e4m3fn: 0.13}[got.dtype]
        torch.testing.assert_close(got.float(), want.float(), rtol=rtol, atol=step + 0.02)


def store(kv: torch.Tensor, slots: torch.Tensor, pages: PagedKV) -> None:
    """K and V [tokens, 2, heads, head_dim] as they are: nothing turns at position 0."""
    positions = torch.zeros(1, len(kv), dtype=torch.int64, device=kv.device)
    rotate_and_write_kv(kv.flatten(1, 2).clone(), positions, slots, pages, Rotary(frequencies(kv.shape[3], 1e4).to(kv.device)))


@pytest.mark.parametrize("quantized", [None, *QUANTIZED])
@settings(max_examples=examples(4), deadline=None, derandomize=True)
@given(
    num_tokens=st.integers(1, 4),
    num_kv_heads=st.integers(1, 5),
    fold=st.integers(0, 4),
    head_dim=st.sampled_from([16, 64, 128]),
    dtype=st.sampled_from(DTYPES),
    sections=st.integers(0, 4),
    normed=st.booleans(),
)
def test_fused_write(
    device: torch.device,
    quantized: torch.dtype | None,
    num_tokens: int,
    num_kv_heads: int,
    fold: int,
    head_dim: int,
    dtype: torch.dtype,
    sections: int,
    normed: bool,
) -> None:
    torch.manual_seed(num_tokens)
    heads = torch.randn(num_tokens, (fold + 2) * num_kv_heads, head_dim, device=device).to(dtype)
    pages = make_pages(num_kv_heads, head_dim, quantized or dtype, device)
    expected, slots, expected_heads = cloned(pages), make_slots(num_tokens, device), heads.clone()
    positions = torch.randint(0, 2**17, (3, num_tokens), device=device)
    rotary = Rotary(frequencies(head_dim, 1e6).to(device), split(head_dim // 2, sections), 1.0 if sections else 1.25, sections == 4)
    norm = QkNorm(*torch.rand(2, head_dim, device=device).to(dtype), EPSILON) if normed else None
    rotate_and_write_kv(heads, positions, slots, pages, rotary, norm)
    reference.rotate_and_write_kv(expected_heads, positions, slots, expected, rotary, norm)
    close(heads, expected_heads)
    assert_same_pages(pages, expected)


@pytest.mark.parametrize("normed", [False, True])
def test_queries_alone(device: torch.device, normed: bool) -> None:
    """Of layers that attend to keys and values of others; weights of norms in float32."""
    heads = torch.randn(3, 5, 64, device=device).bfloat16()
    expected, positions = heads.clone(), torch.randint(0, 2**17, (1, 3), device=device)
    norm = QkNorm(*torch.rand(2, 64, device=device), EPSILON) if normed else None
    rotary = Rotary(frequencies(64, 1e6).to(device))
    rotate_and_write_kv(heads, positions, None, None, rotary, norm)
    angle = (positions[0].unsqueeze(1) * rotary.frequencies).unsqueeze(1)
    turned = expected.float() if norm is None else F.rms_norm(expected.float(), (64,), norm.q, EPSILON).bfloat16().float()
    rotate(turned, (angle.cos(), angle.sin(), -angle.sin()))
    close(heads, turned.bfloat16())


def split(pairs: int, sections: int) -> tuple[int, ...]:
    """The ratio of Qwen2.5-VL: a quarter by time, the rest by height and width. 4: that of Qwen3-VL, whose axes take turns."""
    quarter, side = pairs // 4, pairs * 5 // 16
    ratios = {0: (), 1: (pairs,), 2: (quarter, pairs - quarter), 3: (quarter, pairs * 3 // 8, pairs - quarter - pairs * 3 // 8)}
    return {**ratios, 4: (pairs - 2 * side, side, side)}[sections]


def frequencies(head_dim: int, theta: float) -> torch.Tensor:
    """As ``Rope`` has them."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


@pytest.mark.parametrize(
    ("axes", "rotary"),
    [
        ((0,) * 4 + (1,) * 6 + (2,) * 6, Rotary(torch.empty(0), (4, 6, 6))),
        ((0, 1, 2) * 4 + (0, 1, 0, 0), Rotary(torch.empty(0), (7, 5, 4), interleaved=True)),
    ],
    ids=["apart", "in turn"],
)
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_agrees_with_the_language_model_on_the_cpu(
    device: torch.device, dtype: torch.dtype, qk_norm: bool, axes: tuple[int, ...], rotary: Rotary
) -> None:
    torch.manual_seed(0)
    config = LanguageConfig(
        vocab_size=8,
        hidden_size=8,
        rms_norm_eps=EPSILON,
        layers=(
            LayerConfig(
                mixer=AttentionConfig(num_heads=6, num_kv_heads=2, head_dim=32, qk_norm=qk_norm),
                feed_forward=MlpConfig(intermediate_size=8),
            ),
        )
        * 3,
        ropes=(RopeConfig(theta=1e4, axes=axes),),
    )
    layer, lengths = 1, torch.tensor([14, 1, 5])
    tables = torch.tensor([[6, 1, 4, 0], [3, 9, 9, 9], [5, 2, 9, 9]])
    row_bytes = 3 * 4 * 2 * 2 * 32 * dtype.itemsize
    cpu_pool, pool = torch.zeros(7, row_bytes, dtype=torch.uint8), torch.zeros(7, row_bytes, dtype=torch.uint8, device=device)
    heads = torch.randn(3, 10, 32).to(dtype)
    ours = heads.clone().to(device)
    positions = torch.tensor([[40, 0, 999], [9, 0, 3], [70, 0, 12]])
    q_norm, k_norm = torch.rand(2, 32).to(dtype)

    rotation = Rope(config.ropes[0], 32).rotation(positions)
    if qk_norm:
        heads[:, :6] = F.rms_norm(heads[:, :6], (32,), q_norm, EPSILON)
        heads[:, 6:8] = F.rms_norm(heads[:, 6:8], (32,), k_norm, EPSILON)
    rotate(heads[:, :8], rotation)
    attention = CpuAttention(KvPages(config, cpu_pool, 4, dtype))
    attention.begin_decode(lengths, tables)
    attention.write(layer, heads[:, 6:].flatten(1))

    last = lengths - 1
    slots = tables[torch.arange(3), last // 4] * 4 + last % 4
    views = pool.view(dtype).view(7, 3, 4, 2, 2, 32)[:, layer]
    norm = QkNorm(q_norm.to(device), k_norm.to(device), EPSILON) if qk_norm else None
    rotary = rotary._replace(frequencies=frequencies(32, 1e4).to(device))
    rotate_and_write_kv(ours, positions.to(device), slots.to(device), PagedKV(views[:, :, 0], views[:, :, 1]), rotary, norm)
    close(ours.cpu(), heads)
    close(pool.cpu().view(dtype), cpu_pool.view(dtype))
    assert cpu_pool.any()


@pytest.mark.parametrize("quantized", QUANTIZED)
def test_quantization_error_is_at_most_half_a_step(device: torch.device, quantized: torch.dtype) -> None:
    torch.manual_seed(0)
    kv = torch.randn(6, 2, 2, 64, device=device) * torch.logspace(-6, 4, 6, device=device)[:, None, None, None]
    kv[0, 0] = 0.0
    kv[1, 1, 0, :2] = torch.tensor([1e3, -1e3], device=device)
    pages, slots = make_pages(2, 64, quantized, device), torch.arange(6, device=device)
    store(kv, slots, pages)
    for values, scales, original in ((pages.k_pages, pages.k_scales, kv[:, 0]), (pages.v_pages, pages.v_scales, kv[:, 1])):
        assert scales is not None
        stored, steps = values.reshape(-1, 2, 64)[:6].float(), scales.reshape(-1, 2, 1)[:6]
        relative = {torch.int8: 0.0, torch.float8_e4m3fn: 2**-4}[quantized]
        smallest = {torch.int8: 0.5, torch.float8_e4m3fn: 2**-10}[quantized]
        assert (stored.abs() <= QUANTIZED[quantized]).all()
        assert ((stored * steps - original).abs() <= (original.abs() * relative + smallest * steps) * 1.0001).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_what_is_not_finite_is_stored_as_zero(device: torch.device, dtype: torch.dtype) -> None:
    kv = torch.ones(2, 2, 1, 32, device=device).bfloat16()
    kv[0, 0, 0, 0] = float("nan")  # and with it the element that it is turned with
    kv[0, 1, 0, :3] = torch.tensor([float("nan"), float("inf"), float("-inf")], device=device)
    pages = make_pages(1, 32, dtype, device)
    store(kv, torch.tensor([4, 7], device=device), pages)
    largest = 127 if dtype == torch.int8 else 1
    assert not pages.k_pages[1, 1, 0, [0, 16]].any() and (pages.k_pages[1, 1, 0, 1:16] == largest).all()
    assert not pages.v_pages[1, 1, 0, :3].any() and (pages.v_pages[1, 1, 0, 3:] == largest).all()
    assert pages.k_pages[2, 1, 0].all() and pages.v_pages[2, 1, 0].all()


def test_angles_of_long_contexts(device: torch.device) -> None:
    """Rotating (1, 0) gives cosine and sine of the angle."""
    positions = torch.tensor([[0, 1, 2, 3, 5, 25735, 99_999, 131_071, 262_143, 399_999]], device=device)
    heads = torch.zeros(10, 3, 16, device=device)
    heads[:, 0, :8] = 1.0
    pages = PagedKV(*torch.zeros(2, 2, 8, 1, 16, device=device))
    rotary = Rotary(torch.linspace(0.1, 1.0, 8, device=device))
    angle = (positions.T * rotary.frequencies).double()
    rotate_and_write_kv(heads, positions, torch.full((10,), -1, device=device), pages, rotary)
    torch.testing.assert_close(heads[:, 0].double(), torch.cat((angle.cos(), angle.sin()), 1), rtol=0, atol=1e-6)
    assert not pages.k_pages.any() and not pages.v_pages.any()


def test_addresses_beyond_two_to_the_31(tmp_path: Path, device: torch.device) -> None:
    stride = (1 << 28) + 16
    if device.type == "cpu":  # a sparse file: only what is touched takes space
        buffer = torch.from_file(str(tmp_path / "pool"), shared=True, size=10 * stride, dtype=torch.bfloat16)
    else:
        buffer = torch.zeros(10 * stride, dtype=torch.bfloat16, device=device)
    pages = PagedKV(
        buffer.as_strided((9, 2, 1, 16), (stride, 32, 16, 1)), buffer.as_strided((9, 2, 1, 16), (stride, 32, 16, 1), stride // 2)
    )
    kv = torch.randn(2, 2, 1, 16, device=device).bfloat16()
    store(kv, torch.tensor([17, 0], device=device), pages)
    assert torch.equal(torch.stack((pages.k_pages[8, 1], pages.k_pages[0, 0])), kv[:, 0])
    assert torch.equal(torch.stack((pages.v_pages[8, 1], pages.v_pages[0, 0])), kv[:, 1])


def test_no_tokens(device: torch.device) -> None:
    pages, slots = make_pages(2, 32, torch.float32, device), torch.zeros(0, dtype=torch.int64, device=device)
    positions = torch.zeros(3, 0, dtype=torch.int64, device=device)
    rotate_and_write_kv(torch.zeros(0, 6, 32, device=device), positions, slots, pages, Rotary(frequencies(32, 1e4).to(device)))
    assert pages.k_pages.isnan().all()


class Arguments:
    """Good arguments of ``rotate_and_write_kv``, to be spoilt one by one."""

    def __init__(self, device: torch.device) -> None:
        self.heads = torch.zeros(3, 8, 32, device=device)
        self.positions = torch.zeros(3, 3, dtype=torch.int64, device=device)
        self.slots = torch.zeros(3, dtype=torch.int64, device=device)
        self.pages = make_pages(2, 32, torch.float32, device)
        self.int8 = make_pages(2, 32, torch.int8, device)
        self.rotary = Rotary(frequencies(32, 1e4).to(device), (4, 6, 6))
        self.norm = QkNorm(torch.ones(32, device=device), torch.ones(32, device=device), EPSILON)

    def call(self) -> None:
        rotate_and_write_kv(self.heads, self.positions, self.slots, self.pages, self.rotary, self.norm)


BAD: dict[str, Callable[[Arguments], dict[str, object]]] = {
    "heads is torch.int32": lambda a: {"heads": a.heads.int()},
    r"heads has shape \[8, 32\]": lambda a: {"heads": a.heads[0]},
    "head_dim 48": lambda a: {"heads": a.heads.repeat(1, 1, 2)[..., :48]},
    "are 64 apart, not 32": lambda a: {"heads": a.heads.repeat(1, 1, 2)[..., :32]},
    "heads has stride 2 in its last axis": lambda a: {"heads": a.heads.repeat(1, 1, 2)[..., ::2]},
    "5 heads of q are no multiple of 2": lambda a: {"heads": a.heads[:, :5]},
    "2 heads are fewer": lambda a: {"heads": a.heads[:, :2]},
    "v_pages has shape": lambda a: {"pages": PagedKV(a.pages.k_pages, a.pages.v_pages[..., :16])},
    "k_pages has stride 198 in axis 0": lambda a: {"pages": PagedKV(*(F.pad(x, (0, 1))[..., :32] for x in a.pages[:2]))},
    "k_scales and v_scales is missing": lambda a: {"pages": PagedKV(a.int8.k_pages, a.int8.v_pages, a.int8.k_scales)},
    "k_pages is torch.int8, not one of torch.float32": lambda a: {"pages": PagedKV(a.int8.k_pages, a.int8.v_pages)},
    "k_pages is torch.float32, not one of torch.int8": lambda a: {"pages": PagedKV(*a.pages[:2], *a.int8[2:])},
    "slots is torch.int32": lambda a: {"slots": a.slots.int()},
    r"slots has shape \[2\]": lambda a: {"slots": a.slots[:2]},
    "slots is on meta": lambda a: {"slots": a.slots.to("meta")},
    "slots has stride 2": lambda a: {"slots": a.slots.repeat(2)[::2]},
    r"section \(4, 6, 7\)": lambda a: {"rotary": a.rotary._replace(section=(4, 6, 7))},
    r"section \(4, 4, 4, 4\)": lambda a: {"rotary": a.rotary._replace(section=(4, 4, 4, 4))},
    r"axes of \(4, 6, 6\) pairs cannot take turns": lambda a: {"rotary": a.rotary._replace(interleaved=True)},
    r"axes of \(8, 8\) pairs cannot take turns": lambda a: {"rotary": a.rotary._replace(section=(8, 8), interleaved=True)},
    "frequencies is torch.float16": lambda a: {"rotary": a.rotary._replace(frequencies=a.rotary.frequencies.half())},
    "positions has 2 axes, section 3": lambda a: {"positions": a.positions[:2]},
    r"positions has shape \[3, 2\]": lambda a: {"positions": a.positions[:, :2]},
    "positions is torch.int32": lambda a: {"positions": a.positions.int()},
    "positions has stride 3": lambda a: {"positions": a.positions.T},
    "positions is on meta": lambda a: {"positions": a.positions.to("meta")},
    "q norm is torch.float16": lambda a: {"norm": a.norm._replace(q=a.norm.q.half())},
    r"k norm has shape \[16\]": lambda a: {"norm": a.norm._replace(k=a.norm.k[:16])},
    "k norm is on meta": lambda a: {"norm": a.norm._replace(k=a.norm.k.to("meta"))},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(device: torch.device, message: str) -> None:
    arguments = Arguments(device)
    for name, value in BAD[message](arguments).items():
        setattr(arguments, name, value)
    with pytest.raises(ValueError, match=message):
        arguments.call()
