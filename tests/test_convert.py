"""The rule table case by case, the report, and W(x)·x + bias = every logit of what comes out."""

import copy
import io
import itertools
import math
import pickle
import warnings

import pytest
import timm.layers
import torch
import torch.nn.functional as F
import torchvision
from timm.models.metaformer import LayerNorm2dNoBias
from torch import nn
from torch.utils._pytree import tree_leaves
from torchvision.ops import stochastic_depth

import torchbcos as tb
from oracle import TOLERANCE, assert_agrees
from torchbcos import norms
from torchbcos.convert.modules import completeness_error
from torchbcos.encoding import encode

torch.fx.wrap("stochastic_depth")  # as torchvision does: it is one operation of the graph

SIZE = 16
WIDTH = 8


class Net(nn.Module):
    """A stem, a body given as a function of the network and its signal, and a classifier."""

    def __init__(self, body, **parts):
        super().__init__()
        self.body = body
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        for name, part in parts.items():
            if isinstance(part, nn.Module | nn.Parameter):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part)
        self.fc = nn.Linear(WIDTH, 5)

    def forward(self, x):
        return self.fc(self.body(self, self.stem(x)).mean([2, 3]))


class Whole(Net):
    """The body is the whole network, from the image to the logits."""

    def forward(self, x):
        return self.body(self, x)


def conv1x1():
    return nn.Conv2d(WIDTH, WIDTH, 1)


def random(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1))


def images(count=2, size=SIZE, dtype=torch.float64):
    size = (size, size) if isinstance(size, int) else size
    return torch.rand(count, 3, *size, generator=torch.Generator().manual_seed(2)).to(dtype)


def convert(module, **options):
    """The converted module in float64 and evaluation mode."""
    torch.manual_seed(0)
    return tb.convert(module, **{"input_size": SIZE, **options}).double().eval()


def assert_complete(model, x=None):
    """W(x)·x + bias is every logit, and an explanation does not change a logit's value."""
    x = images() if x is None else x
    e = tb.explain(model, x, targets="all")
    scale = (e.outputs - model.logit_bias).abs().max()
    assert scale > 0
    assert e.residual.abs().max() <= TOLERANCE[e.outputs.dtype] * scale
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # small nets need no calibration
        assert torch.equal(e.outputs, model(x))
    return e


def assert_equals_body(model, body):
    """Logits and rows of W(x) are those of `body` between the converted stem and classifier.

    `body` is written with every held factor detached and every constant left as it is, so that
    torch's own gradients in explanation mode are the rows.
    """
    network, x = model.network, encode(images()).requires_grad_()
    with tb.explanation_mode():
        out = network.fc(body(network, network.stem(x))).mean([2, 3])
        rows = [torch.autograd.grad(out[:, k].sum(), x, retain_graph=True)[0] for k in range(5)]
    e = assert_complete(model)
    assert_agrees(e.outputs, out / model.temperature + model.logit_bias)
    assert_agrees(e.weights, torch.stack(rows, 1) / model.temperature)
    return e


def became(model, place):
    return [c.became for c in model.report.changes if c.place == place]


# Layers.


