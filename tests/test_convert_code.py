"""Networks whose Python code asks for sizes, assigns, rearranges the image, or takes options."""

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import torchbcos as tb
from test_convert import (
    SIZE,
    WIDTH,
    Net,
    Whole,
    assert_agrees,
    assert_complete,
    assert_equals_body,
    became,
    conv1x1,
    convert,
    images,
    random,
)
from torchbcos.convert import convert_lazily
from torchbcos.convert.trace import BATCH
from torchbcos.convert.tracers import same_way
from torchbcos.encoding import encode

# Code that asks for sizes is followed.


def strips(net, x):
    for start in range(0, x.shape[2], 8):
        x = x + F.pad(x[:, :, start : start + 8], (0, 0, start, x.shape[2] - start - 8))
    return x


def odd_sizes_are_padded(net, x):
    h, w = x.shape[2:]
    if h % 2 or w % 2:
        x = F.pad(x, (0, w % 2, 0, h % 2))
    return x


def unpacked(net, x):
    return x.reshape(*x.shape[:2], -1).reshape(x.shape)


def counted(net, x):
    return x if len(x.shape) == 4 else x[None]


def a_square_of_tokens(net, x):
    side = int(x.flatten(2).shape[2] ** 0.5)
    return x.flatten(2).unflatten(2, (side, side))


def halves(net, x):
    return torch.cat([part.flip(1) for part in x.chunk(2, 1)], 1)


def rounded_up(net, x):
    return F.avg_pool2d(x, math.ceil(float(x.shape[2]) / 8))


FOLLOWED = {
    "range": (strips, strips),
    "if": (odd_sizes_are_padded, lambda net, x: x),
    "*shape": (unpacked, lambda net, x: x),
    "len": (counted, lambda net, x: x),
    "int": (a_square_of_tokens, lambda net, x: x),
    "for": (halves, halves),
    "float": (rounded_up, lambda net, x: F.avg_pool2d(x, 2)),
}


@pytest.mark.parametrize(("body", "right"), FOLLOWED.values(), ids=FOLLOWED)
def test_code_that_asks_for_sizes_is_followed(body, right):
    model = convert(Net(body))
    assert f"on images of {SIZE}×{SIZE} px" in model.report.note
    assert model.report.note in str(model.report)
    assert_equals_body(model, right)


def test_sizes_for_which_the_code_would_go_another_way_are_refused():
    model = convert(Net(odd_sizes_are_padded))
    assert_complete(model, images(size=10))
    with pytest.raises(ValueError, match="images of another size") as error:
        model(images(size=11))
    assert "convert it with input_size=" in str(error.value)
    assert_complete(convert(Net(odd_sizes_are_padded), input_size=11), images(size=11))


def test_the_checks_survive_a_copy_and_a_compiler():
    import copy

    model = copy.deepcopy(convert(Net(odd_sizes_are_padded)))
    tb.calibrate(model, images())
    out = torch.compile(model, backend="aot_eager")(images())
    assert torch.allclose(out, model(images()))
    with pytest.raises(ValueError, match="another size"):
        model(images(size=11))


def test_code_that_decides_by_the_length_of_the_batch_is_not_followed():
    def body(net, x):
        return x if x.shape[0] > 16 else 2 * x

    model = convert(Net(body))
    assert "without tracing" in model.report.note
    assert "decides by how many images there are" in model.report.note


def test_code_that_asks_for_learned_values_is_no_question_about_the_image():
    def body(net, x):
        x = x if net.switch else -x
        return unpacked(net, x)

    model = convert(Net(body, switch=torch.tensor(False)))
    assert_equals_body(model, lambda net, x: -x)


def test_what_the_code_stores_while_it_is_followed_does_not_stay_in_the_original():
    def body(net, x):
        net.seen = x.shape[2] * 2
        return unpacked(net, x)

    module = Net(body)
    convert(module)
    assert not hasattr(module, "seen")


# Optional arguments have their defaults.


class WithOptions(Net):
    def forward(self, x, mask=None, *more, negate=False, **others):
        x = self.stem(x)
        if mask is not None:
            x = x * mask
        if negate or more or others:
            x = -x
        return self.fc(x.mean([2, 3]))


def test_optional_arguments_have_their_defaults():
    model = convert(WithOptions(None))
    assert not model.report.note
    assert_equals_body(model, lambda net, x: x)


# Assignments.


def one_channel_cleared(net, x):
    x = x * 1
    x[:, 2:4] = 0
    return x


def cleared(net, x):
    keep = torch.ones(WIDTH, 1, 1, dtype=x.dtype)
    keep[2:4] = 0
    return x * keep


def filled_in(net, x):
    whole = torch.zeros(x.shape[0], WIDTH, *x.shape[2:], dtype=x.dtype)
    whole[:, :5] = x[:, :5]
    return whole


def cut(net, x):
    return torch.cat([x[:, :5], torch.zeros_like(x[:, 5:])], 1)


ASSIGNED = {"zero": (one_channel_cleared, cleared), "into zeros": (filled_in, cut)}


@pytest.mark.parametrize(("body", "right"), ASSIGNED.values(), ids=ASSIGNED)
def test_assignments_to_parts(body, right):
    def followed(net, x):
        return body(net, unpacked(net, x))

    assert_equals_body(convert(Net(followed).double()), right)


