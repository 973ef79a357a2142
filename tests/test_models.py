"""Models by name: the paper's numbers, sizes of all kinds, and what users get wrong."""

import contextlib
import copy
import functools
import math
import re
import warnings

import numpy as np
import pytest
import torch
import torchvision
from torch import nn

import torchbcos as tb
from cases import mode
from oracle import TOLERANCE, assert_agrees
from torchbcos.models import in_mode

EXPLAINED = 3  # targets explained where all of them would only cost time


@pytest.fixture(autouse=True)
def forget_compiled_code():
    yield
    torch._dynamo.reset()


def images(count=2, size=32, dtype=torch.float32, channels=3):
    size = (size, size) if isinstance(size, int) else size
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, channels, *size, generator=generator).to(dtype)


@functools.cache
def on_meta(name, **options):
    """A model with shapes but without weights, for tests that only look."""
    with torch.device("meta"):
        return tb.create_model(name, **options)


def small_model(**options):
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 6, 3, groups=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 4),
    )
    model = tb.convert(module, input_size=16, norm="uncentred", **options)
    return tb.calibrate(model, images(4, 16)).eval()


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def geometry(layer):
    (kernel,), (stride,), (padding,) = (
        set(v) for v in (layer.kernel_size, layer.stride, layer.padding)
    )
    return layer.in_channels, layer.out_channels, kernel, stride, padding


# The paper's networks.


@pytest.mark.parametrize(
    ("max_out", "growth_rate", "millions"),
    [
        (1, 32, 7.9),
        (2, 20, 6.8),
        (2, 22, 8.0),
        (2, 24, 9.4),
        (2, 26, 10.8),
        (2, 28, 12.4),
        (2, 30, 14.0),
        (2, 32, 15.8),
    ],
)
def test_parameter_counts_of_densenet121_are_the_papers(max_out, growth_rate, millions):
    model = on_meta("densenet121", num_classes=1000, growth_rate=growth_rate, max_out=max_out)
    assert round(parameters(model) / 1e6, 1) == millions


def test_the_growth_rate_of_densenet121_is_32_if_not_given():
    named = on_meta("densenet121", preset="paper")
    given = on_meta("densenet121", num_classes=1000, growth_rate=32, max_out=2)
    assert {n: p.shape for n, p in named.named_parameters()} == {
        n: p.shape for n, p in given.named_parameters()
    }
    assert named.num_classes == 1000


@pytest.mark.parametrize("max_out", [1, 2])
def test_cifar9_has_the_papers_layers(max_out):
    model = tb.create_model("cifar9", max_out=max_out, b=1.5)
    layers = [layer for _, layer in model.bcos_layers()]
    channels = [6, 64, 64, 128, 128, 128, 256, 256, 256, 10]
    kernels = [3] * 8 + [1]
    strides = [1, 1, 2, 1, 1, 2, 1, 1, 1]
    paddings = [1] * 8 + [0]
    expected = zip(channels, channels[1:], kernels, strides, paddings, strict=False)
    assert [geometry(layer) for layer in layers] == list(expected)
    assert {(layer.max_out, layer.b, layer.groups) for layer in layers} == {(max_out, 1.5, 1)}
    assert model.num_classes == 10
    x = torch.rand(2, 6, 32, 32)
    out = x
    for layer in layers:
        out = layer(out)
    assert out.shape == (2, 10, 8, 8)
    assert_agrees(model.network(x), out.mean((2, 3)))


def test_cifar9_takes_other_classes_and_channels():
    model = tb.create_model("cifar9", num_classes=7, in_channels=1, preset="paper")
    assert model.in_channels == 1
    assert model(images(channels=1)).shape == (2, 7)


def test_vgg11_has_the_authors_classifier():
    model = on_meta("vgg11", num_classes=1000)
    convs = dict(model.bcos_layers())
    assert geometry(convs["classifier.0"]) == (512, 4096, 7, 1, 3)
    assert geometry(convs["classifier.3"]) == (4096, 4096, 1, 1, 0)
    assert geometry(convs["classifier.6"]) == (4096, 1000, 1, 1, 0)
    assert not hasattr(model.network, "avgpool")
    assert sum(isinstance(m, nn.AvgPool2d) for m in model.network.modules()) == 5


