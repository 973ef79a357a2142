"""The game as it is played: on disk, again, with pictures, and from the command line."""

import json
import re
import sys
from dataclasses import replace
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torchvision
from rich.console import Console
from torch._subclasses.fake_tensor import FakeTensorMode
from typer.testing import CliRunner

import torchbcos as tb
from torchbcos import baseline, cli, cli_localise, localise_page, localise_run, plots, posthoc
from torchbcos.data import Images, Split
from torchbcos.disconnected import difull, dipart
from torchbcos.explain import logits_of
from torchbcos.localise import compose, score_cells
from torchbcos.localise_run import Game, play
from trained import CLASSES, make_vit, some_shapes

GAME = Game(grids=6, n=2)
QUICK = ("ours", "ixg", "gradcam")


@pytest.fixture(scope="module")
def images():
    pixels, labels, _ = some_shapes(120, seed=2)
    return Images((pixels * 255).round().to(torch.uint8), labels)


def test_localisation_rises_with_b(trained, images):
    game = Game(grids=10, n=2)
    means = {b: play(m, images, ["ours"], game).methods[0].summary.mean for b, m in trained.items()}
    assert means[1.0] < 0.5
    assert means[2.5] > 0.85


@pytest.mark.parametrize(
    ("side", "n", "together"), [(32, 3, 8), (112, 3, 4), (224, 3, 1), (299, 3, 1)]
)
def test_large_grids_are_looked_at_few_at_a_time(side, n, together):
    images = Images(torch.zeros(9, 3, side, side, dtype=torch.uint8), torch.arange(9))
    found = localise_run._grids_at_once(Game(n=n), images, torch.device("cpu"))
    assert found == together


@pytest.mark.parametrize("count", [1, 6])
def test_the_plan_does_not_depend_on_free_memory(trained, images, monkeypatch, count):
    """Logits of other batches are rounded otherwise."""
    seen = []

    def noted(model, x):
        seen.append(len(x))
        return logits_of(model, x)

    monkeypatch.setattr(localise_run, "_grids_at_once", lambda *_: count)
    monkeypatch.setattr(localise_run, "logits_of", noted)
    play(trained[2.5], images, ["ixg"], GAME)
    assert seen == [1, 1, 64, 56]  # a cell and a grid, then all images


def test_scores_are_those_of_maps_made_one_by_one(trained, images, monkeypatch):
    model = trained[2.5]
    unsmoothed = posthoc.Method("unsmoothed", posthoc.grad, "", perturbs=True)
    monkeypatch.setitem(posthoc.METHODS, "unsmoothed", unsmoothed)
    played = play(model, images, ["ixg", "unsmoothed"], GAME, batch=4)
    pixels = images.pixels.float() / 255
    for result, smooth in zip(played.methods, (3, 0), strict=True):
        for g in (0, 5):
            row = played.plan[g]
            grid = compose(pixels[row], 2)
            for k in range(4):
                one = posthoc.METHODS[result.method](model, grid, [int(images.labels[row[k]])])
                score = score_cells(one.expand(-1, 4, -1, -1), 2, smooth)[0, k]
                assert result.scores[g, k] == pytest.approx(score.item(), rel=1e-3)
    with torch.no_grad():
        right = model(pixels).argmax(1) == images.labels
    assert played.accuracy == pytest.approx(right.float().mean().item())
    assert played.exponent == 2.5
    model.train()  # dropout and norms would spoil the scores, so `play` does not let them
    frozen = model.network.get_submodule("1").eval()
    again = play(model, images, ["ixg"], GAME, batch=4)
    assert [m for m in model.modules() if not m.training] == [frozen]
    model.eval()
    np.testing.assert_array_equal(again.methods[0].scores, played.methods[0].scores)


def test_methods_that_are_the_same_for_a_network_are_computed_once(trained, images, monkeypatch):
    model, told = trained[2.5], []
    alone = play(model, images, ["deeplift"], GAME).methods[0]
    calls = []
    monkeypatch.setattr(localise_run, "score_cells", lambda *a: calls.append(a) or score_cells(*a))
    names = ["grad", "ixg", "deeplift", "guided_backprop"]
    played = play(model, images, names, GAME, batch=6, tell=told.append)
    assert len(calls) == 2
    assert tuple(told) == played.methods
    assert [m.method for m in played.methods] == names
    assert [m.label for m in played.methods] == ["Grad", "IxG", "DeepLIFT", "GuidedBP"]
    gradient, ixg, deeplift, guided = (m.scores for m in played.methods)
    np.testing.assert_array_equal(deeplift, ixg)
    np.testing.assert_array_equal(guided, gradient)
    np.testing.assert_allclose(deeplift, alone.scores, rtol=1e-5)
    assert not np.allclose(ixg, gradient)


