"""The drawn set of shapes: reproducible, balanced, and true about where its objects are."""

import numpy as np
import pytest
import torch

from torchbcos.data import shapes


@pytest.fixture(scope="module")
def drawn():
    return shapes(300, size=32, seed=5)  # more than one block of 256


def test_shapes_and_types(drawn):
    assert drawn.images.shape == (300, 3, 32, 32)
    assert (drawn.images.dtype, drawn.labels.dtype) == (torch.float32, torch.int64)
    assert drawn.masks.shape == (300, 32, 32)
    assert drawn.masks.dtype == torch.bool
    assert drawn.boxes.shape == (300, 4)


def test_values_are_colours_that_a_model_takes(drawn):
    assert drawn.images.min() >= 0
    assert drawn.images.max() <= 1
    assert torch.isfinite(drawn.images).all()
    assert drawn.images.std((2, 3)).min() > 0.005  # no image is flat


def test_the_same_arguments_give_the_same_images(drawn):
    before = torch.get_rng_state()
    again = shapes(300, size=32, seed=5)
    for name in ("images", "labels", "masks", "boxes"):
        assert torch.equal(getattr(again, name), getattr(drawn, name)), name
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("count", [1, 7, 256, 257])
def test_fewer_images_are_the_first_of_more(drawn, count):
    fewer = shapes(count, size=32, seed=5)
    for name in ("images", "labels", "masks", "boxes"):
        assert torch.equal(getattr(fewer, name), getattr(drawn, name)[:count]), name


def test_other_seeds_give_other_images(drawn):
    other = shapes(8, size=32, seed=6)
    assert (other.images - drawn.images[:8]).abs().mean((1, 2, 3)).min() > 0.02
    assert not torch.equal(drawn.images[256:264], drawn.images[:8])  # nor do blocks repeat


def test_every_class_comes_equally_often(drawn):
    counts = torch.bincount(shapes(64, size=16).labels)
    assert counts.tolist() == [8] * len(drawn.classes)
    assert torch.bincount(drawn.labels).aminmax()[0] >= 37
    assert len(set(drawn.classes)) == len(drawn.classes) == 8


def test_boxes_are_the_smallest_around_the_masks(drawn):
    for mask, box in zip(drawn.masks.numpy(), drawn.boxes.tolist(), strict=True):
        ys, xs = np.nonzero(mask)
        assert box == [ys.min(), xs.min(), ys.max() + 1, xs.max() + 1]


def test_every_object_is_large_enough_to_see_and_smaller_than_the_image(drawn):
    share = drawn.masks.float().mean((1, 2))
    assert share.min() > 0.01
    assert share.max() < 0.4


def test_the_object_stands_out_from_its_ground(drawn):
    inside = drawn.masks[:, None]
    object_ = (drawn.images * inside).sum((2, 3)) / inside.sum((2, 3))
    ground = (drawn.images * ~inside).sum((2, 3)) / (~inside).sum((2, 3))
    distance = (object_ - ground).abs().amax(1)
    assert distance.min() > 0.05
    assert distance.median() > 0.3


def test_the_class_is_in_the_shape_and_not_in_the_colour():
    many = shapes(1600, size=16, seed=1)
    means = torch.stack([many.images[many.labels == k].mean((0, 2, 3)) for k in range(8)])
    assert (means - means.mean(0)).abs().max() < 0.06


def test_without_clutter_the_ground_is_plain():
    plain = shapes(16, size=32, clutter=0.0)
    for image, mask in zip(plain.images, plain.masks, strict=True):
        assert (image[:, ~mask] - image[:, ~mask].mean(1, keepdim=True)).abs().max() < 0.07


@pytest.mark.parametrize("size", [16, 17, 48])
def test_any_size_from_sixteen_is_drawn(size):
    assert shapes(8, size=size).images.shape == (8, 3, size, size)


@pytest.mark.parametrize(("count", "size"), [(0, 32), (-1, 32), (3, 15)])
def test_too_few_or_too_small_are_refused(count, size):
    with pytest.raises(ValueError, match=rf"`count` \(={count}\) and `size` \(={size}\)"):
        shapes(count, size=size)