def test_resnet34_classifies_before_the_pool_and_averages_where_it_took_the_maximum():
    model = on_meta("resnet34", num_classes=1000)
    assert geometry(dict(model.bcos_layers())["fc"]) == (512, 1000, 1, 1, 0)
    pool = model.network.maxpool
    assert (pool.kernel_size, pool.stride, pool.padding) == (3, 2, 1)
    assert pool.count_include_pad


def test_densenet121_keeps_its_transitions():
    model = on_meta("densenet121", num_classes=1000, growth_rate=20, max_out=2)
    transition = model.network.features.transition1
    assert geometry(transition.conv) == (64 + 6 * 20, (64 + 6 * 20) // 2, 1, 1, 0)
    assert transition.pool.kernel_size == 2


def test_inception_v3_has_auxiliary_logits_in_training_only():
    torch.manual_seed(0)
    model = tb.create_model("inception_v3", num_classes=5, preset="paper")
    with torch.no_grad():
        logits, auxiliary = model.train()(images(1, 299))
        assert logits.shape == auxiliary.shape == (1, 5)
        assert not torch.equal(logits, auxiliary)
        model.eval()
        assert torch.equal(model(images(1, 299)), logits)  # nothing else depends on training
        for size in (96, (97, 130)):
            assert model(images(1, size)).shape == (1, 5)
        again = copy.deepcopy(model)
        assert torch.equal(again(images(1, 96)), model(images(1, 96)))
    assert "AuxLogits.fc" in dict(model.bcos_layers())


def test_googlenet_has_both_auxiliary_logits_in_training_only():
    torch.manual_seed(0)
    model = tb.create_model("googlenet", num_classes=5)
    tb.calibrate(model, images(2, 64))
    with torch.no_grad():
        assert [o.shape for o in model.train()(images(1, 64))] == [(1, 5)] * 3
        assert model.eval()(images(1, 65)).shape == (1, 5)
        expected = model(images(1, 64))[:, :1]
    e = tb.explain(model.train(), images(1, 64), targets=[0])  # of the main logits
    assert_agrees(e.outputs, expected)


# The paper's constants.


@pytest.mark.parametrize(
    ("b", "log_t"),
    [(1.0, -3), (1.25, -3), (1.5, -2), (1.75, 1), (2.0, 2), (2.25, 2), (2.5, 3)],
)
def test_the_papers_constants_for_cifar(b, log_t):
    model = tb.create_model("cifar9", b=b, preset="paper")
    for _, layer in model.bcos_layers():
        assert layer.scale == pytest.approx(10 ** (1.5 * b - 1.75))
    assert model.temperature == pytest.approx(10.0**log_t)
    assert model.logit_bias == pytest.approx(math.log(0.1 / 0.9))
    assert model.scaling == "paper"


@pytest.mark.parametrize(
    ("name", "s", "log_t"),
    [("densenet121", 100, -3), ("resnet34", 100, 1), ("inception_v3", 200, 0), ("vgg11", 1000, -1)],
)
def test_the_papers_constants_for_imagenet(name, s, log_t):
    model = on_meta(name, preset="paper")
    layers = list(model.bcos_layers())
    assert layers
    for _, layer in layers:
        (height, width), channels = layer.kernel_size, layer.in_channels
        assert layer.scale == pytest.approx(s / math.sqrt(height * width * channels))
    assert model.temperature == pytest.approx(10.0**log_t)
    assert model.logit_bias == pytest.approx(math.log(0.01 / 0.99))
    assert model.scaling == "paper"


@pytest.mark.parametrize("num_classes", [2, 10, 1000])
def test_without_a_preset_an_empty_image_leaves_all_classes_equally_likely(num_classes):
    model = tb.create_model("cifar9", num_classes=num_classes)
    assert torch.tensor(model.logit_bias).sigmoid().item() == pytest.approx(1 / num_classes)
    assert (model.temperature, model.scaling) == (1.0, "none")
    assert {layer.scale for _, layer in model.bcos_layers()} == {1.0}


# Names and options.


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: tb.create_model("densenet_121"), ValueError, "did you mean densenet121"),
        (lambda: tb.create_model("fasterrcnn_resnet50_fpn"), ValueError, "no known model"),
        (lambda: tb.create_model("timm/resnet35"), ValueError, "no model of timm"),
        (lambda: tb.create_model("cifar9", preset="papers"), ValueError, "must be 'paper' or None"),
        (
            lambda: tb.create_model("cifar9", b=3.0, preset="paper"),
            ValueError,
            "no temperature for `b` (=3)",
        ),
        (
            lambda: tb.create_model("resnet18", preset="paper", num_classes=3),
            ValueError,
            "exists for cifar9, densenet121, inception_v3, resnet34, vgg11, not for resnet18",
        ),
        (lambda: tb.create_model("cifar9", growth=3), TypeError, "growth"),
        (lambda: tb.create_model("resnet18", growth=3), TypeError, "growth"),
        (lambda: tb.create_model("densenet121", growth_rate=8, drop=1), TypeError, "drop"),
        (lambda: tb.create_model("timm/resnet10t", growth=3), TypeError, "growth"),
        (lambda: tb.create_model("cifar9", b=0.9), ValueError, "`b` (=0.9)"),
        (lambda: tb.create_model("cifar9", max_out=0), ValueError, "`max_out` (=0)"),
        (lambda: tb.create_model("cifar9", norm="batch"), ValueError, "`norm` (='batch')"),
        (lambda: tb.create_model("cifar9", head="fc"), ValueError, "`head` (='fc')"),
        (
            lambda: tb.create_model("cifar9", num_classes=3, classes=["cat", "dog"]),
            ValueError,
            "`classes` (=2 names) must name all 3 outputs",
        ),
    ],
)
def test_an_unknown_name_preset_or_option_gets_one_clear_sentence(call, error, message):
    with pytest.raises(error, match=re.escape(message)) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_class_names_set_the_number_of_classes():
    model = tb.create_model("cifar9", classes=["cat", "dog", "hen"], preset="paper")
    assert model.classes == ("cat", "dog", "hen")
    assert model.num_classes == 3
    assert model(images()).shape == (2, 3)
    e = tb.explain(model.eval(), images(), targets="dog")
    assert e.targets.tolist() == [[1], [1]]


