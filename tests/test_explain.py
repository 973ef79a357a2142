"""`explain` against explicit matrices, in every form it is called, and with no trace left."""

import copy
import gc
import random as python_random
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchbcos as tb
from oracle import TOLERANCE, Layer, array, assert_agrees, average_pool_matrix, variances
from torchbcos import functional as BF
from torchbcos import mode
from torchbcos.data import shapes
from torchbcos.encoding import encode
from trained import make_vit

SIZE = 4  # of the small network's images
CLASSES = ("cat", "dog", "bird")


class Residual(nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv = conv(4, 4, 3, padding=1)

    def forward(self, x):
        return x + self.conv(x)


class Concatenation(nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv = conv(4, 2, (1, 3), padding=(0, 1))

    def forward(self, x):
        return torch.cat([x, self.conv(x)], 1)


class Small(nn.Module):
    """One of each: convolutions, a norm, a sum, a concatenation, pools and a classifier."""

    def __init__(self, conv=nn.Conv2d, norm=nn.BatchNorm2d, channels=3):
        super().__init__()
        self.conv = conv(channels, 4, 3, padding=1)
        self.norm = norm(4)
        self.residual = Residual(conv)
        self.concatenation = Concatenation(conv)
        self.pool = nn.AvgPool2d(2)
        self.classifier = conv(6, 3, 1)
        self.end = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, x):
        x = self.concatenation(self.residual(self.norm(self.conv(x))))
        return self.end(self.classifier(self.pool(x)))


class Plain(nn.Module):
    """A network of B-cos layers that is not a graph and not a BcosModel."""

    def __init__(self, **options):
        super().__init__()
        self.body = Small(
            lambda *a, **k: tb.BcosConv2d(*a, **k, **options), tb.norms.UncentredBatchNorm2d, 6
        )

    def forward(self, x):
        return self.body(x)


def settle(network, seed=0):
    """Weights, scales and statistics that are all different; the norm gets a bias."""
    generator = torch.Generator().manual_seed(seed)

    def draw(like, low, high):
        return low + (high - low) * torch.rand(like.shape, generator=generator, dtype=like.dtype)

    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, tb.BcosConv2d):
                module.weight.copy_(draw(module.weight, -1, 1))
                module.scale = 1.0 + 3 * torch.rand((), generator=generator).item()
            elif isinstance(module, tb.norms.UncentredBatchNorm2d):
                module.weight.copy_(draw(module.weight, 0.5, 2))
                module.bias.copy_(draw(module.bias, -1, 1))
                module.running_var.copy_(draw(module.running_var, 0.2, 2))


def converted(b=2.0, max_out=2, dtype=torch.float64, classes=CLASSES):
    model = tb.convert(
        Small(), b=b, max_out=max_out, norm="uncentred", input_size=SIZE, classes=classes
    )
    model.network.norm = tb.norms.UncentredBatchNorm2d(4)  # conversion leaves the bias out
    settle(model)
    model.temperature, model.logit_bias, model.scaling = 0.3, -1.25, "custom"
    return model.to(dtype).eval()


def bare(b=2.0, max_out=2, dtype=torch.float64):
    model = Plain(b=b, max_out=max_out)
    settle(model)
    return model.to(dtype).eval()


def pictures(count=2, seed=1, dtype=torch.float64, size=SIZE, channels=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, channels, size, size, generator=generator, dtype=dtype)


def assert_same(one, other, tolerance=None):
    """Two explanations are equal in every field; to the bit unless a tolerance is given."""
    for field in fields(tb.Explanation):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if not isinstance(a, Tensor):
            assert a == b, field.name
        elif tolerance is None or not a.is_floating_point():
            assert torch.equal(a, b), field.name
        elif field.name == "residual":  # rounding itself
            assert (a - b).abs().max() <= tolerance * one.outputs.abs().max()
        else:
            assert_agrees(a, b, tolerance=tolerance)


# The oracle: every layer as an explicit matrix and an offset, multiplied out.


