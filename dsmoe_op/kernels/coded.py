"""Products with quantised weights: a step's bytes become numbers in registers, right before the matrix unit.

Four bits (int4, mxfp4, nvfp4): a word of 32 bits holds eight neighbours of a row. Codes j and j + 4, which lie alike in
the word's halves, become two 16-bit numbers of one register, so columns come in that order, and a's are put into the
same; a scale of some columns is in the numbers, one of the whole row comes after the sum.

Eight bits (fp8_*): fp8 by fp8 on the matrix unit, where a tile has 64 rows of w or more (else Triton makes them fp16
before). a is fp8 already (`quantize.py`), or its part of a step becomes so here: where it is few rows of h, or is
weighted first. A step's product is added in float32, with its scales where they are the step's own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsmoe_op import formats
from dsmoe_op.formats import FORMATS, LARGEST_E4M3, LEAST_AMAX
from dsmoe_op.kernels.operands import load_a, weight_rows


class Coded(NamedTuple):
    """What a launch is told of a quantised weight, beside q: its tensors, as `as_bytes` leaves them, and their form."""

    scale: Tensor | None = None
    zero_point: Tensor | None = None
    global_scale: Tensor | None = None
    input_scale: Tensor | None = None
    form: tuple[Any, ...] | None = None
    """What kernels are compiled for, in the order of `coded_products`' first lines."""


PLAIN = Coded()
"""Of a weight that is not quantised."""


def as_bytes(t: Tensor) -> Tensor:
    """The same memory in a dtype that kernels read: bytes for packed numbers and for powers of two."""
    return formats.bytes_of(t) if t.dtype in (torch.int32, torch.int8, formats.E8M0) else t


