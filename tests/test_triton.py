"""The fused kernels against the reference in float64: on a GPU, else under Triton's interpreter."""

import inspect
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import torchbcos as tb
from oracle import assert_agrees
from torchbcos import ops
from torchbcos.ops import reference

pytest.importorskip("triton")
from torchbcos.ops import aside, launch, triton, triton_layer, triton_maps, triton_norms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}


@pytest.fixture(autouse=True)
def _full_precision():
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def draw(*shape, dtype=torch.float32, format="channels_last", seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    memory_format = FORMATS[format] if len(shape) == 4 else torch.contiguous_format
    return values.to(DEVICE).contiguous(memory_format=memory_format)


def conv(
    twin, x, w, stride=1, padding=1, dilation=1, groups=1, b=2.0, max_out=1, scale=1.0,
    frozen=False, eps=0.0,
):  # fmt: skip
    hold = torch.Tensor.detach if frozen else None
    pair = [(v, v) if isinstance(v, int) else v for v in (stride, padding, dilation)]
    return twin.bcos_conv(x, w, *pair, groups, b, max_out, scale, hold, eps)


def run(twin, x, w, dtype=None, seed=9, **arguments):
    """Output and gradients of a random functional of it; with `dtype` in that type, on the CPU."""
    x, w = (t.detach().cpu().to(dtype) if dtype else t.detach() for t in (x, w))
    x, w = x.requires_grad_(), w.requires_grad_()
    out = conv(twin, x, w, **arguments)
    weights = draw(*out.shape, seed=seed).to(out.device, out.dtype)
    return out.detach(), *torch.autograd.grad(out, (x, w), weights)


def check(x, w, **arguments):
    wide = run(reference, x, w, dtype=torch.float64, **arguments)
    for fused, right in zip(run(triton, x, w, **arguments), wide, strict=True):
        assert fused.dtype == x.dtype
        assert_agrees(fused, right, x.dtype)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("max_out", [1, 2, 3])
@pytest.mark.parametrize("b", [1.0, 1.25, 1.5, 1.6, 2.0, 2.75, 6.0])
def test_equals_the_reference(b, max_out, format):
    x, w = draw(2, 5, 6, 7, format=format), draw(3 * max_out, 5, 3, 3, format=format, seed=1)
    check(x, w, stride=2, b=b, max_out=max_out, scale=1.7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("b", [1.5, 2.0])
def test_half_types_are_computed_in_float32(dtype, b):
    check(draw(2, 5, 6, 7, dtype=dtype), draw(6, 5, 3, 3, dtype=dtype, seed=1), b=b, max_out=2)


GEOMETRIES = [
    {"stride": 1, "padding": 0, "dilation": 1},
    {"stride": (2, 1), "padding": (0, 2), "dilation": (1, 2)},
    {"stride": 3, "padding": 4, "dilation": 2},
]


@pytest.mark.parametrize("kernel", [(1, 1), (3, 2), (1, 5)])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_every_geometry(kernel, geometry):
    check(draw(2, 3, 8, 9), draw(4, 3, *kernel, seed=1), **geometry)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("max_out", [1, 2])
def test_explanation_mode_holds_the_factor(max_out, frozen):
    x, w = draw(2, 5, 6, 7), draw(3 * max_out, 5, 3, 3, seed=1)
    check(x, w, b=1.5, max_out=max_out, frozen=frozen)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("size", [0.0, 1e-6, 0.1, 10.0])  # of x, beside √eps = 0.3
@pytest.mark.parametrize("b", [1.0, 1.5, 2.0, 3.0])
def test_eps_is_added_to_the_squared_norm(b, size, frozen):
    x, w = draw(2, 5, 6, 7).mul_(size), draw(6, 5, 3, 3, seed=1)
    check(x, w, b=b, max_out=2, eps=0.1, frozen=frozen)
    if size == 0.1 and b > 1:
        assert not torch.allclose(conv(triton, x, w, b=b, eps=0.1), conv(triton, x, w, b=b))


def test_more_channels_than_a_tile_holds():
    check(draw(1, 600, 2, 2), draw(530, 600, 1, 1, seed=1), padding=0)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("max_out", [1, 3])
@pytest.mark.parametrize("outputs", [1, 2])  # of a group
@pytest.mark.parametrize("groups", [2, 3, 6])  # 6: each channel alone
def test_groups(groups, outputs, max_out, format):
    x = draw(2, 6, 6, 7, format=format)
    w = draw(groups * outputs * max_out, 6 // groups, 3, 3, format=format, seed=1)
    check(x, w, stride=(2, 1), groups=groups, b=1.5, max_out=max_out, scale=1.7, eps=0.01)


@pytest.mark.parametrize("b", [1.0, 2.0, 2.3])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_of_every_type_and_exponent(dtype, groups, frozen, b):
    x, w = draw(2, 4, 5, 7, dtype=dtype), draw(8, 4 // groups, 3, 2, dtype=dtype, seed=1)
    check(x, w, padding=(2, 1), groups=groups, b=b, max_out=2, frozen=frozen)


def test_more_pixels_of_groups_than_a_tile_holds():
    check(draw(2, 4, 20, 31), draw(4, 1, 3, 3, seed=1), groups=4)
    check(draw(1, 1200, 2, 2), draw(1200, 600, 1, 1, seed=1), padding=0, groups=2)


@pytest.mark.parametrize("groups", [3, 6])
def test_groups_of_a_part_of_a_map(groups):
    """Its pixels follow each other at one stride, but between them lie those of other channels."""
    x, w = draw(2, 9, 5, 6)[:, 1:7], draw(6, 6 // groups, 3, 3, seed=1)
    check(x, w, groups=groups)


def test_groups_after_a_layer_that_left_its_norms_and_before_one_that_needs_them():
    def three(twin, x, w, v, u):
        h = conv(twin, conv(twin, x, w, b=1.5), v, groups=4, b=2.5)
        return conv(twin, h, u, max_out=2)

    found = []
    for twin, dtype, device in [
        (triton, torch.float32, DEVICE),
        (reference, torch.float64, "cpu"),
    ]:
        tensors = [
            t.to(device, dtype).requires_grad_()
            for t in (draw(2, 5, 6, 7), *(draw(4, c, 3, 3, seed=c) for c in (5, 1, 4)))
        ]
        out = three(twin, *tensors)
        found.append((out.detach(), *torch.autograd.grad(out.sum(), tensors)))
    for fused, right in zip(*found, strict=True):
        assert_agrees(fused, right)


def test_second_derivatives_of_groups():
    found = []
    for twin, dtype, device in [
        (triton, torch.float32, DEVICE),
        (reference, torch.float64, "cpu"),
    ]:
        x, w = (
            t.to(device, dtype).requires_grad_()
            for t in (draw(2, 4, 5, 5), draw(4, 2, 3, 3, seed=1))
        )
        (grad,) = torch.autograd.grad(
            conv(twin, x, w, groups=2).square().sum(), x, create_graph=True
        )
        found.append(torch.autograd.grad(grad.square().sum(), (x, w)))
    for fused, right in zip(*found, strict=True):
        assert_agrees(fused, right)


def zeros(x):
    return x.mul_(0)


def some_zeros(x):
    x[0, :, :3] = 0
    return x


def tiny(x):
    return x.mul_(1e-15)


def huge(x):
    return x.mul_(1e15)


@pytest.mark.parametrize("b", [1.0, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("change", [zeros, some_zeros, tiny, huge])
def test_unusual_inputs(change, b):
    x = change(draw(2, 5, 6, 7))
    assert all(t.isfinite().all() for t in run(triton, x, draw(6, 5, 3, 3, seed=1), b=b, max_out=2))
    check(x, draw(6, 5, 3, 3, seed=1), b=b, max_out=2 if b > 1 else 1)


def test_denormal_inputs_stay_finite():
    """Their squares are below float32, so the norm is 0 and with it the output."""
    x = draw(2, 5, 6, 7).mul_(1e-40)
    assert all(t.isfinite().all() for t in run(triton, x, draw(4, 5, 3, 3, seed=1), b=1.5))


@pytest.mark.parametrize("b", [1.5, 2.0, 3.0])
@pytest.mark.parametrize("size", [1e-18, 1e-19, 1e-20, 1e-21, 1e-22, 1e-23])
def test_norms_whose_squares_are_no_normal_numbers(size, b):
    """A GPU's root takes such a square to be 0, its comparison does not: an infinite inverse."""
    x = draw(2, 5, 6, 7).mul_(size)
    x[0, :, :, :3] = 0
    found = run(triton, x, draw(4, 5, 3, 3, seed=1), b=b, max_out=2)
    assert all(t.isfinite().all() for t in found)
    if size <= 1e-21:
        assert not found[0].any()


def test_zero_rows():
    w = draw(6, 5, 3, 3, seed=1)
    w[2] = 0
    check(draw(2, 5, 6, 7), w, b=1.5)


def strided(x):
    return x[:, 1::2, 1:, ::2]


def expanded(x):
    return x[:1].expand(2, -1, -1, -1)


def offset(x):
    return x.flatten()[1 : 1 + 2 * 3 * 4 * 5].view(2, 3, 4, 5)  # not at a multiple of 16 bytes


@pytest.mark.parametrize("view", [strided, expanded, offset, lambda x: x.transpose(2, 3)])
def test_non_contiguous_inputs_weights_and_gradients(view):
    x = view(draw(2, 6, 8, 10, format="contiguous"))
    w = view(draw(2, 6, 8, 10, format="contiguous", seed=1))[:, : x.shape[1], :3, :2]
    channels = min(x.shape[1], w.shape[1])
    x, w = x[:, :channels], w[:, :channels]
    right = run(reference, x, w, dtype=torch.float64)
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    out = conv(triton, x, w)
    grad = draw(*out.shape, seed=9).transpose(2, 3).contiguous().transpose(2, 3)
    for fused, expected in zip(
        (out.detach(), *torch.autograd.grad(out, (x, w), grad)), right, strict=True
    ):
        assert_agrees(fused, expected, torch.float32)


@pytest.mark.parametrize("eps", [0.0, 0.5])
@pytest.mark.parametrize("max_out", [1, 2])
@pytest.mark.parametrize("shape", [(5,), (7, 5), (2, 3, 5)])
def test_linear(shape, max_out, eps):
    def grads(twin, dtype, device):
        x = draw(*shape).to(device, dtype).requires_grad_()
        w = draw(4 * max_out, 5, seed=1).to(device, dtype).requires_grad_()
        out = twin.bcos_linear(x, w, 1.5, max_out, 0.7, None, eps)
        weights = draw(*out.shape, seed=2).to(device, dtype)
        return out.detach(), *torch.autograd.grad(out, (x, w), weights)

    wide = grads(reference, torch.float64, "cpu")
    for fused, right in zip(grads(triton, torch.float32, DEVICE), wide, strict=True):
        assert_agrees(fused, right)


def two_layers(twin, x, w, v, change=None):
    h = conv(twin, x, w, b=2.0, scale=1.3)
    h = change(h) if change else h
    return conv(twin, h, v, b=1.5, max_out=2, scale=0.7, eps=0.1)


def leaves(dtype, device):
    return [
        t.to(device, dtype).requires_grad_()
        for t in (draw(2, 5, 6, 7), draw(4, 5, 3, 3, seed=1), draw(6, 4, 3, 3, seed=2))
    ]


@pytest.mark.parametrize("change", [None, torch.Tensor.mul_, torch.Tensor.mul], ids=str)
def test_an_output_may_be_changed_in_place(change):
    """It is what the backward pass would have read, and its remembered norms are out of date."""
    found = []
    for twin, dtype, device in [
        (triton, torch.float32, DEVICE),
        (reference, torch.float64, "cpu"),
    ]:
        tensors = leaves(dtype, device)
        out = two_layers(twin, *tensors, change and (lambda h: change(h, 1.5)))
        found.append((out.detach(), *torch.autograd.grad(out.sum(), tensors)))
    for fused, right in zip(*found, strict=True):
        assert_agrees(fused, right)


def test_second_derivatives():
    found = []
    for twin, dtype, device in [
        (triton, torch.float32, DEVICE),
        (reference, torch.float64, "cpu"),
    ]:
        tensors = leaves(dtype, device)
        (grad,) = torch.autograd.grad(
            two_layers(twin, *tensors).sum(), tensors[:1], create_graph=True
        )
        found.append(torch.autograd.grad(grad.square().sum(), tensors))
    for fused, right in zip(*found, strict=True):
        assert_agrees(fused, right, tolerance=1e-4)  # |c|^-½ amplifies the rounding of lin


def test_the_gradient_by_an_inner_map_is_whole():
    """Remembered norms must not carry a part of the gradient past the map they belong to."""
    found = []
    for twin, dtype, device in [
        (triton, torch.float32, DEVICE),
        (reference, torch.float64, "cpu"),
    ]:
        x, w, v = leaves(dtype, device)
        h = conv(twin, x, w)
        out = conv(twin, h, v, b=1.5, max_out=2)
        found.append(torch.autograd.grad(out.sum(), (h,)))
    assert_agrees(found[0][0], found[1][0])


def test_only_the_gradients_asked_for_are_computed(monkeypatch):
    asked = []
    inner = triton_layer._convolution_backward
    monkeypatch.setattr(
        triton_layer, "_convolution_backward", lambda *a: (asked.append(a[-1]), inner(*a))[1]
    )
    x, w = draw(2, 5, 6, 7).requires_grad_(), draw(4, 5, 3, 3).requires_grad_()
    torch.autograd.grad(conv(triton, x, w).sum(), x)
    torch.autograd.grad(conv(triton, x, w).sum(), w)
    torch.autograd.grad(conv(triton, x, w).sum(), (x, w))
    conv(triton, x, w).sum().backward()
    assert [a[:2] for a in asked] == [(True, False), (True, True), (True, True), (True, True)]
    assert w.grad is not None


@pytest.mark.parametrize("grad", [False, True])
def test_norms_are_remembered_until_the_map_changes(grad):
    out = conv(triton, draw(2, 5, 6, 7), draw(4, 5, 3, 3).requires_grad_(grad))
    squares = launch.remembered_squares(out)
    assert_agrees(squares, out.detach().square().sum(1))
    out += 1
    assert launch.remembered_squares(out) is None
    with torch.inference_mode():
        assert launch.remembered_squares(conv(triton, draw(2, 5, 6, 7), draw(4, 5, 3, 3))) is None


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("geometry", [(3, 2, 1), (2, 2, 0), (3, 1, 1)], ids=str)
def test_average_pool(geometry, format):
    x = draw(2, 5, 7, 8, format=format).requires_grad_()
    pairs = [(v, v) for v in geometry]
    out = triton_maps.avg_pool2d(x, *pairs)
    weights = draw(*out.shape, seed=3)
    grad = torch.autograd.grad(out, x, weights, create_graph=True)[0]
    wide = x.detach().cpu().double().requires_grad_()
    right = F.avg_pool2d(wide, *geometry)
    assert_agrees(out.detach(), right.detach())
    assert_agrees(grad, torch.autograd.grad(right, wide, weights.cpu().double())[0])
    assert_agrees(torch.autograd.grad(out, x, weights, retain_graph=True)[0], grad)
    assert_agrees(launch.remembered_squares(out), right.detach().square().sum(1), torch.float32)


def test_sum():
    a, b = draw(2, 5, 6, 7).requires_grad_(), draw(2, 5, 6, 7, format="contiguous", seed=1)
    out = triton_maps.add(a, b)
    assert torch.equal(out, a + b)
    assert_agrees(launch.remembered_squares(out), out.detach().square().sum(1))
    assert torch.equal(torch.autograd.grad(out, a, b)[0], b)


def test_the_kernels_compile_for_a_gpu(tmp_path):
    """The interpreter forgives what the compiler does not; compiling needs no GPU."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert {"forward 4", "backward 4", "average 2"} <= set(done.stdout.splitlines())


def test_one_compiled_kernel_serves_many_numbers_of_channels(monkeypatch):
    """A DenseNet has a different number in each layer."""
    constants = {}

    def note(started, *tensors):
        names = inspect.signature(started._kernel.fn).parameters.values()
        given = zip(names, (*tensors, *started._rest), strict=True)
        fixed = tuple(v for p, v in given if p.annotation is not inspect.Parameter.empty)
        constants.setdefault(started._kernel.fn.__name__, set()).add(fixed)

    monkeypatch.setattr(launch.Launch, "__call__", note)
    for channels in (66, 86, 108, 120):
        x = draw(2, channels, 4, 4).requires_grad_()
        normed, _ = triton_norms.batch_norm(x, x.new_ones(channels), None, 1e-5)
        conv(triton, normed, draw(8, channels, 3, 3).requires_grad_()).sum().backward()
    expected = {"moments", "normalise", "normalise_backward", "forward", "add_norm_gradient"}
    assert expected <= set(constants)
    per_weight = {"unit_rows", "unit_rows_backward"}  # whose block is as long as a row
    assert {k for k, v in constants.items() if len(v) > 1} <= per_weight


@pytest.fixture
def beside(monkeypatch):
    """What ran beside: the weights, and where their gradients lie. Without a GPU in one stream."""
    ran, run = [], aside.Aside.run

    def noted(self, weight, *given):
        if DEVICE == "cuda":
            grad = run(self, weight, *given)
        else:
            work, *tensors = given
            grad = work(*tensors)
        ran.append((weight.data_ptr(), grad.data_ptr()))
        return grad

    monkeypatch.setattr(aside.Aside, "run", noted)
    if DEVICE == "cpu":
        monkeypatch.setattr(aside.Aside, "__init__", lambda self: None)
        monkeypatch.setattr(aside.Aside, "join", lambda self: None)
    return ran


@pytest.mark.parametrize("kind", ["conv", "linear"])
def test_weight_gradients_can_be_computed_beside_the_others(kind, beside, monkeypatch):
    """On a GPU on a stream of their own; here, at least by the same calls."""
    x = (draw(4, 8, 5, 5) if kind == "conv" else draw(4, 8)).requires_grad_()
    weights = [draw(8, 8, 3, 3, seed=i) if kind == "conv" else draw(8, 8, seed=i) for i in range(7)]

    def gradients():
        leaves = [w.clone(memory_format=torch.preserve_format).requires_grad_() for w in weights]
        h = x
        for w in leaves:
            layer = (w, 2.0, 1, 1.0, None)
            h = conv(triton, h, w) if kind == "conv" else triton.bcos_linear(h, *layer)
        with aside.weight_gradients_aside():
            h.sum().backward()
        return leaves, [w.grad for w in leaves]

    leaves, found = gradients()
    # Autograd takes each as it is: a copy would be made without waiting for it.
    assert sorted(beside) == sorted((w.data_ptr(), w.grad.data_ptr()) for w in leaves)
    assert aside.current() is None
    monkeypatch.setattr(aside, "current", lambda: None)
    for mine, expected in zip(found, gradients()[1], strict=True):
        assert_agrees(mine, expected.double())


def test_a_weight_that_is_made_of_others_gets_its_gradient_in_order(beside):
    x, leaf = draw(2, 8, 5, 5).requires_grad_(), draw(8, 8, 3, 3).requires_grad_()
    with aside.weight_gradients_aside():
        conv(triton, x, 2 * leaf).sum().backward()
    assert not beside
    assert leaf.grad is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_weight_used_twice_gets_the_sum_of_both_gradients(beside):
    x, weight = draw(64, 64, 32, 32).requires_grad_(), draw(64, 64, 3, 3).requires_grad_()
    found = []
    for place in (nullcontext, aside.weight_gradients_aside):
        weight.grad = None
        with place():
            conv(triton, conv(triton, x, weight), weight).sum().backward()
        found.append(weight.grad)
    assert len(beside) == 2
    assert_agrees(found[1], found[0].double())


# How a kernel is started.


class Launcher:
    """What Triton's launchers have in common, without a GPU."""

    def __init__(self, driver):
        self.launch = lambda *arguments: driver.append(arguments)


class Flat(Launcher):  # as in Triton 3.6
    def __call__(self, x, y, z, stream, function, *rest):
        self.launch(x, y, z, stream, function, False, False, None, None, *rest)


class Packed(Launcher):  # as in Triton 3.9
    def __call__(self, x, y, z, stream, function, metadata, launched, enter, leave, *own):
        hooks = (metadata, launched, enter, leave)
        self.launch(x, y, z, stream, function, False, False, *hooks, None, None, b"n", "s", own)


class Unknown(Launcher):
    def __call__(self, *arguments):
        self.launch(arguments)


@pytest.mark.parametrize("kind", [Flat, Packed, Unknown])
def test_later_launches_go_straight_to_the_driver_with_the_same_arguments(kind, monkeypatch):
    """Of a launcher that is not understood, Triton goes on to launch the kernel itself."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    driver, by_triton = [], []
    made = SimpleNamespace(run=kind(driver), function="f", packed_metadata=(4, 1, 0))

    class Kernel:
        def __getitem__(self, grid):
            def start(*arguments):
                by_triton.append(arguments)
                pointers = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
                made.run(*grid, 7, made.function, made.packed_metadata, None, None, None, *pointers)
                return made

            return start

    start = launch.Launch(Kernel(), 5, 64, 2.5, True)
    tensors = draw(3), draw(3)
    start(*tensors)
    start(*tensors)
    others = draw(3), draw(3)
    start(*others)
    assert driver[0] == driver[1]
    assert len(driver) == 3
    assert len(by_triton) == (3 if kind is Unknown else 1)
    places = {t.data_ptr() for t in others}
    last = driver[2][-1] if kind is Packed else driver[2][0] if kind is Unknown else driver[2]
    assert places < set(last)
    assert tuple(last[-3:]) == (64, 2.5, True)


# Which twin is chosen.


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnAGpu:
    """Real sizes, through the public functions."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("max_out", [1, 2])
    def test_a_resnet_and_its_explanations(self, max_out, dtype, monkeypatch):
        torch.manual_seed(0)
        model = tb.create_model("resnet34", num_classes=10, b=2.0, max_out=max_out)
        images = torch.rand(4, 3, 96, 96)
        tb.calibrate(model, images)
        model, images = model.to(DEVICE).eval(), images.to(DEVICE)
        wide = tb.explain(model.double(), images.double())
        model = model.to(dtype, memory_format=torch.channels_last)
        e = tb.explain(model, images.to(dtype), targets=wide.targets)
        limit = {torch.float32: 1e-3, torch.bfloat16: 0.5}[dtype]
        off = (e.outputs.double() - wide.outputs).abs().max() / wide.outputs.abs().max()
        assert off < limit
        if dtype == torch.float32:
            assert e.residual.abs().max() <= 1e-4 * e.outputs.abs().max()

    def test_the_kernels_are_used(self, monkeypatch):
        calls = []
        inner = triton.bcos_conv
        monkeypatch.setattr(triton, "bcos_conv", lambda *a: (calls.append(1), inner(*a))[1])
        layer = tb.BcosConv2d(3, 4, 3).to(DEVICE)
        layer(draw(1, 3, 8, 8))
        layer.eps = 1e-6
        with tb.explanation_mode():
            layer(draw(1, 3, 8, 8))
        tb.BcosConv2d(3, 6, 3, groups=3, max_out=2).to(DEVICE)(draw(1, 3, 8, 8))
        assert len(calls) == 3
        layer.double()(draw(1, 3, 8, 8).double())
        torch.func.vmap(layer.float())(draw(2, 1, 3, 8, 8))
        assert len(calls) == 3

    def test_autocast(self):
        layer = tb.BcosConv2d(8, 4, 3, max_out=2).to(DEVICE)
        x = draw(2, 8, 9, 9).requires_grad_()
        with torch.autocast("cuda", torch.bfloat16):
            out = layer(x)
        assert out.dtype == torch.bfloat16
        out.float().sum().backward()
        assert layer.weight.grad.dtype == x.grad.dtype == torch.float32


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize(("groups", "most"), [(1, 2**30), (3, 2**30), (3, 2**30 - 1)])
def test_groups_are_fused_where_their_pixels_can_be_counted(groups, most, dims, monkeypatch):
    calls, inner = [], triton.bcos_conv
    monkeypatch.setattr(ops, "_fusible", lambda *tensors: True)
    monkeypatch.setattr(triton, "bcos_conv", lambda *a: (calls.append(a[5]), inner(*a))[1])
    monkeypatch.setattr(torch.Tensor, "numel", lambda self: most)
    x, w = draw(1, 3, 5, 6), draw(6, 3 // groups, 3, 3, seed=1)
    if dims == 1:
        x, w = x[:, :, 0], w[:, :, 0]
    arguments = ((1,) * dims, (0,) * dims, (1,) * dims, groups, 2.0, 2, 1.0, None)
    out = ops.bcos_conv(x, w, *arguments)
    assert calls == ([groups] if groups == 1 or most < 2**30 else [])
    assert_agrees(out, reference.bcos_conv(x.double().cpu(), w.double().cpu(), *arguments))


def test_the_cpu_takes_the_reference(monkeypatch):
    monkeypatch.setattr(triton, "bcos_conv", None)
    x, w = draw(1, 3, 5, 5).cpu(), draw(2, 3, 3, 3).cpu()
    assert torch.equal(conv(ops, x, w), conv(reference, x, w))
