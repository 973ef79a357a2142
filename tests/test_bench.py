import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from torchbcos import bench, functional
from torchbcos.cli import app
from torchbcos.layers import AvgPool2d, BcosConv2d

SMALL = {"batch": 2, "size": 32}


def kinds(model):
    return {type(m) for m in model.modules()}


def test_the_four_ways_differ_in_their_layers_alone():
    built = {w: bench.build(bench.Case(w, "inference")) for w in ("floor", "peer", "ours")}
    assert BcosConv2d in kinds(built["ours"])
    assert BcosConv2d not in kinds(built["floor"]) | kinds(built["peer"])
    assert AvgPool2d not in kinds(built["floor"])
    nodes = {node.target for node in built["floor"].network.graph.nodes}
    assert functional.add not in nodes
    x = torch.rand(1, 3, 64, 64)
    assert all(model(x).shape == (1, 10) for model in built.values())
    sizes = {w: sum(p.numel() for p in model.parameters()) for w, model in built.items()}
    assert len(set(sizes.values())) == 1
    conventional = bench.build(bench.Case("conventional", "inference"))
    assert nn.BatchNorm2d in kinds(conventional)


def test_two_units_double_the_floor():
    one, two = (bench.build(bench.Case("floor", "inference", "cifar9", u)) for u in (1, 2))
    first = [next(m for m in n.modules() if isinstance(m, nn.Conv2d)) for n in (one, two)]
    assert [c.out_channels for c in first] == [64, 128]


def test_the_peers_layers_compute_the_same_function():
    case = {"task": "inference", "arch": "cifar9", "units": 2}
    ours, peer = (bench.build(bench.Case(w, **case)) for w in ("ours", "peer"))
    for mine, other in zip(
        (m for m in ours.modules() if isinstance(m, BcosConv2d)),
        (m for m in peer.modules() if type(m).__name__ == "BcosConv2d"),
        strict=True,
    ):
        mine.scale = 1.0
        other.linear.weight.data.copy_(mine.weight.data)
        x = torch.randn(2, mine.in_channels, 8, 8)
        with torch.no_grad():
            torch.testing.assert_close(mine(x), other(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("task", ["training", "inference", "explanation"])
@pytest.mark.parametrize("way", ["ours", "peer"])
def test_every_task_is_measured(way, task):
    case = bench.Case(way, task, "cifar9", **SMALL)
    (found,) = bench.bench([case], "cpu", torch.float32, seconds=0.001)
    assert found.milliseconds > 0
    assert found.as_json()["task"] == task
    assert "cifar9" in found.words()


def test_a_missing_peer_is_left_out(monkeypatch):
    def missing(_):
        raise ImportError("bcos")

    monkeypatch.setattr(bench, "_peer", missing)
    assert not list(bench.bench([bench.Case("peer", "inference")], "cpu", torch.float32))


def test_nothing_is_reported_when_the_kernels_are_wrong(monkeypatch, tmp_path):
    right = functional.bcos_conv2d
    monkeypatch.setattr(
        functional,
        "bcos_conv2d",
        lambda x, *a, **k: right(x, *a, **k) * (1.001 if x.dtype == torch.float32 else 1),
    )
    with pytest.raises(bench.BenchError, match=r"off by 1\.0e-03"):
        next(bench.bench([bench.Case("ours", "inference")], "cpu", torch.float32))
    out = tmp_path / "speed.json"
    result = CliRunner().invoke(app, ["bench", "--out", str(out)])
    assert result.exit_code == 1
    assert not out.exists()


def test_the_command_writes_what_it_has(monkeypatch, tmp_path):
    cases = [bench.Case(w, "inference", "cifar9", **SMALL) for w in ("conventional", "ours")]
    monkeypatch.setattr(bench, "suite", lambda *_: cases)
    out = tmp_path / "speed.json"
    result = CliRunner().invoke(app, ["bench", "--seconds", "0.01", "--out", str(out)])
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    assert [m["way"] for m in document["measurements"]] == ["conventional", "ours"]
    assert document["evidence"]["dtype"] == "float32"


def test_the_suite_covers_what_is_compared():
    cases = bench.suite("cuda")
    assert {c.arch for c in cases} == {"resnet34", "densenet121", "vgg11", "cifar9"}
    assert {c.b for c in cases} == {1, 1.5, 2, 2.5}
    assert {c.way for c in cases} == {"conventional", "floor", "peer", "ours"}
    assert {c.task for c in cases} == {"training", "inference", "explanation"}
    assert {c.units for c in cases} == {1, 2}
    assert {c.compiled for c in cases} == {False, True}
    assert not any(c.compiled for c in bench.suite("cuda", compiled=False))
    assert {c.batch for c in bench.suite("cpu")} == {8}
