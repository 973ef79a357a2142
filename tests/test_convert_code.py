"""Networks whose Python code asks for sizes, assigns, rearranges the image, or takes options."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchbcos as tb
from test_convert import (
    SIZE,
    WIDTH,
    Net,
    Whole,
    assert_complete,
    assert_equals_body,
    became,
    conv1x1,
    convert,
    images,
    random,
)

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
    assert "convert it with size" in str(error.value)
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


REFUSED = {to_a_view: "assignment to a part of a part", to_a_constant: "assigned"}


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
