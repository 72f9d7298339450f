"""What decode graphs are made of, without a device: batch sizes, and a step in its fixed place."""

import pytest
import torch

from mmrt.models.lm.decode_graphs import StepInputs, bucket_of, buckets


def test_every_batch_fits_its_graph_and_few_graphs_do() -> None:
    sizes = [bucket_of(rows) for rows in range(1, 1025)]
    assert all(size >= rows for rows, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes) and [bucket_of(size) for size in sizes] == sizes
    assert len(set(sizes)) == 23
    assert all(size <= rows + max(7, rows / 2) for rows, size in enumerate(sizes, 1)), "padding costs less than half of a step"
    with pytest.raises(ValueError, match="1025 rows is larger than 1024"):
        bucket_of(1025)


def test_what_is_captured_before_serving_is_every_size_that_there_can_be() -> None:
    assert buckets(1) == [1]
    assert buckets(6) == [1, 2, 4, 8]
    assert buckets(128) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 96, 128]
    assert all(bucket_of(rows) in buckets(70) for rows in range(1, 71)) and buckets(70)[-1] == bucket_of(70)


def test_a_step_leaves_nothing_of_the_one_before() -> None:
    inputs = StepInputs.allocate(4, 6, torch.device("cpu"))
    before = inputs.arguments()
    inputs.fill(torch.arange(3), torch.arange(9).view(3, 3), torch.tensor([4, 5, 6]), torch.full((3, 5), 7))
    inputs.fill(torch.tensor([8]), torch.tensor([1, 2, 3]).view(3, 1), torch.tensor([9]), torch.tensor([[2, 4]]))
    ids, positions, lengths, tables = inputs.arguments()
    assert ids.tolist() == [8, 0, 0, 0] and lengths.tolist() == [9, 0, 0, 0]
    assert positions.T.tolist() == [[1, 2, 3], [0] * 3, [0] * 3, [0] * 3]
    assert tables[0, :2].tolist() == [2, 4] and tables.dtype == torch.int32
    inputs.tables.fill_(-1)
    for page, sent in ((4, [-1, -1]), (5, [2, 5]), (4, [2, 4])):
        inputs.fill(torch.tensor([8]), torch.tensor([1, 2, 3]).view(3, 1), torch.tensor([9]), torch.tensor([[2, page]]))
        assert inputs.tables[0, :2].tolist() == sent, "only what is new is sent"
    assert [now.data_ptr() for now in inputs.arguments()] == [then.data_ptr() for then in before], "a graph has fixed addresses"
