"""Classifier-free guidance pairs as one row: lengths, page needs and completion of a row's members (pure; controller process).

A request with ``guidance_scale`` != 1 has a companion prompt without media (CF2, CF5). Both members share one row with two
block tables and one list of generated ids, so a pair cannot be linked wrongly or scheduled twice, and a policy cannot split it: it
is admitted, preempted and finished as one (CF3), and every sampled token goes to both. Its need is the sum of the needs of its two
prompts (CF4: not "2x", since the prompts differ), granted all or none. A request without a companion is a row of one member.
"""

from collections.abc import Sequence

Lengths = tuple[int, ...]
"""Prompt tokens per member: (conditional,) or (conditional, companion)."""


def member_lengths(num_prompt_tokens: int, num_companion_tokens: int) -> Lengths:
    """Return the prompt tokens per member. ``num_companion_tokens`` 0: there is no companion."""
    return (num_prompt_tokens, num_companion_tokens) if num_companion_tokens else (num_prompt_tokens,)


def num_pages(num_tokens: int, page_tokens: int) -> int:
    """Return the number of pages that hold ``num_tokens``."""
    return -(-num_tokens // page_tokens)


def prefill_targets(lengths: Lengths, num_committed: int) -> Lengths:
    """Return the tokens per member to prefill before decode, where prefill draws nothing: all except the last, decode's first input.

    ``num_committed`` > 0 after a preemption: the generated tokens are prefilled again, after each member's prompt.
    """
    if len(lengths) == 1:
        return (lengths[0] + num_committed - 1,)
    return tuple([length + num_committed - 1 for length in lengths])


def is_prefilled(prefilled: Sequence[int], targets: Lengths) -> bool:
    """Return whether *both* members of a pair are ready for decode."""
    return all([done >= target for done, target in zip(prefilled, targets, strict=False)])


def limit_pages(lengths: Lengths, max_new_tokens: int, page_tokens: int) -> Lengths:
    """Return the pages per member at its greatest length. The last generated token is never fed back, so it needs no room."""
    return tuple([num_pages(length + max_new_tokens - 1, page_tokens) for length in lengths])


def wanted_pages(lengths: Lengths, num_committed: int, max_new_tokens: int, page_tokens: int, ahead_pages: int) -> Lengths:
    """Return the pages per member for all tokens so far, the next token, and ``ahead_pages`` more, within ``limit_pages``.

    Decode cannot compute the next token with fewer pages than ``ahead_pages`` = 0 gives.
    """
    last = max_new_tokens - 1
    return tuple([min(num_pages(n + num_committed, page_tokens) + ahead_pages, num_pages(n + last, page_tokens)) for n in lengths])


def fitting_new_tokens(lengths: Lengths, num_pool_pages: int, page_tokens: int) -> int:
    """Return the most new tokens that a row of these lengths can have in an otherwise empty pool; 0 if it does not fit at all."""
    if sum(limit_pages(lengths, 1, page_tokens)) > num_pool_pages:
        return 0
    low, high = 1, num_pool_pages * page_tokens + 1  # fits at low, not at high
    while high - low > 1:
        middle = (low + high) // 2
        if sum(limit_pages(lengths, middle, page_tokens)) <= num_pool_pages:
            low = middle
        else:
            high = middle
    return low
