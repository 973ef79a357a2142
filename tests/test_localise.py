"""The grid pointing game: grids by their rules, scores of maps with known answers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchbcos.localise import (
    compose,
    default_kernel,
    plan_grids,
    score_cells,
    split_cells,
    summarise,
)


def some_logits(seed, images, classes, mistakes=0.2):
    """Logits of a model that is mostly right, of differing confidence."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (images,), generator=generator)
    logits = torch.randn(images, classes, generator=generator) - 2
    right = torch.rand(images, generator=generator) > mistakes
    logits[torch.arange(images), labels] += right * 8 * torch.rand(images, generator=generator)
    return logits, labels


# Grids


@given(
    seed=st.integers(0, 99),
    n=st.integers(2, 3),
    grids=st.integers(1, 12),
    preset=st.sampled_from(["paper", "released"]),
)
def test_no_image_is_used_twice_and_the_classes_of_a_grid_differ(seed, n, grids, preset):
    logits, labels = some_logits(seed, 900, 13)
    plan = plan_grids(logits, labels, grids=grids, n=n, preset=preset, seed=seed)
    assert plan.shape == (grids, n * n)
    assert len(plan.unique()) == plan.numel()
    assert all(len(set(labels[row].tolist())) == n * n for row in plan)
    assert (logits.argmax(1) == labels)[plan].all()
    again = plan_grids(logits, labels, grids=grids, n=n, preset=preset, seed=seed)
    assert torch.equal(plan, again)


@given(seed=st.integers(0, 99))
def test_each_class_gives_its_most_confident_images_first(seed):
    logits, labels = some_logits(seed, 600, 10)
    plan = plan_grids(logits, labels, grids=15, seed=seed)
    confidence = logits.max(1).values
    for c in range(10):
        used = [i for i in plan.flatten().tolist() if labels[i] == c]
        right = [i for i in range(600) if labels[i] == c and logits[i].argmax() == c]
        best = sorted(right, key=lambda i: -confidence[i])
        assert used == best[: len(used)]


def test_the_paper_wastes_no_image_and_a_prefix_stays_the_same():
    labels = torch.arange(90) % 9
    logits = torch.nn.functional.one_hot(labels, 9).float()
    plan = plan_grids(logits, labels, grids=10, n=3)
    assert sorted(plan.flatten().tolist()) == list(range(90))
    assert torch.equal(plan_grids(logits, labels, grids=4, n=3), plan[:4])


def test_classes_are_drawn_evenly():
    logits, labels = some_logits(0, 20_000, 20, mistakes=0)
    drawn = labels[plan_grids(logits, labels, grids=400, n=2)]
    counts = torch.bincount(drawn.flatten(), minlength=20)
    assert counts.min() > 80 - 5 * 8
    assert counts.max() < 80 + 5 * 8


