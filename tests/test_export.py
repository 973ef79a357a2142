"""The ONNX file against the model it was made of, computed by onnxruntime alone."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import torchbcos as tb
from cases import caller
from torchbcos import export as export_module
from torchbcos.export import ExportError, export
from trained import make_vit

CLASSES = ("tench", "français", "chain saw", "church")


class Everything(nn.Module):
    """Operations whose backward passes differ, at sizes that strides do not divide."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 5, stride=2, padding=2, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.pool = nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False)
        self.grouped = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=2)
        self.largest = nn.MaxPool2d(2)
        self.adaptive = nn.AdaptiveAvgPool2d(3)
        self.head = nn.Linear(72, 4)

    def forward(self, x):
        x = self.pool(self.stem(x))
        x = self.largest(x + self.grouped(x))
        return self.head(torch.flatten(self.adaptive(x), 1))


def everything(**options):
    torch.manual_seed(0)
    model = tb.convert(Everything(), input_size=31, classes=CLASSES, **options)
    for module in model.modules():
        if hasattr(module, "running_var"):  # norms as after a training
            module.running_var.uniform_(0.5, 2)
            if module.bias is not None:
                nn.init.normal_(module.bias)
    tb.calibrate(model, torch.rand(8, 3, 31, 31))
    return model.eval()


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    model = everything(max_out=2, b=2.5, norm="uncentred")
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    return model, export(model, path)


def run(path, **inputs):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def assert_near(found, expected):
    expected = expected.detach().numpy()
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("count", [1, 20])
def test_every_output_is_that_of_explain(exported, count):
    model, made = exported
    images = torch.rand(count, 3, 31, 31)
    targets = torch.arange(count) % 4
    found = run(made.path, images=images.numpy(), targets=targets.numpy())
    e = tb.explain(model, images, targets[:, None])
    assert_near(found["logits"], model(images))
    assert found["explained"].tolist() == targets.tolist()
    assert_near(found["weights"], e.weights[:, 0])
    assert_near(found["contributions"], e.contributions[:, 0])
    assert_near(found["bias"], e.bias[:, 0])
    off = np.abs(found["picture"].astype(int) - tb.render.colour(e)[:, 0])
    assert found["picture"].dtype == np.uint8
    assert off.max() <= 1
    whole = found["contributions"].sum((1, 2)) + found["bias"]
    logits = np.take_along_axis(found["logits"], found["explained"][:, None], 1)[:, 0]
    np.testing.assert_allclose(whole, logits, rtol=1e-4, atol=1e-5)


def test_minus_one_is_the_predicted_class(exported):
    model, made = exported
    images = torch.rand(6, 3, 31, 31)
    targets = np.array([-1, 2, -1, 0, -1, 1])
    found = run(made.path, images=images.numpy(), targets=targets)
    predicted = model(images).argmax(1).numpy()
    assert found["explained"].tolist() == np.where(targets < 0, predicted, targets).tolist()


def test_the_file_says_what_it_is(exported):
    _, made = exported
    proto = onnx.load(made.path)
    onnx.checker.check_model(proto, full_check=True)
    about = {p.key: p.value for p in proto.metadata_props}
    assert about["torchbcos"] == tb.__version__
    assert tuple(json.loads(about["classes"])) == CLASSES
    assert made.inputs == {"images": ("batch", 3, 31, 31), "targets": ("batch",)}
    assert made.outputs["picture"] == ("batch", 31, 31, 4)
    assert made.bytes == made.path.stat().st_size
    assert made.difference < 1e-5
    assert {o.domain for o in proto.opset_import} == {""}


def test_logits_alone_and_another_size(tmp_path):
    model = everything(max_out=1)
    made = export(model, tmp_path / "m.onnx", size=26, explanation=False)
    assert (list(made.inputs), list(made.outputs)) == (["images"], ["logits"])
    images = torch.rand(3, 3, 26, 26)
    assert_near(run(made.path, images=images.numpy())["logits"], model(images))


def test_the_model_is_left_as_it_was(tmp_path):
    model = everything(max_out=1, norm="uncentred").train().half()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    made = export(model, tmp_path / "m.onnx", explanation=False)
    assert model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    images = torch.rand(2, 3, 31, 31)
    assert_near(run(made.path, images=images.numpy())["logits"], model.float().eval()(images))


