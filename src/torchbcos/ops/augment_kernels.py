"""Triton kernels for RandAugment; `ops.triton_augment` launches them.

Images are [N, 3, H, W] float32 in 0..1. Each has its row of fifteen numbers (`augment._table`): a
matrix [2, 3], then whether it moves, saturates, contrasts, sharpens, the factor of a blend, whether
it posterises, the limit of a solarisation, whether it stretches and equalises. An image costs what
its own operation costs. Divisions are exact where a rounded quotient would fall into another of the
256 levels.
"""

# Capitals are compile-time constants.

import triton
import triton.language as tl

_NUMBERS = tl.constexpr(15)
ROW = tl.constexpr(260)  # of what `measure` leaves: 256 values, mean, least, largest, nothing


@triton.jit
def measure(x, numbers, found, pixels, BLOCK: tl.constexpr):
    """For each channel of an image, where its operation needs them: mean, least and largest value,
    and what each of the 256 levels becomes when they are equalised."""
    row = tl.program_id(0).to(tl.int64)
    own, found = numbers + row // 3 * _NUMBERS, found + row * ROW
    equalises = tl.load(own + 14) > 0
    if (tl.load(own + 8) > 0) | (tl.load(own + 13) > 0) | equalises:
        total = tl.zeros([BLOCK], tl.float32)
        low = tl.full([BLOCK], float("inf"), tl.float32)
        high = tl.full([BLOCK], float("-inf"), tl.float32)
        counts = tl.zeros([256], tl.int32)
        for start in range(0, pixels, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < pixels
            value = tl.load(x + row * pixels + at, mask=inside, other=0.0)
            total += value
            low = tl.minimum(low, tl.where(inside, value, float("inf")))
            high = tl.maximum(high, tl.where(inside, value, float("-inf")))
            if equalises:
                counts += tl.histogram(_level(value), 256)
        tl.store(found + 256, tl.sum(total, 0) / pixels)
        tl.store(found + 257, tl.min(low, 0))
        tl.store(found + 258, tl.max(high, 0))
        if equalises:
            level = tl.arange(0, 256)
            beyond = tl.cdiv(pixels, BLOCK) * BLOCK - pixels  # were counted as black
            counts -= tl.where(level == 0, beyond, 0)
            top = tl.max(tl.where(counts > 0, level, 0), 0)
            step = (pixels - tl.sum(tl.where(level == top, counts, 0), 0)) // 255
            below = tl.cumsum(counts, 0) - counts
            spread = tl.minimum((below + step // 2) // tl.maximum(step, 1), 255)
            spread = tl.where(step > 0, spread, level)
            tl.store(found + level, tl.div_rn(spread.to(tl.float32), 255.0))


@triton.jit
def operate(x, numbers, found, out, height, width, levels, BLOCK: tl.constexpr):
    """The operation of each image; `levels` is how many become one where it posterises."""
    pixels = height * width
    blocks = tl.cdiv(pixels, BLOCK)
    image = (tl.program_id(0) // blocks).to(tl.int64)
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = at < pixels
    row, column = at // width, at % width
    x, out = x + image * 3 * pixels, out + image * 3 * pixels
    own, found = numbers + image * _NUMBERS, found + image * 3 * ROW
    moves, saturates, contrasts = tl.load(own + 6), tl.load(own + 7), tl.load(own + 8)
    sharpens, factor, posterises = tl.load(own + 9), tl.load(own + 10), tl.load(own + 11)
    limit, stretches, equalises = tl.load(own + 12), tl.load(own + 13), tl.load(own + 14)

    across = (2 * column + 1) / width - 1
    down = (2 * row + 1) / height - 1
    from_x = tl.load(own) * across + tl.load(own + 1) * down + tl.load(own + 2)
    from_y = tl.load(own + 3) * across + tl.load(own + 4) * down + tl.load(own + 5)
    from_x = ((from_x + 1) * width - 1) / 2
    from_y = ((from_y + 1) * height - 1) / 2

    grey = tl.zeros([BLOCK], tl.float32)
    if saturates > 0:
        grey = _grey(
            tl.load(x + at, mask=inside, other=0.0),
            tl.load(x + pixels + at, mask=inside, other=0.0),
            tl.load(x + 2 * pixels + at, mask=inside, other=0.0),
        )
    if contrasts > 0:
        at_mean = found + 256
        grey += _grey(tl.load(at_mean), tl.load(at_mean + ROW), tl.load(at_mean + 2 * ROW))
    within = inside & (row > 0) & (row < height - 1) & (column > 0) & (column < width - 1)

    for channel in tl.static_range(3):
        plane, of_channel = x + channel * pixels, found + channel * ROW
        value = tl.load(plane + at, mask=inside, other=0.0)
        if moves > 0:
            value = _between_pixels(plane, from_x, from_y, height, width)
        other = grey
        if sharpens > 0:
            other = _blurred(plane, at, value, within, width)
        value -= (value - other) * (1 - factor)
        if posterises > 0:
            value = tl.div_rn(tl.floor(tl.div_rn(value * 255, levels)) * levels, 255.0)
        value = tl.where(value >= limit, 1 - value, value)
        if stretches > 0:
            low, high = tl.load(of_channel + 257), tl.load(of_channel + 258)
            if high > low:
                value = tl.div_rn(value - low, high - low)
        value = tl.minimum(tl.maximum(value, 0.0), 1.0)
        if equalises > 0:
            value = tl.load(of_channel + _level(value))
        tl.store(out + channel * pixels + at, value, mask=inside)


@triton.jit
def _level(value):
    """0 to 255."""
    return tl.floor(tl.minimum(tl.maximum(value, 0.0), 1.0) * 255 + 0.5).to(tl.int32)


@triton.jit
def _grey(red, green, blue):
    return red * 0.299 + green * 0.587 + blue * 0.114


@triton.jit
def _between_pixels(plane, x, y, height, width):
    """The image at places between its pixels; black outside."""
    left, top = tl.floor(x), tl.floor(y)
    right_part, lower_part = x - left, y - top
    column, row = left.to(tl.int32), top.to(tl.int32)
    upper = _pixel(plane, row, column, height, width) * (1 - right_part)
    upper += _pixel(plane, row, column + 1, height, width) * right_part
    lower = _pixel(plane, row + 1, column, height, width) * (1 - right_part)
    lower += _pixel(plane, row + 1, column + 1, height, width) * right_part
    return upper * (1 - lower_part) + lower * lower_part


@triton.jit
def _pixel(plane, row, column, height, width):
    known = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    return tl.load(plane + row * width + column, mask=known, other=0.0)


@triton.jit
def _blurred(plane, at, value, within, width):
    """By [[1, 1, 1], [1, 5, 1], [1, 1, 1]] / 13; the outermost pixels stay."""
    total = value * 4
    for i in tl.static_range(3):
        for j in tl.static_range(3):
            total += tl.load(plane + at + (i - 1) * width + j - 1, mask=within, other=0.0)
    return tl.where(within, total / 13, value)