def peers_grids(logits, labels, grids, n):
    """The authors' code in other words: what it does, bug and all, one index at a time.

    Right images of each class with sigmoid(logit) > 0.5, sorted; as long as more than n·n classes
    have images, n·n of them are drawn (numpy's old generator, seed 42) and the next image of each
    goes on a list. A grid then takes images from the list, passes over any of a class that it has
    already, and the next grid starts one image further on than where this one ended. The cell of
    the i-th image is in column i // n and row i % n.
    """
    logits, labels = logits.numpy(), labels.numpy()
    sorted_images = {}
    for c in range(logits.shape[1]):
        right = [
            (i, logits[i].max())
            for i in range(len(labels))
            if labels[i] == c
            and logits[i].argmax() == c
            and 1 / (1 + np.exp(-logits[i].max())) > 0.5
        ]
        sorted_images[c] = sorted(right, key=lambda pair: pair[1], reverse=True)
    np.random.seed(42)
    pointers = dict.fromkeys(sorted_images, 0)
    sequence = []
    while True:
        open_classes = np.array([c for c in pointers if pointers[c] < len(sorted_images[c])])
        if len(open_classes) <= n * n:
            break
        for c in np.random.choice(open_classes, size=n * n, replace=False):
            sequence.append(sorted_images[c][pointers[c]][0])
            pointers[c] += 1
    result, offset = [], 0
    for _ in range(grids):
        chosen, seen, step = [], [], 0
        while len(chosen) < n * n:
            image = sequence[offset + step]
            step += 1
            if labels[image] not in seen:
                chosen.append(image)
                seen.append(labels[image])
        offset += step + 1
        cells = np.empty((n, n), dtype=int)
        for i, image in enumerate(chosen):
            cells[i % n, i // n] = image
        result.append(cells.flatten().tolist())
    return torch.tensor(result)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_released_is_the_peers_algorithm(n, seed):
    logits, labels = some_logits(seed, 800, 14)
    state = np.random.get_state()
    expected = peers_grids(logits, labels, 20, n)
    np.random.set_state(state)
    assert torch.equal(plan_grids(logits, labels, grids=20, n=n, preset="released"), expected)


def test_the_presets_differ_in_threshold_and_in_the_image_passed_over():
    labels = torch.arange(200) % 10
    logits = torch.full((200, 10), -5.0)
    logits[torch.arange(200), labels] = -1.0  # right, but not sure
    assert plan_grids(logits, labels, grids=10).shape == (10, 9)
    with pytest.raises(ValueError, match="enough for 0: take a model that gets more right, or a"):
        plan_grids(logits, labels, grids=10, preset="released")
    sure = logits + 5
    released = plan_grids(sure, labels, grids=10, preset="released")
    assert len(released.unique()) == 90


def test_too_few_images_are_said_to_be_so_with_the_number_that_is_possible():
    labels = torch.arange(45) % 9
    logits = torch.nn.functional.one_hot(labels, 9).float()
    with pytest.raises(ValueError, match=r"`grids` \(=6\).*enough for 5: ask for at most that"):
        plan_grids(logits, labels, grids=6, n=3)
    assert plan_grids(logits, labels, grids=5, n=3).shape == (5, 9)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"preset": "mine"}, "`preset`"),
        ({"n": 1}, "`n`"),
        ({"grids": 0}, "`grids`"),
        ({"n": 4}, "16 different classes, and there are 9"),
        ({"preset": "released"}, "10 different classes, and there are 9"),
    ],
)
def test_impossible_plans_are_refused(change, words):
    logits, labels = some_logits(0, 100, 9)
    with pytest.raises(ValueError, match=words):
        plan_grids(logits, labels, **{"grids": 2, **change})
    with pytest.raises(ValueError, match="`labels`"):
        plan_grids(logits, labels[:5])


def test_cells_are_composed_row_by_row():
    cells = torch.arange(2 * 4).view(8, 1, 1, 1).expand(8, 3, 2, 5)
    grids = compose(cells, 2)
    assert grids.shape == (2, 3, 4, 10)
    assert grids[1, 0, ::2, ::5].tolist() == [[4, 5], [6, 7]]
    assert torch.equal(split_cells(grids, 2), cells)
    with pytest.raises(ValueError, match="multiple"):
        compose(cells[:3], 2)
    with pytest.raises(ValueError, match="cannot be cut"):
        split_cells(grids, 3)


# Scores


