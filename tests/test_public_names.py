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


@pytest.mark.parametrize("name", ["functional", "layers", "norms", "encoding", "ops"])
def test_every_name_a_module_promises_is_there(name):
    module = importlib.import_module(f"torchbcos.{name}")
    assert len(module.__all__) == len(set(module.__all__))
    for promised in module.__all__:
        assert hasattr(module, promised)


def test_the_contract_of_the_foundations():
    for name in ("BcosLinear", "BcosConv1d", "BcosConv2d", "BcosConv3d", "explanation_mode"):
        assert name in torchbcos.__all__
    for name in ("functional", "encoding", "norms"):
        assert name in torchbcos.__all__


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