def test_every_convolution_and_linear_layer_becomes_a_bcos_layer_of_the_same_geometry():
    module = Net(
        lambda net, x: net.mix(net.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
        conv=nn.Conv2d(WIDTH, 12, (3, 5), (1, 2), (1, 2), (1, 1), groups=4, padding_mode="reflect"),
        mix=nn.Linear(12, WIDTH),
    )
    model = convert(module, b=1.5, max_out=3)
    conv, mix = model.network.conv, model.network.mix
    assert isinstance(conv, tb.BcosConv2d)
    assert isinstance(mix, tb.BcosLinear)
    for name in ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation"):
        assert getattr(conv, name) == getattr(module.conv, name)
    assert (conv.groups, conv.padding_mode) == (4, "reflect")
    assert (mix.in_features, mix.out_features) == (12, WIDTH)
    assert {(layer.b, layer.max_out) for _, layer in model.bcos_layers()} == {(1.5, 3)}
    assert model.network.stem.in_channels == 6
    assert model.in_channels == 3
    with pytest.raises(ValueError, match=r"`module` \(a BcosModel\) is converted already"):
        convert(model)
    assert model.num_classes == 5
    assert model.input_size == (SIZE, SIZE)
    assert_complete(model)


@pytest.mark.parametrize("channels", [1, 4])
def test_the_first_convolution_takes_twice_the_channels_of_the_image(channels):
    module = nn.Sequential(
        nn.Conv2d(channels, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )
    model = convert(module)
    assert model.in_channels == channels
    assert model.network.get_submodule("0").in_channels == 2 * channels
    assert_complete(model, images()[:, :1].expand(-1, channels, -1, -1))


def test_two_stems_that_both_see_the_image_both_take_six_channels():
    module = Whole(
        lambda net, x: net.fc((net.stem(x) + net.other(2 * x)).mean([2, 3])),
        other=nn.Conv2d(3, WIDTH, 5, padding=2),
    )
    model = convert(module)
    assert model.network.stem.in_channels == model.network.other.in_channels == 6
    assert_complete(model)


@pytest.mark.parametrize("dims", [1, 3])
def test_convolutions_of_other_dimensions(dims):
    conv = {1: nn.Conv1d, 3: nn.Conv3d}[dims](WIDTH, WIDTH, 5, padding=2)
    shape = {1: (SIZE * SIZE,), 3: (4, 4, SIZE)}[dims]
    model = convert(
        Net(
            lambda net, x: net.conv(x.flatten(2).unflatten(2, shape)).flatten(2).unsqueeze(3),
            conv=conv,
        )
    )
    assert type(model.network.conv).__name__ == f"BcosConv{dims}d"
    assert_complete(model)


# What only shapes a signal goes.

REMOVED_MODULES = [
    nn.ReLU(),
    nn.ReLU(inplace=True),
    nn.ReLU6(),
    nn.LeakyReLU(0.1),
    nn.ELU(),
    nn.SELU(),
    nn.CELU(),
    nn.GELU(),
    nn.SiLU(),
    nn.Mish(),
    nn.Hardswish(),
    nn.PReLU(WIDTH),
    nn.RReLU(),
    nn.Hardtanh(),
    nn.Softplus(),
    nn.Threshold(0.1, 0.0),
    nn.Softsign(),
    nn.Hardshrink(),
    nn.Softshrink(),
    nn.Tanhshrink(),
    nn.LogSigmoid(),
    nn.Dropout(),
    nn.Dropout2d(),
    nn.AlphaDropout(),
    nn.FeatureAlphaDropout(),
    torchvision.ops.StochasticDepth(0.5, "row"),
    torchvision.ops.DropBlock2d(0.5, 3),
    timm.layers.DropPath(0.5),
    timm.layers.GELUTanh(),
    nn.BatchNorm2d(WIDTH),
    nn.SyncBatchNorm(WIDTH),
    nn.LayerNorm([SIZE, SIZE]),
    nn.GroupNorm(2, WIDTH),
    nn.InstanceNorm2d(WIDTH, affine=True),
    nn.LocalResponseNorm(3),
    nn.RMSNorm([SIZE]),
    torchvision.ops.FrozenBatchNorm2d(WIDTH),
    torchvision.models.convnext.LayerNorm2d(WIDTH),
    timm.layers.BatchNormAct2d(WIDTH),
    timm.layers.LayerNormAct2d(WIDTH),
]
REMOVED_FUNCTIONS = {
    "F.relu": F.relu,
    "F.relu in place": lambda x: F.relu(x, inplace=True),
    "F.relu_": F.relu_,
    "torch.relu": torch.relu,
    "method relu": lambda x: x.relu(),
    "method relu_": lambda x: x.relu_(),
    "F.relu6": F.relu6,
    "F.leaky_relu": lambda x: F.leaky_relu(x, negative_slope=0.2),
    "F.elu": F.elu,
    "F.selu": F.selu,
    "F.celu": F.celu,
    "F.gelu": lambda x: F.gelu(x, approximate="tanh"),
    "F.silu": F.silu,
    "F.mish": F.mish,
    "F.hardswish": F.hardswish,
    "F.hardtanh": F.hardtanh,
    "F.softplus": F.softplus,
    "F.threshold": lambda x: F.threshold(x, 0.1, 0.0),
    "F.logsigmoid": F.logsigmoid,
    "F.dropout": lambda x: F.dropout(x, 0.5, training=True),
    "F.dropout2d": lambda x: F.dropout2d(x, 0.5),
    "F.alpha_dropout": lambda x: F.alpha_dropout(x, 0.5),
    "stochastic_depth": lambda x: stochastic_depth(x, 0.5, "row"),
    "F.batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "F.layer_norm": lambda x: F.layer_norm(x, [SIZE]),
    "F.group_norm": lambda x: F.group_norm(x, 2),
    "F.instance_norm": lambda x: F.instance_norm(x),
    "F.local_response_norm": lambda x: F.local_response_norm(x, 3),
}


def assert_the_body_is_gone(model):
    """With the weights of a network that never had the operation, the logits are its logits."""
    plain = convert(Net(lambda net, x: x))
    model.load_state_dict(plain.state_dict())  # no parameter of the operation is left
    e = assert_complete(model)
    assert torch.equal(e.outputs, assert_complete(plain).outputs)
    assert "removed" in {c.became for c in model.report.changes}


@pytest.mark.parametrize("part", REMOVED_MODULES, ids=lambda m: type(m).__name__)
def test_an_activation_dropout_or_norm_that_is_a_module_is_removed(part):
    model = convert(Net(lambda net, x: net.part(x), part=part))
    assert became(model, "part") == ["removed"]
    assert not hasattr(model.network, "part")
    assert_the_body_is_gone(model)


@pytest.mark.parametrize("function", REMOVED_FUNCTIONS.values(), ids=REMOVED_FUNCTIONS)
def test_an_activation_dropout_or_norm_that_is_a_function_is_removed(function):
    assert_the_body_is_gone(convert(Net(lambda net, x: function(x))))


def test_an_activation_with_a_learned_slope_as_a_function_is_removed():
    slope = nn.Parameter(torch.full((WIDTH,), 0.25))
    assert_the_body_is_gone(convert(Net(lambda net, x: F.prelu(x, net.slope), slope=slope)))


def test_what_an_activation_was_applied_to_stays_as_it_is_for_others():
    """Once the activation is gone, an in-place operation after it must not reach its source."""

    def body(net, x):
        y = F.relu(x)
        y += net.conv(x)
        y.mul_(2.0)
        return y - 0.5 * x

    model = convert(Net(body, conv=conv1x1()))
    assert_equals_body(model, lambda net, x: 2 * (x + net.conv(x)) - 0.5 * x)


def test_an_in_place_operation_without_a_name_for_its_result_still_counts():
    def body(net, x):
        y = net.conv(x)
        y.add_(x)
        y += 2.0 * x
        return y

    model = convert(Net(body, conv=conv1x1()))
    assert_equals_body(model, lambda net, x: net.conv(x) + 3 * x)


def test_dropout_is_gone_in_training_too():
    model = convert(Net(lambda net, x: F.dropout(net.drop(x), 0.5), drop=nn.Dropout(0.9))).train()
    assert torch.equal(model.from_encoded(encode(images())), model.from_encoded(encode(images())))


# Norms kept as norms.


class RmsOverChannels(nn.RMSNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


UNCENTRED = [
    (nn.BatchNorm2d(WIDTH, eps=1e-3, momentum=0.2), norms.UncentredBatchNorm2d),
    (nn.SyncBatchNorm(WIDTH), norms.UncentredBatchNorm2d),
    (torchvision.ops.FrozenBatchNorm2d(WIDTH), norms.UncentredBatchNorm2d),
    (timm.layers.BatchNormAct2d(WIDTH), norms.UncentredBatchNorm2d),
    (nn.GroupNorm(2, WIDTH, eps=1e-3), norms.UncentredGroupNorm),
    (nn.InstanceNorm2d(WIDTH, affine=True), norms.UncentredGroupNorm),
    (nn.InstanceNorm2d(WIDTH), norms.UncentredGroupNorm),
    (nn.LayerNorm([WIDTH, SIZE, SIZE]), norms.UncentredLayerNorm),
    (nn.BatchNorm2d(WIDTH, affine=False), norms.UncentredBatchNorm2d),
    (nn.BatchNorm2d(WIDTH, track_running_stats=False), norms.UncentredBatchNorm2d),
    (nn.GroupNorm(2, WIDTH, affine=False), norms.UncentredGroupNorm),
    (nn.LayerNorm([SIZE], elementwise_affine=False), norms.UncentredLayerNorm),
    (torchvision.models.convnext.LayerNorm2d(WIDTH), norms.UncentredPositionNorm),
    (timm.layers.LayerNorm2d(WIDTH), norms.UncentredPositionNorm),
    (timm.layers.LayerNormAct2d(WIDTH), norms.UncentredPositionNorm),
    (LayerNorm2dNoBias(WIDTH), norms.UncentredPositionNorm),
]


@pytest.mark.parametrize(("part", "kind"), UNCENTRED, ids=lambda v: type(v).__name__)
def test_with_uncentred_norms_each_norm_becomes_its_dynamic_linear_twin(part, kind):
    model = convert(Net(lambda net, x: net.part(x), part=part), norm="uncentred")
    norm = model.network.part
    assert type(norm) is kind
    assert became(model, "part") == [kind.__name__]
    assert norm.bias is None
    assert norm.eps == (getattr(part, "eps", None) or 1e-5)
    assert (norm.weight is None) == (getattr(part, "weight", None) is None)
    tracked = getattr(part, "running_var", None) is not None
    assert (getattr(norm, "running_var", None) is not None) == tracked
    assert_complete(model)


@pytest.mark.parametrize("part", [nn.RMSNorm(SIZE, eps=0.1), nn.RMSNorm(SIZE, None, False)])
def test_a_root_mean_square_stays_what_it_is(part):
    """It subtracts no mean: with its divisor held it is linear already."""
    model = convert(Net(lambda net, x: net.part(x), part=part), norm="uncentred")
    assert became(model, "part") == ["RMSNorm"]
    assert type(model.network.part) is norms.RMSNorm
    assert model.network.part.eps == part.eps
    assert (model.network.part.weight is None) == (part.weight is None)
    x = random(2, 3, SIZE).double()
    assert_agrees(model.network.part(x), part.double()(x))
    assert_complete(model)


@pytest.mark.parametrize(("part", "_"), UNCENTRED, ids=lambda v: type(v).__name__)
def test_uncentred_norms_are_of_the_type_and_on_the_device_of_the_original(part, _):
    net = Net(lambda net, x: net.part(x), part=copy.deepcopy(part)).to("meta", torch.float64)
    model = tb.convert(net, norm="uncentred", input_size=SIZE)
    assert all(t.is_meta for t in itertools.chain(model.parameters(), model.buffers()))
    assert {t.dtype for t in model.state_dict().values()} <= {torch.float64, torch.int64}


def test_the_geometry_of_uncentred_norms_is_that_of_the_original():
    model = convert(
        Net(
            lambda net, x: net.inst(net.group(net.batch(x))),
            batch=nn.BatchNorm2d(WIDTH, momentum=None),
            group=nn.GroupNorm(4, WIDTH),
            inst=nn.InstanceNorm2d(WIDTH),
        ),
        norm="uncentred",
    )
    net = model.network
    assert net.batch.momentum is None
    assert (net.group.num_groups, net.inst.num_groups) == (4, WIDTH)
    assert net.group.weight.shape == (WIDTH,)
    assert net.inst.weight is None


@pytest.mark.parametrize("dims", [1, 3])
def test_batch_norms_of_other_dimensions(dims):
    part = {1: nn.BatchNorm1d, 3: nn.BatchNorm3d}[dims](WIDTH)
    shape = {1: (SIZE * SIZE,), 3: (4, 4, SIZE)}[dims]
    model = convert(
        Net(
            lambda net, x: net.part(x.flatten(2).unflatten(2, shape)).flatten(2).unsqueeze(3),
            part=part,
        ),
        norm="uncentred",
    )
    assert type(model.network.part).__name__ == f"UncentredBatchNorm{dims}d"
    assert_complete(model)


def test_a_norm_without_a_dynamic_linear_twin_is_removed_all_the_same():
    model = convert(Net(lambda net, x: net.part(x), part=nn.LocalResponseNorm(3)), norm="uncentred")
    assert became(model, "part") == ["removed: it has no uncentred form"]


FUNCTIONAL_NORMS = {
    "UncentredBatchNorm2d": lambda net, x: F.batch_norm(x, *net.statistics, training=net.training),
    "UncentredGroupNorm": lambda net, x: F.group_norm(x, 4, net.p, net.p),
    "UncentredLayerNorm": lambda net, x: F.layer_norm(x.mT, (SIZE,), eps=1e-3).mT,
    "RMSNorm": lambda net, x: F.rms_norm(x, (SIZE,)),
}


@pytest.mark.parametrize("kind", FUNCTIONAL_NORMS)
def test_functional_norms_are_kept_like_modules(kind):
    class Normalised(Net):
        statistics = torch.zeros(WIDTH), torch.ones(WIDTH)

        def __init__(self):
            super().__init__(FUNCTIONAL_NORMS[kind])
            self.p = nn.Parameter(random(WIDTH))

    model = convert(Normalised(), norm="uncentred")
    (norm,) = [m for m in model.network.modules() if type(m).__name__ == kind]
    assert getattr(norm, "bias", None) is None
    assert (norm.weight is not None) == (kind == "UncentredGroupNorm")
    assert_complete(model)
    plain = convert(Normalised())
    assert "Norm" not in str(plain.network)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (lambda net, x: F.layer_norm(x, x.shape[1:]), "UncentredGroupNorm"),
        (lambda net, x: F.layer_norm(x, x.size()[1:], eps=1e-3), "UncentredGroupNorm"),
        (lambda net, x: F.layer_norm(x.mT, [x.size(2)]).mT, "UncentredLayerNorm"),
        (lambda net, x: F.rms_norm(x, x.shape[-1:]), "RMSNorm"),
        (lambda net, x: F.group_norm(x, x.shape[1] // 2), "UncentredGroupNorm"),
        (
            lambda net, x: torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False),
            "UncentredBatchNorm2d",
        ),
    ],
)
def test_functional_norms_over_sizes_that_the_code_asks_for(body, kind):
    model = convert(Net(body), norm="uncentred")
    (norm,) = [m for m in model.network.modules() if "Norm" in type(m).__name__]
    assert type(norm).__name__ == kind
    assert norm.weight is None
    assert_complete(model)


def test_a_norm_over_all_of_a_map_takes_maps_of_any_size():
    model = convert(Net(lambda net, x: F.layer_norm(x, x.shape[1:])), norm="uncentred")
    (norm,) = [m for m in model.network.modules() if "Norm" in type(m).__name__]
    x = random(2, WIDTH, 5, 7).double()
    assert_agrees(norm(x), x / (x.var((1, 2, 3), correction=0, keepdim=True) + 1e-5).sqrt())
    assert_complete(model, images(size=SIZE + 4))


def test_functional_norms_are_of_the_type_and_on_the_device_of_the_network():
    net = Net(lambda net, x: F.batch_norm(x, None, None, net.p, training=True), p=random(WIDTH))
    model = tb.convert(net.to("meta", torch.float64), norm="uncentred", input_size=SIZE)
    assert all(t.is_meta for t in itertools.chain(model.parameters(), model.buffers()))
    assert {t.dtype for t in model.state_dict().values()} <= {torch.float64, torch.int64}
    (norm,) = [m for m in model.network.modules() if "Norm" in type(m).__name__]
    assert norm.weight is not None


class LayerNorm2d(nn.Module):
    """As many networks have one of their own."""

    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        x = x - x.mean(1, keepdim=True)
        x = x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt()
        return x * self.weight[:, None, None] + self.bias[:, None, None]


def test_a_norm_of_the_networks_own_code_is_kept_by_its_name():
    model = convert(Net(lambda net, x: net.part(x), part=LayerNorm2d(WIDTH)), norm="uncentred")
    assert became(model, "part") == ["UncentredPositionNorm"]
    assert model.network.part.weight.shape == (WIDTH,)
    assert_complete(model)


def test_no_tensor_of_the_analysis_stays_in_the_graph():
    model = convert(Net(lambda net, x: torch.cat(x.chunk(2, 1), 1)))
    metas = [value for node in model.network.graph.nodes for value in node.meta.values()]
    assert not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(metas))


def test_layers_that_shared_a_weight_share_that_of_their_twins(tmp_path):
    first, second = conv1x1(), conv1x1()
    second.weight = first.weight
    model = convert(Net(lambda net, x: net.second(net.first(x)), first=first, second=second))
    assert model.network.first.weight is model.network.second.weight
    tb.save(model, tmp_path / "m.safetensors")
    again = Net(lambda net, x: net.second(net.first(x)), first=first, second=second)
    loaded = tb.load(tmp_path / "m.safetensors", module=again)
    assert loaded.network.first.weight is loaded.network.second.weight
    assert torch.equal(loaded(images().float()), model.eval()(images().float()))


# Pools.

POOLS = {
    "MaxPool2d": (
        lambda net, x: net.pool(x),
        lambda net, x: F.avg_pool2d(x, 3, 2, 1),
        nn.MaxPool2d(3, 2, 1),
    ),
    "MaxPool2d, stride left out": (
        lambda net, x: net.pool(x),
        lambda net, x: F.avg_pool2d(x, (2, 4)),
        nn.MaxPool2d((2, 4)),
    ),
    "MaxPool2d, ceil_mode": (
        lambda net, x: net.pool(x),
        lambda net, x: F.avg_pool2d(x, 3, 2, 0, ceil_mode=True),
        nn.MaxPool2d(3, 2, ceil_mode=True),
    ),
    "MaxPool1d": (
        lambda net, x: net.pool(x.flatten(2)).unsqueeze(3),
        lambda net, x: F.avg_pool1d(x.flatten(2), 4, 3, 1).unsqueeze(3),
        nn.MaxPool1d(4, 3, 1),
    ),
    "MaxPool3d": (
        lambda net, x: net.pool(x.unsqueeze(2)).squeeze(2),
        lambda net, x: F.avg_pool2d(x, 2),
        nn.MaxPool3d((1, 2, 2)),
    ),
    "AdaptiveMaxPool2d": (
        lambda net, x: net.pool(x),
        lambda net, x: F.adaptive_avg_pool2d(x, (3, 5)),
        nn.AdaptiveMaxPool2d((3, 5)),
    ),
    "AdaptiveMaxPool1d": (
        lambda net, x: net.pool(x.flatten(2)).unsqueeze(3),
        lambda net, x: F.adaptive_avg_pool1d(x.flatten(2), 7).unsqueeze(3),
        nn.AdaptiveMaxPool1d(7),
    ),
    "F.max_pool2d": (lambda net, x: F.max_pool2d(x, 2), lambda net, x: F.avg_pool2d(x, 2), None),
    "F.max_pool2d by position": (
        lambda net, x: F.max_pool2d(x, 3, 2, 1, 1, True),
        lambda net, x: F.avg_pool2d(x, 3, 2, 1, True),
        None,
    ),
    "F.max_pool2d by keyword": (
        lambda net, x: F.max_pool2d(input=x, kernel_size=3, stride=2, ceil_mode=True),
        lambda net, x: F.avg_pool2d(x, 3, 2, 0, True),
        None,
    ),
    "torch.max_pool2d": (
        lambda net, x: torch.max_pool2d(x, (2, 1)),
        lambda net, x: F.avg_pool2d(x, (2, 1)),
        None,
    ),
    "F.max_pool1d": (
        lambda net, x: F.max_pool1d(x.flatten(2), 4).unsqueeze(3),
        lambda net, x: F.avg_pool1d(x.flatten(2), 4).unsqueeze(3),
        None,
    ),
    "F.adaptive_max_pool2d": (
        lambda net, x: F.adaptive_max_pool2d(x, 3),
        lambda net, x: F.adaptive_avg_pool2d(x, 3),
        None,
    ),
    "F.adaptive_max_pool2d by keyword": (
        lambda net, x: F.adaptive_max_pool2d(x, output_size=(3, 2), return_indices=False),
        lambda net, x: F.adaptive_avg_pool2d(x, (3, 2)),
        None,
    ),
}


@pytest.mark.parametrize(("body", "average", "pool"), POOLS.values(), ids=POOLS)
def test_a_max_pool_becomes_the_average_pool_of_its_geometry(body, average, pool):
    model = convert(Net(body, **({"pool": pool} if pool is not None else {})))
    assert_equals_body(model, average)
    assert any("avg" in c.became.lower() or "average" in c.became for c in model.report.changes)


# Everything linear stays.

LINEAR = {
    "AvgPool2d": lambda net, x: F.avg_pool2d(x, 3, 2, 1),
    "mean": lambda net, x: x.mean(1, keepdim=True) + x,
    "sum": lambda net, x: x + x.sum(3, keepdim=True) + torch.sum(x, dim=2, keepdim=True),
    "difference": lambda net, x: net.conv(x) - x,
    "in-place sum": lambda net, x: net.conv(x).add_(x),
    "negation": lambda net, x: -x,
    "scaled": lambda net, x: 0.5 * x / 3.0,
    "scaled by a learned constant": lambda net, x: net.gain * x,
    "divided by a learned constant": lambda net, x: x / net.gain.exp(),
    "constant matrix": lambda net, x: net.matrix @ x,
    "learned matrix": lambda net, x: torch.matmul(x, net.matrix),
    "cat": lambda net, x: torch.cat([x, net.conv(x)], 2),
    "cat by keyword": lambda net, x: torch.cat(tensors=(x, x), dim=3),
    "stack": lambda net, x: torch.stack([x, net.conv(x)], 1).flatten(1, 2)[:, ::2],
    "chunk": lambda net, x: halves_added(*halves(x)),
    "split": lambda net, x: torch.cat(torch.split(x, [2, 6], dim=1)[::-1], 1),
    "unbind": lambda net, x: torch.stack(x.unbind(1)[::-1], 1),
    "channel shuffle": lambda net, x: x.view(-1, 2, 4, SIZE, SIZE).transpose(1, 2).flatten(1, 2),
    "reshape to a size": lambda net, x: x.reshape(x.size(0), WIDTH, -1).unsqueeze(-1),
    "size unpacked": lambda net, x: x.permute(0, 2, 3, 1).reshape(len_of(x), -1, 8).mT[..., None],
    "transpose as an attribute": lambda net, x: x.flatten(2).mT.transpose(1, 2).unsqueeze(3),
    "reshape as": lambda net, x: net.conv(x).flatten(1).reshape_as(x),
    "flip and roll": lambda net, x: x.flip(3).roll(2, dims=2),
    "narrow and select": lambda net, x: x.narrow(2, 1, 4) + x.select(3, 0).unsqueeze(3)[:, :, :4],
    "selected in another order": lambda net, x: x.index_select(1, net.order),
    "each twice": lambda net, x: x.repeat_interleave(2, dim=2),
    "tiled": lambda net, x: torch.tile(x, (1, 1, 2, 1)),
    "turned": lambda net, x: torch.rot90(x, 1, dims=(2, 3)),
    "zeros beside it": lambda net, x: torch.cat([x[:, 5:], torch.zeros_like(x[:, :5])], 1),
    "new zeros beside it": lambda net, x: torch.cat(
        [x.new_zeros(len_of(x), 1, SIZE, SIZE), x[:, 1:]], 1
    ),
    "shifted into zeros": lambda net, x: shifted(x),
    "masked with zeros": lambda net, x: x.masked_fill(net.matrix > 0.5, 0.0),
    "padding": lambda net, x: F.pad(x, (1, 2, 0, 1)),
    "reflecting padding": lambda net, x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "interpolation": lambda net, x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "pixel shuffle": lambda net, x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2),
    "unfold": lambda net, x: F.unfold(x, 2).view(-1, WIDTH, 4, 225).mean(2).unsqueeze(3),
    "cumulative sum": lambda net, x: x.cumsum(3) / SIZE,
    "change of type": lambda net, x: x.to(torch.float64).contiguous().clone(),
    "fixed filter": lambda net, x: F.conv2d(x, net.filter, padding=1, groups=WIDTH),
    "fixed filter by keyword": lambda net, x: F.conv2d(
        input=F.pad(x, (1, 1, 1, 1)), weight=net.filter, stride=2, groups=WIDTH
    ),
}