def to_a_view(net, x):
    x = unpacked(net, x) * 1
    x[:, 0][:, 1] = 0
    return x


def to_a_constant(net, x):
    x = unpacked(net, x) * 1
    x[:, 0] = 1
    return x


def to_chosen_places(net, x):
    x = unpacked(net, x) * 1
    x[x > 0] = 0
    return x


REFUSED = {to_a_view: "a change of a view", to_a_constant: "assigned"}


@pytest.mark.parametrize(("body", "what"), [*REFUSED.items(), (to_chosen_places, "`gt` at gt")])
def test_assignments_that_are_not_linear_or_not_understood_are_named(body, what):
    with pytest.raises(ValueError, match=what):
        convert(Net(body))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_networks_of_other_types_are_traced_as_well(dtype):
    module = Net(lambda net, x: x.relu()).to(dtype)
    model = tb.convert(module, input_size=SIZE)
    assert not model.report.note
    assert {p.dtype for p in model.parameters()} == {dtype}


# What picks or divides keeps a signal a signal.

KEPT = {
    "larger of two": lambda net, x: torch.maximum(net.a(x), net.b(x)),
    "amax over channels": lambda net, x: net.a(x) + x.amax(1, keepdim=True),
    "max over positions": lambda net, x: net.a(x) + x.flatten(2).max(2)[0][..., None, None],
    "max by name": lambda net, x: net.a(x) + x.max(dim=1, keepdim=True).values,
    "absolute": lambda net, x: net.a(x).abs(),
    "weighted sum": lambda net, x: torch.add(x, net.a(x), alpha=2),
    "weighted difference": lambda net, x: torch.sub(x, net.a(x), alpha=0.5),
}


@pytest.mark.parametrize("body", KEPT.values(), ids=KEPT)
def test_what_picks_among_signals_is_kept(body):
    model = convert(Net(body, a=conv1x1(), b=conv1x1()))
    assert model.report.dynamic_linear
    assert_equals_body(model, body)


BY_KEYWORD = {
    "mean": lambda net, x: x + torch.mean(input=x, dim=(2, 3), keepdim=True),
    "sum": lambda net, x: x + torch.sum(dim=1, keepdim=True, input=x),
    "cumsum": lambda net, x: torch.cumsum(input=x, dim=3),
    "roll": lambda net, x: torch.roll(input=x, shifts=2, dims=2),
    "flip": lambda net, x: torch.flip(input=x, dims=[3]),
    "chunk": lambda net, x: torch.chunk(input=x, chunks=2, dim=2)[0],
    "split": lambda net, x: torch.split(tensor=x, split_size_or_sections=2, dim=3)[0],
    "tensor_split": lambda net, x: torch.tensor_split(input=x, sections=2, dim=3)[0],
    "unbind": lambda net, x: x + torch.unbind(input=x, dim=3)[0].unsqueeze(3),
    "narrow": lambda net, x: torch.narrow(input=x, dim=2, start=1, length=4),
    "select": lambda net, x: x + torch.select(input=x, dim=3, index=0).unsqueeze(3),
    "max": lambda net, x: x + torch.max(input=x, dim=1, keepdim=True)[0],
    "amax": lambda net, x: x + torch.amax(input=x, dim=(2, 3), keepdim=True),
    "abs": lambda net, x: torch.abs(input=x),
}


@pytest.mark.parametrize("body", BY_KEYWORD.values(), ids=BY_KEYWORD)
def test_functions_are_called_by_keyword_as_well(body):
    assert_equals_body(convert(Net(body)), body)


def test_a_clamped_signal_by_keyword_loses_the_clamp():
    model = convert(Net(lambda net, x: torch.clamp(input=x, min=0)))
    assert_equals_body(model, lambda net, x: x)


def test_a_clamped_signal_loses_the_clamp_and_a_clamped_divisor_does_not():
    def body(net, x):
        x = x.clamp(-0.1, 0.1)
        return x / x.norm(dim=1, keepdim=True).clamp(min=1e3)

    model = convert(Net(body))
    assert became(model, "clamp") == ["removed", "kept as a factor"]
    assert_equals_body(model, lambda net, x: x / 1e3)


@pytest.mark.parametrize("arguments", [{}, {"dim": 2}, {"p": 1.0, "dim": -1, "eps": 0.1}], ids=str)
def test_vectors_of_unit_length(arguments):
    model = convert(Net(lambda net, x: F.normalize(x, **arguments)))

    def right(net, x):
        length = torch.linalg.vector_norm(
            x, arguments.get("p", 2.0), arguments.get("dim", 1), keepdim=True
        )
        return x / length.clamp(min=arguments.get("eps", 1e-12)).detach()

    assert_equals_body(model, right)


# Transposed convolutions.

