import importlib
import pkgutil
import subprocess
import sys

import pytest

import torchbcos


def test_every_public_name_is_there_once():
    assert len(torchbcos.__all__) == len(set(torchbcos.__all__))
    for name in torchbcos.__all__:
        assert getattr(torchbcos, name) is not None
        assert not name.startswith("_")


def modules():
    return [m.name for m in pkgutil.walk_packages(torchbcos.__path__, "torchbcos.")]


@pytest.mark.parametrize("name", modules())
def test_every_name_a_module_promises_is_there(name):
    if name.endswith("__main__"):
        pytest.skip("it is the program")
    module = importlib.import_module(name)
    promised = getattr(module, "__all__", [])
    assert len(promised) == len(set(promised))
    for each in promised:
        assert hasattr(module, each)


def test_the_public_names_are_these_and_no_others():
    layers = {"BcosConv1d", "BcosConv2d", "BcosConv3d", "BcosLinear"}
    models = {"BcosModel", "convert", "create_model", "list_models", "load", "save"}
    modules = {"encoding", "functional", "neurons", "norms", "render"}
    explanations = {"Explanation", "explain", "explanation_mode"}
    assert set(torchbcos.__all__) == {
        *layers,
        *models,
        *modules,
        *explanations,
        "calibrate",
        "signal",
    }


def test_a_star_import_brings_exactly_the_public_names():
    namespace = {}
    exec("from torchbcos import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(torchbcos.__all__)


def test_the_package_is_typed_and_has_a_version():
    assert pkgutil.get_data("torchbcos", "py.typed") is not None
    assert all(part.isdigit() for part in torchbcos.__version__.split(".")[:2])


def test_importing_the_package_loads_no_optional_package():
    optional = ["triton", "fastapi", "lightning", "captum", "lime", "onnx", "timm", "bcos"]
    code = (
        "import sys, torchvision; before = set(sys.modules); import torchbcos; "
        f"print(sorted((set(sys.modules) - before) & set({optional!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
