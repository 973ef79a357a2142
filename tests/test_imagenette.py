"""`torchbcos reproduce imagenette`: its experiments, inner units, bundle and page."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

import torchbcos as tb
from cases import caller, draw_colours
from study_pages import rows, section, write_result
from torchbcos import checkpoint
from torchbcos.data import open_data
from torchbcos.reproduce import Experiment, Trial, choose_study, run_all, units
from torchbcos.reproduce.imagenet import ARCHITECTURES
from torchbcos.reproduce.imagenette import EXPERIMENTS
from torchbcos.reproduce.imagenette_page import write_page

ROOT = Path(__file__).parent.parent
QUIET = Console(quiet=True)
IDS = (
    "n01440764", "n02102040", "n02979186", "n03000684", "n03028079", "n03394916", "n03417042",
    "n03425413", "n03445777", "n03888257",
)  # fmt: skip
NAMES = (
    "tench", "English springer", "cassette player", "chain saw", "church", "French horn",
    "garbage truck", "gas pump", "golf ball", "parachute",
)  # fmt: skip
# A small network that tells colours apart within a second.
SMALL = (
    "arch=mini", 'options={width=16, norm="uncentred", max_out=1}', "epochs=12", "batch=20",
    "lr=1e-2", "warmup=0", "augment=[]", "precision=32-true", "size=0", "train_sizes=[8, 8, 16]",
    "test_every=4", "weight_rms=0.0",
)  # fmt: skip


@pytest.fixture(scope="module")
def colours(tmp_path_factory):
    """Ten classes, each of one colour, in folders as Imagenette comes."""
    root = tmp_path_factory.mktemp("colours")
    return draw_colours(root, {"train": 8, "val": 3}, IDS, 16)


@pytest.fixture(scope="module")
def finished(colours, tmp_path_factory):
    """A trial with inner units and a bundle, run to its end."""
    e = Experiment(
        "units", "imagenette-resnet34-norm", "a small network", units=("0", "12"), bundle="tiny"
    )
    out = tmp_path_factory.mktemp("out")
    config = e.config(str(colours), SMALL)
    trial = Trial(e, config, out, str(colours), grids=2, slow_grids=1, smooth=15)
    assert [ended.code for ended in run_all([trial], 1, QUIET)] == [0]
    return trial


# The experiments.


def test_each_architecture_comes_in_three_kinds_trained_alike():
    reported = {
        "vgg11": (69.0, 69.6), "resnet34": (73.3, 71.7), "densenet121": (74.4, 73.3),
        "inception_v3": (77.3, 75.4),
    }  # fmt: skip
    assert ARCHITECTURES.keys() == reported.keys()
    for arch, (conventional, bcos) in reported.items():
        three = [EXPERIMENTS[arch + end] for end in ("-conventional", "", "-norm")]
        assert [e.paper for e in three] == [conventional, bcos, None]
        assert all(e.compared for e in three)
        configs = [e.config("data") for e in three]
        assert {c.arch.removeprefix("conventional/").removesuffix("_bn") for c in configs} == {arch}
        assert [c.arch.startswith("conventional/") for c in configs] == [True, False, False]
        assert [c.options.get("norm") for c in configs] == [None, None, "uncentred"]
        free = {"arch", "options", "lr", "weight_rms", "weight_rms_in"}
        first, *others = ({k: v for k, v in c.as_json().items() if k not in free} for c in configs)
        assert others == [first, first]
        assert configs[0].size == (299 if arch == "inception_v3" else 224)


def test_the_ablation_changes_units_and_growth():
    base = EXPERIMENTS["densenet121"].config("data").as_json()
    for name, options in (("one-unit", {"max_out": 1}), ("growth22", {"growth_rate": 22})):
        other = EXPERIMENTS[f"densenet121-{name}"].config("data").as_json()
        assert {k: v for k, v in other.items() if v != base[k]} == {"options": options}


def test_slow_methods_are_scored_on_fewer_grids(tmp_path):
    study = choose_study("imagenette")
    e = EXPERIMENTS["resnet34"]
    how = {"grids": study.grids, "slow_grids": study.slow_grids, "slow": study.slow}
    wanted = Trial(e, e.config("data"), tmp_path, "data", **how).wanted()
    assert {n for n, grids in wanted.items() if grids == 20} == {
        "intgrad", "smoothgrad", "lime", "rise", "occlusion",
    }  # fmt: skip
    assert {n for n, grids in wanted.items() if grids == 250} == wanted.keys() - {
        "intgrad", "smoothgrad", "lime", "rise", "occlusion",
    }  # fmt: skip
    assert 250 * 9 < 3925  # no image is used twice
    assert study.smooth == 15


def test_the_list_and_mistakes(reproduce, colours):
    code, out, _ = reproduce("imagenette", "--list")
    assert code == 0
    assert len(out.splitlines()) == len(EXPERIMENTS) == 16
    assert re.search(r"resnet34 +imagenette-resnet34 .*paper, ImageNet: 71.7 %", out)
    for arguments, words in {
        (): "`--data` is missing: name a folder with Imagenette",
        ("--only", "resnet34,resnet43"): "`--only` (='resnet43')",
        ("--page",): "`--results` (='results/imagenette') must be a folder",
    }.items():
        code, _, err = reproduce("imagenette", *arguments)
        assert code == 2
        assert words in err


# One of them, run.


def test_the_classes_of_imagenette_have_names(colours, tmp_path):
    assert open_data(colours).classes == NAMES
    for part in ("train", "val"):
        for name in (IDS[0], "zebra"):
            (tmp_path / part / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(tmp_path / part / name / "1.png")
    assert open_data(tmp_path).classes == (IDS[0], "zebra")


def test_maps_are_smoothed_as_for_imagenet(finished):
    found = json.loads(finished.result.read_text())
    ours = found["localisation"]["methods"]["ours"]
    scores = json.loads((finished.folder / "scores/ours.json").read_text())
    assert (ours["smooth"], scores["identity"]["smooth"]) == (15, 15)
    scores = np.array(scores["scores"])
    assert ours["median_of_first"] == pytest.approx(np.median(scores[:1]))
    assert found["curve"]["epoch"] == [4, 8, 12]
    assert finished.finished()


def test_inner_units_are_described_by_numbers_alone(finished, colours):
    found = json.loads(finished.units_result.read_text())
    model = tb.load(finished.folder / "model.safetensors")
    images = open_data(colours).test
    assert (found["images"], found["top"]) == (30, 30)
    for name in ("0", "12"):
        captured = []
        hook = model.network.get_submodule(name).register_forward_hook(
            lambda _, __, out, into=captured: into.append(out)
        )
        with torch.no_grad():
            model(images.pixels / 255)
        hook.remove()
        peaks = captured[0].amax((2, 3))  # [30, units]
        layer = found["layers"][name]
        assert layer["units"] == peaks.shape[1]
        assert layer["map"] == list(captured[0].shape[2:])
        most = peaks.amax(0).argsort(descending=True)[:5].tolist()
        assert [int(unit) for unit in layer["most_active"]] == most
        for unit, u in layer["most_active"].items():
            best = peaks[:, int(unit)].sort(descending=True).values[:5]
            assert u["activations"] == pytest.approx(best.tolist(), rel=1e-3)
            assert u["classes"] == [[name, 3] for name in NAMES]  # all 30 are its best ones
    page = (finished.folder / "units.html").read_text()
    assert "data:image" in page
    finished.units_result.unlink()
    assert not finished.finished()
    assert [ended.code for ended in run_all([finished], 1, QUIET)] == [0]
    assert json.loads(finished.units_result.read_text())["layers"] == found["layers"]


def test_units_of_few_classes_are_found_and_counted(finished, colours, monkeypatch, tmp_path):
    monkeypatch.setattr(units, "TOP", 3)
    model = tb.load(finished.folder / "model.safetensors")
    images = open_data(colours).test
    found = units.describe_units(model, images, ["0", "12"], tmp_path, console=QUIET)
    late = found["layers"]["12"]
    assert late["skewed"] >= len(late["most_skewed"]) == 5
    for u in late["most_skewed"].values():
        assert u["q"] <= 0.05
        # All of the three best are of one class; there are ten equally frequent ones.
        assert [count for _, count in u["classes"]] == [3]
        assert u["bits"] == pytest.approx(np.log2(10), abs=1e-3)
    results = tmp_path / "results"
    write_result(results, EXPERIMENTS["resnet34-norm"], 0.9, {})
    about = {"what": "a network", "accuracy": 0.9, "images": 30}
    (results / "neurons.json").write_text(json.dumps({**about, **found}))
    write_page(results, tmp_path / "docs")
    page = (tmp_path / "docs" / "imagenette.md").read_text()
    histogram = rows(page, "Class histograms")
    unit, u = next(iter(late["most_skewed"].items()))
    assert f"unit {unit} of `12`" in section(page, "Class histograms")
    assert histogram[u["classes"][0][0]][-1] == "3"
    assert sum(int(counts[-1]) for counts in histogram.values()) == 3


def test_a_bundle_beside_the_others_is_all_that_a_model_by_name_needs(
    finished, colours, monkeypatch, tmp_path
):
    bundle = json.loads(finished.result.read_text())["bundle"]
    file = finished.out / "tiny.safetensors"
    assert (
        bundle["bytes"]
        == file.stat().st_size
        < 0.6 * (finished.folder / "model.safetensors").stat().st_size
    )
    beside = tmp_path / "imagenette.safetensors"
    beside.write_bytes(file.read_bytes())
    monkeypatch.setattr(checkpoint, "_bundled", lambda: {"cifar10": file, "imagenette": beside})
    assert checkpoint.default_name() == "imagenette"
    model = tb.load("imagenette")
    assert model.classes == NAMES
    assert model.provenance["config"]["data"] == str(colours)
    images = open_data(colours).test
    right = (model(images.pixels / 255).argmax(1) == images.labels).double().mean().item()
    assert bundle["accuracy"] == pytest.approx(right)


def test_the_bundle_is_evaluated_by_its_name(finished, colours, monkeypatch, capsys):
    file = finished.out / "tiny.safetensors"
    monkeypatch.setattr(checkpoint, "_bundled", lambda: {"imagenette": file})
    evaluate = caller(monkeypatch, capsys, "evaluate")
    code, out, _ = evaluate("--model", "imagenette", "--data", colours, "--json")
    assert code == 0
    bundle = json.loads(finished.result.read_text())["bundle"]
    assert json.loads(out)["accuracy"] == pytest.approx(bundle["accuracy"])


# The page.


def test_the_page_says_what_the_files_say(tmp_path, finished):
    folder = tmp_path / "results"
    ours = {"ours": ("Ours", 0.92, 250)}
    others = {"ixg": ("IxG", 0.61, 250), "gradcam": ("GradCAM", 0.93, 250)}
    slow = {"lime": ("LIME", 0.94, 20)}
    write_result(folder, EXPERIMENTS["resnet34-conventional"], 0.9100, {**others, **slow})
    write_result(
        folder, EXPERIMENTS["resnet34"], 0.8750, {**ours, "ixg": ("IxG", 0.5, 250), **slow}
    )
    norm = {"ours": ("Ours", 0.85, 250)}
    write_result(folder, EXPERIMENTS["resnet34-norm"], 0.9010, norm, config={"epochs": 60})
    write_result(folder, EXPERIMENTS["vgg11"], 0.88, ours)
    write_result(folder, EXPERIMENTS["densenet121-conventional"], 0.92, {})
    write_result(folder, EXPERIMENTS["densenet121-growth22"], 0.9152, ours)
    write_result(folder, EXPERIMENTS["vgg11_bn-conventional"], 0.9, {})
    bundle = {"name": "imagenette", "bytes": 13 * 2**20, "accuracy": 0.9144, "loss": 0.1}
    write_result(folder, EXPERIMENTS["small"], 0.9146, ours, bundle=bundle)
    (folder / "neurons.json").write_text(finished.units_result.read_text())
    tried = write_result(
        folder / "tries", EXPERIMENTS["resnet34-norm"], 0.8912, norm, config={"lr": 0.002}
    )
    tried.rename(tried.with_name("higher-rate.json"))
    write_result(
        folder / "tries", EXPERIMENTS["resnet34-conventional"], 0.9150, {}
    )  # the same once more

    written = write_page(folder, tmp_path / "docs")
    page = (tmp_path / "docs" / "imagenette.md").read_text()
    accuracy = rows(page, "Accuracy (Tab. 2)")
    assert accuracy["ResNet-34"] == [
        "91.00", "87.50", "-3.50", "90.10", "-0.90", "73.3", "71.7", "-1.6",
    ]  # fmt: skip
    assert accuracy["VGG-11"] == ["missing", "88.00", "", "missing", "", "69.0", "69.6", "+0.6"]
    assert "at most 1.0 points below in 1 of 1 architectures: ResNet-34 -0.90." in page
    assert "The best B-cos network: DenseNet-121, B-cos, growth 22, 91.52 %" in page
    assert "With batch norms the conventional one has 90.00 %" in page
    assert "scored on 20 or 250 grids" in page
    assert "densenet121, densenet121-norm, inception_v3-conventional" in page  # not run yet
    assert "- resnet34-norm: epochs=60" in page

    methods = rows(page, "ResNet-34")
    assert methods["Ours"] == ["0.920 (0.950)", "0.850", "–", "250"]
    assert methods["LIME"] == ["0.940", "–", "0.940", "20"]
    assert methods["GradCAM"] == ["–", "–", "0.930", "250"]
    words = section(page, "ResNet-34")
    assert "RISE, Occlusion (B-cos, no norms); " in words  # not scored
    # LIME's 0.94 is compared with what ours has on the first 20 grids, 0.95.
    assert (
        "B-cos, no norms: ours has 0.920; on the same network it is above 2 of 2 post-hoc methods, "
        "the nearest of which, LIME, is 0.010 below; on the conventional one it is above 2 of 3 "
        "post-hoc methods, the nearest of which, GradCAM, is 0.010 above."
    ) in words
    assert "B-cos, norms: ours has 0.850, below 0.9; on the conventional one" in words
    assert "Missing." in section(page, "Inception-v3")

    ablation = rows(page, "Units and growth")
    assert ablation["2 units, growth 22"] == [
        "6.9 M", "91.52", "-0.48", "0.920", "8.0 M", "73.2",
    ]  # fmt: skip
    assert ablation["one unit, growth 32"][1] == "missing"
    bundled = rows(page, "The bundled model")
    assert bundled["accuracy of the float16 weights, computed in float32"] == ["91.44 %"]
    assert bundled["file, in float16"] == ["13.0 MiB"]
    assert "accuracy before rounding, computed in float32" in bundled  # its loss is not the log's
    first = json.loads(finished.units_result.read_text())["layers"]["12"]["most_active"]
    assert rows(page, "`12`: 48 units of 2×2 positions").keys() >= first.keys()
    assert accuracy["resnet34-conventional"] == ["91.00, 91.50", "–"]  # the second table
    assert "by: ResNet-34 from -1.40 to -0.90, on average -1.15." in page
    tries = rows(page, "How the recipes were found")
    assert tries["higher-rate"][:3] == ["resnet34-norm", "lr=0.002", "89.12"]

    names = ["-no-norm", "-conventional", "-loss"]  # ours alone, with norms, is nothing to compare
    assert [p.name for p in written[1:]] == [f"imagenette{name}.png" for name in names]
    for path in written[1:]:
        assert f"pictures/{path.name}" in page
        with Image.open(path) as picture:
            assert min(picture.size) > 300


def test_a_page_of_little(tmp_path):
    write_result(tmp_path, EXPERIMENTS["densenet121-one-unit"], 0.9, {})
    assert [p.name for p in write_page(tmp_path, tmp_path / "docs")] == [
        "imagenette.md", "imagenette-loss.png",
    ]  # fmt: skip
    page = (tmp_path / "docs" / "imagenette.md").read_text()
    assert rows(page, "Units and growth")["one unit, growth 32"][1] == "90.00"
    assert "Missing." in section(page, "Inner units")
    assert "What training on a small set needs" not in page


def test_the_page_in_the_documentation_is_the_one_of_the_results(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    if not any((ROOT / "results/imagenette").glob("*.json")):
        pytest.skip("results/imagenette holds no results yet")
    write_page(Path("results/imagenette"), tmp_path)
    assert (tmp_path / "imagenette.md").read_text() == (ROOT / "docs/imagenette.md").read_text()
