"""Data as a model's training saw it: how much of each image, and without which files."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import torchbcos as tb
from test_cli import assert_one_sentence, run  # noqa: F401 (a fixture)
from torchbcos import cli, evaluate
from torchbcos.data import Images, imagenet_classes, open_data
from torchbcos.evaluate import open_as_trained

CLASSES = ("bright", "dark")


@pytest.fixture
def place(tmp_path):
    """A model trained with half of each test image, and images whose border is of other colours."""
    for part in ("train", "val"):
        for k, name in enumerate(CLASSES):
            folder = tmp_path / "set" / part / name
            folder.mkdir(parents=True)
            for i in range(4):
                pixels = np.full((32, 32, 3), 250 * k, np.uint8)
                pixels[8:24, 8:24] = 250 * (1 - k) + i
                Image.fromarray(pixels).save(folder / f"{i}.png")
    torch.manual_seed(0)
    model = tb.create_model("mini", classes=CLASSES, width=4, input_size=16)
    tb.calibrate(model, torch.rand(4, 3, 16, 16))
    model.provenance = {"config": {"test_part": 0.5, "bad": "skip"}}
    tb.save(model, tmp_path / "m.safetensors")
    return tmp_path


def test_as_much_of_each_test_image_is_seen_as_in_training(place):
    model = tb.load(place / "m.safetensors")
    split = open_as_trained(model, place / "set")
    assert split.test.size == (16, 16)
    assert split.test.pixels[:4].min() == 250  # the centre alone
    assert split.test.pixels[4:].max() == 3
    for own in ({}, {"config": "bright.yaml"}):
        model.provenance = own
        assert open_as_trained(model, place / "set").test.pixels[:4].min() == 0


@pytest.mark.parametrize("memory", [4.0, 0.0])
def test_damaged_files_are_left_out_if_they_were_in_training(place, memory, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "open_data", lambda *a, **k: open_data(*a, memory=memory, **k))
    model = tb.load(place / "m.safetensors")
    for only in ("train", "test"):
        damaged = place / "set" / only.replace("test", "val") / "bright" / "0.png"
        damaged.write_bytes(b"no image")
        split = open_as_trained(model, place / "set", only=only, console=cli.errors)
        assert len(getattr(split, only)) == 7
        assert "skipped 1, the first:" in capsys.readouterr().err
    model.provenance = {}
    if memory:
        with pytest.raises(ValueError, match="1 of 8 images cannot be read"):
            open_as_trained(model, place / "set")


@pytest.mark.parametrize(
    "command",
    [
        ["evaluate"],
        ["localise", "--methods", "ixg", "--grids", "1", "--n", "2", "--out", "out"],
        ["neurons", "--out", "units"],
    ],
)
def test_commands_open_data_as_training_did(place, command, monkeypatch):
    seen = []

    def opened(*arguments, **options):
        seen.append(options)
        raise ValueError("enough")

    monkeypatch.setattr(evaluate, "open_data", opened)
    monkeypatch.chdir(place)
    command = [*command, "--model", "m.safetensors", "--data", "set"]
    with pytest.raises(ValueError, match="enough"):
        CliRunner().invoke(cli.app, command, catch_exceptions=False)
    assert seen == [{"bad": "skip", "part": 0.5, "only": "test", "channels": 3}]


@pytest.mark.parametrize(
    "command",
    [
        ["evaluate"],
        ["localise", "--methods", "ixg", "--grids", "1", "--n", "2", "--out", "out"],
    ],
)
@pytest.mark.parametrize("outputs", [1, 3])
def test_another_number_of_classes_is_one_sentence(place, command, outputs, run):  # noqa: F811
    model = tb.create_model("mini", num_classes=outputs, width=4, input_size=16)
    tb.save(tb.calibrate(model, torch.rand(4, 3, 16, 16)), place / "n.safetensors")
    code, out, err = run(*command, "--model", place / "n.safetensors", "--data", place / "set")
    result = (code, out, err.removeprefix("n: 8 images\n"))
    assert_one_sentence(result, "has 2 classes", f"has {outputs} outputs")


def test_names_of_classes_are_not_needed(place, run):  # noqa: F811
    model = tb.create_model("mini", num_classes=2, width=4, input_size=16)
    tb.save(tb.calibrate(model, torch.rand(4, 3, 16, 16)), place / "n.safetensors")
    code, out, _ = run("evaluate", "--model", place / "n.safetensors", "--data", place / "set")
    assert code == 0
    assert "of 8 images" in out


def test_a_model_of_images_that_are_not_square_is_refused(place, run):  # noqa: F811
    model = tb.create_model("mini", classes=CLASSES, width=4, input_size=(16, 24))
    tb.save(tb.calibrate(model, torch.rand(4, 3, 16, 24)), place / "n.safetensors")
    for command in (["evaluate"], ["neurons", "--out", place / "units"]):
        result = run(*command, "--model", place / "n.safetensors", "--data", place / "set")
        assert_one_sentence(result, "16×24 px", "torchbcos.data.Images")
    assert open_as_trained(model, place / "set", 16).test.size == (16, 16)
    images = Images(torch.zeros(3, 3, 16, 24, dtype=torch.uint8), torch.tensor([0, 1, 1]))
    assert 0 <= evaluate.evaluate(model, images)[0] <= 1


def test_the_folders_of_imagenet_become_the_names_of_its_classes(tmp_path):
    """Its ids in their order are its numbers; thousand others stay what they are."""
    numbers = {0: "n01440764", 217: "n02102040", 482: "n02979186", 491: "n03000684",
               497: "n03028079", 566: "n03394916", 569: "n03417042", 571: "n03425413",
               574: "n03445777", 701: "n03888257"}  # fmt: skip
    folders, last = [], 0
    for number in range(1000):
        last = int(numbers[number][1:]) if number in numbers else last + 1
        folders.append(f"n{last:08}")
    picture = Image.new("RGB", (4, 4))
    for folder in folders:
        (tmp_path / "val" / folder).mkdir(parents=True)
        picture.save(tmp_path / "val" / folder / "0.png")
    classes = open_data(tmp_path, 4, only="test").classes
    assert classes == imagenet_classes()
    assert [classes[k] for k in (0, 217, 999)] == ["tench", "English springer", "toilet tissue"]
    (tmp_path / "val" / folders[300]).rename(tmp_path / "val" / "n00000000")
    others = open_data(tmp_path, 4, only="test").classes
    assert others[:2] == ("n00000000", "n01440764")


def test_each_class_counts_the_same_in_the_balanced_accuracy(place, run):  # noqa: F811
    model = tb.load(place / "m.safetensors")
    for i in range(3):
        (place / "set" / "val" / "dark" / f"{i}.png").unlink()
    code, out, _ = run(
        "evaluate", "--model", place / "m.safetensors", "--data", place / "set", "--json"
    )
    assert code == 0
    found = json.loads(out)
    test = open_as_trained(model, place / "set").test
    pixels, labels = test.batch(torch.arange(5))
    right = (model(pixels).argmax(1) == labels).float()
    assert labels.tolist() == [0, 0, 0, 0, 1]
    each = [right[:4].mean().item(), right[4].item()]
    assert [c["accuracy"] for c in found["classes"]] == pytest.approx(each)
    assert [(c["name"], c["images"]) for c in found["classes"]] == [("bright", 4), ("dark", 1)]
    assert found["balanced_accuracy"] == pytest.approx(sum(each) / 2)
    assert found["accuracy"] == pytest.approx(right.mean().item())
    assert found["images"] == 5
