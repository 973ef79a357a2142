"""Running a network up to one of its layers, by any name the original network had."""

from collections import OrderedDict

import pytest
import torch
import torchvision
from torch import nn

import torchbcos as tb
from torchbcos.layout import tap_with_axis
from torchbcos.tap import layer_names, tap, watch


class Block(nn.Module):
    def __init__(self, conv=nn.Conv2d):
        super().__init__()
        self.conv1 = conv(6, 6, 3, padding=1)
        self.act = nn.Identity()
        self.conv2 = conv(6, 6, 3, padding=1)

    def forward(self, x):
        return x + self.conv2(self.act(self.conv1(x)))


def plain():
    """Not a graph: its layers are reached with a hook."""
    torch.manual_seed(0)
    return nn.Sequential(
        Block(tb.BcosConv2d), nn.Sequential(Block(tb.BcosConv2d), nn.AvgPool2d(2)), nn.Flatten()
    )


@pytest.fixture(scope="module")
def resnet():
    """A graph: its layers are nodes of it."""
    torch.manual_seed(0)
    model = tb.create_model("resnet18", num_classes=10, max_out=1, norm="uncentred")
    return model.network.eval()


def recorded(network, x):
    """The output of every submodule, by torch's own hooks."""
    seen = {}
    handles = [
        module.register_forward_hook(lambda _, __, out, name=name: seen.setdefault(name, out))
        for name, module in network.named_modules()
        if name
    ]
    with torch.no_grad():
        network(x)
    for handle in handles:
        handle.remove()
    return seen


def test_every_module_of_a_plain_network_is_reached():
    network, x = plain(), torch.rand(2, 6, 4, 4)
    outputs = recorded(network, x)
    assert set(layer_names(network)) == set(outputs)
    for name, expected in outputs.items():
        assert torch.equal(tap(network, name, x), expected)


def test_every_module_of_a_converted_network_is_reached(resnet):
    x = torch.rand(1, 6, 32, 32)
    outputs = recorded(resnet, x)
    assert len(outputs) > 40
    for name, expected in outputs.items():
        with torch.no_grad():
            assert torch.equal(tap(resnet, name, x), expected)


def test_blocks_of_the_original_stand_for_their_last_operation(resnet):
    """A conventional ResNet tells where its blocks end; the B-cos values must come from there."""
    x = torch.rand(1, 6, 32, 32)
    original = torchvision.models.resnet18(num_classes=10).eval()
    shapes = {k: v.shape for k, v in recorded(original, torch.rand(1, 3, 32, 32)).items()}
    blocks = ["layer1", "layer2.0", "layer2.1", "layer2.0.downsample", "layer4.1", "layer4"]
    assert set(blocks) <= set(layer_names(resnet))
    with torch.no_grad():
        for name in blocks:
            assert tap(resnet, name, x).shape == shapes[name]
        # The sum, not the last layer: out = bn2 + identity.
        inner = {n: tap(resnet, f"layer2.0.{n}", x) for n in ("bn2", "downsample.1")}
        assert torch.equal(tap(resnet, "layer2.0", x), inner["bn2"] + inner["downsample.1"])
        assert torch.equal(tap(resnet, "layer2.0.downsample", x), inner["downsample.1"])
        assert torch.equal(tap(resnet, "layer2", x), tap(resnet, "layer2.1", x))


class Wired(nn.Module):
    """A stem, a block given as a function of itself and its signal, what follows it, an end."""

    def __init__(self, block, after=lambda net, y: y):
        super().__init__()
        self.stem, self.block, self.fc = nn.Conv2d(3, 4, 1), Function(block), nn.Linear(4, 3)
        self.after = after

    def forward(self, x):
        return self.fc(self.after(self, self.block(self.stem(x))).mean([2, 3]))


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.a, self.b, self.act = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.ReLU()

    def forward(self, x):
        return self.function(self, x)


def with_attention(block, x):
    y = block.a(x)
    block.attention = block.b(y).sigmoid()
    return block.act(y)


def first_of_two(block, x):
    y, block.other = block.a(x), block.b(x)
    return y


def added_in_place(block, x):
    y = block.a(x)
    y.add_(block.b(x))
    return y


