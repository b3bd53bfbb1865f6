"""Order of the experts' rows: expert after expert, inside an expert by flat index t*K+k. One launch, no atomics.

Program e counts the slots of lower experts, which is where its rows begin, then places its own; the program after the
last expert takes the slots that no expert has. Each slot is thereby written by exactly one program.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dsmoe_op.kernels.launch import launch
from dsmoe_op.tuning import sort_block, sort_variants


def sort_rows(
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    expert_map: Tensor | None,
    num_valid_tokens: Tensor | None,
    *,
    num_experts: int,
    num_zero_experts: int,
    offsets: Tensor,
    sorted_slot_N: Tensor,
    row_of_TK: Tensor,
    ids_out_TK: Tensor | None = None,
    weights_out_TK: Tensor | None = None,
    warmup: bool = False,
) -> None:
    """Where each (token, choice) slot's row lies among the sorted rows, and the reverse.

    Args:
        topk_ids_TK: [T, K] int32 or int64, any strides. Ids are those of the router; what is neither a routed expert
            held here nor a zero expert contributes nothing.
        topk_weights_TK: [T, K] any float dtype, any strides; read for weights_out_TK alone.
        expert_map: int32 [E_routing], id -> row of the weights, -1 for none. None: E_routing = num_experts, id = row.
        num_valid_tokens: int32 [1]; slots of later tokens contribute nothing.
        num_experts: rows of the weights, E.
        num_zero_experts: Z; ids E_routing..E_routing+Z-1 have no row, but keep id and weight.
        offsets: written; int32 [E+1]. Expert e has rows offsets[e]..offsets[e+1]-1; offsets[E] is the number of rows.
        sorted_slot_N: written up to offsets[E]; int32 [T*K], flat index t*K+k of each row.
        row_of_TK: written; int32 [T, K] contiguous, the slot's row, or -1.
        ids_out_TK, weights_out_TK: written; int32 and float32 [T, K] contiguous, with -1 and 0 where the slot
            contributes nothing. None where the inputs are already so (from `choose`, without expert_map).
    """
    T, K = topk_ids_TK.shape
    if T == 0:
        return
    for block, num_warps in sort_variants() if warmup else (sort_block(T * K),):
        launch(
            _sort,
            (num_experts + 1,),
            (
                topk_ids_TK,
                topk_ids_TK.stride(0),
                topk_ids_TK.stride(1),
                topk_weights_TK,
                topk_weights_TK.stride(0),
                topk_weights_TK.stride(1),
                expert_map,
                num_valid_tokens,
                offsets,
                sorted_slot_N,
                row_of_TK,
                ids_out_TK,
                weights_out_TK,
                T * K,
            ),
            {
                "K": K,
                "E": num_experts,
                "E_ROUTING": num_experts if expert_map is None else expert_map.shape[0],
                "Z": num_zero_experts,
                "BLOCK": block,
                "num_warps": num_warps,
            },
            warmup=warmup,
        )


@triton.jit
def _slots(
    n_N, num_slots, ids_ptr, id_stride_t, id_stride_k, map_ptr, num_valid, K: tl.constexpr, E: tl.constexpr,
    E_ROUTING: tl.constexpr,
):  # fmt: skip
    """Id (int64) and expert of each slot; an expert of E where no expert has it, E + 1 outside the slots."""
    inside_N = n_N < num_slots
    t_N = n_N // K
    k_N = n_N % K
    ids_N = tl.load(ids_ptr + t_N.to(tl.int64) * id_stride_t + k_N * id_stride_k, mask=inside_N, other=-1).to(tl.int64)
    ids_N = tl.where(t_N < num_valid, ids_N, -1)
    routed_N = (ids_N >= 0) & (ids_N < E_ROUTING)
    if map_ptr is not None:
        experts_N = tl.load(map_ptr + ids_N, mask=routed_N, other=-1)
        experts_N = tl.where((experts_N >= 0) & (experts_N < E), experts_N, E)
    else:
        experts_N = tl.where(routed_N, ids_N, E).to(tl.int32)
    return ids_N, tl.where(inside_N, experts_N, E + 1)


@triton.jit(
    do_not_specialize=["num_slots", "id_stride_t", "id_stride_k", "weight_stride_t", "weight_stride_k"],
    do_not_specialize_on_alignment=["ids_ptr", "weights_ptr", "map_ptr", "num_valid_ptr"],
)
def _sort(
    ids_ptr,
    id_stride_t,
    id_stride_k,
    weights_ptr,
    weight_stride_t,
    weight_stride_k,
    map_ptr,
    num_valid_ptr,
    offsets_ptr,
    sorted_slot_ptr,
    row_of_ptr,
    ids_out_ptr,
    weights_out_ptr,
    num_slots,
    K: tl.constexpr,
    E: tl.constexpr,
    E_ROUTING: tl.constexpr,
    Z: tl.constexpr,
    BLOCK: tl.constexpr,
):
    expert = tl.program_id(0)
    num_valid = num_slots
    if num_valid_ptr is not None:
        num_valid = tl.load(num_valid_ptr)
    block_N = tl.arange(0, BLOCK)

    # Loops by `while`: the interpreter of Triton 3.6 cannot take a `range` of num_slots with numpy 2.4.
    lower_N = tl.zeros([BLOCK], tl.int32)
    start = 0
    while start < num_slots:
        _, experts_N = _slots(
            start + block_N, num_slots, ids_ptr, id_stride_t, id_stride_k, map_ptr, num_valid, K, E, E_ROUTING
        )
        lower_N += (experts_N < expert).to(tl.int32)
        start += BLOCK
    row = tl.sum(lower_N)
    tl.store(offsets_ptr + expert, row)

    start = 0
    while start < num_slots:
        n_N = start + block_N
        start += BLOCK
        ids_N, experts_N = _slots(
            n_N, num_slots, ids_ptr, id_stride_t, id_stride_k, map_ptr, num_valid, K, E, E_ROUTING
        )
        mine_N = experts_N == expert
        one_N = mine_N.to(tl.int32)
        rows_N = row + tl.cumsum(one_N, 0) - 1
        row += tl.sum(one_N)
        has_row_N = mine_N & (experts_N < E)
        tl.store(sorted_slot_ptr + rows_N, n_N, mask=has_row_N)
        tl.store(row_of_ptr + n_N, tl.where(has_row_N, rows_N, -1), mask=mine_N)
        if ids_out_ptr is not None:
            counts_N = has_row_N | ((ids_N >= E_ROUTING) & (ids_N < E_ROUTING + Z))
            tl.store(ids_out_ptr + n_N, tl.where(counts_N, ids_N, -1).to(tl.int32), mask=mine_N)
            weights_ptrs = weights_ptr + (n_N // K).to(tl.int64) * weight_stride_t + (n_N % K) * weight_stride_k
            weights_N = tl.load(weights_ptrs, mask=counts_N & mine_N, other=0.0).to(tl.float32)
            tl.store(weights_out_ptr + n_N, weights_N, mask=mine_N)
