"""Pictures, pixel by pixel, from explanations written down by hand."""

import itertools

import matplotlib
import matplotlib.pyplot
import numpy as np
import pytest
import torch
from bcos.common import gradient_to_image
from matplotlib.figure import Figure

from torchbcos import Explanation, render

RED, BLUE = np.array([214, 39, 40]), np.array([31, 90, 180])
ORANGE, AZURE = np.array([230, 120, 10]), np.array([20, 110, 200])
WHITE = np.array([255, 255, 255])


def explanation(weights, contributions, outputs=None, **extra):
    """From weights [N, K, C, H, W] and contributions [N, K, H, W]."""
    weights, contributions = torch.tensor(weights).float(), torch.tensor(contributions).float()
    n, k = contributions.shape[:2]
    zeros = torch.zeros(n, k)
    return Explanation(
        outputs=zeros if outputs is None else torch.tensor(outputs),
        targets=torch.arange(k).expand(n, k),
        weights=weights,
        contributions=contributions,
        bias=zeros,
        residual=zeros,
        **extra,
    )


def row(*pixels):
    """Weights [1, 1, C, 1, W] from the channels of each pixel."""
    return np.array(pixels, dtype=float).T[None, None, :, None, :]


# Each pixel: weights (r, g, b, 1-r, 1-g, 1-b), contribution, expected RGBA. The longest is 10.
PIXELS = {
    "plain red": ((10, 0, 0, 0, 0, 0), 1.0, (255, 0, 0, 255)),
    "black by the second half": ((0, 0, 0, 6, 0, 8), 1.0, (0, 0, 0, 255)),
    "pairs scaled to sum 1": ((3, 0, 4, 1, 0, 0), 1.0, (191, 0, 255, 130)),
    "negative parts cut": ((-3, 4, 0, 4, 0, 0), 1.0, (0, 255, 0, 163)),
    "no weights, no colour": ((0, 0, 0, 0, 0, 0), 1.0, (0, 0, 0, 0)),
    "no contribution": ((10, 0, 0, 0, 0, 0), 0.0, (255, 0, 0, 0)),
    "negative contribution": ((0, 6, 8, 0, 0, 0), -1.0, (0, 255, 255, 0)),
}


def test_colour_as_in_the_paper_pixel_by_pixel():
    weights, contributions, expected = zip(*PIXELS.values(), strict=True)
    e = explanation(row(*weights), [[[contributions]]])
    picture = render.colour(e, percentile=100)
    assert picture.dtype == np.uint8
    assert picture.shape == (1, 1, 1, len(PIXELS), 4)
    for name, pixel, right in zip(PIXELS, picture[0, 0, 0], expected, strict=True):
        assert tuple(pixel) == right, name


def test_opacity_reaches_full_at_the_percentile_of_all_lengths():
    lengths = np.arange(201.0)[np.random.default_rng(0).permutation(201)]  # the 99.5th is 199
    weights = np.zeros((1, 1, 6, 3, 67))
    weights[0, 0, 0] = lengths.reshape(3, 67)
    contributions = np.where(lengths % 2 == 0, 1.0, -1.0).reshape(1, 1, 3, 67)
    alpha = render.colour(explanation(weights, contributions))[0, 0, :, :, 3]
    expected = np.where(contributions[0, 0] > 0, np.minimum(lengths.reshape(3, 67) / 199, 1), 0)
    assert np.array_equal(alpha, np.round(expected * 255).astype(np.uint8))
    half = render.colour(explanation(weights, contributions), percentile=50)[0, 0, :, :, 3]
    expected = np.where(contributions[0, 0] > 0, np.minimum(lengths.reshape(3, 67) / 100, 1), 0)
    assert np.array_equal(half, np.round(expected * 255).astype(np.uint8))


def test_colour_as_released_smooths_the_opacity_of_what_does_not_detract():
    # Lengths 9, 18 and, cut for its negative contribution, 27; averages over 3 pixels of a line.
    weights = row((9, 0, 0, 0, 0, 0), (0, 0, 0, 0, 18, 0), (0, 27, 0, 0, 0, 0), (0,) * 6)
    e = explanation(weights, [[[[0.0, 1.0, -1.0, 1.0]]]])
    picture = render.colour(e, style="released", percentile=100, kernel=3)[0, 0, 0]
    # Sums over the 3×3 window, zeros outside: 27, 27, 18, 0; each over 9, the largest is 3.
    assert picture[:, 3].tolist() == [255, 255, 170, 0]
    assert picture[:, :3].tolist() == [[255, 0, 0], [0, 0, 0], [0, 255, 0], [0, 0, 0]]


