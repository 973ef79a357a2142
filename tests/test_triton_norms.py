"""The fused batch norm against its formula in float64: on a GPU, or under Triton's interpreter."""

import pytest
import torch

import torchbcos as tb
from oracle import assert_agrees
from torchbcos import norms, ops

pytest.importorskip("triton")
from torchbcos.ops import launch, triton_norms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-3


def draw(*shape, dtype=torch.float32, seed=0, mean=0.0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) + mean
    values = values.to(DEVICE, dtype)
    return values.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else values


def formula(x, weight, bias):
    """As the definition has it; `bias` and `weight` may be None."""
    mean = x.mean((0, 2, 3), keepdim=True)
    variance = ((x - mean) ** 2).mean((0, 2, 3), keepdim=True)
    out = x / (variance + EPS).sqrt()
    out = out if weight is None else out * weight[:, None, None]
    return (out if bias is None else out + bias[:, None, None]), variance.flatten()


def fused(x, weight, bias):
    return triton_norms.batch_norm(x, weight, bias, EPS)


def leaf(x, **kind):
    return None if x is None else x.detach().to(**kind).requires_grad_()


def check(x, weight, bias, **tolerance):
    """Output, variance and all gradients of a random functional."""
    wide = [leaf(t, device="cpu", dtype=torch.float64) for t in (x, weight, bias)]
    here = [leaf(t) for t in (x, weight, bias)]
    found = []
    for function, given in ((formula, wide), (fused, here)):
        out, variance = function(*given)
        grad = draw(*x.shape, seed=7).to(out.device, out.dtype)
        leaves = [t for t in given if t is not None]
        found.append([out, variance, *torch.autograd.grad(out, leaves, grad)])
    for right, ours in zip(*found, strict=True):
        assert_agrees(ours, right, x.dtype, **tolerance)
    out = found[1][0]
    assert out.dtype == x.dtype
    assert_agrees(launch.remembered_squares(out), out.detach().float().square().sum(1))


@pytest.mark.parametrize("shape", [(2, 5, 6, 7), (3, 70, 5, 1), (1, 1, 1, 9), (2, 600, 2, 2)])
def test_equals_the_formula(shape):
    channels = shape[1]
    check(draw(*shape), draw(channels, seed=1), draw(channels, seed=2))


def test_many_programs_each_sum_over_several_tiles(monkeypatch):
    monkeypatch.setattr(triton_norms, "PROGRAMS", 4)
    triton_norms._norm.cache_clear()
    check(draw(4, 40, 11, 13), draw(40, seed=1), draw(40, seed=2))
    triton_norms._norm.cache_clear()


@pytest.mark.parametrize("view", [lambda x: x[:, ::2, 1:, ::3], lambda x: x.transpose(2, 3)])
def test_maps_that_do_not_lie_in_order(view):
    x = view(draw(2, 6, 8, 9).contiguous())
    check(x, draw(x.shape[1], seed=1), draw(x.shape[1], seed=2))