def test_the_list_of_models_names_each_family_once():
    names = tb.list_models()
    assert len(names) == len(set(names))
    assert names[0] == "cifar9"
    for family in (
        "alexnet vgg11 vgg13_bn vgg16 vgg19_bn resnet18 resnet34 resnet152 resnext50_32x4d "
        "wide_resnet50_2 densenet121 densenet201 googlenet inception_v3 squeezenet1_0 mnasnet1_0 "
        "mobilenet_v2 mobilenet_v3_large shufflenet_v2_x1_0 regnet_x_400mf regnet_y_400mf "
        "efficientnet_b0 efficientnet_v2_s convnext_tiny"
    ).split():
        assert family in names
    classifiers = torchvision.models.list_models(module=torchvision.models)
    assert set(classifiers) < set(names)  # and no detector or segmenter
    assert not any("rcnn" in name or "deeplab" in name for name in names)


def test_a_model_says_what_it_was_made_from():
    model = tb.create_model("cifar9", num_classes=3, in_channels=1, b=1.5, norm="uncentred")
    assert model.architecture.name == "cifar9"
    assert model.architecture.options == {
        "num_classes": 3,
        "in_channels": 1,
        "b": 1.5,
        "max_out": 2,
        "norm": "uncentred",
        "head": "conv",
        "strict": True,
    }
    again = tb.create_model(model.architecture.name, **model.architecture.options)
    assert {n: v.shape for n, v in again.state_dict().items()} == {
        n: v.shape for n, v in model.state_dict().items()
    }
    assert "classes=3" in repr(model)
    assert "scaling='none'" in repr(model)