GEOMETRIES = [
    {"kernel_size": 2, "stride": 2},
    {"kernel_size": 4, "stride": 2, "padding": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1},
    {"kernel_size": (2, 4), "stride": 2, "padding": (0, 1), "groups": 2},
    {"kernel_size": 3, "stride": 1, "padding": 1},
    {"kernel_size": 9, "stride": 3, "padding": 3},
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_transposed_convolutions_that_multiply_the_size(geometry):
    up = nn.ConvTranspose2d(WIDTH, WIDTH, **geometry)
    model = convert(Net(lambda net, x: net.up(x), up=up), max_out=3)
    assert became(model, "up") == ["BcosConv2d and PixelShuffle"]
    assert_complete(model)
    x = torch.rand(1, WIDTH, 9, 9, dtype=torch.float64)
    assert model.network.up(x).shape == up.double()(x).shape
    seen = torch.autograd.functional.jacobian(lambda x: up(x).sum(1), x).abs().sum(4) > 0
    with tb.explanation_mode():
        rows = torch.autograd.functional.jacobian(lambda x: model.network.up(x).sum(1), x)
    own = rows.abs().sum(4) > 0
    assert (own | ~seen).all()  # each pixel sees at least what it saw


def test_a_unet_explains_every_pixel_of_its_output():
    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.Conv2d(3, 4, 3, padding=1)
            self.low = nn.Conv2d(4, 8, 3, padding=1)
            self.up = nn.ConvTranspose2d(8, 4, 2, 2)
            self.out = nn.Conv2d(8, 2, 1)

        def forward(self, x):
            high = F.relu(self.down(x))
            low = self.up(F.relu(self.low(F.max_pool2d(high, 2))))
            if low.shape != high.shape:
                low = F.interpolate(low, high.shape[2:])
            return torch.sigmoid(self.out(torch.cat([high, low], 1)))

    model = convert(UNet())
    tb.calibrate(model, images())
    out = model(images())
    assert out.shape == (2, 2, SIZE, SIZE)
    e = tb.explain(model, images(), layer="out", unit=(1, 5, 7))
    assert torch.allclose(e.outputs[:, 0], model.network(tb.encoding.encode(images()))[:, 1, 5, 7])
    assert e.residual.abs().max() <= 1e-9 * e.outputs.abs().max()


# Images whose pixels are rearranged before the first layer.


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_rearranged_before_the_first_layer(channels):
    module = Whole(
        lambda net, x: net.fc(net.first(F.pixel_unshuffle(x, 2)).mean([2, 3])),
        first=nn.Conv2d(4 * channels, WIDTH, 3),
    )
    model = convert(module)
    assert model.in_channels == channels
    assert model.network.first.in_channels == 8 * channels
    assert_complete(model, images()[:, :channels])


def test_a_network_of_timm_is_converted_at_the_size_it_is_for():
    import timm

    module = timm.create_model("mobilevit_xxs", num_classes=5)
    assert tb.convert(module).input_size == (256, 256)


def test_the_offsets_of_an_assignment_are_told_apart():
    """A constant that signals are written into is a term that no pixel owns."""

    def body(net, x):
        whole = net.frame.expand(x.shape[0], -1, -1, -1).clone()
        whole[:, :, 1:-1, 1:-1] = unpacked(net, x)[:, :, 1:-1, 1:-1]
        return whole

    model = convert(Net(body, frame=nn.Parameter(random(1, WIDTH, SIZE, SIZE))))
    e = assert_complete(model)
    assert (e.bias - model.logit_bias).abs().min() > 0


# What comes before the first layer.


def test_constants_that_normalise_the_image_go_because_it_is_encoded():
    module = Whole(
        lambda net, x: net.fc(net.stem((x - net.mean) / net.deviation).mean([2, 3])),
        mean=random(1, 3, 1, 1),
        deviation=random(1, 3, 1, 1) + 0.5,
    )
    model = convert(module)
    assert became(model, "sub") == became(model, "div") == ["removed"]
    assert_equals_body(model, lambda net, x: x)


def test_a_deviation_of_each_channel_of_the_image_normalises_the_encoded_one():
    def standardised(x, deviation):
        return (x - x.mean([2, 3], keepdim=True)) / deviation

    module = Whole(
        lambda net, x: net.fc(
            net.stem(standardised(x, x.std([2, 3], keepdim=True) + 1e-6)).mean([2, 3])
        )
    )
    model, x = convert(module), images()
    e, encoded = assert_complete(model, x), encode(x)
    inner = standardised(encoded, encoded.std([2, 3], keepdim=True) + 1e-6)
    network = model.network
    out = network.fc(network.stem(inner)).mean([2, 3])
    assert_agrees(e.outputs, out / model.temperature + model.logit_bias)


def test_what_breaks_the_linear_map_before_the_first_layer_is_named():
    with pytest.raises(ValueError, match="because of `log1p` at log1p: replace"):
        convert(Whole(lambda net, x: net.fc(net.stem(x.log1p()).mean([2, 3]))))


def test_a_functional_first_layer_takes_the_encoded_image():
    module = Whole(
        lambda net, x: net.fc(F.conv2d(x, net.weight).mean([2, 3])),
        weight=nn.Parameter(random(WIDTH, 3, 3, 3)),
    )
    model = convert(module)
    assert model.network.weight_layer.in_channels == 6
    assert_complete(model)


def test_constants_of_places_in_the_image_stay():
    module = Whole(
        lambda net, x: net.fc(net.stem(x + net.place).mean([2, 3])),
        place=nn.Parameter(random(1, 1, SIZE, SIZE)),
    )
    model = convert(module)
    assert became(model, "add") == ["offset added"]
    e = assert_complete(model)
    assert (e.bias - model.logit_bias).abs().min() > 0


@pytest.mark.parametrize("first", [nn.Conv2d(WIDTH, WIDTH, 1), nn.Linear(WIDTH, 5)], ids=str)
def test_layers_may_be_defined_in_any_order(first):
    class LastFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.unused_first = first
            self.stem = nn.Conv2d(1, WIDTH, 3)
            self.fc = nn.Linear(WIDTH, 5)

        def forward(self, x):
            return self.fc(self.stem(x).mean([2, 3]))

    assert convert(LastFirst()).in_channels == 1


def test_a_network_of_linear_layers_alone():
    module = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))
    model = tb.convert(module).double().eval()
    assert (model.in_channels, model.input_size) == (1, (28, 28))
    assert isinstance(model.network.get_submodule("1"), tb.BcosLinear)
    assert_complete(model, images(size=28)[:, :1])


