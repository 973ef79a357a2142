"""A unit is a channel wherever a layer keeps its channels: in dimension 1, last, or on the way."""

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

import torchbcos as tb
from oracle import assert_agrees
from torchbcos import neurons
from torchbcos.encoding import encode
from torchbcos.layout import channel_axes, channel_axis, tap_with_axis
from torchbcos.tap import layer_names, tap

WIDTH, SIZE = 8, 8


class Block(nn.Module):
    """One function as a module, so that its value has a name."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


class Net(nn.Module):
    """A stem [N, C, H, W], a block, and a classifier of whatever it gives."""

    def __init__(self, block, classify):
        super().__init__()
        self.stem, self.block = nn.Conv2d(3, WIDTH, 3, padding=1), block
        self.fc, self.classify = nn.Linear(WIDTH, 5), classify

    def forward(self, x):
        return self.classify(self, self.block(self.stem(x)))


def images(count=2, size=SIZE):
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(0)).double()


def converted(module, **options):
    torch.manual_seed(0)
    model = tb.convert(module, input_size=SIZE, norm="uncentred", **options).double().eval()
    return tb.calibrate(model, images())


def last(net, x):  # [N, H, W, C]
    return net.fc(x).mean([1, 2])


def second(net, x):  # [N, C, H, W]
    return net.fc(x.mean([2, 3]))


def linear():
    return nn.Linear(WIDTH, WIDTH)


def shuffled(b, x):
    n, c, h, w = x.shape
    return x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)


BLOCKS = {
    "permute": (Block(lambda b, x: x.permute(0, 2, 3, 1)), last, 3),
    "permute by keyword": (Block(lambda b, x: torch.permute(x, dims=(0, 2, 3, 1))), last, 3),
    "movedim": (Block(lambda b, x: x.movedim(1, -1)), last, 3),
    "transposes": (Block(lambda b, x: x.transpose(1, 2).transpose(2, 3)), last, 3),
    "half way": (
        Block(lambda b, x: x.transpose(1, 2)),
        lambda net, x: second(net, x.transpose(1, 2)),
        2,
    ),
    "linear": (Block(lambda b, x: b.part(x.movedim(1, 3)), part=linear()), last, 3),
    "residual": (
        Block(lambda b, x: x.movedim(1, 3) + b.part(x.movedim(1, 3)), part=linear()),
        last,
        3,
    ),
    "there and back": (
        Block(lambda b, x: x + b.part(x.movedim(1, 3)).movedim(3, 1), part=linear()),
        second,
        1,
    ),
    "gate": (
        Block(
            lambda b, x: x.movedim(1, 3) * b.part(x.mean([2, 3])).sigmoid()[:, None, None],
            part=linear(),
        ),
        last,
        3,
    ),
    "norm": (Block(lambda b, x: b.part(x.movedim(1, 3)), part=nn.LayerNorm(WIDTH)), last, 3),
    "tokens and back": (
        Block(lambda b, x: x.flatten(2).mT.unflatten(1, (SIZE, SIZE)) + 1),
        last,
        3,
    ),
    "shuffled": (Block(shuffled), second, 1),
    "pool": (Block(lambda b, x: F.avg_pool2d(x, 2)), second, 1),
    "halves": (Block(lambda b, x: torch.cat(x.chunk(2, 1)[::-1], 1)), second, 1),
    "function": (
        Block(lambda b, x: F.conv2d(x, b.w), w=nn.Parameter(torch.randn(WIDTH, WIDTH, 1, 1))),
        second,
        1,
    ),
    "heads": (
        Block(lambda b, x: x.movedim(1, 3).unflatten(3, (2, -1)).flatten(3).roll(1, 1)),
        last,
        3,
    ),
}


@pytest.mark.parametrize(("block", "classify", "axis"), BLOCKS.values(), ids=BLOCKS)
def test_a_unit_is_a_channel_in_every_layout(block, classify, axis):
    model, x = converted(Net(block, classify)), images()
    encoded = encode(x)
    with torch.no_grad():
        out, found = tap_with_axis(model.network, "block", encoded)
        assert torch.equal(out, tap(model.network, "block", encoded))
    assert found == channel_axis(model.network, "network.block", encoded) == axis
    maps = out.movedim(axis, 1)
    assert maps.shape[1] == WIDTH
    e = tb.explain(model, x, layer="block", unit=[3, (WIDTH - 1, 2, 1)])
    assert torch.equal(e.outputs[:, 0], maps[:, 3].flatten(1).amax(1))
    assert torch.equal(e.outputs[:, 1], maps[:, WIDTH - 1, 2, 1])
    for i, (y, x_) in enumerate(e.positions[:, 0].tolist()):
        assert e.outputs[i, 0] == maps[i, 3, y, x_]
    assert_agrees(e.contributions.sum((2, 3)) + e.bias, e.outputs)
    with pytest.raises(ValueError, match=rf"`unit` \(={WIDTH}\) must be a channel"):
        tb.explain(model, x, layer="block", unit=WIDTH)


UNKNOWN = {
    "channels and rows mixed": lambda b, x: x.flatten(1, 2).unflatten(1, (SIZE, WIDTH)),
    "heads": lambda b, x: x.flatten(2).mT.unflatten(2, (2, -1)).transpose(1, 2),
    "by indices": lambda b, x: torch.einsum("nchw,cd->nhwd", x, b.mix),
}


@pytest.mark.parametrize("function", UNKNOWN.values(), ids=UNKNOWN)
def test_where_the_channels_cannot_be_told_a_function_is_asked_for(function):
    block = Block(function, mix=nn.Parameter(torch.eye(WIDTH)))
    module = Net(block, lambda net, x: net.fc(x.flatten(1)[:, :WIDTH]))
    model, x = converted(module), images()
    with pytest.raises(ValueError, match=r"`unit` \(=1\) .* not known where the channels are"):
        tb.explain(model, x, layer="block", unit=1)
    with torch.no_grad():
        out = tap(model.network, "block", encode(x))
    e = tb.explain(model, x, layer="block", unit=lambda a: a[:, 1, 2, 3])
    assert torch.equal(e.outputs[:, 0], out[:, 1, 2, 3])
    with pytest.raises(ValueError, match="not known where the units are"):
        neurons.unit_contributions(model, x, "block")


def test_what_holds_parts_of_images_is_refused():
    block = Block(lambda b, x: x.unflatten(3, (2, -1)).movedim(3, 1).flatten(0, 1))
    model = converted(Net(block, lambda net, x: net.fc(x.unflatten(0, (-1, 2)).mean([1, 3, 4]))))
    with pytest.raises(ValueError, match=r"shape \(4, 8, 8, 4\) for 2 images"):
        tb.explain(model, images(), layer="block", unit=1)


def test_in_swin_and_convnext_every_block_has_its_channels():
    """As many as torchvision says; the sizes of all stages differ."""
    torch.manual_seed(0)
    swin = torchvision.models.SwinTransformer([4, 4], 8, [1, 1], [2, 4], [2, 2], num_classes=5)
    setting = [torchvision.models.convnext.CNBlockConfig(*c) for c in ((12, 20, 1), (20, None, 1))]
    convnext = torchvision.models.ConvNeXt(setting, num_classes=5)
    for module, widths in ((swin, {8, 16, 32, 64}), (convnext, {12, 20, 48, 80})):
        model = tb.convert(module, input_size=32).eval()
        x = encode(images(1, 32).float())
        names = [name for name in layer_names(model.network) if name.startswith("features")]
        axes = channel_axes(model.network, names, x)
        seen = set()
        for name in names:
            with torch.no_grad():
                out, axis = tap_with_axis(model.network, name, x)
            assert axis is not None
            assert axes[name] == axis
            seen.add(out.shape[axis])
        assert seen == widths


def test_the_axes_of_all_layers_take_one_run():
    block = Block(lambda b, x: b.part(x.movedim(1, 3)), part=linear())
    network = converted(Net(block, last)).network
    runs = []
    with network.get_submodule("stem").register_forward_hook(lambda *_: runs.append(1)):
        found = channel_axes(network, ["fc", "block", "block.part", "stem"], encode(images()))
    assert found == {"stem": 1, "block.part": 3, "block": 3, "fc": 3}
    assert len(runs) == 1


def test_a_layer_of_several_tensors_has_no_axis():
    halves = Block(lambda b, x: x.chunk(2, 1))
    network = converted(Net(halves, lambda net, x: second(net, torch.cat(x, 1)))).network
    for layers in (["block"], ["stem", "block", "fc"]):
        with pytest.raises(ValueError, match=r"`layer` \(='block'\) returns several values"):
            channel_axes(network, layers, encode(images()))


class PlainBlock(nn.Module):
    """Not converted: its code cannot be looked into."""

    def __init__(self, part, function):
        super().__init__()
        self.part, self.function, self.same = part, function, nn.Identity()

    def forward(self, x):
        return self.same(self.function(self, x))


@pytest.mark.parametrize(
    ("part", "function", "axis"),
    [
        (tb.BcosConv2d(6, 6, 1), lambda b, x: x + b.part(x), 1),
        (tb.BcosLinear(6, 6), lambda b, x: b.part(x.movedim(1, 3)), 3),
        (
            nn.Sequential(tb.BcosConv2d(6, 6, 1), tb.BcosLinear(6, 6)),
            lambda b, x: b.part[1](b.part[0](x).movedim(1, 3)).movedim(3, 1),
            None,
        ),
        (
            nn.Sequential(tb.BcosConv2d(6, 6, 1), tb.BcosLinear(6, 6)),
            lambda b, x: b.part[0](x) * b.part[1](x.mean([2, 3]))[:, :, None, None].detach(),
            1,
        ),
    ],
    ids=["convolution", "linear", "both", "squeeze and excite"],
)
def test_a_plain_network_is_answered_for_where_all_its_layers_agree(part, function, axis):
    torch.manual_seed(0)
    network = nn.Sequential(PlainBlock(part, function)).double()
    x = torch.rand(2, 6, 4, 5).double()
    for layer in ("0", "0.same"):
        out, found = tap_with_axis(network, layer, x)
        assert found == axis
        assert channel_axes(network, [layer], x) == {layer: axis}
        if axis is None:
            with pytest.raises(ValueError, match="not known where the channels are"):
                tb.explain(network, x, layer=layer, unit=4)
            continue
        e = tb.explain(network, x, layer=layer, unit=4)
        assert torch.equal(e.outputs[:, 0], out.movedim(axis, 1)[:, 4].flatten(1).amax(1).detach())
    assert not any(m._forward_hooks for m in network.modules())


def test_neurons_of_layers_with_channels_last(tmp_path):
    block = Block(lambda b, x: x.movedim(1, 3) + b.part(x.movedim(1, 3)), part=linear())
    model, x = converted(Net(block, last)), images(6)

    class Set:
        labels = torch.zeros(6, dtype=torch.long)

        def __len__(self):
            return 6

        def batch(self, indices):
            return x[indices], self.labels[indices]

    with torch.no_grad():
        maps = tap(model.network, "block", encode(x)).movedim(3, 1)
    found = neurons.collect(model, Set(), tmp_path / "n", layers=["block"], top=1)
    assert found.layers["block"].channels_last
    assert_agrees(found.units("block").values[:, 0], maps.flatten(2).amax((0, 2)))
    told = neurons.unit_contributions(model, x, "block")
    assert torch.equal(told.activations, maps)
    assert told.units.shape == (6, 1, WIDTH)
    assert told.residual.abs().max() < 1e-12
    (best,) = neurons.most_active_for(model, x[0], "block", 1)
    assert best.unit == maps[0].flatten(1).amax(1).argmax()


def test_the_layout_of_a_layer_is_not_that_of_another_whose_name_ends_the_same():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = nn.ModuleDict({"layer": nn.Linear(WIDTH, 4)})
            self.layer = nn.Conv2d(3, WIDTH, 3)

        def forward(self, x):
            return self.network["layer"](self.layer(x).permute(0, 2, 3, 1)).mean((1, 2))

    network = converted(Inner(), head="pool").network
    x = encode(images())
    assert [channel_axis(network, name, x) for name in ("layer", "network.layer")] == [1, 3]


def test_units_of_tokens_are_in_their_last_dimension():
    block = Block(lambda b, x: b.part(x.flatten(2).mT) + 1, part=nn.LayerNorm(WIDTH))
    model, x = converted(Net(block, lambda net, x: net.fc(x).mean(1))), images()
    told = neurons.unit_contributions(model, x, "block")
    assert told.activations.shape == (2, WIDTH, SIZE * SIZE)
    assert told.units.shape == (2, 1, WIDTH)
    with pytest.raises(ValueError, match=r"\(2, 64, 8\); channels are .*: lambda a: a\[:, 0, 0\]"):
        tb.explain(model, x, layer="block", unit=1)
    e = tb.explain(model, x, layer="block", unit=[lambda a: a[:, 0, 0], lambda a: a[:, 5, 2]])
    torch.testing.assert_close(e.outputs, told.activations[:, [0, 2], [0, 5]])
    assert e.residual.abs().max() < 1e-6
