"""Weights of the authors' programs: v2 against the program itself, v1 against its formulas."""

import math

import pytest
import torch
import torchvision

import torchbcos as tb
from cases import caller
from oracle import PEER_TOLERANCE, TOLERANCE, assert_agrees
from torchbcos.encoding import encode
from torchbcos.finetune import with_new_head
from torchbcos.released import load_released
from v1_networks import CIFAR_TEMPERATURES, IMAGENET, make
from v2_peer import lively, made

SIZE = 96  # of images; their networks take any multiple of 32
V2 = {
    "resnet18": "resnet18",
    "resnet50": "resnet50",
    "resnext50_32x4d": "resnext50_32x4d",
    "densenet121": "densenet121",
    "vgg11_bnu": "vgg11_bn",
    "convnext_tiny": "v2/convnext_tiny_pn",
    "convnext_tiny_bnu": "v2/convnext_tiny_bnu",
    "simple_vit_ti_patch16_224": "v2/simple_vit_ti_patch16_224",
    "vitc_ti_patch1_14": "v2/vitc_ti_patch1_14",
}


def kind_for(name):
    """float64, but for a gigabyte of weights."""
    return torch.float32 if name.startswith("vgg") else torch.float64


def pictures(count, *size):
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, 3, *size, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("name", V2)
def test_networks_of_v2_give_its_logits_and_its_rows_of_w(name, tmp_path):
    network = lively(made(name), SIZE)
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    model = tb.load(tmp_path / "weights.pth")
    assert model.architecture.name == V2[name]
    assert not model.training
    dtype = kind_for(name)
    images = pictures(1, SIZE, SIZE).to(dtype)
    model, network = model.to(dtype), network.to(dtype)
    assert model.logit_bias == -math.log(999)
    model.logit_bias = 0.0
    e = tb.explain(model, images, targets=[7])
    x = encode(images).requires_grad_()
    with network.explanation_mode():
        logits = network(x)
        (rows,) = torch.autograd.grad(logits[0, 7], x)
    assert_agrees(model(images), logits)
    assert_agrees(e.weights[:, 0], rows)
    assert e.residual.abs().max() <= TOLERANCE[dtype] * e.outputs.abs().max()


@pytest.mark.parametrize("name", IMAGENET)
def test_networks_of_v1_give_its_logits(name, tmp_path):
    tensors, logits = make(name)
    torch.save(tensors, tmp_path / "state_dict.pkl")
    del tensors
    model = tb.load(tmp_path / "state_dict.pkl")
    assert model.architecture.name == name
    assert model.scaling == "released"
    dtype = kind_for(name)
    images = pictures(1, *model.input_size).to(dtype)
    assert model.logit_bias == math.log(0.01 / 0.99)
    model.logit_bias = 0.0
    with torch.no_grad():
        assert_agrees(model.to(dtype)(images), logits(images))


@pytest.mark.parametrize("units", [1, 2])
@pytest.mark.parametrize("b", CIFAR_TEMPERATURES)
def test_v1s_networks_for_cifar10_are_read_with_their_b(b, units, tmp_path):
    tensors, logits = make("cifar9", classes=10, b=b, units=units)
    torch.save(tensors, tmp_path / "state_dict.pkl")
    model = load_released(tmp_path / "state_dict.pkl", b=b)
    assert all((layer.b, layer.max_out) == (b, units) for _, layer in model.bcos_layers())
    assert model.logit_bias == math.log(0.1 / 0.9)
    assert model.classes[3] == "cat"
    model.logit_bias = 0.0
    images = pictures(4, 32, 32)
    found, expected = model.double()(images), logits(images)
    # B = 2 has no epsilon in |c|, and B = 1 no |c|.
    assert_agrees(found, expected, tolerance=None if b in (1, 2) else PEER_TOLERANCE)
    with pytest.raises(ValueError, match=r"does not tell its B: read it with .*b=2"):
        tb.load(tmp_path / "state_dict.pkl")


def test_what_was_read_can_be_saved_trained_and_explained(tmp_path, monkeypatch, capsys):
    torch.save(lively(made("resnet18"), SIZE).state_dict(), tmp_path / "resnet.pth")
    model = tb.load(tmp_path / "resnet.pth")
    assert model.classes[207] == "golden retriever"
    about = {"weights": "B-cos v2", "file": "resnet.pth", "config": {"test_part": 0.875}}
    assert model.provenance == about
    tb.save(model, tmp_path / "resnet.safetensors")
    again = tb.load(tmp_path / "resnet.safetensors")
    images = torch.rand(2, 3, 64, 64)
    assert torch.equal(again(images), model(images))
    assert {layer.eps for _, layer in again.bcos_layers()} == {1e-6}
    new = with_new_head(model, ("cat", "dog"))
    assert {layer.eps for _, layer in new.bcos_layers()} == {1e-6}
    assert torch.equal(new.network.conv1.weight, model.network.conv1.weight)
    assert new(images).shape == (2, 2)
    model.train()(images).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    call = caller(monkeypatch, capsys)
    photo = "examples/photos/church.jpg"
    code, out, _ = call(
        "explain", photo, "--model", tmp_path / "resnet.pth", "--out", tmp_path / "o"
    )
    assert code == 0, out


