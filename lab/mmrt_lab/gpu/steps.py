"""Section ``steps``: one layer, full decode steps and a prefill chunk of the 3B and 7B shapes."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from mmrt.triton_kernels.kv_write import reference as write_reference
from mmrt.triton_kernels.paged_decode import paged_decode_reference, plan_decode
from mmrt.triton_kernels.paged_kv import PagedKV

from .case import Check, Size, Timing, missing_memory, num_multiprocessors, require_close
from .counts import SHAPE_3B, SHAPE_7B, Shape
from .material import copy_of, last_slots
from .results import Row
from .stack import EPSILON, PAGE_TOKENS, DecodeStep, PrefillChunk, Stack
from .timing import Clock, Timed, capture

_TINY = Shape(
    name="tiny",
    hidden=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate=32,
    vocabulary=40,
    section=(2, 3, 3),
)
_SMALL = Shape(
    name="small",
    hidden=1024,
    num_layers=3,
    num_heads=14,
    num_kv_heads=2,
    head_dim=128,
    intermediate=2816,
    vocabulary=1000,
    section=(16, 24, 24),
)
_LAYERS_AT_ONCE = 4  # of one layer's timing: their weights do not fit the L2 cache together
_CHUNK = 8192


def checks(device: torch.device, size: Size) -> Iterator[Check]:
    """A step against plain torch in float32; prefill and decode agree; a captured graph follows its inputs."""
    shape, lengths = (_TINY, [20, 1]) if size == "tiny" else (_SMALL, [700, 1, 33])
    yield Check("decode step in fp32", partial(_check_step, device, shape, lengths))
    yield Check("last token of a prefill in fp32", partial(_check_prefill, device, shape, lengths[0]))
    if device.type == "cuda":
        yield Check("replay of a graph with other lengths", partial(_check_replay, device, shape))


def timings(quick: bool) -> Iterator[Timing]:
    """B = 1 after 8k tokens, B = 64 after 2k each, and a chunk of 8k."""
    for shape in (SHAPE_7B,) if quick else (SHAPE_3B, SHAPE_7B):
        for num_rows, num_tokens, target in ((1, 8192, "step, one row"), (64, 2048, "step, 64 rows")):
            target = target if shape is SHAPE_7B else ""
            yield Timing(f"{shape.name} decode, {num_rows} x {num_tokens}", partial(_decode, shape, num_rows, num_tokens, target))
        target = "prefill" if shape is SHAPE_7B else ""
        yield Timing(f"{shape.name} prefill, chunk of {_CHUNK}", partial(_prefill, shape, target))


def _check_step(device: torch.device, shape: Shape, lengths: Sequence[int]) -> float:
    stack = Stack.make(shape, lengths, torch.float32, device)
    step = DecodeStep.make(stack, num_multiprocessors(device))
    expected = _plain_step(step, [copy_of(layer.kv) for layer in stack.layers])
    return require_close("logits", step.forward(), expected, atol=2e-4, rtol=1e-3)


def _plain_step(step: DecodeStep, pages: Sequence[PagedKV]) -> Tensor:
    """``DecodeStep.forward`` in plain torch, over pages of its own."""
    stack, shape = step.stack, step.stack.shape
    hidden = F.embedding(step.ids, stack.embeddings)
    for layer, kv in zip(stack.layers, pages, strict=True):
        normed = F.rms_norm(hidden, (shape.hidden,), layer.input_norm, EPSILON)
        heads = F.linear(normed, layer.qkv, layer.qkv_bias).view(-1, shape.num_fused_heads, shape.head_dim)
        write_reference.rotate_and_write_kv(heads, step.positions, step.slots, kv, stack.rotary)
        attended = paged_decode_reference(heads[:, : shape.num_heads], kv, stack.table, stack.lengths)
        hidden = hidden + F.linear(attended.flatten(1), layer.o)
        gate, up = F.linear(F.rms_norm(hidden, (shape.hidden,), layer.post_norm, EPSILON), layer.gate_up).chunk(2, -1)
        hidden = hidden + F.linear(F.silu(gate) * up, layer.down)
    return F.linear(F.rms_norm(hidden, (shape.hidden,), stack.norm, EPSILON), stack.head)


def _check_prefill(device: torch.device, shape: Shape, length: int) -> float:
    """A prefill of a whole prompt leaves at its end what a decode step over the KV of all tokens before makes."""
    stack = Stack.make(shape, [length], torch.float32, device)
    chunk = PrefillChunk.make(stack, 0, length)
    hidden = chunk.forward()[-1:]
    step = DecodeStep.make(stack, num_multiprocessors(device))
    step.ids.copy_(chunk.ids[-1:])
    return require_close("logits", F.linear(hidden, stack.head), step.forward(), atol=2e-4, rtol=1e-3)


def _check_replay(device: torch.device, shape: Shape) -> float:
    """A replay against the same step outside the graph, after one row became shorter, one empty, and one of another length."""
    stack = Stack.make(shape, [500, 64, 33], torch.bfloat16, device)
    step = DecodeStep.make(stack, num_multiprocessors(device))
    made: list[Tensor] = []
    graph = capture([lambda: made.append(step.forward())])
    stack.lengths.copy_(torch.tensor([123, 0, 32], dtype=torch.int32))
    step.slots.copy_(last_slots(stack.table, stack.lengths, PAGE_TOKENS))
    step.positions.copy_((stack.lengths.long() - 1).clamp(min=0).expand(3, -1))
    step.ids.copy_(step.ids.flip(0))
    expected = step.forward()
    graph.replay()
    torch.cuda.synchronize()
    return require_close("logits", made[-1][::2], expected[::2], atol=5e-2)


def _decode(shape: Shape, num_rows: int, num_tokens: int, target: str, clock: Clock) -> list[Row]:
    lengths = [num_tokens] * num_rows
    need = shape.step_bytes(lengths) + 2 * shape.hidden * shape.vocabulary
    if (missing := missing_memory(need)) is not None:
        return [missing]
    stack = Stack.make(shape, lengths, torch.bfloat16, clock.device)
    step = DecodeStep.make(stack, num_multiprocessors(clock.device))
    plan_decode(stack.lengths, step.workspace)
    residual = torch.randn(num_rows, shape.hidden, dtype=torch.bfloat16, device=clock.device)
    few = stack.layers[:_LAYERS_AT_ONCE]
    layer = clock.time([partial(step.run_layers, residual, few)])
    one_layer = Timed(layer.time_us / len(few), layer.first_s)
    num_bytes, shown = shape.step_bytes(lengths), f"{num_rows} x {num_tokens}"
    note = f"in a graph; {num_bytes / 1e9:.1f} GB of weights and KV; without sampling"
    eager_note = "the host's time where that is longer, all but 0.1 ms of it"
    eager = clock.time([step.forward], in_graph=False)
    return [
        one_layer.moved(shape.layer_bytes() + shape.kv_bytes(sum(lengths)), case=f"{shape.name} decode, one layer, {shown}"),
        clock.time([step.forward]).moved(num_bytes, target=target, note=note),
        eager.moved(num_bytes, case=f"{shape.name} decode, {shown}, not in a graph", note=eager_note),
    ]


def _prefill(shape: Shape, target: str, clock: Clock) -> list[Row]:
    need = shape.step_bytes([_CHUNK]) + 2 * shape.hidden * shape.vocabulary + _CHUNK * 12 * shape.intermediate
    if (missing := missing_memory(need)) is not None:
        return [missing]
    stack = Stack.make(shape, [_CHUNK], torch.bfloat16, clock.device)
    chunk = PrefillChunk.make(stack, 0, _CHUNK)
    timed = clock.time([chunk.forward], in_graph=False)
    return [timed.computed(shape.prefill_flops([(0, _CHUNK)]), target=target, note="not in a graph")]
