"""Training on a few drawn images: what is learned, what is kept, and how it ends."""

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from unittest import mock

import lightning
import pytest
import torch
from lightning.fabric.plugins import MixedPrecision
from torch import nn

import torchbcos as tb
from small_training import QUIET, assert_same_weights, config, few_shapes, weights
from torchbcos import train
from torchbcos._cuda import cuda_settings
from torchbcos.captured import capture
from torchbcos.checkpoint import load
from torchbcos.evaluate import evaluate
from torchbcos.loss import bce
from torchbcos.optimiser import make_optimiser, set_weight_rms
from torchbcos.training_state import held

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*:DeprecationWarning:lightning.*",
    "ignore:.*:UserWarning:lightning.*",
    "ignore:.*:FutureWarning:lightning.*",
)


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
        {  # the size changes after step 3 of 9, and again after 6
            "train_sizes": (12, 16, 24),
            "augment": ("resized_crop", "rand_augment"),
            "magnitude": 5,
            "cutmix": 0.5,
        },
        {"arch": "conventional/mobilenet_v3_small", "options": {}},  # with dropout
        {"precision": "16-mixed"},
    ],
)
def test_a_run_that_was_stopped_ends_with_the_same_weights(
    little_data, tmp_path, monkeypatch, changes
):
    if changes.get("precision") == "16-mixed":  # of which Lightning makes bf16-mixed on a CPU

        def scaled(_):
            """Gradients overflow before the stop and after it, and the scale changes."""
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26, growth_interval=2)
            return lightning.Fabric(
                accelerator="cpu", plugins=MixedPrecision("16-mixed", "cpu", scaler)
            )

        monkeypatch.setattr(train, "make_fabric", scaled)
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


def test_gradients_are_clipped_adaptively_whatever_the_loss_was_scaled_by(little_data, tmp_path):
    options = {"optimiser": "sgd", "momentum": 0.0, "adaptive_clip": 0.02, "epochs": 1 / 3}
    found = []
    for scale in (1.0, 2.0**16):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        half = MixedPrecision("16-mixed", "cpu", scaler)
        fabric = lightning.Fabric(accelerator="cpu", plugins=half)
        settings = config(precision="16-mixed", lr=0.5, **options)
        model = train.train(settings, tmp_path / str(scale), console=QUIET, fabric=fabric)
        found.append(dict(model.named_parameters()))
    new = tb.create_model("mini", classes=model.classes, width=4, max_out=1)
    for name, start in new.named_parameters():  # not the same one, but as long
        one, other = (weights[name].detach() for weights in found)
        apart = (one - other).norm() / start.detach().norm()
        assert apart < 2e-3, name


def test_fused_optimisers_do_not_unscale_what_is_to_be_clipped():
    model = tb.create_model("mini", num_classes=3)
    for precision, clip, fused in (
        ("16-mixed", 1.0, None),
        ("16-mixed", 0.0, True),
        ("bf16-mixed", 1.0, True),
    ):
        settings = config(optimiser="sgd", precision=precision, clip=clip)
        optimiser = make_optimiser(settings, model, torch.device("cuda"))
        assert optimiser.defaults["fused"] is fused


def test_training_images_change_their_size_in_equal_parts_of_the_steps(
    little_data, tmp_path, monkeypatch
):
    advance, seen = train._Run.advance, []

    def note(run, images, labels):
        seen.append((tuple(images.shape), run.steps_per_epoch))
        advance(run, images, labels)

    monkeypatch.setattr(train._Run, "advance", note)
    for augment in (("resized_crop",), ("flip",)):
        settings = config(epochs=3, train_sizes=(12, 12, 16, 20), augment=augment)
        model = train.train(settings, tmp_path / augment[0], console=QUIET)
        assert model.input_size == (24, 24)
        sizes = [12] * 5 + [16] * 2 + [20] * 2  # of 9 steps, quarters end before 2.25, 4.5, 6.75
        assert seen == [((16, 3, side, side), 3) for side in sizes]
        seen.clear()


def test_a_test_every_second_epoch(little_data, tmp_path):
    train.train(config(epochs=5), tmp_path / "each", console=QUIET)
    train.train(config(epochs=5, test_every=2), tmp_path / "second", console=QUIET)
    each, second = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("each", "second")
    )
    assert [line["epoch"] for line in second] == [2, 4, 5]
    for line, (one, other) in zip(second, ((0, 1), (2, 3), (4, 4)), strict=True):
        for name in ("test_loss", "test_accuracy", "lr"):
            assert line[name] == each[other][name]
        for name in ("train_loss", "train_accuracy"):  # means over what was trained since
            assert line[name] == pytest.approx((each[one][name] + each[other][name]) / 2)


