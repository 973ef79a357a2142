"""A trained model learns other classes: with its head alone, or as a whole."""

import math

import pytest
import torch

import torchbcos as tb
from small_training import QUIET, config, weights
from torchbcos import data, train
from torchbcos.finetune import head_names, with_new_head
from torchbcos.shapes import SHAPES


def drawn(count, seed, labels):
    """Shapes, with only the classes in `labels`, numbered from 0."""
    made = data.shapes(count * 8 // len(labels), size=24, seed=seed, clutter=0.0)
    keep = torch.tensor([int(label) in labels for label in made.labels])
    pixels = (made.images[keep] * 255).round().to(torch.uint8)
    numbers = torch.tensor([labels.index(int(label)) for label in made.labels[keep]])
    return data.Images(pixels, numbers)


def task(labels):
    names = tuple(SHAPES[i] for i in labels)
    return data.Split(drawn(480, 1, labels), drawn(240, 2, labels), names)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A network that knows four of the shapes."""
    out = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "open_data", lambda *_, **__: task([0, 2, 4, 7]))
        settings = config(options={"width": 12, "max_out": 2}, epochs=12, augment=("flip",))
        train.train(settings, out, console=QUIET)
    return out / "model.safetensors"


def tuned(trained, out, monkeypatch, **changes):
    monkeypatch.setattr(train, "open_data", lambda *_, **__: task([0, 1, 7]))
    settings = config(**{"start_from": str(trained), "epochs": 8, "augment": ("flip",), **changes})
    return train.train(settings, out, console=QUIET, resume=True)


@pytest.mark.parametrize(("head_only", "least"), [(True, 0.5), (False, 0.7)])
def test_it_learns_new_classes(trained, tmp_path, monkeypatch, head_only, least):
    before = tb.load(trained)
    model = tuned(trained, tmp_path, monkeypatch, head_only=head_only)
    assert model.classes == ("disc", "ring", "bars")
    assert model.provenance["metrics"]["test_accuracy"] > least  # chance is a third
    assert model.logit_bias == pytest.approx(math.log(1 / 2))  # a third each before training
    assert model.temperature != before.temperature
    old = dict(before.bcos_layers())
    assert all(layer.scale == old[name].scale for name, layer in model.bcos_layers())
    changed = {n for n, v in weights(model).items() if not same(v, weights(before)[n])}
    assert changed == ({"network.18.weight"} if head_only else set(weights(before)))
    again = tb.load(tmp_path / "model.safetensors")
    assert all(p.requires_grad for p in again.parameters())


def same(a, b):
    return a.shape == b.shape and torch.equal(a, b)


def test_fine_tuning_resumes_to_the_same_weights(trained, tmp_path, monkeypatch):
    how = {"head_only": True, "epochs": 2}
    whole = tuned(trained, tmp_path / "whole", monkeypatch, **how)
    advance = train._Run.advance

    def stop(run, *batch):
        advance(run, *batch)
        if run.state.step == 45:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train._Run, "advance", stop)
        with pytest.raises(KeyboardInterrupt):
            tuned(trained, tmp_path / "stopped", monkeypatch, **how)
    again = tuned(trained, tmp_path / "stopped", monkeypatch, **how)
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(again)[name])


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("cifar9", ["network.16"]),
        ("resnet18", ["network.fc"]),
        ("vgg11", ["network.classifier.6"]),
        ("densenet121", ["network.classifier"]),
        ("inception_v3", ["network.AuxLogits.fc", "network.fc"]),
        ("conventional/resnet18", ["network.fc"]),
    ],
)
def test_the_head_is_found(name, heads):
    with torch.device("meta"):
        model = tb.create_model(name, num_classes=7)
    assert head_names(model) == heads


def test_norms_keep_their_statistics_when_only_the_head_learns(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = tb.create_model(
        "mini", num_classes=8, width=4, max_out=1, norm="uncentred", input_size=24
    )
    tb.calibrate(model, task([0, 1, 2]).train.batch(torch.arange(32))[0])
    tb.save(model, tmp_path / "m.safetensors")
    settings = {"head_only": True, "epochs": 1, "preset": "paper"}  # which T is not taken from
    after = tuned(tmp_path / "m.safetensors", tmp_path / "run", monkeypatch, **settings)
    assert (after.scaling, after.temperature != model.temperature) == ("calibrated", True)
    before = weights(model)
    changed = {n for n, v in weights(after).items() if not same(v, before[n])}
    assert changed == {"network.18.weight"}


def test_all_but_the_head_is_as_it_was():
    torch.manual_seed(0)
    model = tb.create_model("resnet18", num_classes=5, max_out=1)
    new = with_new_head(model, ("x", "y"))
    for name, value in new.state_dict().items():
        assert same(value, model.state_dict()[name]) == (name != "network.fc.weight")
    assert new.classes == ("x", "y")


def test_a_model_without_a_name_is_refused_with_the_reason():
    module = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    )
    with pytest.raises(ValueError, match="no name to make it again"):
        with_new_head(tb.convert(module), ("x", "y"))