# Silent mistakes that are none: these are refused.


def mirrored(net, x):
    both = torch.cat([x, x.flip(3)], 0) + net.position
    return both.unflatten(0, (2, x.shape[0])).sum(0)


def windows(net, x):
    """Windows of each image one after the other: offsets are told apart."""
    x = x.unflatten(2, (2, 8)).permute(0, 2, 1, 3, 4).flatten(0, 1)
    x = (x + net.position[:, :, :8]).unflatten(0, (-1, 2)).permute(0, 2, 1, 3, 4)
    return x.flatten(2, 3)


def windows_of_all_images(net, x):
    x = x.unflatten(2, (2, 8)).permute(2, 0, 1, 3, 4).flatten(0, 1)
    x = (x + net.position[:, :, :8]).unflatten(0, (2, -1)).permute(1, 2, 0, 3, 4)
    return x.flatten(2, 3)


def to_images(net, x, attend):
    """What each image gets from all of them."""
    return x + attend(x.mean([2, 3]))[..., None, None]


MIXED = {
    "part of a Fourier transform": (lambda net, x: torch.fft.fft2(x).real, "`fftfft2` at"),
    "data": (lambda net, x: x.data, "`getattr` at getattr"),
    "mean over images": (lambda net, x: x - 0.5 * x.mean(0, keepdim=True), "`mean` at mean"),
    "sum of everything": (lambda net, x: x + x.sum(), "`sum` at sum"),
    "images rolled": (lambda net, x: x + x.roll(1), "`roll` at roll"),
    "images flipped": (lambda net, x: x.flip(0), "`flip` at flip"),
    "images counted up": (lambda net, x: x.cumsum(dim=-4), "`cumsum` at cumsum"),
    "images in two halves": (lambda net, x: torch.cat(x.chunk(2)[::-1]), "`chunk` at chunk"),
    "images selected": (
        lambda net, x: x.index_select(0, torch.arange(x.shape[0]).flip(0)),
        "`indexselect` at indexselect",
    ),
    "images turned into rows": (lambda net, x: torch.rot90(x, 1, (0, 2)), "`rot90` at rot90"),
    "masked with ones": (
        lambda net, x: x.masked_fill(net.position > 0, 1.0),
        "`maskedfill` at maskedfill",
    ),
    "one image selected": (lambda net, x: x + x.select(0, 1), "`select` at select"),
    "one image": (lambda net, x: x + x[0], "`getitem` at getitem"),
    "some images": (lambda net, x: x + x[:1], "`getitem` at getitem"),
    "one image where channels come first": (
        lambda net, x: x + x.transpose(0, 1)[:, 0][None],
        "`getitem` at getitem",
    ),
    "images in an order of their own": (
        lambda net, x: x + x[torch.arange(x.shape[0] - 1, -1, -1)],
        "what combines images",
    ),
    "mean over images where channels come first": (
        lambda net, x: x - x.transpose(0, 1).mean(1)[None],
        "`mean` at mean",
    ),
    "sum over images as a matrix product": (
        lambda net, x: x + (torch.ones(1, x.shape[0]) @ x.flatten(1)).unflatten(1, x.shape[1:]),
        "`matmul` at matmul",
    ),
    "sum over images by indices": (
        lambda net, x: x + torch.einsum("n..., m... -> m...", x, x),
        "`einsum` at einsum",
    ),
    "attention to images": (
        lambda net, x: to_images(net, x, lambda x: F.scaled_dot_product_attention(x, x, x)),
        "`scaleddotproductattention` at",
    ),
    "number added where positions come first": (
        lambda net, x: (
            (x.flatten(2).permute(2, 0, 1) + 1).permute(1, 2, 0).unflatten(2, (SIZE, -1))
        ),
        "`add` at add",
    ),
    "images mirrored behind each other": (mirrored, "in another order"),
    "windows of all images": (windows_of_all_images, "in another order"),
    "change of a part": (lambda net, x: changed_in_part(net.stem2(x)), "change of a view"),
}


def changed_in_part(x):
    x[:, :4].mul_(0)
    return x


@pytest.mark.parametrize(("body", "what"), MIXED.values(), ids=MIXED)
def test_what_would_be_silently_wrong_is_refused(body, what):
    parts = {"position": nn.Parameter(torch.zeros(1, WIDTH, SIZE, SIZE)), "stem2": conv1x1()}
    with pytest.raises(ValueError, match="cannot become dynamic-linear") as error:
        convert(Net(body, **parts))
    assert what in str(error.value)