def test_the_same_seed_gives_the_same_model():
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(tb.create_model("squeezenet1_1", num_classes=4, norm="uncentred"))
    first, second = (m.state_dict() for m in models)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.filterwarnings("ignore:`model` is conventional")
@pytest.mark.parametrize(
    "make",
    [
        small_model,
        lambda: tb.create_model("cifar9", preset="paper").eval(),
        lambda: tb.create_model("conventional/cifar9").eval(),
        lambda: tb.load("cifar10"),
    ],
    ids=["convert", "create_model", "conventional", "load"],
)
def test_a_model_that_is_made_in_inference_mode_can_be_explained_and_trained(make):
    with torch.inference_mode():
        model = make()
        size = model.input_size[0]
        model(images(1, size))
    e = tb.explain(model, images(2, size))
    assert e.weights.any()
    model.train()(images(2, size)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", ["cifar9", "regnet_y_400mf", "timm/test_convnext"])
def test_no_weight_is_left_uninitialised(name):
    """Networks are made without memory first; whatever comes back must have real values."""
    torch.manual_seed(0)
    model = tb.create_model(name, num_classes=3, norm="uncentred")
    assert not any(v.is_meta for v in model.state_dict().values())
    for _, layer in model.bcos_layers():
        bound = 1 / math.sqrt(layer.fan_in)  # torch's own initialisation
        assert 0 < layer.weight.abs().max() <= bound
    for key, value in model.state_dict().items():
        assert torch.isfinite(value).all(), key
        if key.endswith("running_var"):
            assert (value == 1).all()


# Sizes.


def make(name):
    """Real architectures at reduced cost, calibrated."""
    torch.manual_seed(0)
    if name == "vgg":
        features = torchvision.models.vgg.make_layers([8, "M", 16, "M", 16, "M"])
        module = torchvision.models.VGG(features, num_classes=10, init_weights=False)
        module.classifier[0] = nn.Linear(16 * 7 * 7, 24)
        module.classifier[3] = nn.Linear(24, 24)
        module.classifier[6] = nn.Linear(24, 10)
        model = tb.convert(module)
    elif name == "resnet":
        block = torchvision.models.resnet.Bottleneck
        model = tb.convert(torchvision.models.ResNet(block, [1, 1, 1, 1], 10, width_per_group=8))
    elif name == "densenet":
        module = torchvision.models.DenseNet(8, (2, 2, 2), 16, num_classes=10)
        model = tb.convert(module)
    else:
        model = tb.create_model(name, num_classes=10)
    return tb.calibrate(model.eval(), images(2, 64))


@pytest.mark.parametrize("name", ["vgg", "resnet", "densenet", "shufflenet_v2_x0_5"])
def test_one_image_odd_sizes_and_larger_images_work(name):
    model = make(name)
    for size in ((64, 64), (65, 47), (33, 96), (192, 192)):
        e = tb.explain(model, images(1, size), targets=list(range(EXPLAINED)))
        assert e.weights.shape == (1, EXPLAINED, 6, *size)
        scale = (e.outputs - model.logit_bias).abs().max()
        assert e.residual.abs().max() <= TOLERANCE[torch.float32] * scale


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "squeezenet1_1"])
def test_a_grid_of_three_by_three_images_of_full_size_works(name):
    model = make(name)
    with torch.no_grad():
        logits = model(images(1, 672))
    assert logits.shape == (1, 10)
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("name", ["vgg", "resnet", "densenet"])
def test_an_image_is_classified_the_same_alone_and_in_a_batch(name):
    model = make(name)
    x = images(3, 64)
    with torch.no_grad():
        assert_agrees(torch.cat([model(x[i : i + 1]) for i in range(3)]), model(x))


# Input errors.