@pytest.mark.parametrize("steps", [0, 3])
def test_capturing_a_step_puts_back_all_that_it_changed(monkeypatch, steps):
    """Without a GPU: the graph only notes that it is replayed."""
    graph = mock.Mock()
    for name in ("Stream", "current_stream", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    weight = nn.Parameter(torch.ones(3))
    optimiser = torch.optim.Adam([weight], 0.1)

    def update(images, labels):
        (weight * images).sum().backward()
        optimiser.step()
        optimiser.zero_grad()

    images, labels = torch.arange(3.0), torch.zeros(1)
    for _ in range(steps):
        update(images, labels)
    before = weight.detach().clone(), *(v.clone() for v in optimiser.state[weight].values())
    replay = capture(update, images, labels, [weight], optimiser)
    after = weight.detach(), *optimiser.state[weight].values()
    if steps == 0:  # the optimiser's state is new, and as if it had done nothing
        before = before[0], *(torch.zeros_like(v) for v in after[1:])
    assert len(after) == 4
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one, other)
    replay(torch.zeros(3), labels)
    graph.replay.assert_called_once()
    assert torch.equal(images, torch.arange(3.0))  # the caller's batch is not the graph's


def test_resuming_with_another_setting_is_refused(little_data, tmp_path):
    train.train(config(epochs=1), tmp_path, console=QUIET)
    with pytest.raises(ValueError, match=r"`lr` \(=0.5\) must be 0.001"):
        train.train(config(epochs=1, lr=0.5), tmp_path, console=QUIET, resume=True)


def test_data_may_have_moved_when_a_run_is_resumed(little_data, tmp_path):
    whole = train.train(config(epochs=1), tmp_path, console=QUIET)
    again = train.train(config(epochs=1, data="./shapes"), tmp_path, console=QUIET, resume=True)
    assert_same_weights(weights(whole), weights(again))


def test_resuming_with_other_classes_or_sizes_is_refused(little_data, tmp_path, monkeypatch):
    train.train(config(epochs=1), tmp_path, console=QUIET)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    fewer, renamed, larger = few_shapes(), few_shapes(), few_shapes(size=32)
    fewer = replace(fewer, classes=(*fewer.classes, "one more"))
    renamed = replace(renamed, classes=tuple(f"{name}s" for name in renamed.classes))
    for data, words in ((fewer, "the classes .*, one more, but had"), (renamed, "but had disc"),
                        (larger, "the size 32, 32, but had 24, 24 in the run")):  # fmt: skip
        monkeypatch.setattr(train, "open_data", lambda *_, data=data, **__: data)
        with pytest.raises(ValueError, match=words):
            train.train(config(epochs=1), tmp_path, console=QUIET, resume=True)
        assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}


def test_other_settings_are_refused_before_the_data_are_read(little_data, tmp_path, monkeypatch):
    train.train(config(epochs=1), tmp_path, console=QUIET)
    monkeypatch.setattr(train, "open_data", mock.Mock(side_effect=AssertionError("read")))
    with pytest.raises(ValueError, match=r"`epochs` \(=2\) must be 1"):
        train.train(config(epochs=2), tmp_path, console=QUIET, resume=True)


def test_two_trainings_do_not_share_a_folder(little_data, tmp_path, monkeypatch):
    def begin_another(run):
        with pytest.raises(ValueError, match="is in use by a training that runs"):
            train.train(config(epochs=1), tmp_path, console=QUIET, resume=True)
        begin(run)

    begin = train._Run.begin
    monkeypatch.setattr(train._Run, "begin", begin_another)
    train.train(config(epochs=1), tmp_path, console=QUIET)
    monkeypatch.undo()


