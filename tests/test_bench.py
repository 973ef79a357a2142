import json
from itertools import product

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from torchbcos import bench, bench_cases, bench_networks, functional
from torchbcos.bench_cases import Case
from torchbcos.bench_networks import build
from torchbcos.cli import app
from torchbcos.layers import AvgPool2d, BcosConv2d

SMALL = {"batch": 2, "size": 32}


def kinds(model):
    return {type(m) for m in model.modules()}


def test_the_four_ways_differ_in_their_layers_alone():
    built = {w: build(Case(w, "inference")) for w in ("floor", "peer", "ours")}
    assert BcosConv2d in kinds(built["ours"])
    assert BcosConv2d not in kinds(built["floor"]) | kinds(built["peer"])
    assert AvgPool2d not in kinds(built["floor"])
    nodes = {node.target for node in built["floor"].network.graph.nodes}
    assert functional.add not in nodes
    x = torch.rand(1, 3, 64, 64)
    assert all(model(x).shape == (1, 10) for model in built.values())
    sizes = {w: sum(p.numel() for p in model.parameters()) for w, model in built.items()}
    assert len(set(sizes.values())) == 1
    conventional = build(Case("conventional", "inference"))
    assert nn.BatchNorm2d in kinds(conventional)


def test_the_second_floor_has_our_pools_and_nothing_else_of_ours():
    floor, pooled = (build(Case(w, "inference")) for w in ("floor", "pooled-floor"))
    assert AvgPool2d in kinds(pooled)
    assert [k for k in kinds(pooled) if k.__module__.startswith("torchbcos.layers")] == [AvgPool2d]
    assert functional.add not in {node.target for node in pooled.network.graph.nodes}
    pooled.load_state_dict(floor.state_dict())
    x = torch.rand(1, 3, 64, 64)
    assert torch.equal(floor(x), pooled(x))


def test_two_units_double_the_floor():
    one, two = (build(Case("floor", "inference", "cifar9", u)) for u in (1, 2))
    first = [next(m for m in n.modules() if isinstance(m, nn.Conv2d)) for n in (one, two)]
    assert [c.out_channels for c in first] == [64, 128]


def test_the_peers_layers_compute_the_same_function():
    case = {"task": "inference", "arch": "cifar9", "units": 2}
    ours, peer = (build(Case(w, **case)) for w in ("ours", "peer"))
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
    case = Case(way, task, "cifar9", **SMALL)
    (found,) = bench.bench([case], "cpu", torch.float32, seconds=0.001)
    assert found.milliseconds > 0
    assert found.as_json()["task"] == task
    assert "cifar9" in found.words()


def test_on_a_cpu_cases_take_turns(monkeypatch):
    ran = []
    monkeypatch.setattr(bench, "_step", lambda case, *_: lambda: ran.append(case.way))
    monkeypatch.setattr(bench, "_count", lambda *_: 2)
    ways = ["conventional", "floor", "ours"]
    found = list(bench.bench([Case(w, "inference") for w in ways], "cpu", torch.float32))
    assert [m.case.way for m in found] == ways
    warm = [w for w in ways for _ in range(3)]
    assert ran == warm + [w for w in ways for _ in range(2)] * bench.GROUPS


def test_a_missing_peer_is_left_out(monkeypatch):
    def missing(_):
        raise ImportError("bcos")

    monkeypatch.setattr(bench_networks, "_peer", missing)
    assert not list(bench.bench([Case("peer", "inference")], "cpu", torch.float32))


def test_the_command_names_a_missing_peer(monkeypatch, tmp_path):
    def missing(_):
        raise ModuleNotFoundError("No module named 'bcos'", name="bcos")

    monkeypatch.setattr(bench_networks, "_peer", missing)
    out = tmp_path / "speed.json"
    for ways, code in ((("peer",), 2), (("peer", "conventional"), 0)):
        few = [Case(w, "inference", "cifar9", **SMALL) for w in ways]
        monkeypatch.setattr(bench_cases, "suite", lambda *_, few=few: few)
        result = CliRunner().invoke(app, ["bench", "--seconds", "0.01", "--out", str(out)])
        assert result.exit_code == code
        assert "the package bcos." in result.stderr
        assert out.exists() == ("Wrote" in result.stdout) == (code == 0)


