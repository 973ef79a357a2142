"""What units respond to over a set: against brute force, whatever the way it was collected."""

import io
import itertools
import json
import math
import multiprocessing
import os
import signal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

import torchbcos as tb
from torchbcos import data, neurons
from torchbcos.neurons import collecting, skew
from torchbcos.neurons.table import largest
from torchbcos.tap import watch
from trained import make_vit

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*:DeprecationWarning:lightning.*",
    "ignore:.*:UserWarning:lightning.*",
    "ignore:.*:FutureWarning:lightning.*",
)
SIZE, COUNT, TOP = 20, 45, 6
ONE_PASS = ("values", "images", "positions", "mean", "std", "peak_mean", "peak_std", "active")


def drawn(count=COUNT, size=SIZE, seed=3):
    """Shapes; some images twice, so that there are ties."""
    made = data.shapes(count, size=size, seed=seed)
    pixels = (made.images * 255).round().to(torch.uint8)
    pixels[20:25] = pixels[3:8]
    return data.Images(pixels, made.labels)


def small_model(seed=0, **options):
    torch.manual_seed(seed)
    settings = {"num_classes": 8, "width": 4, "max_out": 2, "input_size": SIZE, **options}
    model = tb.create_model("mini", **settings)
    tb.calibrate(model, drawn().batch(torch.arange(8))[0])
    return model.eval()


@pytest.fixture(scope="module")
def images():
    return drawn()


@pytest.fixture(scope="module")
def model():
    return small_model().double()  # so that a batch's size changes nothing that could be seen


@pytest.fixture(scope="module")
def found(model, images, tmp_path_factory):
    out = tmp_path_factory.mktemp("neurons") / "units.safetensors"
    return neurons.collect(model, images, out, top=TOP, batch=16)


def activations(model, images):
    """Every B-cos layer's output for the whole set at once, by torch's own hooks."""
    seen = {}
    handles = [
        layer.register_forward_hook(lambda _, __, out, name=name: seen.update({name: out}))
        for name, layer in model.bcos_layers()
    ]
    with torch.no_grad():
        model(images.batch(torch.arange(len(images)))[0].double())
    for handle in handles:
        handle.remove()
    return {name: out.numpy() for name, out in seen.items()}


def by_brute_force(maps, top, above=0.0):  # [N, C, H, W]
    n, channels = maps.shape[:2]
    flat = maps.reshape(n, channels, -1)
    result = {name: [] for name in ONE_PASS}
    for c in range(channels):
        peaks = [(-max(row), i, int(np.argmax(row))) for i, row in enumerate(flat[:, c])]
        best = sorted(peaks)[:top]
        result["values"].append([-v for v, _, _ in best])
        result["images"].append([i for _, i, _ in best])
        result["positions"].append([divmod(p, maps.shape[3]) for _, _, p in best])
        result["mean"].append(flat[:, c].mean())
        result["std"].append(flat[:, c].std())
        result["peak_mean"].append(flat[:, c].max(1).mean())
        result["peak_std"].append(flat[:, c].max(1).std())
        result["active"].append((flat[:, c].max(1) > above).mean())
    return {name: np.array(values) for name, values in result.items()}


def assert_equals(found, expected):
    """Numbers of images and places exactly; activations up to the rounding of float64."""
    for layer, values in expected.items():
        units = found.units(layer)
        for name in ONE_PASS:
            actual = getattr(units, name).numpy()
            if name in ("images", "positions"):
                assert np.array_equal(actual, values[name]), (layer, name)
            else:
                scale = np.abs(values[name]).max()
                assert np.allclose(actual, values[name], rtol=0, atol=1e-12 * scale), (layer, name)


@pytest.fixture(scope="module")
def expected(model, images):
    maps = activations(model, images)
    return {name: by_brute_force(m, TOP) for name, m in maps.items()}


# The pass.


def test_one_pass_is_brute_force(found, expected, model):
    assert list(found.layers) == [name for name, _ in model.bcos_layers()]
    assert_equals(found, expected)