@pytest.mark.parametrize("has_weight", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_parameters_may_be_missing(has_weight, has_bias):
    weight, bias = draw(5, seed=1) if has_weight else None, draw(5, seed=2) if has_bias else None
    check(draw(2, 5, 6, 7), weight, bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_computed_in_float32(dtype):
    """Also with float32 parameters, as under autocast."""
    x = draw(4, 5, 6, 7, dtype=dtype, mean=1.0)
    check(x, draw(5, seed=1, dtype=dtype), draw(5, seed=2, dtype=dtype))
    check(x, draw(5, seed=1), draw(5, seed=2))


def test_a_mean_far_from_zero_costs_few_digits():
    """Σ x² - (Σ x)² / M would lose all of them: 1000² is 10⁶ times the variance."""
    x = draw(4, 3, 8, 8, mean=1000.0)
    out, variance = fused(x, None, None)
    right, right_variance = formula(x.cpu().double(), None, None)
    assert_agrees(variance, right_variance, tolerance=1e-4)
    assert_agrees(out, right, tolerance=1e-4)


def test_a_channel_that_is_constant():
    x = draw(2, 3, 4, 5)
    x[:, 1] = 0.25
    check(x, draw(3, seed=1), draw(3, seed=2))


def test_second_derivatives():
    found = []
    for function, device, dtype in (
        (formula, "cpu", torch.float64),
        (fused, DEVICE, torch.float32),
    ):
        x, weight, bias = (
            leaf(t, device=device, dtype=dtype)
            for t in (draw(2, 3, 4, 5), draw(3, seed=1), draw(3, seed=2))
        )
        out, _ = function(x, weight, bias)
        (grad,) = torch.autograd.grad((out**3).sum(), x, create_graph=True)
        found.append(torch.autograd.grad((grad**2).sum(), (x, weight, bias)))
    for right, ours in zip(*found, strict=True):
        assert_agrees(ours, right, tolerance=1e-4)


@pytest.fixture
def everywhere(monkeypatch):
    """The kernels are chosen on the CPU too, where the interpreter runs them."""
    known = lambda t: t.dtype in ops._FUSED_DTYPES and t.numel() > 0  # noqa: E731
    monkeypatch.setattr(ops, "_is_known", known)
    monkeypatch.setattr(ops, "_fusible", lambda x, other=None: known(x))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_the_layer_is_the_same_with_and_without(everywhere, momentum):
    torch.manual_seed(0)
    layer = norms.UncentredBatchNorm2d(5, momentum=momentum).to(DEVICE)
    with torch.no_grad():
        layer.weight.uniform_(0.5, 2)
        layer.bias.normal_()
    plain = norms.UncentredBatchNorm2d(5, momentum=momentum).double()
    plain.load_state_dict(layer.state_dict())
    for seed in (0, 1, 2):
        x = draw(3, 5, 4, 6, seed=seed, mean=0.5)
        assert_agrees(layer(x), plain(x.cpu().double()), torch.float32)
    assert_agrees(layer.running_var, plain.running_var, torch.float32)
    assert layer.num_batches_tracked == plain.num_batches_tracked == 3
    layer.eval(), plain.eval()
    with torch.no_grad():
        out = layer(x)
    assert launch.remembered_squares(out) is not None
    assert_agrees(out, plain(x.cpu().double()), torch.float32)
    assert_agrees(layer(x), out)  # with derivatives, that is by the plain way


def test_a_running_variance_that_goes_on_in_the_kernel_counts_as_changed(everywhere, monkeypatch):
    layer, x = norms.UncentredBatchNorm2d(5).to(DEVICE), draw(3, 5, 4, 6)
    monkeypatch.setattr(layer, "_track", None)
    before, version = layer.running_var.clone(), layer.running_var._version
    layer(x)
    assert layer.running_var._version > version
    expected = torch.lerp(before, x.float().var((0, 2, 3)), 0.1)
    assert_agrees(layer.running_var, expected)


@pytest.mark.parametrize(
    "running", [torch.ones(5, dtype=torch.float64), torch.ones(6)[1:], torch.ones(10)[::2]]
)
def test_a_running_variance_that_the_kernel_does_not_know_goes_on_too(everywhere, running):
    layer, x = norms.UncentredBatchNorm2d(5).to(DEVICE), draw(3, 5, 4, 6)
    layer.running_var = running.to(DEVICE)
    layer(x)
    expected = torch.lerp(torch.ones(5, device=DEVICE), x.float().var((0, 2, 3)), 0.1)
    assert_agrees(layer.running_var.float(), expected)


def test_explanations_take_the_plain_way(everywhere, monkeypatch):
    """Where the deviation is a constant: the derivative is weight / deviation."""
    monkeypatch.setattr(ops, "_twin", None)
    layer, x = norms.UncentredBatchNorm2d(5, eps=EPS).to(DEVICE), draw(3, 5, 4, 6).requires_grad_()
    with tb.explanation_mode():
        out = layer(x)
    right, variance = formula(x.detach().cpu().double(), None, None)
    assert_agrees(out, right, torch.float32)
    (grad,) = torch.autograd.grad(out.sum(), x)
    expected = (variance + EPS).rsqrt()[:, None, None].expand(x.shape)
    assert_agrees(grad, expected, torch.float32)
