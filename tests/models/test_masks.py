"""Masks of the vocabulary against selecting bit by bit, beside guidance, rules and penalties, and on the device's way."""

import numpy as np
import pytest
import torch

from mmrt.models.grammar.vocabulary import bits_of
from mmrt.models.sampling.interface import Masks, Pairs
from mmrt.models.sampling.masks import FORBIDDEN, mask, mask_companions
from mmrt.models.sampling.penalties import History
from mmrt.models.sampling.rules import LogitRules
from mmrt.models.sampling.sampler import CpuSampler, combine_guidance
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
