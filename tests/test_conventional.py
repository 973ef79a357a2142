"""Networks as they were before conversion, with the interface of a B-cos model."""

import pytest
import torch
import torchvision
from torch import nn

import torchbcos as tb
from small_training import QUIET, config, few_shapes
from torchbcos import neurons, posthoc, train
from torchbcos.baseline import to_explain
from torchbcos.disconnected import difull
from torchbcos.localise import compose
from torchbcos.posthoc.perturbation import rise_masks
from torchbcos.posthoc.subject import Subject, input_of


def test_it_is_torchvisions_network_with_normalised_colours():
    torch.manual_seed(0)
    model = tb.create_model("conventional/resnet18", num_classes=5).eval()
    twin = torchvision.models.resnet18(num_classes=5).eval()
    twin.load_state_dict(model.network.state_dict())
    images = torch.rand(2, 3, 64, 64)
    normalise = torchvision.transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    expected = twin(normalise(images)) + model.logit_bias
    torch.testing.assert_close(model(images), expected)
    assert model.logit_bias == pytest.approx(torch.log(torch.tensor(1 / 4)).item())


def test_the_conventional_cifar_network_has_norms_and_activations():
    model = tb.create_model("conventional/cifar9")
    kinds = [type(m) for m in model.network]
    assert kinds[:3] == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU]
    assert kinds.count(nn.Conv2d) == 9
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 10)
    assert not list(model.bcos_layers())


def test_inception_gives_its_auxiliary_logits_in_training():
    with torch.device("meta"):
        model = tb.create_model("conventional/inception_v3", num_classes=7)
        outputs = model(torch.rand(2, 3, 299, 299))
        assert [o.shape for o in outputs] == [(2, 7), (2, 7)]
        assert model.eval()(torch.rand(2, 3, 299, 299)).shape == (2, 7)
    assert model.input_size == (299, 299)


def test_it_is_saved_and_loaded(tmp_path):
    model = tb.create_model("conventional/mini", classes=("x", "y"), width=4).eval()
    tb.save(model, tmp_path / "m.safetensors")
    again = tb.load(tmp_path / "m.safetensors")
    images = torch.rand(2, 3, 48, 48)
    assert torch.equal(model(images), again(images))
    assert again.classes == ("x", "y")


def test_it_learns_in_the_same_loop(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "open_data", lambda *_, **__: few_shapes())
    settings = config(arch="conventional/mini", options={"width": 8}, epochs=30, augment=())
    model = train.train(settings, tmp_path, console=QUIET)
    assert model.provenance["metrics"]["train_accuracy"] > 0.9


def test_pictures_of_its_explanations_are_refused_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "open_data", lambda *_, **__: few_shapes())
    model = tb.create_model("conventional/mini", classes=("x", "y"), width=8)
    tb.save(model, tmp_path / "m.safetensors")
    new = {"arch": "conventional/mini", "options": {"width": 8}}
    for settings in (new, {"start_from": str(tmp_path / "m.safetensors")}):
        with pytest.raises(ValueError, match=r"`pictures` .* must be 0 for a conventional network"):
            train.train(config(**settings), tmp_path / "run", console=QUIET, pictures=5)
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize("argument", [{"b": 1.5}, {"max_out": 1}, {"preset": "paper"}])
def test_arguments_of_bcos_layers_are_refused(argument):
    name = next(iter(argument))
    with pytest.raises(ValueError, match=rf"`{name}` .* must be left out"):
        tb.create_model("conventional/resnet18", **argument)


@pytest.fixture
def one():
    torch.manual_seed(0)
    model = tb.create_model("conventional/mini", classes=tuple("abcd"), width=4, input_size=24)
    return model.eval(), torch.rand(2, 3, 24, 24)


def test_what_is_explained_of_it_has_its_logits(one):
    model, images = one
    assert model.logit_bias < -1
    torch.testing.assert_close(to_explain(model)(images), model(images))
    targets = torch.tensor([[1], [2]])
    torch.testing.assert_close(
        Subject.of(model, images, targets).outputs(input_of(model, images)),
        model(images).gather(1, targets),
    )
    cells = difull(model, 2)(compose(torch.cat([images, images]), 2))
    torch.testing.assert_close(cells.view(4, 4), model(torch.cat([images, images])))


@pytest.mark.parametrize("name", [name for name in posthoc.METHODS if name != "ours"])
def test_methods_see_its_network_after_the_normalisation(one, name):
    model, images = one
    few = {"rise": {"masks": 8}, "lime": {"samples": 8}, "intgrad": {"steps": 2}}.get(name, {})
    expected = posthoc.METHODS[name](to_explain(model), images, [1, 3], **few)
    assert torch.equal(posthoc.METHODS[name](model, images, ["b", "d"], **few), expected)


def test_rise_weights_masks_by_the_probability_that_it_learned(one):
    model, images = one
    masks = rise_masks(6, (24, 24))
    x = input_of(model, images[:1])
    with torch.no_grad():
        p = (model.network(masks[:, None] * x) + model.logit_bias).sigmoid()[:, 2]
    expected = (p[:, None, None] * masks).sum(0) / 6 / 0.1
    torch.testing.assert_close(posthoc.rise(model, images[:1], [2], masks=6)[0, 0], expected)


def test_it_has_no_explanation_of_its_own(one):
    model, images = one
    with pytest.raises(ValueError, match=r"ConventionalModel.*must be a B-cos model.*'ixg'"):
        posthoc.METHODS["ours"](model, images)
    assert "ours" not in [m.name for m in posthoc.choose_methods(["all"], model)]


@pytest.mark.parametrize(
    "ask",
    [
        tb.calibrate,
        tb.signal,
        lambda model, images: tb.explain(model, images, layer="0", unit=0),
        lambda model, images: neurons.unit_contributions(model, images, "0"),
        lambda model, images: neurons.most_active_for(model, images[0], "0"),
    ],
    ids=["calibrate", "signal", "explain", "unit_contributions", "most_active_for"],
)
def test_what_only_bcos_layers_have_is_not_asked_of_it(one, ask):
    with pytest.raises(ValueError, match=r"^`model` is conventional, and .*: use a B-cos model\.$"):
        ask(*one)


def test_an_explanation_of_it_warns_that_it_is_none(one):
    model, images = one
    with pytest.warns(UserWarning, match=r"`model` is conventional: W\(x\)·x is not its output"):
        e = tb.explain(model, images)
    assert e.residual.abs().max() > 1e-3 * e.outputs.abs().max()