def test_the_deviation_of_maps_that_are_nearly_flat(images, tmp_path):
    """1 - (1 - red) / 10,000, in float32: of the squares of such values no digit is left."""
    conv = tb.BcosConv2d(6, 1, 1, b=1)
    with torch.no_grad():
        conv.weight.copy_(torch.tensor([1, 0, 0, 1 - 1e-4, 0, 0])[None, :, None, None])
    network = nn.Sequential(conv, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = tb.BcosModel(network, num_classes=1, input_size=images.size).eval()
    found = neurons.collect(model, images, tmp_path / "n", top=1)
    with torch.no_grad():
        maps = conv(model.encoded(images.batch(torch.arange(len(images)))[0])).double()
    expected = maps.std(correction=0)
    assert found.units("0").std.item() == pytest.approx(expected.item(), rel=1e-3)


def test_equal_values_go_to_the_lower_image(found):
    """Images 3..7 stand in the set twice, as 20..24."""
    pairs = 0
    for layer in found.layers:
        for row in found.units(layer).images.tolist():
            for low, high in ((i, i + 17) for i in range(3, 8)):
                if low in row and high in row:
                    assert row.index(high) == row.index(low) + 1
                    pairs += 1
                assert low in row or high not in row
    assert pairs > 10


@pytest.mark.parametrize("batch", [1, 7, 64, None])
def test_the_size_of_the_batches_does_not_matter(model, images, expected, tmp_path, batch):
    found = neurons.collect(model, images, tmp_path / "n", top=TOP, batch=batch)
    assert_equals(found, expected)


def test_more_than_there_are_images(model, images, tmp_path):
    few = data.Images(images.pixels[:5], images.labels[:5])
    found = neurons.collect(model, few, tmp_path / "n", top=9, batch=2, layers=["3"])
    expected = by_brute_force(activations(model, few)["3"], 5)
    assert_equals(found, {"3": expected})
    assert found.units("3").values.shape == (4, 5)


def test_active_above_a_limit(model, images, tmp_path):
    maps = activations(model, images)["6"]
    limit = float(np.median(maps.max((2, 3))))
    found = neurons.collect(model, images, tmp_path / "n", layers=["6"], active_above=limit)
    assert_equals(found, {"6": by_brute_force(maps, COUNT, limit)})
    assert 0 < found.units("6").active.mean() < 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_two_processes_find_what_one_does(model, images, expected, tmp_path):
    lightning = pytest.importorskip("lightning")

    def share(fabric):
        neurons.collect(model, images, tmp_path / "n", top=TOP, batch=8, fabric=fabric)

    lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp_fork").launch(share)
    assert_equals(neurons.Neurons(tmp_path / "n"), expected)
    assert [p.name for p in tmp_path.iterdir()] == ["n"]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_killed_and_resumed_gives_the_same_file(model, images, found, tmp_path, monkeypatch):
    look, calls, out = collecting._look, [], tmp_path / "units.safetensors"

    def killed_in_the_third(*arguments):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return look(*arguments)

    def collect():
        neurons.collect(model, images, out, top=TOP, batch=16, resume=True, save_every=0)

    with monkeypatch.context() as patch:
        patch.setattr(collecting, "_look", killed_in_the_third)
        process = multiprocessing.get_context("fork").Process(target=collect)
        process.start()
        process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert [p.name for p in tmp_path.iterdir()] == ["units.safetensors.0-of-1.part"]
    monkeypatch.setattr(collecting, "_look", lambda *a: calls.append(1) or look(*a))
    collect()
    assert len(calls) == 1  # the third of three batches
    assert out.read_bytes() == found.path.read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["units.safetensors"]


def test_told_to_end_it_keeps_what_it_has(model, images, found, tmp_path, monkeypatch):
    look, calls = collecting._look, []

    def end_in_the_second(*arguments):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return look(*arguments)

    monkeypatch.setattr(collecting, "_look", end_in_the_second)
    out = tmp_path / "n"
    with pytest.raises(KeyboardInterrupt, match="32 images"):
        neurons.collect(model, images, out, top=TOP, batch=16)
    neurons.collect(model, images, out, top=TOP, batch=5, resume=True)  # with other batches, too
    assert len(calls) == 2 + math.ceil((COUNT - 32) / 5)
    again = neurons.Neurons(out)
    for layer, name in itertools.product(found.layers, ("values", "images", "positions")):
        assert torch.equal(getattr(again.units(layer), name), getattr(found.units(layer), name))


def test_a_run_that_does_not_fit_is_not_resumed(model, images, tmp_path, monkeypatch):
    out = tmp_path / "n"

    def stop(*_):
        raise RuntimeError("stop")

    with monkeypatch.context() as patch:
        patch.setattr(collecting.Tally, "statistics", stop)
        with pytest.raises(RuntimeError):
            neurons.collect(model, images, out, top=TOP, save_every=0)
    with pytest.raises(ValueError, match="`top` is not as in the run"):
        neurons.collect(model, images, out, top=TOP + 1, resume=True)
    with pytest.raises(ValueError, match="`model` is not as in the run"):
        neurons.collect(small_model(1).double(), images, out, top=TOP, resume=True)
    others = data.Images(images.pixels, images.labels.flip(0))
    with pytest.raises(ValueError, match="`labels` is not as in the run"):
        neurons.collect(model, others, out, top=TOP, resume=True)
    (tmp_path / "n.0-of-1.part").write_bytes(b"no state")
    with pytest.raises(ValueError, match="is damaged: remove it"):
        neurons.collect(model, images, out, top=TOP, resume=True)


def test_the_state_has_the_size_it_says_whatever_the_number_of_images(
    images, tmp_path, monkeypatch
):
    kept = []
    statistics = collecting.Tally.statistics
    monkeypatch.setattr(
        collecting.Tally, "statistics", lambda t, layers: kept.append(t) or statistics(t, layers)
    )
    for count in (10, COUNT):
        few = data.Images(images.pixels[:count], images.labels[:count])
        neurons.collect(small_model(), few, tmp_path / "n", top=TOP)
    units = kept[0].mean.shape[0]
    for tally in kept:
        held = sum(t.numel() * t.element_size() for t in tally.tensors().values())
        assert held == units * (12 * TOP + 40) < neurons.memory_bound(units, TOP, 64)


def test_a_model_in_training_is_looked_at_as_in_use_and_stays_in_training(images, tmp_path):
    model = small_model(norm="uncentred").train()
    frozen = model.network.get_submodule("1").eval()
    found = neurons.collect(model, images, tmp_path / "n", top=TOP)
    (sheet,) = neurons.sheets(model, images, found, [("9", 1)], first=1, rest=0)
    assert [m for m in model.modules() if not m.training] == [frozen]
    x = images.batch(torch.tensor([sheet.first[0].image]))[0]
    e = tb.explain(model.eval(), x, layer="9", unit=1)
    assert sheet.first[0].value == pytest.approx(e.outputs.item(), rel=1e-5)


def test_images_of_another_kind_are_refused(model, tmp_path):
    grey = data.Images(torch.zeros(2, 1, SIZE, SIZE, dtype=torch.uint8), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="repeat the grey channel"):
        neurons.collect(model, grey, tmp_path / "n")


def test_layers_by_name_pattern_and_block(images, tmp_path):
    torch.manual_seed(0)
    model = tb.create_model("resnet18", num_classes=8, max_out=1, input_size=32)
    model.scaling = "custom"

    def layers(*patterns):
        few = data.Images(images.pixels[:2], images.labels[:2])
        found = neurons.collect(model, few, tmp_path / "n", layers=patterns, top=1)
        return {name: (at.units, at.height, at.width) for name, at in found.layers.items()}

    assert layers("layer2.1", "conv1") == {"conv1": (64, 10, 10), "layer2.1": (128, 3, 3)}
    assert list(layers("layer4.*.conv?")) == [f"layer4.{i}.conv{j}" for i in (0, 1) for j in (1, 2)]
    with pytest.raises(ValueError, match="matches no layer: the B-cos layers are conv1"):
        layers("layer9*")
    assert model.training


def test_layers_of_tokens_are_left_out_in_words(tmp_path):
    told = Console(file=io.StringIO(), width=500)
    few = data.Images(torch.zeros(2, 3, 16, 16, dtype=torch.uint8), torch.tensor([0, 1]))
    found = neurons.collect(make_vit(), few, tmp_path / "n", top=1, progress=told)
    assert list(found.layers) == ["conv_proj", "heads.head"]
    words = (
        "6 B-cos layers are left out, whose units have no maps or which run in training only: en"
    )
    assert words in told.file.getvalue()


def test_layers_whose_names_differ_by_the_prefix_of_a_model_are_apart(images, tmp_path):
    class Prefixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = nn.ModuleDict({"conv": tb.BcosConv2d(4, 8, 3)})
            self.conv = tb.BcosConv2d(6, 4, 3)

        def forward(self, x):
            return self.network["conv"](self.conv(x)).mean((2, 3))

    model = tb.BcosModel(Prefixed(), num_classes=8).double().eval()
    found = neurons.collect(model, images, tmp_path / "n", top=TOP)
    by_name = {
        name: by_brute_force(activations_of(model, images, name), TOP)
        for name in ("conv", "network.conv")
    }
    assert {name: at.units for name, at in found.layers.items()} == {"conv": 4, "network.conv": 8}
    assert_equals(found, by_name)


class Positionwise(nn.Module):
    """A linear layer over the channels of every position, as in ConvNeXt."""

    def __init__(self):
        super().__init__()
        self.linear = tb.BcosLinear(6, 5)
        self.classify = tb.BcosConv2d(5, 4, 1)

    def forward(self, x):
        x = self.linear(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.classify(x).mean((2, 3))


def test_units_of_a_linear_layer_over_positions(images, tmp_path):
    torch.manual_seed(0)
    model = tb.BcosModel(Positionwise(), num_classes=8).double().eval()
    found = neurons.collect(model, images, tmp_path / "n", layers=["linear"], top=TOP)
    maps = activations_of(model, images, "linear").transpose(0, 3, 1, 2)
    assert_equals(found, {"linear": by_brute_force(maps, TOP)})
    (sheet,) = neurons.sheets(model, images, found, [("linear", 2)], first=2, rest=0)
    assert [s.value for s in sheet.first] == pytest.approx(
        found.units("linear").values[2, :2].tolist()
    )
    assert sheet.first[0].picture.shape == (1, 1, 4)  # it sees one pixel
    told = neurons.unit_contributions(model, images.batch(torch.arange(2))[0].double(), "linear")
    assert told.units.shape == (2, 1, 5)
    assert told.residual.abs().max() < 1e-12


def activations_of(model, images, layer):
    seen = {}
    x = tb.encoding.encode(images.batch(torch.arange(len(images)))[0].double())
    with torch.no_grad():
        watch(model.network, x, {layer: lambda out: seen.update(out=out)})
    return seen["out"].numpy()


def test_an_activation_that_is_not_finite_is_named(images, tmp_path):
    model = small_model()
    dict(model.bcos_layers())["6"].weight.data[0, 0] = math.nan
    with pytest.raises(ValueError, match="`layer` \\(='6'\\) has activations that are not finite"):
        neurons.collect(model, images, tmp_path / "n")
    assert not (tmp_path / "n").exists()


WRONG = {
    "top": ({"top": 0}, "`top` \\(=0\\)"),
    "batch": ({"batch": 0}, "`batch` \\(=0\\)"),
    "names": ({"classes": ["one"]}, "`classes` \\(=1 names\\) must name all 8"),
}


@pytest.mark.parametrize(("arguments", "words"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_named(model, images, tmp_path, arguments, words):
    with pytest.raises(ValueError, match=words):
        neurons.collect(model, images, tmp_path / "n", **arguments)
    with pytest.raises(ValueError, match="its folder does not exist"):
        neurons.collect(model, images, tmp_path / "no" / "n")


def test_the_file_is_read_layer_by_layer(found, monkeypatch):
    again, read = neurons.Neurons(found.path), []
    really = neurons.Neurons._read
    monkeypatch.setattr(
        neurons.Neurons, "_read", lambda self, *names: read.extend(names) or really(self, *names)
    )
    again.units("6")
    again.units("6")
    assert len(read) == 8
    assert all(name.startswith("6/") for name in read)
    assert "7 layers, the 6 best of 45 images" in repr(again)


def test_files_of_another_kind_are_refused(found, tmp_path):
    with pytest.raises(neurons.NeuronsError, match="does not exist"):
        neurons.Neurons(tmp_path / "nothing")
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(neurons.NeuronsError, match="no intact file"):
        neurons.Neurons(tmp_path / "text")
    tb.save(small_model(), tmp_path / "model")
    with pytest.raises(neurons.NeuronsError, match="holds no neurons"):
        neurons.Neurons(tmp_path / "model")
    with pytest.raises(neurons.NeuronsError, match="`layer` \\(='7'\\) is not in"):
        found.units("7")


# Classes.


def test_the_histogram_counts_the_classes_of_the_best_images(found, images):
    for layer in found.layers:
        counts = found.histogram(layer)
        for unit, row in enumerate(found.units(layer).images.tolist()):
            labels = [int(images.labels[i]) for i in row]
            assert counts[unit].tolist() == [labels.count(k) for k in range(8)]


def test_the_divergence_by_hand():
    whole = torch.tensor([10, 20, 70])
    counts = torch.tensor([[1, 2, 7], [10, 0, 0], [5, 5, 0]])
    expected = [
        0.0,
        math.log2(1 / 0.1),
        0.5 * math.log2(0.5 / 0.1) + 0.5 * math.log2(0.5 / 0.2),
    ]
    torch.testing.assert_close(skew.divergence(counts, whole).tolist(), expected)


def test_chance_is_the_exact_probability_of_a_blind_draw():
    """Two classes: the number of one class among the drawn is hypergeometric, and can be listed."""
    whole, size = torch.tensor([6, 14]), 5
    ways = [math.comb(6, k) * math.comb(14, size - k) for k in range(size + 1)]
    counts = torch.tensor([[k, size - k] for k in range(size + 1)])
    far = skew.divergence(counts, whole)
    exact = [
        sum(w for w, other in zip(ways, far, strict=True) if other >= one - 1e-12) / sum(ways)
        for one in far
    ]
    p = skew.chance(far, size, whole)
    for estimate, value in zip(p.tolist(), exact, strict=True):
        assert abs(estimate - value) < 5 * math.sqrt(value / skew.DRAWS) + 2 / skew.DRAWS
    assert torch.equal(p, skew.chance(far, size, whole))


def test_units_that_know_nothing_are_rarely_significant():
    """p-values of blind draws are (sub-)uniform, and hardly any survives the adjustment."""
    random = np.random.default_rng(0)
    whole = torch.full((10,), 100)
    drawn = random.multivariate_hypergeometric(whole.numpy(), 50, size=4000)
    p = skew.chance(skew.divergence(torch.from_numpy(drawn), whole), 50, whole, seed=1)
    for level in (0.01, 0.1, 0.5):
        assert (p <= level).double().mean() < level + 4 * math.sqrt(level / 4000)
    assert (skew.adjusted(p) <= 0.05).sum() <= 1


def test_the_adjustment_is_benjamini_and_hochbergs():
    p = torch.from_numpy(np.random.default_rng(0).uniform(size=50)) ** 3
    order = sorted(range(50), key=lambda i: p[i])
    for place, i in enumerate(order):
        best = min(50 * p[j] / (r + 1) for r, j in list(enumerate(order))[place:])
        assert skew.adjusted(p)[i] == pytest.approx(min(best, 1))


# Sorting and searching.


def test_units_are_sorted_by_their_highest_activation(found):
    best = found.units("9").values[:, 0]
    ranked = found.most_active("9", 5)
    assert [r.unit for r in ranked] == best.argsort(descending=True)[:5].tolist()
    assert [r.score for r in ranked] == best.sort(descending=True).values[:5].tolist()
    with pytest.raises(ValueError, match="`count` \\(=0\\)"):
        found.most_active("9", 0)


def test_ties_are_broken_by_the_second_key_and_then_by_the_order():
    scores = {"a": torch.tensor([1.0, 2.0, -torch.inf]), "b": torch.tensor([2.0, 2.0])}
    ties = {"a": torch.tensor([0.0, 1.0, 9.0]), "b": torch.tensor([5.0, 1.0])}
    ranked = largest(scores, 9, ties)
    assert [(r.layer, r.unit) for r in ranked] == [("b", 0), ("a", 1), ("b", 1), ("a", 0)]


def test_units_of_a_model_in_training_leave_its_statistics():
    layers = tb.BcosConv2d(6, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    model = tb.BcosModel(nn.Sequential(*layers), input_size=(32, 32)).train()
    before = {key: b.clone() for key, b in model.named_buffers()}
    x = torch.rand(4, 3, 32, 32)
    neurons.unit_contributions(model, x, "0", targets=[1])
    neurons.most_active_for(model, x[0], "0")
    assert all(torch.equal(b, before[key]) for key, b in model.named_buffers())


def test_units_most_active_for_an_image(model, images, found):
    image = images.batch(torch.tensor([11]))[0].double()
    peaks = activations(model, images)["6"][11].max((1, 2))
    ranked = neurons.most_active_for(model, image[0], "6", 3)
    assert [r.unit for r in ranked] == np.argsort(-peaks)[:3].tolist()
    units = found.units("6")
    unusual = (peaks - units.peak_mean.numpy()) / units.peak_std.numpy()
    ranked = neurons.most_active_for(model, image, "6", 3, usual=found)
    assert [r.unit for r in ranked] == np.argsort(-unusual)[:3].tolist()
    with pytest.raises(ValueError, match="must be one"):
        neurons.most_active_for(model, image.expand(2, -1, -1, -1), "6")


def test_units_that_contribute_most_to_a_class(model, images):
    x = images.batch(torch.arange(10))[0].double()
    mean = neurons.unit_contributions(model, x, "12", 4).units[:, 0].mean(0)
    ranked = neurons.most_contributing(model, x, "12", 4, 3, batch=4)
    assert [r.unit for r in ranked] == mean.argsort(descending=True)[:3].tolist()
    assert ranked[0].score == pytest.approx(mean.max().item())


# From a unit to a logit.

NETWORKS = {
    "plain": ("cifar9", {"max_out": 2}, 32, ["0", "8", "14"], True),
    "residual": ("resnet18", {"max_out": 1}, 32, ["conv1", "layer2.0", "layer3"], True),
    "residual, a norm with a bias": (
        "resnet18",
        {"max_out": 1, "norm": "uncentred"},
        32,
        ["layer1.1"],
        True,
    ),
    "inside a block": ("resnet18", {"max_out": 1}, 32, ["layer2.0.conv1", "layer3.1.conv2"], False),
    "dense": ("densenet121", {"growth_rate": 4}, 32, ["features.denseblock2.denselayer3"], False),
}


@pytest.mark.parametrize("case", NETWORKS.values(), ids=NETWORKS)
def test_contributions_of_all_units_and_bias_are_the_logit(case):
    name, options, size, layers, is_cut = case
    torch.manual_seed(0)
    model = tb.create_model(name, num_classes=5, input_size=size, **options)
    x = torch.rand(2, 3, size, size, dtype=torch.float64)
    model = tb.calibrate(model.double(), x).eval()
    logits = model(x)
    for layer in layers:
        told = neurons.unit_contributions(model, x, layer, targets="all")
        assert torch.equal(told.outputs, logits.detach())
        total = told.units.sum(2) + told.around + told.bias
        assert (total - logits).abs().max() < 1e-9
        assert told.residual.abs().max() < 1e-9
        assert (told.around.abs().max() == 0) == is_cut
        assert told.maps.shape == told.weights.shape


def test_the_weights_of_a_unit_are_the_map_from_it_to_the_logit():
    """For b = 1 the network is linear: more of a unit gives that much more of a logit."""
    torch.manual_seed(0)
    model = tb.create_model("mini", num_classes=3, b=1.0, max_out=1, width=4, input_size=16)
    x = torch.rand(1, 3, 16, 16, dtype=torch.float64)
    model = tb.calibrate(model.double(), x).eval()
    told = neurons.unit_contributions(model, x, "6", targets="all")

    def more(out):
        out = out.clone()
        out[0, 3, 2, 1] += 0.5
        return out

    with torch.no_grad():
        changed = model.from_outputs(watch(model.network, tb.encoding.encode(x), {"6": more}))
    torch.testing.assert_close(changed - told.outputs, 0.5 * told.weights[:, :, 3, 2, 1])


def test_contributions_go_to_the_targets_that_are_asked_for(model, images):
    x = images.batch(torch.arange(3))[0].double()
    predicted = neurons.unit_contributions(model, x, "9")
    assert torch.equal(predicted.targets[:, 0], model(x).argmax(1))
    two = neurons.unit_contributions(model, x, "9", targets=[5, 1])
    assert two.targets.tolist() == [[5, 1]] * 3
    with pytest.raises(ValueError, match="`layer` \\(='nine'\\) is no layer"):
        neurons.unit_contributions(model, x, "nine")


def test_a_wrapped_model_is_looked_at_as_what_it_wraps(model, images, found, expected, tmp_path):
    wrapped, x = (
        torch.optim.swa_utils.AveragedModel(model),
        images.batch(torch.arange(2))[0].double(),
    )
    again = neurons.collect(wrapped, images, tmp_path / "n", top=TOP, batch=16)
    assert again.fingerprint == found.fingerprint == neurons.fingerprint(wrapped)
    assert_equals(again, expected)
    told = neurons.unit_contributions(wrapped, x, "6")
    assert torch.equal(told.units, neurons.unit_contributions(model, x, "6").units)
    ranked = neurons.most_active_for(wrapped, x[0], "6")
    assert ranked == neurons.most_active_for(model, x[0], "6")
    (sheet,) = neurons.sheets(wrapped, images, found, [("6", 3)], first=1, rest=0)
    assert sheet.first[0].image == found.units("6").images[3, 0]


# Sheets.


def test_a_sheet_shows_the_rows_of_the_best_images(model, images, found):
    (sheet,) = neurons.sheets(model, images, found, [("6", 3)], first=2, rest=3)
    units = found.units("6")
    sights = [*sheet.first, *sheet.rest]
    assert (len(sheet.first), len(sheet.rest), sheet.second) == (2, 3, (None, None))
    for place, sight in enumerate(sights):
        assert sight.image == units.images[3, place]
        assert sight.position == tuple(units.positions[3, place].tolist())
        x = images.batch(torch.tensor([sight.image]))[0].double()
        e = tb.explain(model, x, layer="6", unit=(3, *sight.position))
        torch.testing.assert_close(sight.contributions, e.contributions[0, 0])
        assert sight.value == pytest.approx(e.outputs.item())
        top, left, bottom, right = sight.box
        assert bottom - top == right - left == sight.picture.shape[0] == SIZE // 2
        whole = tb.render.colour(e)[0, 0]  # opaque by the length of W(x) anywhere in the image
        assert np.array_equal(sight.picture, whole[top:bottom, left:right])
        y, x_ = ((p + 0.5) * SIZE / 5 for p in sight.position)  # the map is 5×5
        assert top <= y <= bottom
        assert left <= x_ <= right


def test_a_small_receptive_field_is_the_picture(model, images, found):
    """Layer 0 has kernel 5 and stride 2, padding 2: its unit (y, x) sees 2y-2 … 2y+2."""
    for unit in range(4):
        (sheet,) = neurons.sheets(model, images, found, [("0", unit)], first=TOP, rest=0)
        for sight in sheet.first:
            (y, x), side = sight.position, sight.picture.shape[0]
            assert side == 5
            expected = [min(max(2 * p - 2, 0), SIZE - side) for p in (y, x)]
            assert list(sight.box[:2]) == expected


def test_the_second_place_is_the_highest_outside_of_the_first(model, images, found):
    maps = activations(model, images)["3"]
    (sheet,) = neurons.sheets(model, images, found, [("3", 1)], first=4, rest=0, second=True)
    assert_seconds_are_outside(sheet, maps[:, 1])


def assert_seconds_are_outside(sheet, maps):  # [N, 10, 10] of the unit
    for one, two in zip(sheet.first, sheet.second, strict=True):
        top, left, bottom, right = one.box
        best = max(
            (maps[one.image, y, x], (y, x))
            for y in range(10)
            for x in range(10)
            if not (top <= 2 * y + 1 < bottom and left <= 2 * x + 1 < right)
        )
        assert two.value == pytest.approx(best[0])
        assert two.position == best[1]
        assert two.picture.shape == one.picture.shape


def test_a_sheet_may_have_more_images_than_are_explained_at_once(model, images, tmp_path):
    maps = activations(model, images)["3"][:, 1]
    found = neurons.collect(model, images, tmp_path / "n", top=COUNT, layers=["3"])
    (sheet,) = neurons.sheets(model, images, found, [("3", 1)], first=40, rest=5, second=True)
    sights = [*sheet.first, *sheet.rest]
    assert [sight.image for sight in sights] == found.units("3").images[1].tolist()
    for sight in sights:
        assert sight.value == pytest.approx(maps[sight.image].max())
        assert sight.value == pytest.approx(maps[sight.image][sight.position])
    assert_seconds_are_outside(sheet, maps)


def test_where_the_picture_is_the_image_there_is_no_second(model, images, found):
    (sheet,) = neurons.sheets(
        model, images, found, [("15", 0)], first=2, rest=0, second=True, size=SIZE
    )
    assert sheet.second == (None, None)


def test_sheets_need_the_model_and_the_images_of_the_file(model, images, found):
    def sheet(model=model, images=images, units=(("6", 3),), **options):
        return list(neurons.sheets(model, images, found, units, **options))

    with pytest.raises(ValueError, match="`model` is not the one"):
        sheet(model=small_model(1).double())
    fewer = data.Images(images.pixels[1:], images.labels[1:])
    with pytest.raises(ValueError, match="are not the 45 that"):
        sheet(images=fewer)
    with pytest.raises(ValueError, match="a unit now has"):
        sheet(images=data.Images(images.pixels.flip(3), images.labels))
    with pytest.raises(ValueError, match="`unit` \\(=8\\) must be from 0 to 7"):
        sheet(units=[("6", 8)])
    with pytest.raises(ValueError, match="`size` \\(=21\\)"):
        sheet(size=SIZE + 1)
    with pytest.raises(ValueError, match="`first` \\(=0\\)"):
        sheet(first=0)


def test_a_model_has_one_fingerprint():
    one, same, other = small_model(0), small_model(0), small_model(1)
    assert neurons.fingerprint(one) == neurons.fingerprint(same) != neurons.fingerprint(other)
    same.temperature *= 2
    assert neurons.fingerprint(one) != neurons.fingerprint(same)


@pytest.mark.parametrize("changes", [{"b": 1.5}, {"eps": 1e-6}, {"scale": 3.0}])
def test_what_a_layer_computes_is_in_the_fingerprint(changes):
    one, other = small_model(), small_model()
    vars(dict(other.bcos_layers())["6"]).update(changes)
    assert neurons.fingerprint(one) != neurons.fingerprint(other)


def stored(page):
    """The JSON texts of a page."""
    parts = page.split('<script type="application/json"')[1:]
    return [json.loads(p[p.index(">") + 1 : p.index("</script>")]) for p in parts]


def test_the_page_holds_every_sheet_and_each_image_once(model, images, found, tmp_path):
    names = ("<i>", "</script>", "{{images}}", *map(str, range(5)))
    hostile = neurons.collect(model, images, tmp_path / "n", top=TOP, classes=names)
    units = [(layer, u) for layer in ("3", "9") for u in range(4)]
    page = neurons.build_page(
        "A <title>", hostile, images, neurons.sheets(model, images, hostile, units, first=3, rest=2)
    )
    assert "A &lt;title&gt;" in page
    assert "<i>" not in page
    assert "http" not in page
    assert page.count("<section") == 8
    assert 'data-words="3 · unit 0 ' in page
    assert "orange" not in page[: page.index("<section")].split("<body>")[1]  # no second places
    shown = {i for layer, u in units for i in hostile.units(layer).images[u, :3].tolist()}
    for i in shown:
        assert page.count(f"id=image-{i}>") == 1
    documents = [d for d in stored(page) if isinstance(d, dict)]
    for (layer, unit), told in zip(units, documents, strict=True):
        known = hostile.units(layer)
        assert [s[1] for s in told["first"]] == known.images[unit, :3].tolist()
        assert len(told["rest"]) == 2
        assert sum(count for _, count, _ in told["bars"]) + told["others"][1] == TOP
        assert told["sprite"].startswith("data:image/webp;base64,")
    assert list(names) in stored(page)


# An artefact, planted and found.

MARKED = ("cross", "bars")


def with_a_mark(count, seed):
    """Grey images; those of two classes have a small red square somewhere."""
    made = data.shapes(count, size=32, seed=seed)
    pixels = made.images.mean(1, keepdim=True).repeat(1, 3, 1, 1)
    marks = torch.zeros(count, 32, 32, dtype=torch.bool)
    places = torch.randint(1, 28, (count, 2), generator=torch.Generator().manual_seed(seed))
    for i, (y, x) in enumerate(places.tolist()):
        if made.classes[made.labels[i]] in MARKED:
            marks[i, y : y + 4, x : x + 4] = True
    red = torch.tensor([1.0, 0.0, 0.0])[None, :, None, None]
    pixels = torch.where(marks[:, None], red, pixels)
    return data.Images((pixels * 255).round().to(torch.uint8), made.labels), marks


def trained_on(images, steps=350):
    """Until it knows the mark and little else, whatever the seeds."""
    torch.manual_seed(0)
    model = tb.create_model(
        "mini", classes=data.shapes(1).classes, width=8, input_size=32, norm="uncentred"
    )
    tb.calibrate(model, images.batch(torch.arange(64))[0], logit_rms=0.5)
    optimiser = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, 4e-3, steps, pct_start=0.2, cycle_momentum=False
    )
    for _ in range(steps):
        x, labels = images.batch(torch.randint(len(images), (64,)))
        loss = F.binary_cross_entropy_with_logits(model(x), F.one_hot(labels, 8).float())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return model.eval()


def test_a_planted_artefact_is_what_the_most_skewed_units_see(tmp_path):
    model = trained_on(with_a_mark(2048, seed=1)[0])
    images, marks = with_a_mark(1024, seed=2)
    found = neurons.collect(model, images, tmp_path / "n", batch=128)
    hidden = list(found.layers)[:-1]
    suspects = found.most_skewed(5, hidden)
    assert len(suspects) == 5
    in_the_box = []
    for sheet in neurons.sheets(model, images, found, suspects, first=10, rest=0):
        classes = {found.classes[sight.label] for sight in sheet.first}
        assert classes <= set(MARKED)
        shares = []
        for sight in sheet.first:
            mark, seen = marks[sight.image], sight.contributions.clamp(min=0)
            shares.append((seen[mark].sum() / seen.sum()).item())
            assert seen.argmax().item() in mark.flatten().nonzero()
            ys, xs = mark.nonzero().unbind(1)
            top, left, bottom, right = sight.box
            inside = (ys >= top) & (ys < bottom) & (xs >= left) & (xs < right)
            in_the_box.append(bool(inside.any()))
        assert np.mean(shares) > 0.4  # 1.6 % of the pixels
        assert min(shares) > 0.25  # an early unit may see the mark's edge, and what is beside it
    # The deepest units see more than their picture, and it may miss; blind ones meet it in 40 %.
    assert sum(in_the_box) > 0.8 * len(in_the_box)
    sighted = found.skew[suspects[0].layer]
    assert sighted.q[suspects[0].unit] < 1e-3
    assert sighted.divergence[suspects[0].unit] >= 2 - 0.01  # two of eight classes


def test_a_conventional_model_is_refused(images, tmp_path):
    model = tb.create_model("conventional/mini", num_classes=8, width=4, input_size=SIZE)
    with pytest.raises(ValueError, match=r"`model` is conventional, .*: use a B-cos model\."):
        neurons.collect(model, images, tmp_path / "units")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("count", [3, 4])
def test_units_of_a_network_of_tokens_before_images_are_refused(count):
    class TokensFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = tb.BcosConv2d(6, 8, 4, stride=4)
            self.norm = tb.norms.UncentredLayerNorm(8)
            nn.init.normal_(self.norm.bias)
            self.linear = tb.BcosLinear(8, 3)

        def forward(self, x):
            return self.linear(self.norm(self.conv(x).flatten(2).permute(2, 0, 1))).mean(0)

    model = tb.BcosModel(TokensFirst()).eval()
    model.scaling = "custom"
    with pytest.raises(ValueError, match="images are not the first dimension"):
        neurons.unit_contributions(model, torch.rand(count, 3, 16, 16), "conv", targets=[1])
