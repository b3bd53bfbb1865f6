"""Formats of quantised weights: which tensors each one has, and what they mean.

A weight of R rows and K columns, [E, R, K] for the routed experts and [R, K] for the shared one, is up to five tensors:

    w = (q - zero_point) * scale * global_scale

An element of q may hold several numbers of a row. A scale stands for a group of columns, of one row or of some. Zero
points and global scales are there in some formats alone. An fp8 format also quantises the rows that the weight
multiplies, by `quantize_rows`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

FormatName = Literal["fp8_block", "fp8_channel", "fp8_tensor", "nvfp4", "mxfp4", "int4"]

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
LARGEST_E4M3 = 448.0
GROUP = 128
"""Columns of a row that share a scale where not all do."""
LEAST_AMAX = 2.0**-100
"""Rows count as at least so large, so that a row of zeros has a scale."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0..7; the fourth bit is the sign."""
_E2M1_BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
INT4_ZERO = 8
"""What a symmetric int4 stores for 0."""


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
    """One format.

    Attributes:
        dtypes: of q. Elements of several bits' width hold numbers of a row from the lowest bits up; the bytes of int32
            are those of uint8, and int8 is taken for uint8.
        bits: of a number.
        scale_dtypes: uint8 is taken for float8_e8m0fnu, powers of two.
        rows: that share a scale: some, or None for all (of w13: of gate and up each).
        columns: that may share a scale; none for all.
        activations: over what an input row is quantised to float8_e4m3fn: "block" (each 128 columns), "token" (the
            row), "tensor" (by a static input_scale); None: it is not.
        has_global_scale, may_have_zero_point: as the names say.
    """

    dtypes: tuple[torch.dtype, ...]
    bits: int
    scale_dtypes: tuple[torch.dtype, ...]
    rows: int | None
    columns: tuple[int, ...]
    activations: Literal["block", "token", "tensor"] | None = None
    has_global_scale: bool = False
    may_have_zero_point: bool = False


FORMATS: dict[str, Format] = {
    "fp8_block": Format((E4M3,), 8, (torch.float32, E8M0, torch.uint8), 128, (128,), "block"),
    "fp8_channel": Format((E4M3,), 8, (torch.float32, torch.bfloat16), 1, (), "token"),
    "fp8_tensor": Format((E4M3,), 8, (torch.float32,), None, (), "tensor"),
    "nvfp4": Format((torch.uint8, torch.int8), 4, (E4M3,), 1, (16,), has_global_scale=True),
    "mxfp4": Format((torch.uint8, torch.int8), 4, (E8M0, torch.uint8), 1, (32,)),
    "int4": Format(
        (torch.int32, torch.uint8), 4, (torch.bfloat16, torch.float16, torch.float32), 1, (32, 64, 128),
        may_have_zero_point=True,
    ),
}  # fmt: skip


class Quantised(NamedTuple):
    """The tensors of one weight, [E, R, K] or [R, K]; E is left out in the second.

    Attributes:
        q: [E, R, K / numbers in an element], contiguous.
        scale: [E, row groups, column groups], or for the formats of one scale a tensor [E], [E, 1] or, of w13, [E, 2].
            fp8_block has ceil(R / 128) row groups, or those of gate and up rows each; where both are as many and the
            rows do not alternate, they are read as the latter.
        zero_point: of int4, what stands for 0, two a uint8 or eight an int32 along the rows:
            [E, ceil(R / 2 or 8), column groups].
        global_scale: float32 [E], [E, 1] or, of w13, [E, 2]; it multiplies.
        input_scale: float32 [E], or [1] or [] for all.
    """

    q: Tensor
    scale: Tensor
    zero_point: Tensor | None = None
    global_scale: Tensor | None = None
    input_scale: Tensor | None = None

    def expert(self, e: int) -> Quantised:
        """That of one expert."""
        parts = [t if t is None or (name == "input_scale" and t.numel() == 1) else t[e] for name, t in self._named()]
        return Quantised(*parts)  # type: ignore[arg-type]

    def _named(self) -> list[tuple[str, Tensor | None]]:
        return list(zip(self._fields, self, strict=True))


SUFFIXES = ("", "_scale", "_zero_point", "_global_scale", "_input_scale")
"""Of an argument's name, in the order of `Quantised`."""


def quantised(tensors: Mapping[str, Tensor | None], name: str) -> Quantised:
    """The tensors of weight `name` among those of a call, by the names of its arguments."""
    return Quantised(*(tensors.get(name + suffix) for suffix in SUFFIXES))  # type: ignore[arg-type]


# --- shapes ---------------------------------------------------------------------------------------------------------


def numbers(format: Format, dtype: torch.dtype) -> int:
    """How many an element of q holds."""
    return dtype.itemsize * 8 // format.bits