RETURNED = {
    "a stored gate comes last": (
        with_attention,
        lambda net, y: y * net.block.attention,
        lambda b, x: b.a(x),
    ),
    "another value comes last": (
        first_of_two,
        lambda net, y: y + net.block.other,
        lambda b, x: b.a(x),
    ),
    "what follows works in place": (
        lambda b, x: b.a(x),
        lambda net, y: y.add_(1.0).mul_(2.0),
        lambda b, x: b.a(x),
    ),
    "its end works in place": (added_in_place, None, lambda b, x: b.a(x) + b.b(x)),
    "its input": (lambda b, x: x, None, lambda b, x: x),
    "an activation of its input": (lambda b, x: b.act(x), None, lambda b, x: x),
    "a list of one": (lambda b, x: [b.act(b.a(x))], lambda net, y: y[0], lambda b, x: b.a(x)),
}


@pytest.mark.parametrize(("block", "after", "expected"), RETURNED.values(), ids=RETURNED)
def test_a_block_stands_for_what_it_returns(block, after, expected):
    torch.manual_seed(0)
    module = Wired(block, after) if after else Wired(block)
    network = tb.convert(module, input_size=8).network.eval()
    x = torch.rand(2, 6, 8, 8)
    with torch.no_grad():
        stem = network.stem(x)
        value = expected(getattr(network, "block", None), stem)
        assert torch.equal(tap(network, "block", x), value)
        seen = []
        watch(network, x, {"block": seen.append})
    assert torch.equal(seen[0], value)
    assert "block" in layer_names(network)


@pytest.mark.parametrize(
    ("block", "after"),
    [
        (lambda b, x: (b.a(x), b.b(x)), lambda net, y: y[0] + y[1]),
        (lambda b, x: {"a": b.a(x), "b": b.b(x)}, lambda net, y: y["a"] + y["b"]),
        (lambda b, x: b.a(x).chunk(2, 1), lambda net, y: torch.cat([y[0], y[1]], 1)),
    ],
    ids=["tuple", "dict", "chunks"],
)
@pytest.mark.parametrize("converted", [True, False])
def test_a_block_of_several_values_is_refused(block, after, converted):
    network, x = Wired(block, after), torch.rand(2, 3, 8, 8)
    if converted:
        network, x = tb.convert(network, input_size=8).network, torch.rand(2, 6, 8, 8)
    message = r"^`layer` \(='block'\) returns several values .* within it\.$"
    several = pytest.raises(ValueError, match=message)
    with several:
        tap(network, "block", x)
    with several:
        watch(network, x, {"block": lambda _: None})
    with several:
        tb.explain(network, x, layer="block", unit=0)
    assert tap(network, "block.a", x).shape == (2, 4, 8, 8)


def test_graphs_of_others_know_no_returns_and_stand_for_their_last_operation():
    module, x = nn.Sequential(Block(), nn.Flatten()), torch.rand(2, 6, 4, 4)
    graph = torch.fx.symbolic_trace(module)
    assert torch.equal(tap(graph, "0", x), module[0](x))
    assert "0" in layer_names(graph)


def test_names_are_in_the_order_of_the_computation(resnet):
    names = layer_names(resnet)
    path = ["conv1", "bn1", "layer1.0.conv1", "layer1.1.conv2", "layer4.0.downsample.0", "fc"]
    positions = [names.index(name) for name in path]
    assert positions == sorted(positions)
    assert len(set(names)) == len(names)
    assert "" not in names


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("layer1.0.conv3", "layer1.0.conv1"), ("layr2", "layer2"), ("Conv1", "conv1")],
)
def test_a_wrong_name_is_answered_with_a_close_one(resnet, wrong, meant):
    with pytest.raises(ValueError, match="did you mean") as error:
        tap(resnet, wrong, torch.rand(1, 6, 32, 32))
    assert f"`layer` (={wrong!r})" in str(error.value)
    assert meant in str(error.value)


@pytest.mark.parametrize("wrong", ["", "zzz", "0.conv3", "1.7", "0.", "network"])
def test_a_name_that_is_like_no_other_is_answered_with_examples(resnet, wrong):
    for network in (plain(), resnet):
        with pytest.raises(ValueError, match="did you mean"):
            tap(network, wrong, torch.rand(1, 6, 32, 32))


class Network(nn.Module):
    """It has a part that is called as a model's network is."""

    def __init__(self, conv, channels, block):
        super().__init__()
        self.conv, self.network = (
            conv(channels, 6, 3),
            nn.Sequential(OrderedDict(conv=conv(6, 6, 3))),
        )
        self.block, self.network.block = nn.Identity(), block

    def forward(self, x):
        return self.block(self.network.block(self.network.conv(self.conv(x)))[0]).mean((2, 3))


