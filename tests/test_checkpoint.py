"""One file for a model: what was saved comes back to the bit, and damage is always found."""

import json
import os
import pickle
import struct

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import torchbcos as tb
from torchbcos.checkpoint import CheckpointError, write_atomically
from torchbcos.finetune import with_new_head


def images(count=2, size=16, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, 3, size, size, generator=generator).to(dtype)


def own_module(width=2, classes=3):
    return nn.Sequential(
        nn.Conv2d(3, width, 3),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, classes),
    )


def own_model(**options):
    torch.manual_seed(0)
    model = tb.convert(own_module(), input_size=16, **options)
    return tb.calibrate(model, images()).eval()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """The bytes of a small model's file."""
    file = tmp_path_factory.mktemp("intact") / "model.safetensors"
    tb.save(own_model(), file)
    return file.read_bytes()


def header_length(content):
    return 8 + struct.unpack("<Q", content[:8])[0]


def assert_refused(path, content, pattern="no intact|another program|digest"):
    """Exactly one clear line, whatever is in the file."""
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=pattern) as error:
        tb.load(path, module=own_module())
    message = str(error.value)
    assert str(path) in message
    assert "\n" not in message
    assert message.endswith((".", ".)"))


# There and back.


def state(model):
    return {
        "classes": model.classes,
        "num_classes": model.num_classes,
        "in_channels": model.in_channels,
        "input_size": model.input_size,
        "architecture": model.architecture,
        "scaling": model.scaling,
        "temperature": model.temperature,
        "logit_bias": model.logit_bias,
        "layers": {
            name: (layer.scale, layer.b, layer.max_out) for name, layer in model.bcos_layers()
        },
        "dtypes": {name: value.dtype for name, value in model.state_dict().items()},
    }


NAMED = {
    "cifar9": ({"b": 1.5, "max_out": 1, "preset": "paper"}, 32),
    "squeezenet1_1": ({"classes": ["cat", "dog"], "b": 1.25, "dropout": 0.1}, 64),
    "shufflenet_v2_x0_5": ({"num_classes": 3, "head": "pool", "norm": "uncentred"}, 64),
    "timm/tinynet_e": ({"num_classes": 3}, 64),
    "timm/test_convnext": ({"num_classes": 3, "norm": "uncentred"}, 64),
}


def named(name):
    torch.manual_seed(0)
    options, size = NAMED[name]
    model = tb.create_model(name, **options)
    if "preset" not in options:
        tb.calibrate(model, images(2, size))
    if options.get("norm"):
        model.train()
        with torch.no_grad():
            for _ in range(2):
                model(images(4, size))  # running statistics of its own
    return model.eval(), size


@pytest.mark.parametrize("name", NAMED)
def test_a_model_by_name_comes_back_to_the_bit(name, path):
    model, size = named(name)
    tb.save(model, path)
    torch.manual_seed(99)
    again = tb.load(path)
    assert state(again) == state(model)
    assert not any(m.training for m in again.modules())
    before, after = model.state_dict(), again.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    with torch.no_grad():
        assert torch.equal(again(images(2, size)), model(images(2, size)))
    e, f = (tb.explain(m, images(1, size)) for m in (model, again))
    assert torch.equal(e.weights, f.weights)


def test_auxiliary_classifiers_come_back(path):
    torch.manual_seed(0)
    model = tb.create_model("googlenet", num_classes=3)
    tb.calibrate(model, images(2, 64))
    tb.save(model, path)
    again = tb.load(path).train()
    with torch.no_grad():
        pairs = zip(again(images(1, 64)), model.train()(images(1, 64)), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16])
def test_the_dtype_comes_back(dtype, path):
    model = own_model(norm="uncentred").to(dtype)
    tb.save(model, path)
    again = tb.load(path, module=own_module())
    assert state(again) == state(model)
    assert torch.equal(again(images(dtype=dtype)), model(images(dtype=dtype)))


@pytest.mark.parametrize("half", [False, True])
def test_each_tensor_keeps_the_dtype_of_its_own(half, path):
    model = own_model(norm="uncentred")
    model.network.get_submodule("1").double()
    with torch.no_grad():
        model.train()(images())  # statistics that float32 does not hold
    model.eval()
    tb.save(model, path, half=half)
    again = tb.load(path, module=own_module())
    assert state(again) == state(model)
    assert {v.dtype for v in again.state_dict().values()} >= {torch.float32, torch.float64}
    if not half:
        assert torch.equal(again(images()), model(images()))
    assert all(torch.equal(v, w) for v, w in zip(model.buffers(), again.buffers(), strict=True))


