"""Device functions more accurate than the hardware approximations that `tl.exp` and `tl.log` stand for."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exp(x):
    """e^x within 3 ulp at any x (tl.exp loses a bit for each doubling of |x|); 0 below -104, infinite from 89 on."""
    x = tl.where(x < -110.0, -110.0, x)
    x = tl.where(x > 89.0, 89.0, x)
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    # ln 2 in two parts; the first has so few bits that its product with n is exact.
    r = tl.fma(n, -0.693145751953125, x)
    r = tl.fma(n, -1.4286068203094172e-6, r)
    return tl.exp2(r * 1.4426950408889634) * tl.exp2(n)


@triton.jit
def sigmoid(x):
    return tl.div_rn(1.0, 1.0 + exp(-x))


@triton.jit
def softplus(x):
    """log(1 + e^x), accurate relative to itself also where it is tiny."""
    u = exp(-tl.abs(x))
    # log1p(u) = 2 atanh(u / (2 + u)); the argument is at most 1/3, where this many terms leave 1e-9.
    s = tl.div_rn(u, 2.0 + u)
    q = s * s
    p = 1.0 / 15.0
    p = p * q + 1.0 / 13.0
    p = p * q + 1.0 / 11.0
    p = p * q + 1.0 / 9.0
    p = p * q + 1.0 / 7.0
    p = p * q + 1.0 / 5.0
    p = p * q + 1.0 / 3.0
    p = p * q + 1.0
    return tl.where(x > 0, x, 0.0) + 2.0 * s * p