def test_colour_as_released_is_what_the_authors_program_draws():
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(2, 2, 6, 20, 24, generator=generator)
    images = torch.rand(2, 6, 20, 24, generator=generator)
    contributions = (weights * images[:, None]).sum(2)
    pictures = render.colour(
        explanation(weights.tolist(), contributions.tolist()), style="released"
    )
    for n in range(2):
        for k in range(2):
            peer = gradient_to_image(images[n], weights[n, k])
            assert np.abs(pictures[n, k] - peer * 255).max() <= 0.51


@pytest.mark.parametrize("pixels", [2**17, 80])  # all maps together, and four at a time
def test_colour_of_a_batch_is_that_of_each_of_its_maps(monkeypatch, pixels):
    monkeypatch.setattr(render, "_PIXELS", pixels)
    generator = np.random.default_rng(0)
    weights = generator.normal(size=(3, 2, 6, 5, 4))
    contributions = generator.normal(size=(3, 2, 5, 4))
    for style in ("paper", "released"):
        together = render.colour(explanation(weights, contributions), style=style)
        for n in range(3):
            for k in range(2):
                alone = explanation(weights[n, k][None, None], contributions[n, k][None, None])
                assert np.array_equal(render.colour(alone, style=style)[0, 0], together[n, k])


def test_grey_images_give_grey_pictures():
    e = explanation(row((3, 1), (0, 4), (-2, 2)), [[[[1.0, 1.0, 1.0]]]])
    picture = render.colour(e, percentile=100)[0, 0, 0]
    assert picture.tolist() == [[191, 191, 191, 202], [0, 0, 0, 255], [0, 0, 0, 180]]


@pytest.mark.parametrize("style", ["paper", "released"])
@pytest.mark.parametrize("channels", [2, 6])
def test_an_explanation_of_zeros_is_transparent(style, channels):
    e = explanation(np.zeros((1, 2, channels, 4, 4)), np.zeros((1, 2, 4, 4)))
    assert not render.colour(e, style=style).any()


def test_a_single_pixel_is_opaque_though_the_percentile_is_zero():
    weights = np.zeros((1, 1, 6, 30, 30))
    weights[0, 0, 1, 3, 4] = 0.01
    contributions = np.zeros((1, 1, 30, 30))
    contributions[0, 0, 3, 4] = 1.0
    picture = render.colour(explanation(weights, contributions))[0, 0]
    assert picture[3, 4].tolist() == [0, 255, 0, 255]
    assert picture[..., 3].sum() == 255


@pytest.mark.parametrize("channels", [1, 3, 4, 12])
def test_weights_of_something_else_than_colours_are_refused(channels):
    e = explanation(np.ones((1, 1, channels, 2, 2)), np.ones((1, 1, 2, 2)))
    with pytest.raises(ValueError, match=rf"{channels} channels, .*render\.contributions"):
        render.colour(e)
    assert render.contributions(e).shape == (1, 1, 2, 2, 3)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"style": "pretty"}, "`style`"),
        ({"percentile": 0}, "`percentile`"),
        ({"percentile": 101}, "`percentile`"),
        ({"style": "released", "kernel": 4}, "`kernel`"),
        ({"style": "released", "kernel": 0}, "`kernel`"),
    ],
)
def test_wrong_arguments_are_named(arguments, part):
    e = explanation(np.ones((1, 1, 6, 2, 2)), np.ones((1, 1, 2, 2)))
    with pytest.raises(ValueError, match=part):
        render.colour(e, **arguments)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_any_precision_is_drawn(dtype):
    e = explanation(row((10, 0, 0, 0, 0, 0), (0, 0, 5, 0, 0, 0)), [[[[1.0, 1.0]]]])
    picture = render.colour(e.to(dtype), percentile=100)[0, 0, 0]
    assert picture.tolist() == [[255, 0, 0, 255], [0, 0, 255, 128]]


# Signed maps.


def mixed(end, share):
    """White, moved towards a colour by a share."""
    return np.round(WHITE + (end - WHITE) * share).astype(np.uint8)


def test_signed_values_are_white_at_zero_and_full_at_the_percentile():
    values = torch.tensor([[4.0, 1.0, 0.0, -3.0, -4.0]])
    picture = render.signed(values, percentile=100)
    expected = [mixed(RED, 1), mixed(RED, 0.25), WHITE, mixed(BLUE, 0.75), mixed(BLUE, 1)]
    assert picture.dtype == np.uint8
    assert picture.tolist() == [np.stack(expected).tolist()]


def test_signed_values_are_clipped_at_the_percentile_of_their_size():
    values = torch.arange(-100, 101).float().reshape(1, 3, 67)  # sizes 0, 1, 1, …, 100, 100
    limit = np.percentile(values.abs().numpy(), 90)
    assert limit == 90
    picture = render.signed(values, percentile=90)[0]
    for value, pixel in zip(range(-100, 101), picture.reshape(-1, 3), strict=True):
        exact = WHITE + ((RED if value > 0 else BLUE) - WHITE) * min(abs(value) / 90, 1)
        assert np.abs(pixel - exact).max() <= 0.501  # rounded, either way at a half


