"""Masks of the vocabulary against selecting bit by bit, beside guidance, rules and penalties, and on the device's way."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest
import torch

from mmrt.models.grammar.vocabulary import bits_of
from mmrt.models.sampling import mask_lists
from mmrt.models.sampling.interface import Masks, Pairs, SamplingRows
from mmrt.models.sampling.masks import FORBIDDEN, mask, mask_companions
from mmrt.models.sampling.penalties import History
from mmrt.models.sampling.rules import LogitRules
from mmrt.models.sampling.sampler import CpuSampler, combine_guidance, sample
from mmrt.tests.models.test_penalties import greedy, penalties
from mmrt.tests.models.test_rules import VOCABULARY, noise, rules


def masks(**rows: list[int]) -> Masks:
    """``r3=[5, 6]``: row 3 may draw tokens 5 and 6."""
    bits = [bits_of(ids, VOCABULARY) for ids in rows.values()]
    return Masks(np.array([int(name[1:]) for name in rows], np.int64), np.stack(bits))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [[(0, 60), (1, 40), (3, 1)], [(row, 5 + row) for row in range(5)]], ids=["some rows", "all rows"])
def test_what_a_mask_forbids_is_forbidden_and_nothing_else_changes(dtype: torch.dtype, sizes: list[tuple[int, int]]) -> None:
    generator = np.random.default_rng(0)
    logits = noise(5).to(dtype)
    logits[1, 7] = -torch.inf
    chosen = {f"r{row}": sorted(generator.choice(VOCABULARY, size, replace=False).tolist()) for row, size in sizes}
    expected = logits.clone()
    for name, ids in chosen.items():
        row = expected[int(name[1:])]
        row[[id for id in range(VOCABULARY) if id not in ids]] = FORBIDDEN
    expected[1, 7] = -torch.inf
    mask(logits, masks(**chosen))
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)


def test_guidance_over_both_masked_members_is_guidance_before_the_mask() -> None:
    """The device masks before its kernel guides; the CPU after."""
    logits, scale = noise(4), torch.tensor([2.5, 0.0])
    pairs, asked = Pairs(np.array([0, 1]), np.array([2, 3]), scale.numpy()), masks(r0=[3, 4], r1=[5, 59])
    after = combine_guidance(logits[:2], logits[2:], scale)
    mask(after, asked)
    before = logits.clone()
    mask(before, mask_companions(asked, pairs))
    combined = combine_guidance(before[:2], before[2:], scale)
    assert torch.equal(combined.argmax(1), after.argmax(1))
    torch.testing.assert_close(combined[0, 3:5], after[0, 3:5])
    assert (combined[0, torch.arange(VOCABULARY) > 4] < -1e37).all()


def test_a_mask_wins_over_rules_and_penalties() -> None:
    """A token that everything else forbids is drawn if the mask allows no other; a neighbour without a mask is left alone."""
    logits = noise(2)
    logits[:, 9] = 50.0
    sampler = CpuSampler(VOCABULARY)
    sampler.remember([History(np.array([8]), np.array([8, 8]))])
    changes = LogitRules([rules(0, bad_words=[[8]], bias=[(8, -100.0)], ends=[8], min_tokens=5)]).changes()
    asked = penalties([0], repetition=1.9, frequency=2.0)
    assert sampler.sample(logits, greedy(2), None, asked, changes, masks(r0=[8])).tolist() == [8, 9]


SIZES = [1, 5, 900, 1024, 1025, 2000, 3500, 3990, 4001]  # allowed tokens: few, neither, all but few, all
MANY = 4001


def random_masks(generator: np.random.Generator) -> Masks:
    """One mask of each size, for rows that are not the first ones."""
    bits = [bits_of(generator.choice(MANY, size, replace=False).tolist(), MANY) for size in SIZES]
    return Masks(np.arange(2, 2 + len(SIZES)), np.stack(bits))


def drawing(number: int, index: int) -> SamplingRows:
    """Greedy rows, rows that draw, and rows with filters, in turn."""
    turn = np.arange(number) % 4
    return SamplingRows(
        temperature=np.where(turn == 0, 0, 0.9).astype(np.float32),
        top_k=np.where(turn == 1, 7, 0),
        top_p=np.where(turn == 2, 0.8, 1).astype(np.float32),
        min_p=np.where(turn == 3, 0.02, 0).astype(np.float32),
        seed=np.arange(number, dtype=np.uint64),
        index=np.full(number, index),
    )


def test_lists_of_tokens_draw_what_masks_draw() -> None:
    """Step after step: with the masks of the step before, with others, and with those of two rows exchanged."""
    generator, noises = np.random.default_rng(1), torch.Generator().manual_seed(1)
    sampler, number = CpuSampler(MANY), len(SIZES) + 3
    first = random_masks(generator)
    turned = Masks(first.row, first.bits[::-1].copy())
    for index, asked in enumerate([first, first, random_masks(generator), turned, turned, first] * 4):
        logits = 3 * torch.randn(number, MANY, generator=noises)
        masked = logits.clone()
        mask(masked, asked)
        expected = sample(masked, drawing(number, index))
        assert sampler.sample(logits, drawing(number, index), masks=asked).tolist() == expected.tolist()


def test_lists_of_many_tokens_draw_what_masks_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both widths, with a vocabulary that is large beside the second."""
    monkeypatch.setattr(mask_lists, "FEW", 8)
    monkeypatch.setattr(mask_lists, "MORE", 1000)
    test_lists_of_tokens_draw_what_masks_draw()


def test_a_masked_draw_does_not_depend_on_its_neighbours() -> None:
    asked = random_masks(np.random.default_rng(2))
    logits = torch.randn(len(SIZES) + 2, MANY, generator=torch.Generator().manual_seed(2))
    rows = drawing(len(logits), 0)
    together = CpuSampler(MANY).sample(logits.clone(), rows, masks=asked)
    for number, row in enumerate(asked.row.tolist()):
        alone = Masks(np.array([0]), asked.bits[[number]])
        assert CpuSampler(MANY).sample(logits[[row]], rows.of(np.array([row])), masks=alone).item() == together[row]


class Counted(Masks):
    """Constraints that note whose masks are asked for."""

    asked: ClassVar[list[int]] = []

    def masks(self, numbers: Sequence[int] | None = None) -> Masks:
        self.asked.extend(range(len(self.row)) if numbers is None else numbers)
        return super().masks(numbers)


def test_a_greedy_row_needs_its_mask_only_where_its_largest_logit_is_forbidden() -> None:
    """Rows 0 and 4 are greedy; row 1, which draws, needs its mask."""
    logits, given = noise(5), masks(r0=[3, 4], r1=[7, 8], r4=[9])
    logits[0, 3], logits[4, 5] = 50.0, 50.0
    asked = Counted(given.row, given.bits)
    tokens = CpuSampler(VOCABULARY).sample(logits, drawing(5, 0), masks=asked).tolist()
    assert tokens[0] == 3 and tokens[1] in (7, 8) and tokens[4] == 9
    assert asked.asked == [1, 2]


def test_the_last_masks_are_forgotten_with_their_rows() -> None:
    sampler = CpuSampler(MANY)
    asked = random_masks(np.random.default_rng(3))
    sampler.sample(torch.randn(len(SIZES) + 2, MANY), drawing(len(SIZES) + 2, 0), masks=asked)
    assert sampler._masks._known
    sampler.remember([])
    assert not sampler._masks._known
