import functools
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

from cases import CONV, conv, conv_cases, gradients, linear_cases, mode, random
from oracle import TOLERANCE, Layer, array, assert_agrees
from torchbcos import functional as BF
from torchbcos.ops.reference import LARGE

HALF = [torch.float16, torch.bfloat16]
EPS = st.sampled_from([{}, {"eps": 1e-6}, {"eps": 0.7}])
LARGE_B = [1.01, 1.5, 2.0, 6.0, 30.0, 200.0]


def assert_equals_oracle(function, x, weight, arguments, dtype, explain):
    x, weight = x.to(dtype), weight.to(dtype)
    layer = Layer(weight, **arguments)
    flat = x if weight.dim() > 2 else x.reshape(-1, x.shape[-1])
    expected = layer.forward(flat)
    out_shape = expected.shape if weight.dim() > 2 else (*x.shape[:-1], expected.shape[1])
    weights = random(7, *expected.shape)
    expected_x, expected_weight = layer.gradients(flat, weights, explain)

    out, by_x, by_weight = gradients(
        lambda x, w: function(x, w, **arguments),
        x,
        weight,
        explain=explain,
        weights=weights.reshape(out_shape),
    )
    assert out.dtype == by_x.dtype == by_weight.dtype == dtype
    assert_agrees(out, expected.reshape(out_shape))
    assert_agrees(by_x, expected_x.reshape(x.shape))
    if weight[0].numel() > 1:
        assert_agrees(by_weight, expected_weight)
    else:  # a direction of one number cannot turn: only the rounding of opposite terms is left
        terms = arguments["b"] * arguments.get("scale", 1) * x.abs().max() * weights.abs().sum()
        assert by_weight.abs().max() <= TOLERANCE[dtype] * terms / weight.abs().min()


@given(linear_cases(), EPS, st.sampled_from([torch.float64, torch.float32]), st.booleans())
def test_linear_and_its_gradients_equal_the_oracle(case, eps, dtype, explain):
    x, weight, arguments = case
    assert_equals_oracle(BF.bcos_linear, x, weight, {**arguments, **eps}, dtype, explain)


@settings(max_examples=300)
@given(conv_cases(), EPS, st.sampled_from([torch.float64, torch.float32]), st.booleans())
def test_convolution_and_its_gradients_equal_the_oracle(case, eps, dtype, explain):
    x, weight, arguments = case
    assert_equals_oracle(conv, x, weight, {**arguments, **eps}, dtype, explain)


