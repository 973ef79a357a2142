"""The post-hoc methods against captum, the lime package, brute force and mathematics."""

import sys

import captum.attr as ca
import numpy as np
import pytest
import torch
import torchvision
from torch import nn

import torchbcos as tb
from torchbcos import posthoc
from torchbcos.baseline import Normalised
from torchbcos.encoding import encode
from torchbcos.posthoc import superpixels
from torchbcos.posthoc.head import find_head
from torchbcos.posthoc.perturbation import rise_masks

SIZE = 12
TARGETS = torch.tensor([[0, 2], [3, 1], [2, 2]])
FEW = {"rise": {"masks": 30}, "lime": {"samples": 30}, "intgrad": {"steps": 6}}
NOT_OURS = [name for name in posthoc.METHODS if name != "ours"]


@pytest.fixture
def images():
    return torch.rand(3, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def conventional():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, padding=1),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    ).eval()  # fmt: skip


@pytest.fixture
def bcos():
    torch.manual_seed(2)
    model = tb.create_model("mini", num_classes=4, width=4, input_size=SIZE, b=2.0)
    return tb.calibrate(model, torch.rand(8, 3, SIZE, SIZE)).eval()


class FromEncoded(nn.Module):
    """A B-cos model as captum can take it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model.from_encoded(x)


def by_captum(attribution, x, **options):
    """[N, K, H, W], one target at a time."""
    maps = [attribution.attribute(x, target=t, **options).sum(1) for t in TARGETS.T]
    return torch.stack(maps, 1).detach()


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


CAPTUM = {
    "grad": (ca.Saliency, {"abs": False}),
    "ixg": (ca.InputXGradient, {}),
    "intgrad": (ca.IntegratedGradients, {"n_steps": 50}),
    "deeplift": (ca.DeepLift, {}),
    "guided_backprop": (ca.GuidedBackprop, {}),
    "occlusion": (ca.Occlusion, {"sliding_window_shapes": (0, 4, 4), "strides": (1, 3, 3)}),
}


@pytest.mark.filterwarnings("ignore::UserWarning:captum")
@pytest.mark.parametrize("name", CAPTUM)
@pytest.mark.parametrize("kind", ["conventional", "bcos", "colours", "normalised"])
def test_a_method_equals_captums(name, kind, conventional, bcos, images):
    wrapped, options = CAPTUM[name]
    model, network, x = {
        "conventional": (conventional, conventional, images),
        "bcos": (bcos, FromEncoded(bcos), encode(images)),
        "colours": (posthoc.by_colours(bcos), bcos, images),
        "normalised": (
            Normalised(conventional),
            conventional,
            torchvision.transforms.functional.normalize(
                images, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
            ),
        ),
    }[kind]
    ours = {"window": 4, "stride": 3} if name == "occlusion" else {}
    if name == "occlusion":
        options = {"sliding_window_shapes": (x.shape[1], 4, 4), "strides": (x.shape[1], 3, 3)}
        expected = torch.stack(
            [
                ca.Occlusion(network).attribute(x, target=t, **options).mean(1)  # one for all
                for t in TARGETS.T
            ],
            1,
        )
    else:
        expected = by_captum(wrapped(network), x.clone().requires_grad_(), **options)
    assert_same(posthoc.METHODS[name](model, images, TARGETS, **ours), expected)


@pytest.mark.parametrize("kind", ["conventional", "bcos"])
def test_gradcam_equals_captums_at_the_input_of_the_head(kind, conventional, bcos, images):
    if kind == "conventional":  # what comes out of the last ReLU
        cam = ca.LayerGradCam(conventional, conventional[4])
        x, options = images, {}
    else:  # what goes into the 1×1 classifier before the pool
        layer = [m for _, m in bcos.bcos_layers()][-1]
        cam = ca.LayerGradCam(FromEncoded(bcos), layer)
        x, options = encode(images), {"attribute_to_layer_input": True}
    maps = [cam.attribute(x, target=t, relu_attributions=True, **options) for t in TARGETS.T]
    expected = [ca.LayerAttribution.interpolate(m, (SIZE, SIZE))[:, 0] for m in maps]
    model = conventional if kind == "conventional" else bcos
    assert_same(posthoc.gradcam(model, images, TARGETS), torch.stack(expected, 1).detach())


@pytest.mark.filterwarnings("ignore::UserWarning:captum")
def test_guided_gradcam_equals_captums_and_a_layer_can_be_named(conventional, images):
    for layer in ("1", "4"):
        reference = ca.GuidedGradCam(conventional, conventional[int(layer)])
        x = images.clone().requires_grad_()
        expected = by_captum(reference, x)
        assert_same(posthoc.guided_gradcam(conventional, images, TARGETS, layer=layer), expected)


@pytest.mark.parametrize("arch", ["resnet18", "densenet121", "squeezenet1_1", "vgg11"])
def test_the_head_of_a_network_begins_after_its_last_features(arch):
    expected = {
        "resnet18": "avgpool",
        "densenet121": None,  # the pool is a function
        "squeezenet1_1": "classifier.1",  # a 1×1 classifier
        "vgg11": "avgpool",  # to 7×7, before the function that flattens
    }[arch]
    network = torchvision.models.get_model(arch, num_classes=3).eval()
    head = find_head(network, torch.rand(1, 3, 64, 64))
    assert (head.layer, head.side, head.call) == (expected, "input", 0)


class Branches(nn.Module):
    """Two branches side by side; a pool that is a module or a function; a classifier."""

    def __init__(self, join, function):
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(3, 6, 3, padding=1)
        self.join = join
        self.pool = torch.nn.functional.adaptive_avg_pool2d if function else _Pool()
        self.classify = nn.Linear(12 if join is torch.cat else 6, 4)

    def features(self, x):
        return self.join([self.left(x).relu(), self.right(x).relu()], 1)

    def forward(self, x):
        return self.classify(torch.flatten(self.pool(self.features(x), 1), 1))


class _Pool(nn.AdaptiveAvgPool2d):
    def __init__(self):
        super().__init__(1)

    def forward(self, x, _=1):
        return super().forward(x)


def add(parts, _):
    return parts[0] + parts[1]


@pytest.mark.parametrize("function", [False, True])
@pytest.mark.parametrize("join", [torch.cat, add])
def test_gradcam_sees_all_branches_before_the_pool(join, function, images):
    torch.manual_seed(3)
    network = Branches(join, function).eval()
    features = network.features(images).detach().requires_grad_()
    logits = network.classify(features.mean((2, 3)))
    expected = []
    for column in logits.gather(1, TARGETS).unbind(1):
        (gradient,) = torch.autograd.grad(column.sum(), features, retain_graph=True)
        expected.append((gradient.mean((2, 3), keepdim=True) * features).sum(1).relu())
    found = posthoc.gradcam(network, images, TARGETS)
    assert_same(found, torch.stack(expected, 1).detach())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in network.modules())


@pytest.mark.parametrize("function", [False, True])
@pytest.mark.parametrize("join", [torch.cat, add])
def test_gradcam_sees_all_branches_of_a_bcos_network_that_classifies_after_the_pool(
    join, function, images
):
    torch.manual_seed(3)
    model = tb.calibrate(tb.convert(Branches(join, function), head="pool"), images).eval()
    classifier = [m for _, m in model.bcos_layers()][-1]
    seen = []
    hook = classifier.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model(images)
    hook.remove()
    head = find_head(model.network, encode(images))
    with head.watched(model.network) as features:
        model(images)
    pooled = features[0].mean((2, 3))
    torch.testing.assert_close(pooled, seen[0].flatten(1))


def test_a_network_without_features_has_no_head(images):
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 4)).eval()
    with pytest.raises(ValueError, match="GradCAM and DiPart need one"):
        posthoc.gradcam(network, images, TARGETS)


def test_a_whole_block_can_be_named_for_gradcam(images):
    network = torchvision.models.resnet18(num_classes=4).eval()
    large = torch.rand(1, 3, 64, 64)
    by_block = posthoc.gradcam(network, large, [1], layer="layer4")
    assert_same(by_block, posthoc.gradcam(network, large, [1]))


def test_deeplift_is_complete_where_activations_are_used_twice_and_in_place():
    torch.manual_seed(0)
    network = torchvision.models.resnet18(num_classes=3).eval().double()
    x = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    maps = posthoc.deeplift(network, x, targets=[1])
    with torch.no_grad():
        difference = (network(x) - network(torch.zeros_like(x)))[:, 1]
    torch.testing.assert_close(maps.sum((2, 3))[:, 0], difference)
    assert not any(m._forward_hooks or m._backward_hooks for m in network.modules())
    assert network.relu.inplace


class Gated(nn.Module):
    def __init__(self, sigmoid):
        super().__init__()
        self.squeeze, self.sigmoid = nn.Conv2d(6, 6, 1), sigmoid

    def forward(self, x):
        return x * self.sigmoid(self.squeeze(x.mean((2, 3), keepdim=True)))


@pytest.mark.parametrize("seen_as", [lambda model: model, posthoc.by_colours])
def test_a_gate_has_its_rule_in_deeplift_also_where_it_is_a_function(images, seen_as):
    """A B-cos network with gates keeps their sigmoids, so there DeepLIFT is not IxG."""
    maps = {}
    for sigmoid in (nn.Sigmoid(), torch.sigmoid):
        torch.manual_seed(3)
        network = nn.Sequential(
            nn.Conv2d(3, 6, 3), Gated(sigmoid), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(6, 4),
        )  # fmt: skip
        model = seen_as(tb.calibrate(tb.convert(network, input_size=SIZE), images).eval())
        assert not posthoc.METHODS["deeplift"].twin(model)
        assert posthoc.METHODS["guided_backprop"].twin(model) == "grad"
        maps[sigmoid] = posthoc.deeplift(model, images, TARGETS)
    assert_same(*maps.values())
    ixg = posthoc.input_x_gradient(model, images, TARGETS)
    assert (maps[sigmoid] - ixg).abs().max() > 1e-3 * ixg.abs().max()


@pytest.mark.filterwarnings("ignore::UserWarning:captum")
@pytest.mark.parametrize(
    "activation",
    [
        lambda x: nn.functional.elu(x, 0.7), lambda x: nn.functional.leaky_relu(x, 0.3),
        torch.sigmoid, lambda x: x.tanh(), nn.functional.softplus,
        lambda x: nn.functional.max_pool2d(x, 2),
        lambda x: nn.functional.relu(x, inplace=True), torch.relu_,
    ],
)  # fmt: skip
def test_deeplift_is_complete_for_activations_that_are_functions(activation, images):
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.classify = nn.Conv2d(3, 6, 3), nn.Linear(6, 4)

        def forward(self, x):
            return self.classify(activation(3 * self.conv(x)).mean((2, 3)))

    torch.manual_seed(0)
    network = Network().eval().double()
    x = images.double()
    maps = posthoc.deeplift(network, x, TARGETS)
    with torch.no_grad():
        difference = (network(x) - network(torch.zeros_like(x))).gather(1, TARGETS)
    torch.testing.assert_close(maps.sum((2, 3)), difference)
    assert not torch.allclose(maps, posthoc.input_x_gradient(network, x, TARGETS))


@pytest.mark.filterwarnings("ignore::UserWarning:captum")
def test_captums_methods_see_the_network_as_it_is_now(conventional, images):
    for name in ("deeplift", "guided_backprop"):
        method = posthoc.METHODS[name]
        before = method(conventional, images, TARGETS)
        conventional[7] = nn.Linear(8, 4)
        again = method(conventional, images, TARGETS)
        assert not torch.allclose(before, again)
        expected = by_captum(CAPTUM[name][0](conventional), images.clone().requires_grad_())
        assert_same(again, expected)


@pytest.mark.filterwarnings("ignore::UserWarning:captum")
def test_captums_methods_see_whether_a_network_is_in_training(images):
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.classify = nn.Conv2d(3, 6, 3), nn.Linear(6, 4)

        def forward(self, x):
            x = torch.relu(self.conv(x)).mean((2, 3))
            return self.classify(nn.functional.dropout(x, 0.5, self.training))

    network = Network().train()
    posthoc.deeplift(network, images, TARGETS)
    network.eval()
    maps = posthoc.deeplift(network, images, TARGETS)
    assert torch.equal(posthoc.deeplift(network, images, TARGETS), maps)  # no dropout


def test_on_a_bcos_network_integrated_gradients_is_input_times_gradient(bcos, images):
    """f(a·x) = a·f(x), so the gradient is the same all along the line from zero."""
    assert_same(
        posthoc.integrated_gradients(bcos, images, TARGETS, steps=3),
        posthoc.input_x_gradient(bcos, images, TARGETS),
    )


def test_integrated_gradients_see_what_comes_and_goes_on_the_way():
    class Step(nn.Module):
        """From 0 to 0.15 between 30 % and 45 % of the way to the image below."""

        def forward(self, x):
            mean = x.mean((1, 2, 3))[:, None] / 0.5
            return (mean - 0.3).relu() - (mean - 0.45).relu()

    maps = posthoc.integrated_gradients(Step(), torch.full((1, 3, 4, 4), 0.5), [0], steps=100)
    assert maps.sum().item() == pytest.approx(0.15, abs=0.01)


def gradients_taken(monkeypatch, *arguments, **options):
    """Integrated Gradients, and how many gradients it took."""
    taken, once = [], posthoc.gradients._gradients
    with monkeypatch.context() as patch:
        patch.setattr(posthoc.gradients, "_gradients", lambda *a: (taken.append(1), once(*a))[1])
        return posthoc.integrated_gradients(*arguments, **options), len(taken)


@pytest.mark.parametrize("norm", [None, "uncentred"])
def test_integrated_gradients_takes_one_gradient_for_all_that_are_the_same(
    norm, images, monkeypatch
):
    model = tb.create_model("mini", num_classes=4, width=4, input_size=SIZE, b=2.5, norm=norm)
    tb.calibrate(model, images)
    model(images)  # for the norms' statistics
    model.eval()
    maps, taken = gradients_taken(monkeypatch, model, images, TARGETS, steps=50)
    assert taken == 4  # at the image and at three parts of the way
    assert_same(maps, by_captum(ca.IntegratedGradients(FromEncoded(model)), encode(images)))


def test_one_image_that_differs_along_the_line_is_enough_for_all_steps(images, monkeypatch):
    class Bent(nn.Module):
        """The slope by each pixel is 1 up to 0.7 and then 3."""

        def forward(self, x):
            total = (x + 2 * torch.relu(x - 0.7)).sum((1, 2, 3))
            return torch.stack([total, -total], 1)

    low = images * 0.7  # never there
    maps, taken = gradients_taken(monkeypatch, Bent(), low, [0, 1], steps=50)
    assert taken == 4
    torch.testing.assert_close(maps[:, 0], low.sum(1))
    mixed = torch.cat([low[:1], images[1:]])
    maps, taken = gradients_taken(monkeypatch, Bent(), mixed, [0, 1], steps=50)
    assert taken == 2 + 50
    expected = (mixed + 2 * torch.relu(mixed - 0.7)).sum(1)
    torch.testing.assert_close(maps[:, 0], expected, rtol=0, atol=0.05)  # a kink, by 50 steps
    torch.testing.assert_close(maps[:1, 0], low[:1].sum(1))


class Cubic(nn.Module):
    def forward(self, x):
        values = x.pow(3).sum((1, 2, 3))
        return torch.stack([values, -2 * values], 1)


def test_smoothgrad_averages_over_normal_noise_of_the_inputs_range():
    """The mean of 3·(x + e)² is 3·(x² + σ²), with σ = 0.15 of the range."""
    x = torch.linspace(0, 2, 64).view(1, 1, 8, 8)
    maps = posthoc.smoothgrad(Cubic(), x, [0, 1], samples=1500)
    expected = 3 * (x.square() + 0.3**2)
    error = 3 * (4 * x.square() * 0.09 + 2 * 0.09**2).sqrt() / 1500**0.5
    assert ((maps[:, 0] - expected[:, 0]).abs() < 5 * error[:, 0]).all()
    torch.testing.assert_close(maps[:, 1], -2 * maps[:, 0])
    assert torch.equal(maps, posthoc.smoothgrad(Cubic(), x, [0, 1], samples=1500))


def test_rise_masks_are_enlarged_as_in_the_original():
    """There each s×s grid is resized by skimage to s + 1 cells and cut at a random shift."""
    size, cells = (30, 41), 4
    masks = rise_masks(5, size, cells, 0.5, seed=3)
    generator = torch.Generator().manual_seed(3)
    grids = torch.rand(5, 1, cells, cells, generator=generator)[:, 0] < 0.5
    steps = [8, 11]
    shifts = [torch.randint(s, (5,), generator=generator) for s in steps]
    for i in range(5):
        from skimage.transform import resize

        full = resize(
            grids[i].numpy().astype("float32"),
            ((cells + 1) * 8, (cells + 1) * 11),
            order=1,
            mode="reflect",
            anti_aliasing=False,
        )
        top, left = int(shifts[0][i]), int(shifts[1][i])
        expected = full[top : top + 30, left : left + 41]
        np.testing.assert_allclose(masks[i].numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["conventional", "bcos"])
def test_rise_weights_every_mask_by_its_probability(kind, conventional, bcos, images):
    model = conventional if kind == "conventional" else bcos
    masks = rise_masks(23, (SIZE, SIZE))
    maps = posthoc.rise(model, images, TARGETS, masks=23, chunk=5)
    x = images if kind == "conventional" else encode(images)
    for i in range(3):
        expected = torch.zeros(2, SIZE, SIZE)
        for mask in masks:
            with torch.no_grad():
                masked = (mask * x[i])[None]
                if kind == "conventional":
                    p = conventional(masked).softmax(1)[0]
                else:
                    p = bcos.from_encoded(masked).sigmoid()[0]
            expected += p[TARGETS[i], None, None] * mask
        assert_same(maps[i], expected / 23 / 0.1)


def test_missing_packages_are_noticed_where_they_are_used(conventional, bcos, monkeypatch):
    for package in ("captum", "lime"):
        monkeypatch.setitem(sys.modules, package, None)
    for name, package in (("deeplift", "captum"), ("guided_backprop", "captum"), ("lime", "lime")):
        with pytest.raises(ValueError, match=rf"{name}' needs the package {package}: .*\[eval\]"):
            posthoc.METHODS[name].check(conventional)
    posthoc.METHODS["guided_backprop"].check(bcos)  # there it is the gradient


@pytest.mark.parametrize("kind", ["conventional", "bcos"])
def test_lime_is_what_the_package_computes(kind, conventional, bcos):
    model = conventional if kind == "conventional" else bcos
    torch.manual_seed(0)
    image = torch.nn.functional.interpolate(torch.rand(1, 3, 6, 6), (48, 48))  # patches

    def classify(pixels):
        with torch.no_grad():
            logits = model(torch.from_numpy(pixels).permute(0, 3, 1, 2).float())
        return (logits.softmax(1) if kind == "conventional" else logits.sigmoid()).numpy()

    from lime.lime_image import LimeImageExplainer
    from skimage.segmentation import quickshift

    explained = LimeImageExplainer(random_state=0).explain_instance(
        image[0].permute(1, 2, 0).double().numpy(),
        classify,
        labels=(1, 3),
        top_labels=None,
        num_samples=60,
        segmentation_fn=lambda p: quickshift(p, kernel_size=2, max_dist=200, ratio=0.2, rng=0),
    )
    maps = posthoc.lime(model, image, [1, 3], samples=60, kernel=2)
    assert set(maps.unique().tolist()) == {0.0, 1.0}
    for k, label in enumerate((1, 3)):
        _, mask = explained.get_image_and_mask(label, positive_only=True, num_features=5)
        np.testing.assert_array_equal(maps[0, k].numpy(), mask)


@pytest.mark.parametrize("channels", [2, 4])
def test_lime_hides_superpixels_behind_the_mean_of_each_channel(channels, monkeypatch):
    image = torch.rand(1, channels, 24, 24)
    seen = []

    def note(_, changed):
        seen.append(changed)
        return changed

    monkeypatch.setattr(superpixels, "input_of", note)
    network = torch.nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 3))
    posthoc.lime(network, image, 1, samples=8, kernel=1)
    hidden = 0
    for changed in torch.cat(seen):
        colours = changed[:, (changed != image[0]).any(0)].unique(dim=1)
        for colour in colours.unbind(1):  # of one superpixel
            there = (changed == colour[:, None, None]).all(0)
            assert_same(image[0, :, there].mean(1), colour)
            hidden += 1
    assert hidden > 8


@pytest.mark.parametrize("name", NOT_OURS)
def test_a_map_does_not_depend_on_what_else_is_in_the_batch(name, conventional, images):
    method = posthoc.METHODS[name]
    options = FEW.get(name, {})
    together = method(conventional, images, TARGETS, **options)
    alone = [
        method(conventional, images[i : i + 1], TARGETS[i : i + 1], **options) for i in (0, 1, 2)
    ]
    assert together.shape == (3, 2, SIZE, SIZE)
    assert_same(together, torch.cat(alone))


@pytest.mark.parametrize("name", posthoc.METHODS)
def test_methods_leave_no_trace(name, bcos, images):
    bcos.requires_grad_(True)
    before = {k: v.clone() for k, v in bcos.state_dict().items()}
    given = images.clone()
    with torch.inference_mode():
        posthoc.METHODS[name](bcos, given, TARGETS, **FEW.get(name, {}))
    assert torch.equal(given, images)
    assert given.grad is None
    assert all(p.grad is None and p.requires_grad for p in bcos.parameters())
    assert all(torch.equal(v, before[k]) for k, v in bcos.state_dict().items())
    assert not any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in bcos.modules()
    )


def test_targets_are_given_as_to_explain(bcos, images):
    expected = posthoc.grad(bcos, images, TARGETS)
    assert torch.equal(posthoc.grad(bcos, images, TARGETS.tolist()), expected)
    assert torch.equal(posthoc.grad(bcos, images, TARGETS[:, 0]), expected[:, :1])
    assert posthoc.grad(bcos, images).shape == (3, 1, SIZE, SIZE)
    assert posthoc.grad(bcos, images, "all").shape == (3, 4, SIZE, SIZE)
    with pytest.raises(ValueError, match="from 0 to 3"):
        posthoc.grad(bcos, images, TARGETS + 2)
    with pytest.raises(ValueError, match="from 0 to 3"):
        posthoc.rise(bcos, images, torch.tensor([0, 1, -1]), masks=2)


@pytest.mark.parametrize("name", NOT_OURS)
def test_targets_of_no_class_are_refused(name, conventional, images):
    for targets in (torch.tensor([0, 1, -1]), torch.tensor([4, 0, 0])):
        with pytest.raises(ValueError, match="from 0 to 3"):
            posthoc.METHODS[name](conventional, images, targets, **FEW.get(name, {}))


def test_ours_is_the_models_own_explanation(bcos, images, conventional):
    expected = tb.explain(bcos, images, TARGETS).contributions
    assert torch.equal(posthoc.METHODS["ours"](bcos, images, TARGETS), expected)
    with pytest.raises(ValueError, match="'ixg'"):
        posthoc.METHODS["ours"](conventional, images, TARGETS)


def test_a_method_of_ones_own_takes_three_lines(bcos, images):
    @posthoc.register("mine")
    def mine(model, images, targets=None):
        return images.mean(1, keepdim=True)

    try:
        names = [m.name for m in posthoc.choose_methods(["mine", "grad", "mine"], bcos)]
        assert names == ["mine", "grad"]
        assert torch.equal(posthoc.METHODS["mine"](bcos, images), images.mean(1, keepdim=True))
        with pytest.raises(ValueError, match="taken"):
            posthoc.register("mine")(mine)
    finally:
        del posthoc.METHODS["mine"]


def test_maps_of_a_wrong_shape_are_refused(bcos, images):
    method = posthoc.Method("flat", lambda m, x, t: torch.zeros(3, SIZE, SIZE), "Flat")
    with pytest.raises(ValueError, match=r"'flat' gave maps of shape \(3, 12, 12\)"):
        method(bcos, images)


def test_all_methods_are_those_that_suit_the_model(bcos, conventional):
    assert [m.name for m in posthoc.choose_methods(["all"], bcos)] == list(posthoc.METHODS)
    assert [m.name for m in posthoc.choose_methods(["all"], conventional)] == NOT_OURS
    with pytest.raises(ValueError, match=r"'lrp'.*gradcam"):
        posthoc.choose_methods(["lrp"], bcos)
    with pytest.raises(ValueError, match="at least one"):
        posthoc.choose_methods([], bcos)


def test_a_missing_package_is_named_with_the_way_to_install_it(bcos, images):
    def needs(model, images, targets):
        import a_package_that_is_not_there  # noqa: F401

    method = posthoc.Method("needy", needs, "Needy")
    with pytest.raises(ValueError, match=r"a_package_that_is_not_there.*torchbcos\[eval\]"):
        method(bcos, images)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "name", [n for n in posthoc.METHODS if n != "smoothgrad"]
)  # its noise is the device's
def test_maps_on_a_gpu_are_those_of_the_cpu(name, bcos, images):
    expected = posthoc.METHODS[name](bcos, images, TARGETS, **FEW.get(name, {}))
    model, there = bcos.to("cuda"), images.to("cuda")
    for targets in (TARGETS, TARGETS.to("cuda")):
        found = posthoc.METHODS[name](model, there, targets, **FEW.get(name, {}))
        assert found.is_cuda
        scale = float(expected.abs().max())
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-2, atol=1e-2 * scale)  # TF32


def test_bad_settings_are_refused(conventional, images):
    with pytest.raises(ValueError, match="`window`"):
        posthoc.occlusion(conventional, images, TARGETS, window=99)
    with pytest.raises(ValueError, match="`steps`"):
        posthoc.integrated_gradients(conventional, images, TARGETS, steps=0)
    with pytest.raises(ValueError, match="`layer`"):
        posthoc.gradcam(conventional, images, TARGETS, layer="7")
    with pytest.raises(ValueError, match="`images`"):
        posthoc.grad(conventional, images[0], TARGETS)


@pytest.mark.parametrize("name", ["grad", "intgrad", "smoothgrad", "gradcam", "rise", "occlusion"])
def test_maps_have_the_type_of_the_model(bcos, images, name):
    options = {"samples": 2} if name == "smoothgrad" else FEW.get(name, {})
    maps = posthoc.METHODS[name](bcos.double(), images, TARGETS, **options)
    assert maps.dtype == torch.float64


@pytest.mark.parametrize("name", ["grad", "deeplift", "occlusion"])
def test_one_hot_targets_are_no_class_indices(bcos, images, name):
    one_hot = torch.eye(bcos.num_classes)[: len(images)].long()
    with pytest.raises(ValueError, match=r"look one-hot: use targets\.argmax\(1\)"):
        posthoc.METHODS[name](bcos, images, one_hot)


@pytest.mark.parametrize("name", ["grad", "gradcam", "rise"])
def test_a_model_in_training_keeps_its_statistics(name):
    model = tb.create_model("mini", num_classes=4, input_size=32, norm="uncentred")
    tb.calibrate(model, torch.rand(8, 3, 32, 32))
    before = {key: b.clone() for key, b in model.train().named_buffers()}
    posthoc.METHODS[name](model, torch.rand(2, 3, 32, 32), targets=[1])
    getattr(posthoc, name)(model, torch.rand(2, 3, 32, 32), targets=[1])
    assert model.training
    assert all(torch.equal(b, before[key]) for key, b in model.named_buffers())
