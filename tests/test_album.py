"""Albums of explained images, and the page that shows them."""

import base64
import io
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

import torchbcos as tb
from torchbcos import render
from torchbcos.album import BATCH, Request, make_album
from torchbcos.images import read_image
from torchbcos.page import Panel, Section, build_page, png
from trained import make_vit

CLASSES = tuple(f"class{i}" for i in range(10))


def make_model(classes=CLASSES, **options):
    torch.manual_seed(0)
    return tb.create_model("cifar9", max_out=1, preset="paper", classes=classes, **options).eval()


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


def photo(path, seed=0, size=(40, 36)):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).save(path, "PNG")
    return str(path)


def album_of(paths, model, folder, **request):
    return make_album(paths, model, Request(**request), folder / "out", Console(file=io.StringIO()))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"classes": ("cat",), "top": 2}, "`--top` .*=2. and --classes both choose"),
        ({"classes": ("cat",), "layer": "2", "unit": 0}, "`--classes` chooses classes, not units"),
        ({"top": 2, "layer": "2", "unit": 0}, "`--top` chooses classes, not units"),
        ({"classes": ("cat", "cat"), "delta": True}, "compares cat with itself"),
    ],
)
def test_requests_that_contradict_themselves_are_refused(folder, model, request_, words):
    with pytest.raises(ValueError, match=words):
        album_of([photo(folder / "a.png")], model, folder, **request_)


@pytest.mark.parametrize(("top", "passes"), [(None, 1), (1, 1), (2, 2)])
def test_the_network_runs_no_oftener_than_the_choice_of_classes_needs(folder, model, top, passes):
    seen = []
    layer = next(layer for _, layer in model.bcos_layers())
    with layer.register_forward_hook(lambda *_: seen.append(1)):
        (result,) = album_of([photo(folder / "a.png")], model, folder, top=top).results
    assert len(seen) == passes
    assert len(result.rows) == (top or 1)


