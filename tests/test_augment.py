import pytest
import torch

from torchbcos.augment import (
    _OPERATIONS,
    AUGMENTATIONS,
    Draws,
    colour_jitter,
    flip,
    lighting,
    padded_crop,
    rand_augment,
    resized_crop,
)


def images(n=6, size=12):
    return torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(0))


def draws(n=6, rows=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Draws(generator, n) if rows is None else Draws(generator, n, rows)


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_each_keeps_shape_and_range_and_depends_on_the_seed_alone(name):
    x = images()
    before = x.clone()
    first, again, other = (AUGMENTATIONS[name](x, draws(seed=s)) for s in (3, 3, 4))
    assert first.shape == x.shape
    assert first.min() >= -1e-6
    assert first.max() <= 1 + 1e-6
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_a_share_of_a_batch_gets_the_numbers_of_the_whole(name):
    x = images()
    whole = AUGMENTATIONS[name](x, draws())
    share = slice(2, 5)
    part = AUGMENTATIONS[name](x[share], draws(rows=share))
    torch.testing.assert_close(part, whole[share])


def test_flip_exchanges_left_and_right_in_about_half():
    x = images(200, 4)
    flipped = flip(x, draws(200))
    turned = (flipped == x.flip(-1)).flatten(1).all(1)
    kept = (flipped == x).flatten(1).all(1)
    assert (turned ^ kept).all()
    assert 70 < turned.sum() < 130


def test_padded_crop_is_a_window_of_the_padded_image():
    x = images(40, 8)
    moved = padded_crop(x, draws(40), padding=2)
    padded = torch.nn.functional.pad(x, [2] * 4)
    windows = torch.stack(
        [padded[:, :, a : a + 8, b : b + 8] for a in range(5) for b in range(5)]
    )  # [25, N, …]
    hits = (windows == moved).flatten(2).all(2)
    assert hits.any(0).all()
    assert hits.any(1).sum() > 10


def test_a_resized_crop_of_everything_is_the_image():
    x = images()
    same = resized_crop(x, draws(), scale=(1.0, 1.0), ratio=(1.0, 1.0))
    torch.testing.assert_close(same, x, rtol=0, atol=1e-5)
    assert resized_crop(x, draws(), size=7).shape == (6, 3, 7, 7)


def test_no_jitter_is_the_image():
    torch.testing.assert_close(colour_jitter(images(), draws(), strength=0.0), images())


@pytest.mark.parametrize("index", range(len(_OPERATIONS)))
def test_each_operation_of_rand_augment_keeps_its_image_to_itself(index):
    x, sign = images(), torch.tensor([1.0, -1.0] * 3)
    batch = _OPERATIONS[index](x, sign, 0.3)
    for i in range(len(x)):
        alone = _OPERATIONS[index](x[i : i + 1], sign[i : i + 1], 0.3)
        torch.testing.assert_close(batch[i : i + 1], alone)


def test_rand_augment_changes_most_images():
    x = images(60)
    changed = (rand_augment(x, draws(60)) != x).flatten(1).any(1)
    assert changed.float().mean() > 0.8


def test_lighting_moves_all_pixels_of_an_image_along_the_axes_of_colour():
    x = images(2000, 4) * 0.2 + 0.4  # far from black and white
    moved = lighting(x, draws(2000)) - x
    assert torch.allclose(moved, moved[:, :, :1, :1].expand_as(moved), atol=1e-6)
    spread = torch.linalg.eigvalsh(torch.cov(moved[:, :, 0, 0].T)).sqrt().flip(0)
    expected = 0.1 * torch.tensor([0.2175, 0.0188, 0.0045])
    assert torch.allclose(spread, expected, rtol=0.1)


def test_every_device_and_process_draws_the_same_numbers():
    whole = draws(8).uniform(0, 1)
    assert torch.equal(draws(8, slice(2, 5)).uniform(0, 1), whole[2:5])
    on_meta = Draws(torch.Generator().manual_seed(0), 8, device="meta").normal(3)
    assert (on_meta.shape, on_meta.device.type) == ((8, 3), "meta")
