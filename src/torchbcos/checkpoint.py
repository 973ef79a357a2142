"""One file for a model: safetensors, with everything but the weights as JSON in its header.

The header's `torchbcos` entry holds the architecture, every γ, T and b, class names, the encoding
and where the weights come from; a digest over it and over all tensors finds any damage. Loading
parses and never executes: the architecture is a name for `create_model`, or a module the caller
brings.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from torchbcos._arguments import check_device
from torchbcos._version import __version__
from torchbcos.models import BcosModel, convert, create_model
from torchbcos.released import is_released, load_released
from torchbcos.wrappers import bcos_within

__all__ = ["CheckpointError", "default_name", "load", "save", "write_atomically"]

FORMAT = 1
_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
ENCODING = "r,g,b,1-r,1-g,1-b"


class CheckpointError(ValueError):
    """A file that cannot be loaded; the message says why and what to do."""


def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    half: bool = False,
    provenance: Mapping[str, Any] | None = None,
) -> None:
    """Write the model to `path`, or leave what was there untouched if anything fails.

    Unlike `model.state_dict()`, which has the weights alone, the file has γ, T and the rest, too.
    With `half` the weights are stored in float16, at half the size; `load` gives float32 again.
    `provenance` is JSON of your own: the data, the command, the accuracy.

    >>> import tempfile, torchbcos as tb
    >>> model = tb.create_model("cifar9", preset="paper").eval()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tb.save(model, folder + "/m.safetensors")
    ...     again = tb.load(folder + "/m.safetensors")
    >>> images = torch.rand(1, 3, 32, 32)
    >>> torch.equal(model(images), again(images))
    True
    """
    path, model = Path(path), _plain(model)
    statistics = dict(model.named_buffers())  # few, and of any size: float16 may not hold them
    listed = model.state_dict()
    unlisted = {name: statistics[name] for name in _unlisted(model) if name in statistics}
    tensors = {
        name: _stored(value, half and name not in statistics)
        for name, value in {**listed, **unlisted}.items()
    }
    usual = next(model.parameters()).dtype
    config = {
        "format": FORMAT,
        "version": __version__,
        "architecture": asdict(model.architecture),
        "encoding": ENCODING,
        "in_channels": model.in_channels,
        "input_size": list(model.input_size),
        "classes": list(model.classes) if model.classes is not None else None,
        "dtype": _name(usual),
        "dtypes": {
            name: _name(value.dtype)
            for name, value in listed.items()
            if value.is_floating_point() and value.dtype != usual
        },
        "scaling": model.scaling,
        "temperature": model.temperature,
        "logit_bias": model.logit_bias,
        "scales": {name: layer.scale for name, layer in model.bcos_layers()},
        "b": {name: layer.b for name, layer in model.bcos_layers()},
        "eps": {name: layer.eps for name, layer in model.bcos_layers() if layer.eps},
        "provenance": {**model.provenance, **(provenance or {})},
    }
    try:
        text = json.dumps(config, sort_keys=True)
    except TypeError as error:
        raise ValueError(f"`provenance` or an option of the model is not JSON: {error}.") from error
    header = {"torchbcos": text, "digest": _digest(text, tensors)}
    if not path.parent.is_dir():
        raise FileNotFoundError(f"`path` (={str(path)!r}): its folder does not exist; create it.")
    write_atomically(path, safetensors.torch.save(tensors, metadata=header))


def _plain(model: nn.Module) -> BcosModel:
    """The model inside of torch's wrappers, if it can be read back from its tensors."""
    inner = bcos_within(model)
    for name, layer in inner.bcos_layers():
        if "weight" not in layer._parameters:
            raise ValueError(
                f"`model` computes the weight of {name} from others, and could not be read back: "
                "make it plain, with torch.nn.utils.parametrize.remove_parametrizations or "
                "torch.nn.utils.prune.remove."
            )
    return inner


@torch.inference_mode(False)  # no derivative passes weights that are made in it
def load(
    name_or_path: str | os.PathLike[str],
    *,
    module: nn.Module | None = None,
    device: torch.device | str = "cpu",
) -> BcosModel:
    """A model from a file written by `save`, or a bundled one by its name, in evaluation mode.

    For a model that was made with `convert` from a module of your own, pass such a module again as
    `module`; its weights do not matter. Weights that the authors of B-cos networks released are
    read as well; see `released.load_released`.

    >>> import torchbcos as tb
    >>> tb.load("cifar10").classes[3]
    'cat'
    """
    device = check_device(device)
    path = _find(name_or_path)
    try:
        if is_released(path):
            model = load_released(path)
        else:
            config, tensors = _read(path)
            model = _rebuild(config, module, path)
            _install(model, config, tensors)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {_one_line(error)}") from error
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{path}: {_one_line(error)}") from error
    try:
        return model.to(device).eval()
    except (RuntimeError, AssertionError) as error:  # torch raises either, by its build
        raise CheckpointError(
            f"`device` (={str(device)!r}) cannot be used: {_one_line(error).split('. ')[0]}."
        ) from error


