"""The networks of the paper's own program, from its tensors, in plain torch; no code of `src`."""

import math
from functools import partial

import torch
import torch.nn.functional as F

DENSE_BLOCKS = (6, 12, 24, 16)
VGG11 = (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M")
CIFAR = ((64, 1), (64, 1), (128, 2), (128, 1), (128, 1), (256, 2), (256, 1), (256, 1), (10, 1))


def overlapping(shape, generator):
    """Rows that share most of their memory, so that a gigabyte is quickly made and stored."""
    row, step = math.prod(shape[1:]), 7
    values = torch.rand(row + step * shape[0], generator=generator).sub_(0.4)
    return values.as_strided(shape, (step, *torch.empty(shape[1:], device="meta").stride()))


class Run:
    """One pass through a network; with `generator` it makes the tensors it meets."""

    def __init__(self, tensors, s, units=2, b=2.0, gamma=None, generator=None):
        self.tensors, self.s, self.units, self.b = tensors, s, units, b
        self.gamma, self.generator = gamma, generator

    def conv(self, name, x, out, kernel=1, stride=1, padding=0):
        name += ".linear.weight"
        kernel = (kernel, kernel) if isinstance(kernel, int) else kernel
        if self.generator is not None:
            shape = (out * self.units, x.shape[1], *kernel)
            self.tensors[name] = overlapping(shape, self.generator)
        weight = self.tensors[name].to(x.dtype)
        rows = weight / weight.flatten(1).norm(dim=1)[:, None, None, None]
        lin = F.conv2d(x, rows, None, stride, padding)
        lin = lin.unflatten(1, (-1, self.units)).max(2).values
        ones = torch.ones(1, 1, *kernel, dtype=x.dtype)
        squares = F.conv2d(x.square().sum(1, keepdim=True), ones, None, stride, padding)
        cos = lin / (squares + 1e-6).sqrt()
        gamma = self.gamma or self.s / math.sqrt(weight[0].numel())
        stabiliser = 0 if self.b == 2 else 1e-6
        return gamma * lin * (cos.abs() + stabiliser) ** (self.b - 1)


def resnet34(run, x, classes):
    x = F.avg_pool2d(run.conv("0.conv1", x, 64, 7, 2, 3), 3, 2, 1)
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            name, stride = f"0.layer{stage + 1}.{block}", 2 if stage and not block else 1
            out = run.conv(f"{name}.conv1", x, width, 3, stride, 1)
            out = run.conv(f"{name}.conv2", out, width, 3, 1, 1)
            if x.shape[1] != width:
                x = run.conv(f"{name}.downsample.0", x, width, 1, stride)
            x = x + out
    return run.conv("0.fc", x, classes)


def densenet121(run, x, classes, growth=32):
    x = F.avg_pool2d(run.conv("0.features.conv0", x, 64, 7, 2, 3), 3, 2, 1)
    for block, layers in enumerate(DENSE_BLOCKS, 1):
        for layer in range(1, layers + 1):
            name = f"0.features.denseblock{block}.denselayer{layer}"
            out = run.conv(f"{name}.conv1", x, 4 * growth)
            x = torch.cat([x, run.conv(f"{name}.conv2", out, growth, 3, 1, 1)], 1)
        if block < len(DENSE_BLOCKS):
            name = f"0.features.transition{block}.conv"
            x = F.avg_pool2d(run.conv(name, x, x.shape[1] // 2), 2)
    return run.conv("0.classifier", x, classes)


def vgg11(run, x, classes):
    for i, width in enumerate(VGG11):
        pools = width == "M"
        x = F.avg_pool2d(x, 2) if pools else run.conv(f"0.features.{i}", x, width, 3, 1, 1)
    x = run.conv("0.classifier.0", x, 4096, 7, 1, 3)
    return run.conv("0.classifier.2", run.conv("0.classifier.1", x, 4096), classes)


def cifar9(run, x, classes):
    for i, (width, stride) in enumerate(CIFAR):
        kernel = 1 if i == len(CIFAR) - 1 else 3
        x = run.conv(str(i), x, width, kernel, stride, kernel // 2)
    return x


def inception_v3(run, x, classes):
    def conv(name, x, out, kernel=1, stride=1, padding=0):
        return run.conv(f"0.{name}.conv", x, out, kernel, stride, padding)

    def pooled(x):
        return F.avg_pool2d(x, 3, 1, 1)

    def chain(name, x, *layers):
        for layer, *geometry in layers:
            x = conv(f"{name}.{layer}", x, *geometry)
        return x

    def a(name, x, pool):
        return torch.cat([
            chain(name, x, ("branch1x1", 64)),
            chain(name, x, ("branch5x5_1", 48), ("branch5x5_2", 64, 5, 1, 2)),
            chain(name, x, ("branch3x3dbl_1", 64), ("branch3x3dbl_2", 96, 3, 1, 1),
                  ("branch3x3dbl_3", 96, 3, 1, 1)),
            chain(name, pooled(x), ("branch_pool", pool)),
        ], 1)  # fmt: skip

    def c(name, x, w):
        row, column = ((1, 7), 1, (0, 3)), ((7, 1), 1, (3, 0))
        return torch.cat([
            chain(name, x, ("branch1x1", 192)),
            chain(name, x, ("branch7x7_1", w), ("branch7x7_2", w, *row),
                  ("branch7x7_3", 192, *column)),
            chain(name, x, ("branch7x7dbl_1", w), ("branch7x7dbl_2", w, *column),
                  ("branch7x7dbl_3", w, *row), ("branch7x7dbl_4", w, *column),
                  ("branch7x7dbl_5", 192, *row)),
            chain(name, pooled(x), ("branch_pool", 192)),
        ], 1)  # fmt: skip

    def e(name, x):
        row, column = ((1, 3), 1, (0, 1)), ((3, 1), 1, (1, 0))
        one = chain(name, x, ("branch3x3_1", 384))
        two = chain(name, x, ("branch3x3dbl_1", 448), ("branch3x3dbl_2", 384, 3, 1, 1))
        return torch.cat([
            chain(name, x, ("branch1x1", 320)),
            chain(name, one, ("branch3x3_2a", 384, *row)),
            chain(name, one, ("branch3x3_2b", 384, *column)),
            chain(name, two, ("branch3x3dbl_3a", 384, *row)),
            chain(name, two, ("branch3x3dbl_3b", 384, *column)),
            chain(name, pooled(x), ("branch_pool", 192)),
        ], 1)  # fmt: skip

    x = conv("Conv2d_2a_3x3", conv("Conv2d_1a_3x3", x, 32, 3, 2), 32, 3)
    x = F.avg_pool2d(conv("Conv2d_2b_3x3", x, 64, 3, 1, 1), 3, 2)
    x = F.avg_pool2d(conv("Conv2d_4a_3x3", conv("Conv2d_3b_1x1", x, 80), 192, 3), 3, 2)
    for name, pool in (("Mixed_5b", 32), ("Mixed_5c", 64), ("Mixed_5d", 64)):
        x = a(name, x, pool)
    x = torch.cat([
        chain("Mixed_6a", x, ("branch3x3", 384, 3, 2)),
        chain("Mixed_6a", x, ("branch3x3dbl_1", 64), ("branch3x3dbl_2", 96, 3, 1, 1),
              ("branch3x3dbl_3", 96, 3, 2)),
        F.avg_pool2d(x, 3, 2),
    ], 1)  # fmt: skip
    for name, width in zip("bcde", (128, 160, 160, 192), strict=True):
        x = c(f"Mixed_6{name}", x, width)
    if run.generator is not None:  # only in training
        aux = conv("AuxLogits.conv0", F.avg_pool2d(x, 5, 3), 128)
        run.conv("0.AuxLogits.fc", conv("AuxLogits.conv1", aux, 768, 5), classes)
    row, column = ((1, 7), 1, (0, 3)), ((7, 1), 1, (3, 0))
    x = torch.cat([
        chain("Mixed_7a", x, ("branch3x3_1", 192), ("branch3x3_2", 320, 3, 2)),
        chain("Mixed_7a", x, ("branch7x7x3_1", 192), ("branch7x7x3_2", 192, *row),
              ("branch7x7x3_3", 192, *column), ("branch7x7x3_4", 192, 3, 2)),
        F.avg_pool2d(x, 3, 2),
    ], 1)  # fmt: skip
    return run.conv("0.fc", e("Mixed_7c", e("Mixed_7b", x)), classes)


#: The network, its s (where γ = s/√d), its temperature and the size of its images.
IMAGENET = {
    "densenet121": (densenet121, 100, 1e-3, 224),
    "resnet34": (resnet34, 100, 10, 224),
    "inception_v3": (inception_v3, 200, 1, 299),
    "vgg11": (vgg11, 1000, 0.1, 224),
}
#: log10 T by B.
CIFAR_TEMPERATURES = {1: -3, 1.25: -3, 1.5: -2, 1.75: 1, 2: 2, 2.25: 2, 2.5: 3}


@torch.no_grad()
def make(name, classes=1000, growth=None, **options):
    """Tensors by v1's names, and the function from images to logits that they stand for.

    The logits are without their bias, beside which small ones could not be compared.
    """
    tensors, generator = {}, torch.Generator().manual_seed(0)
    if name == "cifar9":
        network, size = cifar9, 32
        b = options["b"]
        temperature = 10 ** CIFAR_TEMPERATURES[b]
        options["gamma"], s = 10 ** (1.5 * b - 1.75), None
    else:
        network, s, temperature, size = IMAGENET[name]
    if growth is not None:
        network = partial(network, growth=growth)
    image = torch.rand(1, 6, size, size, generator=generator)
    network(Run(tensors, s, generator=generator, **options), image, classes)

    @torch.no_grad()
    def logits(images):
        x = torch.cat([images, 1 - images], 1)
        out = network(Run(tensors, s, **options), x, classes)
        return out.mean((2, 3)) / temperature

    return tensors, logits
