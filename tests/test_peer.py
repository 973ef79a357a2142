"""Agreement with `bcos` 0.1.3 where it supports the arguments, and the truth where it does not."""

import numpy as np
import pytest
import torch
from bcos.modules import bcosconv2d as peer_conv
from bcos.modules import bcoslinear as peer_linear
from bcos.modules import norms as peer_norms
from hypothesis import given, settings
from hypothesis import strategies as st

import torchbcos as tb
from cases import gradients, random
from oracle import PEER_TOLERANCE, Layer, array, assert_agrees
from torchbcos import norms

exponents = st.sampled_from([1, 1.25, 1.5, 2, 2.5, 4])


def assert_agrees_with_peer(ours, peer, x):
    """Outputs and gradients by input and weight; the peer's switch stands for our context."""
    for explain in (False, True):
        peer.set_explanation_mode(explain)
        results = gradients(ours, x, explain=explain, weights=random(5, *ours(x).shape))
        expected = gradients(peer, x, weights=random(5, *ours(x).shape))
        for result, right in zip(results, expected, strict=True):
            assert_agrees(result, right, tolerance=PEER_TOLERANCE)


@st.composite
def supported_convolutions(draw):
    """What the peer gets right: zero padding of at most half the kernel, dilation 1."""
    kernel = draw(st.tuples(*[st.integers(1, 3)] * 2))
    return {
        "kernel_size": kernel,
        "stride": draw(st.tuples(*[st.integers(1, 2)] * 2)),
        "padding": tuple(draw(st.integers(0, k // 2)) for k in kernel),
        "groups": draw(st.sampled_from([1, 2])),
        "b": draw(exponents),
        "max_out": draw(st.integers(1, 3)),
    }


@settings(max_examples=40)
@given(supported_convolutions(), st.sampled_from([torch.float32, torch.float64]))
def test_convolutions_agree(arguments, dtype):
    peer = peer_conv.BcosConv2d(4, 6, dtype=dtype, **arguments)
    ours = tb.BcosConv2d(4, 6, dtype=dtype, **arguments)
    ours.weight.data = random(1, *ours.weight.shape, dtype=dtype)
    peer.linear.load_state_dict(ours.state_dict())
    assert_agrees_with_peer(ours, peer, random(0, 2, 4, 6, 5, dtype=dtype))


@pytest.mark.parametrize("b", [1.5, 2])
def test_convolutions_with_dilation_agree(b):
    with pytest.warns(UserWarning, match="dilation > 1 is much slower"):
        peer = peer_conv.BcosConv2d(4, 6, 3, padding=2, dilation=2, b=b)
    ours = tb.BcosConv2d(4, 6, 3, padding=2, dilation=2, b=b)
    peer.linear.load_state_dict(ours.state_dict())
    assert_agrees_with_peer(ours, peer, random(0, 2, 4, 6, 5, dtype=torch.float32))


def test_the_scale_of_the_peer_is_one_over_ours():
    with pytest.warns(DeprecationWarning, match="BcosConv2dWithScale is deprecated"):
        peer = peer_conv.BcosConv2dWithScale(4, 6, 3, scale=0.2)
    ours = tb.BcosConv2d(4, 6, 3, scale=5.0)
    peer.linear.load_state_dict(ours.state_dict())
    assert_agrees_with_peer(ours, peer, random(0, 2, 4, 6, 5, dtype=torch.float32))


@settings(max_examples=40)
@given(exponents, st.integers(1, 3), st.sampled_from([torch.float32, torch.float64]))
def test_linear_layers_agree(b, max_out, dtype):
    peer = peer_linear.BcosLinear(7, 5, b=b, max_out=max_out, dtype=dtype)
    ours = tb.BcosLinear(7, 5, b=b, max_out=max_out, dtype=dtype)
    ours.weight.data = random(1, *ours.weight.shape, dtype=dtype)
    peer.linear.load_state_dict(ours.state_dict())
    assert_agrees_with_peer(ours, peer, random(0, 3, 2, 7, dtype=dtype))


def assert_right_here(x, **arguments):
    layer = tb.BcosConv2d(3, 4, 3, dtype=torch.float64, **arguments)
    layer.weight.data = random(1, *layer.weight.shape)
    truth = Layer(layer.weight, **arguments)
    for explain in (False, True):
        out, by_x = gradients(layer, x, explain=explain)
        assert_agrees(out, truth.forward(x))
        assert_agrees(by_x, truth.gradients(x, np.ones(out.shape), explain)[0])
    return layer


@pytest.mark.parametrize("padding_mode", ["reflect", "replicate", "circular"])
def test_other_paddings_are_wrong_there_and_right_here(padding_mode):
    x = random(0, 1, 3, 5, 5)
    arguments = {"padding": 1, "padding_mode": padding_mode}
    ours = assert_right_here(x, **arguments)
    peer = peer_conv.BcosConv2d(3, 4, 3, dtype=torch.float64, **arguments)
    peer.linear.load_state_dict(ours.state_dict())
    assert np.abs(array(peer(x)) - array(ours(x))).max() > 0.1


def test_dilation_per_dimension_fails_there_and_works_here():
    assert_right_here(random(0, 1, 3, 7, 7), dilation=(2, 3), padding=(2, 3))
    with pytest.raises(TypeError):
        peer_conv.BcosConv2d(3, 4, 3, dilation=(2, 3))


def test_dilation_with_max_out_fails_there_and_works_here():
    x = random(0, 1, 3, 7, 7)
    assert_right_here(x, dilation=2, max_out=2)
    with pytest.warns(UserWarning, match="dilation"):
        peer = peer_conv.BcosConv2d(3, 4, 3, dilation=2, max_out=2, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="size of tensor"):
        peer(x)


def test_same_padding_fails_there_and_works_here():
    x = random(0, 1, 3, 5, 5)
    assert_right_here(x, padding="same")
    peer = peer_conv.BcosConv2d(3, 4, 3, padding="same", dtype=torch.float64)
    with pytest.raises(TypeError, match="padding"):
        peer(x)


NORMS = [
    (norms.UncentredBatchNorm2d, peer_norms.BatchNormUncentered2d, (6,)),
    (norms.UncentredGroupNorm, peer_norms.GroupNormUncentered2d, (3, 6)),
    (norms.UncentredPositionNorm, peer_norms.PositionNormUncentered2d, (6,)),
]


@pytest.mark.parametrize(("ours", "peers", "arguments"), NORMS, ids=lambda v: str(v)[-30:])
@pytest.mark.parametrize("training", [True, False])
def test_norms_agree(ours, peers, arguments, training):
    ours, peers = ours(*arguments).train(training), peers(*arguments).train(training)
    with torch.no_grad():
        ours.weight.copy_(random(1, 6))
        ours.bias.copy_(random(2, 6))
        if hasattr(ours, "running_var"):
            ours.running_var.copy_(random(3, 6).exp())
    peers.load_state_dict(ours.state_dict())
    assert_agrees_with_peer(ours, peers, random(0, 4, 6, 5, 3, dtype=torch.float32) + 1)
