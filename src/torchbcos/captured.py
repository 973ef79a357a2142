"""A step of training as one CUDA graph: small networks spend their time on launches otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

__all__ = ["capture"]


def capture(
    update: Callable[[Tensor, Tensor], None],
    images: Tensor,
    labels: Tensor,
    tensors: Sequence[Tensor],
    optimiser: torch.optim.Optimizer,
) -> Callable[[Tensor, Tensor], None]:
    """`update` for batches of the shape of these; all that it changed meanwhile is put back.

    `tensors` are those it changes, besides the state of the optimiser, which may still be empty.
    """

    def changed() -> list[Tensor]:
        state = [v for own in optimiser.state.values() for v in own.values()]
        return [*tensors, *(v for v in state if isinstance(v, Tensor))]

    images, labels = images.clone(memory_format=torch.preserve_format), labels.clone()
    kept = [t.detach().clone() for t in changed()]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            update(images, labels)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update(images, labels)
    for tensor, value in zip_longest(changed(), kept):  # what the optimiser made meanwhile is 0
        tensor.detach().copy_(value if value is not None else torch.zeros_like(tensor))

    def replay(new_images: Tensor, new_labels: Tensor) -> None:
        images.copy_(new_images)
        labels.copy_(new_labels)
        graph.replay()

    return replay
