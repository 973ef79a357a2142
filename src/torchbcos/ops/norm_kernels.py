"""Triton kernels for batch norms that subtract no mean; `ops.triton_norms` launches them.

Pixels and channels as in `kernels`. Sums over all pixels are made in parts, one for each program,
and added up afterwards, so that they come out the same every time.
"""

# Capitals are compile-time constants, WHOLE where one block has all channels and no more.

import triton
import triton.language as tl

from torchbcos.ops.kernels import _start


@triton.jit(do_not_specialize=["steps"])
def moments(
    x, parts, steps, pixels, places, x_n, x_p, x_c,
    channels, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Σ (x - s) and Σ (x - s)² to parts [P, 2, C]; s is the first pixel, lest digits cancel."""
    if WHOLE:
        channels = BLOCK_C
    blocks = tl.cdiv(channels, BLOCK_C)
    part = tl.program_id(0) // blocks
    c = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    known = c < channels
    shift = tl.load(x + c * x_c, mask=known, other=0.0).to(tl.float32)
    first = tl.zeros([BLOCK_C], tl.float32)
    second = tl.zeros([BLOCK_C], tl.float32)
    for step in range(steps):
        m = (part * steps + step) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (m < pixels)[:, None] & known[None, :]
        at = _start(m, places, x_n, x_p)[:, None] + c[None, :] * x_c
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        value = tl.where(mask, value - shift[None, :], 0.0)
        first += tl.sum(value, 0)
        second += tl.sum(value * value, 0)
    tl.store(parts + part * 2 * channels + c, first, mask=known)
    tl.store(parts + (part * 2 + 1) * channels + c, second, mask=known)


@triton.jit
def _total(parts, count, channels, c, known, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    """The sum of parts [P, 2, C], of which there are `count`."""
    first = tl.zeros([BLOCK_C], tl.float32)
    second = tl.zeros([BLOCK_C], tl.float32)
    for start in range(0, count, BLOCK_M):
        p = start + tl.arange(0, BLOCK_M)
        mask = (p < count)[:, None] & known[None, :]
        at = p[:, None] * 2 * channels + c[None, :]
        first += tl.sum(tl.load(parts + at, mask=mask, other=0.0), 0)
        second += tl.sum(tl.load(parts + at + channels, mask=mask, other=0.0), 0)
    return first, second


@triton.jit(do_not_specialize=["count", "pixels"])
def statistics(
    parts, x, mean, variance, inverse, running, count, pixels, eps, momentum, x_c,
    channels, TRACKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Mean, variance and 1/deviation of each channel, from the `count` parts of `moments`; and
    `running` goes on by `momentum` towards the variance of what the pixels are a sample of.
    """
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    known = c < channels
    first, second = _total(parts, count, channels, c, known, BLOCK_M, BLOCK_C)
    moved = first / pixels
    squared = tl.maximum(second / pixels - moved * moved, 0.0)
    shift = tl.load(x + c * x_c, mask=known, other=0.0).to(tl.float32)
    tl.store(mean + c, shift + moved, mask=known)
    tl.store(variance + c, squared, mask=known)
    tl.store(inverse + c, 1.0 / tl.sqrt(squared + eps), mask=known)
    if TRACKED:
        before = tl.load(running + c, mask=known, other=0.0)
        unbiased = squared * (pixels / tl.maximum(pixels - 1, 1))
        tl.store(running + c, before + momentum * (unbiased - before), mask=known)


@triton.jit(do_not_specialize=["count"])
def gradient_statistics(
    parts, inverse, sums, weight_grad, count,
    channels, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sums [2, C] of the `count` parts of `gradient_sums`, and the gradient by the weight."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    known = c < channels
    first, second = _total(parts, count, channels, c, known, BLOCK_M, BLOCK_C)
    tl.store(sums + c, first, mask=known)
    tl.store(sums + channels + c, second, mask=known)
    by_weight = second * tl.load(inverse + c, mask=known, other=0.0)
    tl.store(weight_grad + c, by_weight, mask=known)


@triton.jit
def normalise(
    x, inverse, weight, bias, out, out_sq, pixels, places, x_n, x_p, x_c, out_n, out_p, out_c,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    channels, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """x · inverse · weight + bias, and its sum of squares over the channels."""
    if WHOLE:
        channels = BLOCK_C
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = m < pixels
    x_at, out_at = _start(m, places, x_n, x_p), _start(m, places, out_n, out_p)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, channels, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        known = c < channels
        mask = inside[:, None] & known[None, :]
        value = tl.load(x + x_at[:, None] + c[None, :] * x_c, mask=mask, other=0.0).to(tl.float32)
        factor = tl.load(inverse + c, mask=known, other=0.0)
        if HAS_WEIGHT:
            factor *= tl.load(weight + c, mask=known, other=0.0).to(tl.float32)
        value *= factor[None, :]
        if HAS_BIAS:
            value += tl.load(bias + c, mask=known, other=0.0).to(tl.float32)[None, :]
        value = value.to(out.dtype.element_ty)
        tl.store(out + out_at[:, None] + c[None, :] * out_c, value, mask=mask)
        value = tl.where(mask, value.to(tl.float32), 0.0)
        total += tl.sum(value * value, 1)
    tl.store(out_sq + m, total, mask=inside)


@triton.jit(do_not_specialize=["steps"])
def gradient_sums(
    grad, x, parts, steps, pixels, places, g_n, g_p, g_c, x_n, x_p, x_c,
    channels, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Σ grad and Σ grad · x to parts [P, 2, C]."""
    if WHOLE:
        channels = BLOCK_C
    blocks = tl.cdiv(channels, BLOCK_C)
    part = tl.program_id(0) // blocks
    c = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    known = c < channels
    first = tl.zeros([BLOCK_C], tl.float32)
    second = tl.zeros([BLOCK_C], tl.float32)
    for step in range(steps):
        m = (part * steps + step) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (m < pixels)[:, None] & known[None, :]
        g_at = _start(m, places, g_n, g_p)[:, None] + c[None, :] * g_c
        x_at = _start(m, places, x_n, x_p)[:, None] + c[None, :] * x_c
        g = tl.load(grad + g_at, mask=mask, other=0.0).to(tl.float32)
        first += tl.sum(g, 0)
        second += tl.sum(g * tl.load(x + x_at, mask=mask, other=0.0).to(tl.float32), 0)
    tl.store(parts + part * 2 * channels + c, first, mask=known)
    tl.store(parts + (part * 2 + 1) * channels + c, second, mask=known)


@triton.jit
def normalise_backward(
    grad, x, mean, inverse, weight, sums, x_grad, pixels, places,
    g_n, g_p, g_c, x_n, x_p, x_c, out_n, out_p, out_c,
    HAS_WEIGHT: tl.constexpr,
    channels, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """weight · (r · grad - r³ · (x - mean) · Σ grad · x / pixels), r being 1/deviation."""
    if WHOLE:
        channels = BLOCK_C
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = m < pixels
    g_at, x_at = _start(m, places, g_n, g_p), _start(m, places, x_n, x_p)
    out_at = _start(m, places, out_n, out_p)
    for start in range(0, channels, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        known = c < channels
        mask = inside[:, None] & known[None, :]
        middle = tl.load(mean + c, mask=known, other=0.0)
        r = tl.load(inverse + c, mask=known, other=0.0)
        factor = r
        if HAS_WEIGHT:
            factor *= tl.load(weight + c, mask=known, other=0.0).to(tl.float32)
        slope = factor * r * r * tl.load(sums + channels + c, mask=known, other=0.0) / pixels
        g = tl.load(grad + g_at[:, None] + c[None, :] * g_c, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(x + x_at[:, None] + c[None, :] * x_c, mask=mask, other=0.0).to(tl.float32)
        value = factor[None, :] * g - slope[None, :] * (v - middle[None, :])
        value = value.to(x_grad.dtype.element_ty)
        tl.store(x_grad + out_at[:, None] + c[None, :] * out_c, value, mask=mask)
