import math

import pytest
import torch
import torchvision.transforms.v2.functional as TF
from torch.utils._python_dispatch import TorchDispatchMode

from cases import pictures
from torchbcos.augment import (
    _OPERATIONS,
    AUGMENTATIONS,
    colour_jitter,
    cutmix,
    draw_cutmix,
    erase,
    exchanged,
    flip,
    lighting,
    padded_crop,
    rand_augment,
    resized_crop,
)


def images(n=6, size=12):
    return torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(0))


def draws(name, count=6, seed=0, **settings):
    return AUGMENTATIONS[name].draw(torch.Generator().manual_seed(seed), count, **settings)


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_each_keeps_shape_and_range_and_depends_on_the_seed_alone(name):
    x = images()
    before = x.clone()
    first, again, other = (AUGMENTATIONS[name].change(x, draws(name, seed=s)) for s in (3, 3, 4))
    assert first.shape == x.shape
    assert first.min() >= -1e-6
    assert first.max() <= 1 + 1e-6
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_each_image_is_changed_by_its_own_numbers_alone(name):
    x, numbers = images(40), draws(name, 40)
    whole = AUGMENTATIONS[name].change(x, numbers)
    part = AUGMENTATIONS[name].change(x[3:25], numbers[:, 3:25])
    torch.testing.assert_close(part, whole[3:25])