def away_from_zero(x, weight, max_out):
    """All cosines of one output share a sign and are far from 0, where |c|^(b-1) has a kink."""
    sign = torch.ones(len(weight) // max_out, dtype=weight.dtype)
    sign[1::2] = -1
    sign = sign.repeat_interleave(max_out).view(-1, *[1] * (weight.dim() - 1))
    return (
        (0.5 + x.sigmoid()).requires_grad_(),
        (sign * (0.5 + weight.sigmoid())).requires_grad_(),
    )


@settings(max_examples=20)
@given(st.one_of(linear_cases(), conv_cases()))
def test_first_and_second_derivatives_pass_gradcheck(case):
    x, weight, arguments = case
    function = BF.bcos_linear if weight.dim() == 2 else conv
    x, weight = away_from_zero(x, weight, arguments["max_out"])

    def transform(x, weight):
        return function(x, weight, **arguments)

    assert gradcheck(transform, (x, weight), fast_mode=True)
    assert gradgradcheck(transform, (x, weight), fast_mode=True)


@pytest.mark.parametrize("dims", [0, 1, 2, 3])
@pytest.mark.parametrize("b", [1.0, 1.5, 2.0, 3.2])
def test_complete_jacobians_pass_gradcheck_and_gradgradcheck(dims, b):
    x, weight = random(0, 1, 2, *[3] * dims), random(1, 4, 2, *[2] * dims)
    x, weight = away_from_zero(x, weight, 2)
    function = CONV[dims] if dims else BF.bcos_linear
    assert gradcheck(lambda x, w: function(x, w, b=b, max_out=2), (x, weight))
    assert gradgradcheck(lambda x, w: function(x, w, b=b, max_out=2), (x, weight))


@settings(max_examples=30)
@given(conv_cases(), st.floats(-12, 12))
def test_positive_factors_pass_through(case, log_factor):
    x, weight, arguments = case
    factor = 10.0**log_factor
    for dtype in (torch.float64, torch.float32):
        x, weight = x.to(dtype), weight.to(dtype)
        assert_agrees(conv(factor * x, weight, **arguments), factor * conv(x, weight, **arguments))


@settings(max_examples=30)
@given(conv_cases())
def test_the_norm_of_a_weight_row_does_not_matter(case):
    x, weight, arguments = case
    lengths = torch.logspace(-3, 3, len(weight), dtype=weight.dtype)
    scaled = weight * lengths.view(-1, *[1] * (weight.dim() - 1))
    assert_agrees(conv(x, scaled, **arguments), conv(x, weight, **arguments))


@settings(max_examples=30)
@given(conv_cases())
def test_outputs_are_bounded_by_scale_times_patch_norm(case):
    x, weight, arguments = case
    out = array(conv(x, weight, **arguments))
    layer = Layer(weight, **arguments)
    for unit in layer.units(array(x)):
        assert abs(out[unit.at]) <= layer.scale * unit.norm * (1 + TOLERANCE[torch.float64])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("b", [1.0, *LARGE_B])
def test_the_bound_is_reached_but_not_passed_by_aligned_inputs(dtype, b):
    x = random(0, 40, 300, dtype=dtype)
    out = array(BF.bcos_linear(x, x, b=b, scale=2.0).diagonal())
    bound = 2 * np.sqrt((array(x) ** 2).sum(1))
    assert (out <= bound * (1 + TOLERANCE[dtype])).all()
    if b <= 6:
        assert_agrees(out, bound, dtype)


@settings(max_examples=30)
@given(conv_cases())
def test_b_1_is_the_convolution_with_unit_rows(case):
    """Against torch's own layer, which also pins the meaning of every shared argument."""
    x, weight, arguments = case
    shared = {k: arguments[k] for k in ("stride", "padding", "dilation", "groups", "padding_mode")}
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[weight.dim() - 3]
    layer = kind(
        x.shape[1], len(weight), weight.shape[2:], bias=False, dtype=torch.float64, **shared
    )
    lengths = np.sqrt((array(weight).reshape(len(weight), -1) ** 2).sum(1))
    with torch.no_grad():
        layer.weight.copy_(weight / torch.from_numpy(lengths).view(-1, *[1] * (weight.dim() - 1)))
    assert_agrees(conv(x, weight, b=1.0, **shared), layer(x))


@pytest.mark.parametrize("b", [1.0, 2.0, 2.7])
def test_the_frozen_map_is_linear_exactly_when_b_is_1(b):
    x, weight = random(0, 5), random(1, 3, 5)
    _, at_x, _ = gradients(lambda x, w: BF.bcos_linear(x, w, b=b), x, weight, explain=True)
    _, elsewhere, _ = gradients(
        lambda x, w: BF.bcos_linear(x, w, b=b), x + torch.ones(5), weight, explain=True
    )
    if b == 1:
        assert_agrees(at_x, elsewhere)
    else:
        assert not torch.allclose(at_x, elsewhere)


def test_units_of_max_out_are_adjacent_rows():
    weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    x = torch.tensor([-3.0, -4.0])
    assert_agrees(BF.bcos_linear(x, weight, b=1, max_out=2), [3.0, 4.0])
    assert_agrees(BF.bcos_linear(x, weight, b=1, max_out=4), [4.0])


@pytest.mark.parametrize("max_out", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("b", [1.0, 2.0, 1.5])
@pytest.mark.parametrize("arguments", [{}, {"padding": 1}, {"padding_mode": "reflect"}], ids=str)
def test_channels_last_stays_channels_last(max_out, groups, b, arguments):
    arguments = {"padding": "same", **arguments, "groups": groups, "b": b, "max_out": max_out}
    x = random(0, 2, 4, 6, 5)
    weight = random(1, 8 * max_out, 4 // groups, 3, 3)
    last = x.to(memory_format=torch.channels_last)
    out = BF.bcos_conv2d(last, weight, **arguments)
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert not out.is_contiguous()
    assert_agrees(out, BF.bcos_conv2d(x, weight, **arguments))
    assert BF.bcos_conv2d(x, weight, **arguments).is_contiguous()


@pytest.mark.parametrize("groups", [1, 2])
def test_channels_last_3d_stays_channels_last(groups):
    # float32: torch's own 3-d convolution does not keep the format in float64
    x = random(0, 2, 4, 5, 4, 3, dtype=torch.float32)
    weight = random(1, 8, 4 // groups, 3, 3, 3, dtype=torch.float32)
    out = BF.bcos_conv3d(
        x.to(memory_format=torch.channels_last_3d), weight, padding=1, groups=groups, max_out=2
    )
    assert out.is_contiguous(memory_format=torch.channels_last_3d)
    assert_agrees(out, BF.bcos_conv3d(x, weight, padding=1, groups=groups, max_out=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("max_out", [1, 2])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("b", [1.0, 1.3, 1.75, 2.0, 2.5, 3.0])
def test_large_images_give_the_same_bits_however_they_are_looked_at(b, layout, max_out, dtype):
    x = random(0, 3, 8, 48, 48, dtype=dtype).contiguous(memory_format=layout)
    weight = random(1, 64 * max_out, 8, 3, 3, dtype=dtype)
    before = x.clone(), weight.clone()
    how = {"b": b, "max_out": max_out, "scale": 1.5}
    with torch.no_grad():
        found = BF.bcos_conv2d(x, weight, **how)
    assert found[0].numel() >= LARGE
    weight.requires_grad_()
    assert torch.equal(found, BF.bcos_conv2d(x, weight, **how))
    with BF.explanation_mode():
        assert torch.equal(found, BF.bcos_conv2d(x, weight, **how))
    with BF.record_factors():
        assert torch.equal(found, BF.bcos_conv2d(x, weight, **how))
    assert torch.equal(x, before[0])
    assert torch.equal(weight, before[1])


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
def test_an_input_without_batch_gives_an_output_without_batch(dims, groups):
    x = random(0, 4, *[5] * dims)
    weight = random(1, 8, 4 // groups, *[3] * dims)
    out = CONV[dims](x, weight, padding=1, groups=groups, max_out=2)
    assert_agrees(out, CONV[dims](x[None], weight, padding=1, groups=groups, max_out=2)[0])


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dims", [0, 1, 2, 3])
def test_an_empty_batch_gives_an_empty_output(dims, grad):
    function = CONV[dims] if dims else BF.bcos_linear
    with torch.set_grad_enabled(grad):
        out = function(torch.rand(0, 4, *[5] * dims), torch.rand(6, 4, *[3] * dims))
    assert out.shape == (0, 6, *[3] * dims)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("b", [1.0, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("explain", [False, True])
def test_half_types_stay_close_to_the_oracle(dtype, b, explain):
    arguments = {"padding": 1, "stride": 2, "b": b}
    x, weight = random(0, 1, 4, 5, 5), random(1, 4, 4, 3, 3)
    assert_equals_oracle(BF.bcos_conv2d, x, weight, arguments, dtype, explain)


@pytest.mark.parametrize("dtype", HALF)
def test_half_types_stay_close_to_the_oracle_with_max_out(dtype):
    x = random(0, 2, 4, 5, 5, dtype=dtype)
    weight = random(1, 8, 2, 3, 3, dtype=dtype)
    arguments = {"groups": 2, "max_out": 2, "b": 1.5}
    assert_agrees(BF.bcos_conv2d(x, weight, **arguments), Layer(weight, **arguments).forward(x))


@pytest.mark.parametrize("b", [1.5, 2.0, 3.0])
def test_squares_that_overflow_float16_do_no_harm(b):
    x = torch.full((1, 64), 400.0, dtype=torch.float16)
    weight = random(0, 3, 64, dtype=torch.float16) + 1
    assert_equals_oracle(BF.bcos_linear, x, weight, {"b": b}, torch.float16, False)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("b", [1.0, 1.5, 2.0])
def test_autocast_gives_the_half_type_and_gradients_in_full(dtype, b):
    x = random(0, 2, 4, 5, 5, dtype=torch.float32).requires_grad_()
    weight = random(1, 6, 4, 3, 3, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        out = BF.bcos_conv2d(x, weight, padding=1, b=b)
        flat = BF.bcos_linear(out.flatten(1), torch.ones(2, 150), max_out=2)
    assert out.dtype == flat.dtype == dtype
    layer = Layer(weight, padding=1, b=b)
    assert_agrees(out, layer.forward(x))
    by_x, by_weight = torch.autograd.grad(out.float().sum(), (x, weight))
    expected_x, expected_weight = layer.gradients(x, np.ones(out.shape))
    assert by_x.dtype == by_weight.dtype == torch.float32
    assert_agrees(by_x, expected_x, dtype)
    assert_agrees(by_weight, expected_weight, dtype)


def zero(x):
    return torch.zeros_like(x)


def constant(x):
    return torch.full_like(x, 0.5)


def half_black(x):
    return torch.cat([x[..., :3], torch.zeros_like(x[..., 3:])], -1)


def orthogonal(x):
    """Every patch of a 1×1 kernel is orthogonal to the first weight row below: c is exactly 0."""
    return torch.stack([x[:, 0], torch.zeros_like(x[:, 0])], 1).repeat(1, 2, 1, 1)


def tiny(x):
    return x * torch.finfo(x.dtype).tiny


def denormal(x):
    return torch.full_like(x, torch.finfo(x.dtype).smallest_normal / 8)


def barely_squarable(x):
    """Squares are denormal numbers with hardly a digit left."""
    return x.sign() * torch.finfo(x.dtype).tiny ** 0.5 / 4


PICTURES = [zero, constant, half_black, orthogonal, tiny, denormal, barely_squarable]


@pytest.mark.parametrize("b", [1.0, *LARGE_B])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("picture", PICTURES, ids=lambda p: p.__name__)
def test_no_nan_and_no_infinity(picture, dtype, b):
    x = picture(random(0, 2, 4, 6, 6, dtype=dtype))
    pointwise = torch.tensor(
        [[0, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0], [1, 2, 3, 4]], dtype=dtype
    ).view(4, 4, 1, 1)
    wide = random(1, 4, 4, 3, 3, dtype=dtype)
    wide[1] = 0
    for weight, explain, max_out in itertools.product((pointwise, wide), (False, True), (1, 2)):
        function = functools.partial(BF.bcos_conv2d, padding=1, b=b, max_out=max_out)
        results = gradients(function, x, weight, explain=explain)
        assert all(r.isfinite().all() for r in results)


@pytest.mark.parametrize("b", [1.0, *LARGE_B])
@pytest.mark.parametrize("explain", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("picture", [zero, half_black, orthogonal], ids=lambda p: p.__name__)
def test_second_derivatives_are_finite_at_zero_patches_and_zero_rows(picture, dtype, explain, b):
    x = picture(random(0, 1, 4, 6, 6, dtype=dtype)).requires_grad_()
    weight = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]], dtype=dtype)
    weight = weight.view(3, 4, 1, 1).requires_grad_()
    with mode(explain):
        out = BF.bcos_conv2d(x, weight, padding=1, b=b)
    first = torch.autograd.grad(out.sum(), (x, weight), create_graph=True)
    loss = sum(g.square().sum() for g in first)
    second = torch.autograd.grad(loss, (x, weight), materialize_grads=True)
    assert all(g.isfinite().all() for g in (*first, *second))


@pytest.mark.parametrize("b", [1.01, 1.5, 2.0, 6.0])
def test_a_zero_patch_has_zero_output_and_zero_gradient(b):
    out, by_x, by_weight = gradients(
        lambda x, w: BF.bcos_linear(x, w, b=b), torch.zeros(3, 5), random(0, 2, 5).float()
    )
    assert not out.any()
    assert not by_x.any()
    assert not by_weight.any()
