"""A net is one linear map W(x): the product of its layers' explicit matrices (paper, eq. 12-14)."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import torchbcos as tb
from cases import gradients
from oracle import Layer, array, assert_agrees, average_pool_matrix
from torchbcos import norms


class Residual(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return x + self.body(x)


class Concatenated(nn.Module):
    def __init__(self, *branches):
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x):
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def explicit_matrix(module, x):
    """The product of the matrices that `module` is made of for `x` [C, *], and its output."""
    match module:
        case nn.Sequential():
            product = np.eye(x.size)
            for part in module:
                matrix, x = explicit_matrix(part, x)
                product = matrix @ product
            return product, x
        case Residual():
            matrix, out = explicit_matrix(module.body, x)
            return np.eye(x.size) + matrix, x + out
        case Concatenated():
            parts = [explicit_matrix(branch, x) for branch in module.branches]
            return np.vstack([m for m, _ in parts]), np.concatenate([out for _, out in parts])
        case nn.Flatten():
            return np.eye(x.size), x.reshape(-1)
        case nn.AvgPool2d():
            matrix = average_pool_matrix(x.shape, module.kernel_size, module.stride)
            side = (x.shape[1] - module.kernel_size) // module.stride + 1
            shape = (x.shape[0], side, side)
        case norms.UncentredBatchNorm2d():
            factor = array(module.weight) / np.sqrt(array(module.running_var) + module.eps)
            matrix = np.diag(np.broadcast_to(factor[:, None, None], x.shape).reshape(-1))
            shape = x.shape
        case norms.UncentredPositionNorm():
            deviation = np.sqrt(((x - x.mean(0)) ** 2).mean(0) + module.eps)
            factor = array(module.weight)[:, None, None] / deviation
            matrix, shape = np.diag(factor.reshape(-1)), x.shape
        case tb.BcosLinear():
            layer = Layer(module.weight, b=module.b, max_out=module.max_out, scale=module.scale)
            matrix, shape = layer.matrix(x), (-1,)
        case tb.BcosConv2d():
            names = ("stride", "padding", "dilation", "groups", "padding_mode")
            names += ("b", "max_out", "scale")
            layer = Layer(module.weight, **{name: getattr(module, name) for name in names})
            matrix, shape = layer.matrix(x), layer.output_shape(x[None])[1:]
        case _:
            raise NotImplementedError(type(module))
    return matrix, (matrix @ x.reshape(-1)).reshape(shape)


def linear_chain():
    return nn.Sequential(
        tb.BcosLinear(12, 8, b=1.5), tb.BcosLinear(8, 6, b=2, max_out=3), tb.BcosLinear(6, 4, b=3)
    )


def convolution_chain():
    return nn.Sequential(
        tb.BcosConv2d(3, 4, 3, padding=1, max_out=2, scale=2.0),
        tb.BcosConv2d(4, 4, 3, stride=2, padding=1, groups=2, max_out=2, b=1.3),
        tb.BcosConv2d(4, 3, 2, padding="same", padding_mode="reflect", b=2.5),
        nn.Flatten(),
        tb.BcosLinear(27, 5, max_out=2),
    )


def residual_sum():
    return nn.Sequential(
        Residual(tb.BcosConv2d(3, 3, 3, padding=1, max_out=2)),
        Residual(nn.Sequential(tb.BcosConv2d(3, 5, 1), tb.BcosConv2d(5, 3, 3, padding="same"))),
    )


def concatenation():
    return nn.Sequential(
        Concatenated(
            tb.BcosConv2d(3, 2, 3, padding=1),
            tb.BcosConv2d(3, 2, 3, padding=2, dilation=2, padding_mode="circular", b=1.5),
            nn.Sequential(),
        ),
        tb.BcosConv2d(7, 2, 1, max_out=2),
    )


def average_pool():
    return nn.Sequential(
        tb.BcosConv2d(3, 4, 2), nn.AvgPool2d(2, 2), tb.BcosConv2d(4, 3, 1), nn.AvgPool2d(2, 1)
    )


def normalised():
    net = nn.Sequential(
        tb.BcosConv2d(3, 4, 3, padding=1),
        norms.UncentredBatchNorm2d(4, bias=False),
        tb.BcosConv2d(4, 4, 3, padding=1, max_out=2),
        norms.UncentredPositionNorm(4, bias=False),
        tb.BcosConv2d(4, 2, 5, b=1.5),
    )
    with torch.no_grad():
        net[1].running_var.uniform_(0.5, 2)
        net[1].weight.uniform_(-2, 2)
        net[3].weight.uniform_(-2, 2)
    return net


NETS = [linear_chain, convolution_chain, residual_sum, concatenation, average_pool, normalised]


@pytest.mark.parametrize("net", NETS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_product_of_explicit_matrices_is_the_gradient_in_explanation_mode(net, dtype):
    torch.manual_seed(0)
    net = net().to(dtype).eval()
    shape = (12,) if isinstance(net[0], tb.BcosLinear) else (3, 5, 5)
    x = torch.rand(shape, dtype=dtype)
    matrix, expected = explicit_matrix(net, array(x))
    with tb.explanation_mode():
        jacobian = torch.autograd.functional.jacobian(lambda x: net(x[None])[0].flatten(), x)
    assert_agrees(jacobian.reshape(len(matrix), -1), matrix)
    out = net(x[None])[0]
    assert_agrees(out, expected.reshape(out.shape))
    assert_agrees(jacobian.reshape(len(matrix), -1) @ x.flatten(), out.flatten())


@pytest.mark.parametrize("net", NETS, ids=lambda f: f.__name__)
def test_a_net_computes_the_same_to_the_bit_in_explanation_mode(net):
    torch.manual_seed(0)
    net = net()
    x = torch.rand(2, 12) if isinstance(net[0], tb.BcosLinear) else torch.rand(2, 3, 5, 5)
    for training in (True, False):
        net.train(training)
        outside = copy.deepcopy(net)(x)
        with tb.explanation_mode():
            inside = net(x)
        assert torch.equal(inside, outside)


@pytest.mark.parametrize("net", NETS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("training", [True, False])
def test_explanation_mode_changes_no_module(net, training):
    torch.manual_seed(0)
    net = net().train(training)
    x = torch.rand(2, 12) if isinstance(net[0], tb.BcosLinear) else torch.rand(2, 3, 5, 5)
    before = copy.deepcopy(net.state_dict())
    attributes = {name: dict(vars(m)) for name, m in net.named_modules()}
    with tb.explanation_mode():
        gradients(net, x)
        assert {name: dict(vars(m)) for name, m in net.named_modules()} == attributes
    assert {name: dict(vars(m)) for name, m in net.named_modules()} == attributes
    assert all(m.training is training for m in net.modules())
    assert all(p.grad is None for p in net.parameters())
    after = net.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_second_derivatives_of_a_whole_net():
    torch.manual_seed(0)
    net = nn.Sequential(
        tb.BcosConv2d(2, 3, 2, b=2.5),
        norms.UncentredGroupNorm(1, 3),
        tb.BcosConv2d(3, 2, 2, max_out=2, b=3),
    ).double()
    x = torch.rand(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(net, x)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_loss_on_an_explanation_has_the_exact_gradient(depth):
    torch.manual_seed(0)
    layers = [
        tb.BcosConv2d(2, 3, 3, padding=1, b=2.5, max_out=2),
        norms.UncentredGroupNorm(1, 3),
        tb.BcosConv2d(3, 4, 3, b=2),
    ]
    nn.init.normal_(layers[1].bias)
    net = nn.Sequential(*layers[:depth], nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    x = torch.rand(2, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    weigh = torch.randn(2, 2, 4, 4, dtype=torch.float64)

    def loss():
        e = tb.explain(net, x, 1, create_graph=True)
        return (
            (e.weights[:, 0] * weigh).square().sum() + e.bias.sum() + e.contributions.pow(3).sum()
        )

    leaves = [x, *net.parameters()]
    analytic = torch.autograd.grad(loss(), leaves, allow_unused=True)
    for leaf, gradient in zip(leaves, analytic, strict=True):
        numeric = torch.zeros_like(leaf)
        for i in range(leaf.numel()):
            values = []
            for sign in (1, -1):
                with torch.no_grad():
                    leaf.view(-1)[i] += sign * 1e-6
                values.append(loss().item())
                with torch.no_grad():
                    leaf.view(-1)[i] -= sign * 1e-6
            numeric.view(-1)[i] = (values[0] - values[1]) / 2e-6
        torch.testing.assert_close(
            torch.zeros_like(leaf) if gradient is None else gradient, numeric, rtol=1e-5, atol=1e-6
        )


def test_a_loss_on_an_explanation_reaches_the_weights():
    torch.manual_seed(0)
    net = linear_chain().double()
    x = torch.rand(1, 12, dtype=torch.float64, requires_grad=True)
    with tb.explanation_mode():
        out = net(x)[0, 0]
    (row,) = torch.autograd.grad(out, x, create_graph=True)
    by_weights = torch.autograd.grad((row * torch.rand_like(row)).sum(), list(net.parameters()))
    assert all(g.isfinite().all() and g.abs().max() > 0 for g in by_weights)


def test_jacrev_in_explanation_mode_is_the_matrix():
    torch.manual_seed(0)
    net = convolution_chain().double()
    x = torch.rand(3, 5, 5, dtype=torch.float64)
    matrix, _ = explicit_matrix(net, array(x))
    with tb.explanation_mode():
        jacobian = torch.func.jacrev(lambda x: net(x[None])[0])(x)
    assert_agrees(jacobian.reshape(matrix.shape), matrix)
