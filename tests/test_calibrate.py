"""γ and T from one batch: any B and any depth start with a signal; `signal` shows its numbers."""

import math

import pytest
import torch
import torchvision
from torch import nn

import torchbcos as tb
from oracle import TOLERANCE, Layer, assert_agrees
from torchbcos.calibrate import LOGIT_RMS, _rms
from torchbcos.encoding import encode

NEAR = {"rel": 0.02}  # float32 and 152 layers, each of which amplifies rounding for B > 2


def images(count=4, size=32):
    """Smooth ones, as photographs are."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, 3, 4, 4, generator=generator)
    return nn.functional.interpolate(coarse, (size, size), mode="bilinear")


def rms(x):
    return x.detach().double().square().mean().sqrt().item()


def outputs_of_layers(model, x):
    """What each B-cos layer puts out, by name, for a plain forward pass in training."""
    found = {}
    hooks = [
        layer.register_forward_hook(lambda m, a, out, n=name: found.setdefault(n, []).append(out))
        for name, layer in model.bcos_layers()
    ]
    logits = model.train()(x)
    for hook in hooks:
        hook.remove()
    return logits if isinstance(logits, torch.Tensor) else logits[0], found


def make(depth, b):
    torch.manual_seed(0)
    if depth == 9:
        return tb.create_model("cifar9", b=b)
    if depth == 18:
        return tb.create_model("resnet18", num_classes=10, b=b)
    if depth == 121:
        return tb.create_model("densenet121", num_classes=10, growth_rate=8, b=b)
    return tb.create_model("resnet152", num_classes=10, b=b, max_out=1)


@pytest.mark.parametrize(
    ("depth", "b"),
    [
        *((9, b) for b in (1.0, 1.25, 1.5, 2.0, 2.5, 3.0)),
        *((18, b) for b in (1.0, 1.5, 2.5)),
        (121, 2.5),
        *((152, b) for b in (1.0, 2.0, 3.0)),
    ],
)
def test_training_can_start_at_any_depth_with_any_exponent(depth, b):
    model, x = make(depth, b), images(2, 32 if depth == 9 else 64)
    assert tb.calibrate(model, x) is model
    assert model.scaling == "calibrated"
    logits, outputs = outputs_of_layers(model, x)
    assert torch.isfinite(logits).all()
    assert rms(logits - model.logit_bias) == pytest.approx(LOGIT_RMS, **NEAR)
    assert logits.std(1).min() > 0.02 * LOGIT_RMS  # classes differ
    for name, (out,) in outputs.items():
        assert rms(out) == pytest.approx(1.0, **NEAR), name
    labels = torch.tensor([0, 1])
    nn.functional.binary_cross_entropy_with_logits(
        logits, nn.functional.one_hot(labels, 10).to(logits.dtype)
    ).backward()
    layers = [layer for _, layer in model.bcos_layers()]
    assert all(torch.isfinite(layer.weight.grad).all() for layer in layers)
    first, last = (rms(layers[i].weight.grad) for i in (0, -1))
    assert min(first, last) > 1e-7
    assert first > 1e-4 * last  # nothing vanishes on the way back


def test_without_calibration_the_same_networks_do_not_start():
    """The problem that calibration solves: the signal fades away."""
    model = make(18, 2.0)
    with pytest.warns(UserWarning, match="calibrate"):
        logits = model(images(2, 64))
    assert rms(logits - model.logit_bias) < 1e-3 * LOGIT_RMS


@pytest.mark.parametrize("norm", [None, "uncentred"])
def test_calibrating_twice_is_calibrating_once(norm):
    torch.manual_seed(0)
    model = tb.create_model("resnet18", num_classes=5, norm=norm)
    tb.calibrate(model, images(2, 64))
    scales = {name: layer.scale for name, layer in model.bcos_layers()}
    temperature = model.temperature
    tb.calibrate(model, images(2, 64))
    assert {name: layer.scale for name, layer in model.bcos_layers()} == scales
    assert model.temperature == temperature


def test_calibration_does_not_depend_on_the_constants_before_it():
    first = tb.calibrate(make(9, 2.0), images())
    second = make(9, 2.0)
    for i, (_, layer) in enumerate(second.bcos_layers()):
        layer.scale = 10.0 ** (3 * i - 12)
    second.temperature = 1e9
    tb.calibrate(second, images())
    assert torch.equal(first(images()), second(images()))


def test_calibration_only_multiplies_the_logits():
    """Homogeneity: γ and T change no direction, so the ranking of a plain sequence stays."""
    model, x = make(9, 2.0).double(), images().double()
    before = model.network(encode(x))
    tb.calibrate(model, x)
    after = model(x) - model.logit_bias
    assert_agrees(after * (before[0, 0] / after[0, 0]), before)


def test_the_spread_of_the_logits_can_be_chosen():
    model = tb.calibrate(make(9, 2.0), images(), logit_rms=0.01)
    assert rms(model(images()) - model.logit_bias) == pytest.approx(0.01, **NEAR)


@pytest.mark.parametrize("logit_rms", [0.0, -1.0, math.nan, math.inf])
def test_an_impossible_spread_is_an_error(logit_rms):
    with pytest.raises(ValueError, match="`logit_rms`"):
        tb.calibrate(make(9, 2.0), images(), logit_rms=logit_rms)


@pytest.mark.parametrize("function", [tb.calibrate, tb.signal])
def test_wrong_images_are_an_error(function):
    with pytest.raises(ValueError, match=r"0\.\.255"):
        function(make(9, 2.0), 255 * images())
    with pytest.raises(ValueError, match="already encoded"):
        function(make(9, 2.0), encode(images()))


def test_a_layer_used_twice_is_set_by_its_first_use():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, 4, 3)
            self.again = nn.Conv2d(4, 4, 3)
            self.fc = nn.Linear(4, 3)

        def forward(self, x):
            return self.fc(self.again(self.again(self.stem(x))).mean([2, 3]))

    torch.manual_seed(0)
    model = tb.calibrate(tb.convert(Twice(), input_size=16), images(4, 16))
    logits, outputs = outputs_of_layers(model, images(4, 16))
    first, second = outputs["again"]
    assert rms(first) == pytest.approx(1.0, **NEAR)
    assert rms(second) > 0
    assert rms(outputs["fc"][0]) == pytest.approx(1.0, **NEAR)
    assert rms(logits - model.logit_bias) == pytest.approx(LOGIT_RMS, **NEAR)


def test_layers_called_by_keyword_are_seen():
    class ByKeyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return self.fc(input=self.stem(input=x).mean([2, 3]))

    model = tb.calibrate(tb.convert(ByKeyword(), input_size=16), images(4, 16))
    found = tb.signal(model, images(4, 16))
    assert [row.name for row in found.layers] == ["stem", "fc"]
    assert [row.output for row in found.layers] == pytest.approx([1.0, 1.0], **NEAR)
    assert found.layers[0].norm > 0


def test_auxiliary_classifiers_are_calibrated_too():
    torch.manual_seed(0)
    model = tb.create_model("googlenet", num_classes=5).eval()
    tb.calibrate(model, images(2, 64))
    _, outputs = outputs_of_layers(model, images(2, 64))
    assert "aux2.fc2" in outputs
    for name, (out,) in outputs.items():
        assert rms(out) == pytest.approx(1.0, **NEAR), name


def state_of(model):
    return {
        "training": [m.training for m in model.modules()],
        "scales": [layer.scale for _, layer in model.bcos_layers()],
        "hooks": [len(m._forward_hooks) for m in model.modules()],
        "tensors": {name: value.clone() for name, value in model.state_dict().items()},
        "gradients": [p.grad for p in model.parameters()],
        "constants": (model.temperature, model.logit_bias, model.scaling),
    }


def assert_same_state(model, before, but=()):
    after = state_of(model)
    tensors, expected = after.pop("tensors"), before.pop("tensors")
    assert all(torch.equal(tensors[name], value) for name, value in expected.items())
    for what in before.keys() - set(but):
        assert after[what] == before[what], what


def mixed_model():
    torch.manual_seed(0)
    block = torchvision.models.resnet.BasicBlock
    module = torchvision.models.ResNet(block, [1, 1, 1, 1], num_classes=5)
    model = tb.convert(module, input_size=64, norm="uncentred")
    for m in list(model.modules())[::2]:
        m.training = False
    return model


def test_calibration_leaves_flags_statistics_weights_and_hooks_as_they_were():
    model = mixed_model()
    before = state_of(model)
    tb.calibrate(model, images(2, 64))
    assert_same_state(model, before, but=("scales", "constants"))


def test_signal_changes_nothing():
    model = mixed_model()
    before = state_of(model)
    tb.signal(model, images(2, 64))
    assert_same_state(model, before)


@pytest.mark.parametrize("spoil", ["weight", "hook"])
def test_a_calibration_that_fails_changes_nothing(spoil):
    model = mixed_model()
    for i, (_, layer) in enumerate(model.bcos_layers()):
        layer.scale = 2.0 + i
    hook = None
    if spoil == "weight":
        with torch.no_grad():
            dict(model.bcos_layers())["layer4.0.conv2"].weight.fill_(math.nan)
        expected = pytest.raises(ValueError, match="outputs are not finite")
    else:

        def fail(*_):
            raise MemoryError("no room")

        hook = dict(model.bcos_layers())["layer4.0.conv2"].register_forward_pre_hook(fail)
        expected = pytest.raises(MemoryError)
    before = state_of(model)
    before["tensors"].pop("network.layer4.0.conv2.weight")
    with expected:
        tb.calibrate(model, images(2, 64))
    assert_same_state(model, before)
    if hook is not None:
        hook.remove()


def test_a_black_layer_does_not_stop_calibration():
    """A layer that puts out nothing keeps γ = 1 rather than dividing by zero."""
    model = mixed_model()
    black = dict(model.bcos_layers())["layer4.0.conv2"]
    with torch.no_grad():
        black.weight.zero_()
    tb.calibrate(model, images(2, 64))
    assert black.scale == 1.0
    logits, _ = outputs_of_layers(model, images(2, 64))
    assert rms(logits - model.logit_bias) == pytest.approx(LOGIT_RMS, **NEAR)


def test_a_network_that_puts_out_nothing_cannot_be_calibrated():
    model = make(9, 2.0)
    with torch.no_grad():
        next(iter(model.bcos_layers()))[1].weight.zero_()
    before = state_of(model)
    with pytest.raises(ValueError, match=r"outputs are all 0, .* torchbcos.signal\(model, images"):
        tb.calibrate(model, images())
    assert_same_state(model, before)
    assert model.scaling == "none"


def small_net():
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 3)
    )
    return tb.convert(module, b=1.5, head="pool", input_size=6).double()


def test_signal_shows_the_numbers_of_every_layer():
    model, x = small_net(), images(2, 6).double()
    layers = dict(model.bcos_layers())
    layers["0"].scale, layers["3"].scale, model.temperature = 2.0, 0.5, 4.0
    signal = tb.signal(model, x)
    assert [row.name for row in signal.layers] == ["0", "3"]
    conv = Layer(layers["0"].weight, stride=2, padding=1, b=1.5, max_out=2, scale=2.0)
    value = encode(x)
    flat = conv.forward(value).reshape(2, -1)
    linear = Layer(layers["3"].weight, b=1.5, max_out=2, scale=0.5)
    for row, layer, inputs in zip(signal.layers, (conv, linear), (value, flat), strict=True):
        inputs = torch.as_tensor(inputs).numpy()
        units = list(layer.units(inputs))
        out = torch.as_tensor(layer.forward(inputs))
        expected = [
            sum(u.norm for u in units) / len(units),
            sum(abs(u.cos) for u in units) / len(units),
            rms(out),
            layer.scale,
        ]
        actual = [row.norm, row.cosine, row.output, row.scale]
        for value, right in zip(actual, expected, strict=True):
            assert value == pytest.approx(right, rel=TOLERANCE[torch.float64])
    assert signal.logits == pytest.approx(rms(out) / 4.0, rel=TOLERANCE[torch.float64])


def test_signal_prints_a_table():
    model = tb.calibrate(small_net(), images(2, 6).double())
    text = str(tb.signal(model, images(2, 6).double()))
    lines = [line.split() for line in text.splitlines()]
    assert lines[0] == ["layer", "‖patch‖", "|cos|", "output", "γ"]
    assert [line[0] for line in lines[1:]] == ["0", "3", "logits"]
    for line in lines[1:3]:
        assert len(line) == 5
        assert float(line[3]) == pytest.approx(1.0)
    assert float(lines[-1][1]) == pytest.approx(LOGIT_RMS, **NEAR)
    assert len({len(line) for line in text.splitlines()[:3]}) == 1


def test_signal_shows_where_a_signal_fades_and_that_calibration_mends_it():
    model, x = make(9, 2.5), images()
    faded = [row.output for row in tb.signal(model, x).layers]
    assert faded[-1] < 1e-3 * faded[0]
    mended = [row.output for row in tb.signal(tb.calibrate(model, x), x).layers]
    assert mended == pytest.approx([1.0] * 9, **NEAR)


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.optim.swa_utils.AveragedModel])
def test_a_wrapped_model_is_calibrated_as_what_it_wraps(wrap):
    device = "cuda" if torch.cuda.is_available() else "cpu"  # where DataParallel moves it
    plain, x = small_net().to(device), images(2, 6).double().to(device)
    wrapped = wrap(small_net().to(device))
    assert tb.calibrate(wrapped, x) is wrapped
    tb.calibrate(plain, x)
    assert wrapped.module.temperature == plain.temperature
    assert str(tb.signal(wrapped, x)) == str(tb.signal(plain, x))
    for ask in (tb.calibrate, tb.signal):
        with pytest.raises(TypeError, match=r"`model` \(a Flatten\) must be a BcosModel: convert"):
            ask(nn.Flatten(), x)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        *((torch.float32, size) for size in (1.0, 1e-30, 1e30, 1e-42)),
        *((torch.float64, size) for size in (1.0, 1e-200, 1e200)),
        (torch.float16, 1e4),
    ],
)
def test_the_root_mean_square_of_any_size(dtype, size):
    x = torch.randn(2, 3, 50, 70, generator=torch.Generator().manual_seed(0)).double() * size
    x = x.to(dtype).to(memory_format=torch.channels_last)
    values = x.double().flatten().tolist()
    expected = math.hypot(*values) / math.sqrt(len(values))
    assert _rms(x) == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
def test_the_root_mean_square_of_zeros_and_of_what_is_not_finite(value):
    assert _rms(torch.full((2, 3), value)) == pytest.approx(value, nan_ok=True)


def test_signal_shows_the_layer_where_outputs_become_infinite():
    model = make(9, 2.0).half()
    list(model.bcos_layers())[1][1].scale = 1e9
    rows = tb.signal(model, images(1, 16).half()).layers
    assert 0 < rows[0].output < math.inf
    assert rows[1].output == math.inf


def test_signal_of_black_layers_is_zero():
    model = make(9, 2.0)
    with torch.no_grad():
        next(iter(model.bcos_layers()))[1].weight.zero_()
    signal = tb.signal(model, images())
    assert signal.layers[0].norm == signal.layers[0].output == signal.logits == 0.0
    assert "nan" not in str(signal)


def with_torchs_norm():
    # fmt: off
    network = nn.Sequential(tb.BcosConv2d(6, 8, 3), nn.BatchNorm2d(8), nn.Dropout(),
                            nn.AdaptiveAvgPool2d(1), nn.Flatten(), tb.BcosLinear(8, 3))
    # fmt: on
    return tb.BcosModel(network, num_classes=3)


@pytest.mark.parametrize("look", [tb.signal, tb.calibrate])
def test_statistics_and_random_numbers_stay(look):
    model, images = with_torchs_norm(), torch.rand(4, 3, 16, 16)
    before = {name: b.clone() for name, b in model.named_buffers()}
    state = torch.get_rng_state()
    look(model, images)
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), state)