def len_of(x):
    batch, _, _, _ = x.shape
    return batch


def shifted(x):
    out = torch.zeros_like(x)
    out[:, 1:] = x[:, :-1]
    return out


def halves(x):
    first, second = x.chunk(2, 1)
    return first, second


def halves_added(first, second):
    return (first + 2 * second).repeat(1, 2, 1, 1)


def linear_parts():
    return {
        "conv": conv1x1(),
        "gain": nn.Parameter(random(1, WIDTH, 1, 1)),
        "matrix": nn.Parameter(random(SIZE, SIZE)),
        "order": torch.tensor([3, 1, 0, 2, 7, 7, 5, 4]),
        "filter": random(WIDTH, 1, 3, 3),
    }


@pytest.mark.parametrize("body", LINEAR.values(), ids=LINEAR)
def test_a_linear_operation_stays(body):
    model = convert(Net(body, **linear_parts()))
    e = assert_equals_body(model, body)
    assert_agrees(e.bias, torch.full_like(e.bias, model.logit_bias))
    assert model.report.note == ""


LINEAR_MODULES = [
    nn.AvgPool2d(2),
    nn.AdaptiveAvgPool2d(3),
    nn.Identity(),
    nn.Upsample(scale_factor=2, mode="bilinear"),
    nn.ZeroPad2d(1),
    nn.ConstantPad2d(1, 0.0),
    nn.ReflectionPad2d(1),
    nn.ReplicationPad2d(2),
    nn.CircularPad2d(1),
    nn.ChannelShuffle(2),
]