def added_to_channels_first(net, x):
    x = net.wide(x).transpose(0, 1) + net.shift[:, None, None, None]
    return net.narrow(x.transpose(0, 1))


def added_to_images_first(net, x):
    return net.narrow(net.wide(x) + net.shift[:, None, None])


def one_of_the_images_added(net, x):
    x = net.wide(x)
    return net.narrow(x + x[0])


def one_of_the_channels_added(net, x):
    x = net.wide(x)
    return net.narrow(x + x[:, :1])


@pytest.mark.parametrize("channels", [BATCH, 3 * BATCH])
def test_as_many_channels_as_images_are_told_from_images_by_numbers(channels):
    def net(body):
        wide, narrow = nn.Conv2d(WIDTH, channels, 1), nn.Conv2d(channels, WIDTH, 1)
        return Net(body, wide=wide, narrow=narrow, shift=nn.Parameter(random(channels)))

    with pytest.raises(ValueError, match="in another order"):
        convert(net(added_to_channels_first))
    assert_equals_body(convert(net(added_to_images_first)), added_to_images_first)
    with pytest.raises(ValueError, match="what combines images"):
        convert(net(one_of_the_images_added))
    assert_equals_body(convert(net(one_of_the_channels_added)), one_of_the_channels_added)


def test_offsets_of_windows_that_follow_each_other_image_by_image():
    model = convert(Net(windows, position=nn.Parameter(random(1, WIDTH, SIZE, SIZE))))
    e = assert_complete(model)
    alone = tb.explain(model, images()[1:], targets="all")
    assert torch.allclose(e.bias[1:], alone.bias)


def test_a_view_of_a_value_that_nobody_uses_again_may_be_changed():
    model = convert(Net(lambda net, x: (2 * x).reshape(x.shape).mul_(3)))
    assert_equals_body(model, lambda net, x: 6 * x)


class Padded(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(F.pad(x, (1, 1, 1, 1)), self.weight, self.bias)


def test_a_layer_that_does_more_than_its_class_is_refused():
    with pytest.raises(ValueError, match="does more than others of its kind") as error:
        convert(Net(lambda net, x: net.part(x), part=Padded(WIDTH, WIDTH, 3)))
    assert f"part would give {[WIDTH, SIZE - 2, SIZE - 2]}" in str(error.value)


class Twice(nn.Conv2d):
    def __init__(self):
        super().__init__(WIDTH, WIDTH, 3, padding=1)
        self.second = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x):
        return self.second(super().forward(x))


class Gated(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) * x.mean(1, keepdim=True).sigmoid()


class Active(nn.Conv2d):
    def forward(self, x):
        return super().forward(x).relu()


def test_a_layer_whose_code_has_more_in_it_is_refused():
    for part in (Twice(), Gated(WIDTH, WIDTH, 3, padding=1)):
        with pytest.raises(ValueError, match=type(part).__name__):
            convert(Net(lambda net, x: net.part(x), part=part))
    model = convert(Net(lambda net, x: net.part(x), part=Active(WIDTH, WIDTH, 3, padding=1)))
    assert_complete(model)
    assert isinstance(model.network.part, tb.BcosConv2d)


@pytest.mark.parametrize("name", ["fn", "expand", "t", "squeeze", "size"])
def test_modules_may_have_the_names_of_functions(name):
    def body(net, x):
        y = getattr(net, name)(x)
        y += x
        return y + getattr(net, name)(x)

    parts = {name: nn.Conv2d(WIDTH, WIDTH, 1)}
    assert_complete(convert(Net(body, **parts)))
    last = Whole(
        lambda net, x: net.fc(getattr(net, name)(net.stem(x)).mean([2, 3])),
        **{name: nn.Conv2d(WIDTH, WIDTH, 1)},
    )
    assert_complete(convert(last))


class ChannelsFirst(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class AsAlways(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x)


def test_what_a_layer_norm_goes_over_is_seen_in_its_own_code():
    """Not in its name, and not in the width of the image, which may be the number of channels."""
    module = Net(lambda net, x: net.norm(x), norm=ChannelsFirst(WIDTH))
    model = convert(module, norm="uncentred", input_size=WIDTH)
    assert isinstance(model.network.norm, tb.norms.UncentredPositionNorm)
    module = Net(lambda net, x: net.norm(x), norm=AsAlways(WIDTH))
    model = convert(module, norm="uncentred", input_size=WIDTH)
    assert isinstance(model.network.norm, tb.norms.UncentredLayerNorm)


def test_a_network_whose_twin_would_not_run_is_refused():
    twice = nn.Conv2d(3, 3, 3, padding=1)
    module = Whole(
        lambda net, x: net.fc(net.stem(net.twice(net.twice(x))).mean([2, 3])), twice=twice
    )
    with pytest.raises(ValueError, match=r"does not run|encoded image"):
        convert(module)


@pytest.mark.parametrize("last", ["dict", "tuple"])
def test_networks_that_return_several_things_are_refused(last):
    def body(net, x):
        out = net.fc(net.stem(x).mean([2, 3]))
        return {"out": out} if last == "dict" else (out, 2 * out)

    with pytest.raises(ValueError, match="returns the one tensor to be explained"):
        convert(Whole(body))


def test_what_torch_compile_made_is_converted_as_the_module_it_was_made_from():
    module = Net(lambda net, x: x.relu())
    model, plain = convert(torch.compile(module)), convert(module)
    assert model.report == plain.report
    assert torch.equal(assert_complete(model).outputs, assert_complete(plain).outputs)


def test_a_compiled_module_is_refused_with_the_reason():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit goes out of use, and yet is used
        module = torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3)))
    with pytest.raises(ValueError, match=r"torch\.jit"):
        convert(module)


