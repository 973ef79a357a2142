"""Triton kernels for average pools and sums of maps; `ops.triton_maps` launches them.

Pixels and channels as in `kernels`.
"""

# Capitals are compile-time constants, WHOLE where one block has all channels and no more.

import triton
import triton.language as tl

from torchbcos.ops.kernels import GEOMETRY, _start


@triton.jit
def add(
    a, b, out, out_sq, pixels, places, a_n, a_p, a_c, b_n, b_p, b_c, out_n, out_p, out_c,
    channels, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """a + b, and its sum of squares."""
    if WHOLE:
        channels = BLOCK_C
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = m < pixels
    a_at, b_at = _start(m, places, a_n, a_p), _start(m, places, b_n, b_p)
    out_at = _start(m, places, out_n, out_p)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, channels, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        mask = inside[:, None] & (c < channels)[None, :]
        first = tl.load(a + a_at[:, None] + c[None, :] * a_c, mask=mask, other=0.0)
        second = tl.load(b + b_at[:, None] + c[None, :] * b_c, mask=mask, other=0.0)
        rounded = (first.to(tl.float32) + second.to(tl.float32)).to(out.dtype.element_ty)
        tl.store(out + out_at[:, None] + c[None, :] * out_c, rounded, mask=mask)
        squares += tl.sum(rounded.to(tl.float32) * rounded.to(tl.float32), 1)
    tl.store(out_sq + m, squares, mask=inside)


@triton.jit(do_not_specialize_on_alignment=GEOMETRY)
def average(
    x, out, out_sq, pixels, places, x_n, x_p, x_c, out_n, out_p, out_c,
    in_h, in_w, out_h, out_w, step_h, step_w, pad_h, pad_w, dil_h, dil_w,
    TAPS_H: tl.constexpr, TAPS_W: tl.constexpr,
    channels, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The mean over each patch, padding counted, and its sum of squares."""
    if WHOLE:
        channels = BLOCK_C
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = m < pixels
    image, top, left = m // places, (m // out_w) % out_h * step_h, m % out_w * step_w
    out_at = _start(m, places, out_n, out_p)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, channels, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        mask = inside[:, None] & (c < channels)[None, :]
        total = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
        for i in range(TAPS_H):
            row = top + i * dil_h - pad_h
            for j in tl.static_range(TAPS_W):
                column = left + j * dil_w - pad_w
                tap = (row >= 0) & (row < in_h) & (column >= 0) & (column < in_w)
                at = image.to(tl.int64) * x_n + (row * in_w + column).to(tl.int64) * x_p
                total += tl.load(
                    x + at[:, None] + c[None, :] * x_c, mask=mask & tap[:, None], other=0.0
                ).to(tl.float32)
        rounded = (total / (TAPS_H * TAPS_W)).to(out.dtype.element_ty)
        tl.store(out + out_at[:, None] + c[None, :] * out_c, rounded, mask=mask)
        squares += tl.sum(rounded.to(tl.float32) * rounded.to(tl.float32), 1)
    tl.store(out_sq + m, squares, mask=inside)


@triton.jit(do_not_specialize_on_alignment=GEOMETRY)
def average_backward(
    grad, x_grad, pixels, places, grad_n, grad_p, grad_c, x_n, x_p, x_c,
    in_h, in_w, out_h, out_w, step_h, step_w, pad_h, pad_w, dil_h, dil_w,
    TAPS_H: tl.constexpr, TAPS_W: tl.constexpr,
    channels, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    if WHOLE:
        channels = BLOCK_C
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = m < pixels
    image, y, x = m // places, (m // in_w) % in_h, m % in_w
    x_at = _start(m, places, x_n, x_p)
    for start in range(0, channels, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        mask = inside[:, None] & (c < channels)[None, :]
        total = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
        for i in range(TAPS_H):
            row = y + pad_h - i * dil_h
            good = (row >= 0) & (row % step_h == 0) & (row // step_h < out_h)
            for j in tl.static_range(TAPS_W):
                column = x + pad_w - j * dil_w
                tap = good & (column >= 0) & (column % step_w == 0) & (column // step_w < out_w)
                place = (row // step_h) * out_w + column // step_w
                at = image.to(tl.int64) * grad_n + place.to(tl.int64) * grad_p
                total += tl.load(
                    grad + at[:, None] + c[None, :] * grad_c, mask=mask & tap[:, None], other=0.0
                ).to(tl.float32)
        value = (total / (TAPS_H * TAPS_W)).to(x_grad.dtype.element_ty)
        tl.store(x_grad + x_at[:, None] + c[None, :] * x_c, value, mask=mask)