@pytest.mark.parametrize("part", LINEAR_MODULES, ids=lambda m: type(m).__name__)
def test_a_linear_module_stays(part):
    model = convert(Net(lambda net, x: net.part(x), part=part))
    assert became(model, "part") == ["kept"]
    assert_equals_body(model, lambda net, x: part(x))


LEARNED_FUNCTIONS = {
    "F.conv2d": (
        lambda net, x: F.conv2d(x, net.weight, net.shift, 2, 1, 1, 2),
        lambda net, x: tb.functional.bcos_conv2d(
            x, net.weight_layer.weight, 2, 1, 1, 2, b=1.5, max_out=2
        ),
        (WIDTH, WIDTH // 2, 3, 3),
    ),
    "F.conv2d by keyword": (
        lambda net, x: F.conv2d(x, weight=net.weight, bias=net.shift, padding=1),
        lambda net, x: tb.functional.bcos_conv2d(
            x, net.weight_layer.weight, padding=1, b=1.5, max_out=2
        ),
        (WIDTH, WIDTH, 3, 3),
    ),
    "F.linear": (
        lambda net, x: F.linear(x.movedim(1, 3), net.weight, net.shift).movedim(3, 1),
        lambda net, x: tb.functional.bcos_linear(
            x.movedim(1, 3), net.weight_layer.weight, b=1.5, max_out=2
        ).movedim(3, 1),
        (WIDTH, WIDTH),
    ),
    "F.conv1d": (
        lambda net, x: F.conv1d(x.flatten(2), net.weight).unsqueeze(3),
        lambda net, x: tb.functional.bcos_conv1d(
            x.flatten(2), net.weight_layer.weight, b=1.5, max_out=2
        ).unsqueeze(3),
        (WIDTH, WIDTH, 3),
    ),
}


@pytest.mark.parametrize(
    ("body", "expected", "shape"), LEARNED_FUNCTIONS.values(), ids=LEARNED_FUNCTIONS
)
def test_a_functional_layer_with_a_learned_weight_gets_the_transform(body, expected, shape):
    torch.manual_seed(0)
    parts = {
        "weight": nn.Parameter(torch.randn(shape)),
        "shift": nn.Parameter(torch.randn(WIDTH)),
    }
    model = convert(Net(body, **parts), b=1.5)
    assert_equals_body(model, expected)
    assert "weight_layer" in dict(model.bcos_layers())  # so that it has a scale to calibrate


def test_a_learned_weight_that_two_functions_share_stays_shared():
    def body(net, x):
        return F.conv2d(F.conv2d(x, net.weight, padding=1), net.weight, stride=2)

    model = convert(Net(body, weight=nn.Parameter(random(WIDTH, WIDTH, 3, 3) - 0.5)))

    def right(net, x):
        x = tb.functional.bcos_conv2d(x, net.weight, padding=1)
        return tb.functional.bcos_conv2d(x, net.weight, stride=2)

    assert_equals_body(model, right)


@pytest.mark.parametrize("layer_first", [True, False])
@pytest.mark.parametrize("max_out", [1, 2])
def test_a_weight_that_a_layer_and_a_function_share_stays_shared(layer_first, max_out):
    def body(net, x):
        x = net.part(x) if layer_first else x
        x = F.conv2d(x, net.part.weight, net.part.bias)
        return x if layer_first else net.part(x)

    model = convert(Net(body, part=conv1x1()), max_out=max_out)

    def right(net, x):
        x = net.part(x) if layer_first else x
        x = tb.functional.bcos_conv2d(x, net.part.weight, max_out=max_out)
        return x if layer_first else net.part(x)

    assert_equals_body(model, right)


@pytest.mark.parametrize(
    ("body", "part", "what"),
    [
        (lambda net, x: net.part(x) + net.part.bias[:, None, None], conv1x1(), "part.bias"),
        (
            lambda net, x: F.conv2d(net.part(x), net.part.weight),
            nn.ConvTranspose2d(WIDTH, WIDTH, 2, 2),
            "part.weight",
        ),
    ],
    ids=["bias", "upsampling"],
)
def test_code_that_uses_a_parameter_that_is_gone_with_its_layer_is_refused(body, part, what):
    with pytest.raises(ValueError, match=f"its code uses `{what}`"):
        convert(Net(body, part=part))


FIXED_FILTERS = {
    "F.conv2d": lambda net, x: F.conv2d(x, net.filter, net.shift, padding=1, groups=WIDTH),
    "F.conv2d by keyword": lambda net, x: F.conv2d(
        bias=net.shift, input=x, weight=net.filter, stride=2, groups=WIDTH
    ),
    "F.conv1d": lambda net, x: F.conv1d(x.flatten(2), net.line, net.shift, groups=WIDTH).unsqueeze(
        3
    ),
    "F.linear": lambda net, x: F.linear(x, net.rows, net.shift),
}


@pytest.mark.parametrize("body", FIXED_FILTERS.values(), ids=FIXED_FILTERS)
def test_the_bias_of_a_fixed_filter_is_an_offset(body):
    filters = {"filter": random(WIDTH, 1, 3, 3), "line": random(WIDTH, 1, 3)}
    model = convert(Net(body, **filters, rows=random(WIDTH, SIZE), shift=random(WIDTH)))
    e = assert_equals_body(model, body)
    assert (e.bias - model.logit_bias).abs().min() > 0


def test_a_fixed_filter_with_a_bias_from_the_image_is_an_error():
    def body(net, x):
        return F.conv2d(x, net.filter, x.exp().mean([0, 2, 3]), groups=WIDTH)

    with pytest.raises(ValueError, match="`exp` at exp"):
        convert(Net(body, filter=random(WIDTH, 1, 3, 3)))


def test_the_bias_of_a_weight_computed_from_a_parameter_is_gone():
    def body(net, x):
        return F.conv2d(x, net.learned - net.learned.mean(), net.shift, padding=1)

    parts = {"shift": random(WIDTH), "learned": nn.Parameter(random(WIDTH, WIDTH, 3, 3))}
    e = assert_complete(convert(Net(body, **parts)))
    assert_agrees(e.bias, torch.zeros_like(e.bias) + e.bias[0, 0])


# Factors that depend on the image are held constant.


def squeeze(net, x):
    return net.up(net.down(x.mean([2, 3], keepdim=True)))


def tokens(x):
    return x.flatten(2).transpose(1, 2)  # [N, HW, C]


def to_map(x):
    return x.transpose(1, 2).unsqueeze(3)


def attended(net, x, held):
    q, k, v = (tokens(layer(x)) for layer in (net.query, net.key, net.value))
    if held:
        q, k = q.detach(), k.detach()
    weights = (q @ k.transpose(1, 2) / math.sqrt(WIDTH)).softmax(-1)
    return to_map(weights @ v)


def attended_by_torch(net, x, held, keywords=False):
    q, k, v = (tokens(layer(x)) for layer in (net.query, net.key, net.value))
    if held:
        q, k = q.detach(), k.detach()
    if keywords:
        return to_map(F.scaled_dot_product_attention(query=q, key=k, value=v))
    return to_map(F.scaled_dot_product_attention(q, k, v))


GATES = {
    "squeeze-and-excite": (
        lambda net, x: x * torch.sigmoid(net.up(F.relu(net.down(x.mean([2, 3], keepdim=True))))),
        lambda net, x: x * torch.sigmoid(squeeze(net, x)).detach(),
    ),
    "the gate first": (
        lambda net, x: F.hardsigmoid(squeeze(net, x)) * x,
        lambda net, x: x * F.hardsigmoid(squeeze(net, x)).detach(),
    ),
    "torch.mul": (
        lambda net, x: torch.mul(x, torch.sigmoid(squeeze(net, x))),
        lambda net, x: x * torch.sigmoid(squeeze(net, x)).detach(),
    ),
    "torch.mul by keyword": (
        lambda net, x: torch.mul(x, other=torch.sigmoid(squeeze(net, x))),
        lambda net, x: x * torch.sigmoid(squeeze(net, x)).detach(),
    ),
    "method mul_": (
        lambda net, x: net.value(x).mul_(squeeze(net, x).sigmoid()),
        lambda net, x: net.value(x) * squeeze(net, x).sigmoid().detach(),
    ),
    "gate made by modules": (
        lambda net, x: x * net.sigmoid(net.query(x)),
        lambda net, x: x * torch.sigmoid(net.query(x)).detach(),
    ),
    "learned gate": (
        lambda net, x: x * torch.sigmoid(net.gain * net.query(x) + 1),
        lambda net, x: x * torch.sigmoid(net.gain * net.query(x) + 1).detach(),
    ),
    "a signal times a signal": (
        lambda net, x: net.query(x) * net.key(x),
        lambda net, x: net.query(x) * net.key(x).detach(),
    ),
    "a signal times itself": (lambda net, x: x * x, lambda net, x: x * x.detach()),
    "attention by hand": (
        lambda net, x: attended(net, x, held=False),
        lambda net, x: attended(net, x, held=True),
    ),
    "attention by torch": (
        lambda net, x: attended_by_torch(net, x, held=False),
        lambda net, x: attended_by_torch(net, x, held=True),
    ),
    "attention by torch, keywords": (
        lambda net, x: attended_by_torch(net, x, held=False, keywords=True),
        lambda net, x: attended_by_torch(net, x, held=True),
    ),
    "torch.bmm": (
        lambda net, x: to_map(torch.bmm(torch.softmax(tokens(x) @ net.pairs, 2), tokens(x))),
        lambda net, x: to_map(torch.softmax(tokens(x) @ net.pairs, 2).detach() @ tokens(x)),
    ),
    "linear attention, no softmax": (
        lambda net, x: net.query(x) @ (net.key(x).transpose(2, 3) @ net.value(x)) / SIZE,
        lambda net, x: (
            net.query(x).detach() @ (net.key(x).transpose(2, 3).detach() @ net.value(x)) / SIZE
        ),
    ),
    "a matrix times itself": (lambda net, x: x @ x, lambda net, x: x.detach() @ x),
    "division": (
        lambda net, x: x / (x.abs().mean(1, keepdim=True) + 1),
        lambda net, x: x / (x.abs().mean(1, keepdim=True) + 1).detach(),
    ),
    "division by a signal": (
        lambda net, x: torch.div(x, net.query(x) + 5),
        lambda net, x: x / (net.query(x) + 5).detach(),
    ),
    "product with a reciprocal": (
        lambda net, x: x * (1 / (x.abs() + 1)),
        lambda net, x: x * (1 / (x.abs() + 1)).detach(),
    ),
    "addcmul": (
        lambda net, x: torch.addcmul(x, net.query(x).sigmoid(), net.key(x)),
        lambda net, x: x + net.query(x).sigmoid().detach() * net.key(x),
    ),
}


def gate_parts():
    return {
        "down": nn.Conv2d(WIDTH, 2, 1),
        "up": nn.Conv2d(2, WIDTH, 1),
        "query": conv1x1(),
        "key": conv1x1(),
        "value": conv1x1(),
        "sigmoid": nn.Sigmoid(),
        "gain": nn.Parameter(random(1, WIDTH, 1, 1)),
        "pairs": nn.Parameter(random(WIDTH, SIZE * SIZE)),
    }


@pytest.mark.parametrize(("body", "held"), GATES.values(), ids=GATES)
def test_a_factor_that_depends_on_the_image_is_held_constant(body, held):
    model = convert(Net(body, **gate_parts()))
    assert model.report.dynamic_linear
    assert any("held constant" in c.became for c in model.report.changes)
    assert_equals_body(model, held)


def test_a_gate_learns_as_before_outside_of_explanations():
    model = convert(Net(GATES["squeeze-and-excite"][0], **gate_parts()))
    model.from_encoded(encode(images())).square().sum().backward()
    assert model.network.down.weight.grad.abs().max() > 0


# Offsets: what no pixel owns.

OFFSETS = {
    "position embedding": lambda net, x: x + net.position,
    "position embedding first": lambda net, x: net.position + x,
    "position embedding, torch.add": lambda net, x: torch.add(x, net.position),
    "in place": lambda net, x: net.conv(x).add_(net.position),
    "buffer": lambda net, x: x + net.shift,
    "number": lambda net, x: x + 0.5,
    "one per channel": lambda net, x: x + net.channel,
    "larger than the signal": lambda net, x: x.mean([2, 3], keepdim=True) + net.position,
    "constant subtracted": lambda net, x: x - net.position,
    "subtracted from a constant": lambda net, x: net.position - x,
    "subtracted from a number": lambda net, x: 1 - x,
    "rsub": lambda net, x: torch.rsub(x, 1.0),
    "class token": lambda net, x: to_map(
        torch.cat([net.token.expand(x.shape[0], -1, -1), tokens(x)], 1)
    ),
    "class token in a buffer": lambda net, x: to_map(
        torch.cat([net.fixed_token.expand(x.shape[0], -1, -1), tokens(x)], 1)
    ),
    "class token expanded as": lambda net, x: to_map(
        torch.cat([net.token.expand_as(tokens(x)[:, :1]), tokens(x)], 1)
    ),
    "stacked with a constant": lambda net, x: torch.stack(
        [x, net.position.expand(x.shape[0], -1, -1, -1)], 4
    ).mean(4),
    "addcmul": lambda net, x: torch.addcmul(net.position, net.gain, x),
}


def offset_parts():
    return {
        "position": nn.Parameter(random(1, WIDTH, SIZE, SIZE)),
        "shift": random(1, WIDTH, SIZE, SIZE),
        "channel": nn.Parameter(random(WIDTH, 1, 1)),
        "token": nn.Parameter(random(1, 1, WIDTH)),
        "fixed_token": random(1, 1, WIDTH),
        "gain": nn.Parameter(random(1, WIDTH, 1, 1)),
        "conv": conv1x1(),
    }


@pytest.mark.parametrize("body", OFFSETS.values(), ids=OFFSETS)
def test_a_constant_that_is_added_is_in_the_bias(body):
    model = convert(Net(body, **offset_parts()))
    assert model.report.note == ""
    e = assert_equals_body(model, body)
    own = (e.bias - model.logit_bias).abs()  # [N, K]
    assert own.amax(1).min() > 1e-3 * (e.outputs - model.logit_bias).abs().max()


def test_the_bias_of_each_image_is_its_own():
    model = convert(Net(OFFSETS["class token"], **offset_parts()))
    both = tb.explain(model, images(), targets="all")
    for i in range(2):
        alone = tb.explain(model, images()[i : i + 1], targets="all")
        assert_agrees(both.bias[i : i + 1], alone.bias)


# Breaks.


class AddsItsSine(nn.Module):
    def forward(self, x):
        return x + torch.sin(x)


BREAKS = {
    "sine added to a signal": (lambda net, x: x + torch.sin(x), None, "`sin` at sin"),
    "inside a submodule": (lambda net, x: net.part(x), AddsItsSine(), "`sin` at part: sin"),
    "method": (lambda net, x: x.exp(), None, "`exp` at exp"),
    "module": (lambda net, x: net.part(x), nn.Softmin(1), "`Softmin` at part"),
    "probabilities within the network": (lambda net, x: x.softmax(1), None, "`softmax` at softmax"),
    "transposed convolution that does not multiply the size": (
        lambda net, x: net.part(x),
        nn.ConvTranspose2d(WIDTH, WIDTH, 3, 2),
        "`ConvTranspose2d` at part",
    ),
    "places of maxima": (
        lambda net, x: x + x.max(1, keepdim=True)[1],
        None,
        "`getitem` at getitem",
    ),
    "places of maxima, by name": (
        lambda net, x: x + x.max(1, keepdim=True).indices,
        None,
        "`getattr` at getattr",
    ),
    "maximum over the batch": (lambda net, x: x + x.amax(0), None, "`amax` at amax"),
    "maximum of everything": (lambda net, x: x + x.max(), None, "`max` at max"),
    "larger of a signal and a constant": (
        lambda net, x: torch.maximum(x, net.part),
        nn.Parameter(random(1, WIDTH, 1, 1)),
        "`maximum` at maximum",
    ),
    "recurrent module": (
        lambda net, x: to_map(net.part(tokens(x))[0]),
        nn.LSTM(WIDTH, WIDTH, batch_first=True),
        "`LSTM` at part",
    ),
    "padding by a colour": (
        lambda net, x: net.part(x),
        nn.ConstantPad2d(1, 0.5),
        "`ConstantPad2d` at part",
    ),
    "dilated max pool": (
        lambda net, x: net.part(x),
        nn.MaxPool2d(2, dilation=2),
        "`MaxPool2d` at part",
    ),
    "dilated max pool as a function": (
        lambda net, x: F.max_pool2d(x, 2, dilation=2),
        None,
        "`maxpool2d` at maxpool2d",
    ),
    "max pool with indices": (
        lambda net, x: net.part(x)[0],
        nn.MaxPool2d(2, return_indices=True),
        "`MaxPool2d` at part",
    ),
    "adaptive max pool with indices": (
        lambda net, x: net.part(x)[0],
        nn.AdaptiveMaxPool2d(2, return_indices=True),
        "`AdaptiveMaxPool2d` at part",
    ),
    "padding with another value": (
        lambda net, x: F.pad(x, (1, 1), value=1.0),
        None,
        "`pad` at pad",
    ),
    "rounded division": (
        lambda net, x: torch.div(x, 2, rounding_mode="floor"),
        None,
        "`div` at div",
    ),
    "offset where the batch is not the first dimension": (
        lambda net, x: to_map((tokens(x).transpose(0, 1) + net.part).transpose(0, 1)),
        nn.Parameter(random(SIZE * SIZE, 1, WIDTH)),
        "`add` at add",
    ),
    "weighted difference from the right": (
        lambda net, x: torch.rsub(x, x, alpha=2),
        None,
        "`rsub` at rsub",
    ),
    "weights from the image": (
        lambda net, x: F.conv2d(
            x.flatten(0, 1)[None], x.mean([2, 3]).view(-1, 1, 1, 1), groups=x.shape[0] * WIDTH
        ).view(x.shape),
        None,
        "`conv2d` at conv2d",
    ),
    "a gate times a gate": (
        lambda net, x: x.exp() * x.softmax(1),
        None,
        "`exp` at exp",
    ),
}


@pytest.mark.parametrize(("body", "part", "what"), BREAKS.values(), ids=BREAKS)
def test_what_breaks_the_linear_map_is_an_error_that_names_it_and_its_place(body, part, what):
    module = Net(body, **({"part": part} if part is not None else {}))
    with pytest.raises(ValueError, match="cannot become dynamic-linear") as error:
        convert(module)
    message = str(error.value)
    assert message.startswith("Net ")
    assert what in message
    assert "strict=False" in message
    assert "\n" not in message


#: Others are refused for their name alone; in some networks nothing would be missed.
UNDERSTOOD = [
    name
    for name in BREAKS
    if not name.startswith(("max", "dilated max", "adaptive max", "transposed", "weighted"))
]


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_an_allowed_break_is_in_the_report_and_in_the_residual(name):
    body, part, what = BREAKS[name]
    module = Net(body, **({"part": part} if part is not None else {}))
    model = convert(module, strict=False)
    assert not model.report.dynamic_linear
    assert model.report.breaks == (what,)
    assert f"Not dynamic-linear, because of {what}." in str(model.report)
    tb.calibrate(model, images())
    e = tb.explain(model, images(), targets="all")
    assert e.residual.abs().max() > 1e-3 * (e.outputs - model.logit_bias).abs().max()


SQUASHED = {
    "module": (lambda net, x: net.part(x), nn.Tanh(), "part"),
    "method": (lambda net, x: x.tanh(), None, "tanh"),
    "function": (lambda net, x: F.hardsigmoid(x), None, "hardsigmoid"),
    "square of a relu": (lambda net, x: F.relu(x).square(), None, "square"),
}


@pytest.mark.parametrize(("body", "part", "place"), SQUASHED.values(), ids=SQUASHED)
def test_functions_that_squash_are_activations_where_they_are_no_gates(body, part, place):
    model = convert(Net(body, **({"part": part} if part is not None else {})))
    assert became(model, place) == ["removed"]
    assert_equals_body(model, lambda net, x: x)


def test_the_same_function_can_be_an_activation_and_a_gate_in_one_network():
    def body(net, x):
        x = torch.sigmoid(net.first(x))
        x = torch.sigmoid(net.second(x))
        return x * torch.sigmoid(net.gate(x))

    model = convert(Net(body, first=conv1x1(), second=conv1x1(), gate=conv1x1()))
    assert became(model, "sigmoid") == ["removed", "removed", "kept as a factor"]

    def right(net, x):
        x = net.second(net.first(x))
        return x * torch.sigmoid(net.gate(x)).detach()

    assert_equals_body(model, right)


@pytest.mark.parametrize("last", [nn.Sigmoid(), nn.Softmax(1), nn.LogSoftmax(1)], ids=str)
def test_probabilities_that_are_returned_become_logits(last):
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2), last
    )
    model = convert(module)
    assert became(model, "4") == ["removed"]
    assert became(model, "3") == ["BcosConv2d, before the pool"]
    assert_complete(model)


