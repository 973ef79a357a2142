"""A signal that is no number any more, or has stalled, ends a training at its step, by name."""

import math

import pytest
import torch
from torch import nn

import torchbcos as tb
from small_training import QUIET, config, few_shapes
from torchbcos import train
from torchbcos.watch import Watch

pytestmark = [
    pytest.mark.filterwarnings("ignore:this model's γ:UserWarning"),
    pytest.mark.usefixtures("little_data"),
]


def train_with(monkeypatch, change, at=2, **changes):
    """Train, with `change(model)` before the step after `at`."""
    advance = train._Run.advance

    def changed(run, *batch):
        if run.state.step == at:
            with torch.no_grad():
                change(run.state.model)
        advance(run, *batch)

    monkeypatch.setattr(train._Run, "advance", changed)


def layer(model, name):
    return dict(model.bcos_layers())[name]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda m: nn.init.constant_(layer(m, "9").weight, math.nan),
            r"the loss is not finite at step 3: the weights of 9 are not finite; lower `lr`",
        ),
        (
            lambda m: setattr(layer(m, "6"), "scale", 3e38),
            r"not finite at step 3: the output of 6 is not finite",
        ),
        (
            lambda m: nn.init.zeros_(layer(m, "9").weight),
            r"the signal has stalled at step 3: the output of 9 is zero for every image; calibrate",
        ),
        (
            lambda m: setattr(layer(m, "6"), "scale", 1e-44),
            r"stalled at step 3: the output of 6 is zero for every image",
        ),
        (
            lambda m: setattr(m, "temperature", 1e12),
            r"stalled at step 3: the (gradient of \d+ is|logits are the same)",
        ),
        (
            lambda m: layer(m, "0").weight.register_hook(torch.zeros_like),
            r"stalled at step 3: the gradient of 0 is 0 in root mean square",
        ),
    ],
)
def test_it_ends_at_the_step_with_the_layer_and_a_remedy(tmp_path, monkeypatch, change, words):
    train_with(monkeypatch, change)
    with pytest.raises(train.TrainError, match=words):
        train.train(config(), tmp_path, console=QUIET)
    assert not (tmp_path / "state.safetensors").exists()  # nothing broken is kept


def test_the_weights_are_still_those_before_the_step(tmp_path, monkeypatch):
    kept = {}

    def note(model):
        kept["model"] = model
        kept["before"] = layer(model, "12").weight.clone()
        nn.init.constant_(layer(model, "0").weight, math.nan)

    train_with(monkeypatch, note)
    with pytest.raises(train.TrainError):
        train.train(config(), tmp_path, console=QUIET)
    assert torch.equal(layer(kept["model"], "12").weight, kept["before"])


def test_a_network_without_scales_is_found_at_its_first_step(tmp_path, monkeypatch):
    train_with(monkeypatch, lambda m: [setattr(x, "scale", 1e-6) for _, x in m.bcos_layers()], 0)
    with pytest.raises(train.TrainError, match="stalled at step 1"):
        train.train(config(), tmp_path, console=QUIET)


def test_a_network_that_has_learned_all_there_is_goes_on():
    model = nn.Sequential(nn.Linear(4, 3))
    watch = Watch(model, torch.device("cpu"))
    model[0].weight.grad = torch.zeros(3, 4)
    logits = torch.randn(5, 3)
    watch.look(torch.tensor(1e-7), logits)
    assert watch.first == 0
    watch.look(torch.tensor(0.3), logits)
    assert watch.first == 2
    assert watch.found == 1


def test_the_first_step_is_kept_when_more_go_wrong():
    model = nn.Sequential(nn.Linear(4, 3))
    watch = Watch(model, torch.device("cpu"))
    for loss in (0.5, math.inf, math.nan):
        model[0].weight.grad = torch.ones(3, 4)
        watch.look(torch.tensor(loss), torch.randn(5, 3))
    assert watch.first == 2


def test_signal_names_the_same_layer():
    model = tb.create_model("mini", num_classes=8, width=4, max_out=1)
    tb.calibrate(model, few_shapes().train.batch(torch.arange(8))[0])
    nn.init.zeros_(layer(model, "9").weight)
    rows = tb.signal(model, few_shapes().train.batch(torch.arange(8))[0]).layers
    assert next(row.name for row in rows if row.output == 0) == "9"
