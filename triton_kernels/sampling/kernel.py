"""Four kernels of a step, for any mixture of rows: scores and tops of tiles; masses; candidates; the draw. And one that counts tokens.

N rows, V vocabulary, in T tiles. The first three run over (row, tile), the last over rows. Each row's work is read on the device, so
that a captured graph serves every step.
"""

import triton
import triton.language as tl

from . import rows
from .falling_order import find_nth, find_threshold, from_key, sum_mass, to_mass, weigh
from .generator import uniform_bits

NUM_EDGES = 8
IN_PROMPT = 1 << 30  # the bit of a count that says that the token is in the prompt; below it, how often it was generated

_EDGES = tl.constexpr(NUM_EDGES)
_IN_PROMPT = tl.constexpr(IN_PROMPT)
_LARGEST = tl.constexpr(1e38)  # scores are cut to it, so that no difference of two overflows
_NEVER = tl.constexpr(2**31 - 1)
_SEED, _INDEX = (tl.constexpr(i) for i in range(len(rows.LONGS)))
_LOGITS_ROW, _COMPANION_ROW, _COUNTS_ROW, _TOP_K = (tl.constexpr(i) for i in range(len(rows.INTS)))
_TEMPERATURE, _TOP_P, _MIN_P, _GUIDANCE, _REPETITION, _PRESENCE, _FREQUENCY = (tl.constexpr(i) for i in range(len(rows.FLOATS)))


@triton.jit(do_not_specialize=["stride"])
def prepare_kernel(
    logits_ptr,
    ints_ptr,
    floats_ptr,
    counts_ptr,
    scores_ptr,
    tops_ptr,
    top_ids_ptr,
    stride,
    vocabulary,
    stride_logits: tl.int64,
    stride_counts: tl.int64,
    TILE: tl.constexpr,
):
    """The one pass over the logits: guidance, penalties, temperature. Greedy rows need no scores, only each tile's top."""
    row = tl.program_id(0)
    tile = tl.program_id(1)
    source = tl.load(ints_ptr + _LOGITS_ROW * stride + row).to(tl.int64)
    if source < 0:
        return
    lane = tl.arange(0, TILE)
    token = tile * TILE + lane
    inside = token < vocabulary
    score = tl.load(logits_ptr + source * stride_logits + token, mask=inside, other=0.0).to(tl.float32)
    companion = tl.load(ints_ptr + _COMPANION_ROW * stride + row).to(tl.int64)
    if companion >= 0:
        unconditional = tl.load(logits_ptr + companion * stride_logits + token, mask=inside, other=0.0).to(tl.float32)
        guidance = tl.load(floats_ptr + _GUIDANCE * stride + row)
        score = unconditional + guidance * (score - unconditional)
    if counts_ptr is not None:
        counts_row = tl.load(ints_ptr + _COUNTS_ROW * stride + row).to(tl.int64)
        if counts_row >= 0:
            count = tl.load(counts_ptr + counts_row * stride_counts + token, mask=inside, other=0)
            generated = (count & (_IN_PROMPT - 1)).to(tl.float32)
            repetition = tl.load(floats_ptr + _REPETITION * stride + row)
            repeated = tl.where(score > 0, tl.div_rn(score, repetition), score * repetition)
            score = tl.where(count != 0, repeated, score)
            score -= tl.load(floats_ptr + _FREQUENCY * stride + row) * generated
            score -= tl.where(generated > 0, tl.load(floats_ptr + _PRESENCE * stride + row), 0.0)
    temperature = tl.load(floats_ptr + _TEMPERATURE * stride + row)
    score = tl.div_rn(score, tl.where(temperature > 0, temperature, 1.0))
    # A NaN is never drawn, and 0 has one key.
    possible = inside & (score > float("-inf"))
    score = tl.where(score == 0, 0.0, tl.minimum(tl.maximum(score, -_LARGEST), _LARGEST))
    score = tl.where(possible, score, float("-inf"))
    at = row.to(tl.int64) * tl.num_programs(1) + tile
    top = tl.max(score, 0)
    tl.store(tops_ptr + at, top)
    tl.store(top_ids_ptr + at, tl.min(tl.where(score == top, token, _NEVER), 0))
    if temperature > 0:
        tl.store(scores_ptr + at * TILE + lane, score)


@triton.jit
def _is_filtered(ints_ptr, floats_ptr, stride, row):
    return (tl.load(ints_ptr + _TOP_K * stride + row) > 0) | (tl.load(floats_ptr + _TOP_P * stride + row) < 1)