def test_each_map_has_its_own_scale():
    values = torch.tensor([[[1.0, -1.0]], [[100.0, -25.0]]])
    picture = render.signed(values, percentile=100)
    assert picture[0, 0].tolist() == [RED.tolist(), BLUE.tolist()]
    assert picture[1, 0].tolist() == [RED.tolist(), mixed(BLUE, 0.25).tolist()]


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (2, 2, 3, 4)])
def test_a_map_of_zeros_is_white(shape):
    assert (render.signed(torch.zeros(shape)) == 255).all()
    assert (render.signed(torch.ones(shape, dtype=torch.bool)) == render.RED).all()
    assert render.signed(torch.zeros(shape)).shape == (*shape, 3)


def test_contributions_are_drawn_red_and_blue():
    e = explanation(np.zeros((1, 2, 6, 1, 2)), [[[[4.0, -1.0]], [[0.0, 3.0]]]])
    picture = render.contributions(e, percentile=100)
    assert picture.shape == (1, 2, 1, 2, 3)
    assert picture[0, 0, 0].tolist() == [RED.tolist(), mixed(BLUE, 0.25).tolist()]
    assert picture[0, 1, 0].tolist() == [WHITE.tolist(), RED.tolist()]


def test_delta_is_orange_for_the_first_and_blue_for_the_second():
    e = explanation(np.zeros((1, 2, 6, 1, 3)), [[[[5.0, 1.0, 1.0]], [[1.0, 2.0, 1.0]]]])
    picture = render.delta(e, percentile=100)
    assert picture.shape == (1, 1, 3, 3)
    assert picture[0, 0].tolist() == [ORANGE.tolist(), mixed(AZURE, 0.25).tolist(), WHITE.tolist()]
    swapped = render.delta(e, 1, 0, percentile=100)
    assert swapped[0, 0].tolist()[0] == AZURE.tolist()


# Overlays.


def test_transparent_pictures_lie_on_the_faded_grey_image():
    images = torch.tensor([[1.0, 0.0, 0.5]]).expand(3, 3)[None, :, None, :]  # [1, 3, 1, 3]
    pictures = np.zeros((1, 1, 1, 3, 4), np.uint8)
    pictures[0, 0, 0, 1] = (255, 0, 0, 255)
    pictures[0, 0, 0, 2] = (0, 0, 255, 51)  # a fifth
    shown = render.overlay(images, pictures, fade=0.4)
    assert shown.dtype == np.uint8
    grey = 255 * (1 - 0.4 * 0.5)
    expected = [[255] * 3, [255, 0, 0], [round(0.8 * grey)] * 2 + [round(0.8 * grey + 51)]]
    assert shown[0, 0, 0].tolist() == expected


def test_maps_are_multiplied_with_the_image_so_that_white_shows_it():
    colours = torch.tensor([[0.0, 0.3], [0.0, 0.6], [0.0, 0.9]])  # black, and a mean of 0.6
    images = colours[None, :, None, :]
    pictures = np.full((1, 1, 1, 2, 3), 255, np.uint8)
    pictures[0, 0, 0, 1] = (255, 100, 0)
    shown = render.overlay(images, pictures)
    ground = 1 - 0.3 * 0.4
    expected = [[round(255 * 0.7)] * 3, [round(255 * ground), round(100 * ground), 0]]
    assert shown[0, 0, 0].tolist() == expected


@pytest.mark.parametrize(
    ("shape", "part"),
    [((1, 4, 4, 3), "`pictures`"), ((2, 1, 4, 4, 3), "N = 1"), ((1, 1, 4, 5, 3), "`images`")],
)
def test_overlays_of_another_size_are_refused(shape, part):
    with pytest.raises(ValueError, match=part):
        render.overlay(torch.rand(1, 3, 4, 4), np.zeros(shape, np.uint8))


# Figures.


@pytest.mark.parametrize(("maps", "columns"), [(True, 5), (False, 3)])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_figure_has_a_row_for_each_image_and_opens_no_window(maps, columns, channels):
    generator = np.random.default_rng(0)
    e = explanation(
        generator.normal(size=(2, 2, 2 * channels, 4, 4)),
        generator.normal(size=(2, 2, 4, 4)),
        [[1.0, -0.5], [2.25, 0.0]],
        classes=("cat", "dog"),
    )
    backend = matplotlib.get_backend()
    figure = render.figure(torch.rand(2, channels, 4, 4), e, maps=maps)
    assert isinstance(figure, Figure)
    assert len(figure.axes) == 2 * columns
    titles = [axis.get_title() for axis in figure.axes]
    shown = [t for t in titles if t != "contributions"]
    assert shown == ["input", "cat  1.00", "dog  -0.50", "input", "cat  2.25", "dog  0.00"]
    assert all(len(axis.images) == 1 for axis in figure.axes)
    pictures = render.colour(e)
    first_picture = figure.axes[1].images[0].get_array()
    assert np.array_equal(first_picture, pictures[0, 0])
    assert matplotlib.pyplot.get_fignums() == []
    assert matplotlib.get_backend() == backend