HOLDS = """
import os, sys, time
from pathlib import Path
from torchbcos.training_state import held

with held(Path(sys.argv[1])):
    child = os.fork()
    if child:
        print(child, flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="folders are held where processes can fork")
def test_a_killed_training_frees_its_folder_though_what_reads_images_lives_on(tmp_path):
    training = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    child = int(training.stdout.readline())
    try:
        with pytest.raises(ValueError, match="is in use by a training that runs"), held(tmp_path):
            pass
        training.kill()
        training.wait()  # not for the end of its output, which the child holds open
        with held(tmp_path):
            os.kill(child, 0)  # which is still there
    finally:
        training.kill()
        os.kill(child, signal.SIGKILL)
        training.communicate()


def test_pictures_follow_the_tests(little_data, tmp_path):
    train.train(config(epochs=4, test_every=3), tmp_path, console=QUIET, pictures=2)
    assert sorted(p.name for p in tmp_path.glob("*.png")) == ["epoch-003.png", "epoch-004.png"]


def test_a_training_is_not_overwritten(little_data, tmp_path):
    train.train(config(epochs=1), tmp_path, console=QUIET)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for left in (train.MODEL, train.STATE):
        with pytest.raises(ValueError, match=f"holds a training already, in {left}: .*--resume"):
            train.train(config(epochs=1), tmp_path, console=QUIET)
        assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}
        before.pop(tmp_path / left)
        (tmp_path / left).unlink()


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


def test_a_picture_that_cannot_be_drawn_does_not_cost_the_epoch(little_data, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("on purpose")

    monkeypatch.setattr(train, "draw", fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        train.train(config(epochs=1), tmp_path, console=QUIET, pictures=1)
    monkeypatch.undo()
    assert (tmp_path / "state.safetensors").exists()


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


def test_averaged_weights_forget_the_start(tmp_path, monkeypatch):
    seen, advance = [], train._Run.advance

    def note(run, *batch):
        if not seen:
            seen.append(weights(run.state.model))
        advance(run, *batch)
        seen.append(weights(run.state.model))

    monkeypatch.setattr(train, "open_data", lambda *_, **__: few_shapes())
    monkeypatch.setattr(train._Run, "advance", note)
    made = weights(train.train(config(ema=0.6), tmp_path, console=QUIET))
    average, *steps = seen
    for t, new in enumerate(steps, 1):
        decay = min(0.6, (1 + t) / (10 + t))
        average = {k: decay * average[k] + (1 - decay) * new[k] for k in new}
    assert len(steps) == 9
    for name, value in average.items():
        torch.testing.assert_close(made[name], value)


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
        ({"warmup_lr": -1e-3}, "`warmup_lr` .* 0 or more"),
        ({"auxiliary_weight": -1.0}, "`auxiliary_weight` .* 0 or more"),
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
        ({"cutmix": 1.5}, "from 0 to 1"),
        ({"weight_rms": -1}, "0 or more"),
        ({"weight_rms": math.inf}, "0 or more"),
        ({"lr_end": math.inf}, "0 or more, and finite"),
        ({"operations": 101}, "at most 100"),
        ({"seed": 2**63}, "64 bits"),
        ({"momentum": 1.0}, "`momentum` .* below 1"),
        ({"precision": 64}, r"`precision` \(=64\) must be '32-true' or"),
        ({"weight_rms_in": "0"}, "empty unless `weight_rms` is set"),
        ({"accumulate": 3}, "divisor of the batch, 16"),
        ({"test_every": 0}, "at least 1"),
        ({"train_sizes": (128, 0)}, "each at least 1"),
        ({"train_sizes": (128, 160.0)}, "a list of whole numbers"),
    ],
)
def test_wrong_settings_are_named(changes, words):
    with pytest.raises(ValueError, match=words) as error:
        config(**changes)
    assert f"`{next(iter(changes))}`" in str(error.value)


def test_the_explanation_mode_is_off_after_training(little_data, tmp_path):
    train.train(config(epochs=0.3), tmp_path, console=QUIET)
    assert not tb.functional.in_explanation_mode()


@pytest.mark.parametrize("before", [False, True])
def test_settings_of_the_process_are_given_back(little_data, tmp_path, monkeypatch, before):
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    names = ((cudnn, "benchmark"), (cudnn, "allow_tf32"), (matmul, "allow_tf32"))
    within = []
    monkeypatch.setattr(
        train._Run, "begin", lambda _: within.extend(getattr(*place) for place in names) or 1 / 0
    )
    with cuda_settings(tf32=before, benchmark=before):
        with pytest.raises(ZeroDivisionError):
            train.train(config(tf32=not before), tmp_path, console=QUIET)
        assert [getattr(*place) for place in names] == [before] * 3
    assert within == [True, not before, not before]


def test_mixed_images_are_trained_towards_their_shares(little_data, tmp_path, monkeypatch):
    """The loss of a step is the mean binary cross-entropy against the shares."""
    steps = []

    def note(outputs, labels, *settings):
        loss = bce(outputs, labels, *settings)
        steps.append((outputs.detach(), labels, loss.detach()))
        return loss

    monkeypatch.setattr(train, "bce", note)
    train.train(config(cutmix=1.0, epochs=1), tmp_path, console=QUIET)
    mixed = 0
    for outputs, labels, loss in steps:
        p = outputs.double().sigmoid()
        by_hand = -(labels * p.log() + (1 - labels) * (1 - p).log()).mean()
        assert loss.item() == pytest.approx(by_hand.item(), rel=1e-5)
        assert labels.shape == outputs.shape
        mixed += ((labels > 0) & (labels < 1)).any(1).sum().item()
    assert mixed > 0


def test_the_number_of_right_answers_is_resumed_by_any_number_of_processes(tmp_path):
    """Of two processes, of which each had 5 right and this one a loss of 1, the other of 3."""

    def all_reduce(value, reduce_op="mean"):
        return {"sum": 10.0, "mean": 2.0}[reduce_op] + 0 * value

    two = mock.MagicMock(out=tmp_path, fabric=mock.Mock(world_size=2, all_reduce=all_reduce))
    two.state = mock.Mock(loss=torch.tensor(1.0), correct=torch.tensor(5.0))
    written = {}
    two.state.save = lambda *_, **__: written.update(
        loss=two.state.loss.item(), correct=two.state.correct.item()
    )
    train._Run.save_state(two)
    assert written == {"loss": 2, "correct": 10}
    assert two.state.correct == 5  # if it goes on
    (tmp_path / train.STATE).touch()
    for world in (1, 4):
        resumed = mock.MagicMock(out=tmp_path, fabric=mock.Mock(world_size=world))
        resumed.state.correct = torch.tensor(written["correct"])
        train._Run.load_state(resumed)
        assert resumed.state.correct * world == 10


def test_dropout_differs_between_steps_and_processes():
    seeds = {
        train._Run._seed_of_dropout(
            mock.Mock(config=config(seed=3), fabric=mock.Mock(global_rank=rank), state=state)
        )
        for rank in range(8)
        for state in (mock.Mock(step=step) for step in range(5))
    }
    assert len(seeds) == 40
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert (3 << 32) + 4 in seeds  # a single process's are plain


def test_cutmix_needs_pairs(little_data, tmp_path):
    with pytest.raises(ValueError, match=r"`batch` \(=15\) .* times the 2 images that `cutmix`"):
        train.train(config(cutmix=0.5, batch=15), tmp_path, console=QUIET)


def test_weights_of_one_module_can_be_lengthened_alone():
    model = tb.create_model("cifar_resnet", num_classes=2, width=4)
    before = {name: layer.weight.clone() for name, layer in model.bcos_layers()}
    set_weight_rms(model, 0.5, "3")  # a block, with two layers
    changed = [n for n, layer in model.bcos_layers() if not torch.equal(layer.weight, before[n])]
    assert changed == ["3.conv1", "3.conv2"]
    weight = dict(model.bcos_layers())["3.conv1"].weight
    assert weight.square().mean().sqrt().item() == pytest.approx(0.5)
    with pytest.raises(ValueError, match=r"`weight_rms_in` \(='third'\) must be a module"):
        set_weight_rms(model, 0.5, "third")
    for rms in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match=r"`rms` \(=.*\) must be a number above 0"):
            set_weight_rms(model, rms)
    with pytest.raises(TypeError, match=r"`model` \(a Linear\) must be a B-cos model"):
        set_weight_rms(nn.Linear(2, 2), 0.5)


def test_long_weights_compute_the_same_and_turn_less(little_data, tmp_path):
    angles = []
    for rms in (0.1, 1.0):
        model = tb.create_model("cifar9", max_out=2, preset="paper")
        images = torch.rand(4, 3, 32, 32)
        before = model(images)
        set_weight_rms(model, rms)
        torch.testing.assert_close(model(images), before)
        for _, layer in model.bcos_layers():
            assert layer.weight.square().mean().sqrt().item() == pytest.approx(rms)
        settings = config(weight_rms=rms, epochs=0.1, augment=())  # one step
        start, end = (
            train.train(replace(settings, lr=lr), tmp_path / f"{rms}-{lr}", console=QUIET)
            for lr in (1e-9, 1e-2)
        )
        rows = [list(m.bcos_layers())[1][1].weight.flatten(1) for m in (start, end)]
        cosine = torch.nn.functional.cosine_similarity(*rows).clamp(max=1)
        angles.append(cosine.acos().mean().item())
    assert 5 < angles[0] / angles[1] < 15
    assert angles[1] == pytest.approx(1e-2, rel=0.5)