@triton.jit
def _top_of(ints_ptr, floats_ptr, tops_ptr, stride, row, num_tiles, MAX_TILES: tl.constexpr):
    """The row's largest score; -inf where nothing is to be drawn: padding, greedy, or no token is possible."""
    tile = tl.arange(0, MAX_TILES)
    draws = (tl.load(ints_ptr + _LOGITS_ROW * stride + row) >= 0) & (tl.load(floats_ptr + _TEMPERATURE * stride + row) > 0)
    live = (tile < num_tiles) & draws
    return tl.max(tl.load(tops_ptr + row.to(tl.int64) * num_tiles + tile, mask=live, other=float("-inf")), 0)


@triton.jit
def _edge(number):
    """How far below the top a candidate may be: 1/4, 1/2, 1 and so on to 32, exactly, in every kernel."""
    return tl.cast((number + 127 - 2) << 23, tl.float32, bitcast=True)


@triton.jit
def _goal(share, whole):
    """The smallest mass that is at least ``share`` of ``whole``, from 1 to ``whole``."""
    goal = tl.ceil(share.to(tl.float64) * whole.to(tl.float64)).to(tl.int64)
    return tl.minimum(tl.maximum(goal, 1), whole)


@triton.jit(do_not_specialize=["stride"])
def measure_kernel(
    ints_ptr,
    floats_ptr,
    scores_ptr,
    tops_ptr,
    masses_ptr,
    edge_counts_ptr,
    edge_masses_ptr,
    stride,
    TILE: tl.constexpr,
    MAX_TILES: tl.constexpr,
):
    """Masses of tiles: all of it, after min-p where that is the only filter; otherwise also count and mass within each edge."""
    row = tl.program_id(0)
    tile = tl.program_id(1)
    top = _top_of(ints_ptr, floats_ptr, tops_ptr, stride, row, tl.num_programs(1), MAX_TILES)
    if top == float("-inf"):
        return
    at = row.to(tl.int64) * tl.num_programs(1) + tile
    score = tl.load(scores_ptr + at * TILE + tl.arange(0, TILE))
    weight = weigh(score, top)
    mass = to_mass(weight)
    if _is_filtered(ints_ptr, floats_ptr, stride, row):
        below = top - score
        tl.store(masses_ptr + at, tl.sum(mass, 0))
        for number in range(_EDGES):
            within = below <= _edge(number)
            tl.store(edge_counts_ptr + at * _EDGES + number, tl.sum(within.to(tl.int32), 0))
            tl.store(edge_masses_ptr + at * _EDGES + number, tl.sum(tl.where(within, mass, 0), 0))
    else:
        min_p = tl.load(floats_ptr + _MIN_P * stride + row)
        tl.store(masses_ptr + at, tl.sum(tl.where(weight >= min_p, mass, 0), 0))


@triton.jit
def _whole_mass(masses_ptr, row, num_tiles, MAX_TILES: tl.constexpr):
    tile = tl.arange(0, MAX_TILES)
    return tl.sum(tl.load(masses_ptr + row.to(tl.int64) * num_tiles + tile, mask=tile < num_tiles, other=0), 0)


@triton.jit
def _choose_edge(ints_ptr, floats_ptr, masses_ptr, edge_counts_ptr, edge_masses_ptr, stride, row, num_tiles, MAX_TILES: tl.constexpr):
    """The first edge within which lies all that top-k, or without it top-p, keeps, and how many are within; ``_EDGES`` if none is."""
    tile = tl.arange(0, MAX_TILES)
    number = tl.arange(0, _EDGES)
    at = (row.to(tl.int64) * num_tiles + tile[:, None]) * _EDGES + number[None, :]
    live = (tile < num_tiles)[:, None]
    counts = tl.sum(tl.load(edge_counts_ptr + at, mask=live, other=0), 0)
    masses = tl.sum(tl.load(edge_masses_ptr + at, mask=live, other=0), 0)
    top_k = tl.load(ints_ptr + _TOP_K * stride + row)
    goal = _goal(tl.load(floats_ptr + _TOP_P * stride + row), _whole_mass(masses_ptr, row, num_tiles, MAX_TILES))
    enough = ((top_k > 0) & (counts >= top_k)) | ((top_k <= 0) & (masses >= goal))
    edge = _EDGES - tl.sum(enough.to(tl.int32), 0)
    return edge, tl.sum(tl.where(number == edge, counts, 0), 0)


