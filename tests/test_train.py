"""Training on a few drawn images: what is learned, what is kept, and how it ends."""

import json
import math
import os
import signal

import pytest
from torch import nn

import torchbcos as tb
from small_training import QUIET, assert_same_weights, config, few_shapes, weights
from torchbcos import train
from torchbcos.checkpoint import load
from torchbcos.evaluate import evaluate

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*:DeprecationWarning:lightning.*",
    "ignore:.*:UserWarning:lightning.*",
    "ignore:.*:FutureWarning:lightning.*",
)


@pytest.fixture
def little_data(monkeypatch):
    monkeypatch.setattr(train, "open_data", lambda *_, **__: few_shapes())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ema": 0.5, "optimiser": "adamw", "weight_decay": 0.01, "warmup": 1},
        {
            "optimiser": "sgd",
            "schedule": "step",
            "milestones": (1, 2),
            "accumulate": 2,
            "clip": 0.1,
        },
        {
            "adaptive_clip": 0.01,
            "label_smoothing": 0.1,
            "options": {"width": 4, "norm": "uncentred"},
        },
    ],
)
def test_a_run_that_was_stopped_ends_with_the_same_weights(little_data, tmp_path, changes):
    settings = config(**changes)
    whole = train.train(settings, tmp_path / "whole", console=QUIET)
    stopped = tmp_path / "stopped"
    advance, steps = train._Run.advance, []

    def advance_and_stop(run, *batch):
        advance(run, *batch)
        steps.append(run.state.step)
        if len(steps) == 4:  # in the middle of the second epoch
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train._Run, "advance", advance_and_stop)
        with pytest.raises(KeyboardInterrupt, match="step 4"):
            train.train(settings, stopped, console=QUIET)
        again = train.train(settings, stopped, console=QUIET, resume=True)
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert_same_weights(weights(whole), weights(again))
    lines = [
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (tmp_path / "whole", stopped)
    ]
    for one, other in zip(*lines, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}


def test_resuming_with_another_setting_is_refused(little_data, tmp_path):
    train.train(config(epochs=1), tmp_path, console=QUIET)
    with pytest.raises(ValueError, match=r"`lr` \(=0.5\) must be 0.001"):
        train.train(config(epochs=1, lr=0.5), tmp_path, console=QUIET, resume=True)


def test_training_learns_and_the_file_gives_the_same_accuracy(little_data, tmp_path):
    settings = config(epochs=40, options={"width": 8, "max_out": 2}, augment=(), lr_end=1e-4)
    model = train.train(settings, tmp_path, console=QUIET)
    split = few_shapes()
    assert evaluate(model, split.train)[0] > 0.9
    again = load(tmp_path / "model.safetensors")
    # Weights come back in another memory layout, which rounds differently.
    assert evaluate(again, split.test) == pytest.approx(evaluate(model, split.test), rel=1e-5)
    assert again.classes == split.classes
    assert again.input_size == (24, 24)


def test_pictures_are_drawn_and_metrics_written(little_data, tmp_path):
    train.train(config(epochs=2), tmp_path, console=QUIET, pictures=2)
    assert (tmp_path / "epoch-002.png").stat().st_size > 1000
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["epoch"] == 2
    assert 0 <= last["test_accuracy"] <= 1


def test_a_loss_that_is_not_finite_ends_with_step_and_layer(little_data, tmp_path, monkeypatch):
    advance = train._Run.advance

    def poison(run, *batch):
        if run.state.step == 2:
            layer = dict(run.state.model.bcos_layers())["3"]
            nn.init.constant_(layer.weight, math.nan)
        advance(run, *batch)

    monkeypatch.setattr(train._Run, "advance", poison)
    with pytest.raises(train.TrainError, match=r"step 3: the weights of . are not finite"):
        train.train(config(), tmp_path, console=QUIET)


def test_the_learning_rate_follows_its_schedule():
    cosine = config(epochs=10, lr=1.0, lr_end=0.0, warmup=2, warmup_lr=0.0)
    assert [cosine.lr_at(e) for e in (0, 1, 2, 6, 10)] == pytest.approx([0, 0.5, 1, 0.5, 0])
    quarter = config(epochs=10, lr=1.0, lr_end=0.0, warmup=1, schedule="quarter-cosine")
    assert [quarter.lr_at(e) for e in (1, 5.5, 7, 10)] == pytest.approx([1, 0.5**0.5, 0.5, 0])
    step = config(epochs=100, lr=1.0, schedule="step", milestones=(60,))
    assert [step.lr_at(e) for e in (0, 59.9, 60)] == pytest.approx([1, 1, 0.1])


def test_the_paper_preset_and_calibration_are_told_apart(little_data, tmp_path):
    calibrated = train.train(config(epochs=0.3), tmp_path / "a", console=QUIET)
    assert calibrated.scaling == "calibrated"
    preset = config(epochs=0.3, arch="cifar9", options={"max_out": 1}, preset="paper")
    assert train.train(preset, tmp_path / "b", console=QUIET).temperature == 100


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimiser": "lamb"}, "'adam' or 'adamw' or 'sgd'"),
        ({"schedule": "linear"}, "'quarter-cosine' or 'step'"),
        ({"preset": "mine"}, "'' or 'paper'"),
        ({"bad": "ignore"}, "'fail' or 'skip'"),
        ({"precision": "8"}, "bf16-mixed"),
        ({"crop_area": 1.5}, "at most 1"),
        ({"magnitude": 31}, "from 0 to 30"),
        ({"operations": 0}, "at least 1"),
        ({"memory": -1}, "0 or more"),
        ({"head_only": True}, "start_from"),
        ({"lr": "fast"}, "a number"),
        ({"batch": 16.0}, "a whole number"),
        ({"batch": True}, "a whole number"),
        ({"compile": 1}, "true or false"),
        ({"data": 3}, "a text"),
        ({"augment": "flip"}, "a list of names"),
        ({"milestones": (1, "x")}, "a list of numbers"),
        ({"options": 3}, "a table"),
        ({"batch": 0}, "at least 1"),
        ({"epochs": 0}, "above 0"),
        ({"lr": -1}, "above 0"),
        ({"ema": 1.0}, "below 1"),
        ({"label_smoothing": 2}, "below 1"),
        ({"augment": ("mixup",)}, "padded_crop"),
        ({"accumulate": 3}, "divisor of the batch, 16"),
    ],
)
def test_wrong_settings_are_named(changes, words):
    with pytest.raises(ValueError, match=words) as error:
        config(**changes)
    assert f"`{next(iter(changes))}`" in str(error.value)


def test_the_explanation_mode_is_off_after_training(little_data, tmp_path):
    train.train(config(epochs=0.3), tmp_path, console=QUIET)
    assert not tb.functional.in_explanation_mode()
