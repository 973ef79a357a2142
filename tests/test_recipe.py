"""Every recipe can be read and its network built; settings are the paper's; mistakes are named."""

import functools
import math
import tomllib
from importlib import resources

import pytest
import torch

import torchbcos as tb
from torchbcos.models import ConventionalModel
from torchbcos.recipe import list_recipes, read_recipe

FOLDER = resources.files("torchbcos") / "recipes"
ARCHITECTURES = ("vgg11", "resnet34", "densenet121", "inception_v3")


def model_of(name):
    config = read_recipe(name, "x")
    classes = 1000 if "imagenet-" in name else 10
    options = {"growth_rate": 32} if "densenet121" in config.arch else {}
    options |= config.options
    fixed = tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in options.items())
    return built(config.arch, classes, config.preset, config.size, fixed)


@functools.cache
def built(arch, classes, preset, size, options):
    with torch.device("meta"):
        return tb.create_model(
            arch,
            num_classes=classes,
            preset=preset or None,
            input_size=size or None,
            **dict(options),
        )


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_can_be_rehearsed(name):
    config = read_recipe(name, "x", ["epochs=2"])
    assert 0 <= config.lr_at(2) <= config.lr


def test_every_experiment_of_the_paper_has_a_recipe():
    names = set(list_recipes())
    for b in ("1", "1.25", "1.5", "1.75", "2.25", "2.5"):
        assert f"cifar10-b{b}" in names
    assert {"cifar10", "cifar10-plain", "cifar10-conventional", "shapes"} <= names
    for arch in ARCHITECTURES:
        for data in ("imagenet", "imagenette"):
            assert {f"{data}-{arch}", f"{data}-{arch}-conventional"} <= names
    for growth in range(20, 33, 2):
        assert f"imagenet-densenet121-growth{growth}" in names
    assert {"imagenet-densenet121-plus", "imagenet-densenet121-one-unit"} <= names


@pytest.mark.parametrize("name", [n for n in list_recipes() if not n.startswith("imagenette")])
def test_its_network_can_be_built(name):
    config = read_recipe(name, "somewhere")
    conventional = name.endswith("conventional")
    model = model_of(name)
    assert isinstance(model, ConventionalModel) == conventional
    assert model.scaling == ("conventional" if conventional else config.preset or "none")


IMAGENETTE = [n for n in list_recipes() if n.startswith("imagenette")]


@pytest.mark.parametrize("name", IMAGENETTE)
def test_imagenette_is_trained_alike_with_the_networks_of_imagenet(name):
    ours = read_recipe(name, "x")
    theirs = name.replace("imagenette", "imagenet")
    if theirs in list_recipes():
        same = read_recipe(theirs, "x")
        own = {k: v for k, v in ours.options.items() if k != "aux_logits"}
        assert (ours.arch, own, ours.size) == (same.arch, same.options, same.size)
    assert ours.preset == ""  # the paper's constants are for 1000 classes
    first = read_recipe("imagenette-resnet34", "x").as_json()
    free = {"arch", "options", "lr", "weight_rms", "weight_rms_in", "epochs"}
    if "inception" in name:
        free |= {"size", "train_sizes"}
    assert {k for k, v in ours.as_json().items() if v != first[k]} <= free
    arch = next((a for a in ARCHITECTURES if f"-{a}" in name), None)
    if arch is not None:
        plain = read_recipe(f"imagenette-{arch}", "x")
        assert ours.epochs == plain.epochs  # for networks that are compared


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_norm_recipes_of_imagenette_differ_in_their_norms_alone(arch):
    plain, normed = (model_of(f"imagenette-{arch}{end}") for end in ("", "-norm"))
    kinds = [{type(module).__name__ for module in m.modules()} for m in (plain, normed)]
    assert kinds[1] - kinds[0] == {"UncentredBatchNorm2d"}
    layers = [[(n, x.weight.shape) for n, x in m.bcos_layers()] for m in (plain, normed)]
    assert [shape for _, shape in layers[0]] == [shape for _, shape in layers[1]]


def test_the_small_model_of_imagenette_can_be_bundled():
    tensors = model_of("imagenette-small").state_dict().values()
    assert 2 * sum(t.numel() for t in tensors) < 14 * 2**20  # bytes in float16, of 16 MiB


def test_every_recipe_says_what_it_is_for():
    for name, words in list_recipes().items():
        assert 10 < len(words) < 90, name
        assert tomllib.loads((FOLDER / f"{name}.toml").read_text())


