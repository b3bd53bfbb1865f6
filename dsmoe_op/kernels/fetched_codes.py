"""What products of four-bit weights share whose codes the copy engine fetches (Gluon, sm_90)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dsmoe_op.config import MoEConfig
from dsmoe_op.formats import FORMATS
from dsmoe_op.kernels.coded import Coded, halves_of, unpacking
from dsmoe_op.kernels.ring import is_hopper


def decodes(w: Tensor, rows_dtype: torch.dtype, coded: Coded, config: MoEConfig | None = None) -> bool:
    """Whether their GPU has Hopper's units, and kernels that fetch codes by the copy engine can decode these weights.

    The weights are of four bits, contiguous, aligned to 16 bytes, without zero points, with groups of 16 to 128 columns
    and scales that the dtype of the rows has exactly; their rows are multiples of 32 columns, and of int4 whole groups:
    columns beyond them are codes of 0, which stand for -8 scales where they have any, maybe infinite.

    Args:
        w: [E, rows, columns / 2] bytes.
        rows_dtype: of what they multiply, and of the output.
        config: of a GEMM 1.
    """
    form = coded.form
    if form is None or coded.scale is None or FORMATS[form[0]].bits != 4:
        return False
    scale = coded.scale.dtype
    exact = scale in (rows_dtype, torch.float8_e4m3fn) or (scale == torch.uint8 and rows_dtype == torch.bfloat16)
    plain = form[7] == 0 and form[1] in (16, 32, 64, 128) and rows_dtype in (torch.bfloat16, torch.float16)
    if config is not None:
        plain &= config.gated and not config.apply_router_weight_on_input
    aligned = w.data_ptr() % 16 == 0 and w.shape[-1] % 16 == 0
    whole = form[0] != "int4" or 2 * w.shape[-1] % form[1] == 0
    return exact and plain and whole and aligned and w.dim() == 3 and w.is_contiguous() and is_hopper(w.device)


def boxes(w: Tensor, columns: int, config: MoEConfig | None, rows: int, step: int) -> TensorDescriptor:
    """So many rows of w that belong together, neighbours or every other one, by a step's columns.

    Args:
        w: [E, rows, columns / 2] bytes, such as `decodes` says.
        columns: of the output.
        config: of a GEMM 1, whose boxes are of gate or of up rows.
    """
    experts, _, width = w.shape
    interleaved = config is not None and config.w13_order == "interleaved"
    halves = 1 if config is None else 2
    shape = [experts * columns, 2, width] if interleaved else [experts * halves, columns, width]
    box = [rows, 1, step // 2] if interleaved else [1, rows, step // 2]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=step // 2, element_bitwidth=8, rank=3)
    return TensorDescriptor(w, shape, [shape[1] * width, width, 1], box, layout)


def compiled_for(w: Tensor, columns: int, coded: Coded, config: MoEConfig | None) -> dict[str, Any]:
    """Constants that do not hang on how the kernel divides its work. The same arguments as those of `boxes`."""
    form = coded.form
    assert form is not None
    return {
        "K": 1 if config is None else config.top_k,
        "COLUMNS": columns,
        "INNER": 2 * w.shape[-1],
        "NAME": form[0],
        "GROUP": form[1],
        "GROUPS": form[2],
        "PER_TENSOR": form[5],
        "INTERLEAVED": config is not None and config.w13_order == "interleaved",
        "ACTIVATION": None if config is None else config.activation,
        "UP_FIRST": config is not None and config.w13_order == "up_gate",
        "CLAMP": None if config is None else config.clamp_routed,
        "CLAMP_AFTER": config is not None and config.clamp_after_activation,
    }


@gluon.jit
def doubled(scales, DTYPE: gl.constexpr):
    """int32: scales in a dtype that has them exactly, in both halves."""
    if scales.dtype == gl.uint8:  # a power of two
        bits = gl.where(scales == 0, 0x0040, scales.to(gl.int16) << 7)  # 2^-127 is subnormal
        bits = gl.where(scales == 255, 0x7FC0, bits).to(gl.int16)
    else:
        bits = scales.to(DTYPE).to(gl.int16, bitcast=True)
    return (bits.to(gl.int32) & 0xFFFF) * 65537


@gluon.jit
def numbers(words, scale, NAME: gl.constexpr, DTYPE: gl.constexpr):
    """[.., half, j % 2, j // 2] numbers of codes j and j + 4 of words [..]; scale, doubled, broadcasts with these."""
    ASM: gl.constexpr = unpacking(NAME, DTYPE)
    words, scale = gl.broadcast(words, scale)
    if NAME == "int4":
        # The bits of -136 or -1032, twice: a code is among the mantissa's bits of 128 or 1024, and 8 stands for 0.
        zero = gl.full_like(words, -0x3CF73CF8 if DTYPE == gl.bfloat16 else -0x1BF71BF8)
        p0, p1, p2, p3 = gl.inline_asm_elementwise(
            ASM, "=&r,=&r,=&r,=&r,r,r,r", [words, scale, zero], (gl.int32, gl.int32, gl.int32, gl.int32), True, 1
        )
    else:
        p0, p1, p2, p3 = gl.inline_asm_elementwise(
            ASM, "=&r,=&r,=&r,=&r,r,r", [words, scale], (gl.int32, gl.int32, gl.int32, gl.int32), True, 1
        )
    n0 = halves_of(p0, DTYPE)
    n1 = halves_of(p1, DTYPE)
    n2 = halves_of(p2, DTYPE)
    n3 = halves_of(p3, DTYPE)
    return gl.join(gl.join(n0, n1), gl.join(n2, n3))