def test_lack_of_memory_is_not_laid_to_the_size(folder, model, monkeypatch):
    def fail(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 GB")

    monkeypatch.setattr("torchbcos.album.explain", fail)
    with pytest.raises(RuntimeError, match="you tried to allocate 9 GB"):
        album_of([photo(folder / "a.png")], model, folder)


def test_a_number_is_no_place_where_classes_have_numbers_for_names(folder):
    model = make_model(("0", "1", "10", "2"))
    (result,) = album_of([photo(folder / "a.png")], model, folder, classes=("2",)).results
    assert (result.rows[0].name, result.rows[0].index) == ("2", 3)
    with pytest.raises(ValueError, match=r"`--classes` \(='3'\) must be a class of the model"):
        album_of([photo(folder / "a.png")], model, folder, classes=("3",))


class Page(HTMLParser):
    """What a browser would find in a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.pictures, self.addresses = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "srcset", "action", "data", "poster"):
                self.addresses.append(value)
            assert not name.startswith("on")
            if tag == "img" and name == "src":
                kind, content = value.split(",", 1)
                assert kind == "data:image/png;base64"
                image = Image.open(io.BytesIO(base64.b64decode(content)))
                self.pictures.append(np.asarray(image))

    def handle_data(self, data):
        self.text.append(data)


def read_page(path):
    return Page(path.read_text(encoding="utf-8"))


# The page.


def test_the_page_needs_nothing_but_itself(model, folder):
    paths = [photo(folder / f"{i}.png", i) for i in range(3)]
    album = album_of(paths, model, folder, top=2)
    text = album.page.read_text(encoding="utf-8")
    page = Page(text)
    for tag in ("script", "link", "iframe", "object", "base", "form"):
        assert tag not in page.tags
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    for outside in ("http:", "https:", "url(", "@import", "javascript:"):
        assert outside not in text.lower()


def test_the_page_shows_input_pictures_maps_and_numbers(model, folder):
    paths = [photo(folder / f"{i}.png", i) for i in range(2)]
    album = album_of(paths, model, folder, top=3)
    page = read_page(album.page)
    images = torch.stack([read_image(p, (32, 32)) for p in paths])
    with torch.no_grad():
        best = model(images).topk(3).indices
    e = tb.explain(model, images, best)
    expected = []
    for n in range(2):
        expected.append(np.round(images[n].permute(1, 2, 0).numpy() * 255))
        for k in range(3):
            expected += [render.colour(e)[n, k], render.contributions(e)[n, k]]
    assert len(page.pictures) == len(expected)
    for shown, right in zip(page.pictures, expected, strict=True):
        assert np.array_equal(shown, right)
    words = " ".join(page.text)
    for path, result in zip(paths, album.results, strict=True):
        assert path in words
        for row in result.rows:
            for cell in row.cells():
                assert cell in words


def test_the_page_says_which_smoothing_is_on(model, folder):
    path = photo(folder / "a.png")
    released = album_of([path], model, folder, style="released").page.read_text(encoding="utf-8")
    paper = album_of([path], model, folder).page.read_text(encoding="utf-8")
    assert "smoothed over 15×15" in released
    assert "not smoothed" in paper


NAMES = ["<b>.png", "a & b.png", "'quoted' \"twice\".png", "</section>.png", "&amp;.png", "ünï.png"]


@pytest.mark.parametrize("name", [n.replace("/", "∕") for n in NAMES])
def test_file_names_are_text_on_the_page(model, folder, name):
    album = album_of([photo(folder / name)], model, folder)
    page = read_page(album.page)
    assert any(name in text for text in page.text)
    assert "b" not in page.tags
    assert page.tags.count("section") == 1


def test_class_names_are_text_on_the_page(folder):
    names = ("<script>alert(1)</script>", 'x" onload="y', *CLASSES[2:])
    album = album_of([photo(folder / "a.png")], make_model(names), folder, classes=names[:2])
    page = read_page(album.page)
    assert "script" not in page.tags
    assert names[0] in page.text
    assert names[1] in page.text


@pytest.mark.parametrize("field", ["title", "lead", "heading", "panel", "caption", "head", "cell"])
def test_every_part_of_a_page_is_escaped(field):
    evil = "<i>&\"'"
    say = {name: evil if name == field else "plain" for name in
           ("title", "lead", "heading", "panel", "caption", "head", "cell")}  # fmt: skip
    panel = Panel(say["panel"], png(np.zeros((2, 2, 3), np.uint8)), say["caption"])
    section = Section(say["heading"], [[panel]], [say["head"]], [[say["cell"]]])
    page = Page(build_page(say["title"], say["lead"], [section]))
    assert "i" not in page.tags
    assert "".join(page.text).count(evil) == (2 if field == "title" else 1)


def test_each_picture_has_words_of_its_own():
    picture = png(np.zeros((2, 2, 3), np.uint8))
    panels = [Panel("church", picture, "W(x)"), Panel("church", picture), Panel("", picture)]
    text = build_page("title", "lead", [Section("Scores", [panels])])
    assert re.findall(r'alt="(.*?)"', text) == ["church, W(x)", "church", "Scores"]


def test_a_page_is_utf8_whatever_the_locale(model, folder, monkeypatch):
    monkeypatch.setattr("io.text_encoding", lambda encoding, *_: encoding or "ascii")
    album = album_of([photo(folder / "ünï.png")], model, folder)
    assert "ünï.png" in album.page.read_bytes().decode("utf-8")


def test_png_keeps_every_pixel():
    picture = np.random.default_rng(0).integers(0, 256, (5, 7, 4), dtype=np.uint8)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(png(picture)))), picture)


# The numbers.


def test_rows_are_the_models_numbers(model, folder):
    path = photo(folder / "a.png")
    (result,) = album_of([path], model, folder, classes=("class3", "7")).results
    with torch.no_grad():
        logits = model(read_image(path, (32, 32))[None])[0]
    assert result.file == Path(path)
    assert [(row.name, row.index) for row in result.rows] == [("class3", 3), ("class7", 7)]
    for row in result.rows:
        assert row.output == pytest.approx(logits[row.index].item(), rel=1e-5)
        assert row.probability == pytest.approx(torch.sigmoid(logits[row.index]).item(), rel=1e-5)
        assert abs(row.residual) <= 1e-4 * abs(row.output)


def test_the_default_is_the_most_likely_class(model, folder):
    path = photo(folder / "a.png")
    (result,) = album_of([path], model, folder).results
    with torch.no_grad():
        assert result.rows[0].index == model(read_image(path, (32, 32))[None]).argmax().item()


def test_a_class_that_is_called_like_a_number_goes_by_its_name(folder):
    names = tuple(str(9 - i) for i in range(10))
    album = album_of([photo(folder / "a.png")], make_model(names), folder, classes=("9",))
    assert [(row.name, row.index) for row in album.results[0].rows] == [("9", 0)]


def test_a_unit_has_no_probability(model, folder):
    path = photo(folder / "a.png")
    album = album_of([path], model, folder, layer="4", unit=(5, 3, 2))
    (row,) = album.results[0].rows
    assert (row.name, row.index, row.probability) == ("4 unit 5", 5, None)
    e = tb.explain(model, read_image(path, (32, 32))[None], layer="4", unit=(5, 3, 2))
    assert row.output == pytest.approx(e.outputs.item(), rel=1e-5)
    assert row.cells()[1] == ""


def test_the_album_as_json_can_be_parsed(model, folder):
    bad = folder / "bad.png"
    bad.write_bytes(b"no")
    album = album_of([photo(folder / "a.png"), str(bad)], model, folder, top=2)
    document = json.loads(json.dumps(album.as_json()))
    assert document["page"] == str(folder / "out" / "page.html")
    assert [i["file"] for i in document["images"]] == [str(folder / "a.png")]
    assert len(document["images"][0]["explained"]) == 2
    keys = {"name", "index", "output", "probability", "residual"}
    assert document["images"][0]["explained"][0].keys() == keys
    assert all(Path(p).is_file() for p in document["images"][0]["pictures"])
    assert len(document["refused"]) == 1


# The files.


def all_pictures(album):
    return [p for result in album.results for p in result.pictures]


def assert_files_are_apart(album, count):
    pictures = all_pictures(album)
    assert len(pictures) == len(set(pictures)) == count
    assert all(p.is_file() for p in pictures)


def test_pictures_are_written_as_they_are_drawn(model, folder):
    path = photo(folder / "a.png")
    album = album_of([path], model, folder, classes=("class1", "class2"), delta=True)
    e = tb.explain(model, read_image(path, (32, 32))[None], [1, 2])
    drawn = []
    for k in range(2):
        drawn += [render.colour(e)[0, k], render.contributions(e)[0, k]]
    drawn.append(render.delta(e)[0])
    (result,) = album.results
    assert len(result.pictures) == len(drawn)
    for file, right in zip(result.pictures, drawn, strict=True):
        assert file.parent == folder / "out"
        assert np.array_equal(np.asarray(Image.open(file)), right)


def test_images_of_the_same_name_have_pictures_of_their_own(model, folder):
    names = ["x/a.png", "y/a.png", "a.jpg", "z/a-2.png", "a-2.png", "a"]
    paths = [photo(folder / name, i) for i, name in enumerate(names)]
    assert_files_are_apart(album_of(paths, model, folder), 2 * len(names))


@pytest.mark.parametrize(
    "pair",
    [("猫", "犬"), ("a b", "a-b"), ("a", "a!"), ("+", "-"), ("x", "x contributions")],
    ids=" and ".join,
)
def test_classes_of_similar_names_have_pictures_of_their_own(folder, pair):
    album = album_of(
        [photo(folder / "a.png")], make_model((*pair, *CLASSES[2:])), folder, classes=pair
    )
    assert_files_are_apart(album, 4)


def test_a_class_called_delta_does_not_lose_its_picture(folder):
    model = make_model(("delta", *CLASSES[1:]))
    path = photo(folder / "a.png")
    album = album_of([path], model, folder, classes=("delta", "class1"), delta=True)
    assert_files_are_apart(album, 5)


def test_a_class_asked_for_twice_is_shown_twice(model, folder):
    album = album_of([photo(folder / "a.png")], model, folder, classes=("class1", "class1"))
    assert [row.index for row in album.results[0].rows] == [1, 1]
    assert all(p.is_file() for p in all_pictures(album))


LONG = {
    "as long as a name may be": "x" * 251 + ".png",
    "long in another script": "ж" * 125 + ".png",
}


@pytest.mark.parametrize("name", LONG.values(), ids=LONG)
def test_images_of_very_long_names_are_explained(model, folder, name):
    album = album_of([photo(folder / name), photo(folder / "a.png")], model, folder)
    assert album.refused == []
    assert_files_are_apart(album, 4)


def test_an_image_whose_name_is_no_text_is_explained(model, folder):
    path = os.fsdecode(os.fsencode(folder) + b"/\xff\xfe.png")
    photo(Path(path))
    album = album_of([path, photo(folder / "a.png")], model, folder)
    assert len(album.results) == 2
    assert len(read_page(album.page).pictures) == 6


def test_more_images_than_one_batch_stay_in_order_and_equal(model, folder):
    paths = [photo(folder / f"{i:02}.png", i) for i in range(BATCH + 3)]
    album = album_of([str(folder)], model, folder)
    assert [str(r.file) for r in album.results] == paths
    for i in (0, BATCH + 2):
        (alone,) = album_of([paths[i]], model, folder / "alone").results
        assert alone.rows[0].index == album.results[i].rows[0].index
        assert alone.rows[0].output == pytest.approx(album.results[i].rows[0].output, rel=1e-4)


@pytest.mark.parametrize("place", [0, 1, BATCH])
def test_a_bad_file_does_not_stop_the_good_ones(model, folder, place):
    paths = [photo(folder / f"{i}.png", i) for i in range(BATCH + 1)]
    paths.insert(place, str(folder / "missing.png"))
    album = album_of(paths, model, folder)
    assert len(album.results) == BATCH + 1
    assert album.refused == [f"{folder / 'missing.png'} does not exist: check the name."]
    assert len(read_page(album.page).pictures) == 3 * (BATCH + 1)


def test_nothing_is_written_when_nothing_was_explained(model, folder):
    album = album_of([str(folder / "missing.png")], model, folder)
    assert (album.results, album.page, len(album.refused)) == ([], None, 1)
    assert not (folder / "out").exists()


def test_the_folder_is_made_and_may_be_there(model, folder):
    path = photo(folder / "a.png")
    deep = folder / "new" / "er"
    for _ in range(2):
        album = make_album([path], model, Request(), deep, Console(file=io.StringIO()))
        assert album.page == deep / "page.html"


def test_models_of_grey_images_have_albums_too(folder):
    model = make_model(in_channels=1)
    album = album_of([photo(folder / "a.png")], model, folder)
    shown = read_page(album.page).pictures
    assert [p.shape for p in shown] == [(32, 32, 3), (32, 32, 4), (32, 32, 3)]
    assert np.array_equal(shown[0][..., 0], shown[0][..., 2])


def test_progress_is_shown_for_many_images_only(model, folder):
    for count, shown in ((1, False), (BATCH + 1, True)):
        paths = [photo(folder / str(count) / f"{i}.png", i) for i in range(count)]
        console = Console(file=io.StringIO(), force_terminal=True)
        make_album(paths, model, Request(), folder / "out", console)
        assert ("explaining" in console.file.getvalue()) == shown


def test_a_size_that_a_network_of_one_size_does_not_take_is_refused(folder):
    with pytest.raises(ValueError, match=r"`--size` \(=24×24 px\) .* it takes 16×16 px only\.$"):
        album_of([photo(folder / "a.png")], make_vit(), folder, size=24)


def test_a_conventional_model_is_refused(folder):
    model = tb.create_model("conventional/mini", num_classes=4, width=4).eval()
    with pytest.raises(ValueError, match=r"`--model` is conventional, .*: use a B-cos model\."):
        album_of([photo(folder / "a.png")], model, folder)
    assert not (folder / "out").exists()


def test_a_folder_with_its_own_album_is_explained_without_it(model, folder):
    photo(folder / "a.png")
    photo(folder / "sub" / "b.png")
    first, again = (album_of([str(folder)], model, folder) for _ in range(2))
    assert len(list((folder / "out").glob("*.png"))) > 1
    for album in (first, again):
        assert [r.file.name for r in album.results] == ["a.png", "b.png"]
    picture = first.results[0].pictures[0]
    assert [r.file for r in album_of([str(picture)], model, folder).results] == [picture]
    assert len(album_of([str(folder / "out")], model, folder).results) > 1  # asked for by name