def test_scores_of_maps_with_known_answers_are_exact():
    maps = torch.zeros(5, 4, 6, 6)
    maps[0, :] = -1.0  # nothing positive
    for k in range(4):
        top, left = 3 * (k // 2), 3 * (k % 2)
        maps[1, k, top : top + 3, left : left + 3] = 7.0  # all in its own cell
        maps[2, k] = 0.5  # everywhere the same
        maps[3, k] = 1.0  # all but its own cell
        maps[3, k, top : top + 3, left : left + 3] = -4.0
        maps[4, k, top, left] = 3.0  # three quarters, and what is negative does not count
        maps[4, k, 5 - top, 5 - left] = 1.0
        maps[4, k, 4, 1] = -100.0
    scores = score_cells(maps, n=2)
    for row, value in enumerate([0.0, 1.0, 0.25, 0.0, 0.75]):
        assert scores[row].tolist() == [value] * 4


def test_smoothing_comes_before_clamping():
    maps = torch.zeros(1, 4, 6, 6)
    maps[0, 0, 1, 1] = 9.0  # an average of 1 on 3×3 pixels of its own cell
    maps[0, 0, 4, 4] = 9.0  # undone by its neighbours, if they are averaged first
    maps[0, 0, 4, 3] = maps[0, 0, 3, 4] = maps[0, 0, 5, 4] = maps[0, 0, 4, 5] = -9.0
    assert score_cells(maps, 2)[0, 0].item() == 0.5
    assert score_cells(maps, 2, smooth=3)[0, 0].item() == 1.0


def peers_score(maps, n, kernel):
    """Mean over kernel×kernel pixels with zeros outside, clamp, share of the own cell; in loops."""
    maps = maps.double().numpy()
    half = kernel // 2
    scores = []
    for target, given_map in enumerate(maps):
        height, width = given_map.shape
        padded = np.pad(given_map, half)
        smooth = np.array(
            [
                [padded[y : y + kernel, x : x + kernel].mean() for x in range(width)]
                for y in range(height)
            ]
        )
        positive = np.maximum(smooth, 0)
        side = height // n
        own = positive[target // n * side :, target % n * side :][:side, :side].sum()
        scores.append(own / positive.sum() if positive.sum() > 0 else 0.0)
    return scores


@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_scores_are_the_peers_on_the_same_attributions(kernel):
    maps = torch.randn(2, 9, 12, 12, generator=torch.Generator().manual_seed(kernel))
    scores = score_cells(maps, n=3, smooth=kernel)
    for g in range(2):
        np.testing.assert_allclose(scores[g], peers_score(maps[g], 3, kernel), rtol=1e-5)


def test_scores_do_not_depend_on_the_scale_of_a_map():
    maps = torch.randn(3, 4, 8, 8)
    torch.testing.assert_close(score_cells(1e-6 * maps, 2, 3), score_cells(maps, 2, 3))


@pytest.mark.parametrize("smooth", [0, 3])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_map_that_is_not_finite_anywhere_has_no_score(value, smooth):
    maps = torch.rand(1, 4, 4, 4)
    maps[0, 0, 3, 3] = value  # beyond its own cell
    scores = score_cells(maps, 2, smooth)[0]
    assert scores.isnan().tolist() == [True, False, False, False]


def test_the_window_grows_with_the_cells():
    assert [default_kernel(c) for c in (32, 48, 96, 224, 299)] == [3, 3, 7, 15, 15]
    assert all(default_kernel(c) % 2 for c in range(16, 500))


@pytest.mark.parametrize(
    ("shape", "n", "smooth", "words"),
    [
        ((1, 3, 4, 4), 2, 0, r"\[G, 4, H, W\]"),
        ((1, 4, 5, 4), 2, 0, "equal cells"),
        ((1, 4, 4, 4), 2, 4, "odd"),
        ((4, 4, 4), 2, 0, "must be"),
    ],
)
def test_maps_that_are_no_grid_are_refused(shape, n, smooth, words):
    with pytest.raises(ValueError, match=words):
        score_cells(torch.zeros(shape), n, smooth)


def test_a_summary_is_what_numpy_says_of_it():
    scores = np.random.default_rng(0).random((200, 9))
    s = summarise(scores)
    assert s.mean == pytest.approx(scores.mean())
    assert s.quartiles == pytest.approx(tuple(np.quantile(scores, [0.25, 0.5, 0.75])))
    assert s.grids == 200
    error = scores.mean(1).std(ddof=1) / 200**0.5  # of the mean, by the normal distribution
    low, high = s.interval
    assert low == pytest.approx(scores.mean() - 1.96 * error, abs=0.15 * error)
    assert high == pytest.approx(scores.mean() + 1.96 * error, abs=0.15 * error)


def test_the_interval_knows_that_cells_of_a_grid_are_not_independent():
    same = np.repeat(np.random.default_rng(0).random((50, 1)), 9, axis=1)
    low, high = summarise(same).interval
    error = same[:, 0].std(ddof=1) / 50**0.5
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.15)


def test_an_empty_summary_is_refused():
    with pytest.raises(ValueError, match="not empty"):
        summarise(np.zeros((0, 9)))