# (γ, log10 T) for CIFAR-10, and B, from the paper's supplement.
CIFAR = {
    "cifar10-b1": (1.0, -3), "cifar10-b1.25": (1.25, -3), "cifar10-b1.5": (1.5, -2),
    "cifar10-b1.75": (1.75, 1), "cifar10": (2.0, 2), "cifar10-plain": (2.0, 2),
    "cifar10-b2.25": (2.25, 2), "cifar10-b2.5": (2.5, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", CIFAR)
def test_the_columns_of_cifar10_are_the_papers(name):
    config, (b, log_t) = read_recipe(name, "x"), CIFAR[name]
    model = model_of(name)
    layers = [layer for _, layer in model.bcos_layers()]
    assert len(layers) == 9
    for layer in layers:
        assert layer.b == b
        assert layer.max_out == (1 if name == "cifar10-plain" else 2)
        assert layer.scale == pytest.approx(10 ** (1.5 * b - 1.75))
    assert model.temperature == pytest.approx(10.0**log_t)
    assert (config.epochs, config.batch, config.optimiser) == (100, 64, "adam")
    of_the_authors = [1e-3 * math.cos(math.pi * i / 200) + 1e-5 for i in (0, 50, 100)]
    assert [config.lr_at(e) for e in (0, 50, 100)] == pytest.approx(of_the_authors, rel=0.01)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_imagenet_is_trained_as_in_the_paper(arch):
    config = read_recipe(f"imagenet-{arch}", "x")
    assert (config.epochs, config.batch, config.optimiser) == (100, 256, "adam")
    assert [config.lr_at(e) for e in (0, 59, 61)] == pytest.approx([2.5e-4, 2.5e-4, 2.5e-5])
    assert config.weight_decay == 0
    assert "rand_augment" in config.augment
    assert config.size == (299 if arch == "inception_v3" else 224)
    assert (config.preset, config.auxiliary_weight) == ("paper", 1.0)


def test_training_plus_is_longer_and_warmed_up():
    config = read_recipe("imagenet-densenet121-plus", "x")
    assert (config.epochs, config.batch) == (200, 128)
    rates = [config.lr_at(e) for e in (0, 5, 10, 105, 200)]
    assert rates == pytest.approx([1e-5, 5.05e-4, 1e-3, 5.5e-4, 1e-4])


#: Millions of parameters in the paper's table of the ablation.
GROWTH = {20: 6.8, 22: 8.0, 24: 9.4, 26: 10.8, 28: 12.4, 30: 14.0, 32: 15.8}


@pytest.mark.parametrize("growth", GROWTH)
def test_the_growth_ablation_has_the_papers_sizes(growth):
    model = model_of(f"imagenet-densenet121-growth{growth}")
    count = sum(p.numel() for p in model.parameters()) / 1e6
    assert count == pytest.approx(GROWTH[growth], abs=0.051)


# Changes and mistakes.


def test_changes_are_laid_over_the_recipe():
    words = read_recipe("cifar10", "there", ["options.norm=uncentred"])
    assert words.options["norm"] == "uncentred"
    config = read_recipe("cifar10", "there", ["lr=2e-3", "optimiser=sgd", "options.b=1.5"])
    assert (config.data, config.lr, config.optimiser) == ("there", 2e-3, "sgd")
    assert config.options == {"b": 1.5, "max_out": 2}
    assert read_recipe("cifar10", "x", ['augment=["flip"]']).augment == ("flip",)
    assert read_recipe("shapes").data == "shapes"


def test_a_recipe_of_ones_own_may_have_a_base(tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text('base = "cifar10"\nepochs = 3\noptions.max_out = 1\n')
    config = read_recipe(str(mine), "x")
    assert (config.epochs, config.batch) == (3, 64)
    assert config.options == {"b": 2.0, "max_out": 1}
    other = tmp_path / "other.toml"
    other.write_text(f'base = "{mine}"\narch = "mini"\n')
    assert read_recipe(str(other), "x").options == {}  # they were for another network
    changed = read_recipe(str(mine), "x", ["options.max_out=3", "arch=mini"])
    assert changed.options == {"max_out": 3}


@pytest.mark.parametrize(
    ("recipe", "changes", "words"),
    [
        ("nope", [], r"`recipe` \(='nope'\) must be a TOML file or a recipe's name"),
        ("cifar", [], "did you mean cifar10"),
        ("imagenet-resnet34", [], r"`--data` is missing"),
        ("shapes", ["xyz=3"], "`xyz` is no setting; all are accumulate, adaptive_clip,"),
        ("shapes", ["bacth=3"], "`bacth` is no setting: did you mean batch"),
        ("shapes", ["lr"], "`lr` must be name=value"),
        ("shapes", ["lr=fast"], r"`lr` \(='fast'\) must be a number"),
        ("shapes", ["epochs=true"], r"`epochs` \(=True\) must be a number"),
        ("shapes", ["batch=6.5"], r"`batch` \(=6.5\) must be a whole number"),
        ("shapes", ["augment=flip"], r"`augment` \(='flip'\) must be a list of names"),
        ("shapes", ["options=3"], r"`options` \(=3\) must be a table"),
        (
            "shapes",
            ["options.num_classes=7"],
            r"`options` \(with num_classes\) must leave it to the d",
        ),
        ("shapes", ["options.input_size=7"], "must leave it to the setting `size`"),
        ("shapes", ["lr=inf"], r"`lr` \(=inf\) must be above 0 and finite"),
    ],
)
def test_mistakes_are_named(recipe, changes, words):
    with pytest.raises(ValueError, match=words):
        read_recipe(recipe, "", changes)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("lr = [", "is no valid TOML"),
        ("base = 3", r"`base` \(=3\)"),
        ('base = "SELF"', "must be the name of another recipe"),
        ('base = "nope"', r"`recipe` \(='nope'\)"),
    ],
)
def test_broken_recipes_are_named(tmp_path, content, words):
    path = tmp_path / "r.toml"
    path.write_text(content.replace("SELF", str(path)))
    with pytest.raises(ValueError, match=words):
        read_recipe(str(path), "x")
