"""`torchbcos neurons` and `neurons show`: files, pages, tables; and one sentence for mistakes."""

import json
import re
import shutil

import pytest
import torch
from PIL import Image

import torchbcos as tb
from test_cli import assert_one_sentence, run  # noqa: F401 (a fixture)
from torchbcos import data, neurons

CLASSES = ("bright", "dark")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a small model, a folder of images, and the neurons of both."""
    folder = tmp_path_factory.mktemp("place")
    made = data.shapes(40, size=24, seed=1)
    for i, image in enumerate(made.images):
        image = image * 0.3 + (0.7 if i % 2 == 0 else 0)
        path = folder / "set" / ("train", "val")[i // 20] / CLASSES[i % 2] / f"{i:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 255).byte().permute(1, 2, 0).numpy()).save(path)
    torch.manual_seed(0)
    model = tb.create_model("mini", classes=CLASSES, width=4, input_size=24)
    tb.save(tb.calibrate(model, made.images[:8]), folder / "m.safetensors")
    return folder


@pytest.fixture
def collected(run, place):  # noqa: F811
    def collect(*arguments):
        options = ("--model", place / "m.safetensors", "--data", place / "set", *arguments)
        return run("neurons", *options)

    return collect


@pytest.fixture
def units(collected, tmp_path):
    assert collected("--out", tmp_path / "units", "--top", 6)[0] == 0
    return tmp_path / "units"


def test_a_file_of_all_layers_and_test_images(collected, tmp_path, place):
    code, out, err = collected("--top", 5, "--out", "units", "--batch", 3)
    assert (code, err) == (0, "")
    found = neurons.Neurons(tmp_path / "units")
    assert repr(found).replace(str(tmp_path) + "/", "") in out
    assert found.classes == CLASSES
    assert (found.count, found.top, len(found.layers)) == (20, 5, 7)
    assert found.about["split"] == "test"
    assert found.labels.bincount().tolist() == [10, 10]


def test_options_reach_the_pass(collected, tmp_path):
    assert collected("--layers", "3, 1*", "--split", "train", "--active-above", 0.5)[0] == 0
    found = neurons.Neurons(tmp_path / "neurons.safetensors")
    assert list(found.layers) == ["3", "12", "15", "18"]
    assert (found.active_above, found.about["split"], found.top) == (0.5, "train", 50)


def test_a_page_of_one_unit(run, units, tmp_path):  # noqa: F811
    code, out, err = run("neurons", "show", units, "--layer", "6", "--unit", 2, "--out", "p.html")
    assert (code, err) == (0, "")
    assert "Open p.html" in out
    page = (tmp_path / "p.html").read_text()
    assert page.count("<section") == 1
    assert "6 · unit 2" in page


def test_pages_of_the_highest_and_of_the_most_skewed(run, units, tmp_path):  # noqa: F811
    code, out, err = run("neurons", "show", units, "--top", 2, "--json", "--second")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["page"] == "neurons.html"
    found = neurons.Neurons(units)
    expected = [(layer, r.unit) for layer in found.layers for r in found.most_active(layer, 2)]
    assert [(row["layer"], row["unit"]) for row in document["units"]] == expected
    assert (tmp_path / "neurons.html").read_text().count("<section") == 14
    code, out, err = run("neurons", "show", units, "--skewed", 3, "--json", "--crop", 7)
    assert (code, err) == (0, "")
    rows = json.loads(out)["units"]
    assert [row["bits"] for row in rows] == sorted((row["bits"] for row in rows), reverse=True)
    assert all(row["q"] <= 0.05 for row in rows)
    assert len(rows) == 3


WRONG = {
    "no data": ((), "`--data` is needed"),
    "no such folder": (("--data", "nowhere"), "nowhere is no folder"),
    "another split": (("--data", "shapes", "--split", "val"), "`--split` (='val')"),
    "no such layer": (("--layers", "nine"), "`layers` (='nine') matches no layer"),
    "no folder for it": (("--out", "no/such/folder"), "its folder does not exist"),
    "a folder for a file": (("--out", "."), "`--out` (='.') is a folder"),
    "no number": (("--active-above", "nan"), "`active_above` (=nan) must be a number"),
    "no such model": (("--model", "nothing"), "nothing does not exist"),
}


@pytest.mark.parametrize(("arguments", "words"), WRONG.values(), ids=WRONG)
def test_mistakes_get_one_sentence(run, collected, arguments, words):  # noqa: F811
    result = collected(*arguments) if arguments else run("neurons")
    assert_one_sentence(result, words)


WRONG_TO_SHOW = {
    "nothing": ((), "choose units by one of"),
    "two ways": (("--skewed", 1, "--top", 1), "choose units by one of"),
    "no layer": (("--unit", 1), "needs --layer"),
    "no number": (("--layer", "6", "--unit", "one"), "`--unit` (='one')"),
    "no such unit": (("--layer", "6", "--unit", 8), "`unit` (=8) must be from 0 to 7"),
    "no such layer": (("--layer", "7", "--top", 1), "`layer` (='7') is not in"),
    "another model": (("--top", 1, "--model", "cifar10"), "`model` is not the one"),
}


@pytest.mark.parametrize(("arguments", "words"), WRONG_TO_SHOW.values(), ids=WRONG_TO_SHOW)
def test_mistakes_in_showing_get_one_sentence(run, units, arguments, words, tmp_path):  # noqa: F811
    assert_one_sentence(run("neurons", "show", units, *arguments), words)
    assert not (tmp_path / "neurons.html").exists()


def test_an_unusable_page_is_noticed_before_the_work(run, units, monkeypatch):  # noqa: F811
    monkeypatch.setattr(neurons, "sheets", None)
    for out in ("nodir/x.html", "."):
        result = run("neurons", "show", units, "--top", 1, "--out", out)
        assert_one_sentence(result, f"`--out` (={out!r})")


def test_both_helps_have_an_example(run):  # noqa: F811
    for command in (("neurons",), ("neurons", "show")):
        code, out, err = run(*command, "--help")
        assert (code, err) == (0, "")
        assert re.search(rf"Example: +torchbcos {' '.join(command)} ", " ".join(out.split()))


def test_a_folder_of_data_with_the_name_of_a_bundled_model(run, place, tmp_path, monkeypatch):  # noqa: F811
    shutil.copytree(place / "set", tmp_path / "known")
    bundled = {"known": place / "m.safetensors"}
    monkeypatch.setattr("torchbcos.checkpoint._bundled", lambda: bundled)
    assert (
        run("neurons", "--model", "known", "--data", "known", "--out", "units", "--top", 2)[0] == 0
    )
    assert run("neurons", "show", "units", "--top", 1)[0] == 0


def test_brackets_in_class_names_are_shown(run, place, tmp_path):  # noqa: F811
    for split in ("train", "val"):
        for name in CLASSES:
            folder = tmp_path / "named" / split / f"[{name}]"
            folder.mkdir(parents=True)
            for path in (place / "set" / split / name).iterdir():
                (folder / path.name).write_bytes(path.read_bytes())
    model = tb.load(place / "m.safetensors")
    model.classes = ("[bright]", "[dark]")
    tb.save(model, tmp_path / "m")
    assert run("neurons", "--model", "m", "--data", "named", "--out", "u", "--top", 3)[0] == 0
    code, out, _ = run("neurons", "show", "u", "--layer", "6", "--unit", 2, "--out", "p[x].html")
    assert code == 0
    assert "Open p[x].html" in out
    assert re.search(r"\d \[(bright|dark)\]", out)


def test_files_that_keep_every_image_cannot_tell_skewed_units(collected, run, tmp_path):  # noqa: F811
    assert collected("--out", tmp_path / "all", "--top", 50)[0] == 0
    result = run("neurons", "show", tmp_path / "all", "--skewed", 3)
    assert_one_sentence(result, "keeps all 20 images for each unit", "--top well below")


def test_the_page_can_be_made_in_another_folder(run, place, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(place)
    options = ("--model", "m.safetensors", "--data", "set", "--layers", "3", "--top", 3)
    assert run("neurons", *options, "--out", tmp_path / "units")[0] == 0
    monkeypatch.chdir(tmp_path)
    assert run("neurons", "show", "units", "--top", 1)[0] == 0
    assert (tmp_path / "neurons.html").exists()
