"""`torchbcos reproduce imagenet`: its experiments, one of them in small, and its page."""

import json

import pytest
from PIL import Image

from cases import draw_colours
from study_pages import rows, section, write_result
from torchbcos import train
from torchbcos.reproduce import choose_study
from torchbcos.reproduce.imagenet import EXPERIMENTS, TABLE_B1
from torchbcos.reproduce.imagenet_page import write_page

# A small network that tells colours apart; its images are read from files in every step.
SMALL = (
    "arch=mini", 'options={width=16, norm="uncentred", max_out=1}', 'preset=""', "epochs=12",
    "batch=20", "lr=1e-2", "milestones=[9]", "test_every=6", "augment=[]", "size=16", "memory=0",
    "test_part=1",
)  # fmt: skip


def test_the_paper_s_networks_and_accuracies():
    reported = {name: e.paper for name, e in EXPERIMENTS.items()}
    growths = {20: 72.8, 22: 73.2, 24: 73.6, 26: 73.7, 28: 74.0, 30: 73.9}
    assert reported == {
        "vgg11-conventional": 69.0, "vgg11": 69.6,
        "resnet34-conventional": 73.3, "resnet34": 71.7,
        "densenet121-conventional": 74.4, "densenet121": 73.3,
        "inception_v3-conventional": 77.3, "inception_v3": 75.4,
        "densenet121-plus-conventional": None, "densenet121-plus": 74.4,
        "densenet121-one-unit": 72.6,
        **{f"densenet121-growth{g}": accuracy for g, accuracy in growths.items()},
    }  # fmt: skip
    for name, e in EXPERIMENTS.items():
        c = e.config("data")
        conventional = name.endswith("-conventional")
        assert c.arch.startswith("conventional/") is conventional
        assert c.preset == ("" if conventional else "paper")
        assert "norm" not in c.options
        plus = "plus" in name
        assert (c.epochs, c.batch, c.lr) == ((200, 128, 1e-3) if plus else (100, 256, 2.5e-4))
        assert e.compared is (name.split("-")[1:] in ([], ["conventional"]))
    for name in TABLE_B1.keys() - {"densenet121", "densenet121-conventional"}:
        options = EXPERIMENTS[name].config("data").options
        growth = name.removeprefix("densenet121-growth")
        assert options == ({"growth_rate": int(growth)} if growth.isdigit() else {"max_out": 1})


def test_the_game_is_the_paper_s():
    study = choose_study("imagenet")
    assert (study.grids, study.slow_grids, study.smooth, study.slow) == (500, 100, 15, ())


def test_the_list_stands_in_columns(reproduce):
    code, out, _ = reproduce("imagenet", "--list")
    lines = out.splitlines()
    assert (code, len(lines)) == (0, len(EXPERIMENTS))
    assert len({line.index(" imagenet-") for line in lines}) == 1
    assert len({line.index("  DenseNet-121") for line in lines if "  DenseNet" in line}) == 1


def test_a_network_that_was_trained_by_itself_is_measured_as_it_is(reproduce, tmp_path):
    """As one that several GPUs trained."""
    data = draw_colours(tmp_path / "data", {"train": 8, "val": 3}, "abcdefghij", 16)
    folder = tmp_path / "out" / "runs" / "resnet34"
    train.train(EXPERIMENTS["resnet34"].config(str(data), SMALL), folder, workers=0)
    model = (folder / "model.safetensors").read_bytes()
    code, out, err = reproduce(
        "imagenet", *SMALL, "--data", data, "--out", tmp_path / "out", "--only", "resnet34",
        "--methods", "ixg", "--grids", 2, "--slow-grids", 1,
    )  # fmt: skip
    assert code == 0, err
    assert "71.7 %" in out
    assert (folder / "model.safetensors").read_bytes() == model
    found = json.loads((tmp_path / "out" / "results" / "resnet34.json").read_text())
    assert found["images"] == 30
    assert found["curve"]["epoch"] == [6, 12]
    assert found["localisation"]["methods"].keys() == {"ours", "ixg"}
    assert found["localisation"]["methods"]["ours"]["smooth"] == 15


def test_the_page_says_what_the_files_say(tmp_path):
    folder = tmp_path / "results"
    ours, others = {"ours": ("Ours", 0.95, 500)}, {"gradcam": ("GradCAM", 0.6, 500)}
    for name, accuracy, methods in (
        ("resnet34-conventional", 0.7330, others),
        ("resnet34", 0.7170, {**ours, **others, "lime": ("LIME", 0.3, 20)}),
        ("densenet121-conventional", 0.7440, {}),
        ("densenet121-plus", 0.7452, ours),
        ("densenet121-plus-conventional", 0.75, {}),
        ("densenet121-growth24", 0.7360, ours),
    ):
        write_result(folder, EXPERIMENTS[name], accuracy, methods)
    written = write_page(folder, tmp_path / "docs")
    page = (tmp_path / "docs" / "imagenet.md").read_text()
    accuracies = rows(page, "Accuracy (Tab. 2)")
    assert accuracies["ResNet-34"] == ["73.30", "71.70", "-1.60", "73.3", "71.7", "-1.6"]
    assert accuracies["DenseNet-121, training⁺"][:3] == ["75.00", "74.52", "-0.48"]
    assert accuracies["VGG-11"][:3] == ["missing", "missing", ""]
    methods = rows(page, "ResNet-34")
    assert methods["Ours"] == ["0.950 (0.980)", "–", "500"]
    assert methods["GradCAM"] == ["0.600", "0.600", "500"]
    assert (
        "B-cos: ours has 0.950; on the same network it is above 2 of 2 post-hoc methods, the "
        "nearest of which, GradCAM, is 0.350 below; on the conventional one it is above 1 of 1 "
        "post-hoc methods, the nearest of which, GradCAM, is 0.350 below."
    ) in section(page, "ResNet-34")
    assert "Missing." in section(page, "VGG-11")
    ablation = rows(page, "Units and growth")
    assert len(ablation) == len(TABLE_B1)
    assert ablation["2 units, growth 24"] == ["6.9 M", "73.60", "-0.80", "0.950", "9.4 M", "73.6"]
    assert "**Not run yet: vgg11-conventional, vgg11, densenet121," in page
    names = ["imagenet-bcos.png", "imagenet-conventional.png", "imagenet-loss.png"]
    assert [p.name for p in written[1:]] == names
    for path in written[1:]:
        assert f"pictures/{path.name}" in page
        with Image.open(path) as picture:
            assert min(picture.size) > 300


def test_without_results_there_is_no_page(tmp_path):
    with pytest.raises(ValueError, match="holds no result of an experiment"):
        write_page(tmp_path, tmp_path / "docs")
    assert not (tmp_path / "docs").exists()
