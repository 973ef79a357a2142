import inspect

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import torchbcos as tb
from cases import gradients, random
from oracle import TOLERANCE, array, assert_agrees, variances
from torchbcos import functional as BF
from torchbcos import norms

HALF = [torch.float16, torch.bfloat16]


class Case:
    """A norm, its twin in torch, its arguments, an input shape, which entries share a variance."""

    def __init__(self, name, ours, torchs, arguments, shape, set_of):
        self.name, self.ours, self.torchs = name, ours, torchs
        self.arguments, self.shape, self.set_of = arguments, shape, set_of

    def make(self, **options):
        """The norm in float64 unless told, with a random weight and bias."""
        norm = self.ours(*self.arguments, **{"dtype": torch.float64} | options)
        with torch.no_grad():
            for seed, parameter in enumerate(norm.parameters()):
                parameter.copy_(random(seed, *parameter.shape))
        return norm

    def per_channel(self, parameter):
        """A weight or bias in the shape of the input without its batch."""
        value = array(parameter)
        if self.torchs is not nn.LayerNorm:
            value = value.reshape(-1, *[1] * (len(self.shape) - 2))
        return np.broadcast_to(value, self.shape[1:])

    def factor(self, norm, x):
        """weight / deviation for every entry of the input."""
        return self.per_channel(norm.weight) / np.sqrt(variances(x, self.set_of) + norm.eps)

    def definition(self, norm, x):
        return array(x) * self.factor(norm, x) + self.per_channel(norm.bias)


def by_channel(index):
    return index[1]


def by_position(index):
    return index[0], index[2:]