WRONG_IMAGES = {
    "an array": (images().numpy(), TypeError, "must be a tensor"),
    "one image": (images()[0], ValueError, "images[None]"),
    "channels last": (images().permute(0, 2, 3, 1), ValueError, "images.permute(0, 3, 1, 2)"),
    "encoded": (images(channels=6), ValueError, "already encoded"),
    "grey": (images(channels=1), ValueError, "images.expand(-1, 3, -1, -1)"),
    "with alpha": (images(channels=4), ValueError, "images[:, :3]"),
    "bytes": ((255 * images()).byte(), TypeError, "images.float() / 255"),
    "none": (images(0), ValueError, "is empty"),
    "0..255": (255 * images(), ValueError, "0..255"),
    "-1..1": (2 * images() - 1, ValueError, "(images + 1) / 2"),
    "normalised": ((images() - 0.45) / 0.22, ValueError, "normalised by mean and deviation"),
    "overshot": (images() * 1.1, ValueError, "images.clamp(0, 1)"),
    "not finite": (images() / 0, ValueError, "finite"),
}


@pytest.mark.parametrize(("x", "error", "message"), WRONG_IMAGES.values(), ids=WRONG_IMAGES)
def test_what_is_wrong_with_images_is_said_and_how_to_mend_it(x, error, message):
    model = tb.create_model("cifar9", preset="paper")
    with pytest.raises(error, match=re.escape(message)):
        model(x)
    assert model(images()).shape == (2, 10)  # and nothing is spoilt


def test_values_are_looked_at_in_the_first_call_only():
    model = tb.create_model("cifar9", preset="paper").eval()
    model(images())
    assert torch.isfinite(model(255 * images())).all()


def test_a_first_call_that_fails_does_not_count():
    model = tb.create_model("cifar9", preset="paper").eval()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"0\.\.255"):
            model(255 * images())


def test_a_model_with_neither_preset_nor_calibration_warns_once():
    model = tb.create_model("cifar9").eval()
    with pytest.warns(UserWarning, match="call torchbcos.calibrate") as caught:
        model(images())
    assert caught[0].filename == __file__ or "torch" in caught[0].filename
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(images())


@pytest.mark.parametrize("how", ["preset", "calibrate"])
def test_a_model_with_preset_or_calibration_does_not_warn(how):
    model = tb.create_model("cifar9", preset="paper" if how == "preset" else None)
    if how == "calibrate":
        tb.calibrate(model, images())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model(images()).isfinite().all()


# The logit head.


def test_logits_are_the_network_over_temperature_plus_bias():
    model = small_model()
    model.temperature, model.logit_bias = 0.5, -2.0
    x = images(2, 16)
    expected = 2.0 * model.network(torch.cat([x, 1 - x], 1)) - 2.0
    assert_agrees(model(x), expected)
    assert_agrees(model.from_encoded(torch.cat([x, 1 - x], 1)), expected)


# torch's own tools.


@pytest.mark.parametrize("explain", [False, True])
def test_a_model_compiles_without_a_graph_break(explain):
    model, x = small_model(), images(2, 16).requires_grad_()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    results = []
    for function in (model, compiled):
        with mode(explain):
            logits = function(x)
        results.append((logits, *torch.autograd.grad(logits[:, 1].sum(), x)))
    for actual, expected in zip(results[1], results[0], strict=True):
        assert_agrees(actual, expected)


def test_a_compiled_model_can_be_explained():
    model, x = small_model(), images(2, 16)
    compiled = torch.compile(model, backend="aot_eager")
    assert torch.equal(tb.explain(compiled, x).weights, tb.explain(model, x).weights)


@pytest.mark.parametrize("training", [False, True])
def test_a_mode_lasts_as_long_as_its_context_whatever_ends_it(training):
    model = small_model().train()
    model.network.get_submodule("1").eval()
    before = [m.training for m in model.modules()]
    with contextlib.suppress(KeyboardInterrupt), in_mode(model, training):
        assert {m.training for m in model.modules()} == {training}
        raise KeyboardInterrupt
    assert [m.training for m in model.modules()] == before


def test_a_copy_is_equal_and_independent():
    model, x = small_model(), images(2, 16)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x))
    assert (twin.temperature, twin.scaling) == (model.temperature, "calibrated")
    before = model(x)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(torch.rand_like(p))
    for _, layer in twin.bcos_layers():
        layer.scale = 3.0
    assert torch.equal(model(x), before)
    assert not torch.equal(twin(x), before)