@pytest.mark.parametrize("wrapper", ["module.", "model."])
def test_names_of_wrappers_do_not_matter(wrapper, tmp_path):
    tensors, _ = make("cifar9", classes=10, b=2)
    torch.save({"state_dict": {wrapper + k: v for k, v in tensors.items()}}, tmp_path / "m.pth")
    model = load_released(tmp_path / "m.pth", b=2)
    assert torch.equal(model.network.get_parameter("0.weight"), tensors["0.linear.weight"])


def test_a_densenet_of_another_growth_rate_is_recognised(tmp_path):
    tensors, _ = make("densenet121", classes=5, growth=12)
    torch.save(tensors, tmp_path / "m.pth")
    model = tb.load(tmp_path / "m.pth")
    assert model.architecture.options["growth_rate"] == 12
    assert (model.num_classes, model.classes) == (5, None)


def without(tensors, part):
    return {name: value for name, value in tensors.items() if part not in name}


def test_other_files_are_refused_with_a_sentence(tmp_path):
    good, _ = make("resnet34", classes=5)
    shorter = {**good, "0.fc.linear.weight": good["0.fc.linear.weight"][:, :7]}
    norms = {"0.bn1.weight": torch.ones(64)}
    contents = {
        "are of no network that v1 or v2 released": {"layers.0.weight": torch.ones(3, 3)},
        "no tensors by names": {"epoch": 3},
        "1 of its tensors do not fit resnet34, the first is fc.weight": shorter,
        "the first is layer3.2.conv2.weight": without(good, "layer3.2.conv2"),
        "its norms are no batch norms": {**good, **norms},
        "its norms have biases": {
            **good, **norms, "0.bn1.running_var": torch.ones(64), "0.bn1.bias": torch.ones(64)
        },
        r"24 tensors \(.*\) are of no network": dict(list(good.items())[:24]),
        r"37 tensors \(.*\) are of no network": {n: v[:32] for n, v in good.items()},
        r"36 tensors \(.*\) are of no network": without(good, "layer1.0.conv2"),
        r"36 tensors \(conv1.weight, …\) are of no network": without(good, "0.fc."),
        "it holds more than tensors": {"weights": good, "optimiser": Exception},
    }  # fmt: skip
    for complaint, content in contents.items():
        torch.save(content, tmp_path / "m.pth")
        with pytest.raises(tb.checkpoint.CheckpointError, match=complaint) as error:
            tb.load(tmp_path / "m.pth")
        assert "\n" not in str(error.value)
    torch.save(good, tmp_path / "m.pth")
    whole = (tmp_path / "m.pth").read_bytes()
    for length in (2, 5000, len(whole) // 2, len(whole) - 1):
        (tmp_path / "m.pth").write_bytes(whole[:length])
        with pytest.raises(tb.checkpoint.CheckpointError, match="cut short or damaged"):
            tb.load(tmp_path / "m.pth")


def test_conventional_networks_of_v2_are_refused(tmp_path):
    torch.save(made("standard_simple_vit_ti_patch16_224").state_dict(), tmp_path / "m.pth")
    with pytest.raises(tb.checkpoint.CheckpointError, match="are of no network"):
        tb.load(tmp_path / "m.pth")


@pytest.mark.parametrize("options", [{"norm": "uncentred"}, {"head": "pool"}, {"preset": "paper"}])
def test_options_of_a_conversion_are_refused_for_networks_of_v2(options):
    (name,) = options
    with pytest.raises(ValueError, match=rf"`{name}` \(='.*'\) must be left out for v2/convnext"):
        tb.create_model("v2/convnext_atto_pn", **options)


def test_networks_of_v2_that_there_are_not_are_named():
    with pytest.raises(
        ValueError, match=r"`name` \(='convnext_huge_pn'\) must be one of convnext_"
    ):
        tb.create_model("v2/convnext_huge_pn")


def test_a_conventional_networks_file_is_named_as_such(tmp_path):
    for arch in ("resnet18", "vgg11", "squeezenet1_1"):
        network = torchvision.models.get_model(arch, num_classes=4)
        torch.save(network.state_dict(), tmp_path / "m.pth")
        with pytest.raises(ValueError, match="it holds a conventional network's weights"):
            tb.load(tmp_path / "m.pth")


def test_a_file_that_is_not_there_is_named(tmp_path):
    for path in (tmp_path / "none.pth", tmp_path):
        with pytest.raises(FileNotFoundError, match=r"`path` \(='.*'\) is no file"):
            load_released(path, b=2)