def test_a_break_in_an_auxiliary_classifier_is_not_overlooked():
    class WithAux(nn.Module):
        class ExpAux(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = nn.Linear(4, 2)

            def forward(self, x):
                return self.fc(x.mean([2, 3])).exp()

        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, 4, 3)
            self.aux = self.ExpAux()
            self.fc = nn.Linear(4, 2)

        def forward(self, x):
            x = self.stem(x)
            aux = self.aux(x) if self.training else None
            return self.fc(x.mean([2, 3])), aux

    with pytest.raises(ValueError, match="`exp` at aux: exp"):
        convert(WithAux())


class StageAux(nn.Sequential):
    pass


def test_a_part_of_the_network_that_is_named_like_an_auxiliary_classifier_is_none():
    module = Net(lambda net, x: net.part(x), part=StageAux(conv1x1(), nn.ReLU(), conv1x1()))
    model = convert(module)
    assert became(model, "part.0") == became(model, "part.2") == ["BcosConv2d"]
    assert_equals_body(
        model, lambda net, x: net.part.get_submodule("2")(net.part.get_submodule("0")(x))
    )


class HeadAux(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, 5)

    def forward(self, x):
        return self.fc(x.mean([2, 3]))


def test_an_auxiliary_classifier_beside_a_part_that_is_named_like_one():
    def body(net, x):
        x = net.stage(net.stem(x))
        aux = net.aux(x) if net.training else None
        return net.fc(x.mean([2, 3])), aux

    model = convert(Whole(body, stage=StageAux(conv1x1()), aux=HeadAux()))
    assert became(model, "stage.0") == ["BcosConv2d"]
    assert became(model, "aux") == ["B-cos, runs in training only"]
    assert became(model, "aux.fc") == ["BcosConv2d, before the pool"]
    assert_complete(model)


