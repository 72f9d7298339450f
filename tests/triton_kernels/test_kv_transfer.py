from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrt.triton_kernels.kv_transfer import LayerBuffer, gather_layer, reference, scatter_layer, transfer_layout
from mmrt.triton_kernels.kv_transfer.buffer import Packing
from mmrt.triton_kernels.paged_kv import PagedKV

NUM_PAGES = 9
PACKINGS: list[Packing] = ["none", "int8", "int4"]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
QUANTIZED = [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]


def make_pages(page_tokens: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> PagedKV:
    """Layer 1 of a pool laid out as the language model's: [page, layer, token, K or V, head, element]."""
    pool = torch.randn(NUM_PAGES, 2, page_tokens, 2, num_kv_heads, head_dim, device=device) * 50
    k, v = pool.to(dtype)[:, 1].unbind(2)
    if dtype in FLOATS:
        return PagedKV(k, v)
    return PagedKV(k, v, *torch.rand(2, NUM_PAGES, page_tokens, num_kv_heads, device=device))


def cloned(pages: PagedKV) -> PagedKV:
    return PagedKV(*(None if tensor is None else tensor.clone() for tensor in pages))


def poisoned_buffer(pages: PagedKV, num_tokens: int, packing: Packing, layer: int) -> LayerBuffer:
    _, _, num_kv_heads, head_dim = pages.k_pages.shape
    layout = transfer_layout(3, num_tokens, num_kv_heads, head_dim, pages.k_pages.dtype, packing)
    return layout.layer(torch.full((layout.num_bytes,), 0xFF, dtype=torch.uint8, device=pages.k_pages.device), layer)


def bits(tensor: torch.Tensor | None) -> torch.Tensor:
    """What cannot be compared otherwise: NaN, and 8-bit floats."""
    assert tensor is not None
    return tensor.contiguous().view(torch.uint8)


def whole(values: torch.Tensor) -> torch.Tensor:
    """Packed values as integers."""
    if values.dtype == torch.int8:
        return values.int()
    return torch.cat([((values.int() >> shift & 15) ^ 8) - 8 for shift in (0, 4)], -1)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    num_tokens=st.integers(0, 40),
    page_tokens=st.sampled_from([5, 8, 16]),
    num_kv_heads=st.integers(1, 5),
    head_dim=st.sampled_from([16, 64, 128]),
    kind=st.sampled_from([(dtype, packing) for packing in PACKINGS for dtype in FLOATS] + [(dtype, "none") for dtype in QUANTIZED]),
)
def test_agrees_with_the_reference_both_ways(
    device: torch.device, num_tokens: int, page_tokens: int, num_kv_heads: int, head_dim: int, kind: tuple[torch.dtype, Packing]
) -> None:
    torch.manual_seed(num_tokens)
    dtype, packing = kind
    pages = make_pages(page_tokens, num_kv_heads, head_dim, dtype, device)
    order = torch.randperm(NUM_PAGES, dtype=torch.int32).to(device)
    buffer, expected = poisoned_buffer(pages, num_tokens, packing, 1), poisoned_buffer(pages, num_tokens, packing, 1)
    gather_layer(pages, order, buffer)
    reference.gather_layer(pages, order, expected)
    if packing == "none":
        assert torch.equal(bits(buffer.values), bits(expected.values))
    else:  # ties may fall either way
        assert ((whole(buffer.values) - whole(expected.values)).abs() <= 1).all()
    if buffer.scales is not None:
        torch.testing.assert_close(buffer.scales, expected.scales, rtol=1e-6, atol=0)

    target, order = make_pages(page_tokens, num_kv_heads, head_dim, dtype, device), order.flip(0).contiguous()
    expected_target = cloned(target)
    scatter_layer(buffer, order, target)
    reference.scatter_layer(buffer, order, expected_target)
    for got, want in zip(target, expected_target, strict=True):
        assert got is want is None or torch.equal(bits(got), bits(want))


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_comes_back_is_within_half_a_step(device: torch.device, dtype: torch.dtype, packing: Packing) -> None:
    torch.manual_seed(0)
    source, target = make_pages(8, 2, 64, dtype, device), make_pages(8, 2, 64, dtype, device)
    source.k_pages[4, 2] = 0.0
    before = cloned(target)
    here, there = torch.tensor([7, 4, 0], dtype=torch.int32, device=device), torch.tensor([2, 8, 5], dtype=torch.int32, device=device)
    buffer = poisoned_buffer(source, 19, packing, 2)
    gather_layer(source, here, buffer)
    scatter_layer(buffer, there, target)
    largest = {"none": float("inf"), "int8": 127.0, "int4": 7.0}[packing]
    rounding = 2**-8 if dtype == torch.bfloat16 else 1e-6
    for got, original, old in ((target.k_pages, source.k_pages, before.k_pages), (target.v_pages, source.v_pages, before.v_pages)):
        sent, arrived = original[here.long()].flatten(0, 1)[:19].float(), got[there.long()].flatten(0, 1)
        step = sent.abs().amax(-1, keepdim=True) / largest
        error = (arrived[:19].float() - sent).abs()
        assert (error <= step * 0.5001 + (arrived[:19].float().abs() * rounding if packing != "none" else 0)).all()
        assert torch.equal(arrived[19:], old[there.long()].flatten(0, 1)[19:])
        assert torch.equal(got[[0, 1, 3, 4, 6, 7]], old[[0, 1, 3, 4, 6, 7]])


