import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import random
from oracle import TOLERANCE, array, assert_agrees
from torchbcos.encoding import begin_check_values, check_images, check_values, decode, encode

UNIT = st.floats(0, 1, width=32)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("channels", [1, 3, 7])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_encoding_appends_one_minus_each_channel(channels, batch, dtype):
    images = torch.rand(*batch, channels, 4, 5, dtype=torch.float64).to(dtype)
    encoded = encode(images)
    assert encoded.shape == (*batch, 2 * channels, 4, 5)
    assert encoded.dtype == dtype
    assert torch.equal(encoded[..., :channels, :, :], images)
    assert_agrees(encoded[..., channels:, :, :], 1 - array(images))


@given(st.lists(UNIT, min_size=1, max_size=8))
def test_decoding_inverts_encoding(colour):
    images = torch.tensor(colour, dtype=torch.float64).view(-1, 1, 1)
    decoded = decode(encode(images))
    assert np.abs(array(decoded) - array(images)).max() <= TOLERANCE[torch.float64]


@given(st.lists(UNIT, min_size=3, max_size=3), st.floats(-30, 30))
def test_decoding_reads_the_direction_and_not_the_length(colour, log_length):
    images = torch.tensor(colour, dtype=torch.float64).view(3, 1, 1)
    decoded = decode(10.0**log_length * encode(images))
    assert np.abs(array(decoded) - array(images)).max() <= TOLERANCE[torch.float64]


@pytest.mark.parametrize(
    ("pair", "colour"),
    [
        ((3.0, 1.0), 0.75),
        ((-3.0, 1.0), 0.0),
        ((3.0, -1.0), 1.0),
        ((-3.0, -1.0), 0.0),
        ((0.0, 0.0), 0.0),
        ((0.0, 2.0), 0.0),
        ((1e-40, 1e-40), 0.5),
        ((1e30, 3e30), 0.25),
    ],
)
def test_weights_of_any_size_and_sign_are_read_as_colours(pair, colour):
    weights = torch.tensor(pair).view(2, 1, 1)
    assert_agrees(decode(weights).flatten(), [colour])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 1e3])
def test_decoded_weights_are_colours(dtype, scale):
    decoded = decode(scale * random(0, 2, 6, 8, 8, dtype=dtype))
    assert decoded.shape == (2, 3, 8, 8)
    assert decoded.dtype == dtype
    assert decoded.isfinite().all()
    assert decoded.min() >= 0
    assert decoded.max() <= 1


