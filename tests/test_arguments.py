"""A wrong argument gets an error that names it, its value, the rule and the remedy."""

import re

import pytest
import torch

import torchbcos as tb
from cases import CONV
from torchbcos import functional as BF

WRONG_CONVOLUTIONS = [
    ({"b": 0.5}, r"`b` \(=0\.5\) .*at least 1: 1 is a linear map"),
    ({"b": float("nan")}, r"`b` \(=nan\) must be a finite number"),
    ({"b": float("inf")}, r"`b` \(=inf\) must be a finite number"),
    ({"b": "2"}, r"`b` \(='2'\) must be a finite number"),
    ({"max_out": 0}, r"`max_out` \(=0\) must be an integer of at least 1: 1 for no MaxOut"),
    ({"max_out": 1.5}, r"`max_out` \(=1\.5\) must be an integer"),
    (
        {"max_out": 5},
        r"`max_out` \(=5\) must divide the 6 rows of `weight` \(shape \(6, 4, 3, 3\)\)",
    ),
    ({"scale": 0}, r"`scale` \(=0\) must be a positive finite number: 1\.0"),
    ({"scale": float("inf")}, r"`scale` \(=inf\) must be a positive finite number"),
    ({"eps": -1e-6}, r"`eps` \(=-1e-06\) must be a finite number of at least 0: 0 for"),
    ({"stride": 0}, r"`stride` \(=0\) must be one integer or 2 integers, each at least 1"),
    ({"stride": 1.5}, r"`stride` \(=1\.5\) must be one integer or 2 integers, each at least 1"),
    ({"stride": (1, 2, 3)}, r"`stride` \(=\(1, 2, 3\)\) must be one integer or 2 integers"),
    ({"padding": -1}, r"`padding` \(=-1\) must be one integer or 2 integers, each at least 0"),
    ({"padding": None}, r"`padding` \(=None\) must be"),
    ({"padding": "full"}, r"`padding` \(='full'\) must be 'same', 'valid', an integer"),
    (
        {"padding": "same", "stride": 2},
        r"`padding` \(='same'\) needs `stride` 1, .* \(2, 2\): give the padding as integers",
    ),
    ({"dilation": (1, 0)}, r"`dilation` \(=\(1, 0\)\) must be one integer or 2 integers"),
    ({"groups": 0}, r"`groups` \(=0\) must be an integer of at least 1"),
    ({"groups": 4}, r"`groups` \(=4\) must divide `out_channels` \(=6\): use "),
    (
        {"padding_mode": "mirror"},
        r"`padding_mode` \(='mirror'\) must be one of zeros, reflect, replicate, circular",
    ),
    (
        {"padding": 5, "padding_mode": "reflect"},
        r"`padding` \(=5\) must be at most 4 with padding_mode='reflect' .* extent 5: use less",
    ),
    (
        {"padding": 6, "padding_mode": "circular"},
        r"`padding` \(=6\) must be at most 5 with padding_mode='circular' .* extent 5: use less",
    ),
    ({"dilation": 3}, r"`input` \(shape \(1, 4, 5, 5\)\) is smaller .* enlarge it or pad more"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG_CONVOLUTIONS, ids=lambda v: str(v)[:40])
def test_a_wrong_argument_is_named_with_value_and_remedy(arguments, message):
    with pytest.raises(ValueError, match=message):
        BF.bcos_conv2d(torch.rand(1, 4, 5, 5), torch.rand(6, 4, 3, 3), **arguments)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 3, 5, 5), r"`input` \(shape \(1, 3, 5, 5\)\) must have 6 channels.*encode\(input\)"),
        ((1, 4, 5, 5), r"`input` \(shape \(1, 4, 5, 5\)\) must have 6 channels\.$"),
        ((5, 5), r"`input` \(shape \(5, 5\)\) must have 4 dimensions, .* or 3 without a batch"),
        ((1, 1, 6, 5, 5), r"`input` \(shape \(1, 1, 6, 5, 5\)\) must have 4 dimensions"),
        ((1, 6, 2, 5), r"`input` \(shape \(1, 6, 2, 5\)\) is smaller than the kernel"),
    ],
)
def test_an_input_that_does_not_fit_is_explained(shape, message):
    with pytest.raises(ValueError, match=message):
        BF.bcos_conv2d(torch.rand(shape), torch.rand(2, 6, 3, 3))


def test_linear_explains_an_input_that_does_not_fit():
    with pytest.raises(ValueError, match=r"`input` \(shape \(2, 3\)\) must end in 4 features"):
        BF.bcos_linear(torch.rand(2, 3), torch.rand(5, 4))
    with pytest.raises(ValueError, match=r"`input` \(shape \(\)\) must end in 4 features"):
        BF.bcos_linear(torch.tensor(1.0), torch.rand(5, 4))
    with pytest.raises(ValueError, match=r"`weight` \(shape \(4,\)\) must have 2 dimensions"):
        BF.bcos_linear(torch.rand(2, 4), torch.rand(4))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool])
def test_integer_inputs_are_refused_with_the_way_out(dtype):
    message = rf"`input` \(dtype {dtype}\) must be a floating-point .*\.float\(\).* 255"
    with pytest.raises(TypeError, match=message):
        BF.bcos_conv2d(torch.ones(1, 4, 5, 5, dtype=dtype), torch.rand(2, 4, 3, 3))
    with pytest.raises(TypeError, match=message):
        BF.bcos_linear(torch.ones(1, 4, dtype=dtype), torch.rand(2, 4))


