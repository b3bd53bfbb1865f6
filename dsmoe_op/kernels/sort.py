"""Order of the experts' rows: expert after expert, inside an expert by flat index t*K+k. One launch, no atomics.

Program e counts the slots of lower experts, which is where its rows begin, then places its own; the program after the
last expert takes the slots that no expert has. Each slot is thereby written by exactly one program.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dsmoe_op.kernels.launch import launch
from dsmoe_op.tuning import sort_block


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
    block, num_warps = sort_block(T * K)
    for block, num_warps in sort_block.variants if warmup else [(block, num_warps)]:
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