def test_layers_whose_size_is_not_known_yet_are_refused_with_the_remedy():
    module = nn.Sequential(nn.LazyConv2d(4, 3), nn.Flatten(), nn.LazyLinear(5))
    with pytest.raises(ValueError, match="call the module once"):
        convert(module)


def weight_normed(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it goes out of use, and yet is used
        return nn.utils.weight_norm(layer)


def pruned(layer):
    return prune.l1_unstructured(layer, "weight", amount=0.5)


REMEDIES = {
    weight_normed: ("remove_weight_norm", nn.utils.remove_weight_norm),
    pruned: ("prune.remove", lambda layer: prune.remove(layer, "weight")),
}


@pytest.mark.parametrize(
    ("wrap", "remedy"), REMEDIES.items(), ids=lambda v: getattr(v, "__name__", "")
)
def test_layers_whose_weight_is_computed_before_each_call_are_refused_with_the_remedy(wrap, remedy):
    module = Net(lambda net, x: net.part(x), part=wrap(conv1x1()))
    with pytest.raises(ValueError, match="Conv2d whose `weight` is computed") as error:
        convert(module)
    name, remove = remedy
    assert name in str(error.value)
    remove(module.part)
    assert_equals_body(convert(module), lambda net, x: net.part(x))


# Classifiers behind a flattened map.


def test_a_classifier_of_a_map_with_channels_last_stays_where_it_is():
    module = Whole(
        lambda net, x: net.last(net.stem(x).permute(0, 2, 3, 1).flatten(1)),
        last=nn.Linear(WIDTH * SIZE * SIZE, 5),
    )
    model = convert(module)
    assert isinstance(model.network.last, tb.BcosLinear)
    assert_complete(model)


@pytest.mark.parametrize(
    "flat", [lambda x: x.view(x.size(0), -1), lambda x: x.view(x.shape[0], -1)]
)
def test_a_map_flattened_by_its_size_is_a_flattened_map(flat):
    module = Whole(
        lambda net, x: net.last(flat(net.stem(x))), last=nn.Linear(WIDTH * SIZE * SIZE, 5)
    )
    assert isinstance(convert(module).network.last, tb.BcosConv2d)


# Layers and pools along the images, types, colours that are taken apart.


def along_images(operation):
    """`operation` on [1, C, N], and back."""
    return lambda net, x: operation(net, x.mean((2, 3)).t()[None])[0].t()[:, :, None, None]


MIXING = {
    "layer": along_images(lambda net, h: net.part(h)),
    "average": along_images(lambda net, h: F.avg_pool1d(h, 3, 1, 1)),
    "largest": along_images(lambda net, h: F.max_pool1d(h, 3, 1, 1)),
    "padding": along_images(lambda net, h: F.pad(h, (1, 1), mode="circular")[..., 2:]),
}


@pytest.mark.parametrize("name", MIXING)
def test_layers_and_pools_along_the_images_are_refused(name):
    part = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
    with pytest.raises(ValueError, match="combines images"):
        convert(Net(MIXING[name], part=part))


def test_a_linear_layer_of_tokens_before_images_is_no_mixture():
    def tokens_first(net, x):
        return net.part(x.flatten(2).permute(2, 0, 1)).permute(1, 2, 0).unflatten(2, (SIZE, SIZE))

    assert_complete(convert(Net(tokens_first, part=nn.Linear(WIDTH, WIDTH))))


def test_rounding_to_whole_numbers_is_no_linear_map():
    with pytest.raises(ValueError, match="because of `to`"):
        convert(Net(lambda net, x: x.to(torch.int32).to(x.dtype)))


@pytest.mark.parametrize(
    "take",
    [
        lambda net, x: net.part(x.mean(1, keepdim=True)),
        lambda net, x: torch.cat([net.part(c) for c in x.chunk(3, 1)], 1),
        lambda net, x: net.part(x.amax(1, keepdim=True)),
    ],
)
def test_channels_of_the_image_that_are_taken_apart_are_refused(take):
    with pytest.raises(
        ValueError, match=r"takes the channels of the image apart .* \[r, g, b, 1-r"
    ):
        convert(Whole(take, part=nn.Conv2d(1, 4, 3)))


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (lambda net, x: net.part(x), nn.Conv2d(3, 6, 3, groups=3)),
        (
            lambda net, x: F.conv2d(weight=net.part, input=x, groups=3),
            nn.Parameter(torch.rand(6, 1, 3, 3)),
        ),
    ],
    ids=["module", "function"],
)
def test_groups_of_the_first_layer_have_both_channels_of_a_colour(body, part):
    model = convert(Whole(body, part=part)).float()
    x = images().float()
    other = x.clone()
    other[:, 1] = 1 - other[:, 1]
    same = (model(x) == model(other)).all(0).flatten(1).all(1)
    assert same.tolist() == [True, True, False, False, True, True]
    (layer,) = dict(model.bcos_layers()).values()
    weights = layer.weight
    assert weights.shape[1] == 2
    with torch.no_grad():  # they see g and 1 - g, and no other
        out = tb.encoding.encode(x)[:, [1, 4]]
        rows = tb.functional.bcos_conv2d(out, weights[4:8], b=2.0, max_out=2)
    torch.testing.assert_close(model.network(tb.encoding.encode(x))[:, 2:4], rows)


