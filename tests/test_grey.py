"""Grey images of one channel: read, trained on, and explained."""

import numpy as np
import pytest
import torch
from PIL import Image

import torchbcos as tb
from small_training import QUIET, config
from test_cli import run  # noqa: F401 (a fixture)
from torchbcos import train
from torchbcos.baseline import to_explain
from torchbcos.data import DataError, _grey, open_data, write_packed
from torchbcos.evaluate import open_as_trained
from torchbcos.posthoc import choose_methods
from torchbcos.training_config import TrainConfig


@pytest.fixture(scope="module")
def colourful(tmp_path_factory):
    """Two classes of coloured noise, one bright at the left and one at the right."""
    folder, random = tmp_path_factory.mktemp("grey"), np.random.default_rng(0)
    for part, count in (("train", 16), ("val", 6)):
        for name in ("left", "right"):
            (folder / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(0, 120, (24, 24, 3), np.uint8)
                pixels[:, slice(0, 12) if name == "left" else slice(12, 24)] += 130
                Image.fromarray(pixels).save(folder / part / name / f"{i:02}.png")
    return folder


def by_pillow(path):
    with Image.open(path) as file:
        return torch.from_numpy(np.array(file.convert("L")))[None]


@pytest.mark.parametrize("memory", [4.0, 0.0])
def test_files_are_read_as_pillow_makes_them_grey(colourful, memory):
    data = open_data(colourful, memory=memory, channels=1)
    found, labels = data.train.batch(torch.tensor([3, 16]))
    for image, name in zip(found, ("left/03", "right/00"), strict=True):
        assert torch.equal(image * 255, by_pillow(colourful / f"train/{name}.png").float())
    assert labels.tolist() == [0, 1]


def test_sets_in_memory_become_the_same_grey_and_stay_in_their_order(colourful, tmp_path):
    write_packed(open_data(colourful), tmp_path / "colour")
    files = open_data(colourful, channels=1)
    packed = open_data(tmp_path / "colour", channels=1)
    assert torch.equal(packed.train.pixels, files.train.pixels)
    assert torch.equal(packed.test.labels, files.test.labels)
    write_packed(files, tmp_path / "grey")
    assert open_data(tmp_path / "grey", channels=1).train.pixels.shape == (32, 1, 24, 24)
    assert open_data(tmp_path / "grey").test.pixels.shape == (12, 3, 24, 24)


def test_every_colour_becomes_the_grey_of_pillow():
    levels = torch.arange(0, 256, 5, dtype=torch.uint8)
    colours = torch.cartesian_prod(levels, levels, levels)
    expected = np.array(Image.fromarray(colours[None].numpy()).convert("L"))
    image = colours.T[None, :, None]
    found = _grey(image)
    assert np.array_equal(found[0, 0], expected)


def test_other_numbers_of_channels_are_refused(colourful):
    with pytest.raises(DataError, match=r"`channels` \(=4\) must be 1 \(grey\) or 3"):
        open_data(colourful, channels=4)


@pytest.mark.parametrize(
    "name",
    ["resnet18", "densenet121", "vgg11", "mini", "timm/resnet18", "v2/simple_vit_ti_patch16_224"],
)
def test_networks_get_a_first_layer_for_one_channel(name):
    model = tb.create_model(name, num_classes=3, in_channels=1, input_size=64)
    assert model.in_channels == 1
    with pytest.raises(ValueError, match=r"\[N, 1, H, W\]"):
        model(torch.rand(1, 3, 64, 64))
    tb.calibrate(model, torch.rand(4, 1, 64, 64))
    e = tb.explain(model.eval(), torch.rand(2, 1, 64, 64))
    assert e.weights.shape == (2, 1, 2, 64, 64)
    assert e.residual.abs().max() < 1e-4


def test_the_first_layer_of_conventional_networks_keeps_the_variance_of_its_outputs():
    colour, grey = (
        tb.create_model("conventional/resnet18", num_classes=3, in_channels=n) for n in (3, 1)
    )
    first, own = (next(m.network.parameters()).detach() for m in (colour, grey))
    assert (first.shape, own.shape) == ((64, 3, 7, 7), (64, 1, 7, 7))
    assert float(own.var() / first.var()) == pytest.approx(3, rel=0.15)
    assert grey.mean.shape == grey.deviation.shape == (1, 1, 1)


@pytest.mark.parametrize("name", ["resnet18", "mini", "timm/resnet18", "v2/convnext_tiny_pn"])
@pytest.mark.parametrize("channels", [0, 1.0, "1", True])
def test_in_channels_is_checked(name, channels):
    with pytest.raises(ValueError, match=r"`in_channels` \(=.*\) must be an integer of at least 1"):
        tb.create_model(name, num_classes=2, in_channels=channels)
    with pytest.raises(ValueError, match=r"`in_chans` \(=1\) is `in_channels` here"):
        tb.create_model(name, num_classes=2, in_chans=1)


def test_options_that_a_network_does_not_take_are_named():
    with pytest.raises(TypeError, match=r"`options` \(.*widht=8\) must suit mini: .*'widht'"):
        tb.create_model("mini", num_classes=2, widht=8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"channels": 2}, r"`channels` \(=2\) must be 1 \(grey\) or 3"),
        ({"options": {"in_channels": 1}}, "must leave it to the setting `channels`"),
        ({"options": {"in_chans": 1}}, "must leave it to the setting `channels`"),
        ({"channels": 1, "augment": ("lighting",)}, "without lighting, which varies colours"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        TrainConfig(data="shapes", arch="mini", **changes)


@pytest.fixture(scope="module")
def trained(colourful, tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    augment = ("padded_crop", "colour_jitter", "rand_augment", "erase")
    settings = config(data=str(colourful), channels=1, epochs=10, augment=augment)
    train.train(settings, out, console=QUIET)
    return out / "model.safetensors"


def test_training_in_grey_learns_and_is_tested_in_grey(trained, colourful, run):  # noqa: F811
    model = tb.load(trained)
    assert model.in_channels == 1
    split = open_as_trained(model, colourful)
    assert split.test.pixels.shape[1] == 1
    code, out, _ = run("evaluate", "--model", trained, "--data", colourful)
    assert (code, "100.00% of 12 images" in out) == (0, True)


def test_colour_files_are_explained_in_grey(trained, colourful, tmp_path, run):  # noqa: F811
    code, out, _ = run(
        "explain", colourful / "val/left/00.png", "--model", trained, "--out", tmp_path / "e"
    )
    assert (code, "left" in out) == (0, True)
    with Image.open(tmp_path / "e" / "00-left.png") as picture:
        red, green, blue, _ = picture.convert("RGBA").split()
        assert red.tobytes() == green.tobytes() == blue.tobytes()


@pytest.mark.parametrize("name", ["mini", "conventional/mini"])
def test_every_method_explains_grey_images(name):
    pytest.importorskip("lime")
    torch.manual_seed(0)
    model = tb.create_model(name, num_classes=3, in_channels=1, width=4, input_size=24)
    if name == "mini":
        tb.calibrate(model, torch.rand(4, 1, 24, 24))
    subject = to_explain(model.eval())
    images = torch.rand(2, 1, 24, 24)
    chosen = [m for m in choose_methods(["all"], model) if name == "mini" or not m.inherent]
    assert len(chosen) > 10
    for method in chosen:
        maps = method(subject, images, [0, 2])
        assert maps.shape == (2, 2, 24, 24), method.name
        assert torch.isfinite(maps).all(), method.name


def test_fine_tuning_keeps_the_channels(trained, colourful, tmp_path):
    settings = config(data=str(colourful), start_from=str(trained), epochs=1)
    with pytest.raises(ValueError, match=r"`channels` \(=3\) must be 1, as the images of"):
        train.train(settings, tmp_path / "no", console=QUIET)
    settings = config(data=str(colourful), start_from=str(trained), epochs=1, channels=1)
    assert train.train(settings, tmp_path / "yes", console=QUIET).in_channels == 1