def coded(name: str, parts: formats.Quantised, rows: int, columns: int, halves: int, interleaved: bool) -> Coded:
    """What the kernels need of a weight [E, rows, columns] or [rows, columns] in the format of that name.

    Args:
        parts: as `as_bytes` leaves them.
        halves, interleaved: as in `formats.dequantize`.
    """
    scale, per_tensor = parts.scale, parts.global_scale
    experts = parts.q.shape[0] if parts.q.dim() == 3 else 1
    if FORMATS[name].rows is None:
        scale_rows, groups, per_tensor = 1, 1, scale
    else:
        scale_rows, groups = scale.shape[-2:]
    zero_point, word = parts.zero_point, 0
    if zero_point is not None:  # bytes: four of an int32 lie in one of its places
        word = 4 if zero_point.shape[-1] == 4 * groups and zero_point.shape[-2] == -(-rows // 8) else 1
    each = -(-rows // halves // 128)
    form = (
        name,
        formats.group_size(name, columns, groups),
        groups,
        scale_rows,
        halves == 2 and not interleaved and scale_rows == 2 * each,
        0 if per_tensor is None else per_tensor.numel() // experts,
        interleaved,
        word,
        0 if zero_point is None else zero_point.numel() // experts,
        parts.input_scale is not None and parts.input_scale.numel() > 1,
        parts.q.data_ptr() % 16 == 0,  # what plans look at, though words are 4 bytes
    )
    return Coded(scale, zero_point, parts.global_scale, parts.input_scale, form)


@triton.jit
def _load_scale(ptrs, mask, DTYPE: tl.constexpr):
    """Scales in a dtype that has them exactly: DTYPE, if it does; a byte is a power of two."""
    if ptrs.dtype.element_ty == tl.uint8:
        e = tl.load(ptrs, mask=mask, other=0)
        if DTYPE == tl.bfloat16:
            bits = tl.where(e == 0, 0x0040, e.to(tl.int16) << 7)  # 2^-127 is subnormal
            scale = tl.where(e == 255, 0x7FC0, bits).to(tl.int16).to(DTYPE, bitcast=True)  # NaN
        else:
            bits = tl.where(e == 0, 0x00400000, e.to(tl.int32) << 23)
            scale = tl.where(e == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    else:
        scale = tl.load(ptrs, mask=mask, other=0.0)
        if scale.dtype.primitive_bitwidth == 8:
            scale = scale.to(DTYPE)
    return scale


@triton.jit
def _numbers(code, zero, scale, NAME: tl.constexpr, DTYPE: tl.constexpr):
    """codes 0..15 [int16] -> (code - zero) * scale in DTYPE, rounded once; zero is of int4 alone.

    A code among the mantissa's bits of a power of two, or in the places of exponent and mantissa, is a number already.
    """
    if DTYPE == tl.float32:
        if NAME == "int4":
            return (code.to(tl.float32) - zero) * scale.to(tl.float32)
        code = code.to(tl.int32)
        bits = ((code & 7) << 22) | ((code & 8) << 28)
        return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37 * scale.to(tl.float32)  # 2^126
    if NAME == "int4":
        if DTYPE == tl.bfloat16:
            number = (code | 0x4300).to(DTYPE, bitcast=True) - (zero + 128).to(DTYPE)
        else:
            number = (code | 0x6400).to(DTYPE, bitcast=True) - (zero + 1024).to(DTYPE)
    elif DTYPE == tl.bfloat16:
        bits = ((code & 7) << 6) | ((code & 8) << 12)
        number = bits.to(DTYPE, bitcast=True) * tl.full([], 8.507059173023462e37, DTYPE)  # 2^126
    else:
        bits = ((code & 7) << 9) | ((code & 8) << 12)
        number = bits.to(DTYPE, bitcast=True) * tl.full([], 16384.0, DTYPE)  # 2^14
    if scale.dtype == DTYPE:
        return number * scale
    return (number.to(tl.float32) * scale).to(DTYPE)


@triton.jit
def _spread(t_NG, ROWS: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, GROUPS] -> [ROWS, COLUMNS]: each for as many columns."""
    t = t_NG
    if GROUPS != 1:
        t = tl.reshape(tl.broadcast_to(t[:, :, None], [ROWS, GROUPS, COLUMNS // GROUPS]), [ROWS, COLUMNS])
    return t


@triton.constexpr_function
def unpacking(name, dtype):
    """PTX from a word of eight codes to four pairs of numbers, each rounded once: codes j and j + 4, the first one low.

    Operands: the four pairs, the word, the scale twice in a register, and for int4 that much of minus the power of two
    among whose mantissa's bits a code is a number, less the zero point. fma alone, since sm_80 has no packed bf16 sums
    or products: times one, or plus minus zero, is exact.
    """
    kind, places, implied, one = (
        ("bf16x2", 7, 0x4300, 0x3F80) if dtype == tl.bfloat16 else ("f16x2", 10, 0x6400, 0x3C00)
    )
    lines = [".reg .b32 a, b, one, none;", f"mov.b32 none, {0x80008000};"]

    def twice(bits):
        return bits << 16 | bits

    def shift(to, by):
        return f"shl.b32 {to}, $4, {by};" if by >= 0 else f"shr.u32 {to}, $4, {-by};"

    if name == "int4":
        lines.append(f"mov.b32 one, {twice(one)};")
        for j in range(4):
            lines += [shift("a", -4 * j), f"lop3.b32 ${j}, a, {twice(15)}, {twice(implied)}, 0xEA;"]  # a & b | c
            lines.append(f"fma.rn.{kind} ${j}, ${j}, one, $6;")
    else:  # exponent and mantissa in their places, which is the number times 2^-126 or 2^-14
        lines.append(f"mov.b32 one, {twice((252 if places == 7 else 28) + 1 << places)};")
        for j in range(4):
            lines += [shift("b", places - 1 - 4 * j), f"and.b32 b, b, {twice(7 << places - 1)};"]
            lines += [shift("a", 12 - 4 * j), f"lop3.b32 ${j}, a, {twice(0x8000)}, b, 0xEA;"]
            lines.append(f"fma.rn.{kind} ${j}, ${j}, one, none;")
    lines += [f"fma.rn.{kind} ${j}, ${j}, $5, none;" for j in range(4)]
    return "{" + "\n".join(lines) + "}"


@triton.jit
def _twice(t_NG):
    """int32: 16 bits in both halves."""
    return (t_NG.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) * 65537


@triton.jit
def halves_of(pair, DTYPE: tl.constexpr):
    """int32 [..] -> [.., 2]: its low and its high half."""
    low = pair.to(tl.int16).to(DTYPE, bitcast=True)
    return tl.join(low, (pair >> 16).to(tl.int16).to(DTYPE, bitcast=True))


@triton.jit
def _pair_of(word, j, zero, scale, NAME: tl.constexpr, DTYPE: tl.constexpr):
    """[.., 2]: the numbers of codes j and j + 4."""
    low = _numbers(((word >> (4 * j)) & 15).to(tl.int16), zero, scale, NAME, DTYPE)
    return tl.join(low, _numbers(((word >> (4 * j + 16)) & 15).to(tl.int16), zero, scale, NAME, DTYPE))


@triton.jit
def _unpacked(word, there, zero_NG, scale_NG, NAME: tl.constexpr, DTYPE: tl.constexpr, GROUPS: tl.constexpr,
              INTERPRET: tl.constexpr):  # fmt: skip
    """Numbers [rows, 8 words] of int32 words of codes [rows, words], columns in the order of `in_order`.

    Zero points, int16 codes of int4 or None, and scales are of groups of columns. Words that are not `there` (None: all
    are, or have a scale of 0) stand for zeros.
    """
    ROWS: tl.constexpr = word.shape[0]
    WORDS: tl.constexpr = word.shape[1]
    if scale_NG.dtype == DTYPE and DTYPE != tl.float32 and not INTERPRET:
        ASM: tl.constexpr = unpacking(NAME, DTYPE)
        IMPLIED: tl.constexpr = -0x3D00 if DTYPE == tl.bfloat16 else -0x1C00  # the bits of -128 or -1024
        scale = _spread(_twice(scale_NG), ROWS, GROUPS, WORDS)
        if there is not None:
            scale = tl.where(there, scale, 0)
        if NAME == "int4":
            if zero_NG is None:
                zero = _twice(tl.full([1, 1], IMPLIED + 8, tl.int16))
            else:
                zero = _spread(_twice(zero_NG + IMPLIED), ROWS, GROUPS, WORDS)
            p0, p1, p2, p3 = tl.inline_asm_elementwise(
                ASM, "=&r,=&r,=&r,=&r,r,r,r", [word, scale, zero], (tl.int32, tl.int32, tl.int32, tl.int32), True, 1
            )
        else:
            p0, p1, p2, p3 = tl.inline_asm_elementwise(
                ASM, "=&r,=&r,=&r,=&r,r,r", [word, scale], (tl.int32, tl.int32, tl.int32, tl.int32), True, 1
            )
        n0, n1, n2, n3 = (halves_of(p0, DTYPE), halves_of(p1, DTYPE), halves_of(p2, DTYPE), halves_of(p3, DTYPE))
    else:
        zero = tl.full([], 8.0, tl.float32)
        if zero_NG is not None:
            zero = _spread(zero_NG.to(tl.float32), ROWS, GROUPS, WORDS)
        scale = _spread(scale_NG, ROWS, GROUPS, WORDS)
        if there is not None:
            scale = tl.where(there, scale, 0.0)
        n0 = _pair_of(word, 0, zero, scale, NAME, DTYPE)
        n1 = _pair_of(word, 1, zero, scale, NAME, DTYPE)
        n2 = _pair_of(word, 2, zero, scale, NAME, DTYPE)
        n3 = _pair_of(word, 3, zero, scale, NAME, DTYPE)
    n = tl.join(tl.join(n0, n1), tl.join(n2, n3))  # [rows, words, half, j % 2, j // 2]
    n = tl.permute(tl.reshape(n, [ROWS, WORDS // 4, 4, 2, 2, 2]), [0, 1, 5, 4, 2, 3])
    return tl.reshape(n, [ROWS, 8 * WORDS])


@triton.jit
def in_order(a):
    """Columns of a as `_unpacked` has them: of each 32, by j, then word, then half."""
    ROWS: tl.constexpr = a.shape[0]
    COLUMNS: tl.constexpr = a.shape[1]
    a = tl.permute(tl.reshape(a, [ROWS, COLUMNS // 32, 4, 2, 4]), [0, 1, 4, 2, 3])
    return tl.reshape(a, [ROWS, COLUMNS])


@triton.jit
def _row_amax(a_rows_M, in_M, weight_M, INNER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
              WEIGHT: tl.constexpr, INTERPRET: tl.constexpr):  # fmt: skip
    """float32 [BLOCK_M]: the largest magnitude of each row."""
    d_K = tl.arange(0, BLOCK_K)
    a_ptrs = a_rows_M[:, None] + d_K[None, :]
    amax_M = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, INNER, BLOCK_K):
        a = load_a(a_ptrs, in_M, weight_M, d_K, INNER - start, True, INNER % BLOCK_K != 0, WEIGHT, INTERPRET)
        amax_M = tl.maximum(amax_M, tl.max(tl.abs(a.to(tl.float32)), 1))
        a_ptrs += BLOCK_K
    return amax_M


@triton.jit
def factor_and_scale(amax_M, LARGEST: tl.constexpr, LEAST: tl.constexpr):
    """What rows of that magnitude are multiplied by to become fp8, and what their products are then."""
    amax_M = tl.maximum(amax_M, LEAST)
    largest_M = LARGEST + tl.zeros_like(amax_M)
    return tl.div_rn(largest_M, amax_M), tl.div_rn(amax_M, largest_M)


@triton.jit
def to_fp8(a, factor_M, LARGEST: tl.constexpr, INTERPRET: tl.constexpr):
    """a times its row's factor as an fp8 number, cut off at the largest one; NaN stays."""
    a = a.to(tl.float32) * factor_M[:, None]
    a = tl.where(a > LARGEST, LARGEST, tl.where(a < -LARGEST, -LARGEST, a))
    if INTERPRET:  # its casts to fp8 do not round up to the next power of two
        exponent = (a.to(tl.int32, bitcast=True) >> 23) & 255
        step = (tl.maximum(exponent - 3, 118) << 23).to(tl.float32, bitcast=True)
        return (a / step + 12582912.0 - 12582912.0) * step  # 1.5 * 2^23, beyond which a float32 has no fractions
    return a.to(tl.float8e4nv)


def takes_part(coded: Coded, part: int) -> bool:
    """Whether so many columns are a part that `coded_products` can begin at: whole groups of a scale."""
    return coded.form is None or coded.form[2] == 1 or part % coded.form[1] == 0


@triton.jit
def coded_products(
    a_rows_M,
    in_M,
    weight_on_input_M,
    w_ptr,
    scale_ptrs,
    read_M,
    expert,
    column,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    STRIDE_ROW: tl.constexpr,
    GATED: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
    FORM: tl.constexpr,
    INTERPRET: tl.constexpr,
    STAGES: tl.constexpr = None,
    split=0,
    SPLITS: tl.constexpr = 1,
    LARGEST: tl.constexpr = LARGEST_E4M3,
    LEAST: tl.constexpr = LEAST_AMAX,
):
    """float32 [BLOCK_M, ROWS] of rows of a by rows of w, or [ROWS, BLOCK_M] with SWAP, as `grouped._products` has it.

    w_ptr points to the expert's q; scale_ptrs to all experts' scales, zero points, scales for a tensor and of inputs.
    The last of them, where it is not None, points to the scales of a, which is fp8 already; read_M are its rows.
    Of SPLITS parts of INNER columns each this is part `split`, at which a_rows_M points.
    """
    scale_ptr, zero_ptr, global_ptr, input_ptr, a_scale_ptr = scale_ptrs
    NAME: tl.constexpr = FORM[0]
    GROUP: tl.constexpr = FORM[1]  # columns of a scale
    SCALE_COLUMNS: tl.constexpr = FORM[2]
    SCALE_ROWS: tl.constexpr = FORM[3]
    SCALES_OF_HALVES: tl.constexpr = FORM[4]  # fp8_block: blocks of gate and up rows each
    PER_TENSOR: tl.constexpr = FORM[5]  # scales for a tensor: none, one, or one for each half
    INTERLEAVED: tl.constexpr = FORM[6]
    ZERO_WORD: tl.constexpr = FORM[7]  # bytes in which zero points of neighbouring rows lie; 0: there are none
    ZERO_STRIDE: tl.constexpr = FORM[8]
    INPUT_SCALES: tl.constexpr = FORM[9]  # one an expert
    WORDS: tl.constexpr = FORM[10]  # four bits: whether words of 32 bits may be loaded as such
    FP8: tl.constexpr = NAME == "fp8_block" or NAME == "fp8_channel" or NAME == "fp8_tensor"
    ROWS: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    RAGGED: tl.constexpr = INNER % BLOCK_K != 0
    WIDTH: tl.constexpr = BLOCK_K if FP8 else BLOCK_K // 8  # bytes, or words, of a row in a step
    STEP_SCALES: tl.constexpr = BLOCK_K // GROUP if GROUP < BLOCK_K else 1
    STEPS: tl.constexpr = (INNER + BLOCK_K - 1) // BLOCK_K
    tl.static_assert(NAME != "fp8_block" or BLOCK_K == GROUP)
    expert = tl.full([], 0, tl.int64) + expert  # a constant for the shared one
    d_K = tl.arange(0, BLOCK_K)
    a_ptrs = a_rows_M[:, None] + d_K[None, :]
    row_N, in_N = weight_rows(column, COLUMNS, BLOCK_N, ROWS, INTERLEAVED)
    b_K = tl.arange(0, WIDTH)
    if FP8:
        w_ptrs = w_ptr + row_N.to(tl.int64)[:, None] * STRIDE_ROW + b_K[None, :]
    elif WORDS:
        w_ptrs = w_ptr.to(tl.pointer_type(tl.int32)) + row_N.to(tl.int64)[:, None] * (STRIDE_ROW // 4) + b_K[None, :]
    else:
        w_ptrs = w_ptr + row_N.to(tl.int64)[:, None] * STRIDE_ROW + 4 * b_K[None, :]
    half_N = row_N % 2 if INTERLEAVED else row_N // COLUMNS

    if NAME != "fp8_tensor":
        scale_N = row_N
        if NAME == "fp8_block":
            scale_N = row_N // 128
            if SCALES_OF_HALVES:
                scale_N = half_N * (SCALE_ROWS // 2) + (row_N - half_N * COLUMNS) // 128
        scale_ptr += expert * (SCALE_ROWS * SCALE_COLUMNS)
        g_G = tl.arange(0, STEP_SCALES)
        s_ptrs = scale_ptr + scale_N[:, None] * SCALE_COLUMNS + g_G[None, :]
    if ZERO_WORD > 0:
        # Bytes of two rows each, ZERO_WORD of them side by side for each column.
        byte_N = row_N // (2 * ZERO_WORD) * (SCALE_COLUMNS * ZERO_WORD) + row_N // 2 % ZERO_WORD
        zero_ptrs = zero_ptr + expert * ZERO_STRIDE + byte_N[:, None] + g_G[None, :] * ZERO_WORD
    if SPLITS > 1:
        w_ptrs += split * (INNER // BLOCK_K * (WIDTH if FP8 or WORDS else 4 * WIDTH))
        if SCALE_COLUMNS > 1:
            s_ptrs += split * (INNER // GROUP)
            if ZERO_WORD > 0:
                zero_ptrs += split * (INNER // GROUP * ZERO_WORD)
    scale_M = tl.zeros([BLOCK_M], tl.float32)
    factor_M = scale_M
    if a_scale_ptr is not None:
        tl.static_assert(NAME == "fp8_block" or NAME == "fp8_channel")
        a_scale_ptrs = a_scale_ptr + read_M * (SCALE_COLUMNS if NAME == "fp8_block" else 1)
        if SPLITS > 1 and NAME == "fp8_block":
            a_scale_ptrs += split * (INNER // GROUP)
        scale_M = tl.load(a_scale_ptrs)
    elif NAME == "fp8_channel":
        amax_M = _row_amax(a_rows_M, in_M, weight_on_input_M, INNER, BLOCK_M, BLOCK_K, WEIGHT_ON_INPUT, INTERPRET)
        factor_M, scale_M = factor_and_scale(amax_M, LARGEST, LEAST)
    elif NAME == "fp8_tensor":
        scale_M = tl.load(input_ptr + expert if INPUT_SCALES else input_ptr) + tl.zeros([BLOCK_M], tl.float32)
        factor_M = tl.div_rn(1.0 + tl.zeros([BLOCK_M], tl.float32), scale_M)

    if SWAP:
        sum = tl.zeros([ROWS, BLOCK_M], tl.float32)
    else:
        sum = tl.zeros([BLOCK_M, ROWS], tl.float32)
    if NAME == "fp8_block":
        s = _load_scale(s_ptrs, in_N[:, None], tl.float32)
    for start in tl.range(0, INNER, BLOCK_K, num_stages=STAGES):
        a = load_a(a_ptrs, in_M, weight_on_input_M, d_K, INNER - start, SWAP, RAGGED, WEIGHT_ON_INPUT, INTERPRET)
        a_ptrs += BLOCK_K
        in_w = in_N[:, None]
        if RAGGED:
            in_w = in_w & (b_K < (INNER - start) * WIDTH // BLOCK_K)[None, :]
        w = tl.load(w_ptrs, mask=in_w, other=0.0 if FP8 else 0)
        if not FP8 and not WORDS:
            w = w.to(tl.int32)
            for byte in tl.static_range(1, 4):
                w |= tl.load(w_ptrs + byte, mask=in_w, other=0).to(tl.int32) << (8 * byte)
        w_ptrs += WIDTH if FP8 or WORDS else 4 * WIDTH
        if NAME == "fp8_block":  # what the next step takes, so that none waits for it
            at = start // GROUP + 1
            next_s = _load_scale(s_ptrs + at, (in_N & (0 * row_N + at < STEPS))[:, None], tl.float32)
            next_scale_M = scale_M
            if a_scale_ptr is not None:
                next_scale_M = tl.load(a_scale_ptrs + at, mask=0 * read_M + at < STEPS, other=0.0)
        elif not FP8:
            in_s = in_N[:, None]
            if RAGGED:
                in_s = in_s & (start // GROUP + g_G < SCALE_COLUMNS)[None, :]
            s = _load_scale(s_ptrs + start // GROUP, in_s, a.dtype)
        if FP8:
            q = a
            if a_scale_ptr is None:
                if NAME == "fp8_block":
                    amax_M = tl.max(tl.abs(a.to(tl.float32)), 1)
                    factor_M, scale_M = factor_and_scale(amax_M, LARGEST, LEAST)
                q = to_fp8(a, factor_M, LARGEST, INTERPRET)
            w = w.to(q.dtype)
            if SWAP:
                part = tl.dot(w, q.T)
                if NAME == "fp8_block":
                    part *= s * scale_M[None, :]
            else:
                part = tl.dot(q, w.T)
                if NAME == "fp8_block":
                    part *= scale_M[:, None] * tl.trans(s)
            sum += part
            if NAME == "fp8_block":
                s = next_s
                scale_M = next_scale_M
        else:
            zero = None
            if ZERO_WORD > 0:
                pair = tl.load(zero_ptrs + start // GROUP * ZERO_WORD, mask=in_s, other=0).to(tl.int16)
                zero = (pair >> (row_N % 2 * 4).to(tl.int16)[:, None]) & 15
            there = in_w if NAME == "int4" and RAGGED and INNER % GROUP != 0 else None  # 0 is no code of it
            n = _unpacked(w, there, zero, s, NAME, a.dtype, STEP_SCALES, INTERPRET)
            a = in_order(a)
            if SWAP:
                sum = tl.dot(n, a.T, sum, input_precision=PRECISION)
            else:
                sum = tl.dot(a, n.T, sum, input_precision=PRECISION)

    # What multiplies whole rows.
    if PER_TENSOR > 0:
        per_tensor_ptr = (scale_ptr if NAME == "fp8_tensor" else global_ptr) + expert * PER_TENSOR
        factor_N = tl.load(per_tensor_ptr + half_N * (PER_TENSOR - 1), mask=in_N, other=0.0)
        sum *= factor_N[:, None] if SWAP else factor_N[None, :]
    if NAME == "fp8_channel":
        factor_N = tl.load(scale_ptr + row_N, mask=in_N, other=0.0).to(tl.float32)
        sum *= factor_N[:, None] if SWAP else factor_N[None, :]
    if NAME == "fp8_channel" or NAME == "fp8_tensor":
        sum *= scale_M[None, :] if SWAP else scale_M[:, None]
    return sum