class Mixed(nn.Module):
    """Its outputs depend on a buffer that `state_dict` does not list."""

    def __init__(self, *, traceable=True):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 3)
        self.register_buffer("mix", torch.randn(4, 4), persistent=False)
        self.register_buffer("empty", None, persistent=False)
        self.traceable = traceable

    def forward(self, x):
        x = self.conv(x).mean([2, 3])
        if not self.traceable and x.mean() > 1e6:
            return None
        return self.fc(x @ self.mix)


@pytest.mark.parametrize("traceable", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_buffers_that_are_not_persistent_come_back(traceable, dtype, path):
    model = tb.convert(Mixed(traceable=traceable).to(dtype), input_size=16)
    tb.calibrate(model, images(dtype=dtype)).eval()
    tb.save(model, path)
    again = tb.load(path, module=Mixed(traceable=traceable))
    assert torch.equal(again(images(dtype=dtype)), model(images(dtype=dtype)))


def test_files_without_such_buffers_are_read_with_the_module_s_own(path, monkeypatch):
    module = Mixed()
    model = tb.calibrate(tb.convert(module, input_size=16), images()).eval()
    monkeypatch.setattr("torchbcos.checkpoint._unlisted", lambda _: [])
    tb.save(model, path)
    monkeypatch.undo()
    assert torch.equal(tb.load(path, module=module)(images()), model(images()))


def test_half_stores_rounded_weights_in_half_the_space(path):
    model, size = named("cifar9")
    tb.save(model, path)
    full = path.stat().st_size
    tb.save(model, path, half=True)
    assert path.stat().st_size < 0.51 * full
    again = tb.load(path)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.half())
    assert state(again) == state(model)  # float32 again
    assert torch.equal(again(images(2, size)), model(images(2, size)))


def test_half_leaves_the_statistics_of_norms_as_they_are(path):
    model = tb.create_model("mini", num_classes=3, norm="uncentred", width=4).eval()
    for module in model.modules():
        if isinstance(module, tb.norms.UncentredBatchNorm2d):
            module.running_var.uniform_(1e-9, 1e-7)  # float16 begins at 6e-8
    tb.save(model, path, half=True)
    again = dict(tb.load(path).named_buffers())
    for name, value in model.named_buffers():
        assert torch.equal(value, again[name])


def test_half_refuses_what_float16_cannot_hold(path):
    model = own_model()
    with torch.no_grad():
        next(model.parameters()).mul_(1e6)
    with pytest.raises(ValueError, match="beyond float16's range"):
        tb.save(model, path, half=True)
    assert not path.exists()


def test_saving_leaves_the_model_as_it_was(path):
    model = own_model().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tb.save(model, path, half=True)
    assert model.training
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_channels_last_weights_come_back(path):
    model = own_model().to(memory_format=torch.channels_last)
    tb.save(model, path)
    assert torch.equal(tb.load(path, module=own_module())(images()), model(images()))


@pytest.mark.parametrize("norm", [None, "uncentred"])
@pytest.mark.parametrize("head", ["conv", "pool"])
def test_a_model_from_an_own_module_comes_back_with_such_a_module(norm, head, path):
    model = own_model(norm=norm, head=head, b=1.5, max_out=3, classes=["a", "b", "c"])
    tb.save(model, path)
    torch.manual_seed(1)
    again = tb.load(path, module=own_module())
    assert state(again) == state(model)
    assert torch.equal(again(images()), model(images()))


def test_a_model_of_an_untraceable_module_comes_back(path):
    class Undecided(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, 4, 3)
            self.twin = self.stem
            self.fc = nn.Linear(4, 2)

        def forward(self, x):
            x = self.stem(x)
            return self.fc(x.mean([2, 3])) if x.mean() < 1e6 else None

    torch.manual_seed(0)
    model = tb.calibrate(tb.convert(Undecided(), input_size=16), images()).eval()
    tb.save(model, path)
    assert torch.equal(tb.load(path, module=Undecided())(images()), model(images()))


def test_without_its_module_an_own_model_says_what_to_pass(path):
    tb.save(own_model(), path)
    with pytest.raises(CheckpointError, match=r"pass that module, as in torchbcos.load\(path, mod"):
        tb.load(path)


