"""The shared expert's gate of each token, one program a row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dsmoe_op.kernels.launch import launch, row_stride
from dsmoe_op.kernels.numerics import sigmoid
from dsmoe_op.kernels.overlap import begin


def shared_gate(x_TH: Tensor, shared_gate_1H: Tensor, gate_T: Tensor, *, warmup: bool = False) -> None:
    """gate_T = sigmoid(x . shared_gate), summed in float32.

    Args:
        x_TH: [T, H] any float dtype, any row stride, unit stride in the last dim.
        shared_gate_1H: [1, H] any float dtype, contiguous.
        gate_T: written; float32 [T].
    """
    T, H = x_TH.shape
    if T == 0:
        return
    launch(
        _shared_gate,
        (T,),
        (x_TH, row_stride(x_TH), shared_gate_1H, gate_T),
        {"H": H, "BLOCK_H": min(1024, triton.next_power_of_2(H)), "num_warps": 4},
        warmup=warmup,
    )


@triton.jit(do_not_specialize_on_alignment=["gate_ptr"])
def _shared_gate(
    x_ptr,
    x_stride,
    weight_ptr,
    gate_ptr,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    EARLY: tl.constexpr = False,
    FOLLOWED: tl.constexpr = False,
):
    begin(EARLY, FOLLOWED)
    token = tl.program_id(0).to(tl.int64)
    h_H = tl.arange(0, BLOCK_H)
    sum_H = tl.zeros([BLOCK_H], tl.float32)
    for start in range(0, H, BLOCK_H):
        inside_H = start + h_H < H
        x_H = tl.load(x_ptr + token * x_stride + start + h_H, mask=inside_H, other=0.0).to(tl.float32)
        sum_H += x_H * tl.load(weight_ptr + start + h_H, mask=inside_H, other=0.0).to(tl.float32)
    tl.store(gate_ptr + token, sigmoid(tl.sum(sum_H)))