def test_int4_is_two_values_in_a_byte(device: torch.device) -> None:
    pages = PagedKV(*torch.zeros(2, 1, 1, 1, 16, device=device))
    pages.k_pages[0, 0, 0] = torch.tensor([7.0, -7, 3, -1, 0, 0, 0, 0, -7, 7, -2, 0, 0, 0, 0, 0], device=device)
    buffer = poisoned_buffer(pages, 1, "int4", 0)
    gather_layer(pages, torch.zeros(1, dtype=torch.int32, device=device), buffer)
    assert buffer.values[0, 0, 0].tolist() == [0x97, 0x79, 0xE3, 0x0F, 0, 0, 0, 0]
    assert buffer.scales is not None and buffer.scales[0, 0, 0] == 1.0


@pytest.mark.parametrize(("packing", "num_bytes"), [("none", 2048), ("int8", 1024 + 256), ("int4", 512 + 256)])
def test_layers_lie_one_after_another(device: torch.device, packing: Packing, num_bytes: int) -> None:
    layout = transfer_layout(3, 2, 2, 128, torch.bfloat16, packing)
    assert layout.layer_bytes == num_bytes and layout.num_bytes == 3 * num_bytes
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
    for layer in range(3):
        values, scales = layout.layer(buffer, layer)
        bits(values).fill_(layer) if values.is_contiguous() and values.dtype == torch.uint8 else values.fill_(layer)
        if scales is not None:
            assert scales.data_ptr() == values.data_ptr() + layout.values_bytes
            scales.fill_(layer)
    for layer in range(3):
        assert all((tensor == layer).all() for tensor in layout.layer(buffer, layer) if tensor is not None)


def test_bad_layouts(device: torch.device) -> None:
    layout = transfer_layout(3, 2, 2, 128, torch.bfloat16, "none")
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
    for bad in (buffer[:-1], buffer.int(), buffer.repeat(2)[::2], buffer.view(2, -1)):
        with pytest.raises(ValueError, match=f"at least {layout.num_bytes}"):
            layout.layer(bad, 0)
    for layer in (-1, 3):
        with pytest.raises(ValueError, match=f"layer {layer} outside a buffer of 3"):
            layout.layer(buffer, layer)
    with pytest.raises(ValueError, match="quantized already"):
        transfer_layout(3, 2, 2, 128, torch.int8, "int4")