@triton.jit(do_not_specialize=["stride"])
def gather_kernel(
    ints_ptr,
    floats_ptr,
    scores_ptr,
    tops_ptr,
    masses_ptr,
    edge_counts_ptr,
    edge_masses_ptr,
    candidate_scores_ptr,
    candidate_ids_ptr,
    stride,
    TILE: tl.constexpr,
    MAX_TILES: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
):
    """Scores and ids of candidates side by side, in the order of ids, for rows where they are few enough."""
    row = tl.program_id(0)
    tile = tl.program_id(1)
    num_tiles = tl.num_programs(1)
    top = _top_of(ints_ptr, floats_ptr, tops_ptr, stride, row, num_tiles, MAX_TILES)
    if top == float("-inf"):
        return
    if not _is_filtered(ints_ptr, floats_ptr, stride, row):
        return
    edge, num_candidates = _choose_edge(
        ints_ptr, floats_ptr, masses_ptr, edge_counts_ptr, edge_masses_ptr, stride, row, num_tiles, MAX_TILES
    )
    if (edge == _EDGES) | (num_candidates > MAX_CANDIDATES):
        return
    tiles = tl.arange(0, MAX_TILES)
    at = row.to(tl.int64) * num_tiles
    counts = tl.load(edge_counts_ptr + (at + tiles) * _EDGES + edge, mask=tiles <= tile, other=0)
    if tl.sum(tl.where(tiles == tile, counts, 0), 0) == 0:
        return
    before = tl.sum(tl.where(tiles < tile, counts, 0), 0)
    lane = tl.arange(0, TILE)
    score = tl.load(scores_ptr + (at + tile) * TILE + lane)
    within = top - score <= _edge(edge)
    place = row.to(tl.int64) * MAX_CANDIDATES + before + tl.cumsum(within.to(tl.int32), 0) - 1
    tl.store(candidate_scores_ptr + place, score, mask=within)
    tl.store(candidate_ids_ptr + place, tile * TILE + lane, mask=within)


@triton.jit
def _draw_whole(bits, floats_ptr, scores_ptr, masses_ptr, top, stride, row, num_tiles, TILE: tl.constexpr, MAX_TILES: tl.constexpr):
    """Rows without top-k and top-p: a place in all of the vocabulary, in the order of ids. Returns the token and the mass kept."""
    tile = tl.arange(0, MAX_TILES)
    at = row.to(tl.int64) * num_tiles
    masses = tl.load(masses_ptr + at + tile, mask=tile < num_tiles, other=0)
    kept = tl.sum(masses, 0)
    target = tl.umulhi(bits, kept.to(tl.uint64)).to(tl.int64)
    chosen = tl.sum((tl.cumsum(masses, 0) <= target).to(tl.int32), 0)
    before = tl.sum(tl.where(tile < chosen, masses, 0), 0)
    lane = tl.arange(0, TILE)
    weight = weigh(tl.load(scores_ptr + (at + chosen) * TILE + lane), top)
    min_p = tl.load(floats_ptr + _MIN_P * stride + row)
    running = before + tl.cumsum(tl.where(weight >= min_p, to_mass(weight), 0), 0)
    return chosen * TILE + tl.sum((running <= target).to(tl.int32), 0), kept


