import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck
from torch.overrides import BaseTorchFunctionMode

from oracle import TOLERANCE, array, assert_agrees
from torchbcos import ops
from torchbcos.ops import reference

DTYPES = list(TOLERANCE)
EXPONENTS = [1.0, 1.01, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0, 4.0, 6.0, 30.0, 200.0]


def formula(lin, norm, b, scale):
    cos = lin / norm if norm else 0.0
    return scale * lin * (abs(cos) ** (b - 1) if b != 1 else 1.0)


@pytest.mark.parametrize("b", EXPONENTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_bcos_scale_is_the_formula(b, dtype):
    norms = torch.tensor([1e-3, 0.5, 1.0, 40.0], dtype=dtype)
    cosines = torch.tensor([-1.0, -0.7, -1e-5, 0.0, 1e-3, 0.2, 0.99, 1.0], dtype=dtype)
    lin = cosines * norms[:, None]
    out = reference.bcos_scale(lin, norms[:, None].square(), b, 1.7)
    for norm, lin_row, out_row in zip(norms.tolist(), lin.tolist(), out, strict=True):
        assert_agrees(out_row, [formula(value, norm, b, 1.7) for value in lin_row])


@pytest.mark.parametrize("b", EXPONENTS)
@pytest.mark.parametrize("cos", [-1.0, -0.7, -1e-5, 0.0, 1e-3, 0.2, 0.99, 1.0])
def test_bcos_scale_is_precise_for_small_cosines_too(b, cos):
    lin, sq_norm = torch.tensor([[cos * 3], [9.0]], dtype=torch.float64)
    assert_agrees(reference.bcos_scale(lin, sq_norm, b, 1.0), [formula(cos * 3, 3, b, 1.0)])


@pytest.mark.parametrize("b", EXPONENTS)
def test_derivatives_by_lin_and_norm_are_the_closed_forms(b):
    lin = torch.tensor([-3.0, -0.5, 0.0, 1e-4, 2.0, 5.0], dtype=torch.float64, requires_grad=True)
    norm = torch.full_like(lin, 5.0).requires_grad_()
    out = reference.bcos_scale(lin, norm.square(), b, 0.3)
    by_lin, by_norm = torch.autograd.grad(out.sum(), (lin, norm), materialize_grads=True)
    cos = array(lin) / 5
    power = np.abs(cos) ** (b - 1)
    assert_agrees(by_lin, 0.3 * b * power)
    assert_agrees(by_norm, -0.3 * (b - 1) * power * cos)


@pytest.mark.parametrize("b", EXPONENTS[1:])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_scale_is_lin_times_the_factor_to_the_bit(b, dtype):
    torch.manual_seed(0)
    lin, sq_norm = torch.randn(7, 5).to(dtype), torch.rand(7, 1) * 9 + 1
    sq_norm = sq_norm.to(reference.accumulation_dtype(dtype))
    factor = reference.bcos_factor(lin, sq_norm, b, 0.3)
    assert torch.equal(reference.multiply(lin, factor), reference.bcos_scale(lin, sq_norm, b, 0.3))


@pytest.mark.parametrize("b", EXPONENTS[1:])
def test_the_factor_is_the_power_of_the_cosine(b):
    lin = torch.tensor([-3.0, 0.0, 2.0], dtype=torch.float64)
    sq_norm = torch.tensor([25.0, 25.0, 9.0], dtype=torch.float64)
    right = [0.3 * 0.6 ** (b - 1), 0.0, 0.3 * (2 / 3) ** (b - 1)]
    assert_agrees(reference.bcos_factor(lin, sq_norm, b, 0.3), right)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("b", EXPONENTS[1:])
def test_cosines_that_are_no_normal_numbers_have_the_factor_0(b, dtype):
    tiny = torch.finfo(dtype).tiny
    lin = torch.tensor([[0.0, tiny / 4, -tiny / 2, tiny, 0.9, math.nan]], dtype=dtype)
    lin.requires_grad_()
    sq_norm = torch.ones(1, 1, dtype=dtype)
    factor = reference.bcos_factor(lin, sq_norm, b, 1.0)
    expected = [0.0, 0.0, 0.0, tiny ** (b - 1), 0.9 ** (b - 1)]
    if b == 2:
        expected = [abs(v) for v in lin[0, :5].tolist()]  # nothing is raised to a power
    assert_agrees(factor[0, :5], expected, dtype)
    (grad,) = torch.autograd.grad(factor[0, :5].sum(), lin, retain_graph=True)
    assert grad.isfinite().all()
    scaled = reference.bcos_scale(lin, sq_norm, b, 1.0)
    exact = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(scaled, reference.multiply(lin, factor), **exact)
    assert scaled[0, 5].isnan()


@pytest.mark.parametrize("shape", [(), (512,), (1, 1, 1), (2, 1, 1), (2, 512, 512)])
@pytest.mark.parametrize("b", [1.5, 2.0])
def test_norms_broadcast_against_large_inputs(b, shape):
    generator = torch.Generator().manual_seed(0)
    lin = torch.randn(2, 512, 512, generator=generator)
    assert lin[0].numel() >= reference.LARGE
    sq_norm = torch.rand(shape, generator=generator) + 20
    right = lin * (lin / sq_norm.sqrt()).abs() ** (b - 1)
    assert_agrees(reference.bcos_scale(lin, sq_norm, b, 1.0), right)


@pytest.mark.parametrize("b", [1.0, 1.25, 1.3, 1.5, 2.0, 2.75, 3.5])
def test_second_derivatives_of_the_scale(b):
    lin = torch.tensor([[0.5, -0.9], [1.4, -0.6]], dtype=torch.float64, requires_grad=True)
    sq_norm = torch.tensor([[1.5], [4.0]], dtype=torch.float64, requires_grad=True)

    def function(lin, sq_norm):
        return reference.bcos_scale(lin, sq_norm, b, 1.3)

    assert gradcheck(function, (lin, sq_norm))
    assert gradgradcheck(function, (lin, sq_norm))


@pytest.mark.parametrize("b", [1.01, 1.5, 2.0, 6.0])
@pytest.mark.parametrize("lin", [0.0, 0.7])
def test_the_norm_broadcasts_and_its_gradient_is_summed_back(b, lin):
    lin = torch.full((2, 3, 4), lin, dtype=torch.float64, requires_grad=True)
    sq_norm = torch.full((2, 1, 4), 2.0, dtype=torch.float64, requires_grad=True)
    wide = sq_norm.detach().expand(2, 3, 4).clone().requires_grad_()
    (narrow_grad,) = torch.autograd.grad(reference.bcos_scale(lin, sq_norm, b, 1.0).sum(), sq_norm)
    (wide_grad,) = torch.autograd.grad(reference.bcos_scale(lin, wide, b, 1.0).sum(), wide)
    assert_agrees(narrow_grad, wide_grad.sum(1, keepdim=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_unit_rows_have_unit_norm_and_zero_rows_stay_zero(dtype):
    torch.manual_seed(0)
    weight = torch.randn(5, 3, 4, 2, dtype=torch.float64).to(dtype)
    weight[2] = 0
    rows = reference.unit_rows(weight)
    assert rows.dtype == dtype
    lengths = [math.sqrt(sum(v * v for v in row)) for row in array(rows).reshape(5, -1)]
    assert_agrees(torch.tensor(lengths), [1, 1, 0, 1, 1], dtype)


def test_unit_rows_of_half_weights_do_not_overflow():
    weight = torch.full((1, 100), 30000.0, dtype=torch.float16)
    assert_agrees(reference.unit_rows(weight), np.full((1, 100), 0.1))


def test_derivatives_of_unit_rows_are_finite_at_a_zero_row():
    weight = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    target = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    loss = (reference.unit_rows(weight) * target).square().sum()
    (first,) = torch.autograd.grad(loss, weight, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), weight)
    assert first.isfinite().all()
    assert second.isfinite().all()


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
@pytest.mark.parametrize("dim", [1, -2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_of_squares_per_group(groups, dim, dtype):
    torch.manual_seed(0)
    x = torch.randn(2, 6, 5).to(dtype)
    out = reference.sum_of_squares(x, dim, groups)
    blocks = array(x).reshape(2, groups, 6 // groups, 5)
    expected = sum(blocks[:, :, i] ** 2 for i in range(6 // groups))
    assert_agrees(out, expected, reference.accumulation_dtype(dtype))


BOXES = [
    {"kernel": [1], "stride": [1], "padding": [0], "dilation": [1]},
    {"kernel": [1], "stride": [3], "padding": [2], "dilation": [2]},
    {"kernel": [3], "stride": [2], "padding": [4], "dilation": [1]},
    {"kernel": [3, 2], "stride": [1, 2], "padding": [1, 1], "dilation": [1, 1]},
    {"kernel": [3, 2], "stride": [2, 1], "padding": [2, 0], "dilation": [2, 3]},
    {"kernel": [1, 3], "stride": [2, 3], "padding": [0, 3], "dilation": [4, 1]},
    {"kernel": [2, 3, 2], "stride": [1, 2, 2], "padding": [1, 1, 0], "dilation": [1, 1, 1]},
    {"kernel": [2, 2, 3], "stride": [2, 1, 1], "padding": [0, 1, 2], "dilation": [3, 1, 2]},
]


@pytest.mark.parametrize("box", BOXES, ids=str)
def test_box_sum_adds_the_taps_of_the_kernel(box):
    torch.manual_seed(0)
    dims = len(box["kernel"])
    x = torch.rand(2, 3, *range(6, 6 + dims), dtype=torch.float64)
    out = reference.box_sum(x, **box)
    expected = np.zeros(out.shape)
    geometry = list(zip(*box.values(), strict=True))
    for position in itertools.product(*map(range, out.shape[2:])):
        for tap in itertools.product(*map(range, box["kernel"])):
            at = [
                o * s - p + t * d
                for o, t, (_, s, p, d) in zip(position, tap, geometry, strict=True)
            ]
            if all(0 <= i < n for i, n in zip(at, x.shape[2:], strict=True)):
                expected[(..., *position)] += array(x)[(..., *at)]
    assert_agrees(out, expected)
    sizes = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, (k, s, p, d) in zip(x.shape[2:], geometry, strict=True)
    ]
    assert list(out.shape[2:]) == sizes


def test_a_pool_that_is_watched_is_torchs_own(monkeypatch):
    """A fused one calls no function of torch, so that a mode would not see it."""
    monkeypatch.setattr(ops, "_fusible", lambda *_: True)
    fused = SimpleNamespace(avg_pool2d=lambda *_: "fused")
    monkeypatch.setattr(ops, "_twin", lambda _: fused)
    pool = (torch.rand(1, 2, 4, 4), (2, 2), (2, 2), (0, 0))
    assert ops.avg_pool2d(*pool) == "fused"
    with BaseTorchFunctionMode():
        assert torch.equal(ops.avg_pool2d(*pool), F.avg_pool2d(*pool))