def test_both_ways_are_differentiable():
    images = torch.rand(3, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(encode, images)
    assert torch.autograd.gradcheck(lambda x: decode(encode(x)), images)


@pytest.mark.parametrize("shape", [(2, 5, 4, 4), (3, 4, 4), (4, 4), ()])
def test_decoding_refuses_what_cannot_be_pairs(shape):
    with pytest.raises(ValueError, match=r"`encoded` \(shape .*\) must be .* even number"):
        decode(torch.rand(shape))


def test_bytes_are_not_encoded():
    """One minus them would go round."""
    with pytest.raises(TypeError, match=r"dtype torch.uint8.* must be floating point in 0..1: use"):
        encode(torch.full((1, 3, 2, 2), 200, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_good_images_pass(dtype, channels):
    images = torch.rand(2, channels, 6, 7).to(dtype)
    images[0, 0, 0, 0], images[0, 0, 0, 1] = 0, 1
    check_images(images, channels)
    check_values(images)
    check_values(torch.zeros_like(images))
    check_values(torch.ones_like(images))


WRONG_SHAPES = [
    ((3, 8, 8), 3, r"\(3, 8, 8\)\) must be \[N, 3, H, W\]: .*batch dimension with images\[None\]"),
    ((8, 8), 3, r"\(8, 8\)\) must be \[N, 3, H, W\]: reshape"),
    (
        (2, 8, 8, 3),
        3,
        r"\(2, 8, 8, 3\)\) .*channels are last, so use images\.permute\(0, 3, 1, 2\)",
    ),
    ((2, 6, 8, 8), 3, r"\(2, 6, 8, 8\)\) .*already encoded; pass plain images"),
    ((2, 1, 8, 8), 3, r"\(2, 1, 8, 8\)\) .*repeat the grey .*images\.expand\(-1, 3, -1, -1\)"),
    ((2, 4, 8, 8), 3, r"\(2, 4, 8, 8\)\) .*drop the alpha channel with images\[:, :3\]"),
    ((2, 5, 8, 8), 3, r"\(2, 5, 8, 8\)\) .*this model was made for images of 3 channels"),
    (
        (2, 3, 8, 8),
        1,
        r"\(2, 3, 8, 8\)\) must be \[N, 1, H, W\]: make it grey with torchvision",
    ),
    ((2, 2, 8, 8), 1, r"\(2, 2, 8, 8\)\) must be \[N, 1, H, W\]: .*already encoded"),
    ((0, 3, 8, 8), 3, r"\(0, 3, 8, 8\)\) is empty"),
    ((2, 3, 0, 8), 3, r"\(2, 3, 0, 8\)\) is empty"),
]


@pytest.mark.parametrize(("shape", "channels", "message"), WRONG_SHAPES)
def test_a_wrong_shape_is_named_with_the_remedy(shape, channels, message):
    with pytest.raises(ValueError, match=r"`images` \(shape " + message):
        check_images(torch.rand(shape), channels)


@pytest.mark.parametrize(
    ("images", "remedy"),
    [
        (torch.rand(3, 8, 8), lambda x: x[None]),
        (torch.rand(2, 8, 8, 3), lambda x: x.permute(0, 3, 1, 2)),
        (torch.rand(2, 1, 8, 8), lambda x: x.expand(-1, 3, -1, -1)),
        (torch.rand(2, 4, 8, 8), lambda x: x[:, :3]),
        (torch.full((2, 3, 8, 8), 200, dtype=torch.uint8), lambda x: x.float() / 255),
    ],
)
def test_the_remedy_that_an_error_offers_works(images, remedy):
    with pytest.raises((ValueError, TypeError)):
        check_images(images)
    check_images(remedy(images))
    check_values(remedy(images))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool])
def test_integer_images_are_refused_with_the_way_out(dtype):
    message = rf"`images` \(dtype {dtype}\) must be floating point .*images\.float\(\) / 255"
    with pytest.raises(TypeError, match=message):
        check_images(torch.ones(2, 3, 8, 8, dtype=dtype))


@pytest.mark.parametrize("images", [np.zeros((2, 3, 8, 8)), [1, 2], None], ids=repr)
def test_what_is_no_tensor_is_refused(images):
    message = rf"`images` \(a {type(images).__name__}\) must be a tensor \[N, 3, H, W\].*to_tensor"
    with pytest.raises(TypeError, match=message):
        check_images(images)


WRONG_VALUES = [
    (0, 255, r"from 0 to 255\) .*look like 0\.\.255; divide by that"),
    (3, 140, r"from 3 to 140\) .*look like 0\.\.255; divide by that"),
    (0, 65535, r"from 0 to 65535\) .*look like 0\.\.65535; divide by that"),
    (-1, 1, r"from -1 to 1\) .*scaled to -1\.\.1; use \(images \+ 1\) / 2"),
    (-0.9, 0.8, r"from -0\.9 to 0\.8\) .*scaled to -1\.\.1; use \(images \+ 1\) / 2"),
    (-2.12, 2.64, r"from -2\.12 to 2\.64\) .*normalised by mean and deviation; leave that"),
    (-1.8, 0.5, r"from -1\.8 to 0\.5\) .*normalised by mean and deviation; leave that"),
    (-0.5, 1.9, r"from -0\.5 to 1\.9\) .*normalised by mean and deviation; leave that"),
    (-0.1, 1.1, r"from -0\.1 to 1\.1\) .*overshoot a little.*images\.clamp\(0, 1\)"),
    (0, 1.05, r"from 0 to 1\.05\) .*overshoot a little.*images\.clamp\(0, 1\)"),
    (-0.05, 0.98, r"from -0\.05 to 0\.98\) .*overshoot a little.*images\.clamp\(0, 1\)"),
    (float("nan"), 1, r"from nan to nan\) must be finite"),
    (0, float("inf"), r"from 0 to inf\) must be finite: .*division by zero"),
    (float("-inf"), 1, r"from -inf to 1\) must be finite"),
]


@pytest.mark.parametrize(("low", "high", "message"), WRONG_VALUES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_wrong_values_are_named_with_what_they_look_like(low, high, message, dtype):
    images = torch.full((2, 3, 8, 8), low, dtype=dtype)
    images[1, 2, 3:] = high
    with pytest.raises(ValueError, match=r"`images` \(" + message):
        check_values(images)


def test_a_hair_of_overshoot_passes():
    images = torch.rand(1, 3, 4, 4)
    images[0, 0, 0, 0], images[0, 0, 0, 1] = -5e-4, 1 + 5e-4
    check_values(images)


def test_checks_leave_the_images_alone():
    images = torch.rand(1, 3, 4, 4, requires_grad=True)
    before = images.detach().clone()
    check_images(images)
    check_values(images)
    assert torch.equal(images, before)
    assert images.requires_grad
    assert images._version == 0


def test_the_check_of_shapes_reads_no_values():
    check_images(torch.empty(2, 3, 4, 4, device="meta"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_check_on_a_gpu_is_ended_later_and_says_the_same():
    images = torch.rand(2, 3, 4, 4)
    begin_check_values(images.cuda())()
    for bad in (images * 255, images / 0, images * 2 - 1):
        with pytest.raises(ValueError, match="`images`") as expected:
            check_values(bad)
        end = begin_check_values(bad.cuda())  # and does not raise yet
        with pytest.raises(ValueError, match="`images`") as raised:
            end()
        assert str(raised.value) == str(expected.value)


def test_a_check_on_a_cpu_does_not_wait_for_its_end():
    with pytest.raises(ValueError, match="divide by that"):
        begin_check_values(255 * torch.rand(1, 3, 8, 8))
    begin_check_values(torch.rand(1, 3, 8, 8))()
