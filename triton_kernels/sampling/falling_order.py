"""Scores in falling order, without a sort: places in it are found by counting.

Every filter keeps a prefix of the falling order, and the draw is a place in it; so all of them ask one question, ``find_threshold``.
A score measures 1, or its mass: e^(score - top) as an integer. Sums of integers do not depend on their order, so neither do
cut-offs and draws depend on tile sizes or the number of programs.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
MASS_ONE = tl.constexpr(2.0**40)  # of the largest score; 2**18 of them are below 2**63
_SIGN = tl.constexpr(-(2**31))
_DIGIT_BITS = tl.constexpr(4)
_DIGITS = tl.constexpr(16)
_KEY_BITS = tl.constexpr(32)


@triton.jit
def weigh(score, top):
    """e^(score - top), float32: 1 for the largest score, 0 for -inf."""
    return tl.exp2((score - top) * LOG2E)


@triton.jit
def to_mass(weight):
    """A weight in [0, 1] as an integer, to 2**-40."""
    return (weight * MASS_ONE).to(tl.int64)


@triton.jit
def to_key(score):
    """Bits of a float32 as a uint32 that orders as the number does; no NaN, no -0."""
    bits = score.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | _SIGN)).to(tl.uint32, bitcast=True)


@triton.jit
def from_key(key):
    bits = key.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ _SIGN, bits ^ -1).to(tl.float32, bitcast=True)


@triton.jit
def find_threshold(values_ptr, num_values, top, goal, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key from which upwards the values measure ``goal`` or more (int64, from 1 to the measure of all), and the measure of
    those strictly above it. Eight passes, one for each hexadecimal digit of the key."""
    digit = tl.arange(0, _DIGITS)
    threshold = tl.cast(0, tl.uint32)
    above = tl.cast(0, tl.int64)
    for turn in range(_KEY_BITS // _DIGIT_BITS):
        shift = _KEY_BITS - _DIGIT_BITS * (turn + 1)
        pivots = threshold + (digit << shift).to(tl.uint32)
        measure = tl.zeros([_DIGITS], tl.int64)
        for start in range(0, num_values, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < num_values
            score = tl.load(values_ptr + at, mask=inside, other=float("-inf"))
            if BY_COUNT:
                amount = inside.to(tl.int32)
            else:
                amount = to_mass(weigh(score, top))
            reached = to_key(score)[:, None] >= pivots[None, :]
            measure += tl.sum(tl.where(reached, amount[:, None], 0), 0)
        enough = measure >= goal
        above = tl.maximum(above, tl.max(tl.where(enough, 0, measure), 0))
        threshold += ((tl.sum(enough.to(tl.int32), 0) - 1) << shift).to(tl.uint32)
    return threshold, above


@triton.jit
def sum_mass(values_ptr, num_values, top, threshold, min_weight, BLOCK: tl.constexpr):
    """Mass of the values whose key is ``threshold`` or more and whose weight is ``min_weight`` or more."""
    mass = tl.cast(0, tl.int64)
    for start in range(0, num_values, BLOCK):
        at = start + tl.arange(0, BLOCK)
        score = tl.load(values_ptr + at, mask=at < num_values, other=float("-inf"))
        weight = weigh(score, top)
        mass += tl.sum(tl.where((to_key(score) >= threshold) & (weight >= min_weight), to_mass(weight), 0), 0)
    return mass


@triton.jit
def find_nth(values_ptr, num_values, threshold, nth, BLOCK: tl.constexpr):
    """Where the ``nth`` (from 0) of the values with this key is."""
    found = tl.cast(0, tl.int32)
    passed = tl.cast(0, tl.int32)
    for start in range(0, num_values, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < num_values
        score = tl.load(values_ptr + at, mask=inside, other=float("-inf"))
        equal = inside & (to_key(score) == threshold)
        place = passed + tl.cumsum(equal.to(tl.int32), 0)
        found += tl.sum(tl.where(equal & (place == nth + 1), at, 0), 0)
        passed += tl.sum(equal.to(tl.int32), 0)
    return found