def test_conventional_networks_have_no_such_methods():
    network = torchvision.models.resnet18(num_classes=3)
    assert not any(m.twin(network) for m in posthoc.METHODS.values())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_maps_that_are_not_finite_are_no_low_scores(trained, images, tmp_path, monkeypatch, value):
    ixg = posthoc.METHODS["ixg"]

    def broken(model, pixels, targets=None):
        maps = ixg(model, pixels, targets).abs()
        maps[0, 0, 0, 0] = value
        return maps

    method = posthoc.Method("broken", broken, "Broken")
    monkeypatch.setitem(posthoc.METHODS, "broken", method)
    told = []
    with pytest.raises(ValueError, match=r"Broken in 6 of 6 grids.*finite maps of 'm'"):
        play(
            trained[2.5], images, ["broken", "gradcam"], GAME, name="m", out=tmp_path, batch=1,
            tell=lambda found: told.append(found.method),
        )  # fmt: skip
    assert told == ["gradcam"]
    assert [path.name for path in tmp_path.iterdir()] == ["gradcam.json"]


def test_what_is_scored_is_not_computed_again(trained, images, tmp_path, monkeypatch):
    first = play(trained[2.5], images, QUICK, GAME, name="m", out=tmp_path)
    document = json.loads((tmp_path / "ixg.json").read_text())
    assert document["complete"]
    assert np.array(document["scores"]).shape == (6, 4)
    assert document["mean"] == pytest.approx(first.methods[1].scores.mean())
    assert document["evidence"]["torch"] == torch.__version__
    assert document["identity"]["game"]["preset"] == "paper"

    def fail(*_, **__):
        raise AssertionError("computed again")

    monkeypatch.setattr(localise_run, "score_cells", fail)
    again = play(trained[2.5], images, QUICK, GAME, name="m", out=tmp_path)
    for a, b in zip(first.methods, again.methods, strict=True):
        np.testing.assert_array_equal(a.scores, b.scores)
        assert a.seconds == pytest.approx(b.seconds)
    changes = ({"seed": 1}, {"smooth": 5}, {"setting": "difull"}, {"derive": "colours"})
    for change in changes:
        game = Game(**{**vars(GAME), **change})
        with pytest.raises(AssertionError, match="computed again"):
            play(trained[2.5], images, QUICK, game, name="m", out=tmp_path)
    layer = next(iter(trained[2.5].bcos_layers()))[1]
    for place, setting in ((trained[2.5], "temperature"), (layer, "scale"), (layer, "eps")):
        with monkeypatch.context() as changed:
            changed.setattr(place, setting, 1.001 * getattr(place, setting) + 1e-9)
            with pytest.raises(AssertionError, match="computed again"):
                play(trained[2.5], images, QUICK, GAME, name="m", out=tmp_path)
    with pytest.raises(AssertionError, match="computed again"):  # another network of this name
        play(trained[1.0], images, QUICK, GAME, name="m", out=tmp_path)


def test_cutting_a_model_leaves_the_modes_of_its_modules():
    conventional = torchvision.models.resnet18(num_classes=5)
    for model in (tb.create_model("resnet18", num_classes=5, norm="uncentred"), conventional):
        model.train()
        norm = next(m for name, m in model.named_modules() if name.endswith("bn1"))
        norm.eval()
        for cut in (difull(model, 2), dipart(model, 2, torch.rand(1, 3, 96, 96))):
            assert cut.training
            assert not norm.training


def test_networks_that_differ_in_their_normalisation_alone_are_different():
    """It is in no `state_dict`."""
    network = torch.nn.Conv2d(3, 4, 1)
    told = [localise_run._digest(baseline.Normalised(network, (m,) * 3)) for m in (0.4, 0.4, 0.5)]
    assert told[0] == told[1] != told[2]