@pytest.mark.parametrize("converted", [True, False])
def test_a_name_is_looked_up_as_it_is_given_before_it_is_one_in_the_model(converted):
    block = Function(lambda _, x: (x, x))
    if converted:
        network = tb.convert(Network(nn.Conv2d, 3, block), input_size=16).network
    else:
        network = Network(tb.BcosConv2d, 6, block)
    x = torch.rand(2, 6, 16, 16)
    sizes = {"conv": 14, "network.conv": 12, "network.network.conv": 12}
    for name, size in sizes.items():
        assert tap(network, name, x).shape[2] == tap_with_axis(network, name, x)[0].shape[2] == size
    seen = {}
    watch(network, x, {n: lambda out, n=n: seen.update({n: out.shape[2]}) for n in sizes})
    assert seen == sizes
    for ask in (tap, lambda *a: watch(a[0], a[2], {a[1]: lambda out: None})):
        with pytest.raises(ValueError, match="returns several values"):
            ask(network, "network.block", x)
        with pytest.raises(TypeError, match=r"`layer` \(of type int\) must be a layer's name"):
            ask(network, 0, x)


def test_a_module_that_does_not_run_is_refused():
    network = plain()
    network[0].spare = tb.BcosConv2d(6, 6, 1)
    with pytest.raises(ValueError, match=r"`layer` \(='0.spare'\) is never reached"):
        tap(network, "0.spare", torch.rand(1, 6, 4, 4))
    assert not any(m._forward_hooks for m in network.modules())


def test_a_layer_used_twice_stands_for_its_first_use():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = tb.BcosConv2d(6, 6, 3, padding=1)

        def forward(self, x):
            return self.conv(self.conv(x))

    network, x = Twice(), torch.rand(1, 6, 4, 4)
    assert torch.equal(tap(network, "conv", x), network.conv(x))


def test_gradients_flow_through():
    network, x = plain(), torch.rand(1, 6, 4, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(tap(network, "1.0", x).sum(), x)
    (expected,) = torch.autograd.grad(network[1][0](network[0](x)).sum(), x)
    assert torch.equal(grad, expected)


# Watching on the way.


@pytest.mark.parametrize("kind", ["plain", "graph"])
def test_watching_shows_what_tapping_gives_and_changes_nothing(kind, resnet):
    network = plain() if kind == "plain" else resnet
    x = torch.rand(2, 6, 4, 4) if kind == "plain" else torch.rand(2, 6, 32, 32)
    names = ["0", "1.0.conv2", "2"]
    if kind == "graph":
        names = ["conv1", "layer1.0", "layer3.1.conv1", "layer4"]
    seen = {}
    with torch.no_grad():
        out = watch(network, x, {n: lambda o, n=n: seen.update({n: o}) for n in names})
        assert torch.equal(out, network(x))
        assert list(seen) == names
        for name, value in seen.items():
            assert torch.equal(value, tap(network, name, x))
    assert not any(m._forward_hooks for m in network.modules())


@pytest.mark.parametrize("kind", ["plain", "graph"])
def test_what_a_look_returns_goes_on(kind, resnet):
    network, name = (plain(), "1.0.conv1") if kind == "plain" else (resnet, "layer2.0.conv1")
    x = torch.rand(2, 6, 4, 4) if kind == "plain" else torch.rand(2, 6, 32, 32)
    with torch.no_grad():
        out = watch(network, x, {name: torch.zeros_like})
        module = network.get_submodule(name)
        hook = module.register_forward_hook(lambda *a: torch.zeros_like(a[2]))
        expected = network(x)
        hook.remove()
    assert torch.equal(out, expected)
    assert not torch.equal(out, network(x))


@pytest.mark.parametrize("name", ["nine", "", "layer9"])
def test_watching_an_unknown_layer_is_an_error_that_names_it(name, resnet):
    for network in (plain(), resnet):
        with pytest.raises(ValueError, match=f"`layer` \\(='{name}'\\) is no layer"):
            watch(network, torch.rand(1, 6, 32, 32), {name: lambda _: None})


def test_of_a_layer_used_twice_the_first_use_is_shown():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.twofold = nn.Linear(2, 2, bias=False)
            self.unused = nn.Identity()
            self.twofold.weight.data = 2 * torch.eye(2)

        def forward(self, x):
            return self.twofold(self.twofold(x))

    seen = []
    out = watch(Twice(), torch.ones(1, 2), {"twofold": seen.append})
    assert [s.tolist() for s in seen] == [[[2.0, 2.0]]]
    assert out.tolist() == [[4.0, 4.0]]
    with pytest.raises(ValueError, match="`layer` \\(='unused'\\) is never reached"):
        watch(Twice(), torch.ones(1, 2), {"unused": seen.append})