def test_an_auxiliary_classifier_of_vectors_is_left_out_as_any_that_is_not_named_so():
    def body(net, x):
        x = net.stem(x).mean([2, 3])
        return (net.fc(x), net.aux(x)) if net.training else net.fc(x)

    model = convert(Whole(body, aux=nn.Sequential(nn.Linear(WIDTH, 5))))
    named = convert(Whole(body, aux=StageAux(nn.Linear(WIDTH, 5))))
    assert named.report == model.report
    assert_complete(named)


# What cannot be done says so at once.


@pytest.mark.parametrize(
    "module",
    [
        Whole(
            lambda net, x: net.fc(net.stem(x * net.colours).mean([2, 3])),
            colours=random(1, 3, 1, 1),
        ),
        Whole(
            lambda net, x: net.fc(net.stem(net.three(x) + x).mean([2, 3])), three=nn.Conv2d(3, 3, 1)
        ),
        Whole(
            lambda net, x: net.fc(net.last(torch.cat([x, net.stem(x)], 1)).mean([2, 3])),
            last=nn.Conv2d(3 + WIDTH, WIDTH, 1),
        ),
    ],
    ids=["weighted by channel", "image added", "image concatenated"],
)
def test_a_network_that_cannot_take_the_encoded_image_is_an_error_when_it_is_converted(module):
    with pytest.raises(ValueError, match="encoded image, which has 6 channels"):
        convert(module)


def test_a_module_without_a_layer_to_convert_is_an_error():
    with pytest.raises(ValueError, match="no convolution and no linear layer"):
        convert(nn.Sequential(nn.ReLU(), nn.Flatten()))


def test_a_size_that_does_not_pass_is_an_error_that_says_so(capfd):
    with pytest.raises(ValueError, match="8×8"):
        convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(7)), input_size=8)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"b": 0.5}, r"`b` \(=0.5\) must be a finite number of at least 1"),
        ({"max_out": 0}, r"`max_out` \(=0\) must be an integer of at least 1"),
        ({"norm": "batch"}, r"`norm` \(='batch'\) must be None"),
        ({"head": "fc"}, r"`head` \(='fc'\) must be 'conv'"),
        ({"classes": ["a", "b"]}, r"`classes` \(=2 names\) must name all 5 outputs"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        convert(Net(lambda net, x: x), **options)


# The classifier.


def head_of(kind):
    body = [nn.Conv2d(3, WIDTH, 3, padding=1), nn.ReLU()]
    return {
        "pool, flatten, fc": nn.Sequential(
            *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 5)
        ),
        "average pool of the map's size": nn.Sequential(
            *body, nn.AvgPool2d(SIZE), nn.Flatten(), nn.Linear(WIDTH, 5)
        ),
        "mean, fc": Net(lambda net, x: x),
        "mean over negative dimensions": Whole(
            lambda net, x: net.fc(net.stem(x).mean((-2, -1), keepdim=True).flatten(1))
        ),
        "view": Whole(
            lambda net, x: net.fc(F.adaptive_avg_pool2d(net.stem(x), 1).view(x.size(0), -1))
        ),
        "two layers": nn.Sequential(
            *body,
            nn.AdaptiveAvgPool2d((1, 1)),
            nn.Flatten(1),
            nn.Linear(WIDTH, 6),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(6, 5),
        ),
        "1×1 convolution on the pooled map": nn.Sequential(
            *body, nn.AdaptiveAvgPool2d(1), nn.Conv2d(WIDTH, 5, 1), nn.Flatten()
        ),
    }[kind]


HEADS = [
    "pool, flatten, fc",
    "average pool of the map's size",
    "mean, fc",
    "mean over negative dimensions",
    "view",
    "two layers",
    "1×1 convolution on the pooled map",
]