def test_an_interrupted_method_goes_on_where_it_was(trained, images, tmp_path, monkeypatch):
    whole = play(trained[2.5], images, ["ixg"], GAME, batch=2)
    monkeypatch.setattr(localise_run, "_SAVE_EVERY", 0.0)
    calls = []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return score_cells(*args)

    monkeypatch.setattr(localise_run, "score_cells", interrupted)
    with pytest.raises(KeyboardInterrupt):
        play(trained[2.5], images, ["ixg"], GAME, out=tmp_path, batch=2)
    stored = json.loads((tmp_path / "ixg.json").read_text())
    assert not stored["complete"]
    assert len(stored["scores"]) == 4
    resumed = play(trained[2.5], images, ["ixg"], GAME, out=tmp_path, batch=2)
    assert len(calls) == 4
    np.testing.assert_array_equal(resumed.methods[0].scores, whole.methods[0].scores)
    (tmp_path / "ixg.json").write_text("{ cut sho")  # damage is no reason to stop
    repaired = play(trained[2.5], images, ["ixg"], GAME, out=tmp_path, batch=2)
    np.testing.assert_array_equal(repaired.methods[0].scores, whole.methods[0].scores)


def test_disconnected_settings_are_played_on_cut_models(trained, images):
    plain, full, part = (
        play(trained[2.5], images, ["grad"], Game(grids=3, n=2, setting=s, smooth=0))
        for s in ("grid", "difull", "dipart")
    )
    assert (full.methods[0].scores == 1).all()  # a gradient cannot leave a disconnected cell
    assert plain.methods[0].summary.mean < part.methods[0].summary.mean < 1
    with pytest.raises(ValueError, match="`setting`"):
        Game(setting="other")


@pytest.mark.parametrize("setting", ["grid", "difull", "dipart"])
def test_methods_other_than_ours_can_derive_by_colours(trained, images, setting):
    game = Game(grids=3, n=2, smooth=0, setting=setting)
    channels, colours = (
        play(trained[2.5], images, ["ours", "ixg"], replace(game, derive=by))
        for by in ("channels", "colours")
    )
    np.testing.assert_array_equal(channels.methods[0].scores, colours.methods[0].scores)
    assert np.abs(channels.methods[1].scores - colours.methods[1].scores).max() > 0.01 or (
        setting == "difull"  # where all scores are 1
    )
    expected = play(posthoc.by_colours(trained[2.5]), images, ["ixg"], game)
    np.testing.assert_allclose(colours.methods[1].scores, expected.methods[0].scores, atol=1e-6)
    with pytest.raises(ValueError, match=r"`derive` \(='six'\) must be 'channels' or 'colours'"):
        replace(game, derive="six")


def test_slow_methods_say_how_long_they_will_take(trained, images, monkeypatch):
    clock = iter(range(0, 10_000, 60))
    monkeypatch.setattr(localise_run.time, "perf_counter", lambda: float(next(clock)))
    console = Console(record=True, width=100)
    game = Game(grids=3, n=2)
    monkeypatch.setitem(
        posthoc.METHODS,
        "slow",
        posthoc.Method("slow", lambda m, x, t: torch.ones(1, 4, 64, 64), "Slow", perturbs=True),
    )
    play(trained[2.5], images, ["slow"], game, batch=8, console=console)
    text = console.export_text()
    assert "Predictions: about 3 min left for 120 images" in text
    assert "Slow: about 2 min left for 3 grids" in text


def test_the_report_is_complete(trained, images, tmp_path):
    models = [trained[2.5], trained[1.0]]
    played = [
        play(m, images, QUICK, GAME, name=f"b{b}") for b, m in ((2.5, models[0]), (1, models[1]))
    ]
    page = localise_page.write_report(played, models, [images] * 2, CLASSES, GAME, tmp_path)
    text = page.read_text()
    assert text.count("Most successful of b2.5") == 3
    assert text.count("Least successful of b1") == 3
    assert "http" not in text.replace("http-equiv", "")
    assert {p.name for p in tmp_path.iterdir()} == {
        "scores.json", "localisation.png", "b.png", "methods.png", "page.html",
    }  # fmt: skip
    numbers = json.loads((tmp_path / "scores.json").read_text())
    assert [m["b"] for m in numbers["models"]] == [2.5, 1.0]
    assert set(numbers["models"][0]["methods"]) == set(QUICK)


def test_ours_is_refused_for_a_conventional_network_before_any_work(images):
    conventional = torchvision.models.squeezenet1_1(num_classes=4).eval()
    with pytest.raises(ValueError, match="'ixg'"):
        play(conventional, images, ["ours"], GAME)


