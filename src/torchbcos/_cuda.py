"""Settings of CUDA's libraries, which are the process's: borrowed, and given back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.backends import cudnn, mkldnn

__all__ = ["cuda_settings"]

T = TypeVar("T")


@contextmanager
def cuda_settings(*, tf32: bool | None = None, benchmark: bool | None = None) -> Iterator[None]:
    """TF32 in convolutions and products, and cuDNN's search for the fastest algorithm.

    None leaves a setting as it is; afterwards all are what they were.
    """
    searched = cudnn.benchmark
    if benchmark is not None:
        cudnn.benchmark = benchmark
    try:
        if tf32 is None:
            yield
        else:
            with _tf32(tf32):
                yield
    finally:
        cudnn.benchmark = searched


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """Torch knows it twice, by switches and by precisions, and not always the one by the other."""
    cuda = torch.backends.cuda.matmul
    places: list[Any] = [cudnn.conv, cudnn.rnn, cuda, mkldnn.matmul]  # type: ignore[attr-defined]
    precisions = [place.fp32_precision for place in places]
    convolutions, products = _told(lambda: cudnn.allow_tf32), _told(lambda: cuda.allow_tf32)
    both = _told(torch.get_float32_matmul_precision)
    cudnn.allow_tf32 = cuda.allow_tf32 = allowed
    for place in places[:3]:
        place.fp32_precision = "tf32" if allowed else "ieee"
    try:
        yield
    finally:
        if convolutions is not None:
            cudnn.allow_tf32 = convolutions
        if products is not None:
            cuda.allow_tf32 = products
        if both is not None:
            torch.set_float32_matmul_precision(both)
        for place, precision in zip(places, precisions, strict=True):
            place.fp32_precision = precision


def _told(ask: Callable[[], T]) -> T | None:
    try:
        return ask()
    except RuntimeError:  # where precisions were set that the switch cannot tell
        return None