class Launches(TorchDispatchMode):
    """The operations that run, in their order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.append(str(operation))
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_what_runs_depends_on_no_value_and_waits_for_none(name):
    AUGMENTATIONS[name].change(images(), draws(name))  # makes the constants
    seen = []
    for x, seed in ((images(), 1), (torch.zeros(6, 3, 12, 12), 2)):
        with Launches() as launches:
            AUGMENTATIONS[name].change(x, draws(name, seed=seed))
        seen.append(launches.names)
    assert seen[0] == seen[1]
    waits = ("_local_scalar_dense", "nonzero", "lift_fresh", "masked_select")
    assert not [n for n in seen[0] if any(w in n for w in waits)]


def test_flip_exchanges_left_and_right_in_about_half():
    x = images(200, 4)
    flipped = flip(x, draws("flip", 200))
    turned = (flipped == x.flip(-1)).flatten(1).all(1)
    kept = (flipped == x).flatten(1).all(1)
    assert (turned ^ kept).all()
    assert 70 < turned.sum() < 130


def test_padded_crop_is_a_window_of_the_padded_image():
    x = images(40, 8)
    moved = padded_crop(x, torch.randint(5, (2, 40)).float(), padding=2)
    padded = torch.nn.functional.pad(x, [2] * 4)
    windows = torch.stack(
        [padded[:, :, a : a + 8, b : b + 8] for a in range(5) for b in range(5)]
    )  # [25, N, …]
    hits = (windows == moved).flatten(2).all(2)
    assert hits.any(0).all()
    assert hits.any(1).sum() > 10


def test_a_resized_crop_of_everything_is_the_image():
    x = images()
    same = resized_crop(x, draws("resized_crop"), scale=(1.0, 1.0), ratio=(1.0, 1.0))
    torch.testing.assert_close(same, x, rtol=0, atol=1e-5)
    assert resized_crop(x, draws("resized_crop"), size=7).shape == (6, 3, 7, 7)


def test_no_jitter_is_the_image():
    torch.testing.assert_close(colour_jitter(images(), torch.rand(3, 6), strength=0.0), images())


def by_torchvision(name, x, sign, m):
    """The operation on one image [3, S, S], for magnitudes from 0 to 1."""
    factor = 1 + 0.9 * m * sign
    bilinear, side = TF.InterpolationMode.BILINEAR, x.shape[-1]
    # Torchvision's grey has 0.2989 for 0.299: its white is a little less than white.
    grey = torch.einsum("chw,c->hw", x, torch.tensor([0.299, 0.587, 0.114]).to(x))

    def blend(other):
        return (factor * x + (1 - factor) * other).clamp(0, 1)

    def affine(turn=0.0, right=0.0, down=0.0, shear=(0.0, 0.0)):
        return TF.affine(x, turn, [right, down], 1.0, list(shear), bilinear)

    shear = math.degrees(math.atan(0.3 * m * sign))
    shift = 150 / 331 * m * sign * side
    return {
        "identity": lambda: x,
        "shear_x": lambda: affine(shear=(shear, 0.0)),
        "shear_y": lambda: affine(shear=(0.0, shear)),
        "translate_x": lambda: affine(right=-shift),
        "translate_y": lambda: affine(down=-shift),
        "rotate": lambda: affine(turn=-30 * m * sign),
        "brightness": lambda: TF.adjust_brightness(x, factor),
        "saturation": lambda: blend(grey),
        "contrast": lambda: blend(grey.mean()),
        "sharpness": lambda: TF.adjust_sharpness(x, factor),
        "posterise": lambda: TF.posterize((x * 255).byte(), 8 - round(4 * m)).to(x) / 255,
        "solarise": lambda: TF.solarize(x, 1 - m),
        "autocontrast": lambda: TF.autocontrast(x),
        "equalise": lambda: TF.equalize(in_bytes(x)).to(x) / 255,
    }[name]()


def in_bytes(x):
    return (x * 255).round().to(torch.uint8)


@pytest.mark.parametrize("m", [0.0, 9.0, 17.5, 30.0])
@pytest.mark.parametrize("name", _OPERATIONS)
def test_each_operation_is_that_of_torchvision(name, m):
    x = pictures(torch.float64)
    for side, sign in ((0.2, -1), (0.7, 1)):
        choice = torch.full((len(x),), _OPERATIONS.index(name))
        made = rand_augment(x, torch.stack([choice, torch.full((len(x),), side)]), m)
        for image, result in zip(x, made, strict=True):
            expected = by_torchvision(name, image, sign, m / 30)
            torch.testing.assert_close(result, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["identity", "posterise", "solarise", "autocontrast", "equalise"])
def test_operations_by_a_table_are_exact_in_single_precision(name):
    x = pictures(torch.float32)
    for m in (6.0, 9.0, 30.0):
        made = rand_augment(x, torch.tensor([[_OPERATIONS.index(name)], [0.0]]).expand(2, 6), m)
        for image, result in zip(x, made, strict=True):
            assert torch.equal(result, by_torchvision(name, image, -1, m / 30))


@pytest.mark.parametrize(
    ("name", "adjust"),
    [("saturation", TF.adjust_saturation), ("contrast", TF.adjust_contrast)],
)
def test_blends_with_grey_are_torchvisions_but_for_its_weight_of_red(name, adjust):
    x = pictures(torch.float64)
    made = rand_augment(x, torch.tensor([[_OPERATIONS.index(name)], [0.0]]).expand(2, 6))
    torch.testing.assert_close(made, adjust(x, 1 - 0.9 * 0.3), rtol=0, atol=0.27 * 1e-4)


def test_images_of_one_batch_take_their_operations_one_after_another():
    x = images(90, 16).double()
    numbers = draws("rand_augment", 90, n=2).double()
    made = rand_augment(x, numbers, m=12.0)
    for image, own, result in zip(x, numbers.T, made, strict=True):
        for choice, side in own.view(2, 2).tolist():
            image = by_torchvision(_OPERATIONS[int(choice)], image, 1 if side >= 0.5 else -1, 0.4)
            image = image.clamp(0, 1)
        # A value beside an edge may fall on its other side.
        assert ((result - image).abs() > 1e-6).float().mean() < 0.01


def test_rand_augment_changes_most_images():
    x = images(60)
    changed = (rand_augment(x, draws("rand_augment", 60)) != x).flatten(1).any(1)
    assert changed.float().mean() > 0.8


def test_lighting_moves_all_pixels_of_an_image_along_the_axes_of_colour():
    x = images(2000, 4) * 0.2 + 0.4  # far from black and white
    moved = lighting(x, draws("lighting", 2000)) - x
    assert torch.allclose(moved, moved[:, :, :1, :1].expand_as(moved), atol=1e-6)
    spread = torch.linalg.eigvalsh(torch.cov(moved[:, :, 0, 0].T)).sqrt().flip(0)
    expected = 0.1 * torch.tensor([0.2175, 0.0188, 0.0045])
    assert torch.allclose(spread, expected, rtol=0.1)


def test_erase_makes_a_window_of_half_the_side_grey():
    x = images(400, 16)
    numbers = draws("erase", 400)
    made = erase(x, numbers)
    for image, result, (down, across) in zip(x, made, numbers.T.tolist(), strict=True):
        top, left = int(down * 16) - 4, int(across * 16) - 4
        expected = image.clone()
        expected[:, max(top, 0) : top + 8, max(left, 0) : left + 8] = 0.5
        assert torch.equal(result, expected)
    sizes = (made == 0.5).all(1).sum((1, 2))
    assert (sizes.min() >= 16, sizes.max()) == (True, 64)  # a quarter of it, in a corner


def test_cutmix_exchanges_one_window_between_neighbours():
    x = images(600, 20)
    numbers = draw_cutmix(torch.Generator().manual_seed(1), 600)
    made, share = cutmix(x, numbers, 0.5)
    assert torch.equal(made, cutmix(x, numbers, 0.5)[0])
    apart = 0
    for i in range(0, 600, 2):
        happens, area, down, across = numbers[:, i].tolist()
        half = area**0.5 / 2 if happens < 0.5 else 0
        rows, columns = (
            [abs((p + 0.5) / 20 - middle) < half for p in range(20)] for middle in (down, across)
        )
        window = torch.tensor(rows)[:, None] & torch.tensor(columns)
        for me, other in ((i, i + 1), (i + 1, i)):
            assert torch.equal(made[me], torch.where(window, x[other], x[me]))
            assert share[me] == pytest.approx(1 - window.sum().item() / 400, abs=1e-6)
        apart += share[i].item() < 1
    assert 100 < apart < 200  # of 300 pairs, at a chance of one half
    assert torch.equal(cutmix(x, numbers, 0.0)[0], x)
    assert share.min() < 0.3


def test_exchanged_neighbours():
    assert exchanged(torch.arange(6)).tolist() == [1, 0, 3, 2, 5, 4]


def test_the_numbers_of_a_seed_never_change():
    first = {name: [round(v, 4) for v in draws(name, 20)[:, 3].tolist()] for name in AUGMENTATIONS}
    assert first == {
        "flip": [0.132],
        "padded_crop": [6.0, 2.0],
        "resized_crop": [0.132, 0.8742, 0.0332, 0.6511],
        "colour_jitter": [0.132, 0.8742, 0.0332],
        "lighting": [-1.2633, 0.35, 0.3081],
        "rand_augment": [2.0, 0.8742, 5.0, 0.6511],
        "erase": [0.132, 0.8742],
    }
    mixing = draw_cutmix(torch.Generator().manual_seed(0), 20)[:, 3]
    assert [round(v, 4) for v in mixing.tolist()] == [0.132, 0.8742, 0.0332, 0.6511]
