"""`torchbcos train` and `evaluate`, run through the entry point."""

import json

import pytest
import torch

from cases import caller
from small_training import few_shapes
from torchbcos import evaluate, train
from torchbcos.recipe import list_recipes


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs `torchbcos ARGUMENTS` on a few images: its code, output and complaints."""
    monkeypatch.chdir(tmp_path)
    for module in (train, evaluate):
        monkeypatch.setattr(module, "open_data", lambda *_, **__: few_shapes())

    return caller(monkeypatch, capsys)


SMALL = ("options.width=4", "batch=16", "size=24", "epochs=2")


def test_a_recipe_is_trained_evaluated_resumed_and_tuned(run):
    code, out, err = run("train", "shapes", *SMALL, "--out", "a", "--pictures", 2, "--json")
    assert code == 0
    metrics = json.loads(out)
    assert metrics["epoch"] == 2
    assert err.count("epoch") == 2

    code, out, _ = run("evaluate", "--data", "shapes", "--model", "a/model.safetensors", "--json")
    assert code == 0
    assert json.loads(out)["accuracy"] == pytest.approx(metrics["test_accuracy"])

    code, out, err = run("train", "shapes", *SMALL, "--out", "a", "--resume", "--pictures", 2)
    assert (code, err) == (0, "")  # there was nothing left to do
    assert "a/model.safetensors: " in out

    tune = ("head_only=true", "--from", "a/model.safetensors", "--out", "b")
    assert run("train", "shapes", *SMALL, *tune)[0] == 0
    assert run("train", "shapes", *SMALL, "--out", "a", "--resume", "lr=1")[0] == 2


def test_brackets_in_paths_are_no_markup(run):
    small = (*SMALL[:-1], "epochs=1")
    for folder in ("odd [x]", "q[/x]"):
        code, out, _ = run("train", "shapes", *small, "--out", folder)
        assert code == 0
        assert f"{folder}/model.safetensors: " in out


@pytest.mark.parametrize("folder", ["é", "😀", 'odd "\\[x]'])
def test_a_model_of_any_name_is_tuned(run, folder):
    code, _, err = run("train", "shapes", *SMALL, "--from", f"{folder}/no")
    assert code == 2
    assert err.startswith(f"torchbcos: {folder}/no does not exist: ")


def test_a_folder_that_nothing_can_be_written_to_is_refused_before_the_training(
    run, monkeypatch, tmp_path
):
    (tmp_path / "f").touch()
    code, _, err = run("train", "shapes", *SMALL, "--out", "f/o")
    assert (code, err) == (
        2, "torchbcos: `--out` (='f/o') needs a folder where f is a file.\n"
    )  # fmt: skip
    monkeypatch.setattr("os.access", lambda *_: False)
    code, _, err = run("train", "shapes", *SMALL, "--out", "a")
    assert code == 2
    assert err.startswith("torchbcos: `--out` (='a'): . cannot be written to")


def test_an_interruption_while_images_are_read_is_named(run, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "open_data", interrupt)
    code, out, err = run("train", "shapes", *SMALL)
    assert (code, out, err) == (130, "", "torchbcos: interrupted.\n")


def test_too_little_memory_is_said_in_one_sentence(run, monkeypatch):
    monkeypatch.setattr(train, "open_data", lambda *_, **__: torch.empty(2**50, dtype=torch.uint8))
    code, _, err = run("train", "shapes", *SMALL)
    assert code == 2
    assert err == (
        "torchbcos: there is no memory for 1125899906842624 bytes more: use smaller images or "
        "batches.\n"
    )
    monkeypatch.setattr(train, "open_data", lambda *_, **__: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="size"):  # a mistake of ours is no user's
        run("train", "shapes", *SMALL)


def test_the_list_shows_every_recipe(run):
    code, out, err = run("train", "--list")
    assert (code, err) == (0, "")
    for name, words in list_recipes().items():
        assert any(line.startswith(f"{name} ") and words in line for line in out.splitlines())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "a recipe is missing: torchbcos train --list"),
        (("shaeps",), "did you mean shapes"),
        (("cifar10",), "`--data` is missing"),
        (("shapes", "bacth=3"), "`bacth` is no setting"),
        (("shapes", "lr=fast"), "`lr` (='fast') must be a number."),
        (("shapes", "batch=4096"), "`batch` (=4096) must be at most the 48 images."),
        (
            ("shapes", "batch=16", "--from", "nothing.safetensors"),
            "nothing.safetensors does not exist",
        ),
        (("shapes", "--strategy", "tpu"), "`strategy` (='tpu') must be auto, ddp or fsdp."),
        (("shapes", "batch=16", "options.widht=3"), "widht"),
    ],
)
def test_mistakes_are_one_sentence(run, arguments, words):
    code, _, err = run("train", *arguments)
    assert code == 2
    (sentence,) = err.splitlines()
    assert sentence.startswith("torchbcos: ")
    assert words in sentence