def test_a_figure_can_be_saved(tmp_path):
    e = explanation(np.ones((1, 1, 6, 4, 4)), np.ones((1, 1, 4, 4)))
    render.figure(torch.rand(1, 3, 4, 4), e).savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert matplotlib.pyplot.get_fignums() == []


@pytest.mark.parametrize(
    ("extra", "names", "title"),
    [
        ({}, None, "class 1"),
        ({"classes": ("cat", "dog")}, None, "dog"),
        ({"classes": ("cat", "dog")}, ("Katze", "Hund"), "Hund"),
        ({"classes": ("cat", "dog"), "layer": "layer1"}, None, "layer1 unit 1"),
    ],
)
def test_panels_are_titled_by_name_number_or_unit(extra, names, title):
    e = explanation(np.ones((1, 2, 6, 4, 4)), np.ones((1, 2, 4, 4)), **extra)
    figure = render.figure(torch.rand(1, 3, 4, 4), e, names=names, maps=False)
    assert figure.axes[2].get_title() == f"{title}  0.00"


@pytest.mark.parametrize(
    "name", ["a$^{b", "c$x_$y", "d$\\frac$", "a class with a name that is long"]
)
def test_any_name_of_a_class_is_drawn_as_it_is_or_cut(name, tmp_path):
    e = explanation(np.ones((1, 2, 6, 4, 4)), np.ones((1, 2, 4, 4)), classes=(name, "other"))
    figure = render.figure(torch.rand(1, 3, 4, 4), e)
    title = figure.axes[1].get_title()
    assert title == f"{name if len(name) <= render.TITLE else name[:19] + '…'}  0.00"
    figure.savefig(tmp_path / "figure.png")
    boxes = [axis.title.get_window_extent() for axis in figure.axes]
    assert all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes))


def test_a_name_of_bytes_that_are_no_text_is_drawn_with_their_numbers(tmp_path):
    e = explanation(np.ones((1, 1, 6, 4, 4)), np.ones((1, 1, 4, 4)), classes=("caf\udce9",))
    figure = render.figure(torch.rand(1, 3, 4, 4), e)
    assert figure.axes[1].get_title() == "caf\\udce9  0.00"
    figure.savefig(tmp_path / "figure.png")


def test_names_that_do_not_suffice_are_refused():
    e = explanation(np.ones((1, 2, 6, 4, 4)), np.ones((1, 2, 4, 4)))
    with pytest.raises(ValueError, match=r"`names` \(=1\) must name every class"):
        render.figure(torch.rand(1, 3, 4, 4), e, names=["a"])


def test_a_figure_of_other_images_is_refused():
    e = explanation(np.ones((1, 1, 6, 4, 4)), np.ones((1, 1, 4, 4)))
    with pytest.raises(ValueError, match="`images`"):
        render.figure(torch.rand(2, 3, 4, 4), e)


def test_a_function_that_picked_a_unit_is_named_by_its_layer():
    e = explanation(np.ones((1, 1, 6, 4, 4)), np.ones((1, 1, 4, 4)), layer="layer1")
    chosen = Explanation(**{**vars(e), "targets": torch.tensor([[-1]])})
    assert render.target_name(chosen, 0, 0) == "layer1"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("power", [-130, -80, 60, 110])
def test_pictures_do_not_depend_on_the_length_of_all_weights(power, dtype):
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(1, 2, 6, 9, 9, generator=generator, dtype=dtype)
    contributions = torch.randn(1, 2, 9, 9, generator=generator, dtype=dtype)
    zeros = torch.zeros(1, 2)
    small, large = (
        render.colour(
            Explanation(zeros, zeros.long(), weights * s, contributions * s, zeros, zeros)
        )
        for s in (1.0, 2.0**power)
    )
    assert small[..., 3].max() == 255
    assert np.array_equal(small, large)


@pytest.mark.parametrize("size", [1e-300, 1e-50, 1e50])
def test_maps_of_any_size_are_drawn_alike(size):
    values = torch.tensor([[0.0, 2.0], [-2.0, 0.5]], dtype=torch.float64)
    assert np.array_equal(render.signed(values * size), render.signed(values))
