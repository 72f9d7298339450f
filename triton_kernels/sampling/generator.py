"""The counter-based generator on the device: SplitMix64's stream of a hashed seed, at any place (Steele, Lea and Flood, OOPSLA 2014).

Bit for bit ``models.sampling.sampler.uniforms``, so that a token does not depend on the device that draws it.
"""

import triton
import triton.language as tl

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def uniform_bits(seed, index):
    """int64 seed (its bits) and index -> uint64 x; x / 2**64 is the number in [0, 1), of 53 bits."""
    state = _mix(seed.to(tl.uint64) + _GOLDEN) + _GOLDEN * (index.to(tl.uint64) + 1)
    return (_mix(state) >> 11) << 11