def test_exponents_that_were_changed_come_back(path):
    model = tb.create_model("mini", num_classes=3, input_size=32).eval()
    for b, (_, layer) in zip((1.25, 1.5, 2.5), model.bcos_layers(), strict=False):
        layer.b = b
    tb.save(model, path)
    loaded = tb.load(path)
    assert [la.b for _, la in loaded.bcos_layers()] == [la.b for _, la in model.bcos_layers()]
    new = with_new_head(model, ("x", "y"))
    assert [la.b for _, la in new.bcos_layers()] == [la.b for _, la in model.bcos_layers()]


def test_provenance_comes_back(path):
    provenance = {"data": "CIFAR-10", "accuracy": 0.93, "seeds": [1, 2], "note": "größer → „gut“"}
    tb.save(own_model(), path, provenance=provenance)
    again = tb.load(path, module=own_module())
    assert again.provenance == provenance
    tb.save(again, path)
    assert tb.load(path, module=own_module()).provenance == provenance
    tb.save(again, path, provenance={"accuracy": 0.94})
    assert tb.load(path, module=own_module()).provenance == {**provenance, "accuracy": 0.94}


def test_provenance_that_is_no_json_is_an_error_and_writes_nothing(path):
    with pytest.raises(ValueError, match="not JSON"):
        tb.save(own_model(), path, provenance={"when": object()})
    assert list(path.parent.iterdir()) == []


def test_names_with_any_letters_come_back(path):
    model = own_model(classes=["Löwe", 'a "b"\\n', "猫"])
    tb.save(model, path)
    assert tb.load(path, module=own_module()).classes == ("Löwe", 'a "b"\\n', "猫")


def test_the_header_can_be_read_without_this_library(path):
    tb.save(own_model(), path)
    with safetensors.safe_open(path, "pt") as file:
        config = json.loads(file.metadata()["torchbcos"])
        names = set(file.keys())
    assert config["format"] == 1
    assert config["encoding"] == "r,g,b,1-r,1-g,1-b"
    assert config["scales"].keys() == {"0", "5"}
    assert names == {"network.0.weight", "network.5.weight"}


def test_paths_may_be_text(path):
    tb.save(own_model(), str(path))
    assert tb.load(str(path), module=own_module()).num_classes == own_model().num_classes


def test_a_model_is_loaded_onto_the_device_that_was_asked_for(path):
    tb.save(own_model(), path)
    model = tb.load(path, module=own_module(), device="meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}


# Files that are not right.


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        tb.load(tmp_path / "nothing.safetensors")
    with pytest.raises(CheckpointError, match="is a folder"):
        tb.load(tmp_path)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="its folder does not exist"):
        tb.save(own_model(), tmp_path / "no" / "model.safetensors")


FOREIGN = {
    "empty": (b"", "no intact safetensors file"),
    "zeros": (b"\x00" * 100, "no intact safetensors file"),
    "ones": (b"\xff" * 100, "no intact safetensors file"),
    "text": (b"hello world, I am a text file", "no intact safetensors file"),
    "noise": (bytes(range(256)) * 8, "no intact safetensors file"),
    "no header": (safetensors.torch.save({"w": torch.ones(2)}), "of another program"),
    "another header": (
        safetensors.torch.save({"w": torch.ones(2)}, {"format": "pt"}),
        "of another program",
    ),
    "no digest": (safetensors.torch.save({"w": torch.ones(2)}, {"torchbcos": "{}"}), "digest"),
}


@pytest.mark.parametrize(("content", "pattern"), FOREIGN.values(), ids=FOREIGN)
def test_foreign_files(content, pattern, path):
    assert_refused(path, content, pattern)


class Bomb:
    def __reduce__(self):
        return (os.mkdir, ("exploded",))


@pytest.mark.parametrize("kind", ["pickle", "pth", "old pth"])
def test_nothing_in_a_file_is_executed(kind, path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Bomb()))
    else:  # as weights that the authors released
        torch.save({"w": Bomb()}, path, _use_new_zipfile_serialization=kind == "pth")
    with pytest.raises(CheckpointError, match=r"no intact safetensors file|more than tensors"):
        tb.load(path)
    assert not (tmp_path / "exploded").exists()


def test_a_file_of_a_later_format_asks_for_an_update(path, monkeypatch):
    monkeypatch.setattr("torchbcos.checkpoint.FORMAT", 2)
    tb.save(own_model(), path)
    content = path.read_bytes()
    monkeypatch.undo()
    assert_refused(path, content, "has format 2, this version reads 1: update")