def test_nothing_is_reported_when_the_kernels_are_wrong(monkeypatch, tmp_path):
    right = functional.bcos_conv2d
    monkeypatch.setattr(
        functional,
        "bcos_conv2d",
        lambda x, *a, **k: right(x, *a, **k) * (1.001 if x.dtype == torch.float32 else 1),
    )
    with pytest.raises(bench.BenchError, match=r"off by 1\.0e-03"):
        next(bench.bench([Case("ours", "inference")], "cpu", torch.float32))
    out = tmp_path / "speed.json"
    result = CliRunner().invoke(app, ["bench", "--out", str(out)])
    assert result.exit_code == 1
    assert not out.exists()


@pytest.mark.parametrize("wrong", [1, 4, 16])
def test_groups_of_every_size_are_checked(wrong, monkeypatch):
    right = functional.bcos_conv2d

    def conv(x, *rest, groups, **options):
        off = groups == wrong and x.dtype == torch.float32
        return right(x, *rest, groups=groups, **options) * (1.001 if off else 1)

    monkeypatch.setattr(functional, "bcos_conv2d", conv)
    with pytest.raises(bench.BenchError, match=rf"and {wrong} groups the layer on cpu is off by"):
        bench.check_kernels(torch.device("cpu"))


@pytest.mark.parametrize("wrong", [False, True])
def test_what_is_compiled_is_checked_before_it_is_measured(wrong, monkeypatch):
    """Compiled by torch 2.11, layers in float32 once had no gradient at all."""

    def compiled(function, fullgraph):
        assert fullgraph

        def call(x, *rest, **options):
            return function(x.detach() if wrong else x, *rest, **options) + 0 * x.sum()

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    bench.check_kernels(torch.device("cpu"))
    if not wrong:
        bench.check_kernels(torch.device("cpu"), compiled=True)
        return
    case = Case("ours", "training", mode="compiled", **SMALL)
    with pytest.raises(bench.BenchError, match=r"the compiled layer on cpu is off by 1\.0e\+00"):
        next(bench.bench([case], "cpu", torch.float32))


FEW = [Case(w, "inference", "cifar9", **SMALL) for w in ("conventional", "ours")]


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """The command with few cases; the document it wrote."""
    monkeypatch.setattr(bench_cases, "suite", lambda *_: FEW)
    out = tmp_path / "speed.json"

    def run(*arguments):
        result = CliRunner().invoke(
            app, ["bench", "--seconds", "0.01", "--out", str(out), *arguments]
        )
        assert result.exit_code == 0, result.output
        return json.loads(out.read_text())

    run.out = out
    return run


def test_the_command_writes_what_it_has(measure):
    document = measure()
    assert [m["way"] for m in document["measurements"]] == ["conventional", "ours"]
    assert [m["mode"] for m in document["measurements"]] == ["eager", "eager"]
    (run,) = document["runs"]
    assert run["dtype"] == "float32"
    assert run["backward"] == "in the calling thread"


def test_a_later_run_replaces_what_it_measures_anew_and_keeps_the_rest(measure, monkeypatch):
    first = measure()
    monkeypatch.setattr(bench, "commit", lambda: "later")
    second = measure("--only", "ours")
    kept, new = second["measurements"]
    assert kept == first["measurements"][0]
    assert second["runs"][kept["run"]] == first["runs"][0]
    assert second["runs"][new["run"]]["commit"] == "later"
    third = measure()
    assert [run["commit"] for run in third["runs"]] == ["later"]
    assert len(third["measurements"]) == 2