def test_addresses_beyond_two_to_the_31(tmp_path: Path, device: torch.device) -> None:
    stride = (1 << 28) + 16
    if device.type == "cpu":  # a sparse file: only what is touched takes space
        pool = torch.from_file(str(tmp_path / "pool"), shared=True, size=10 * stride, dtype=torch.bfloat16)
    else:
        pool = torch.zeros(10 * stride, dtype=torch.bfloat16, device=device)
    k, v = (pool.as_strided((9, 2, 1, 16), (stride, 32, 16, 1), side * stride // 2) for side in range(2))
    pages, order = PagedKV(k, v), torch.tensor([8, 0], dtype=torch.int32, device=device)
    buffer, back = poisoned_buffer(pages, 3, "none", 0), poisoned_buffer(pages, 3, "none", 0)
    torch.manual_seed(0)
    buffer.values.copy_(torch.randn(3, 2, 1, 16))
    scatter_layer(buffer, order, pages)
    assert torch.equal(torch.stack((k[8, 0], k[8, 1], k[0, 0])), buffer.values[:, 0])
    assert torch.equal(torch.stack((v[8, 0], v[8, 1], v[0, 0])), buffer.values[:, 1])
    gather_layer(pages, order, back)
    assert torch.equal(back.values, buffer.values)


class Arguments:
    """Good arguments of ``gather_layer`` and ``scatter_layer``, to be spoilt one by one."""

    def __init__(self, device: torch.device) -> None:
        self.pages = make_pages(4, 2, 32, torch.float32, device)
        self.int8 = make_pages(4, 2, 32, torch.int8, device)
        self.page_ids = torch.zeros(2, dtype=torch.int32, device=device)
        self.plain = poisoned_buffer(self.pages, 7, "none", 0)
        self.buffer = poisoned_buffer(self.pages, 7, "int8", 0)


BAD: dict[str, Callable[[Arguments], dict[str, object]]] = {
    "v_pages has shape": lambda a: {"pages": PagedKV(a.pages.k_pages, a.pages.v_pages[:, :3])},
    "k_pages has shape": lambda a: {"pages": PagedKV(a.pages.k_pages[0], a.pages.v_pages[0])},
    "head_dim 24": lambda a: {"pages": PagedKV(a.pages.k_pages[..., :24], a.pages.v_pages[..., :24])},
    "k_pages has stride 264 in axis 0": lambda a: {"pages": PagedKV(*(F.pad(x, (0, 1))[..., :32] for x in a.pages[:2]))},
    "k_scales and v_scales is missing": lambda a: {"pages": PagedKV(a.int8.k_pages, a.int8.v_pages, a.int8.k_scales)},
    "k_pages is torch.int8, not one of torch.bfloat16": lambda a: {"pages": PagedKV(a.int8.k_pages, a.int8.v_pages)},
    "k_pages is torch.float32, not one of torch.int8": lambda a: {"pages": PagedKV(*a.pages[:2], *a.int8[2:])},
    "values is torch.int16, not one of torch.float32": lambda a: {"buffer": LayerBuffer(a.buffer.values.short(), a.buffer.scales)},
    "values is torch.uint8, not one of torch.int8": lambda a: {
        "pages": a.int8,
        "buffer": LayerBuffer(a.buffer.values.byte(), a.buffer.scales),
    },
    r"values has shape \[7, 1, 2, 32\]": lambda a: {"buffer": LayerBuffer(a.buffer.values[:, :1], a.buffer.scales)},
    r"not \[any, 2, 2, 16\]": lambda a: {"buffer": LayerBuffer(a.buffer.values.byte(), a.buffer.scales)},
    "values of torch.int8 from pages of torch.float32 come with scales": lambda a: {"buffer": LayerBuffer(a.buffer.values, None)},
    "come without scales": lambda a: {"buffer": LayerBuffer(a.plain.values, a.buffer.scales)},
    r"scales has shape \[6, 2, 2\]": lambda a: {"buffer": LayerBuffer(a.buffer.values, a.plain.values[:6, :, :, 0].contiguous())},
    "values has strides": lambda a: {"buffer": LayerBuffer(a.buffer.values.repeat(1, 1, 1, 2)[..., :32], a.buffer.scales)},
    "page_ids is torch.int64": lambda a: {"page_ids": a.page_ids.long()},
    "7 tokens are more than 1 pages of 4": lambda a: {"page_ids": a.page_ids[:1]},
    "page_ids is on meta": lambda a: {"page_ids": a.page_ids.to("meta")},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(device: torch.device, message: str) -> None:
    arguments = Arguments(device)
    for name, value in BAD[message](arguments).items():
        setattr(arguments, name, value)
    with pytest.raises(ValueError, match=message):
        gather_layer(arguments.pages, arguments.page_ids, arguments.buffer)
    with pytest.raises(ValueError, match=message):
        scatter_layer(arguments.buffer, arguments.page_ids, arguments.pages)
