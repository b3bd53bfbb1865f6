"""Order of the experts' rows: expert after expert, inside an expert by flat index t*K+k. route.py launches it.

Up to 64 slots are compared with each other, by one program: its time depends on the slots, hardly on the experts.

More take a counting sort. The slots lie in chunks; the slots of each expert in each chunk are counted first, by other
programs, and also in each 16 chunks together. A chunk's program adds up the counts of all these sixteens, and those of
the chunks before it in its own, to know where the rows of its slots begin: some 50 rows of counts, not hundreds. A
single chunk counts for itself. Sums of integers alone, so the result does not depend on timing.
"""

from __future__ import annotations

from typing import Any, NamedTuple  # noqa: F401 (Any is of a type comment)

import triton
import triton.language as tl
from torch import Tensor

from dsmoe_op.tuning import order_chunk_size as chunk_size


class Rows(NamedTuple):
    """What the row order writes."""

    num_rows: Tensor
    """int32 [1]: slots that an expert has. Their rows come first, the other slots' are those up to T*K."""
    sorted_slot_N: Tensor
    """int32 [T*K], written up to num_rows: flat index t*K+k of each row."""
    row_of_TK: Tensor
    """int32 [T, K] contiguous: the slot's row, or -1."""
    blocks_3B: Tensor
    """int32 [3, `num_blocks`] contiguous: expert, first row, and the row after the last, of each block of block_m rows.

    An expert's last block ends where its rows do, and may have up to `tail` rows more. Blocks of experts with rows by
    ascending expert, then those of the rows from num_rows to T*K with expert -1, then empty ones (-1, T*K, T*K).
    """
    block_m: int
    """A power of two."""
    tail: int
    """Less than block_m."""
    counters: Tensor
    """int32 [`num_counters`]: scratch. Zeros where an earlier launch has to leave them so; changed."""
    taken: Tensor
    """int32 [2]: zeros, for `gemm2_persistent` and `gemm1_persistent` to count their items."""
    arrivals: Tensor
    """int32, contiguous: zeros, for `experts` to count its programs. May be empty."""


TICKETS = tl.constexpr(32)
FIRST_COUNT = tl.constexpr(64)
"""Arrivals are counted at 0, tickets at TICKETS, and the counts begin after these: each on a cache line of its own."""

LOG_LANES = tl.constexpr(5)
LANES = tl.constexpr(32)
"""Slots along a warp's lanes."""

SUMMED = tl.constexpr(16)
"""Chunks whose counts are also kept as one sum."""


def num_blocks(num_slots: int, num_experts: int, block_m: int) -> int:
    """Blocks of block_m rows, each of one expert or of the rows that are none's, at most, for any routing."""
    partial = min(num_experts + 1, num_slots)
    return partial + (num_slots - partial) // block_m


def num_chunks(num_slots: int, *, alone: bool) -> int:
    """Chunks of the order; `alone`: in a launch of its own."""
    return max(1, triton.cdiv(num_slots, chunk_size(num_slots, alone)))


def num_counters(num_slots: int, num_experts: int) -> int:
    """Length of the counters: enough for an order of its own, too, which has fewer chunks."""
    chunks = num_chunks(num_slots, alone=False)
    return num_zeros(num_slots, num_experts, alone=False) + (chunks * num_experts if chunks > 1 else 0)


def num_zeros(num_slots: int, num_experts: int, *, alone: bool) -> int:
    """Arrivals, tickets, and, where there are several chunks, [chunks / SUMMED, E]; the counts [chunks, E] follow."""
    chunks = num_chunks(num_slots, alone=alone)
    return FIRST_COUNT.value + (triton.cdiv(chunks, SUMMED.value) * num_experts if chunks > 1 else 0)


@triton.jit
def zero(counters_ptr, num, program, programs):
    """Zeroes the first `num` counters, together with the other ones of `programs` programs."""
    ZEROS: tl.constexpr = 128
    start = program * ZEROS
    while start < num:
        i = start + tl.arange(0, ZEROS)
        tl.store(counters_ptr + i, tl.zeros([ZEROS], tl.int32), mask=i < num)
        start += programs * ZEROS


@triton.jit
def local_experts(ids, inside, map_ptr, E: tl.constexpr, E_ROUTING: tl.constexpr):
    """int32 row of the weights for each id of the router, E where there is none; E_ROUTING ids have one at all."""
    routed = inside & (ids >= 0) & (ids < E_ROUTING)
    if map_ptr is not None:
        experts = tl.load(map_ptr + ids, mask=routed, other=-1)
        experts = tl.where((experts >= 0) & (experts < E), experts, E)
    else:
        experts = tl.where(routed, ids, E).to(tl.int32)
    return experts


