"""The kernels of RandAugment against its reference: on a GPU, or under Triton's interpreter."""

import pytest
import torch

from cases import pictures
from torchbcos import augment
from torchbcos.augment import _OPERATIONS, _operate, _table

pytest.importorskip("triton")
from torchbcos.ops import triton_augment

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def reference(x, choice, side, m):
    return _operate(x.cpu().double(), choice, side, m)


def fused(x, choice, side, m):
    numbers = _table(m, torch.device("cpu"), torch.float32)[choice, side]
    return triton_augment.operate(x.to(DEVICE), numbers.to(DEVICE), 2 ** round(4 * m)).cpu()


@pytest.mark.parametrize("m", [0.3, 1.0])
@pytest.mark.parametrize("name", _OPERATIONS)
def test_each_operation_equals_the_reference(name, m):
    x = pictures(torch.float32)
    choice = torch.full((len(x),), _OPERATIONS.index(name))
    for sides in (torch.zeros(6).long(), torch.ones(6).long()):
        made, expected = fused(x, choice, sides, m), reference(x, choice, sides, m)
        assert made.dtype == torch.float32
        torch.testing.assert_close(made, expected.float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["identity", "posterise", "solarise", "autocontrast", "equalise"])
def test_operations_by_a_table_are_exact(name):
    x = pictures(torch.float32)
    choice, side = torch.full((6,), _OPERATIONS.index(name)), torch.zeros(6).long()
    assert torch.equal(fused(x, choice, side, 0.3), _operate(x, choice, side, 0.3))


def test_each_image_of_a_batch_takes_its_own(monkeypatch):
    """Also where an image has more pixels than a program takes, and lies in any order."""
    monkeypatch.setattr(triton_augment, "BLOCK", 64)
    count = 2 * len(_OPERATIONS)
    x = torch.rand(count, 3, 17, 11, generator=torch.Generator().manual_seed(1))
    choice, side = torch.arange(count) % len(_OPERATIONS), torch.arange(count) // len(_OPERATIONS)
    expected = reference(x, choice, side, 0.4).float()
    for given in (x, x.contiguous(memory_format=torch.channels_last), x.flip(0).flip(0)):
        before = given.clone()
        made = fused(given, choice, side, 0.4)
        # A value beside an edge between levels may fall on its other side.
        assert ((made - expected).abs() > 1e-5).float().mean() < 0.002
        assert torch.equal(given, before)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_a_gpu_takes_the_kernels_and_gives_what_a_cpu_does(monkeypatch):
    used = []
    operate = triton_augment.operate
    monkeypatch.setattr(triton_augment, "operate", lambda *a: used.append(1) or operate(*a))
    x = torch.rand(60, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    draws = augment.AUGMENTATIONS["rand_augment"].draw(torch.Generator().manual_seed(2), 60)
    made = augment.rand_augment(x.cuda(), draws.cuda()).cpu()
    assert len(used) == 2
    assert ((made - augment.rand_augment(x, draws)).abs() > 1e-4).float().mean() < 0.002
