import copy
import inspect
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import torchbcos as tb
from cases import conv_cases, linear_cases, mode, random
from oracle import Layer, assert_agrees

LAYERS = {
    tb.BcosLinear: nn.Linear,
    tb.BcosConv1d: nn.Conv1d,
    tb.BcosConv2d: nn.Conv2d,
    tb.BcosConv3d: nn.Conv3d,
}
CONVOLUTIONS = [tb.BcosConv1d, tb.BcosConv2d, tb.BcosConv3d]


def make(kind, *sizes, **arguments):
    """A layer with arguments that fit `kind`: convolutions get a kernel of 3."""
    return kind(*sizes, **arguments) if kind is tb.BcosLinear else kind(*sizes, 3, **arguments)


def an_input(kind, batch, channels, **options):
    dims = 0 if kind is tb.BcosLinear else CONVOLUTIONS.index(kind) + 1
    return torch.rand(batch, channels, *[5] * dims, **options)


@settings(max_examples=60)
@given(st.one_of(linear_cases(), conv_cases()))
def test_a_layer_is_its_function_with_stored_weights(case):
    x, weight, arguments = case
    if weight.dim() == 2:
        layer = tb.BcosLinear(
            weight.shape[1], len(weight) // arguments["max_out"], dtype=x.dtype, **arguments
        )
    else:
        layer = CONVOLUTIONS[weight.dim() - 3](
            x.shape[1],
            len(weight) // arguments["max_out"],
            weight.shape[2:],
            dtype=x.dtype,
            **arguments,
        )
    layer.load_state_dict({"weight": weight})
    flat = x.reshape(-1, x.shape[-1]) if weight.dim() == 2 else x
    expected = Layer(weight, **arguments).forward(flat)
    out = layer(x)
    assert_agrees(out.reshape(expected.shape), expected)


@pytest.mark.parametrize(("ours", "torchs"), LAYERS.items())
def test_arguments_are_torchs_own_in_order_and_the_rest_by_keyword(ours, torchs):
    theirs = list(inspect.signature(torchs).parameters)
    mine = inspect.signature(ours).parameters
    assert list(mine)[: len(theirs)] == theirs
    assert list(mine)[len(theirs) :] == ["b", "max_out", "scale", "eps"]
    assert all(mine[name].kind is inspect.Parameter.KEYWORD_ONLY for name in list(mine)[-4:])
    for name, parameter in inspect.signature(torchs).parameters.items():
        if name != "bias":
            assert mine[name].default == parameter.default


def test_a_convolution_has_the_attributes_of_torchs_own():
    arguments = {"stride": 2, "padding": (1, 0), "dilation": (1, 2), "groups": 2}
    ours = tb.BcosConv2d(4, 6, (3, 2), padding_mode="reflect", **arguments)
    theirs = nn.Conv2d(4, 6, (3, 2), padding_mode="reflect", bias=False, **arguments)
    for name in ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation"):
        assert getattr(ours, name) == getattr(theirs, name)
    for name in ("groups", "padding_mode", "bias"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert tb.BcosConv2d(4, 6, 3, padding="same").padding == "same"


@pytest.mark.parametrize(("ours", "torchs"), LAYERS.items())
def test_the_same_seed_draws_the_weights_of_torchs_own_layer(ours, torchs):
    torch.manual_seed(3)
    mine = make(ours, 4, 6)
    torch.manual_seed(3)
    theirs = torchs(4, 6, bias=False) if torchs is nn.Linear else torchs(4, 6, 3, bias=False)
    assert torch.equal(mine.weight, theirs.weight)
    mine.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("max_out", [1, 2])
def test_rows_start_with_a_norm_of_about_one_over_root_three(kind, max_out):
    torch.manual_seed(0)
    layer = make(kind, 600, 30, max_out=max_out)
    lengths = layer.weight.detach().flatten(1).norm(dim=1)
    assert len(lengths) == 30 * max_out
    assert (lengths - 1 / math.sqrt(3)).abs().max() < 0.06
    assert layer.weight.detach().mean().abs() < 0.01 * layer.weight.detach().abs().max()


@pytest.mark.parametrize("kind", LAYERS)
def test_fan_in_counts_the_inputs_of_one_unit(kind):
    dims = 0 if kind is tb.BcosLinear else CONVOLUTIONS.index(kind) + 1
    assert make(kind, 4, 6, max_out=2).fan_in == 4 * 3**dims
    if dims:
        assert make(kind, 4, 6, groups=2).fan_in == 2 * 3**dims


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (
            tb.BcosLinear(4, 6),
            "BcosLinear(in_features=4, out_features=6, b=2, max_out=1, scale=1)",
        ),
        (
            tb.BcosConv2d(4, 6, 3),
            "BcosConv2d(4, 6, kernel_size=(3, 3), stride=(1, 1), b=2, max_out=1, scale=1)",
        ),
        (
            tb.BcosConv1d(4, 6, 3, 2, "valid", b=1.25, max_out=2, scale=0.5),
            "BcosConv1d(4, 6, kernel_size=(3,), stride=(2,), b=1.25, max_out=2, scale=0.5)",
        ),
        (
            tb.BcosConv2d(4, 6, 3, 1, "same", 2, 2, padding_mode="circular"),
            "BcosConv2d(4, 6, kernel_size=(3, 3), stride=(1, 1), padding='same', dilation=(2, 2), "
            "groups=2, padding_mode='circular', b=2, max_out=1, scale=1)",
        ),
        (
            tb.BcosConv3d(4, 6, 1, padding=(0, 1, 2)),
            "BcosConv3d(4, 6, kernel_size=(1, 1, 1), stride=(1, 1, 1), padding=(0, 1, 2), b=2, "
            "max_out=1, scale=1)",
        ),
    ],
)
def test_repr_tells_every_argument_that_matters(layer, text):
    assert repr(layer) == text


