"""Metrics with a known truth, against hand-made cases and slow loops."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from torch import nn

import torchbcos as tb
from torchbcos import posthoc, sanity
from torchbcos.baseline import Normalised
from torchbcos.disconnected import cell_targets, difull, dipart
from torchbcos.encoding import encode
from torchbcos.localise import compose, score_cells
from torchbcos.metrics import box_masks, energy_pointing_game, overlap, pointing_game
from torchbcos.removal import removal_curve
from trained import make_vit, some_shapes, train_on_shapes

# On masks and boxes


@pytest.fixture
def maps():
    return torch.randn(4, 3, 9, 11, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def boxes():
    return torch.tensor([[0, 0, 9, 11], [2, 3, 5, 9], [8, 10, 9, 11], [1, 0, 2, 11]])


def test_boxes_are_masks_with_their_ends_excluded(boxes):
    masks = box_masks(boxes, (9, 11))
    for mask, (top, left, bottom, right) in zip(masks, boxes.tolist(), strict=True):
        expected = np.zeros((9, 11), bool)
        expected[top:bottom, left:right] = True
        np.testing.assert_array_equal(mask.numpy(), expected)


def test_energy_pointing_is_the_share_of_positive_attribution(maps, boxes):
    scores = energy_pointing_game(maps, boxes)
    for i, (top, left, bottom, right) in enumerate(boxes.tolist()):
        for k in range(3):
            positive = np.maximum(maps[i, k].double().numpy(), 0)
            expected = positive[top:bottom, left:right].sum() / positive.sum()
            assert scores[i, k].item() == pytest.approx(expected)
    assert energy_pointing_game(-maps.abs(), boxes).tolist() == [[0.0] * 3] * 4
    masks = box_masks(boxes, (9, 11))
    assert torch.equal(energy_pointing_game(maps, masks), scores)


@pytest.mark.parametrize("tolerance", [0, 1, 2])
def test_the_pointing_game_looks_at_the_largest_value(maps, boxes, tolerance):
    hits = pointing_game(maps, boxes, tolerance=tolerance)
    masks = box_masks(boxes, (9, 11))
    for i in range(4):
        for k in range(3):
            y, x = np.unravel_index(int(maps[i, k].argmax()), (9, 11))
            inside = np.argwhere(masks[i].numpy())
            distance = np.sqrt(((inside - [y, x]) ** 2).sum(1)).min()
            assert hits[i, k].item() == (distance <= tolerance)


def test_overlap_by_hand():
    one = torch.tensor([[[[4.0, 3.0, 2.0], [1.0, 0.0, -1.0]]]])
    truth = torch.tensor([[[True, False, True], [True, False, False]]])
    # the three largest are the first row: two of them are true, four pixels in all
    assert overlap(one, truth).tolist() == [[0.5]]
    # above half of 4: 4 and 3; one is true, four pixels in all
    assert overlap(one, truth, threshold=0.5).tolist() == [[0.25]]
    # above 0: all but two
    assert overlap(one, truth, threshold=0.0).tolist() == [[0.75]]
    assert overlap(-one.abs(), truth).tolist() == [[0.0]]


def test_truth_of_another_shape_is_refused(maps, boxes):
    with pytest.raises(ValueError, match="`truth`"):
        energy_pointing_game(maps, boxes[:2])
    with pytest.raises(ValueError, match="`truth`"):
        pointing_game(maps, torch.zeros(4, 9, 10))
    with pytest.raises(ValueError, match="`attributions`"):
        overlap(maps[0], boxes)
    with pytest.raises(ValueError, match="`threshold`"):
        overlap(maps, boxes, threshold=1.0)
    with pytest.raises(ValueError, match="`tolerance`"):
        pointing_game(maps, boxes, tolerance=-1)


def test_ours_points_at_the_object_better_than_gradients(trained):
    images, labels, masks = (v[:48] for v in some_shapes(48, seed=2))
    scores = {
        name: energy_pointing_game(posthoc.METHODS[name](trained[2.5], images, labels), masks)
        for name in ("ours", "grad", "ixg", "intgrad")
    }
    for name in ("grad", "ixg", "intgrad"):
        assert scores["ours"].mean() > scores[name].mean() + 0.05


# Deletion and insertion


class Sum(nn.Module):
    """The logit difference is a weighted sum of the pixels, so curves are known."""

    def __init__(self, weights):
        super().__init__()
        self.weights = weights

    def forward(self, x):
        values = (x * self.weights).sum((1, 2, 3))
        return torch.stack([values, torch.zeros_like(values)], 1)


def test_curves_of_a_sum_of_pixels_by_hand():
    weights = torch.tensor([[[3.0, -1.0], [2.0, 0.5]]])
    image = torch.ones(1, 1, 2, 2)
    model, maps = Sum(weights), weights[None].clone()
    sigmoid = torch.sigmoid
    deletion = removal_curve(model, image, maps, [0], steps=4)
    left = torch.tensor([4.5, 1.5, -0.5, -1.0, 0.0])  # 3, then 2, then 0.5, then -1 go
    torch.testing.assert_close(deletion.probabilities[0, 0], sigmoid(left))
    torch.testing.assert_close(deletion.fractions, torch.tensor([0, 0.25, 0.5, 0.75, 1]))
    p = sigmoid(left)
    area = (p[0] / 2 + p[1] + p[2] + p[3] + p[4] / 2) / 4
    torch.testing.assert_close(deletion.area[0, 0], area)
    insertion = removal_curve(model, image, maps, [0], steps=4, mode="insertion")
    there = torch.tensor([0, 3, 5, 5.5, 4.5])
    torch.testing.assert_close(insertion.probabilities[0, 0], sigmoid(there))
    least = removal_curve(model, image, maps, [0], steps=4, least_first=True)
    torch.testing.assert_close(
        least.probabilities[0, 0], sigmoid(torch.tensor([4.5, 5.5, 5.0, 3.0, 0.0]))
    )
    grey = removal_curve(model, image, maps, [0], steps=2, fill=0.5)
    torch.testing.assert_close(grey.probabilities[0, 0], sigmoid(torch.tensor([4.5, 2.0, 2.25])))


def test_curves_of_a_bcos_model_start_and_end_where_they_must(trained):
    model = trained[2.5]
    images, labels, _ = (v[:3] for v in some_shapes(3, seed=2))
    maps = posthoc.ours(model, images, labels)
    curve = removal_curve(model, images, maps, labels, steps=8, chunk=3)
    with torch.no_grad():
        full = model(images).sigmoid().gather(1, labels[:, None])
        nothing = model.from_encoded(torch.zeros_like(encode(images))).sigmoid()
    torch.testing.assert_close(curve.probabilities[:, :, 0], full)
    torch.testing.assert_close(curve.probabilities[:, :, -1], nothing.gather(1, labels[:, None]))
    order = removal_curve(model, images, maps, labels, steps=8, least_first=True)
    assert (curve.area < order.area).all()  # the pixels that speak for a class are missed first


def test_curves_and_cuts_of_a_model_in_training_keep_its_statistics():
    model = tb.create_model("mini", num_classes=4, input_size=32, norm="uncentred")
    tb.calibrate(model, torch.rand(8, 3, 32, 32))
    before = {key: b.clone() for key, b in model.train().named_buffers()}
    images = torch.rand(2, 3, 32, 32)
    removal_curve(model, images, torch.rand(2, 1, 32, 32), [1], steps=2)
    dipart(model, 2, images)
    assert model.training
    assert all(torch.equal(b, before[key]) for key, b in model.named_buffers())


def test_bad_removals_are_refused():
    image, maps = torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2)
    model = Sum(torch.ones(1, 2, 2))
    with pytest.raises(ValueError, match="`mode`"):
        removal_curve(model, image, maps, [0], steps=4, mode="other")
    with pytest.raises(ValueError, match="`steps`"):
        removal_curve(model, image, maps, [0], steps=5)
    with pytest.raises(ValueError, match="`attributions`"):
        removal_curve(model, image, maps, [0, 1], steps=4)


# Disconnected grids


@pytest.fixture(params=["bcos", "normalised", "plain"])
def model(request):
    torch.manual_seed(4)
    if request.param == "bcos":
        made = tb.create_model("mini", num_classes=5, width=4, input_size=16)
        return tb.calibrate(made, torch.rand(8, 3, 16, 16)).eval()
    relu = nn.ReLU(inplace=True)  # used twice, as in ResNets
    network = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), relu, nn.Conv2d(6, 6, 3, padding=1), relu,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5),
    )  # fmt: skip
    return Normalised(network).eval() if request.param == "normalised" else network.eval()


def test_difull_sees_each_cell_alone(model):
    cells = torch.rand(8, 3, 16, 16)
    cut = difull(model, 2)
    with torch.no_grad():
        torch.testing.assert_close(cut(compose(cells, 2)), model(cells).view(2, 20))
    classes = torch.tensor([[0, 3, 2, 1], [4, 0, 1, 2]])
    targets = cell_targets(classes, 5)
    with torch.no_grad():
        picked = cut(compose(cells, 2)).gather(1, targets)
        torch.testing.assert_close(picked.flatten(), model(cells)[range(8), classes.flatten()])
    methods = ("grad", "deeplift", "guided_backprop", "gradcam", "guided_gradcam")
    for method in map(posthoc.METHODS.__getitem__, methods):
        maps = method(cut, compose(cells, 2), targets)
        assert maps.any()
        outside = [maps[:, k].unflatten(-2, (2, -1)).unflatten(-1, (2, -1)) for k in range(4)]
        for k, by_cell in enumerate(outside):  # [G, 2, h, 2, w]
            by_cell[:, k // 2, :, k % 2] = 0
            assert not by_cell.any()
    alone = posthoc.gradcam(model, cells, classes.view(8, 1))
    maps = posthoc.gradcam(cut, compose(cells, 2), targets)
    torch.testing.assert_close(maps.sum(1, keepdim=True), compose(alone, 2))


def test_dipart_confines_the_head_but_not_the_features(model):
    grids = torch.rand(2, 3, 32, 32)
    cut = dipart(model, 2, grids)
    with torch.no_grad():
        if isinstance(model, tb.BcosModel):  # pools of the classifier's own map, cell by cell
            network = model.network
            positions = {}
            layer = [m for _, m in model.bcos_layers()][-1]
            hook = layer.register_forward_hook(lambda _, __, out: positions.update(out=out))
            model(grids)
            hook.remove()
            pooled = nn.functional.adaptive_avg_pool2d(positions["out"], 2)
            expected = pooled / model.temperature + model.logit_bias
            assert cut.network.inner is network
        else:
            network = model.network if isinstance(model, Normalised) else model
            x = model.normalise(grids) if isinstance(model, Normalised) else grids
            pooled = nn.functional.adaptive_avg_pool2d(network[:4](x), 2)
            weight, bias = network[6].weight, network[6].bias
            expected = torch.einsum("kc,nchw->nkhw", weight, pooled) + bias[:, None, None]
        torch.testing.assert_close(cut(grids), expected.flatten(2).transpose(1, 2).flatten(1))
    classes = torch.tensor([[0, 3, 2, 1], [4, 0, 1, 2]])
    maps = posthoc.grad(cut, grids, cell_targets(classes, 5)).abs()
    assert (score_cells(maps, 2) < 1).all()  # the neighbours are seen at the border


class TwoBranches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(3, 6, 3, padding=1)
        self.classify = nn.Linear(12, 5)

    def features(self, x):
        return torch.cat([self.left(x).relu(), self.right(x).relu()], 1)

    def forward(self, x):
        return self.classify(nn.functional.adaptive_avg_pool2d(self.features(x), 1).flatten(1))


@pytest.mark.parametrize("pool", ["function", "module"])
def test_dipart_cuts_where_branches_have_come_together(pool):
    torch.manual_seed(4)
    network = TwoBranches().eval()
    grids = torch.rand(2, 3, 32, 32)
    if pool == "function":
        model = network
    else:  # what a classifier and pool as modules make of the same features
        joined = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), network.classify)
        model = _Then(network, joined).eval()
    cut = dipart(model, 2, grids)
    pooled = nn.functional.adaptive_avg_pool2d(network.features(grids), 2)  # [2, 12, 2, 2]
    expected = network.classify(pooled.permute(0, 2, 3, 1)).flatten(1)
    torch.testing.assert_close(cut(grids), expected)
    targets = cell_targets(torch.tensor([[0, 3, 2, 1], [4, 0, 1, 2]]), 5)
    for method in ("gradcam", "deeplift", "guided_gradcam"):
        assert posthoc.METHODS[method](cut, grids, targets).any()
    features = network.features(grids).detach()
    weights = network.classify.weight[targets % 5] / features[0, 0].numel()  # [2, 4, 12]
    cam = torch.einsum("gkc,gchw->gkhw", weights, features).relu()
    torch.testing.assert_close(posthoc.gradcam(cut, grids, targets), cam.detach())


class _Then(nn.Module):
    def __init__(self, network, head):
        super().__init__()
        self.network, self.head = network, head

    def forward(self, x):
        return self.head(self.network.features(x))


def test_cells_that_do_not_fit_are_refused(model):
    with pytest.raises(ValueError, match="cannot be cut into 3×3"):
        difull(model, 3)(torch.rand(1, 3, 32, 32))


def test_ours_is_exact_on_disconnected_models(trained):
    cells, labels, _ = (v[:8] for v in some_shapes(8, seed=3))
    grids = compose(cells, 2)
    for cut in (difull(trained[2.5], 2), dipart(trained[2.5], 2, grids)):
        e = tb.explain(cut, grids, cell_targets(labels.view(2, 4), 4))
        assert e.residual.abs().max() < 1e-4 * e.outputs.abs().max()
    alone = tb.explain(trained[2.5], cells, labels).outputs
    full = tb.explain(difull(trained[2.5], 2), grids, cell_targets(labels.view(2, 4), 4))
    torch.testing.assert_close(full.outputs.flatten(), alone.flatten())


# Sanity checks


def test_rank_correlation_is_spearmans():
    a = torch.randn(3, 2, 5, 6).round(decimals=1)  # with ties
    b = a + torch.randn(3, 2, 5, 6).round(decimals=1)
    found = sanity.rank_correlation(a, b)
    for i in range(3):
        for k in range(2):
            expected = scipy.stats.spearmanr(a[i, k].flatten(), b[i, k].flatten()).statistic
            assert found[i, k].item() == pytest.approx(expected)
    assert sanity.rank_correlation(a, torch.zeros_like(a)).abs().max() == 0


def test_maps_of_a_model_change_with_its_weights_and_an_edge_detector_does_not(trained):
    model = trained[2.5]
    images, labels, _ = (v[:8] for v in some_shapes(8, seed=2))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    generator = torch.get_rng_state()
    found = sanity.parameter_randomisation(posthoc.ours, model, images, labels)
    layers = [name for name, _ in model.bcos_layers()]
    named = [r.layer for r in found]
    assert named[0] == f"network.{layers[-1]}"  # from the output …
    assert (
        named[-1] == f"network.{layers[0]}" or named[-2] == f"network.{layers[0]}"
    )  # to the input
    assert abs(found[-1].signed) < 0.3
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(generator, torch.get_rng_state())

    def edges(model, images, targets):
        return images.mean(1, keepdim=True).diff(
            dim=-1, append=images.mean(1, keepdim=True)[..., :1]
        )

    for result in sanity.parameter_randomisation(edges, model, images, labels):
        assert result.signed == pytest.approx(1)
        assert result.absolute == pytest.approx(1)


def test_single_layers_can_be_made_random():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 1), nn.Flatten(), nn.Linear(48, 2))
    seen = []

    def method(changed, images, targets):
        seen.append([torch.equal(changed[i].weight, model[i].weight) for i in (0, 2)])
        return torch.rand(1, 1, 4, 4)

    sanity.parameter_randomisation(method, model, torch.rand(1, 1, 4, 4), [0])
    assert seen == [[True, True], [True, False], [False, False]]
    seen.clear()
    sanity.parameter_randomisation(method, model, torch.rand(1, 1, 4, 4), [0], cascading=False)
    assert seen == [[True, True], [True, False], [False, True]]


def test_layers_are_made_random_from_the_output_to_the_input_in_the_order_of_their_use():
    class Reversed(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.second, self.first = (
                nn.Linear(4, 2),
                nn.Conv2d(2, 4, 1),
                nn.Conv2d(1, 2, 1),
            )

        def forward(self, x):
            return self.fc(self.second(self.first(x)).mean((2, 3)))

    found = sanity.parameter_randomisation(
        lambda *_: torch.rand(1, 1, 4, 4), Reversed(), torch.rand(1, 1, 4, 4), [0]
    )
    assert [r.layer for r in found] == ["fc", "second", "first"]


def test_what_a_network_adds_to_its_first_features_is_made_random_after_its_layers():
    vit = make_vit()
    found = sanity.parameter_randomisation(
        lambda *_: torch.rand(1, 1, 4, 4), vit, torch.rand(1, 3, 16, 16), [0]
    )
    named = [r.layer for r in found]
    assert named[0] == "network.heads.head"
    assert named.index("network") > named.index("network.conv_proj")  # it holds the class token


def test_maps_of_a_model_of_random_labels_are_others(trained):
    images, labels, _ = (v[:8] for v in some_shapes(8, seed=2))
    other = train_on_shapes(2.5, steps=40, shuffle_labels=True)
    found = sanity.label_randomisation(posthoc.ours, trained[2.5], other, images, labels)
    assert abs(found.signed) < 0.5
    same = sanity.label_randomisation(posthoc.ours, trained[2.5], trained[2.5], images, labels)
    assert same.signed == pytest.approx(1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_maps_that_are_not_finite_get_no_score(value):
    maps, boxes = torch.full((1, 1, 4, 4), value), torch.tensor([[0, 0, 2, 2]])
    for score in (energy_pointing_game, pointing_game, overlap):
        with pytest.raises(ValueError, match="not finite"):
            score(maps, boxes)
    with pytest.raises(ValueError, match="not finite"):
        removal_curve(nn.Flatten(), torch.rand(1, 1, 4, 4), maps, targets=[0], steps=4)
