"""Random layers for hypothesis, and the small helpers that several test files share."""

import contextlib
import itertools
import sys

import numpy as np
import torch
from hypothesis import strategies as st
from PIL import Image

import torchbcos as tb
from oracle import Layer
from torchbcos import cli, cli_common
from torchbcos import functional as BF

CONV = {1: BF.bcos_conv1d, 2: BF.bcos_conv2d, 3: BF.bcos_conv3d}


def mode(explain):
    return tb.explanation_mode() if explain else contextlib.nullcontext()


def gradients(function, *tensors, explain=False, weights=None):
    """The output of `function` and the gradients of Σ weights · output by each of `tensors`."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    with mode(explain):
        out = function(*leaves)
    weights = torch.ones_like(out) if weights is None else weights.to(out.dtype)
    return out, *torch.autograd.grad((out * weights).sum(), leaves)


def caller(monkeypatch, capsys, *before):
    """A function that runs `torchbcos BEFORE ARGUMENTS`: its exit code, output and complaints."""
    for console in (cli_common.output, cli_common.errors):
        monkeypatch.setattr(console, "width", 300)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["torchbcos", *before, *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        return code, *capsys.readouterr()

    return call


def conv(x, weight, **arguments):
    return CONV[weight.dim() - 2](x, weight, **arguments)


def random(seed, *shape, dtype=torch.float64):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).to(dtype)


exponents = st.one_of(
    st.sampled_from([1.0, 1.25, 1.5, 2.0, 3.0]), st.floats(1, 6).map(lambda b: round(b, 2))
)


@st.composite
def transforms(draw):
    return {
        "b": draw(exponents),
        "max_out": draw(st.integers(1, 4)),
        "scale": draw(st.sampled_from([1.0, 0.03, 17.5])),
    }


@st.composite
def linear_cases(draw):
    arguments = draw(transforms())
    features, outputs = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    batch = draw(st.sampled_from([(), (1,), (3,), (2, 3)]))
    seed = draw(st.integers(0, 2**32 - 1))
    x = random(seed, *batch, features)
    return x, random(seed + 1, outputs * arguments["max_out"], features), arguments


@st.composite
def conv_cases(draw):
    """An input, a weight and arguments that belong together; the kernel fits into the input."""
    dims = draw(st.integers(1, 3))

    def per_dimension(low, high):
        return draw(st.tuples(*[st.integers(low, high)] * dims))

    arguments = draw(transforms())
    arguments["groups"] = groups = draw(st.integers(1, 3))
    arguments["padding_mode"] = mode = draw(
        st.sampled_from(["zeros", "reflect", "replicate", "circular"])
    )
    kernel, dilation = per_dimension(1, 3), per_dimension(1, 3)
    stride, padding = per_dimension(1, 3), per_dimension(0, 4)
    kind = draw(st.sampled_from(["tuple", "tuple", "int", "same", "valid"]))
    if kind == "int":
        stride, dilation, padding = stride[0], dilation[0], padding[0]
    elif kind == "same":
        stride, padding = 1, "same"
    elif kind == "valid":
        padding = "valid"
    arguments |= {"stride": stride, "padding": padding, "dilation": dilation}

    channels, outputs = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    weight_shape = (groups * outputs * arguments["max_out"], channels, *kernel)
    plan = Layer(np.zeros(weight_shape), **arguments)
    size = []
    for k, d, before, after in zip(
        plan.kernel, plan.dilation, plan.before, plan.after, strict=True
    ):
        pad = max(before, after)
        least = {"reflect": pad + 1, "circular": pad}.get(mode, 1)
        least = max(least, d * (k - 1) + 1 - before - after, 1)
        size.append(draw(st.integers(least, least + 3)))
    seed = draw(st.integers(0, 2**32 - 1))
    x = random(seed, draw(st.integers(1, 2)), groups * channels, *size)
    return x, random(seed + 1, *weight_shape), arguments


def draw_colours(root, parts, names, size):
    """Folders of ten classes, each of one colour; `parts` by name: images of a class."""
    noise = np.random.default_rng(0)
    of_class = [*itertools.product((0, 255), repeat=3), (255, 128, 0), (0, 128, 255)]
    for part, count in parts.items():
        for name, colour in zip(names, of_class, strict=True):
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = np.array(colour) + noise.integers(-20, 21, (size, size, 3))
                picture = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
                picture.save(root / part / name / f"{i}.png")
    return root


def pictures(dtype):
    """Bytes in 0..1: noise, a dark and narrow range, one colour, two colours, and a ramp."""
    noise = torch.randint(0, 256, (3, 16, 16), generator=torch.Generator().manual_seed(0))
    ramp = torch.arange(256).view(16, 16).expand(3, 16, 16)
    flat = torch.full((3, 16, 16), 77)
    steps = torch.where(ramp % 3 == 0, 250, 20)
    x = torch.stack([noise, noise // 20 + 3, flat, steps, ramp, 255 - ramp // 2])
    return x.to(dtype) / 255