@pytest.mark.parametrize(("channels", "picture"), [(1, True), (4, False)])
def test_pictures_are_of_colours(tmp_path, channels, picture):
    network = nn.Sequential(nn.Conv2d(channels, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = tb.convert(network, input_size=8).eval()
    tb.calibrate(model, torch.rand(4, channels, 8, 8))
    made = export(model, tmp_path / "m.onnx")
    assert ("picture" in made.outputs) is picture
    images = torch.rand(2, channels, 8, 8)
    found = run(made.path, images=images.numpy(), targets=np.array([1, 3]))
    e = tb.explain(model, images, torch.tensor([[1], [3]]))
    assert_near(found["weights"], e.weights[:, 0])
    if picture:
        assert np.abs(found["picture"].astype(int) - tb.render.colour(e)[:, 0]).max() <= 1


def test_units_that_tie_are_no_difference(tmp_path):
    """Which of them wins is decided by rounding: torch's float32 is off by 4e-3 at a pixel."""
    torch.manual_seed(0)
    model = tb.create_model("mini", num_classes=10, width=32, max_out=4, input_size=64).eval()
    tb.calibrate(model, torch.rand(4, 3, 64, 64))
    made = export(model, tmp_path / "m.onnx")
    images = torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    e = tb.explain(model.double(), images.double())
    found = run(made.path, images=images.numpy(), targets=e.targets[:, 0].numpy())
    off = np.linalg.norm(found["weights"] - e.weights[:, 0].numpy())
    assert off <= made.difference * 1.01 * np.linalg.norm(e.weights)
    assert made.difference < 1e-3


def test_nothing_is_written_that_computes_something_else(tmp_path, monkeypatch):
    path = tmp_path / "m.onnx"
    path.write_bytes(b"before")
    right = export_module.rows_and_bias
    monkeypatch.setattr(
        export_module, "rows_and_bias", lambda *a: tuple(1.001 * t for t in right(*a))
    )
    with pytest.raises(ExportError, match=r"off by 1\.0e-03, so nothing was written"):
        export(everything(max_out=1), path)
    assert path.read_bytes() == b"before"
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


class Bessel(nn.Module):
    def forward(self, x):
        return torch.special.i0(x)


class Shared(nn.Module):
    def forward(self, x):
        return x / len(x)


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (Bessel(), "cannot be written as ONNX: .*i0"),
        (Shared(), "it computes with the length of the batch"),
    ],
)
def test_a_network_that_onnx_cannot_hold_is_refused(tmp_path, last, words):
    model = everything(max_out=1)
    model.network = nn.Sequential(model.network, last)
    with pytest.raises(ValueError, match=words):
        export(model, tmp_path / "m.onnx", explanation=False)
    assert not list(tmp_path.iterdir())


def test_what_is_no_bcos_model_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"`model` \(a Linear\) must be a BcosModel"):
        export(nn.Linear(2, 2), tmp_path / "m.onnx")
    conventional = tb.create_model("conventional/mini", num_classes=4, width=4).eval()
    with pytest.raises(ValueError, match=r"conventional.*--no-explanation"):
        export(conventional, tmp_path / "m.onnx")
    made = export(conventional, tmp_path / "m.onnx", explanation=False)
    images = torch.rand(2, 3, 48, 48)
    assert_near(run(made.path, images=images.numpy())["logits"], conventional(images))


def test_a_missing_package_is_named_before_anything_is_computed(tmp_path, monkeypatch):
    monkeypatch.setattr(export_module, "find_spec", lambda name: name != "onnxscript" or None)
    with pytest.raises(ValueError, match=r"needs the package onnxscript: .*torchbcos\[export\]"):
        export(None, tmp_path / "m.onnx")


@pytest.fixture
def command(monkeypatch, capsys):
    return caller(monkeypatch, capsys, "export")


def test_the_command(command, tmp_path):
    source = tmp_path / "m.safetensors"
    model = tb.create_model("mini", num_classes=4, width=4)
    tb.calibrate(model, torch.rand(4, 3, 16, 16))
    tb.save(model, source)
    out = tmp_path / "m.onnx"
    code, printed, _ = command(
        "--model", str(source), "--out", str(out), "--size", "16", "--no-explanation", "--json"
    )
    assert code == 0
    document = json.loads(printed)
    assert document["path"] == str(out)
    assert document["inputs"] == {"images": ["batch", 3, 16, 16]}
    assert document["outputs"] == {"logits": ["batch", 4]}


def test_the_command_says_that_a_file_would_be_wrong(command, tmp_path, monkeypatch):
    right = export_module._run
    monkeypatch.setattr(
        export_module, "_run", lambda *a: {name: 1.5 * v for name, v in right(*a).items()}
    )
    out = tmp_path / "m.onnx"
    code, printed, complaint = command(
        "--model", "cifar10", "--out", str(out), "--size", "8", "--no-explanation"
    )
    assert (code, printed) == (1, "")
    assert "off by 5.0e-01, so nothing was written" in complaint
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "m.pt"], "must end in .onnx"),
        (["--out", "nowhere/m.onnx"], "must be in a folder that exists"),
        (["--model", "cifar11"], "cifar11"),
    ],
)
def test_wrong_input_is_one_sentence(command, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, printed, complaint = command(*arguments)
    assert (code, printed) == (2, "")
    assert message in complaint
    assert not list(tmp_path.iterdir())


class Tokens(nn.Module):
    """A layer that sees images times positions as one batch."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 8, stride=8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        return self.head((x + self.mix(x)).mean(1))


def test_multiples_of_the_batch_are_told_as_such(tmp_path, capfd):
    model = tb.convert(Tokens(), input_size=32)
    tb.calibrate(model, torch.rand(4, 3, 32, 32))
    made = export(model.eval(), tmp_path / "m.onnx")
    run(made.path, images=np.zeros((5, 3, 32, 32), np.float32), targets=np.zeros(5, np.int64))
    assert "Shape mismatch" not in capfd.readouterr().err
    values = onnx.load(made.path).graph.value_info
    names = {d.dim_param for v in values for d in v.type.tensor_type.shape.dim if d.dim_param}
    assert names == {"batch", "16*batch"}


def test_a_size_that_a_network_of_one_size_does_not_take_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`size` \(=24\) .* it takes 16×16 px only\.$"):
        export(make_vit(), tmp_path / "m.onnx", size=24)