def test_labels_of_streamed_images_meet_logits_on_a_gpu():
    with FakeTensorMode(allow_non_fake_inputs=True):
        right = localise_run._right(torch.empty(5, 4, device="cuda"), torch.arange(5))
    assert right.shape == (5,)


def test_box_plots_show_quartiles_and_means():
    scores = np.linspace(0, 1, 101)[:, None]
    fig = plots.score_boxes({"one": {"Ours": scores, "IxG": scores / 2}}, chance=0.25)
    axis = fig.axes[0]
    assert [t.get_text() for t in axis.get_xticklabels()] == ["Ours", "IxG"]
    box = axis.patches[1].get_path().vertices[:, 1]
    assert (box.min(), box.max()) == pytest.approx((0.125, 0.375))
    assert axis.lines[-2].get_ydata().tolist() == pytest.approx([0.5, 0.25])
    given = plots.score_boxes({"one": {"Ours": scores}}, means={"one": {"Ours": 0.51}})
    assert given.axes[0].lines[-1].get_ydata() == [0.51]
    with pytest.raises(ValueError, match="at least one"):
        plots.score_boxes({})


def test_accuracies_stand_above_their_b():
    points = [(2.0, 0.93, np.full((3, 4), 0.9)), (1.0, 0.94, np.full((3, 4), 0.4))]
    fig = plots.accuracy_and_localisation(points)
    left, right = fig.axes
    assert [t.get_text() for t in left.get_xticklabels()] == ["1", "2"]
    assert right.lines[0].get_ydata().tolist() == pytest.approx([94, 93])
    with pytest.raises(ValueError, match="at least one"):
        plots.accuracy_and_localisation([])


# Baselines and commands


def test_a_baseline_is_a_torchvision_network_with_a_state_dict(tmp_path):
    network = torchvision.models.squeezenet1_1(num_classes=4).eval()
    torch.save(network.state_dict(), tmp_path / "s.pth")
    model = baseline.load_baseline(f"squeezenet1_1={tmp_path / 's.pth'}")
    images = torch.rand(2, 3, 48, 48)
    normalised = torchvision.transforms.functional.normalize(
        images, baseline.MEAN, baseline.DEVIATION
    )
    torch.testing.assert_close(model(images), network(normalised))
    for name, words in {
        "no_such_net=x.pth": "no torchvision network",
        "squeezenet1_1=nowhere.pth": "does not exist",
        f"resnet18={tmp_path / 's.pth'}": "no state dict of resnet18",
    }.items():
        with pytest.raises(ValueError, match=words):
            baseline.load_baseline(name)


def test_baselines_of_imagenet_are_as_torchvision_has_them(tmp_path):
    """Inception-v3 normalises in another way; old files of DenseNets have other names."""
    network = torchvision.models.inception_v3(init_weights=False).eval()
    torch.save(network.state_dict(), tmp_path / "i.pth")
    model = baseline.load_baseline(f"inception_v3={tmp_path / 'i.pth'}")
    assert model.network.transform_input
    assert baseline.how_tested("inception_v3=i.pth", model) == (299, 299 / 342)

    network = torchvision.models.densenet121(num_classes=4).eval()
    old = {
        re.sub(r"\.(norm|conv)([12])\.", r".\1.\2.", k): v for k, v in network.state_dict().items()
    }
    assert not old.keys() >= network.state_dict().keys()
    torch.save(old, tmp_path / "d.pth")
    model = baseline.load_baseline(f"densenet121={tmp_path / 'd.pth'}")
    images = torch.rand(1, 3, 64, 64)
    torch.testing.assert_close(model.network(images), network(images))
    assert baseline.how_tested("densenet121=d.pth", model) == (224, 1.0)


def test_weights_that_cannot_be_fetched_are_asked_for_as_a_file(monkeypatch):
    def offline(*_, **__):
        raise URLError("no route")

    monkeypatch.setattr("torchvision.models.get_model", offline)
    with pytest.raises(ValueError, match=r"no route.*: give them as torchvision/resnet18=FILE\.$"):
        baseline.load_baseline("resnet18")


@pytest.fixture
def files(trained, images, tmp_path, monkeypatch):
    """Two checkpoints, and the data as the command finds them."""
    for b, model in trained.items():
        tb.save(model, tmp_path / f"b{b:g}.safetensors")
    split = Split(images, images, CLASSES)
    for module in ("data", "evaluate"):
        monkeypatch.setattr(f"torchbcos.{module}.open_data", lambda *_, **__: split)
    return tmp_path