def asks(question):
    def forward(net, x):
        if x.shape[2] < 1 or question(x):
            x = x * 2
        return x

    return convert(Net(forward)).float().eval()


def test_where_and_how_it_is_computed_is_no_reason_to_compute_otherwise():
    for question in (
        lambda x: x.requires_grad, lambda x: x.is_cuda, lambda x: not x.is_contiguous(),
        lambda x: x.device.type == "meta",
    ):  # fmt: skip
        model = asks(question)
        expected = model(images().float())
        last = images().float().contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(model(last), expected)
        expected.sum().backward()


@pytest.mark.parametrize(
    ("question", "asked"),
    [
        (lambda x: x.stride(1) > SIZE**2, ["size"]),
        (lambda x: x[0].numel() > WIDTH * SIZE**2, ["size"]),
        (lambda x: x.shape[-1] > SIZE, ["size"]),
        (lambda x: x.dim() == 3, ["size"]),
        (lambda x: x.dtype == torch.bfloat16, ["dtype"]),
        (lambda x: x.requires_grad, []),
        (lambda x: x.device.type == "meta", []),
    ],
)
@pytest.mark.parametrize("asks_size", [False, True])
def test_what_a_question_is_about_does_not_depend_on_what_was_asked_before(
    question, asked, asks_size
):
    def forward(net, x):
        if asks_size:
            x = x.view(x.size(0), WIDTH, x.size(2), x.size(3))
        x = x + torch.zeros(1, device=x.device, dtype=x.dtype)
        return 2 * x if question(x) else x

    model = convert(Net(forward))
    nodes = model.network.graph.nodes
    assert [n.args[3] for n in nodes if n.target is same_way] == asked
    if asked == ["size"] and question(torch.empty(1, WIDTH, 2 * SIZE, 2 * SIZE)):
        with pytest.raises(ValueError, match="images of another size"):
            model(images(size=2 * SIZE))


def test_networks_that_ask_where_they_are_are_not_converted_on_the_meta_device():
    def forward(net, x):
        return net.added(x) if x.device.type == "meta" else x

    conversion = convert_lazily(lambda: Net(forward, added=conv1x1()), {"size": SIZE})
    assert "added" not in {name for name, _ in conversion.network.named_modules()}


def test_weights_stay_shared_in_networks_by_name():
    def tied():
        first, second = conv1x1(), conv1x1()
        second.weight = first.weight
        return Net(lambda net, x: net.second(net.first(x)), first=first, second=second)

    network = convert_lazily(tied, {"size": SIZE}).network
    assert network.first.weight is network.second.weight
    assert not network.first.weight.is_meta


def test_a_type_for_which_the_code_does_otherwise_is_named():
    model = asks(lambda x: x.dtype == torch.bfloat16)
    model(images().float())
    with pytest.raises(ValueError, match=r"inputs of another dtype, .* it runs differently"):
        model.bfloat16()(images().bfloat16())


def test_outputs_are_counted_where_code_cannot_be_traced():
    def by_length(net, x):
        return x.reshape(len(x), WIDTH, -1).mean(-1)[:, :, None, None]

    model = convert(Net(by_length))
    assert "without tracing" in model.report.note
    assert (model.num_classes, model.logit_bias) == (5, -math.log(4))


def assert_does_what_the_code_does(body, **parts):
    """The converted network gives what the user's own code gives with the layers of it."""
    module = Net(body, conv=conv1x1(), other=conv1x1(), flat=nn.Flatten(2), **parts)
    model = convert(module, head="pool")
    own = copy.deepcopy(module).double().eval()
    layers = dict(model.network.named_modules())
    for name in {"stem", "conv", "other", "fc"} & layers.keys():
        setattr(own, name, layers[name])
    e = assert_complete(model)
    with torch.no_grad():
        assert_agrees((e.outputs - model.logit_bias) * model.temperature, own(encode(images())))
    return model


def changed_under_another_name(net, x):
    y = x
    y += net.conv(x)
    y -= 0.5 * net.other(x)
    return x + y


def a_shortcut_that_changes_too(net, x):
    shortcut = x
    x *= 2
    return net.conv(x) + shortcut


def counted_up(net, x):
    h = x.shape[2]
    h += 1
    return F.pad(x, (0, 0, 0, h - x.shape[2]))


def a_negative(net, x):
    torch.neg_(x)
    return x + net.conv(x).abs()


def a_gate_by_function(net, x):
    y = net.conv(x)
    torch.sigmoid_(y)
    return x * y


def through_a_flat_view(net, x):
    y = net.flat(x)
    y.mul_(2)
    return x + net.conv(x)


def through_a_moved_view(net, x):
    y = x.movedim(1, -1)
    y.mul_(2)
    return x + net.conv(x)


def asks_for_a_tensor(net, x):
    return net.conv(x) if isinstance(x, torch.Tensor) else net.other(x)