@triton.jit
def _ids(n_N, end, ids_ptr, id_stride_t, id_stride_k, K: tl.constexpr):
    """Id of each slot before `end`, past L1, since programs of the same launch may have written them."""
    ids_ptrs = ids_ptr + (n_N // K).to(tl.int64) * id_stride_t + n_N % K * id_stride_k
    return tl.load(ids_ptrs, mask=n_N < end, other=-1, cache_modifier=".cg")


@triton.jit
def _experts(ids_N, n_N, end, map_ptr, num_valid, K: tl.constexpr, E: tl.constexpr, E_ROUTING: tl.constexpr):
    """Id (int64) and expert of each slot before `end`; an expert of E where no expert has it."""
    ids_N = tl.where(n_N // K < num_valid, ids_N.to(tl.int64), -1)
    return ids_N, local_experts(ids_N, n_N < end, map_ptr, E, E_ROUTING)


@triton.jit
def _counts(experts_N, E: tl.constexpr, E_PAD: tl.constexpr):
    """int32 [E_PAD]: how many of the slots each expert has."""
    has_expert_N = experts_N < E
    return tl.histogram(tl.where(has_expert_N, experts_N, 0), E_PAD, mask=has_expert_N)


@triton.jit
def count_slots(experts_N, n_N, is_slot_N, log_chunk, num_chunks, counters_ptr, E: tl.constexpr):
    """Adds slots to the counts of their chunks, and to the sums of these."""
    has_row_N = is_slot_N & (experts_N < E)
    chunk_N = n_N >> log_chunk
    sums = (num_chunks + SUMMED - 1) // SUMMED
    counts_ptrs = counters_ptr + FIRST_COUNT + experts_N
    tl.atomic_add(counts_ptrs + chunk_N // SUMMED * E, 1, mask=has_row_N, sem="relaxed")
    tl.atomic_add(counts_ptrs + (sums + chunk_N) * E, 1, mask=has_row_N, sem="relaxed")


@triton.jit
def count_chunk(
    index,
    log_chunk,
    num_chunks,
    num_slots,
    ids_ptr,
    id_stride_t,
    id_stride_k,
    map_ptr,
    num_valid_ptr,
    counters_ptr,
    K: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    E_ROUTING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes row `index` of the counts [chunks, E], and adds it to its sum."""
    num_valid = num_slots
    if num_valid_ptr is not None:
        num_valid = tl.load(num_valid_ptr)
    e_E = tl.arange(0, E_PAD)
    start = index << log_chunk
    end = tl.minimum(start + (1 << log_chunk), num_slots)
    counts_E = tl.zeros([E_PAD], tl.int32)
    while start < end:
        n_N = start + tl.arange(0, BLOCK)
        ids_N = _ids(n_N, end, ids_ptr, id_stride_t, id_stride_k, K)
        _, experts_N = _experts(ids_N, n_N, end, map_ptr, num_valid, K, E, E_ROUTING)
        counts_E += _counts(experts_N, E, E_PAD)
        start += BLOCK
    sums = (num_chunks + SUMMED - 1) // SUMMED
    counts_ptrs = counters_ptr + FIRST_COUNT + e_E
    tl.atomic_add(counts_ptrs + index // SUMMED * E, counts_E, mask=(e_E < E) & (counts_E > 0), sem="relaxed")
    tl.store(counts_ptrs + (sums + index) * E, counts_E, mask=e_E < E)


@triton.jit
def _write_rest(
    first, by, num_rows, num_slots, blocks_ptr, num_blocks, first_block, log_block_m, BLOCK: tl.constexpr
):  # fmt: skip
    """Blocks of no expert, whose rows follow the experts', then empty ones: those from `first` on, BLOCK of every `by`.

    Args:
        first_block: the first one of all.
    """
    block_m = 1 << log_block_m
    while first < num_blocks:
        block_N = first + tl.arange(0, BLOCK)
        row_N = tl.minimum(num_rows + ((block_N - first_block) << log_block_m), num_slots)
        in_blocks_N = block_N < num_blocks
        tl.store(blocks_ptr + block_N, tl.full([BLOCK], -1, tl.int32), mask=in_blocks_N)
        tl.store(blocks_ptr + num_blocks + block_N, row_N, mask=in_blocks_N)
        tl.store(blocks_ptr + 2 * num_blocks + block_N, tl.minimum(row_N + block_m, num_slots), mask=in_blocks_N)
        first += by


@triton.jit
def _write_slots(
    n_N,
    end,
    ids_N,
    has_row_N,
    rows_N,
    weights_ptr,
    weight_stride_t,
    weight_stride_k,
    sorted_slot_ptr,
    row_of_ptr,
    ids_out_ptr,
    weights_out_ptr,
    K: tl.constexpr,
    E_ROUTING: tl.constexpr,
    Z: tl.constexpr,
):
    """What is written of each slot before `end`."""
    inside_N = n_N < end
    tl.store(sorted_slot_ptr + rows_N, n_N, mask=has_row_N)
    tl.store(row_of_ptr + n_N, tl.where(has_row_N, rows_N, -1), mask=inside_N)
    if ids_out_ptr is not None:
        counts_N = has_row_N | ((ids_N >= E_ROUTING) & (ids_N < E_ROUTING + Z))
        tl.store(ids_out_ptr + n_N, tl.where(counts_N, ids_N, -1).to(tl.int32), mask=inside_N)
        weights_ptrs = weights_ptr + (n_N // K).to(tl.int64) * weight_stride_t + n_N % K * weight_stride_k
        weights_N = tl.load(weights_ptrs, mask=counts_N & inside_N, other=0.0).to(tl.float32)
        tl.store(weights_out_ptr + n_N, weights_N, mask=inside_N)


@triton.jit
def _bits(x):
    """How many bits of each uint32 are 1."""
    x -= (x >> 1) & 0x55555555
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _below(a, b):
    """int32: 1 where a < b, 0 elsewhere, of int32s less than 2^31 apart."""
    return ((a - b) >> 31) & 1


@triton.jit
def _bit(row):
    """uint32 with the bit of a row in its word of 32."""
    return tl.full(row.shape, 1, tl.uint32) << (row & (LANES - 1)).to(tl.uint32)


@triton.jit
def order_all(
    experts_P,
    num_slots,
    ids_ptr,
    id_stride_t,
    id_stride_k,
    weights_ptr,
    weight_stride_t,
    weight_stride_k,
    map_ptr,
    num_valid_ptr,
    num_rows_ptr,
    sorted_slot_ptr,
    row_of_ptr,
    blocks_ptr,
    num_blocks,
    log_block_m,
    tail,
    ids_out_ptr,
    weights_out_ptr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    E: tl.constexpr,
    E_ROUTING: tl.constexpr,
    Z: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Places all slots, at most BLOCK, and writes the blocks.

    Every warp has all slots, in parts of 32 along its lanes, so that none waits for another one.

    Args:
        experts_P: what `choose_tokens` returned to this program, those of all slots where there is one token; BLOCK
            of them where a program has one and BLOCK is 32. None where another launch has made the ids.
    """
    PARTS: tl.constexpr = BLOCK // LANES
    lane_N = tl.arange(0, LANES)
    at_hand: tl.constexpr = experts_P is not None and TOKENS == 1 and PARTS == 1
    ids = (tl.full([LANES], -1, tl.int64),) * PARTS
    if at_hand:
        experts = (experts_P,)  # type: tuple[Any, ...]
    else:
        experts = (tl.full([LANES], E, tl.int32),) * PARTS
    if not at_hand or num_slots > K:
        num_valid = num_slots
        if num_valid_ptr is not None:
            num_valid = tl.load(num_valid_ptr)
        tl.debug_barrier()
        loaded = ()  # type: tuple[Any, ...]  # loads first, so that all are under way at once
        for part in tl.static_range(PARTS):
            loaded += (_ids(lane_N + part * LANES, num_slots, ids_ptr, id_stride_t, id_stride_k, K),)
        ids, experts = (), ()
        for part in tl.static_range(PARTS):
            n_N = lane_N + part * LANES
            ids_N, experts_N = _experts(loaded[part], n_N, num_slots, map_ptr, num_valid, K, E, E_ROUTING)
            ids += (ids_N,)
            experts += (experts_N,)

    # A slot's key has its expert, then its own number. Each slot looks at one key after the other.
    keys = ()  # type: tuple[Any, ...]
    for part in tl.static_range(PARTS):
        keys += (experts[part] * BLOCK + lane_N + part * LANES,)
    zeros_N = tl.zeros([LANES], tl.int32)
    rows = (zeros_N,) * PARTS  # lower keys than the slot's
    firsts = (zeros_N,) * PARTS  # those of lower experts
    ends = (zeros_N,) * PARTS  # and those of its own expert
    first = 0
    while first < num_slots:
        for k in tl.static_range(K):
            slot = first + k
            key_N = keys[0]
            for part in tl.static_range(1, PARTS):
                key_N = tl.where(slot < part * LANES, key_N, keys[part])
            key = tl.max(tl.where(lane_N == slot & (LANES - 1), key_N, 0))
            before = rows, firsts, ends
            rows, firsts, ends = (), (), ()
            for part in tl.static_range(PARTS):
                first_key_N = experts[part] * BLOCK
                rows += (before[0][part] + _below(key, keys[part]),)
                firsts += (before[1][part] + _below(key, first_key_N),)
                ends += (before[2][part] + _below(key, first_key_N + BLOCK),)
        first += K

    # A slot begins a block, whose number is how many of them begin in lower rows: a bit for each row, in words of 32.
    block_m = 1 << log_block_m
    begins = ()  # type: tuple[Any, ...]
    num_rows = 0
    for part in tl.static_range(PARTS):
        has_row_N = experts[part] < E
        num_rows += tl.sum(has_row_N.to(tl.int32))
        index_N, count_N = rows[part] - firsts[part], ends[part] - firsts[part]
        begins += (has_row_N & (index_N & (block_m - 1) == 0) & ((index_N == 0) | (index_N < count_N - tail)),)
    words = ()  # type: tuple[Any, ...]
    blocks = 0
    for word in tl.static_range(PARTS):
        bits_N = tl.zeros([LANES], tl.uint32)
        for part in tl.static_range(PARTS):
            bits_N += tl.where(begins[part] & (rows[part] >> LOG_LANES == word), _bit(rows[part]), 0)
        words += (tl.sum(bits_N),)
        blocks += _bits(words[word])

    tl.store(num_rows_ptr, num_rows)
    for part in tl.static_range(PARTS):
        row_N = rows[part]
        _write_slots(
            lane_N + part * LANES, num_slots, ids[part], experts[part] < E, row_N, weights_ptr, weight_stride_t,
            weight_stride_k, sorted_slot_ptr, row_of_ptr, ids_out_ptr, weights_out_ptr, K, E_ROUTING, Z,
        )  # fmt: skip
        block_N = tl.zeros([LANES], tl.int32)
        for word in tl.static_range(PARTS):
            lower_N = tl.where(row_N >> LOG_LANES == word, _bit(row_N) - 1, 0xFFFFFFFF)
            block_N += tl.where(row_N >> LOG_LANES < word, 0, _bits(words[word] & lower_N))
        block_ptrs = blocks_ptr + block_N
        tl.store(block_ptrs, experts[part], mask=begins[part])
        tl.store(block_ptrs + num_blocks, row_N, mask=begins[part])
        # One block's rows follow on another's, so each ends where the next one begins.
        tl.store(block_ptrs + 2 * num_blocks - 1, row_N, mask=begins[part] & (block_N > 0))
    tl.store(blocks_ptr + 2 * num_blocks + blocks - 1, num_rows, mask=blocks > 0)
    _write_rest(blocks, BLOCK, num_rows, num_slots, blocks_ptr, num_blocks, blocks, log_block_m, BLOCK)


@triton.jit
def order_chunk(
    index,
    log_chunk,
    num_chunks,
    num_slots,
    ids_ptr,
    id_stride_t,
    id_stride_k,
    weights_ptr,
    weight_stride_t,
    weight_stride_k,
    map_ptr,
    num_valid_ptr,
    counters_ptr,
    num_rows_ptr,
    sorted_slot_ptr,
    row_of_ptr,
    blocks_ptr,
    num_blocks,
    log_block_m,
    tail,
    ids_out_ptr,
    weights_out_ptr,
    K: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    E_ROUTING: tl.constexpr,
    Z: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT_ROWS: tl.constexpr,
):
    """Places the slots of chunk `index`, and writes its share of the blocks."""
    num_valid = num_slots
    if num_valid_ptr is not None:
        num_valid = tl.load(num_valid_ptr)
    b_N = tl.arange(0, BLOCK)
    e_E = tl.arange(0, E_PAD)
    start = index << log_chunk
    end = tl.minimum(start + (1 << log_chunk), num_slots)
    n_N = start + b_N
    ids_N = _ids(n_N, end, ids_ptr, id_stride_t, id_stride_k, K)
    ids_N, experts_N = _experts(ids_N, n_N, end, map_ptr, num_valid, K, E, E_ROUTING)

    # All slots of each expert, and those in earlier chunks.
    before_E = tl.zeros([E_PAD], tl.int32)
    if num_chunks == 1:
        total_E = _counts(experts_N, E, E_PAD)
        more = start + BLOCK
        while more < end:
            more_N = _ids(more + b_N, end, ids_ptr, id_stride_t, id_stride_k, K)
            _, more_N = _experts(more_N, more + b_N, end, map_ptr, num_valid, K, E, E_ROUTING)
            total_E += _counts(more_N, E, E_PAD)
            more += BLOCK
    else:
        total_E = tl.zeros([E_PAD], tl.int32)
        # The sums, then the counts of the chunks before this one in its own sum.
        sums = (num_chunks + SUMMED - 1) // SUMMED
        own_sum = index // SUMMED
        own_first = own_sum * SUMMED
        num_rows = sums + index - own_first
        first = 0
        while first < num_rows:
            rows_E = ()  # type: tuple[Any, ...]  # loads first, so that all are under way at once
            for i in tl.static_range(COUNT_ROWS):
                row = first + i
                there_E = e_E < tl.where(row < num_rows, E, 0)
                count_ptrs = counters_ptr + FIRST_COUNT + (row + tl.where(row < sums, 0, own_first)) * E + e_E
                rows_E += (tl.load(count_ptrs, mask=there_E, other=0, cache_modifier=".cg"),)
            for i in tl.static_range(COUNT_ROWS):
                row = first + i
                total_E += tl.where(row < sums, rows_E[i], 0)
                before_E += tl.where((row < own_sum) | (row >= sums), rows_E[i], 0)
            first += COUNT_ROWS

    first_E = tl.cumsum(total_E, 0) - total_E
    num_rows = tl.sum(total_E)
    # Blocks: block j of an expert, or of the empty ones, is written by the program j modulo the number of chunks. One
    # block's rows follow on another's, so each ends where the next one begins.
    block_m = 1 << log_block_m
    blocks_E = tl.maximum((total_E + (block_m - 1 - tail)) >> log_block_m, tl.minimum(total_E, 1))
    first_block_E = tl.cumsum(blocks_E, 0) - blocks_E
    most_blocks = tl.max(blocks_E)
    first_rest = tl.sum(blocks_E)
    if index == 0:
        tl.store(num_rows_ptr, num_rows)
        tl.store(blocks_ptr + 2 * num_blocks + first_rest - 1, num_rows, mask=first_rest > 0)
    j = index
    while j < most_blocks:
        has_block_E = j < blocks_E
        block_ptrs = blocks_ptr + first_block_E + j
        row_E = first_E + (j << log_block_m)
        tl.store(block_ptrs, e_E, mask=has_block_E)
        tl.store(block_ptrs + num_blocks, row_E, mask=has_block_E)
        tl.store(block_ptrs + 2 * num_blocks - 1, row_E, mask=has_block_E & (first_block_E + j > 0))
        j += num_chunks
    _write_rest(
        first_rest + index * BLOCK, num_chunks * BLOCK, num_rows, num_slots, blocks_ptr, num_blocks, first_rest,
        log_block_m, BLOCK,
    )  # fmt: skip

    # Rows: of the slots before a block's, and of those before it in the block.
    row_E = first_E + before_E
    while start < end:
        n_N = start + b_N
        start += BLOCK
        next_N = _ids(start + b_N, end, ids_ptr, id_stride_t, id_stride_k, K)  # under way while this block is placed
        has_row_N = experts_N < E
        earlier_NN = (experts_N[:, None] == experts_N[None, :]) & (b_N[:, None] < b_N[None, :])
        rows_N = tl.gather(row_E, tl.where(has_row_N, experts_N, 0), 0) + tl.sum(earlier_NN.to(tl.int32), axis=0)
        _write_slots(
            n_N, end, ids_N, has_row_N, rows_N, weights_ptr, weight_stride_t, weight_stride_k, sorted_slot_ptr,
            row_of_ptr, ids_out_ptr, weights_out_ptr, K, E_ROUTING, Z,
        )  # fmt: skip
        if start < end:
            row_E += _counts(experts_N, E, E_PAD)
        ids_N, experts_N = _experts(next_N, start + b_N, end, map_ptr, num_valid, K, E, E_ROUTING)