@pytest.mark.parametrize("kind", LAYERS)
def test_the_state_dict_holds_the_weight_and_nothing_else(kind):
    layer = make(kind, 4, 6, max_out=2, b=1.5)
    assert list(layer.state_dict()) == ["weight"]
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    twin = make(kind, 4, 6, max_out=2, b=1.5)
    twin.load_state_dict(layer.state_dict(), strict=True)
    x = an_input(kind, 2, 4)
    assert torch.equal(twin(x), layer(x))


@pytest.mark.parametrize("kind", LAYERS)
def test_a_deep_copy_is_equal_and_independent(kind):
    layer = make(kind, 4, 6, max_out=2, b=1.5, scale=3.0)
    twin = copy.deepcopy(layer)
    x = an_input(kind, 2, 4)
    before = layer(x)
    assert torch.equal(twin(x), before)
    with torch.no_grad():
        twin.weight.neg_()
    assert torch.equal(layer(x), before)
    assert not torch.equal(twin(x), before)


@pytest.mark.parametrize("kind", LAYERS)
def test_device_and_type_are_those_asked_for(kind):
    assert make(kind, 4, 6, dtype=torch.float64).weight.dtype == torch.float64
    layer = make(kind, 4, 6, device="meta", max_out=2)
    assert layer.weight.is_meta
    out = layer(an_input(kind, 2, 4, device="meta"))
    real = make(kind, 4, 6, max_out=2)(an_input(kind, 2, 4))
    assert out.is_meta
    assert out.shape == real.shape
    layer.to_empty(device="cpu").reset_parameters()
    assert layer(an_input(kind, 2, 4)).isfinite().all()


@pytest.mark.parametrize("kind", LAYERS)
def test_training_turns_a_row_towards_its_input(kind):
    torch.manual_seed(0)
    layer = make(kind, 4, 1, b=2.0)
    x = an_input(kind, 1, 4)[(..., *[slice(3)] * (layer.weight.dim() - 2))]
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.1)
    bound = x.norm().item()
    assert layer(x).abs().item() < 0.5 * bound
    for _ in range(200):
        optimiser.zero_grad()
        (-layer(x).square().sum()).backward()
        optimiser.step()
    assert layer(x).abs().item() > 0.99 * bound


@pytest.mark.parametrize("explain", [False, True])
def test_vmap_over_inputs_and_over_weights(explain):
    layer = Layer(random(1, 6, 4, 3, 3), padding=1, max_out=2, b=1.5)
    x, weight = random(0, 3, 4, 5, 5), random(1, 6, 4, 3, 3)

    def function(x, w):
        return tb.functional.bcos_conv2d(x, w, padding=1, max_out=2, b=1.5)

    expected = layer.forward(x)
    with mode(explain):
        over_inputs = torch.func.vmap(function, in_dims=(0, None))(x, weight)
        over_weights = torch.func.vmap(function, in_dims=(None, 0))(x, torch.stack([weight] * 2))
    assert_agrees(over_inputs, expected)
    assert_agrees(over_weights, np.stack([expected] * 2))


@pytest.mark.parametrize("explain", [False, True])
def test_gradients_per_sample_by_vmap_of_grad(explain):
    x, weight = random(0, 3, 6), random(1, 4, 6)
    layer = Layer(weight, max_out=2, b=2.5)

    def loss(x, w):
        return tb.functional.bcos_linear(x, w, max_out=2, b=2.5).sum()

    per_sample = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(0, None))
    with mode(explain):
        by_x, by_weight = per_sample(x, weight)
    for n in range(3):
        expected = layer.gradients(x[n : n + 1], np.ones((1, 2)), explain)
        assert_agrees(by_x[n], expected[0][0])
        assert_agrees(by_weight[n], expected[1])


@pytest.mark.parametrize("explain", [False, True])
@pytest.mark.parametrize("b", [1.5, 2.0, 3.0])
def test_jacobians_can_be_computed_as_one_batch(b, explain):
    x, weight = random(0, 2, 6), random(1, 6, 6)

    def function(x):
        return tb.functional.bcos_linear(x, weight, max_out=2, b=b)

    with mode(explain):
        expected = torch.autograd.functional.jacobian(function, x)
        assert_agrees(torch.autograd.functional.jacobian(function, x, vectorize=True), expected)
        with torch.no_grad():
            assert_agrees(torch.func.jacrev(function)(x), expected)


def test_jacrev_of_jacrev_is_the_hessian_of_autograd():
    x, weight = random(0, 4), random(1, 2, 4)

    def function(x):
        return tb.functional.bcos_linear(x, weight, b=3.0).sum()

    hessian = torch.func.jacrev(torch.func.jacrev(function))(x)
    assert_agrees(hessian, torch.autograd.functional.hessian(function, x))
    assert hessian.abs().max() > 0.1


def test_numbers_of_numpy_are_numbers():
    one, two = np.int64(1), np.int64(2)
    layer = tb.BcosConv2d(
        np.int64(6), np.int64(8), np.int64(3), one, one, one, two, b=np.float32(2)
    )
    assert repr(layer) == repr(tb.BcosConv2d(6, 8, 3, 1, 1, 1, 2, b=2.0))
    assert type(layer.in_channels) is type(layer.kernel_size[0]) is type(layer.groups) is int
    assert repr(tb.BcosLinear(two, one, max_out=two)) == repr(tb.BcosLinear(2, 1, max_out=2))
    with pytest.raises(ValueError, match="must be an integer"):
        tb.BcosLinear(np.bool_(True), 2)