def test_the_command_writes_scores_plots_and_page(files):
    command = [
        "localise", "--model", f"{files}/b2.5.safetensors", "--baseline", f"{files}/b1.safetensors",
        "--data", "four", "--methods", "ours,ixg", "--grids", "4", "--n", "2",
        "--out", f"{files}/out", "--json",
    ]  # fmt: skip
    result = CliRunner().invoke(cli.app, command, catch_exceptions=False)
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert [m["model"] for m in found] == ["b2.5", "b1"]
    assert found[0]["methods"]["ours"]["mean"] > found[1]["methods"]["ours"]["mean"]
    names = {str(p.relative_to(files / "out")) for p in (files / "out").rglob("*.*")}
    assert {"page.html", "b.png", "scores/b1/ours.json", "scores/b2.5/ixg.json"} <= names


def test_the_command_prints_a_table_and_takes_conventional_baselines(files, monkeypatch):
    class Conventional(torch.nn.Module):  # to the methods: they see no B-cos model
        def __init__(self):
            super().__init__()
            self.network = tb.load(files / "b2.5.safetensors").network

        def forward(self, images):
            return self.network(tb.encoding.encode(images))

    loaded = []

    def load_baseline(name, device):
        loaded.append(name)
        return Conventional().eval()

    monkeypatch.setattr(baseline, "load_baseline", load_baseline)
    command = [
        "localise", "--model", f"{files}/b2.5.safetensors", "--data", "four", "--grids", "3",
        "--n", "2", "--methods", "ours,gradcam", "--out", f"{files}/out",
        "--baseline", "torchvision/resnet18=weights.pth",
    ]  # fmt: skip
    result = CliRunner().invoke(cli.app, command, catch_exceptions=False)
    assert loaded == ["resnet18=weights.pth"]
    assert result.stdout.count("GradCAM") == 2
    assert result.stdout.count("Ours") == 1
    assert "page.html" in result.stdout.replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--methods", "lrp"], "'lrp'"),
        (["--preset", "mine"], "`preset`"),
        (["--setting", "mine"], "`setting`"),
        (["--grids", "9999"], "enough for"),
        (["--baseline", "torchvision/nothing"], "no torchvision network"),
        (["--smooth", "4"], "odd"),
        (["--smooth", "999"], "`smooth` .=999. must be at most the grid's"),
        (["--out", __file__], "`--out` .* needs a folder"),
    ],
)
def test_mistakes_are_one_sentence(files, arguments, words):
    command = ["localise", "--model", f"{files}/b2.5.safetensors", "--data", "four", "--n", "2"]
    quick = ["--methods", "ixg", "--grids", "2", "--out", f"{files}/out"]
    with pytest.raises(ValueError, match=words):
        CliRunner().invoke(cli.app, [*command, *quick, *arguments], catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--baseline", "b1.safetensors", "--baseline", "nothing", "--methods", "ixg"],
            "nothing does not exist",
        ),
        (["--methods", "ixg,lime"], r"'lime' needs the package lime: .*torchbcos\[eval\]"),
    ],
)
def test_all_is_checked_before_the_first_game(files, monkeypatch, arguments, words):
    monkeypatch.chdir(files)
    monkeypatch.setitem(sys.modules, "lime", None)
    monkeypatch.setattr("torchbcos.localise_run.play", None)
    command = ["localise", "--model", "b2.5.safetensors", "--data", "four", "--n", "2"]
    with pytest.raises(ValueError, match=words):
        CliRunner().invoke(cli.app, [*command, *arguments], catch_exceptions=False)


def test_brackets_in_a_models_name_are_shown(files):
    (files / "b2.5.safetensors").rename(files / "[b2].safetensors")
    command = [
        "localise", "--model", f"{files}/[b2].safetensors", "--data", "four", "--grids", "1",
        "--n", "2", "--methods", "ixg", "--out", f"{files}/out",
    ]  # fmt: skip
    result = CliRunner().invoke(cli.app, command, catch_exceptions=False)
    assert "[b2]: " in result.stdout


def test_models_have_titles_of_their_own():
    names = ["runs/x-2/model.safetensors", "runs/x/model.safetensors", "x.safetensors", "x", "y"]
    assert cli_localise._titles(names) == ["x-2", "x", "x-3", "x-4", "y"]