@pytest.mark.parametrize("function", [BF.bcos_linear, *CONV.values()])
def test_unknown_keywords_fail(function):
    with pytest.raises(TypeError, match="bias"):
        function(torch.rand(2, 4), torch.rand(5, 4), bias=None)


WRONG_LAYERS = [
    ({"in_channels": 0}, r"`in_channels` \(=0\) must be an integer of at least 1"),
    ({"in_channels": 4.0}, r"`in_channels` \(=4\.0\) must be an integer of at least 1"),
    ({"out_channels": -2}, r"`out_channels` \(=-2\) must be an integer of at least 1"),
    (
        {"kernel_size": 0},
        r"`kernel_size` \(=0\) must be one integer or 2 integers, each at least 1",
    ),
    ({"kernel_size": 3.0}, r"`kernel_size` \(=3\.0\) must be one integer or 2 integers"),
    ({"kernel_size": True}, r"`kernel_size` \(=True\) must be one integer or 2 integers"),
    ({"kernel_size": (3, "3")}, r"`kernel_size` \(=\(3, '3'\)\) must be one integer or 2 integers"),
    ({"stride": "2"}, r"`stride` \(='2'\) must be one integer or 2 integers"),
    ({"padding": (1, -1)}, r"`padding` \(=\(1, -1\)\) must be one integer or 2 integers"),
    ({"padding": "SAME"}, r"`padding` \(='SAME'\) must be 'same', 'valid', an integer"),
    ({"padding": "same", "stride": (1, 2)}, r"`padding` \(='same'\) needs `stride` 1"),
    ({"dilation": 0}, r"`dilation` \(=0\) must be one integer or 2 integers"),
    ({"groups": 5}, r"`groups` \(=5\) must divide `in_channels` \(=4\): use 1, 2 or 4\."),
    ({"groups": 2.0}, r"`groups` \(=2\.0\) must be an integer of at least 1"),
    ({"padding_mode": "constant"}, r"`padding_mode` \(='constant'\) must be one of zeros, reflect"),
    ({"bias": True}, r"`bias` \(=True\) must be False: a bias is a term that no input owns"),
    ({"b": 0.99}, r"`b` \(=0\.99\) must be a finite number of at least 1"),
    ({"max_out": -1}, r"`max_out` \(=-1\) must be an integer of at least 1"),
    ({"scale": -3.0}, r"`scale` \(=-3\.0\) must be a positive finite number"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG_LAYERS, ids=lambda v: str(v)[:40])
def test_a_layer_is_not_made_with_a_wrong_argument(arguments, message):
    right = {"in_channels": 4, "out_channels": 8, "kernel_size": 3}
    tb.BcosConv2d(**right)
    with pytest.raises(ValueError, match=message):
        tb.BcosConv2d(**right | arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"in_features": 0}, r"`in_features` \(=0\) must be an integer of at least 1"),
        ({"out_features": "3"}, r"`out_features` \(='3'\) must be an integer of at least 1"),
        ({"bias": True}, r"`bias` \(=True\) must be False: .* W\(x\)·x"),
        ({"b": None}, r"`b` \(=None\) must be a finite number of at least 1"),
        ({"max_out": 2.0}, r"`max_out` \(=2\.0\) must be an integer of at least 1"),
        ({"scale": float("nan")}, r"`scale` \(=nan\) must be a positive finite number"),
    ],
)
def test_a_linear_layer_is_not_made_with_a_wrong_argument(arguments, message):
    right = {"in_features": 4, "out_features": 8}
    tb.BcosLinear(**right)
    with pytest.raises(ValueError, match=message):
        tb.BcosLinear(**right | arguments)


@pytest.mark.parametrize("channels", [(6, 4), (1, 4), (6, 12), (9, 6), (5, 7)])
def test_every_number_of_groups_that_an_error_offers_works(channels):
    with pytest.raises(ValueError, match=r"`groups` \(=40\) must divide") as caught:
        tb.BcosConv2d(*channels, 3, groups=40)
    offered = re.search(r": use ([\d, or]+)\.$", str(caught.value))[1]
    numbers = re.fullmatch(r"(?:((?:\d+, )*\d+) or )?(\d+)", offered)
    assert numbers, f"{offered!r} is not a list of numbers"
    for groups in re.findall(r"\d+", offered):
        tb.BcosConv2d(*channels, 3, groups=int(groups))


@pytest.mark.parametrize(
    "make",
    [
        lambda **k: tb.BcosLinear(4, 8, **k),
        lambda **k: tb.BcosConv1d(4, 8, 3, **k),
        lambda **k: tb.BcosConv2d(4, 8, 3, **k),
        lambda **k: tb.BcosConv3d(4, 8, 3, **k),
    ],
)
@pytest.mark.parametrize("keyword", ["B", "maxout", "strides", "epsilon"])
def test_unknown_keywords_of_a_layer_fail(make, keyword):
    with pytest.raises(TypeError, match=keyword):
        make(**{keyword: 2})


def test_the_extras_are_keywords_only():
    with pytest.raises(TypeError, match="positional"):
        tb.BcosLinear(4, 8, False, None, None, 2.0)
    with pytest.raises(TypeError, match="positional"):
        tb.BcosConv2d(4, 8, 3, 1, 0, 1, 1, False, "zeros", None, None, 2.0)


@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_a_device_that_is_not_there(device):
    with pytest.raises(ValueError, match=rf"`device` \(='{device}'\) must be .*cpu"):
        tb.load("cifar10", device=device)