@triton.jit
def _kept_mass(ints_ptr, floats_ptr, values_ptr, num_values, whole, top, stride, row, BLOCK: tl.constexpr):
    """Mass of what top-k, top-p and min-p leave together: each leaves a prefix of the falling order, so the least of three masses."""
    top_k = tl.load(ints_ptr + _TOP_K * stride + row)
    if top_k > 0:
        goal = tl.minimum(top_k, num_values).to(tl.int64)
        threshold, _ = find_threshold(values_ptr, num_values, top, goal, True, BLOCK)
        whole = sum_mass(values_ptr, num_values, top, threshold, 0.0, BLOCK)
    kept = whole
    top_p = tl.load(floats_ptr + _TOP_P * stride + row)
    if top_p < 1:
        goal = _goal(top_p, whole)
        threshold, above = find_threshold(values_ptr, num_values, top, goal, False, BLOCK)
        each = to_mass(weigh(from_key(threshold), top))
        kept = tl.minimum(kept, above + (goal - above + each - 1) // each * each)
    min_p = tl.load(floats_ptr + _MIN_P * stride + row)
    if min_p > 0:
        kept = tl.minimum(kept, sum_mass(values_ptr, num_values, top, tl.cast(0, tl.uint32), min_p, BLOCK))
    return kept


@triton.jit(do_not_specialize=["stride", "num_tiles"], do_not_specialize_on_alignment=["tokens_ptr"])
def draw_kernel(
    longs_ptr,
    ints_ptr,
    floats_ptr,
    scores_ptr,
    tops_ptr,
    top_ids_ptr,
    masses_ptr,
    edge_counts_ptr,
    edge_masses_ptr,
    candidate_scores_ptr,
    candidate_ids_ptr,
    kept_ptr,
    tokens_ptr,
    stride,
    num_tiles,
    TILE: tl.constexpr,
    MAX_TILES: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row: its token, and the mass that its filters left (0 where nothing was drawn)."""
    row = tl.program_id(0)
    if tl.load(ints_ptr + _LOGITS_ROW * stride + row) < 0:
        tl.store(tokens_ptr + row, -1)
        tl.store(kept_ptr + row, 0)
        return
    at = row.to(tl.int64) * num_tiles
    tile = tl.arange(0, MAX_TILES)
    tops = tl.load(tops_ptr + at + tile, mask=tile < num_tiles, other=float("-inf"))
    top_ids = tl.load(top_ids_ptr + at + tile, mask=tile < num_tiles, other=_NEVER)
    token = tl.min(tl.where(tops == tl.max(tops, 0), top_ids, _NEVER), 0)
    kept = tl.cast(0, tl.int64)
    top = _top_of(ints_ptr, floats_ptr, tops_ptr, stride, row, num_tiles, MAX_TILES)
    if top > float("-inf"):
        bits = uniform_bits(tl.load(longs_ptr + _SEED * stride + row), tl.load(longs_ptr + _INDEX * stride + row))
        if _is_filtered(ints_ptr, floats_ptr, stride, row):
            edge, num_values = _choose_edge(
                ints_ptr, floats_ptr, masses_ptr, edge_counts_ptr, edge_masses_ptr, stride, row, num_tiles, MAX_TILES
            )
            gathered = (edge < _EDGES) & (num_values <= MAX_CANDIDATES)
            values_ptr = candidate_scores_ptr + row.to(tl.int64) * MAX_CANDIDATES
            if not gathered:
                values_ptr = scores_ptr + at * TILE
                num_values = num_tiles * TILE
            whole = _whole_mass(masses_ptr, row, num_tiles, MAX_TILES)
            kept = _kept_mass(ints_ptr, floats_ptr, values_ptr, num_values, whole, top, stride, row, BLOCK)
            target = tl.umulhi(bits, kept.to(tl.uint64)).to(tl.int64)
            threshold, above = find_threshold(values_ptr, num_values, top, target + 1, False, BLOCK)
            each = to_mass(weigh(from_key(threshold), top))
            token = find_nth(values_ptr, num_values, threshold, (target - above) // each, BLOCK)
            if gathered:
                token = tl.load(candidate_ids_ptr + row.to(tl.int64) * MAX_CANDIDATES + token)
        else:
            token, kept = _draw_whole(bits, floats_ptr, scores_ptr, masses_ptr, top, stride, row, num_tiles, TILE, MAX_TILES)
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(kept_ptr + row, kept)


@triton.jit(
    do_not_specialize=["vocabulary", "stride_tokens"],
    do_not_specialize_on_alignment=["counts_rows_ptr", "tokens_ptr", "num_tokens_ptr"],
)
def count_kernel(
    counts_ptr,
    counts_rows_ptr,
    tokens_ptr,
    num_tokens_ptr,
    vocabulary,
    stride_counts: tl.int64,
    stride_tokens: tl.int64,
    IS_PROMPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, block): mark or count tokens. Atomic, since a token may stand in a row many times; integers, so without order."""
    row = tl.program_id(0).to(tl.int64)
    counts_row = tl.load(counts_rows_ptr + row).to(tl.int64)
    if counts_row < 0:
        return
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens_ptr + row * stride_tokens + at, mask=at < tl.load(num_tokens_ptr + row), other=-1)
    known = (token >= 0) & (token < vocabulary)
    target = counts_ptr + counts_row * stride_counts + token
    if IS_PROMPT:
        tl.atomic_or(target, _IN_PROMPT, mask=known, sem="relaxed")
    else:
        tl.atomic_add(target, 1, mask=known, sem="relaxed")