@pytest.mark.parametrize("strict", [False, True])
def test_the_forward_pass_can_be_exported_for_any_batch(strict):
    model = small_model()
    batch = torch.export.Dim("batch")
    program = torch.export.export(
        model, (images(2, 16),), dynamic_shapes=({0: batch},), strict=strict
    )
    assert_agrees(program.module()(images(5, 16)), model(images(5, 16)))


def test_channels_last_gives_the_same_logits_and_explanations():
    model, x = small_model(), images(2, 16)
    logits, e = model(x), tb.explain(model, x)
    model.to(memory_format=torch.channels_last)
    x = x.contiguous(memory_format=torch.channels_last)
    assert_agrees(model(x), logits)
    assert_agrees(tb.explain(model, x).weights, e.weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    model, x = small_model(), images(2, 16)
    expected = model(x) - model.logit_bias
    logits = model.to(dtype)(x.to(dtype))
    assert logits.dtype == dtype
    off = (logits - model.logit_bias - expected).abs().max()
    largest = (expected + model.logit_bias).abs().max()  # what bfloat16 rounds is the logit
    assert off <= TOLERANCE[torch.bfloat16 if dtype == torch.bfloat16 else torch.float32] * largest


def test_autocast_keeps_the_linear_map():
    model, x = small_model(), images(2, 16)
    with torch.autocast("cpu", torch.bfloat16):
        e = tb.explain(model, x)
    scale = (e.outputs - model.logit_bias).abs().max()
    assert e.residual.abs().max() <= TOLERANCE[torch.bfloat16] * scale


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_model_of_another_type_takes_images_as_they_are(dtype):
    model, x = small_model().to(dtype).eval(), images(2, 16)
    assert torch.equal(model(x), model(x.to(dtype)))
    assert tb.signal(model, x).logits > 0
    assert tb.calibrate(model, x)(x).dtype == dtype


@pytest.mark.parametrize("name", ["resnet18", "timm/resnet10t"])
def test_conventional_weights_are_not_asked_for(name):
    given = {"pretrained": True} if name.startswith("timm/") else {"weights": "DEFAULT"}
    with pytest.raises(ValueError, match="must be left out: conventional weights are of no use"):
        tb.create_model(name, num_classes=4, **given)


def test_a_name_is_not_converted_but_made():
    with pytest.raises(TypeError, match=r"`module` \(='resnet18'\) must be an nn.Module; create_"):
        tb.convert("resnet18")


def test_one_name_is_no_list_of_classes():
    with pytest.raises(TypeError, match=r"`classes` \(='cat'\) must be a list"):
        tb.create_model("mini", classes="cat")


def test_numbers_of_numpy_can_be_saved(tmp_path):
    numbers = {"b": np.float32(1.5), "max_out": np.int64(2), "input_size": np.int64(32)}
    made = {
        "mini": tb.create_model("mini", num_classes=np.int64(3), width=np.int64(4), **numbers),
        "grey": tb.create_model("mini", in_channels=np.int64(1)),
        "conventional": tb.create_model("conventional/mini", num_classes=np.int64(3)),
        "module": tb.convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(2)), **numbers),
        "two": tb.create_model("mini", input_size=(np.int64(32), 48)),
    }
    for name, model in made.items():
        tb.save(model, tmp_path / name)
    for name in set(made) - {"module"}:
        loaded = tb.load(tmp_path / name)
        assert loaded.num_classes == made[name].num_classes
        assert loaded.input_size == made[name].input_size
        assert [layer.b for _, layer in loaded.bcos_layers()] == [
            layer.b for _, layer in made[name].bcos_layers()
        ]


@pytest.mark.parametrize("size", [0, (224,), "a", 22.5, (32, -1), True])
def test_sizes_that_are_none_are_refused(size):
    with pytest.raises(ValueError, match=r"`input_size` \(=.*\) must be a number of pixels, or"):
        tb.create_model("mini", input_size=size)