def test_a_case_is_added_to_those_of_other_settings(measure, monkeypatch):
    measure()
    monkeypatch.setattr(
        bench_cases, "suite", lambda *_: [Case("ours", "inference", "cifar9", 2, **SMALL)]
    )
    assert [m["units"] for m in measure()["measurements"]] == [1, 1, 2]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "must be a file of this command"),
        ("no json", "must be a file of this command"),
        ("other device", "measurements with the device"),
    ],
)
def test_results_are_not_mixed_with_something_else(measure, content, words):
    if content == "other device":
        document = measure()
        document["runs"][0]["device"] = "an abacus"
        content = json.dumps(document)
    measure.out.write_text(content)
    result = CliRunner().invoke(app, ["bench", "--out", str(measure.out)])
    assert words in str(result.exception)
    assert measure.out.read_text() == content


def test_an_unusable_file_is_noticed_before_the_work(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "bench", None)
    for out, words in ((tmp_path, "is a folder"), (tmp_path / "no" / "x.json", "does not exist")):
        with pytest.raises(ValueError, match=words):
            CliRunner().invoke(app, ["bench", "--out", str(out)], catch_exceptions=False)


def test_the_suite_covers_what_is_compared():
    cases = bench_cases.suite("cuda")
    assert len(cases) == len(set(cases))
    assert {c.arch for c in cases} == {
        "resnet34", "densenet121", "vgg11", "cifar9", "mobilenet_v2", "resnext50_32x4d",
    }  # fmt: skip
    assert {c.b for c in cases} == {1, 1.5, 2, 2.5}
    assert {c.way for c in cases} == {"conventional", "floor", "pooled-floor", "peer", "ours"}
    assert {c.task for c in cases} == {"training", "inference", "explanation"}
    assert {c.units for c in cases} == {1, 2}
    assert {c.mode for c in cases} == {"eager", "compiled", "captured"}
    measured = {(c.arch, c.task, c.mode, c.way, c.units) for c in cases}
    for arch in ("resnet34", "densenet121", "vgg11", "cifar9"):
        for task in ("training", "inference"):
            for mode in ("eager", "captured"):
                for way, units in (("conventional", 1), *product(("floor", "ours"), (1, 2))):
                    assert (arch, task, mode, way, units) in measured
            for units in (1, 2):
                assert (arch, task, "eager", "peer", units) in measured
            for way in ("conventional", "floor", "peer", "ours"):
                assert (arch, task, "compiled", way, 1) in measured
    assert {c.batch for c in bench_cases.suite("cpu")} == {8}
    assert {c.mode for c in bench_cases.suite("cpu")} == {"eager"}


def test_words_select_cases():
    cases = bench_cases.suite("cuda")
    chosen = bench_cases.select(cases, "training, captured, units=2")
    assert {(c.task, c.mode, c.units) for c in chosen} == {("training", "captured", 2)}
    either = bench_cases.select(cases, "ours,floor,b=1.5,b=2")
    assert {c.way for c in either} == {"ours", "floor"}
    assert {c.b for c in either} == {1.5, 2}
    assert bench_cases.select(cases, "") == cases


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trainig", r"`only` \(='trainig'\) must be made of these words: .*training"),
        ("peer,captured", r"`only` \(='peer,captured'\) must leave a case"),
    ],
)
def test_words_that_select_nothing_are_an_error(words, message):
    with pytest.raises(ValueError, match=message):
        bench_cases.select(bench_cases.suite("cuda"), words)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("task", ["training", "inference"])
@pytest.mark.parametrize("way", ["conventional", "floor", "pooled-floor", "ours"])
def test_a_captured_step_is_measured(way, task):
    case = Case(way, task, "resnet34", batch=2, size=64, mode="captured")
    timed, found = bench.bench([case], "cuda", torch.bfloat16, seconds=0.01)
    assert timed.busy_milliseconds is None
    assert found.milliseconds == timed.milliseconds > 0
    assert found.busy_milliseconds > 0
    assert found.peak_mib > 0
