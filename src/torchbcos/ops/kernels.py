"""Triton kernels for what surrounds the convolution of a B-cos layer; `ops.triton` launches them.

A tensor [N, C, H, W] is seen as pixels × channels: pixel m is (image, place), and lies at
image · stride_n + place · stride_p, so that both memory formats are the same code. Values are read
and written in the tensors' types and computed in float32.

Of a layer with groups of channels each group has pixels of its own: m is (image, group, place), or
(image, place, group) where channels lie last, so that neighbours in memory are neighbours in m. The
number of groups is `outer` in the first case and `inner` in the second; the other one is 1.
"""

# Capitals are compile-time constants: QUARTERS is 4·(b - 1) where that is a small integer, else -1;
# WHOLE is true where one block has all channels and no more. The number of channels is not one, for
# a DenseNet has a different number in each layer, and compiling for all of them takes minutes.

import triton
import triton.language as tl

#: Sizes whose divisibility by 16 makes no faster code.
GEOMETRY = ["in_h", "in_w", "out_h", "out_w"]


@triton.jit
def unit_rows(weight, rows, size, outputs, UNITS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows to unit norm, in each group from (output, unit) to (unit, output) order."""
    row = tl.program_id(0).to(tl.int64)
    target = _by_unit(row, outputs, UNITS)
    within = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        at = start + within
        w = tl.load(weight + row * size + at, mask=at < size, other=0.0).to(tl.float32)
        total += w * w
    factor = _inverse_root(tl.sum(total, 0))
    for start in range(0, size, BLOCK):
        at = start + within
        w = tl.load(weight + row * size + at, mask=at < size, other=0.0).to(tl.float32)
        tl.store(rows + target * size + at, (w * factor).to(rows.dtype.element_ty), mask=at < size)


@triton.jit
def unit_rows_backward(
    grad_rows, weight, grad, size, outputs, UNITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """grad = (grad_rows - ŵ (ŵ · grad_rows)) / ‖w‖; a zero row has no direction to turn."""
    row = tl.program_id(0).to(tl.int64)
    source = _by_unit(row, outputs, UNITS)
    within = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        at = start + within
        w = tl.load(weight + row * size + at, mask=at < size, other=0.0).to(tl.float32)
        total += w * w
    sq_norm = tl.sum(total, 0)
    inverse = _inverse_root(sq_norm)
    factor = tl.where(inverse > 0, inverse, 1.0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        at = start + within
        w = tl.load(weight + row * size + at, mask=at < size, other=0.0).to(tl.float32)
        g = tl.load(grad_rows + source * size + at, mask=at < size, other=0.0).to(tl.float32)
        total += (w * factor) * g
    along = tl.sum(total, 0)
    for start in range(0, size, BLOCK):
        at = start + within
        w = tl.load(weight + row * size + at, mask=at < size, other=0.0).to(tl.float32)
        g = tl.load(grad_rows + source * size + at, mask=at < size, other=0.0).to(tl.float32)
        value = (g - (w * factor) * along) * factor
        tl.store(grad + row * size + at, value.to(grad.dtype.element_ty), mask=at < size)


@triton.jit
def _by_unit(row, outputs, UNITS: tl.constexpr):
    """Where a row goes, of groups with so many outputs."""
    within = row % (outputs * UNITS)
    return row - within + (within % UNITS) * outputs + within // UNITS


@triton.jit
def _inverse_root(sq_norm):
    """1/√, and 0 of 0 and of what is too small for a normal number: the GPU's root of it is 0."""
    normal = sq_norm >= 1.2e-38
    return tl.where(normal, 1.0 / tl.sqrt(tl.where(normal, sq_norm, 1.0)), 0.0)


@triton.jit
def _power(a, exponent, QUARTERS: tl.constexpr):
    """a^exponent of a ≥ 0, by roots and products where that is enough."""
    if QUARTERS < 0:
        power = tl.exp2(exponent * tl.log2(tl.maximum(a, 1.2e-38)))
        return tl.where(a > 0, power, 0.0)
    power = tl.full(a.shape, 1.0, tl.float32)
    for _ in tl.static_range(QUARTERS // 4):
        power *= a
    if QUARTERS % 4 >= 2:
        power *= tl.sqrt(a)
    if QUARTERS % 2 == 1:
        power *= tl.sqrt(tl.sqrt(a))
    return power


@triton.jit
def _start(m, places, stride_n, stride_p):
    """Where pixel m begins."""
    return (m // places).to(tl.int64) * stride_n + (m % places).to(tl.int64) * stride_p


@triton.jit
def _start_of_group(m, places, outer, inner, stride_n, stride_p, stride_g):
    """Where pixel m of a group begins; groups begin `stride_g` from each other."""
    whole = m // inner
    image, group = whole // places // outer, m % inner + whole // places % outer
    at = image.to(tl.int64) * stride_n + (whole % places).to(tl.int64) * stride_p
    return at + group.to(tl.int64) * stride_g


@triton.jit
def sum_of_squares(
    x, sq, pixels, places, outer, inner, x_n, x_p, x_c,
    channels, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    if WHOLE:
        channels = BLOCK_C
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = m < pixels
    at = _start_of_group(m, places, outer, inner, x_n, x_p, channels * x_c)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, channels, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        mask = inside[:, None] & (c < channels)[None, :]
        value = tl.load(x + at[:, None] + c[None, :] * x_c, mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(value * value, 1)
    tl.store(sq + m, total, mask=inside)


@triton.jit
def _box_sum(
    sq, m, inside, inner, in_h, in_w, out_h, out_w, step_h, step_w, pad_h, pad_w, dil_h, dil_w,
    TAPS_H: tl.constexpr, TAPS_W: tl.constexpr, SQUARE: tl.constexpr,
):  # fmt: skip
    """Σ of `sq`, or with SQUARE of its squares, over the patch of each output pixel."""
    group, m = m % inner, m // inner
    image, y, x = m // (out_h * out_w), (m // out_w) % out_h, m % out_w
    total = tl.zeros(m.shape, tl.float32)
    for i in range(TAPS_H):
        row = y * step_h + i * dil_h - pad_h
        good = inside & (row >= 0) & (row < in_h)
        for j in tl.static_range(TAPS_W):
            column = x * step_w + j * dil_w - pad_w
            tap = good & (column >= 0) & (column < in_w)
            at = ((image * in_h + row) * in_w + column) * inner + group
            value = tl.load(sq + at, mask=tap, other=0.0).to(tl.float32)
            total += value * value if SQUARE else value
    return total


@triton.jit
def _box_sum_transposed(
    grad, m, inside, inner, in_h, in_w, out_h, out_w, step_h, step_w, pad_h, pad_w, dil_h, dil_w,
    TAPS_H: tl.constexpr, TAPS_W: tl.constexpr,
):  # fmt: skip
    """Σ of `grad` over the patches that each input pixel is in."""
    group, m = m % inner, m // inner
    image, y, x = m // (in_h * in_w), (m // in_w) % in_h, m % in_w
    total = tl.zeros(m.shape, tl.float32)
    for i in range(TAPS_H):
        row = y + pad_h - i * dil_h
        good = inside & (row >= 0) & (row % step_h == 0) & (row // step_h < out_h)
        for j in tl.static_range(TAPS_W):
            column = x + pad_w - j * dil_w
            tap = good & (column >= 0) & (column % step_w == 0) & (column // step_w < out_w)
            at = (image * out_h + row // step_h) * out_w + column // step_w
            total += tl.load(grad + at * inner + group, mask=tap, other=0.0)
    return total


@triton.jit(do_not_specialize_on_alignment=GEOMETRY)
def forward(
    lin, sq, out, out_sq, winner,
    pixels, places, outer, inner, lin_n, lin_p, lin_c, out_n, out_p, out_c,
    in_h, in_w, out_h, out_w, step_h, step_w, pad_h, pad_w, dil_h, dil_w,
    b, scale, eps,
    TAPS_H: tl.constexpr, TAPS_W: tl.constexpr, UNITS: tl.constexpr, QUARTERS: tl.constexpr,
    SQUARE: tl.constexpr, KEEP: tl.constexpr,
    channels, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The largest unit times scale · |c|^(b-1); with KEEP, which unit; without groups, Σ out²."""
    if WHOLE:
        channels = BLOCK_C
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = m < pixels
    inverse = tl.zeros([BLOCK_M], tl.float32)
    if QUARTERS != 0:
        inverse = _inverse_root(
            _box_sum(
                sq, m, inside, inner, in_h, in_w, out_h, out_w, step_h, step_w, pad_h, pad_w,
                dil_h, dil_w, TAPS_H, TAPS_W, SQUARE,
            )
            + eps
        )  # fmt: skip
    lin_at = _start_of_group(m, places, outer, inner, lin_n, lin_p, UNITS * channels * lin_c)
    out_at = _start_of_group(m, places, outer, inner, out_n, out_p, channels * out_c)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, channels, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        mask = inside[:, None] & (c < channels)[None, :]
        at = lin + lin_at[:, None] + c[None, :] * lin_c
        best = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        if UNITS > 1:
            which = tl.zeros([BLOCK_M, BLOCK_C], tl.int8)
            for unit in tl.static_range(1, UNITS):
                other = tl.load(at + unit * channels * lin_c, mask=mask, other=0.0).to(tl.float32)
                better = (other > best) | (other != other)
                best = tl.where(better, other, best)
                which = tl.where(better, unit, which).to(tl.int8)
            if KEEP:
                tl.store(winner + out_at[:, None] + c[None, :] * out_c, which, mask=mask)
        if QUARTERS == 0:
            value = best * scale
        else:
            cosine = tl.abs(best * inverse[:, None])
            if b > 2:  # rounding makes it exceed 1 a little, which a large b amplifies
                cosine = tl.minimum(cosine, 1.0)
            value = best * (_power(cosine, b - 1, QUARTERS) * scale)
        rounded = value.to(out.dtype.element_ty)
        tl.store(out + out_at[:, None] + c[None, :] * out_c, rounded, mask=mask)
        kept = rounded.to(tl.float32)
        squares += tl.sum(kept * kept, 1)
    if outer * inner == 1:
        tl.store(out_sq + m, squares, mask=inside)


@triton.jit(do_not_specialize_on_alignment=GEOMETRY)
def backward(
    grad, out, sq, winner, lin_grad, sq_norm_grad,
    pixels, places, outer, inner,
    grad_n, grad_p, grad_c, out_n, out_p, out_c, lin_n, lin_p, lin_c,
    in_h, in_w, out_h, out_w, step_h, step_w, pad_h, pad_w, dil_h, dil_w,
    b, scale, eps,
    TAPS_H: tl.constexpr, TAPS_W: tl.constexpr, UNITS: tl.constexpr, QUARTERS: tl.constexpr,
    SQUARE: tl.constexpr, FROZEN: tl.constexpr, NORMS: tl.constexpr,
    channels, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The derivatives by lin and, with NORMS, by n² of the patches."""
    if WHOLE:
        channels = BLOCK_C
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = m < pixels
    inverse = tl.zeros([BLOCK_M], tl.float32)
    if QUARTERS != 0:
        inverse = _inverse_root(
            _box_sum(
                sq, m, inside, inner, in_h, in_w, out_h, out_w, step_h, step_w, pad_h, pad_w,
                dil_h, dil_w, TAPS_H, TAPS_W, SQUARE,
            )
            + eps
        )  # fmt: skip
    ROOT: tl.constexpr = 2 if QUARTERS == 4 else -1  # (b - 1)/b in quarters; few b have it so
    slope = scale
    if not FROZEN:
        slope = scale * b
    grad_at = _start_of_group(m, places, outer, inner, grad_n, grad_p, channels * grad_c)
    out_at = _start_of_group(m, places, outer, inner, out_n, out_p, channels * out_c)
    lin_at = _start_of_group(m, places, outer, inner, lin_n, lin_p, UNITS * channels * lin_c)
    along = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, channels, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        mask = inside[:, None] & (c < channels)[None, :]
        g = tl.load(grad + grad_at[:, None] + c[None, :] * grad_c, mask=mask, other=0.0)
        g = g.to(tl.float32)
        if QUARTERS == 0:
            by_lin = g * slope
        else:
            value = tl.load(out + out_at[:, None] + c[None, :] * out_c, mask=mask, other=0.0)
            value = value.to(tl.float32)
            ratio = tl.abs(value) * (inverse / scale)[:, None]  # |c|^b
            if b > 2:
                ratio = tl.minimum(ratio, 1.0)
            by_lin = g * (_power(ratio, (b - 1) / b, ROOT) * slope)
            if NORMS:
                along += tl.sum(g * value, 1)
        at = lin_grad + lin_at[:, None] + c[None, :] * lin_c
        if UNITS == 1:
            tl.store(at, by_lin.to(lin_grad.dtype.element_ty), mask=mask)
        else:
            which = tl.load(winner + out_at[:, None] + c[None, :] * out_c, mask=mask, other=0)
            for unit in tl.static_range(UNITS):
                part = tl.where(which == unit, by_lin, 0.0).to(lin_grad.dtype.element_ty)
                tl.store(at + unit * channels * lin_c, part, mask=mask)
    if NORMS:
        tl.store(sq_norm_grad + m, along * (inverse * inverse) * ((1 - b) / 2), mask=inside)


@triton.jit(do_not_specialize_on_alignment=GEOMETRY)
def add_norm_gradient(
    grad, x, sq_norm_grad, pixels, places, outer, inner, grad_n, grad_p, grad_c, x_n, x_p, x_c,
    in_h, in_w, out_h, out_w, step_h, step_w, pad_h, pad_w, dil_h, dil_w,
    TAPS_H: tl.constexpr, TAPS_W: tl.constexpr,
    channels, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """grad += 2 · x · (derivative by the pixels' Σ x²), in place."""
    if WHOLE:
        channels = BLOCK_C
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = m < pixels
    twice = 2 * _box_sum_transposed(
        sq_norm_grad, m, inside, inner, in_h, in_w, out_h, out_w, step_h, step_w, pad_h, pad_w,
        dil_h, dil_w, TAPS_H, TAPS_W,
    )  # fmt: skip
    grad_at = _start_of_group(m, places, outer, inner, grad_n, grad_p, channels * grad_c)
    x_at = _start_of_group(m, places, outer, inner, x_n, x_p, channels * x_c)
    for start in range(0, channels, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        mask = inside[:, None] & (c < channels)[None, :]
        at = grad + grad_at[:, None] + c[None, :] * grad_c
        g = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(x + x_at[:, None] + c[None, :] * x_c, mask=mask, other=0.0).to(tl.float32)
        tl.store(at, (g + value * twice[:, None]).to(grad.dtype.element_ty), mask=mask)
