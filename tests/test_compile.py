"""torch.compile without a graph break, and torch.export of the forward pass."""

import shutil

import pytest
import torch
from torch import nn

import torchbcos as tb
from cases import mode
from oracle import assert_agrees
from torchbcos import norms


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def every_kind_of_layer():
    torch.manual_seed(0)
    return nn.Sequential(
        tb.BcosConv2d(4, 6, 3, padding=1, padding_mode="reflect", groups=2, max_out=2, b=1.5),
        norms.UncentredBatchNorm2d(6),
        norms.UncentredGroupNorm(2, 6),
        tb.BcosConv2d(6, 4, 3, stride=2, padding=2, dilation=2, scale=3.0),
        norms.UncentredPositionNorm(4),
        nn.AvgPool2d(2),
        nn.Flatten(2),
        tb.BcosConv1d(4, 4, 3, padding="same"),
        norms.UncentredLayerNorm(4),
        nn.Flatten(),
        tb.BcosLinear(16, 3, max_out=2),
    )


def output_and_gradients(function, net, x, explain):
    with mode(explain):
        out = function(x)
    return out, *torch.autograd.grad(out[:, 1].sum(), (x, *net.parameters()))


def assert_compiled_equals_eager(net, x, backend, **options):
    """Out of the mode, in it and out again: the compiled code must notice each change."""
    compiled = torch.compile(net, fullgraph=True, backend=backend, **options)
    eager = {e: output_and_gradients(net, net, x, e) for e in (False, True)}
    assert not torch.allclose(eager[False][1], eager[True][1])
    for explain in (False, True, False):
        results = output_and_gradients(compiled, net, x, explain)
        for result, expected in zip(results, eager[explain], strict=True):
            assert_agrees(result, expected)


def test_compiling_needs_no_graph_break_in_or_out_of_explanation_mode():
    x = torch.rand(2, 4, 8, 8, requires_grad=True)
    assert_compiled_equals_eager(every_kind_of_layer().eval(), x, "aot_eager")


def test_compiling_for_dynamic_shapes_needs_no_graph_break():
    torch.manual_seed(0)
    net = nn.Sequential(tb.BcosConv2d(3, 4, 3, padding=1, groups=1, max_out=2), nn.Flatten())
    x = torch.rand(2, 3, 5, 4, requires_grad=True)
    assert_compiled_equals_eager(net, x, "aot_eager", dynamic=True)


@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_compiling_with_inductor():
    torch.manual_seed(0)
    net = nn.Sequential(tb.BcosConv2d(3, 4, 3, padding=1, max_out=2), nn.Flatten())
    assert_compiled_equals_eager(net, torch.rand(2, 3, 4, 4, requires_grad=True), "inductor")


def test_layers_of_other_exponents_and_scales_compile_after_each_other():
    x = torch.rand(2, 4, requires_grad=True)
    for b, scale in [(2.0, 1.0), (2.0, 2.5), (1.5, 7.0), (1.0, 1.0)]:
        layer = tb.BcosLinear(4, 3, b=b, scale=scale)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        expected = output_and_gradients(layer, layer, x, explain=True)
        for result, right in zip(
            output_and_gradients(compiled, layer, x, explain=True), expected, strict=True
        ):
            assert_agrees(result, right)


def test_a_norm_in_training_compiles_and_tracks():
    norm, twin = norms.UncentredBatchNorm2d(3), norms.UncentredBatchNorm2d(3)
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        x = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
        assert_agrees(compiled(x), twin(x))
    with tb.explanation_mode():
        compiled(torch.rand(2, 3, 4, 4))
    assert_agrees(norm.running_var, twin.running_var)
    assert norm.num_batches_tracked == 2


@pytest.mark.parametrize("strict", [False, True])
def test_the_forward_pass_can_be_exported_for_any_batch(strict):
    net = every_kind_of_layer().eval()
    batch = torch.export.Dim("batch")
    program = torch.export.export(
        net, (torch.rand(2, 4, 8, 8),), dynamic_shapes=({0: batch},), strict=strict
    )
    x = torch.rand(5, 4, 8, 8)
    assert_agrees(program.module()(x), net(x))


def test_a_convolution_can_be_exported_for_any_size():
    layer = tb.BcosConv2d(4, 6, 3, stride=2, padding=1, max_out=2)
    sides = {2: torch.export.Dim("height", min=4), 3: torch.export.Dim("width", min=4)}
    try:
        torch.export.export(
            nn.AvgPool2d(3, 2, 1), (torch.rand(1, 4, 8, 10),), dynamic_shapes=(sides,)
        )
    except torch._dynamo.exc.UserError:
        pytest.skip("this version of torch cannot export its own average pool for any size")
    program = torch.export.export(layer, (torch.rand(1, 4, 8, 10),), dynamic_shapes=(sides,))
    x = torch.rand(1, 4, 13, 6)
    assert_agrees(program.module()(x), layer(x))