def affine_maps(network, x, training):
    """{layer: [(A, c) for each image]}: the layer's output is A·x + c, flattened."""
    layers = {
        name: Layer(
            module.weight,
            padding=module.padding,
            b=module.b,
            max_out=module.max_out,
            scale=module.scale,
        )
        for name, module in network.named_modules()
        if isinstance(module, tb.BcosConv2d)
    }
    x = array(x)
    first = layers["conv"].forward(x)  # [N, 4, S, S]
    variance = np.broadcast_to(array(network.norm.running_var)[:, None, None], first.shape)
    if training:
        variance = variances(first, lambda index: index[1])
    maps = {}

    def put(name, matrix, offset):
        maps.setdefault(name, []).append((matrix, offset))
        return matrix, offset

    for n, image in enumerate(x):

        def after(name, given, shape, n=n, image=image):
            """The layer's own W̃ at the value that reaches it, times what came before."""
            matrix, offset = given
            own = layers[name].matrix((matrix @ image.ravel() + offset).reshape(shape))
            return own @ matrix, own @ offset

        a = put("conv", *after("conv", (np.eye(x[0].size), np.zeros(x[0].size)), x[0].shape))
        scale = array(network.norm.weight)[:, None, None] / np.sqrt(variance[n] + network.norm.eps)
        bias = np.repeat(array(network.norm.bias), SIZE * SIZE)
        a = put("norm", scale.ravel()[:, None] * a[0], scale.ravel() * a[1] + bias)
        inner = put("residual.conv", *after("residual.conv", a, (4, SIZE, SIZE)))
        a = put("residual", a[0] + inner[0], a[1] + inner[1])
        inner = put("concatenation.conv", *after("concatenation.conv", a, (4, SIZE, SIZE)))
        parts = zip(a, inner, strict=True)
        a = put("concatenation", *(np.concatenate(pair) for pair in parts))
        pool = average_pool_matrix((6, SIZE, SIZE), 2, 2)
        a = put("pool", pool @ a[0], pool @ a[1])
        a = put("classifier", *after("classifier", a, (6, SIZE // 2, SIZE // 2)))
        whole = average_pool_matrix((3, SIZE // 2, SIZE // 2), SIZE // 2, SIZE // 2)
        put("end", whole @ a[0], whole @ a[1])
    return maps


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(("b", "max_out"), [(2.0, 2), (1.5, 3)])
@pytest.mark.parametrize("make", [converted, bare])
def test_weights_are_the_rows_of_the_explicit_matrix(make, b, max_out, training):
    model = make(b, max_out).train(training)
    images = pictures(channels=3 if make is converted else 6)
    x = encode(images) if make is converted else images
    prefix = "" if make is converted else "body."
    network = model.network if make is converted else model.body
    maps = affine_maps(network, x, training)
    temperature, bias = (model.temperature, model.logit_bias) if make is converted else (1, 0)

    e = tb.explain(model, images, "all")
    rows = np.stack([matrix for matrix, _ in maps["end"]]) / temperature
    offsets = np.stack([offset for _, offset in maps["end"]]) / temperature + bias
    assert_agrees(e.weights.flatten(2), rows, torch.float64)
    assert_agrees(e.bias, offsets, torch.float64)
    assert np.abs(offsets - bias).max() > 1e-3  # the norm's bias has its share
    expected = np.einsum("nkd,nd->nk", rows, array(x).reshape(2, -1)) + offsets
    assert_agrees(e.outputs, expected, torch.float64)
    with torch.no_grad(), tb.explanation_mode():  # the mode keeps running statistics as they are
        assert_agrees(e.outputs, model(images))
    assert e.residual.abs().max() <= 1e-10 * e.outputs.abs().max()

    for layer, per_image in maps.items():
        side = {"pool": SIZE // 2, "classifier": SIZE // 2, "end": 1}.get(layer, SIZE)
        units = list(np.ndindex(len(per_image[0][1]) // side**2, side, side))
        inner = tb.explain(model, images, layer=prefix + layer, unit=units)
        assert_agrees(inner.weights.flatten(2), np.stack([m for m, _ in per_image]), torch.float64)
        offsets = np.stack([offset for _, offset in per_image])
        assert (inner.bias - torch.from_numpy(offsets)).abs().max() <= 1e-10
        assert inner.residual.abs().max() <= 1e-10 * inner.outputs.abs().max()
        assert inner.targets.tolist() == [[c for c, _, _ in units]] * 2
        assert inner.positions.tolist() == [[[y, x] for _, y, x in units]] * 2


NETWORKS = {  # image size, images to calibrate with, options; reduced as far as each network allows
    "cifar9": (32, 4, {}),
    "resnet34": (64, 4, {}),
    "densenet121": (64, 4, {}),
    "inception_v3": (96, 4, {"aux_logits": False}),
    "vgg11": (32, 2, {"max_out": 1}),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_residual_is_rounding_in_float32(name):
    size, count, options = NETWORKS[name]
    torch.manual_seed(0)
    images = shapes(count, size=size, seed=3).images
    model = tb.create_model(name, num_classes=10, **options)
    tb.calibrate(model, images).eval()
    e = tb.explain(model, images[:1], 4)
    assert e.outputs.dtype == e.weights.dtype == torch.float32
    with torch.no_grad():
        assert_agrees(e.outputs, model(images[:1])[:, 4:5])
    signal = (e.outputs - e.bias).abs().max()
    assert signal > 1e-3
    assert e.residual.abs().max() <= 1e-4 * e.outputs.abs().max()
    total = e.weights.double() * encode(images[:1]).double()
    missed = (e.outputs - e.bias - total.sum((2, 3, 4))).abs().max()
    assert missed <= 1e-4 * e.outputs.abs().max()
    del model
    gc.collect()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_reports_its_residual(dtype):
    model, images = converted(dtype=dtype), pictures(dtype=torch.float32)
    e = tb.explain(model, images, "all")
    assert e.outputs.dtype == e.weights.dtype == dtype
    assert e.residual.dtype == e.contributions.dtype == e.bias.dtype == torch.float32
    by_hand = e.outputs.float() - (e.contributions.sum((2, 3)) + e.bias)
    assert torch.equal(e.residual, by_hand)
    assert 0 < e.residual.abs().max() <= TOLERANCE[dtype] * e.outputs.abs().max()
    exact = tb.explain(converted(), images.double(), "all")
    assert_agrees(e.weights, exact.weights, tolerance=10 * TOLERANCE[dtype])


def test_images_take_the_models_precision():
    model = converted(dtype=torch.float32)
    images = pictures(dtype=torch.float64)
    assert_same(tb.explain(model, images), tb.explain(model, images.float()))


# Targets.


def gathered(e, indices):
    """The part of an explanation of all classes that `indices` [N, K] ask for."""
    indices = torch.tensor(indices)
    take = lambda value: torch.stack([v[i] for v, i in zip(value, indices, strict=True)])  # noqa: E731
    return e._each(take)


N_BY_2 = [[2, 0], [1, 1], [0, 2]]
READ_ONLY = np.array(N_BY_2)
READ_ONLY.flags.writeable = False
TARGETS = {
    "an index": (1, [[1]] * 3),
    "a name": ("dog", [[1]] * 3),
    "a list": ([2, 0], [[2, 0]] * 3),
    "a list with names": (["bird", 0, "cat"], [[2, 0, 0]] * 3),
    "a tuple": ((2, 0), [[2, 0]] * 3),
    "a range": (range(2), [[0, 1]] * 3),
    "a list of scalars": ([torch.tensor(1), np.int64(2)], [[1, 2]] * 3),
    "a numpy scalar": (np.int64(2), [[2]] * 3),
    "a tensor []": (torch.tensor(2), [[2]] * 3),
    "a tensor [N]": (torch.tensor([2, 0, 1]), [[2], [0], [1]]),
    "a small tensor [N]": (torch.tensor([2, 0, 1], dtype=torch.uint8), [[2], [0], [1]]),
    "a tensor [N, K]": (torch.tensor(N_BY_2), N_BY_2),
    "a transposed tensor [N, K]": (torch.tensor(N_BY_2).T.contiguous().T, N_BY_2),
    "nested lists": (N_BY_2, N_BY_2),
    "nested tuples": (tuple(map(tuple, N_BY_2)), N_BY_2),
    "an array [N]": (np.array([2, 0, 1]), [[2], [0], [1]]),
    "an array [N, K]": (np.array(N_BY_2, dtype=np.int32), N_BY_2),
    "an array read backwards": (np.array(N_BY_2)[:, ::-1], [row[::-1] for row in N_BY_2]),
    "a read-only array": (READ_ONLY, N_BY_2),
    "all": ("all", [[0, 1, 2]] * 3),
}


@pytest.mark.parametrize("chunk", [2, 32])
@pytest.mark.parametrize(("targets", "expected"), TARGETS.values(), ids=TARGETS)
def test_targets_come_in_many_forms(targets, expected, chunk):
    model, images = converted(), pictures(3)
    e = tb.explain(model, images, targets, chunk=chunk)
    assert e.targets.tolist() == expected
    assert e.targets.dtype == torch.int64
    assert_same(e, gathered(tb.explain(model, images, "all"), expected), tolerance=1e-12)
    assert (e.classes, e.layer, e.positions) == (CLASSES, None, None)


def test_the_default_target_is_the_predicted_class():
    model = converted()
    images = pictures(9) * torch.eye(3, dtype=torch.float64).repeat(3, 1)[:, :, None, None]
    with torch.no_grad():
        predicted = model(images).argmax(1)
    assert predicted.unique().numel() > 1
    e = tb.explain(model, images)
    assert e.targets.tolist() == predicted[:, None].tolist()


def assert_sentence(error, *parts):
    text = str(error.value)
    assert "\n" not in text
    assert text.endswith((".", "?"))
    for part in parts:
        assert part in text


WRONG_TARGETS = {
    "too high": (3, "from 0 to 2"),
    "negative": (-1, "from 0 to 2"),
    "one of a list": ([0, 7], "(=7)"),
    "one of a tensor": (torch.tensor([[0], [1], [9]]), "(=9)"),
    "unknown name": ("fish", "cat, dog, bird"),
    "empty name": ("", "cat, dog, bird"),
    "empty list": ([], "at least one class"),
    "no class for each image": (torch.zeros(3, 0, dtype=torch.long), "3, 0"),
    "a fraction": (1.5, "1.5"),
    "a fraction in a list": ([1.5], "1.5"),
    "None in a list": ([None], "None"),
    "an object": (object(), "object"),
    "fractions in a tensor": (torch.rand(3), "integers"),
    "booleans": (torch.tensor([True, False, True]), "integers"),
    "fractions in an array": (np.ones(3), "integers"),
    "names in an array": (np.array(["cat", "dog", "fish"]), "`targets`"),
    "another number of images": (torch.zeros(4, 2, dtype=torch.long), "N = 3"),
    "three dimensions": (torch.zeros(3, 1, 1, dtype=torch.long), "[N, K]"),
    "ragged lists": ([[0], [1, 2], [0]], "N lists of K"),
    "vectors in a list": ([torch.tensor([0, 1]), torch.tensor([1, 2])], "`targets`"),
}


@pytest.mark.parametrize(("targets", "part"), WRONG_TARGETS.values(), ids=WRONG_TARGETS)
def test_wrong_targets_are_refused_in_a_sentence(targets, part):
    with pytest.raises((ValueError, TypeError)) as error:
        tb.explain(converted(), pictures(3), targets)
    assert_sentence(error, "`targets`", part)


@pytest.mark.parametrize("kind", [np.uint16, np.uint32, torch.uint16])
def test_targets_are_integers_of_any_type(kind):
    targets = np.array([2, 0, 1])
    given = (
        targets.astype(kind) if kind in (np.uint16, np.uint32) else torch.tensor(targets).to(kind)
    )
    model, images = converted(), pictures(3)
    assert_same(tb.explain(model, images, given, chunk=2), tb.explain(model, images, targets))


def test_targets_that_can_be_read_once_are_for_every_chunk():
    model, images = converted(), pictures(3)
    once = (name for name in CLASSES[:2])
    e = tb.explain(model, images, once, chunk=np.int64(1))
    assert_same(e, tb.explain(model, images, [0, 1]), tolerance=1e-12)


def test_names_need_a_model_with_names():
    with pytest.raises(ValueError, match="no class names") as error:
        tb.explain(converted(classes=None), pictures(), "cat")
    assert_sentence(error)


# Inner units.


@pytest.mark.parametrize("make", [converted, bare])
def test_a_channel_is_explained_where_it_is_strongest(make):
    model = make()
    images = pictures(4, channels=3 if make is converted else 6)
    layer = "residual" if make is converted else "body.residual"
    e = tb.explain(model, images, layer=layer, unit=3)
    everywhere = tb.explain(
        model, images, layer=layer, unit=[(3, y, x) for y in range(SIZE) for x in range(SIZE)]
    )
    best = everywhere.outputs.argmax(1)
    assert e.positions[:, 0].tolist() == [[int(i) // SIZE, int(i) % SIZE] for i in best]
    assert len(set(map(tuple, e.positions[:, 0].tolist()))) > 1
    assert_same(e, gathered(everywhere, best[:, None].tolist()), tolerance=1e-12)
    assert e.layer == layer


def test_a_function_picks_from_the_activation():
    model, images = converted(), pictures(3)
    units = [(c, y, x) for c in range(3) for y in range(2) for x in range(2)]
    each = tb.explain(model, images, layer="classifier", unit=units)
    e = tb.explain(model, images, layer="classifier", unit=lambda maps: maps.sum((1, 2, 3)))
    assert_agrees(e.weights[:, 0], each.weights.sum(1))
    assert_agrees(e.outputs[:, 0], each.outputs.sum(1))
    assert e.targets.tolist() == [[-1]] * 3
    assert e.positions.tolist() == [[[-1, -1]]] * 3
    assert e.residual.abs().max() <= 1e-10


def test_units_of_every_form_go_in_one_list():
    model, images = converted(), pictures(3)
    forms = [1, (2, 0, 3), lambda maps: maps[:, 0].amax((1, 2))]
    together = tb.explain(model, images, layer="conv", unit=forms)
    for k, unit in enumerate(forms):
        alone = tb.explain(model, images, layer="conv", unit=unit)
        assert_same(alone, together._each(lambda v, k=k: v[:, k : k + 1]))


def test_a_layer_of_vectors_has_units_at_one_position():
    model, images = converted(), pictures(3)
    e = tb.explain(model, images, layer="end", unit=[0, 1, 2])
    logits = tb.explain(model, images, "all")
    assert_agrees(e.weights / model.temperature, logits.weights)
    assert e.positions.tolist() == [[[0, 0]] * 3] * 3


@pytest.mark.parametrize("layer", ["residual", "network.residual"])
def test_layers_go_by_their_name_in_the_network_or_in_the_model(layer):
    model, images = converted(), pictures()
    e = tb.explain(model, images, layer=layer, unit=0)
    assert_agrees(e.weights, tb.explain(model, images, layer="residual", unit=0).weights)


def test_a_bare_network_may_have_a_part_that_is_called_network():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.network = tb.BcosConv2d(6, 6, 3, padding=1), bare()

        def forward(self, x):
            return self.network(self.conv(x))

    model, images = Outer().double(), pictures(channels=6)
    expected = model.network.body.conv(model.conv(images))[:, 1].amax((1, 2))
    e = tb.explain(model, images, layer="network.body.conv", unit=1)
    assert_agrees(e.outputs[:, 0], expected)
    assert_agrees(
        tb.explain(model, images, layer="conv", unit=1).outputs[:, 0],
        model.conv(images)[:, 1].amax((1, 2)),
    )


def test_a_numpy_integer_is_a_channel():
    model, images = converted(), pictures()
    e = tb.explain(model, images, layer="conv", unit=np.int64(2))
    assert_same(e, tb.explain(model, images, layer="conv", unit=2))


WRONG_UNITS = {
    "too high": (4, "(4, 4, 4)"),
    "negative": (-1, "(=-1)"),
    "two numbers": ((1, 2), "(channel, y, x)"),
    "four numbers": ((1, 2, 3, 0), "(channel, y, x)"),
    "beyond the map": ((0, 4, 0), "(=(0, 4, 0))"),
    "a fraction": (1.5, "(=1.5)"),
    "a name": ("cat", "'cat'"),
    "none": ([], "`unit`"),
    "an array": (np.array([0, 1]), "`unit` (=array([0, 1]))"),
    "one of a list": ([0, 9], "(=9)"),
    "a function of another shape": (lambda maps: maps.sum(), "one value for each image"),
    "a function without tensor": (lambda maps: 1.0, "one value for each image"),
    "a constant function": (lambda maps: torch.ones(len(maps)), "from the activation"),
    "one without derivatives": ([0, lambda maps: maps.detach().sum((1, 2, 3))], "the activation"),
}


@pytest.mark.parametrize(("unit", "part"), WRONG_UNITS.values(), ids=WRONG_UNITS)
def test_wrong_units_are_refused_in_a_sentence(unit, part):
    with pytest.raises((ValueError, TypeError)) as error:
        tb.explain(converted(), pictures(), layer="conv", unit=unit)
    assert_sentence(error, "`unit`", part)


WRONG_CALLS = {
    "unit without layer": ({"unit": 0}, "needs `layer`"),
    "layer without unit": ({"layer": "conv"}, "needs `unit`"),
    "layer and targets": ({"layer": "conv", "unit": 0, "targets": 1}, "`targets` only go with"),
    "unknown layer": ({"layer": "residual.conf", "unit": 0}, "did you mean residual.conv"),
    "no name": ({"layer": "", "unit": 0}, "`layer`"),
    "no chunk": ({"chunk": 0}, "`chunk` (=0)"),
    "a fraction of a chunk": ({"chunk": 2.5}, "`chunk` (=2.5)"),
}


@pytest.mark.parametrize(("arguments", "part"), WRONG_CALLS.values(), ids=WRONG_CALLS)
@pytest.mark.parametrize("make", [converted, bare])
def test_wrong_arguments_are_refused_in_a_sentence(make, arguments, part):
    images = pictures(channels=3 if make is converted else 6)
    if arguments.get("layer") and make is bare:
        arguments = {**arguments, "layer": "body." + arguments["layer"]}
        part = part.replace("mean ", "mean body.")
    with pytest.raises(ValueError, match=r".") as error:
        tb.explain(make(), images, **arguments)
    assert_sentence(error, part)


def test_a_layer_without_maps_is_refused_in_a_sentence():
    class Tokens(nn.Module):
        def forward(self, x):
            return x.flatten(2)

    model = nn.Sequential(tb.BcosConv2d(6, 4, 3), Tokens())
    with pytest.raises(ValueError, match="output of shape") as error:
        tb.explain(model, pictures(channels=6, dtype=torch.float32), layer="1", unit=0)
    assert_sentence(error, "`layer` (='1')")


WRONG_IMAGES = {
    "one without a batch": (lambda x: x[0], "images[None]"),
    "channels last": (lambda x: x.permute(0, 2, 3, 1), "permute"),
    "already encoded": (encode, "encoded"),
    "0 to 255": (lambda x: x * 255, "divide"),
    "bytes": (lambda x: (x * 255).byte(), "floating point"),
    "not a number": (lambda x: x / 0 * 0, "finite"),
    "an array": (lambda x: x.numpy(), "tensor"),
}


@pytest.mark.parametrize(("change", "part"), WRONG_IMAGES.values(), ids=WRONG_IMAGES)
def test_wrong_images_are_refused_in_a_sentence(change, part):
    with pytest.raises((ValueError, TypeError)) as error:
        tb.explain(converted(), change(pictures()))
    assert_sentence(error, "`images`", part)


@pytest.mark.parametrize("shape", [(4, 7), (4, 2, 7)], ids=["vectors", "sequences"])
def test_a_bare_network_of_something_else_than_images_is_refused_in_a_sentence(shape):
    layer = tb.BcosLinear(7, 3) if len(shape) == 2 else tb.BcosConv1d(2, 3, 7)
    with pytest.raises(ValueError, match="`images`") as error:
        tb.explain(nn.Sequential(layer, nn.Flatten()), torch.rand(shape))
    assert_sentence(error, str(shape))


@pytest.mark.parametrize("give", [lambda x: {"logits": x}, lambda x: [{}, x], lambda x: ()])
def test_a_network_that_gives_no_tensor_is_refused_in_a_sentence(give):
    class Gives(nn.Module):
        def forward(self, x):
            return give(x.mean((2, 3)))

    with pytest.raises(ValueError, match=r"`model` gives a (dict|tuple), not logits") as error:
        tb.explain(Gives(), pictures())
    assert_sentence(error)


def test_a_network_that_gives_maps_is_explained_by_its_layers_only():
    model = nn.Sequential(tb.BcosConv2d(6, 4, 3))
    images = pictures(channels=6, dtype=torch.float32)
    with pytest.raises(ValueError, match="not logits") as error:
        tb.explain(model, images)
    assert_sentence(error, "`layer` and `unit`")
    assert tb.explain(model, images, layer="0", unit=0).weights.shape == (2, 1, 6, SIZE, SIZE)


# Cost.


class Calls:
    """How often a module was called, and with how many images."""

    def __init__(self, module):
        self.sizes = []
        module.register_forward_pre_hook(lambda _, args: self.sizes.append(len(args[0])))


@pytest.mark.parametrize(
    ("chunk", "sizes"), [(1, [1] * 5), (2, [2, 2, 1]), (3, [3, 2]), (5, [5]), (32, [5])]
)
def test_one_forward_pass_for_any_number_of_targets_and_equal_results_for_any_chunk(chunk, sizes):
    model, images = converted(), pictures(5)
    whole = tb.explain(model, images, "all")
    inner = tb.explain(model, images, layer="residual", unit=[0, (1, 2, 3)])
    calls = Calls(model.network.conv)
    assert_same(tb.explain(model, images, "all", chunk=chunk), whole, tolerance=1e-12)
    assert calls.sizes == sizes
    part = tb.explain(model, images, layer="residual", unit=[0, (1, 2, 3)], chunk=chunk)
    assert_same(part, inner, tolerance=1e-12)
    assert calls.sizes == sizes * 2


@pytest.mark.parametrize(
    ("size", "training", "sizes"),
    [(224, False, [8, 2]), (448, False, [2] * 5), (1024, False, [1] * 10), (224, True, [10])],
)
def test_large_images_come_in_small_chunks_but_share_statistics_in_training(size, training, sizes):
    class Looks(nn.Module):
        def forward(self, x):
            calls.append(len(x))
            return x.mean((2, 3))

    calls = []
    images = torch.rand(1, 1, 1, 1).expand(10, 1, size, size)
    tb.explain(Looks().train(training), images, 0)
    assert calls == sizes


def test_a_batch_in_training_is_explained_as_one():
    """In parts its images would be divided by other statistics than in a step of training."""
    model = converted().train()
    images = pictures(40) * torch.linspace(0.1, 1, 40)[:, None, None, None]
    with torch.no_grad():
        logits = model(images)
    e = tb.explain(model, images, "all")
    torch.testing.assert_close(e.outputs, logits)
    assert (tb.explain(model, images, "all", chunk=20).outputs - logits).abs().max() > 1e-3
    network = torch.nn.Sequential(tb.BcosConv2d(6, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    calls = Calls(network[0])
    tb.explain(network.train(), pictures(40, channels=6).float(), 0)
    assert calls.sizes == [32, 8]  # without such norms images are independent in training, too


@pytest.mark.parametrize("make", [converted, bare])
def test_nothing_after_the_layer_is_computed(make):
    model = make()
    network = model.network if make is converted else model.body
    calls = Calls(network.classifier)
    prefix = "" if make is converted else "body."
    images = pictures(channels=3 if make is converted else 6)
    tb.explain(model, images, layer=prefix + "pool", unit=0)
    assert calls.sizes == []


# Wherever it is called.


@pytest.mark.parametrize(
    "arguments", [{}, {"layer": "residual", "unit": 0}], ids=["logits", "unit"]
)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, tb.explanation_mode])
def test_surrounding_contexts_change_nothing(context, arguments):
    model = converted()
    expected = tb.explain(model, pictures(), **arguments)
    with context():
        images = pictures()  # in inference mode a tensor that no gradient may pass
        e = tb.explain(model, images, **arguments)
        assert BF.in_explanation_mode() == (context is tb.explanation_mode)
        assert torch.is_grad_enabled() == (context is tb.explanation_mode)
        assert torch.is_inference_mode_enabled() == (context is torch.inference_mode)
    assert_same(e, expected)
    assert not BF.in_explanation_mode()


def test_offsets_collected_around_it_are_not_mixed_up():
    model, images = converted(), pictures()
    expected = tb.explain(model, images)
    with BF.collect_offsets() as outer:
        assert_same(tb.explain(model, images), expected)
        BF.add_offset(torch.zeros(1), 2.0)
    assert [o.item() for o in outer] == [2.0]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_bare_network_is_explained_under_contexts_without_gradients(context):
    model = bare()
    expected = tb.explain(model, pictures(channels=6))
    with context():
        assert_same(tb.explain(model, pictures(channels=6)), expected)


def test_weights_made_in_inference_mode_are_refused_in_a_sentence():
    with torch.inference_mode():
        model = bare()
    with pytest.raises(ValueError, match=r"`model` has weights .*inference_mode") as error:
        tb.explain(model, pictures(channels=6))
    assert_sentence(error, "copy.deepcopy(model)")
    expected = tb.explain(bare(), pictures(channels=6))
    assert_same(tb.explain(copy.deepcopy(model), pictures(channels=6)), expected)


def test_training_mode_uses_the_batch_and_tracks_nothing():
    model, images = converted(), pictures(4)
    running = tb.explain(model, images)
    model.train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    batch = tb.explain(model, images, running.targets)
    assert (running.statistics, batch.statistics) == ("running", "batch")
    assert [repr(e).endswith("norms as in training") for e in (running, batch)] == [False, True]
    assert (running.outputs - batch.outputs).abs().max() > 1e-3
    assert model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    with torch.no_grad():
        assert_agrees(batch.outputs, model(images).gather(1, batch.targets))


def in_data_parallel(model):
    return nn.DataParallel(model)


def averaged(model):
    return torch.optim.swa_utils.AveragedModel(model)


def compiled(model):
    return torch.compile(model, backend="eager")


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


# While it traces, torch.compile itself looks at the .grad of tensors that have none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    "wrap",
    [
        in_data_parallel,
        averaged,
        compiled,
        compiled_in_place,
        lambda m: nn.DataParallel(compiled(m)),
        lambda m: compiled(nn.DataParallel(m)),
    ],
    ids=[
        "data parallel",
        "averaged",
        "compiled",
        "compiled in place",
        "compiled within",
        "parallel within",
    ],
)
@pytest.mark.parametrize("make", [converted, bare])
def test_wrapped_models_are_explained_as_what_they_wrap(make, wrap):
    device = "cuda" if torch.cuda.is_available() else "cpu"  # where DataParallel moves it
    images = pictures(channels=3 if make is converted else 6).to(device)
    layer = "residual" if make is converted else "body.residual"
    plain = make().to(device)
    expected = tb.explain(plain, images), tb.explain(plain, images, layer=layer, unit=1)
    model = wrap(make().to(device))
    assert_same(tb.explain(model, images), expected[0])
    assert_same(tb.explain(model, images, layer=layer, unit=1), expected[1])


@pytest.mark.parametrize("wrap", [nn.Sequential, lambda m: nn.ModuleDict({"0": m})])
def test_a_model_within_an_unknown_module_is_refused(wrap):
    outer = wrap(converted())
    name = type(outer).__name__
    with pytest.raises(
        ValueError, match=rf"`model` \(a {name}\) is no BcosModel but holds one"
    ) as error:
        tb.explain(outer, pictures())
    assert "model.get_submodule('0')" in str(error.value)
    tb.explain(outer.get_submodule("0"), pictures())


def test_a_compiled_model_that_ran_before_is_explained_as_well():
    model, images = compiled(converted()), pictures()
    with torch.no_grad():
        logits = model(images)
    e = tb.explain(model, images, "all")
    assert_same(e, tb.explain(converted(), images, "all"))
    assert_agrees(e.outputs, logits)


def test_auxiliary_outputs_in_training_are_left_aside():
    class TwoOutputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = bare(dtype=torch.float64)

        def forward(self, x):
            return self.body(x), None

    images = pictures(channels=6)
    assert_same(tb.explain(TwoOutputs().eval(), images), tb.explain(bare(), images))


def test_a_layer_whose_output_is_no_signal_is_warned_of():
    """A gate's sigmoid multiplies a signal, and is none itself."""
    torch.manual_seed(0)
    model = tb.create_model("mobilenet_v3_small", num_classes=3, input_size=32).eval()
    model.scaling = "custom"
    images, se = pictures(size=32, dtype=torch.float32), "features.1.block.1"
    with pytest.warns(UserWarning, match=rf"`layer` \(='{se}.scale_activation'\) is not linear"):
        e = tb.explain(model, images, layer=f"{se}.scale_activation", unit=0)
    assert e.residual.abs().max() > 0.1 * e.outputs.abs().max()
    for layer in (se, f"{se}.fc2"):  # no warning, which would be an error here
        e = tb.explain(model, images, layer=layer, unit=0)
        assert_agrees(e.contributions.sum((2, 3)) + e.bias, e.outputs)


def test_frozen_parameters_make_no_difference():
    model, images = converted(), pictures()
    expected = tb.explain(model, images)
    assert_same(tb.explain(model.requires_grad_(False), images), expected)


# In a loss.


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("arguments", [{"targets": "all"}, {"layer": "residual", "unit": [0, 1]}])
@pytest.mark.parametrize("make", [converted, bare])
def test_differentiable_explanations_are_the_same(make, arguments, training):
    model = make().train(training)
    images = pictures(channels=3 if make is converted else 6)
    if make is bare and "layer" in arguments:
        arguments = {**arguments, "layer": "body." + arguments["layer"]}
    plain = tb.explain(model, images, **arguments)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    e = tb.explain(model, images, **arguments, create_graph=True)
    assert e.weights.requires_grad
    assert not plain.weights.requires_grad
    assert_same(e, plain, tolerance=1e-12)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("arguments", [{"targets": "all"}, {"layer": "2", "unit": [0, 1]}])
def test_differentiable_explanations_are_of_the_same_dropout(arguments):
    network = nn.Sequential(
        tb.BcosConv2d(6, 8, 3), nn.Dropout(0.5), tb.BcosConv2d(8, 5, 1), nn.Flatten()
    )
    model, images = network.double().train(), pictures(size=3, channels=6)
    plain = tb.explain(model, images, **arguments)
    before = torch.get_rng_state()
    assert_same(tb.explain(model, images, **arguments, create_graph=True), plain, tolerance=1e-12)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("part", ["weights", "contributions", "bias", "outputs", "residual"])
@pytest.mark.parametrize("by", ["conv.weight", "norm.bias", "residual.conv.weight", "images"])
def test_their_derivatives_are_those_of_finite_differences(by, part):
    torch.manual_seed(0)
    model, images = converted(), pictures(1).requires_grad_()
    leaf = images if by == "images" else model.network.get_parameter(by)
    mix = torch.randn(getattr(tb.explain(model, images, 1), part).shape, dtype=torch.float64)
    e = tb.explain(model, images, 1, create_graph=True)
    (grad,) = torch.autograd.grad((getattr(e, part) * mix).sum(), leaf, allow_unused=True)
    direction = torch.randn_like(leaf)
    step, ends = 1e-6, []
    with torch.no_grad():
        for sign in (1, -1):
            leaf += sign * step * direction
            ends.append((getattr(tb.explain(model, images, 1), part) * mix).sum().item())
            leaf -= sign * step * direction
    along = 0.0 if grad is None else (grad * direction).sum().item()
    assert along == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-4, abs=1e-6)


# Nothing is left behind.


def trace_of(model, images):
    """All that a call could change, as comparable values."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    numpy_state = np.random.get_state()
    return {
        "state": {k: (v.tolist(), v._version) for k, v in model.state_dict().items()},
        "modes": [m.training for m in model.modules()],
        "hooks": [len(getattr(m, name)) for m in model.modules() for name in hooks],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "scales": [getattr(m, "scale", None) for m in model.modules()],
        "checked": getattr(model, "_values_checked", None),
        "parameters": [
            (p.requires_grad, None if p.grad is None else (id(p.grad), p.grad.tolist()))
            for p in model.parameters()
        ],
        "images": (images.tolist(), images._version, images.requires_grad, images.is_leaf),
        "images' grad": None if images.grad is None else (id(images.grad), images.grad.tolist()),
        "rng": torch.get_rng_state().tolist(),
        "numpy": (numpy_state[1].tolist(), numpy_state[2]),
        "python": python_random.getstate(),
        "grad": torch.is_grad_enabled(),
        "explaining": BF.in_explanation_mode(),
        "mode": (mode._entered.times, mode._offsets.get(), mode._tape.get()),
        "dtype": torch.get_default_dtype(),
    }


def interrupt(*_):
    raise KeyboardInterrupt


def fail(*_):
    raise RuntimeError("on purpose")


def fail_in_the_backward_pass(maps):
    values = maps.sum((1, 2, 3))
    values.register_hook(fail)
    return values


WAYS_TO_END = {
    "logits": ({"targets": "all"}, None),
    "a channel": ({"layer": "residual", "unit": [0, 1]}, None),
    "chunks": ({"targets": "all", "chunk": 1}, None),
    "a wrong class": ({"targets": 77}, ValueError),
    "a wrong unit": ({"layer": "residual", "unit": [0, 77]}, ValueError),
    "a wrong layer": ({"layer": "residue", "unit": 0}, ValueError),
    "a failing function": ({"layer": "residual", "unit": [0, fail]}, RuntimeError),
    "Ctrl-C in a function": ({"layer": "residual", "unit": [0, interrupt]}, KeyboardInterrupt),
    "a failing backward pass": (
        {"layer": "residual", "unit": [0, fail_in_the_backward_pass]},
        RuntimeError,
    ),
}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(("arguments", "error"), WAYS_TO_END.values(), ids=WAYS_TO_END)
@pytest.mark.parametrize("make", [converted, bare])
def test_no_trace_is_left(make, arguments, error, training):
    model = make().train(training)
    images = pictures(channels=3 if make is converted else 6).requires_grad_()
    if make is bare and "layer" in arguments:
        arguments = {**arguments, "layer": "body." + arguments["layer"]}
    images.grad = torch.ones_like(images)
    for parameter in list(model.parameters())[::2]:
        parameter.grad = torch.ones_like(parameter)
    list(model.parameters())[1].requires_grad_(False)
    before = trace_of(model, images)
    if error is None:
        e = tb.explain(model, images, **arguments)
        tensors = [getattr(e, f.name) for f in fields(e) if isinstance(getattr(e, f.name), Tensor)]
        assert not any(t.requires_grad for t in tensors)
    else:
        with pytest.raises(error):
            tb.explain(model, images, **arguments)
    assert trace_of(model, images) == before


@pytest.mark.parametrize("make", [converted, bare])
@pytest.mark.parametrize("arguments", [{}, {"layer": "concatenation", "unit": 0}])
def test_no_trace_is_left_by_ctrl_c_within_the_forward_pass(make, arguments, monkeypatch):
    model = make()
    images = pictures(channels=3 if make is converted else 6)
    if make is bare and "layer" in arguments:
        arguments = {**arguments, "layer": "body." + arguments["layer"]}
    expected = tb.explain(model, images, **arguments)
    before = trace_of(model, images)
    network = model.network if make is converted else model.body
    with monkeypatch.context() as patch:
        patch.setattr(type(network.residual.conv), "function", staticmethod(interrupt))
        with pytest.raises(KeyboardInterrupt):
            tb.explain(model, images, **arguments)
    assert trace_of(model, images) == before
    assert_same(tb.explain(model, images, **arguments), expected)


def test_a_network_that_draws_random_numbers_leaves_their_state():
    model = nn.Sequential(bare(dtype=torch.float32), nn.Dropout(0.5)).train()
    images = pictures(channels=6, dtype=torch.float32)
    before = torch.get_rng_state()
    e = tb.explain(model, images, "all")
    assert torch.equal(torch.get_rng_state(), before)
    assert e.residual.abs().max() <= 1e-4 * e.outputs.abs().max()


def test_torchs_own_norms_keep_their_running_statistics():
    model = nn.Sequential(tb.BcosConv2d(6, 4, 3), nn.BatchNorm2d(4), nn.Flatten()).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    tb.explain(model, pictures(channels=6, dtype=torch.float32))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("create_graph", [False, True])
def test_one_part_in_training_is_as_the_whole(create_graph):
    """Its statistics are the batch's and stay what they were, as does the random state."""
    part = nn.Sequential(tb.BcosConv2d(6, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
    model, images = nn.Sequential(part, nn.Flatten()).double().eval(), pictures(channels=6)
    assert tb.explain(model, images).statistics == "running"
    for module in part:
        module.train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    drawn = torch.get_rng_state()
    e = tb.explain(model, images, create_graph=create_graph)
    assert e.statistics == "batch"
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)
    if create_graph:
        e.contributions.square().sum().backward()
        assert part[0].weight.grad.abs().max() > 0


def test_norms_without_running_statistics_are_of_the_batch():
    """In evaluation too; images are not taken apart then, and outputs are those of the model."""
    norm = tb.norms.UncentredBatchNorm2d(4, track_running_stats=False)
    model = nn.Sequential(tb.BcosConv2d(6, 4, 3), norm, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    images = torch.rand(10, 6, 1, 1).expand(10, 6, 448, 448)
    e = tb.explain(model.eval(), images, 0)
    assert e.statistics == "batch"
    with torch.no_grad():
        torch.testing.assert_close(e.outputs[:, 0], model(images)[:, 0])


def test_folders_of_a_graph_are_in_no_mode():
    """torch.fx makes them anew for each graph, and leaves them in training."""
    network = nn.Sequential(nn.Sequential(nn.Conv2d(6, 4, 3), nn.Flatten())).double().eval()
    graph = torch.fx.symbolic_trace(network)
    assert graph.get_submodule("0").training
    assert tb.explain(graph, pictures(channels=6)).statistics == "running"


def test_twice_on_one_tensor_gives_equal_and_independent_results():
    model, images = converted(), pictures()
    first = tb.explain(model, images, [0, 1])
    kept = first._each(Tensor.clone)
    second = tb.explain(model, images, [0, 1])
    assert_same(first, second)
    for field in fields(second):
        value = getattr(second, field.name)
        if isinstance(value, Tensor):
            value.zero_()
    assert_same(first, kept)
    assert_same(tb.explain(model, images, [0, 1]), kept)


def test_an_explanation_within_the_choice_of_a_unit_is_right():
    model, images = converted(), pictures()
    expected = tb.explain(model, images)
    seen = []

    def choose(maps):
        seen.append(tb.explain(model, images))
        assert BF.in_explanation_mode()
        return maps[:, 0, 0, 0]

    outer = tb.explain(model, images, layer="residual", unit=choose)
    alone = tb.explain(model, images, layer="residual", unit=(0, 0, 0))
    assert_same(seen[0], expected)
    assert_agrees(outer.weights, alone.weights)
    assert_agrees(outer.bias, alone.bias)


@pytest.mark.parametrize("make", [converted, bare])
def test_eight_threads_with_different_targets_do_not_disturb_each_other(make):
    model = make()
    batches = [pictures(2, seed=s, channels=3 if make is converted else 6) for s in range(8)]
    prefix = "" if make is converted else "body."
    jobs = []
    for n, batch in enumerate(batches):
        if n % 2:
            layer = prefix + ("conv", "norm", "residual", "concatenation")[n // 2]
            jobs.append((batch, {"layer": layer, "unit": [n % 4, (1, 2, n % 4)]}))
        else:
            jobs.append((batch, {"targets": [n % 3, (n + 1) % 3]}))
    expected = [tb.explain(model, batch, **arguments) for batch, arguments in jobs]
    together = threading.Barrier(8, timeout=60)

    def work(job):
        batch, arguments = job
        together.wait()
        return [tb.explain(model, batch, **arguments) for _ in range(8)]

    with ThreadPoolExecutor(8) as pool:
        for results, right in zip(pool.map(work, jobs), expected, strict=True):
            for e in results:
                assert_same(e, right, tolerance=1e-12)
    assert not BF.in_explanation_mode()
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("kind", [torch.Tensor.long, lambda t: t.int().numpy()])
def test_one_hot_targets_are_no_class_indices(kind):
    model, x = converted(), pictures(channels=3)
    with pytest.raises(ValueError, match=r"look one-hot: use targets\.argmax\(1\)"):
        tb.explain(model, x, kind(torch.eye(model.num_classes)[: len(x)]))
    tb.explain(model, x, torch.tensor([[0, 1]] * len(x)))


def test_units_within_attention_are_found_by_functions():
    model, images = make_vit().double(), torch.rand(2, 3, 16, 16).double()
    layers = [name for name, _ in model.bcos_layers()]
    assert any("self_attention.q_proj" in name for name in layers)
    for name in layers:
        e = tb.explain(model, images, layer=name, unit=lambda a: a.flatten(1)[:, 3])
        assert e.outputs.abs().min() > 0
        assert (e.residual / e.outputs).abs().max() < 1e-12


@pytest.mark.parametrize("targets", [True, [False, True]])
def test_booleans_are_no_class_indices(targets):
    with pytest.raises(TypeError, match=r"\(=(True|False)\) must be a class index or name"):
        tb.explain(converted(), pictures(channels=3), targets)


def test_the_first_explanation_of_a_model_without_scales_warns():
    model = tb.create_model("mini", num_classes=4, input_size=32).eval()
    with pytest.warns(UserWarning, match="signals fade"):
        tb.explain(model, torch.rand(1, 3, 32, 32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tb.explain(model, torch.rand(1, 3, 32, 32))
        model(torch.rand(1, 3, 32, 32))


def test_a_checkpointed_part_cannot_be_explained_twice_over():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(tb.BcosConv2d(6, 4, 1), tb.BcosConv2d(4, 3, 1))

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False).mean((2, 3))

    x = pictures(channels=6).float()
    with pytest.raises(RuntimeError, match="ran again in the backward pass, as with checkpoint"):
        tb.explain(Checkpointed().eval(), x, 0, create_graph=True)


def test_shards_are_refused_in_a_sentence():
    model = converted()
    next(model.parameters()).full_tensor = None
    with pytest.raises(ValueError, match="keeps in shards") as error:
        tb.explain(model, pictures())
    assert_sentence(error, "whole weights")


def test_explanations_can_be_compared():
    e = tb.explain(converted(), pictures())
    assert e == e
    assert e != tb.explain(converted(), pictures())


@pytest.mark.parametrize("pooled", ["mean", "first", "last"])
@pytest.mark.parametrize("count", [3, 4, 16])  # 16 tokens are no, or some, or one for each image
@pytest.mark.parametrize("first", ["tokens", "images"])
def test_offsets_that_no_image_can_be_told_of_are_refused(first, count, pooled):
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = tb.norms.UncentredLayerNorm(6)
            nn.init.normal_(self.norm.bias)

        def forward(self, x):
            x = x.flatten(2).permute((2, 0, 1) if first == "tokens" else (0, 2, 1))
            axis = 0 if first == "tokens" else 1
            x = self.norm(x)
            return x.mean(axis) if pooled == "mean" else x.select(axis, -(pooled == "last"))

    model, x = Tokens(), torch.rand(count, 6, 4, 4)
    if first == "images":
        e = tb.explain(model, x, 0)
        torch.testing.assert_close(e.bias, tb.explain(model, x, 0, chunk=1).bias)
        assert e.residual.abs().max() < 1e-5
        return
    with pytest.raises(ValueError, match="images are not the first dimension, so that they cannot"):
        tb.explain(model, x, 0)
