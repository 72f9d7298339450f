"""The towers' geometry and attention beside transformers'."""

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from transformers import vision_utils

from mmrt.models.families.qwen2_5.vision_geometry import geometry
from mmrt.models.media_config import VisionConfig
from mmrt.models.towers.sequences import Sequences, attend

CPU = torch.device("cpu")
CONFIG = VisionConfig(
    depth=1, hidden_size=32, intermediate_size=32, num_heads=2, in_channels=3, patch_size=14, temporal_patch_size=2, merge_size=2,
    window_size=112, out_hidden_size=32, full_attention_blocks=(),
)  # fmt: skip
GRIDS = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 11), st.integers(1, 11)), min_size=1, max_size=4)


@given(GRIDS)
def test_windows_frames_and_positions_are_transformers(tokens: list[tuple[int, int, int]]) -> None:
    """The same windows of the same patches. Their order within a frame is ours."""
    grids = [(t, 2 * h, 2 * w) for t, h, w in tokens]
    ours = geometry(grids, CONFIG, CPU)
    thw = torch.tensor(grids)
    their_order, their_borders = vision_utils.get_vision_window_index(thw, 2, 112, 14)
    assert windows(ours.token_order, ours.windows.borders) == windows(their_order, their_borders)
    assert torch.equal(ours.frames.borders, vision_utils.get_vision_cu_seqlens(thw))
    positions = vision_utils.get_vision_position_ids(thw, 2).view(-1, 4, 2)
    assert torch.equal(ours.positions.view(-1, 4, 2), positions[ours.token_order])
    begin = 0
    for t, h, w in tokens:  # a frame's tokens stay together: full attention is within frames
        for _ in range(t):
            assert sorted(ours.token_order[begin : begin + h * w].tolist()) == list(range(begin, begin + h * w))
            begin += h * w


def windows(order: torch.Tensor, borders: torch.Tensor) -> set[tuple[int, ...]]:
    """Tokens of each window, in its order."""
    return {tuple(part.tolist()) for part in order.split((borders.diff() // 4).tolist())}


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_rows_attend_to_their_sequence_only(lengths: list[int]) -> None:
    sequences = Sequences.of(np.array(lengths), CPU)
    assert [length for count, length in sequences.runs for _ in range(count)] == lengths
    assert sequences.longest == max(lengths)
    assert all(one[1] != other[1] for one, other in zip(sequences.runs, sequences.runs[1:], strict=False)), "as few as possible"
    generator = torch.Generator().manual_seed(sum(lengths))
    fused = torch.randn(sum(lengths), 6, 8, generator=generator)
    q, k, v = fused.chunk(3, 1)
    parts = zip(*(tensor.transpose(0, 1).split(lengths, 1) for tensor in (q, k, v)), strict=True)
    expected = torch.cat([F.scaled_dot_product_attention(*part) for part in parts], 1).transpose(0, 1)
    torch.testing.assert_close(attend(q, k, v, sequences), expected)