@pytest.mark.parametrize("kind", HEADS)
def test_the_classifier_moves_before_the_global_pool(kind):
    model = convert(head_of(kind))
    layers = list(model.bcos_layers())
    assert all(isinstance(layer, tb.BcosConv2d) for _, layer in layers)
    assert {layer.kernel_size for _, layer in layers[1:]} == {(1, 1)}
    for name, _ in layers[1:]:
        assert became(model, name) == ["BcosConv2d, before the pool"]
    x = encode(images())
    expected = x
    for _, layer in layers:
        expected = layer(expected)
    assert_agrees(model.network(x), expected.mean([2, 3]))
    assert_complete(model)
    assert_complete(model, images(1, (21, 37)))


@pytest.mark.parametrize("kind", HEADS[:6])
def test_the_pool_can_stay_first(kind):
    model = convert(head_of(kind), head="pool")
    layers = list(model.bcos_layers())
    assert all(isinstance(layer, tb.BcosLinear) for _, layer in layers[1:])
    expected = layers[0][1](encode(images())).mean([2, 3])
    for _, layer in layers[1:]:
        expected = layer(expected)
    assert_agrees(model.network(encode(images())), expected)
    assert_complete(model)


class SmallVGG(nn.Module):
    """torchvision's VGG with fewer channels."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2, 2)
        )
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            nn.Linear(8 * 7 * 7, 12),
            nn.ReLU(True),
            nn.Dropout(),
            nn.Linear(12, 12),
            nn.ReLU(True),
            nn.Dropout(),
            nn.Linear(12, 5),
        )

    def forward(self, x):
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


def test_a_vgg_classifier_becomes_a_7x7_convolution_and_two_1x1():
    model = convert(SmallVGG(), input_size=32)
    first, second, third = (model.network.classifier.get_submodule(n) for n in ("0", "3", "6"))
    assert (first.in_channels, first.out_channels) == (8, 12)
    assert (first.kernel_size, first.padding, first.stride) == ((7, 7), (3, 3), (1, 1))
    assert second.kernel_size == third.kernel_size == (1, 1)
    x = encode(images(size=20))
    expected = F.avg_pool2d(model.network.features.get_submodule("0")(x), 2)
    expected = third(second(first(expected))).mean([2, 3])  # no adaptive pool before them
    assert_agrees(model.network(x), expected)
    for size in (32, 20, (33, 47)):
        assert_complete(model, images(1, size))


def test_a_vgg_classifier_can_stay_behind_its_pool():
    model = convert(SmallVGG(), input_size=32, head="pool")
    assert isinstance(model.network.classifier.get_submodule("0"), tb.BcosLinear)
    assert model.network.classifier.get_submodule("0").in_features == 8 * 49
    assert_complete(model, images(size=40))


def test_a_lenet_classifier_becomes_a_convolution_of_the_maps_size():
    module = nn.Sequential(
        nn.Conv2d(3, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(6 * 6 * 6, 10),
        nn.ReLU(),
        nn.Linear(10, 5),
    )
    model = convert(module)
    window, last = model.network.get_submodule("4"), model.network.get_submodule("6")
    assert (window.in_channels, window.kernel_size, window.padding) == (6, (6, 6), (3, 3))
    assert last.kernel_size == (1, 1)
    assert_complete(model)
    assert_complete(model, images(1, 29))


def test_a_lenet_classifier_that_stays_takes_images_of_one_size():
    module = nn.Sequential(nn.Conv2d(3, 6, 5), nn.Flatten(), nn.Linear(6 * 12 * 12, 5))
    model = convert(module, head="pool")
    assert model.network.get_submodule("2").in_features == 6 * 12 * 12
    assert_complete(model)


@pytest.mark.parametrize(
    ("norm", "kind"),
    [
        (nn.LayerNorm(WIDTH), norms.UncentredPositionNorm),
        (nn.BatchNorm1d(WIDTH), norms.UncentredBatchNorm2d),
    ],
    ids=["LayerNorm", "BatchNorm1d"],
)
def test_a_norm_of_the_classifier_moves_with_it(norm, kind):
    module = Whole(lambda net, x: net.fc(net.norm(net.stem(x).mean([2, 3]))), norm=norm)
    model = convert(module, norm="uncentred")
    assert type(model.network.norm) is kind
    assert isinstance(model.network.fc, tb.BcosConv2d)
    assert_complete(model)
    wide = tb.convert(module.double(), norm="uncentred", input_size=SIZE)
    assert {p.dtype for p in wide.parameters()} == {torch.float64}


def on_a_map(layer, x):
    return layer(x.movedim(1, 3)).movedim(3, 1)


@pytest.mark.parametrize(
    "body",
    [
        lambda net, x: net.fc(net.shared(on_a_map(net.shared, x).mean([2, 3]))),
        lambda net, x: net.fc(
            net.shared(on_a_map(lambda x: F.linear(x, net.shared.weight), x).mean([2, 3]))
        ),
    ],
    ids=["layer", "weight"],
)
def test_a_classifier_whose_layers_are_used_elsewhere_stays_behind_its_pool(body):
    module = Whole(lambda net, x: body(net, net.stem(x)), shared=nn.Linear(WIDTH, WIDTH))
    model = convert(module)
    assert isinstance(model.network.fc, tb.BcosLinear)
    assert str(model.report) == str(convert(module, head="pool").report)
    assert_complete(model)


def test_a_classifier_that_shares_a_weight_with_another_layer_keeps_it():
    other, shared = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    shared.weight = other.weight
    module = Whole(
        lambda net, x: net.shared(on_a_map(net.other, net.stem(x)).mean([2, 3])),
        other=other,
        shared=shared,
    )
    model = convert(module)
    assert model.network.shared.weight is model.network.other.weight
    assert_complete(model)


def test_a_classifier_whose_code_checks_sizes_moves_as_well():
    def body(net, x):
        x = net.hidden(net.pool(net.stem(x)).flatten(1))
        images, features = x.shape
        assert features == WIDTH
        x = net.fc(x.reshape(images, features))
        assert x.shape == (x.shape[0], 5)
        return x

    module = Whole(body, hidden=nn.Linear(WIDTH, WIDTH), pool=nn.AdaptiveAvgPool2d(1))
    model = convert(module)
    for name in ("hidden", "fc"):
        assert became(model, name) == ["BcosConv2d, before the pool"]
    assert_complete(model)
    assert_complete(model, images(size=20))


def test_a_squeeze_and_excite_is_no_classifier():
    model = convert(Net(GATES["squeeze-and-excite"][0], **gate_parts()))
    assert [name for name, _ in model.bcos_layers() if became(model, name)[0] != "BcosConv2d"] == [
        "fc"
    ]


def test_a_pickle_is_refused_with_the_remedy_and_a_copy_is_exact():
    """Torch would trace the network anew from it, in which held factors are lost."""
    model = convert(Net(GATES["squeeze-and-excite"][0], **gate_parts()))
    for write in (pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        for thing in (model, model.network):
            with pytest.raises(TypeError, match=r"torchbcos\.save .* copy\.deepcopy\.$"):
                write(thing)
    again = copy.deepcopy(copy.deepcopy(model))
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(again)
    e, f = (assert_complete(m) for m in (model, again))
    assert torch.equal(e.outputs, f.outputs)
    assert torch.equal(e.weights, f.weights)
    torch.save(model.state_dict(), io.BytesIO())


# Untraceable networks.


class Undecided(nn.Module):
    """Asks for values, so that no graph exists."""

    def __init__(self, last=lambda x: x):
        super().__init__()
        self.last = last
        self.stem = nn.Sequential(
            nn.Conv2d(3, WIDTH, 3), nn.BatchNorm2d(WIDTH), nn.ReLU(), nn.Dropout(), nn.MaxPool2d(2)
        )
        self.fc = nn.Linear(WIDTH, 5)

    def forward(self, x):
        x = self.stem(x)
        if x.mean() > 1e6:
            x = -x
        return self.fc(self.last(x).mean([2, 3]))


@pytest.mark.parametrize("norm", [None, "uncentred"])
def test_an_untraceable_network_has_its_modules_replaced_and_is_checked(norm):
    model = convert(Undecided(), norm=norm)
    assert "Modules replaced without tracing" in model.report.note
    measured = float(model.report.note.split("measured: ")[1].split()[0])
    assert measured <= TOLERANCE[torch.float64]
    assert "control flow" in model.report.note
    assert model.report.note in str(model.report)
    kinds = {name: type(m).__name__ for name, m in model.network.named_modules() if name}
    assert kinds == {
        "stem": "Sequential",
        "stem.0": "BcosConv2d",
        "stem.1": "UncentredBatchNorm2d" if norm else "Identity",
        "stem.2": "Identity",
        "stem.3": "Dropout",
        "stem.4": "AvgPool2d",
        "fc": "BcosLinear",
    }
    assert model.network.stem[0].in_channels == 6
    assert became(model, "stem.0") == ["BcosConv2d"]
    assert became(model, "stem.2") == became(model, "stem.3") == ["removed"]
    assert model.network.stem[3].p == 0  # code may ask for it
    assert_complete(model)


@pytest.mark.parametrize("last", [torch.sigmoid, lambda x: x + 1], ids=["sigmoid", "offset"])
def test_an_untraceable_network_that_does_not_decompose_is_an_error(last):
    with pytest.raises(ValueError, match="something in its code") as error:
        convert(Undecided(last))
    assert "strict=False" in str(error.value)
    model = convert(Undecided(last), strict=False)
    (found,) = model.report.breaks
    measured, _, reason = found.partition("misses the output by ")[2].partition("; ")
    assert float(measured) > 1e-3
    assert "cannot be traced" in reason
    e = tb.explain(model, images(), targets="all")
    assert e.residual.abs().max() > 1e-3 * (e.outputs - model.logit_bias).abs().max()


class DeepAndUndecided(Undecided):
    """Attention after so many layers that, without scales, hardly a signal is left to attend to."""

    def __init__(self):
        super().__init__()
        self.deep = nn.Sequential(*[nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(12)])

    def forward(self, x):
        x = self.stem(x)
        if x.mean() > 1e6:
            x = -x
        x = tokens(self.deep(x))
        return self.fc(((x @ x.transpose(1, 2)).softmax(2) @ x).mean(1))


def test_a_signal_too_faint_to_show_it_does_not_hide_that_a_network_does_not_decompose():
    with pytest.raises(ValueError, match="something in its code"):
        convert(DeepAndUndecided())


def test_in_an_untraceable_network_a_module_with_two_names_is_converted_under_both():
    module = Undecided()
    module.again = module.stem[0]
    module.last = lambda x: x
    model = convert(module)
    assert model.network.again is model.network.stem[0]
    assert isinstance(model.network.again, tb.BcosConv2d)


def test_an_untraceable_network_that_does_not_run_afterwards_is_an_error_that_says_so():
    def breaks_when_replaced(x):
        assert x.shape[1] == WIDTH + 1
        return x

    with pytest.raises(ValueError, match="Undecided") as error:
        convert(Undecided(breaks_when_replaced))
    assert "control flow" in str(error.value)


# The original, names, and modules used twice.


def small_resnet(**options):
    block = torchvision.models.resnet.BasicBlock
    return torchvision.models.ResNet(block, [1, 1, 1, 1], num_classes=5, **options)


@pytest.mark.parametrize("module", [small_resnet(), Undecided()], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("norm", [None, "uncentred"])
def test_the_original_is_not_touched(module, norm):
    module.train()
    for m in list(module.modules())[2::3]:
        m.training = False
    before = {name: value.clone() for name, value in module.state_dict().items()}
    flags = [m.training for m in module.modules()]
    kinds = [type(m) for m in module.modules()]
    convert(module, input_size=64, norm=norm)
    assert [m.training for m in module.modules()] == flags
    assert [type(m) for m in module.modules()] == kinds
    after = module.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_the_result_shares_nothing_with_the_original():
    module = Net(lambda net, x: net.gain * x, gain=nn.Parameter(random(1)))
    model = tb.convert(module, input_size=SIZE)
    with torch.no_grad():
        model.network.gain.zero_()
    assert module.gain > 0


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "squeezenet1_1"])
def test_layers_keep_their_names(name):
    with torch.device("meta"):
        original = torchvision.models.get_model(name, num_classes=5)
        model = tb.convert(original)
    layers = {n for n, m in original.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    assert {n for n, _ in model.bcos_layers()} == layers
    assert layers <= {c.place for c in model.report.changes}


@pytest.mark.parametrize(
    ("part", "norm"),
    [
        (conv1x1(), None),
        (nn.MaxPool2d(2), None),
        (nn.ReLU(), None),
        (nn.BatchNorm2d(WIDTH), None),
        (nn.BatchNorm2d(WIDTH), "uncentred"),
        (timm.layers.LayerNorm2d(WIDTH), "uncentred"),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else str(v),
)
def test_a_module_used_twice_is_converted_once_and_still_used_twice(part, norm):
    model = convert(Net(lambda net, x: net.part(net.part(x)), part=part), norm=norm)
    body = (
        (lambda net, x: net.part(net.part(x)))
        if hasattr(model.network, "part")
        else (lambda net, x: x)
    )
    assert_equals_body(model, body)


def test_a_linear_layer_used_twice():
    module = Whole(
        lambda net, x: net.fc(net.mix(net.mix(net.stem(x).mean([2, 3])))),
        mix=nn.Linear(WIDTH, WIDTH),
    )
    model = convert(module, head="pool")
    net, x = model.network, encode(images())
    assert_agrees(net(x), net.fc(net.mix(net.mix(net.stem(x).mean([2, 3])))))
    assert_complete(convert(module))


def test_a_module_with_two_names_is_converted_once():
    part = conv1x1()
    model = convert(Net(lambda net, x: net.b(net.a(x)), a=part, b=part))
    assert len(list(model.bcos_layers())) == 3
    assert_equals_body(model, lambda net, x: net.a(net.a(x)))


def test_the_result_is_in_training_mode_throughout_as_a_new_module_is():
    for module in (small_resnet(), Undecided()):
        model = tb.convert(module, input_size=64, norm="uncentred")
        assert all(m.training for m in model.modules())


# The report.


def test_the_report_lists_every_operation_and_what_became_of_it():
    model = convert(Net(GATES["squeeze-and-excite"][0], **gate_parts()))
    changes = {(c.place, c.operation, c.became) for c in model.report.changes}
    assert changes == {
        ("stem", "Conv2d", "BcosConv2d"),
        ("mean", "mean", "kept"),
        ("down", "Conv2d", "BcosConv2d"),
        ("relu", "relu", "removed"),
        ("up", "Conv2d", "BcosConv2d"),
        ("sigmoid", "sigmoid", "kept as a factor"),
        ("mul", "mul", "gate: second factor held constant"),
        ("fc", "Linear", "BcosConv2d, before the pool"),
    }
    counts = model.report.counts()
    assert counts["Conv2d", "BcosConv2d"] == 3
    assert counts["mean", "kept"] == 2
    lines = str(model.report).splitlines()
    assert lines[0] == "Net as a B-cos network"
    assert lines[1].split() == ["operation", "became", "times"]
    assert len(lines) == 2 + len(counts) + 1
    assert any(line.split() == ["Conv2d", "BcosConv2d", "3"] for line in lines)
    assert lines[-1] == "Dynamic-linear: W(x)·x + bias is the output."
    assert model.report.dynamic_linear
    assert model.report.note == ""


def test_operations_inside_submodules_are_placed():
    with torch.device("meta"):
        model = tb.convert(torchvision.models.resnet18(num_classes=5))
    places = {c.place: c.became for c in model.report.changes}
    assert places["layer1.0.conv1"] == "BcosConv2d"
    assert places["layer1.0.bn1"] == "removed"
    assert places["layer1.0: add"] == "kept"
    assert places["maxpool"] == "AvgPool2d"
    assert places["fc"] == "BcosConv2d, before the pool"


@pytest.mark.parametrize("name", ["inception_v3", "googlenet"])
def test_layers_of_auxiliary_classifiers_are_in_the_report_under_their_names(name):
    with torch.device("meta"):
        model = tb.create_model(name, num_classes=5)
    assert {n for n, _ in model.bcos_layers()} <= {c.place for c in model.report.changes}


# Real architectures.

ARCHITECTURES = {
    "resnet18": (64, {}),
    "mobilenet_v3_small": (96, {}),
    "shufflenet_v2_x0_5": (96, {}),
    "squeezenet1_1": (96, {}),
    "densenet121": (64, {"growth_rate": 8}),
    "regnet_y_400mf": (64, {}),
    "efficientnet_b0": (64, {}),
    "googlenet": (64, {}),
    "timm/tinynet_e": (64, {}),
    "timm/skresnet18": (64, {}),
    "timm/resnetv2_50": (64, {"layers": (1, 1, 1, 1)}),
    "timm/vit_tiny_patch16_224": (224, {"depth": 2}),
}


def calibrated(name, **extra):
    size, options = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = tb.create_model(name, num_classes=10, **options, **extra).eval()
    return tb.calibrate(model, images(2, size, torch.float32)), size


def test_every_logit_of_a_small_convnext_is_its_linear_map():
    stage = torchvision.models.convnext.CNBlockConfig
    module = torchvision.models.ConvNeXt([stage(16, 32, 1), stage(32, None, 2)], num_classes=5)
    for norm in (None, "uncentred"):
        assert_complete(convert(module, norm=norm, input_size=64), images(1, 64))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_logit_of_a_real_architecture_is_its_linear_map(name):
    model, size = calibrated(name)
    e = assert_complete(model, images(1, size, torch.float32))
    assert e.outputs.shape == (1, 10)


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "timm/tinynet_e"])
@pytest.mark.parametrize("norm", [None, "uncentred"])
def test_every_logit_of_a_real_architecture_is_its_linear_map_in_float64(name, norm):
    model, size = calibrated(name, norm=norm)
    assert_complete(model.double(), images(1, size))


def test_completeness_is_measured_where_the_network_is():
    layer = nn.Sequential(nn.Flatten(), tb.BcosLinear(6 * 4, 3))
    with torch.device("meta"):
        assert completeness_error(layer, 3, (2, 2)) < 1e-12
    with pytest.raises(RuntimeError, match="item"):  # the last step, which makes a number
        completeness_error(layer.to("meta"), 3, (2, 2))


@pytest.mark.parametrize("last", [lambda x: x.squeeze(1), lambda x: x.flatten(), torch.squeeze])
def test_outputs_without_classes_are_named(last):
    class Binary(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.pool = nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1)
            self.classifier = nn.Linear(4, 1)

        def forward(self, x):
            return last(self.classifier(self.pool(self.stem(x)).flatten(1)))

    with pytest.raises(ValueError, match=r"Binary cannot be converted: it returns \[N\]"):
        tb.convert(Binary(), input_size=SIZE)
