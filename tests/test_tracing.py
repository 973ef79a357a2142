"""Graphs of gradients against autograd itself, at lengths of the batch that were not traced."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchbcos.tracing import trace


def gradient_of(function):
    """Images to d Σ c · function(x) / dx, with a c that tells all outputs apart."""

    def gradient(x):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = function(x)
            c = torch.linspace(1, 2, y[0].numel()).view(y.shape[1:])
            (found,) = torch.autograd.grad((y * c).sum(), x)
        return found

    return gradient


def pool(*arguments, **options):
    return lambda x: F.avg_pool2d(x, *arguments, **options)


FUNCTIONS = {
    "pool": pool(2),
    "overlapping pool": pool(3, 2, 1),
    "pool without padding's zeros": pool(3, 2, 1, count_include_pad=False),
    "pool beyond the edge": pool((3, 2), 2, ceil_mode=True),
    "padded pool beyond the edge": pool(3, 2, 1, ceil_mode=True),
    "sum": pool(3, 1, 1, divisor_override=1),
    "adaptive pool": lambda x: F.adaptive_avg_pool2d(x, (3, 4)),
    "adaptive pool to more pixels": lambda x: F.adaptive_avg_pool2d(x, 13),
    "mean": lambda x: F.adaptive_avg_pool2d(x, 1),
    "mean in channels last": lambda x: F.adaptive_avg_pool2d(
        x.contiguous(memory_format=torch.channels_last), (1, 1)
    ),
    "largest": lambda x: F.max_pool2d(x, 3, 2, 1),
    "convolution": nn.Conv2d(4, 6, 3),
    "strided": nn.Conv2d(4, 6, (3, 2), stride=(2, 3), padding=(1, 0)),
    "dilated groups": nn.Conv2d(4, 6, 3, padding=2, dilation=2, groups=2),
    "transposed": nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1),
    "mirrored": lambda x: F.pad(x, (1, 2, 3, 1), mode="reflect") ** 2,
    "repeated": lambda x: F.pad(x, (1, 2, 3, 0), mode="replicate") ** 2,
    "repeated and cut": lambda x: F.pad(x, (2, -3, -1, 14), mode="replicate") ** 2,
    "padded": lambda x: F.pad(x, (1, 0, 2, 3)) ** 2,
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_autograds(name):
    gradient = gradient_of(FUNCTIONS[name])
    torch.manual_seed(0)
    graph = trace(gradient, [torch.rand(2, 4, 11, 10)])
    for count in (1, 3):
        x = torch.rand(count, 4, 11, 10)
        torch.testing.assert_close(graph(x), gradient(x), rtol=1e-5, atol=1e-6)


def test_what_depends_on_weights_alone_is_computed_once():
    weight = torch.rand(3, 4)

    def function(x):
        return x @ (weight / weight.norm(dim=1, keepdim=True)).t()

    graph = trace(function, [torch.rand(2, 4)])
    called = [n.target for n in graph.graph.nodes if n.op == "call_function"]
    assert called == [torch.ops.aten.mm.default]
    x = torch.rand(5, 4)
    torch.testing.assert_close(graph(x), function(x))