@pytest.mark.parametrize(
    "module",
    [own_module(width=4), own_module(classes=4), nn.Sequential(nn.Conv2d(3, 2, 3)), nn.ReLU()],
    ids=["wider", "more classes", "fewer layers", "no layer"],
)
def test_a_module_that_does_not_fit_is_an_error_and_is_not_touched(module, path):
    tb.save(own_model(), path)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"do not fit the network|no convolution") as error:
        tb.load(path, module=module)
    assert "\n" not in str(error.value)
    assert all(torch.equal(module.state_dict()[name], value) for name, value in before.items())


def test_a_file_of_a_model_that_is_no_longer_known_is_an_error(path, monkeypatch):
    model, _ = named("cifar9")
    object.__setattr__(model.architecture, "name", "resnet3000")
    tb.save(model, path)
    with pytest.raises(CheckpointError, match="no known model"):
        tb.load(path)


# Damage.


def test_a_file_cut_anywhere_is_refused(intact, path):
    header = header_length(intact)
    rest = range(header, len(intact), max(1, (len(intact) - header) // 60))
    for length in [*range(header), *rest, len(intact) - 1]:
        assert_refused(path, intact[:length], "no intact safetensors file")


@pytest.mark.parametrize("flip", [0b1, 0b100000, 0xFF], ids=["last bit", "case", "all bits"])
def test_a_header_with_any_byte_flipped_is_refused(flip, intact, path):
    for at in range(header_length(intact)):
        damaged = bytearray(intact)
        damaged[at] ^= flip
        assert_refused(path, bytes(damaged))


def test_a_weight_with_any_byte_flipped_is_refused(intact, path):
    for at in range(header_length(intact), len(intact), 7):
        damaged = bytearray(intact)
        damaged[at] ^= 1 << at % 8
        assert_refused(path, bytes(damaged), "its digest does not match")


def test_bytes_after_the_end_are_refused(intact, path):
    assert_refused(path, intact + b"\x00" * 8, "no intact safetensors file")


def test_the_intact_file_is_not_refused(intact, path):
    """Without this, the tests above would prove nothing."""
    path.write_bytes(intact)
    assert torch.equal(tb.load(path, module=own_module())(images()), own_model()(images()))


# Writing.


def failing(*_, **__):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    "step", ["safetensors.torch.save", "os.fsync", "pathlib.Path.replace", "pathlib.Path.chmod"]
)
def test_a_save_that_fails_leaves_what_was_there(step, path, intact, monkeypatch):
    path.write_bytes(intact)
    model = own_model(b=1.5)
    monkeypatch.setattr(step, failing)
    with pytest.raises(OSError, match="No space left"):
        tb.save(model, path)
    monkeypatch.undo()
    assert path.read_bytes() == intact
    assert list(path.parent.iterdir()) == [path]


def test_an_interrupted_save_leaves_no_other_file(path, intact, monkeypatch):
    path.write_bytes(intact)

    def interrupt(_):
        raise KeyboardInterrupt

    model = own_model(b=1.5)
    monkeypatch.setattr("os.fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tb.save(model, path)
    assert path.read_bytes() == intact
    assert list(path.parent.iterdir()) == [path]


def test_a_save_replaces_what_was_there_and_leaves_no_other_file(path):
    path.write_bytes(b"something else")
    tb.save(own_model(), path)
    assert torch.equal(tb.load(path, module=own_module())(images()), own_model()(images()))
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
def test_a_file_gets_the_permissions_of_any_new_file(path):
    tb.save(own_model(), path)
    other = path.with_name("other")
    other.write_bytes(b"")
    assert path.stat().st_mode == other.stat().st_mode


def test_a_failed_write_names_the_path_asked_for(tmp_path):
    for path in (tmp_path / "no" / "x", tmp_path):
        with pytest.raises(OSError) as caught:  # noqa: PT011
            write_atomically(path, b"")
        assert caught.value.filename == str(path)


def averaged(model):
    return AveragedModel(model)


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, averaged])
def test_what_torch_wraps_is_saved_as_what_it_wraps(wrap, path):
    model = own_model()
    tb.save(wrap(model), path)
    assert torch.equal(tb.load(path, module=own_module())(images()), model(images()))


def test_what_could_not_be_read_back_is_not_written(path):
    model = own_model()
    nn.utils.parametrizations.weight_norm(model.network.get_submodule("0"))
    with pytest.raises(ValueError, match=r"weight of 0 from others.*remove_parametrizations"):
        tb.save(model, path)
    with pytest.raises(TypeError, match=r"`model` \(a Conv2d\) must be a BcosModel"):
        tb.save(nn.Conv2d(3, 4, 3), path)
    assert not path.exists()