CASES = [
    Case("batch1d", norms.UncentredBatchNorm1d, nn.BatchNorm1d, (4,), (3, 4, 5), by_channel),
    Case("batch0d", norms.UncentredBatchNorm1d, nn.BatchNorm1d, (4,), (6, 4), by_channel),
    Case("batch2d", norms.UncentredBatchNorm2d, nn.BatchNorm2d, (4, 0.1), (3, 4, 3, 2), by_channel),
    Case("batch3d", norms.UncentredBatchNorm3d, nn.BatchNorm3d, (4,), (2, 4, 3, 2, 2), by_channel),
    Case("layer1", norms.UncentredLayerNorm, nn.LayerNorm, (5,), (2, 3, 5), lambda i: i[:-1]),
    Case("layer2", norms.UncentredLayerNorm, nn.LayerNorm, ((3, 5),), (2, 3, 5), lambda i: i[:-2]),
    Case("group0d", norms.UncentredGroupNorm, nn.GroupNorm, (1, 6, 0.1), (3, 6), lambda i: i[0]),
    Case(
        "group2d",
        norms.UncentredGroupNorm,
        nn.GroupNorm,
        (2, 6),
        (2, 6, 3, 2),
        lambda i: (i[0], i[1] // 3),
    ),
    Case("position1d", norms.UncentredPositionNorm, None, (5, 0.1), (2, 5, 4), by_position),
    Case("position2d", norms.UncentredPositionNorm, None, (5,), (2, 5, 3, 2), by_position),
]
every_norm = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
every_norm_with_a_twin = pytest.mark.parametrize(
    "case", [c for c in CASES if c.torchs], ids=lambda c: c.name
)
every_batch_norm = pytest.mark.parametrize("case", CASES[:4], ids=lambda c: c.name)


@every_norm
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_norm_divides_by_the_deviation_and_subtracts_nothing(case, dtype):
    norm = case.make(dtype=dtype)
    x = random(9, *case.shape, dtype=dtype) + 2
    out = norm(x)
    assert out.dtype == dtype
    assert_agrees(out, case.definition(norm, x))


@every_norm_with_a_twin
def test_centred_inputs_get_what_torchs_own_norm_gives(case):
    x = random(9, *case.shape)
    sets = {}
    for index in np.ndindex(x.shape):
        sets.setdefault(case.set_of(index), []).append(index)
    for indices in sets.values():
        mean = sum(x[i] for i in indices) / len(indices)
        for i in indices:
            x[i] -= mean
    norm = case.make()
    twin = case.torchs(*case.arguments, dtype=torch.float64)
    twin.load_state_dict(norm.state_dict(), strict=True)
    assert_agrees(norm(x), twin(x))


CENTRED = [
    (norms.CentredLayerNorm, nn.LayerNorm, (5,), (2, 3, 5)),
    (norms.CentredLayerNorm, nn.LayerNorm, ((3, 5),), (2, 3, 5)),
    (norms.CentredGroupNorm, nn.GroupNorm, (2, 6), (2, 6, 3, 2)),
    (norms.CentredPositionNorm, lambda n, **k: nn.GroupNorm(1, n, **k), (5,), (2, 5)),
]
RMS = [
    (norms.RMSNorm, nn.RMSNorm, (5,), (2, 3, 5)),
    (norms.RMSNorm, nn.RMSNorm, ((3, 5), 0.1), (2, 3, 5)),
]


@pytest.mark.parametrize(("ours", "torchs", "arguments", "shape"), CENTRED + RMS)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_norm_as_torch_has_it_gives_what_torchs_own_gives(ours, torchs, arguments, shape, dtype):
    twin = torchs(*arguments, dtype=torch.float64)
    with torch.no_grad():
        for seed, parameter in enumerate(twin.parameters()):
            parameter.copy_(random(seed, *parameter.shape).to(dtype))
    norm = ours(*arguments, dtype=dtype)
    norm.load_state_dict(twin.state_dict())
    x = random(9, *shape, dtype=dtype) + 2
    out = norm(x)
    assert out.dtype == dtype
    assert_agrees(out, twin(x.double()))


@pytest.mark.parametrize(("ours", "_", "arguments", "shape"), CENTRED + RMS)
def test_a_norm_as_torch_has_it_is_linear_in_explanation_mode(ours, _, arguments, shape):
    without_bias = {} if ours is norms.RMSNorm else {"bias": False}
    norm = ours(*arguments, **without_bias, dtype=torch.float64)
    x = random(9, *shape) + 2
    mix = random(3, *shape)
    out, by_x = gradients(norm, x, explain=True, weights=mix)
    assert_agrees((by_x * x).sum(), (out * mix).sum())
    assert_agrees(out, norm(x))


@every_norm
def test_first_and_second_derivatives(case):
    norm = case.make().eval()
    if getattr(norm, "running_var", None) is not None:
        norm.train()
        norm.momentum = 0.0  # numerical derivatives must not move the statistics
    x = random(9, *case.shape).requires_grad_()

    def function(x, weight, bias):
        return torch.func.functional_call(norm, {"weight": weight, "bias": bias}, x)

    arguments = (x, norm.weight, norm.bias)
    assert gradcheck(function, arguments, fast_mode=True)
    assert gradgradcheck(function, arguments, fast_mode=True)


@every_norm
def test_the_gradient_in_explanation_mode_is_the_diagonal_map(case):
    norm = case.make()
    x, weights = random(9, *case.shape) + 2, random(8, *case.shape)
    _, by_x = gradients(norm, x, explain=True, weights=weights)
    assert_agrees(by_x, array(weights) * case.factor(norm, x))
    _, outside = gradients(norm, x, weights=weights)
    assert not torch.allclose(outside, by_x)


@every_norm
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_input_and_offsets_add_up_to_the_output(case, dtype):
    torch.manual_seed(0)
    norm = case.make(dtype=dtype)
    x = (random(9, *case.shape, dtype=dtype) + 2).requires_grad_()
    with BF.collect_offsets() as offsets:
        out = norm(x)
    assert len(offsets) == 1
    weights = random(8, *case.shape, dtype=dtype)
    total = (weights * out).sum()
    by_x, by_offset = torch.autograd.grad(total, (x, offsets[0]))
    assert (by_offset * offsets[0]).sum().abs() > 0.1
    assert_agrees((by_x * x).sum() + (by_offset * offsets[0]).sum(), total.detach())


def test_offsets_of_a_whole_net_add_up_to_its_output():
    torch.manual_seed(0)
    net = nn.Sequential(
        tb.BcosConv2d(3, 6, 3, padding=1),
        norms.UncentredBatchNorm2d(6),
        tb.BcosConv2d(6, 4, 3, max_out=2, b=1.5),
        norms.UncentredGroupNorm(2, 4),
        norms.UncentredPositionNorm(4),
        nn.AvgPool2d(2),
        nn.Flatten(),
        norms.UncentredLayerNorm(16),
        tb.BcosLinear(16, 5),
    ).double()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.endswith("bias"):
                parameter.uniform_(-1, 1)
    x = torch.rand(1, 3, 6, 6, dtype=torch.float64, requires_grad=True)
    for training in (True, False):
        with BF.collect_offsets() as offsets:
            out = net.train(training)(x)[0]
        assert len(offsets) == 4
        for unit in out:
            grads = torch.autograd.grad(unit, [x, *offsets], retain_graph=True)
            parts = [(g * t).sum() for g, t in zip(grads, [x, *offsets], strict=True)]
            assert_agrees(sum(parts), unit.detach())
            assert abs(sum(parts[1:])) > 1e-3 * unit.abs()


@every_norm
@pytest.mark.parametrize("training", [True, False])
def test_values_are_the_same_to_the_bit_in_explanation_mode(case, training):
    x = random(9, *case.shape, dtype=torch.float32) + 2
    outside = case.make(dtype=torch.float32).train(training)(x)
    norm = case.make(dtype=torch.float32).train(training)
    with tb.explanation_mode():
        assert torch.equal(norm(x), outside)
    with BF.collect_offsets():
        assert torch.equal(norm(x), outside)


# --- drop-in ----------------------------------------------------------------------------------


@every_norm_with_a_twin
def test_arguments_and_state_are_torchs_own(case):
    theirs, mine = (inspect.signature(kind).parameters for kind in (case.torchs, case.ours))
    assert list(mine)[: len(theirs)] == list(theirs)
    assert all(mine[name].default == theirs[name].default for name in theirs)
    norm, twin = case.ours(*case.arguments), case.torchs(*case.arguments)
    assert isinstance(norm, case.torchs.__mro__[1])
    assert list(norm.state_dict()) == list(twin.state_dict())
    assert all(torch.equal(v, twin.state_dict()[k]) for k, v in norm.state_dict().items())
    assert norm.eps == twin.eps


@every_norm
def test_bias_false_keeps_the_weight_only(case):
    norm = case.make(bias=False)
    assert norm.bias is None
    assert "weight" in norm.state_dict()
    assert "bias" not in norm.state_dict()
    x = random(9, *case.shape)
    assert_agrees(norm(x), array(x) * case.factor(norm, x))
    with BF.collect_offsets() as offsets:
        norm(x)
    assert not offsets


@every_norm
def test_without_affine_there_are_no_parameters(case):
    name = "elementwise_affine" if case.torchs is nn.LayerNorm else "affine"
    norm = case.make(**{name: False})
    assert not list(norm.parameters())
    x = random(9, *case.shape)
    assert_agrees(norm(x), array(x) / np.sqrt(variances(x, case.set_of) + norm.eps))


@every_batch_norm
@pytest.mark.parametrize("momentum", [0.1, 0.35, None])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_running_variance_is_torchs_own(case, momentum, dtype):
    options = {"momentum": momentum, "dtype": dtype}
    norm = case.ours(*case.arguments, **options)
    twin = case.torchs(*case.arguments, **options)
    for seed in range(4):
        x = (seed + 1) * random(seed, *case.shape, dtype=dtype) + seed
        norm(x)
        twin(x)
    assert_agrees(norm.running_var, twin.running_var)
    assert norm.num_batches_tracked == twin.num_batches_tracked == 4
    x = random(9, *case.shape, dtype=dtype)
    deviation = torch.sqrt(norm.running_var.double() + norm.eps)
    expected = array(x) / case.per_channel(deviation)
    assert_agrees(norm.eval()(x), expected)


@every_batch_norm
def test_evaluation_uses_the_running_variance_of_the_state(case):
    norm = case.make().eval()
    norm.running_var.copy_(torch.tensor([0.5, 1.0, 2.0, 4.0]))
    norm.running_mean.fill_(100.0)  # of an imported state dict: not subtracted
    x = random(9, *case.shape)
    factor = array(norm.weight) / np.sqrt(
        [0.5 + norm.eps, 1 + norm.eps, 2 + norm.eps, 4 + norm.eps]
    )
    expected = array(x) * case.per_channel(factor) + case.per_channel(norm.bias)
    before = {k: v.clone() for k, v in norm.state_dict().items()}
    assert_agrees(norm(x), expected)
    assert all(torch.equal(v, before[k]) for k, v in norm.state_dict().items())


@every_batch_norm
def test_without_tracking_evaluation_uses_the_batch(case):
    norm = case.make(track_running_stats=False).eval()
    assert "running_var" not in norm.state_dict()
    x = random(9, *case.shape)
    assert_agrees(norm(x), case.definition(norm, x))


@every_batch_norm
def test_statistics_move_in_training_but_not_in_explanation_mode(case):
    norm = case.make()
    x = 3 * random(9, *case.shape)
    with tb.explanation_mode():
        norm(x)
    assert norm.num_batches_tracked == 0
    assert (norm.running_var == 1).all()
    norm(x)
    assert norm.num_batches_tracked == 1
    assert (norm.running_var != 1).all()


# --- numbers ----------------------------------------------------------------------------------


@every_norm_with_a_twin
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("training", [True, False])
def test_half_inputs_of_a_float_norm_stay_half_as_in_torch(case, dtype, training):
    x = random(9, *case.shape, dtype=dtype)
    norm = case.make(dtype=torch.float32).train(training)
    twin = case.torchs(*case.arguments).train(training)
    out = norm(x)
    assert out.dtype == twin(x).dtype == dtype
    if training or not hasattr(norm, "running_var"):
        assert_agrees(out, case.definition(norm, x))


@every_norm
def test_squares_that_overflow_float16_do_no_harm(case):
    norm = case.make(dtype=torch.float16)
    x = 1000 * random(9, *case.shape, dtype=torch.float16)
    assert_agrees(norm(x), case.definition(norm, x))


@every_norm
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("value", [0.0, 0.5, -0.25, 1e-6])
def test_constant_inputs_give_no_nan_and_no_infinity(case, dtype, value):
    x = torch.full(case.shape, value, dtype=dtype)
    for explain in (False, True):
        results = gradients(case.make(dtype=dtype), x, explain=explain)
        assert all(r.isfinite().all() for r in results)


@pytest.mark.parametrize(
    "norm",
    [
        norms.UncentredBatchNorm2d(6),
        norms.UncentredGroupNorm(2, 6),
        norms.UncentredPositionNorm(6),
    ],
    ids=lambda n: type(n).__name__,
)
def test_channels_last_stays_channels_last(norm):
    x = random(0, 2, 6, 4, 3, dtype=torch.float32)
    out = norm(x.to(memory_format=torch.channels_last))
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert_agrees(out, norm(x))


@every_norm
def test_meta_device(case):
    norm = case.make(dtype=torch.float32).to("meta")
    out = norm(torch.empty(case.shape, device="meta"))
    assert out.is_meta
    assert out.shape == case.shape


@pytest.mark.parametrize(
    ("norm", "shape", "message"),
    [
        (norms.UncentredBatchNorm1d(4), (2, 4, 3, 3), r"\(2, 4, 3, 3\)\) must have 2 or 3 dim"),
        (norms.UncentredBatchNorm2d(4), (2, 4), r"\(2, 4\)\) must have 4 dimensions"),
        (norms.UncentredBatchNorm2d(4), (2, 3, 5, 5), r"\(2, 3, 5, 5\)\) must .* of size 4"),
        (norms.UncentredBatchNorm3d(4), (2, 4, 5, 5), r"\(2, 4, 5, 5\)\) must have 5 dimensions"),
        (norms.UncentredLayerNorm((3, 5)), (2, 5, 3), r"\(2, 5, 3\)\) must end in \(3, 5\)"),
        (norms.RMSNorm(5), (5, 3), r"\(5, 3\)\) must end in \(5,\)"),
        (norms.UncentredGroupNorm(2, 4), (2, 6, 3), r"\(2, 6, 3\)\) must have 4 channels"),
        (norms.UncentredPositionNorm(4), (4,), r"\(4,\)\) must have 4 channels"),
    ],
)
def test_an_input_that_does_not_fit_is_explained(norm, shape, message):
    with pytest.raises(ValueError, match=r"`input` \(shape " + message):
        norm(torch.rand(shape))


def test_unknown_keywords_fail():
    for case in CASES:
        with pytest.raises(TypeError, match="centred"):
            case.make(centred=True)


@pytest.mark.parametrize("make", [norms.UncentredBatchNorm2d, torch.nn.BatchNorm2d])
def test_a_batch_of_no_images_leaves_the_statistics(make):
    norm = make(3)
    assert norm(torch.zeros(0, 3, 4, 4)).shape == (0, 3, 4, 4)
    assert torch.equal(norm.running_var, torch.ones(3))


@pytest.mark.parametrize("make", [norms.UncentredBatchNorm1d, torch.nn.BatchNorm1d])
def test_one_value_has_no_variance(make):
    with pytest.raises(ValueError, match=r"value.* channel"):
        make(3)(torch.full((1, 3), 5.0))
    assert make(3).eval()(torch.full((1, 3), 5.0)).isfinite().all()