def scale_shapes(
    name: str, rows: int, columns: int, *, halves: int = 1, interleaved: bool = False
) -> list[tuple[int, ...]]:  # fmt: skip
    """Shapes that a scale may have, without E.

    Args:
        halves, interleaved: as in `dequantize`.
    """
    format = FORMATS[name]
    if format.rows is None:
        return per_tensor_shapes(halves)
    if format.rows == 1:
        groups = [math.ceil(columns / size) for size in format.columns] or [1]
        return [(rows, n) for n in dict.fromkeys(groups)]
    wide = math.ceil(columns / format.columns[0])
    tall = [math.ceil(rows / format.rows)]
    if halves == 2 and not interleaved:
        tall.insert(0, 2 * math.ceil(rows // 2 / format.rows))
    return [(n, wide) for n in dict.fromkeys(tall)]


def per_tensor_shapes(halves: int) -> list[tuple[int, ...]]:
    """Shapes of one scale a tensor, without E."""
    return [(), (1,), (2,)] if halves == 2 else [(), (1,)]


def group_size(name: str, columns: int, groups: int) -> int:
    """Columns that share a scale, where there are so many groups of them; all K count as one group."""
    sizes = FORMATS[name].columns
    return next((size for size in sizes if math.ceil(columns / size) == groups), columns)


def scale_row(rows: int, groups: int, halves: int, interleaved: bool) -> Tensor:
    """int64 [rows]: the row of an fp8_block scale that stands for each row of the weight."""
    row = torch.arange(rows)
    half = rows // halves
    each = math.ceil(half / 128)
    if halves == 2 and not interleaved and groups == 2 * each:
        return torch.where(row < half, row // 128, each + (row - half) // 128)
    return row // 128


def half_of_row(rows: int, halves: int, interleaved: bool) -> Tensor:
    """int64 [rows]: 0 for the first of each pair of gate and up rows, 1 for the second."""
    row = torch.arange(rows)
    return row % 2 if interleaved else row // (rows // halves)


# --- meaning --------------------------------------------------------------------------------------------------------


def dequantize(
    name: str, weight: Quantised, columns: int, *, halves: int = 1, interleaved: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Tensor:  # fmt: skip
    """The weight itself, [E, R, K] or [R, K] in `dtype`.

    Args:
        columns: K.
        halves: 2 for a w13 of gate and up rows, else 1.
        interleaved: whether such rows alternate.
    """
    w = unpack(name, weight.q, dtype)[..., :columns]
    rows = w.shape[-2]
    format = FORMATS[name]
    if format.rows is None:
        return w * _per_row(weight.scale, w.dim(), rows, halves, interleaved, dtype)
    scale = power_of_two(weight.scale).to(dtype)
    size = group_size(name, columns, scale.shape[-1])
    if weight.zero_point is not None:
        _each_group(w, size, torch.Tensor.sub_, unpack_rows(weight.zero_point, rows, dtype))
    elif name == "int4":
        w -= INT4_ZERO
    if format.rows > 1:
        scale = scale[..., scale_row(rows, scale.shape[-2], halves, interleaved).to(w.device), :]
    _each_group(w, size, torch.Tensor.mul_, scale)
    if weight.global_scale is not None:
        w = w * _per_row(weight.global_scale, w.dim(), rows, halves, interleaved, dtype)
    return w


def unpack(name: str, q: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that q stores, [..., R, K]; of int4 0..15."""
    if FORMATS[name].bits == 8:
        return q.to(dtype)
    values = range(16) if name == "int4" else (*E2M1, *(-v for v in E2M1))
    pairs = torch.tensor([(low, high) for high in values for low in values], dtype=dtype, device=q.device)
    return torch.nn.functional.embedding(bytes_of(q).int(), pairs).flatten(-2)


def pack(nibbles: Tensor, dtype: torch.dtype = torch.uint8) -> Tensor:
    """uint8 [..., K] below 16 -> [..., K / 2] uint8 or [..., K / 8] int32, the first number in the lowest bits."""
    low, high = nibbles[..., 0::2], nibbles[..., 1::2]
    return _as(low | high << 4, dtype)


def unpack_rows(packed: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """[..., R / 2, G] uint8 or [..., R / 8, G] int32 -> [..., R, G]: zero points are packed along the rows."""
    return _nibbles(packed.mT).mT[..., :rows, :].to(dtype)


def pack_rows(nibbles: Tensor, dtype: torch.dtype = torch.uint8) -> Tensor:
    """The reverse, with zeros after the last row."""
    return pack(_padded(nibbles.mT, dtype.itemsize * 2), dtype).mT.clone(memory_format=torch.contiguous_format)


def power_of_two(scale: Tensor) -> Tensor:
    """The same scale with bytes taken for what they mean."""
    return scale.view(E8M0) if scale.dtype == torch.uint8 else scale


def bytes_of(packed: Tensor) -> Tensor:
    """uint8 [..., K * itemsize] of [..., K]: the same memory if it is contiguous, whatever strides dims of 1 have."""
    return _as(packed, torch.uint8)


def _as(t: Tensor, dtype: torch.dtype) -> Tensor:
    columns = t.shape[-1] * t.dtype.itemsize // dtype.itemsize
    return t.reshape(-1).view(dtype).view(*t.shape[:-1], columns)


def _nibbles(packed: Tensor) -> Tensor:
    q = bytes_of(packed)
    return torch.stack((q & 15, q >> 4), -1).flatten(-2)


def _padded(t: Tensor, multiple: int) -> Tensor:
    return torch.nn.functional.pad(t, (0, -t.shape[-1] % multiple))


def _each_group(w: Tensor, size: int, change: Callable[[Tensor, Tensor], Tensor], by: Tensor) -> None:
    """Changes [..., R, K] in place: each `size` columns, and what is left of a row, by their column of `by`."""
    whole = w.shape[-1] // size
    change(w[..., : whole * size].unflatten(-1, (whole, size)), by[..., :whole].unsqueeze(-1))
    change(w[..., whole * size :], by[..., whole:])


def _per_row(
    scale: Tensor, dims: int, rows: int, halves: int, interleaved: bool, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """A scale a tensor, or one a half of it, as [..., R or 1, 1]."""
    scale = scale.to(dtype)
    if scale.dim() == dims - 2:
        return scale[..., None, None]
    if scale.shape[-1] == 1:
        return scale[..., None]
    return scale[..., half_of_row(rows, halves, interleaved).to(scale.device)][..., None]


# --- rows that an fp8 weight multiplies -------------------------------------------------------------------------------


def quantize_rows(x: Tensor, name: str, input_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [..., K] -> (float8_e4m3fn [..., K], float32 scale [..., groups]); x is about q * scale.

    A group's largest magnitude becomes the largest fp8 number, by a float32 product with 448 / amax. What is beyond it,
    under an input_scale, becomes the largest number too. NaN stays NaN.

    Args:
        x: in the model's dtype; a group is `Format.activations`, the last one of a row may be shorter.
        input_scale: float32, broadcast against [..., 1]; of fp8_tensor.
    """
    x = x.float()
    if input_scale is not None:
        scale = input_scale.float().expand(*x.shape[:-1], 1)
        return _to_e4m3(x * (torch.ones_like(scale) / scale)), scale
    columns = x.shape[-1]
    size = GROUP if FORMATS[name].activations == "block" else columns
    groups = _padded(x, size).unflatten(-1, (-1, size))
    amax = groups.abs().amax(-1).clamp(min=LEAST_AMAX)
    largest = torch.full_like(amax, LARGEST_E4M3)  # torch divides by a number, and a number, by way of a reciprocal
    q = _to_e4m3(groups * (largest / amax).unsqueeze(-1))
    return q.flatten(-2)[..., :columns].contiguous(), amax / largest


def quantized_rows(x: Tensor, name: str | None, input_scale: Tensor | None = None) -> Tensor:
    """float32 [..., K]: what a weight of the format multiplies in place of x; x itself where it quantises no rows."""
    if name is None or FORMATS[name].activations is None:
        return x
    q, scale = quantize_rows(x, name, input_scale)
    size = GROUP if FORMATS[name].activations == "block" else x.shape[-1]
    return q.float() * scale.repeat_interleave(size, -1)[..., : x.shape[-1]]


def _to_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST_E4M3, LARGEST_E4M3).to(E4M3)


# --- making them ----------------------------------------------------------------------------------------------------


def quantize(
    name: str, w: Tensor, *, halves: int = 1, interleaved: bool = False, group: int = 32, zero_point: bool = False,
    input_scale: Tensor | None = None,
) -> Quantised:  # fmt: skip
    """w [E, R, K] or [R, K] in a format, each number the nearest (of two, the even one) of what its scale allows.

    Scales are as large as the largest number needs; those of mxfp4 are the powers of two of its specification, which
    cut off the largest numbers by up to a quarter; those of int4 are bfloat16 where w is, else
    float32. Weights that share a scale with one that is not finite become NaN.

    Args:
        halves, interleaved: as in `dequantize`. Gate and up rows never share a scale, but for those of an fp8_block
            w13 whose rows alternate.
        group: columns that share a scale of int4.
        zero_point: of int4; else the numbers are symmetric.
        input_scale: float32 [E], [1] or [], kept as it is; of fp8_tensor, whose calls need one.

    Raises:
        ValueError: there is no such format.
    """
    if name not in FORMATS:
        raise ValueError(f"name: expected one of {', '.join(map(repr, FORMATS))}, got {name!r}")
    dtype, w = w.dtype, w.detach().float()
    w = w.where(w.isfinite(), math.nan)
    *_, rows, columns = w.shape
    if FORMATS[name].rows is None:
        scale = _amax_of_halves(w, halves, interleaved) / LARGEST_E4M3
        q = _to_e4m3(w / _per_row(scale, w.dim(), rows, halves, interleaved, torch.float32))
        return Quantised(q, scale, input_scale=input_scale)
    if name == "fp8_block":
        return _fp8_block(w, halves, interleaved)
    global_scale = None
    if name == "nvfp4":
        global_scale = _amax_of_halves(w, halves, interleaved) / (LARGEST_E4M3 * E2M1[-1])
        w = w / _per_row(global_scale, w.dim(), rows, halves, interleaved, torch.float32)
    size = {"fp8_channel": columns, "nvfp4": 16, "mxfp4": 32}.get(name, group)
    groups = _padded(w, size).unflatten(-1, (-1, size))
    amax = groups.abs().amax(-1).clamp(min=LEAST_AMAX)
    if name == "fp8_channel":
        scale = amax / LARGEST_E4M3
        return Quantised(_to_e4m3(w / scale), scale)
    if name == "int4":
        return _int4(groups, columns, zero_point, dtype)
    if name == "nvfp4":
        scale = (amax / E2M1[-1]).clamp(min=2.0**-9).to(E4M3)  # the least above 0
        divisor = scale.float()
    else:
        exponent = torch.frexp(amax).exponent - 3  # of the largest power of two that 4 times is no more
        scale = (exponent + 127).clamp(0, 254).where(amax.isfinite(), 255).to(torch.uint8).view(E8M0)
        divisor = scale.float()
    codes = _e2m1_codes(groups / divisor.unsqueeze(-1)).flatten(-2)[..., :columns]
    return Quantised(pack(codes), scale, global_scale=global_scale)


def _amax_of_halves(w: Tensor, halves: int, interleaved: bool) -> Tensor:
    """[E, 2] or [2] of a w13 of gate and up rows, else [E] or []."""
    if halves == 1:
        return w.abs().amax((-2, -1)).clamp(min=LEAST_AMAX)
    sides = (w[..., 0::2, :], w[..., 1::2, :]) if interleaved else w.chunk(2, -2)
    return torch.stack([side.abs().amax((-2, -1)) for side in sides], -1).clamp(min=LEAST_AMAX)


def _fp8_block(w: Tensor, halves: int, interleaved: bool) -> Quantised:
    parts = w.chunk(2, -2) if halves == 2 and not interleaved else (w,)
    made = []
    for part in parts:
        rows, columns = part.shape[-2:]
        blocks = _padded(_padded(part, 128).mT, 128).mT.unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128))
        scale = blocks.abs().amax((-3, -1)).clamp(min=LEAST_AMAX) / LARGEST_E4M3
        q = _to_e4m3(blocks / scale[..., :, None, :, None]).flatten(-4, -3).flatten(-2)
        made.append((q[..., :rows, :columns], scale))
    return Quantised(torch.cat([q for q, _ in made], -2).contiguous(), torch.cat([s for _, s in made], -2))


def _int4(groups: Tensor, columns: int, zero_point: bool, dtype: torch.dtype) -> Quantised:
    """Scales of bfloat16 weights are so too: those of released checkpoints are, and kernels are fastest with these."""
    dtype = dtype if dtype == torch.bfloat16 else torch.float32
    if not zero_point:
        scale = (groups.abs().amax(-1) / 7).clamp(min=LEAST_AMAX).to(dtype)
        q = (groups / scale.unsqueeze(-1)).round() + INT4_ZERO
        return Quantised(pack(_codes(q, columns)), scale)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).clamp(min=LEAST_AMAX).to(dtype)
    zero = (-low / scale).round().clamp(0, 15)
    q = (groups / scale.unsqueeze(-1)).round() + zero.unsqueeze(-1)
    return Quantised(pack(_codes(q, columns)), scale, pack_rows(zero.to(torch.uint8)))


def _codes(q: Tensor, columns: int) -> Tensor:
    return q.clamp(0, 15).to(torch.uint8).flatten(-2)[..., :columns]


def _e2m1_codes(x: Tensor) -> Tensor:
    between = torch.tensor(_E2M1_BETWEEN, device=x.device)
    code = torch.bucketize(x.abs(), between)
    is_tie = (code < len(_E2M1_BETWEEN)) & (x.abs() == between[code.clamp(max=len(_E2M1_BETWEEN) - 1)])
    code = code + (is_tie & (code % 2 == 1))
    return (code + 8 * (x < 0)).to(torch.uint8)