def _unlisted(model: nn.Module) -> list[str]:
    """Buffers with `persistent=False`, which `state_dict` leaves out though outputs use them."""
    return [
        f"{module_name}.{name}".removeprefix(".")
        for module_name, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _stored(value: Tensor, half: bool) -> Tensor:
    value = value.detach().cpu()
    if half and value.is_floating_point():
        value = value.half()
        if not torch.isfinite(value).all():
            raise ValueError("`half` (=True) would overflow: a weight is beyond float16's range.")
    return value.contiguous().clone()  # safetensors refuses two names for one memory


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        value = tensors[name].contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_atomically(path: Path, content: bytes) -> None:
    """`content` in `path` as a whole, or what was there before."""
    try:
        _replace(path, content)
    except OSError as error:  # it names the temporary file, or none
        raise OSError(error.errno, error.strerror, str(path)) from error


def _replace(path: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        Path(temporary).chmod(0o666 & ~mask)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _bundled() -> dict[str, Path]:
    folder = resources.files("torchbcos") / "weights"
    if not folder.is_dir():
        return {}
    files = (Path(str(p)) for p in folder.iterdir())
    return {p.stem: p for p in files if p.suffix == ".safetensors"}


def default_name() -> str:
    """The bundled model that a command uses when none is named."""
    bundled = _bundled()
    for name in ("imagenette", "cifar10", *bundled):
        if name in bundled:
            return name
    raise CheckpointError("no model is bundled with this version: name a file with --model.")


def _find(name_or_path: str | os.PathLike[str]) -> Path:
    bundled = _bundled()
    if str(name_or_path) in bundled:
        return bundled[str(name_or_path)]
    path = Path(name_or_path)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        names = f" or a bundled model: {', '.join(sorted(bundled))}" if bundled else ""
        raise CheckpointError(f"{path} {what}: give a file that torchbcos.save wrote{names}.")
    return path


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safetensors.safe_open(path, "pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(
            f"{path} is no intact safetensors file ({_one_line(error)}): it may be cut short or "
            "damaged, so copy or download it again."
        ) from error
    if "torchbcos" not in header:
        raise CheckpointError(
            f"{path} is a safetensors file of another program, without torchbcos's header: give a "
            "file that torchbcos.save wrote."
        )
    if header.get("digest") != _digest(header["torchbcos"], tensors):
        raise CheckpointError(f"{path} is damaged, its digest does not match: copy it again.")
    config: dict[str, Any] = json.loads(header["torchbcos"])
    if config.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {config.get('format')}, this version reads {FORMAT}: update "
            "torchbcos."
        )
    return config, tensors


def _rebuild(config: dict[str, Any], module: nn.Module | None, path: Path) -> BcosModel:
    name, options = config["architecture"]["name"], config["architecture"]["options"]
    if module is not None:
        known = ("b", "max_out", "norm", "head", "strict")
        return convert(module, **{k: options[k] for k in known}, input_size=config["input_size"])
    if name is None:
        raise CheckpointError(
            f"{path} holds a model converted from a module of its author: in Python, pass that "
            "module, as in torchbcos.load(path, module=MyNetwork()); commands cannot make it."
        )
    return create_model(name, input_size=config["input_size"], **options)


def _install(model: BcosModel, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    model.to(_DTYPES[config["dtype"]])
    for name in set(_unlisted(model)) & tensors.keys():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, tensors.pop(name))
    state = model.state_dict(keep_vars=True)
    expected = {name: tuple(v.shape) for name, v in state.items()}
    found = {name: tuple(v.shape) for name, v in tensors.items()}
    wrong = sorted(n for n in expected.keys() | found.keys() if expected.get(n) != found.get(n))
    layers = dict(model.bcos_layers())
    if wrong or layers.keys() != config["scales"].keys():
        first = wrong[0] if wrong else "the list of layers"
        raise ValueError(
            f"its weights do not fit the network: {len(wrong)} tensors differ, the first is {first}"
            f" (file {found.get(first)}, network {expected.get(first)})."
        )
    for name, dtype in config.get("dtypes", {}).items():
        state[name].data = state[name].data.to(_DTYPES[dtype])
    model.load_state_dict(tensors)
    for name, layer in layers.items():
        layer.scale = float(config["scales"][name])
        layer.b = float(config.get("b", {}).get(name, layer.b))
        layer.eps = float(config.get("eps", {}).get(name, 0))
    model.temperature = float(config["temperature"])
    model.logit_bias = float(config["logit_bias"])
    model.scaling = config["scaling"]
    model.classes = tuple(config["classes"]) if config["classes"] is not None else None
    model.in_channels = config["in_channels"]
    model.input_size = (config["input_size"][0], config["input_size"][1])
    model.provenance = config["provenance"]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
