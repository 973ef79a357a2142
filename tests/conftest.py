import os

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

hypothesis.settings.register_profile(
    "reproducible",
    deadline=None,
    derandomize=True,
    max_examples=60,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("reproducible")

torch.set_num_threads(1)  # the tensors are tiny, and xdist already fills the cores


@pytest.fixture(scope="session")
def trained():
    """By B: networks trained on four of the shapes; see tests/trained.py."""
    from trained import train_on_shapes

    return {b: train_on_shapes(b) for b in (1.0, 2.5)}


@pytest.fixture
def reproduce(monkeypatch, capsys, tmp_path):
    """Runs `torchbcos reproduce ARGUMENTS` in an empty folder: its code, output and complaints."""
    from cases import caller

    monkeypatch.chdir(tmp_path)
    return caller(monkeypatch, capsys, "reproduce")


@pytest.fixture
def little_data(monkeypatch):
    """Whatever a training opens, it gets a few shapes."""
    from small_training import few_shapes
    from torchbcos import train

    monkeypatch.setattr(train, "open_data", lambda *_, **__: few_shapes())