def test_data_of_other_classes_is_refused(files, images, monkeypatch):
    split = Split(images, images, ("a", "b"))
    monkeypatch.setattr("torchbcos.evaluate.open_data", lambda *_, **__: split)
    with pytest.raises(ValueError, match="has not the classes"):
        CliRunner().invoke(
            cli.app,
            ["localise", "--model", f"{files}/b2.5.safetensors", "--data", "four"],
            catch_exceptions=False,
        )


def test_sizes_that_a_network_does_not_take_are_refused(images):
    small = Images(images.pixels[..., :16, :16], images.labels)
    vit = make_vit()
    with pytest.raises(ValueError, match=r"^a cell \(=32×32 px\).* takes 16×16 px only; .*`size`"):
        play(vit, images, ["ixg"], GAME)
    for setting in ("grid", "dipart"):
        with pytest.raises(ValueError, match=r"^a grid of 2×2 cells \(=32×32 px\).* 'difull'\.$"):
            play(vit, small, ["ixg"], Game(grids=1, n=2, setting=setting))
    pool = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 20), torch.nn.AdaptiveAvgPool2d(1))
    with pytest.raises(ValueError, match=r"^a cell \(=16×16 px\).*Kernel size"):
        play(torch.nn.Sequential(pool, torch.nn.Flatten()), small, ["ixg"], GAME)


def test_a_network_of_one_size_sees_each_cell_by_itself(images, monkeypatch):
    small = Images(images.pixels[..., :16, :16], images.labels)
    monkeypatch.setattr(localise_run, "plan_grids", lambda *_, **__: torch.arange(4)[None])
    played = play(make_vit(), small, ["ixg"], Game(grids=1, n=2, setting="difull"))
    assert played.methods[0].scores.shape == (1, 4)
    game = Game(grids=1, n=2, setting="difull")
    assert len(localise_page.extreme_grids(played, make_vit(), small, CLASSES, game)) == 2


@pytest.mark.parametrize("setting", ["grid", "difull", "dipart"])
def test_maps_on_the_page_are_those_that_were_scored(trained, images, monkeypatch, setting):
    game = Game(grids=2, n=2, setting=setting, smooth=0)
    played = play(trained[1.0], images, ["ixg"], game)
    ixg, shown = posthoc.METHODS["ixg"], []

    def seen(*given):
        shown.append(ixg(*given))
        return shown[-1]

    monkeypatch.setitem(posthoc.METHODS, "ixg", posthoc.Method("ixg", seen, "IxG"))
    localise_page.extreme_grids(played, trained[1.0], images, CLASSES, game)
    scores = played.methods[0].scores
    best = scores.mean(1).argmax()
    np.testing.assert_allclose(score_cells(shown[0], 2)[0], scores[best], rtol=1e-4)


@pytest.mark.parametrize(("height", "width"), [(40, 60), (60, 40)])
def test_the_frame_is_around_the_cell_where_images_are_no_squares(height, width):
    white = np.full((2 * height, 2 * width, 3), 255, np.uint8)
    inked = localise_page._lined(white, 2, own=1) < 255
    assert inked[:height, width:].any(2).sum() == 2 * (height + width) - 4
    assert inked.any(2).sum() == 2 * (height + width) - 4
    large = white.repeat(4, 0).repeat(4, 1)
    longest = 224 / max(height, width)
    assert localise_page._small(large).shape[:2] == (
        round(height * longest), round(width * longest),
    )  # fmt: skip


def test_a_conventional_baseline_of_other_classes_is_refused(files, monkeypatch):
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 7, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    )
    monkeypatch.setattr(baseline, "load_baseline", lambda *_: baseline.Normalised(network).eval())
    command = ["localise", "--model", "torchvision/resnet18=w.pth", "--data", "four"]
    with pytest.raises(ValueError, match=r"'four'\) has 4 classes, and .* has 7 outputs: "):
        CliRunner().invoke(
            cli.app,
            [*command, "--methods", "ixg", "--n", "2", "--out", f"{files}/out"],
            catch_exceptions=False,
        )


def test_images_elsewhere_than_the_model_are_not_taken_for_a_wrong_size(tmp_path):
    model = tb.create_model("mini", num_classes=10, width=4, input_size=8).to("meta")
    images = Images(torch.zeros(9, 3, 8, 8, dtype=torch.uint8), torch.arange(9))
    with pytest.raises(ValueError, match=r"`images` \(on cpu\) must be where the model is"):
        play(model, images, ["ours"], Game(1))
