"""The numerical operations that every B-cos layer is made of."""

from torchbcos.ops.reference import (
    accumulation_dtype,
    bcos_factor,
    bcos_scale,
    box_sum,
    multiply,
    sum_of_squares,
    unit_rows,
)

__all__ = [
    "accumulation_dtype",
    "bcos_factor",
    "bcos_scale",
    "box_sum",
    "multiply",
    "sum_of_squares",
    "unit_rows",
]