def tries(net, x):
    try:
        k = int(x.shape[2])
    except Exception:
        k = 1
    return x[:, :, :k] + net.conv(x)[:, :, :1]


def looks_up(net, x):
    return {SIZE: net.conv, 2 * SIZE: net.other}.get(x.shape[2], nn.Identity())(x)


@pytest.mark.parametrize(
    "body",
    [
        changed_under_another_name, a_shortcut_that_changes_too, counted_up, a_negative,
        a_gate_by_function, through_a_flat_view, through_a_moved_view, asks_for_a_tensor, tries,
        looks_up,
        lambda net, x: x - net.bytes,
        lambda net, x: torch.add(x, net.bytes, alpha=2),
        lambda net, x: torch.sub(net.bytes, x, alpha=2),
    ],
)  # fmt: skip
def test_what_python_sees_and_a_symbol_does_not(body):
    whole = torch.arange(1, WIDTH + 1, dtype=torch.uint8)[:, None, None] * 20
    assert_does_what_the_code_does(body, bytes=whole)


def test_the_gate_of_a_signal_that_a_module_changed_in_place_is_taken_from_it():
    """A gate that works in place leaves its values in its input, too."""

    def body(net, x):
        y = net.conv(x)
        gate = net.gate(y)
        return x * gate + x * y

    net = Net(body, conv=conv1x1(), gate=nn.Hardsigmoid(inplace=True))
    model = convert(net)
    assert_complete(model)
    network, x = model.network, encode(images())
    signal = network.stem(x)
    gate = F.hardsigmoid(network.conv(signal))
    out = network.fc(2 * signal * gate).mean((2, 3))
    assert_agrees(model(images()), out / model.temperature + model.logit_bias)


@pytest.mark.parametrize(
    ("body", "culprit"),
    [
        (lambda net, x: net.conv(x) + x.max(1, keepdim=True)[-1], "getitem"),
        (lambda net, x: net.conv(x) + (10 * x).type_as(net.whole), "typeas"),
        (lambda net, x: net.conv(x) + (10 * x).sum(1, keepdim=True, dtype=torch.int64), "sum"),
        (lambda net, x: x.permute(1, 0, 2, 3).reshape(x.shape), "what combines images"),
        (
            lambda net, x: F.pad(x, (0, 0, 0, 0, 0, 0, 0, 1)).unfold(0, 2, 1).mean(-1),
            "what combines images",
        ),
        (lambda net, x: half_doubled(x), "a change of a view in place"),
    ],
)
def test_what_rounds_or_mixes_images_is_refused(body, culprit):
    with pytest.raises(ValueError, match=culprit):
        convert(Net(body, conv=conv1x1(), whole=torch.ones(1, dtype=torch.int64)))


def half_doubled(x):
    y = x[:, : WIDTH // 2]
    y *= 2
    return x


class AddsItsInput(nn.Conv2d):
    def forward(self, x):
        return x + super().forward(x)


class Reversed(nn.TransformerEncoderLayer):
    def forward(self, *given, **named):
        return super().forward(*given, **named).flip(1)


def test_layers_that_do_more_than_torchs_are_refused():
    with pytest.raises(ValueError, match="`AddsItsInput` at part"):
        convert(Net(lambda net, x: net.part(x), part=AddsItsInput(WIDTH, WIDTH, 1)))
    tokens = Reversed(WIDTH, 2, 16, batch_first=True)
    with pytest.raises(ValueError, match="`Reversed` at part"):
        convert(Net(lambda net, x: net.part(x.flatten(2).mT).mT.unflatten(2, (SIZE, SIZE)),
                    part=tokens))  # fmt: skip


def test_hooks_of_layers_that_change_nothing_are_no_matter_and_others_are_refused():
    seen = []
    net = Net(lambda net, x: net.conv(x), conv=conv1x1())
    hook = net.conv.register_forward_hook(lambda module, given, out: seen.append(out.shape))
    convert(net)
    assert seen
    hook.remove()
    net.conv.register_forward_hook(lambda module, given, out: 0 * out)
    with pytest.raises(ValueError, match="conv has a hook, which its twin would not have"):
        convert(net)


def test_the_weight_of_a_layer_in_code_that_cannot_be_traced_is_refused():
    def body(net, x):
        return F.linear(x.mean((2, 3)), net.weights.weight) if x.sum() > -1e9 else x

    net = Whole(lambda net, x: body(net, net.stem(x)), weights=nn.Linear(WIDTH, 5))
    with pytest.raises(ValueError, match="would give 10 outputs in place of 5, as where its code"):
        convert(net)


def by_values(net, x):
    """Code that decides by the values."""
    return net.second(net.first(x)) if x.sum() > -1e9 else x


def test_layers_share_weights_where_code_cannot_be_traced():
    first, second = conv1x1(), conv1x1()
    second.weight = first.weight
    model = convert(Net(by_values, first=first, second=second))
    assert "without tracing" in model.report.note
    assert model.network.first.weight is model.network.second.weight


def test_groups_of_a_first_layer_are_refused_where_code_cannot_be_traced():
    def first(net, x):
        return net.stem(x).mean((2, 3)) if x.sum() > -1e9 else x

    with pytest.raises(ValueError, match=r"first convolution has groups, which would part r"):
        convert(Whole(first, stem=nn.Conv2d(3, 6, 3, groups=3)))
