"""The command, run through its entry point: tables, files, JSON; and one sentence for mistakes."""

import functools
import io
import itertools
import json
import os
import re
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

import torchbcos as tb
from cases import caller
from torchbcos import checkpoint, cli

CLASSES = ("plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "big truck")


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    torch.manual_seed(0)
    model = tb.create_model("cifar9", max_out=1, preset="paper", classes=CLASSES)
    path = tmp_path_factory.mktemp("model") / "m.safetensors"
    tb.save(model, path)
    return str(path)


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs `torchbcos ARGUMENTS`; anything but an exit is a traceback, and fails the test."""
    monkeypatch.chdir(tmp_path)
    call = caller(monkeypatch, capsys)

    def checked(*arguments):
        code, out, err = call(*arguments)
        assert "Traceback" not in out + err
        return code, out, err

    return checked


@pytest.fixture
def quick(monkeypatch):
    """Loads a model file once for all runs."""
    monkeypatch.setattr(checkpoint, "load", functools.cache(checkpoint.load))


def photo(path, seed=0, size=(40, 36), **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).save(path, **options)
    return path


def sentences(err):
    """The complaints, one for each line."""
    lines = [line for line in err.splitlines() if line.strip()]
    for line in lines:
        assert line.startswith("torchbcos: "), f"not a sentence: {line!r}"
    return [line.removeprefix("torchbcos: ") for line in lines]


def assert_one_sentence(result, *parts):
    code, _, err = result
    assert code == 2
    (sentence,) = sentences(err)
    assert sentence.endswith((".", "?"))
    for part in parts:
        assert part in sentence


# What it does.


def test_what_only_some_commands_need_is_not_imported_for_all():
    """torchvision alone takes as long as torch."""
    heavy = "torchvision", "lightning", "matplotlib", "triton", "torch._dynamo"
    code = f"import sys, torchbcos.cli; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_table_pictures_and_a_page(run, model_file, tmp_path):
    photo(tmp_path / "a.png")
    code, out, err = run("explain", "a.png", "--model", model_file, "--top", 3, "--out", "here")
    assert (code, err) == (0, "")
    assert "a.png" in out
    for column in ("explained", "probability", "output", "residual"):
        assert column in out
    assert sum(name in out for name in CLASSES) == 3
    assert "Open here/page.html" in out
    written = sorted(p.name for p in (tmp_path / "here").iterdir())
    assert len(written) == 7
    assert "page.html" in written


def test_pictures_go_to_out_by_default(run, quick, model_file, tmp_path):
    photo(tmp_path / "a.png")
    assert run("explain", "a.png", "--model", model_file)[0] == 0
    assert (tmp_path / "out" / "page.html").is_file()


def explained(result):
    code, out, err = result
    assert (code, err) == (0, "")
    document = json.loads(out)
    return [[row["name"] for row in image["explained"]] for image in document["images"]]


def test_json_is_all_there_is_on_the_output(run, quick, model_file, tmp_path):
    photo(tmp_path / "a.png")
    photo(tmp_path / "b.png", 1)
    code, out, err = run("explain", "a.png", "b.png", "--model", model_file, "--top", 2, "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["page"] == "out/page.html"
    assert [image["file"] for image in document["images"]] == ["a.png", "b.png"]
    for image in document["images"]:
        first, second = image["explained"]
        assert first["output"] >= second["output"]
        assert 0 < first["probability"] < 1
        assert abs(first["residual"]) <= 1e-4 * abs(first["output"])
        assert first["name"] == CLASSES[first["index"]]
        assert all((tmp_path / p).is_file() for p in image["pictures"])


@pytest.mark.parametrize(
    ("classes", "names"),
    [
        ("cat", ["cat"]),
        ("3", ["cat"]),
        ("dog,cat", ["dog", "cat"]),
        (" ship , 0 ", ["ship", "plane"]),
        ("big truck", ["big truck"]),
        ("dog,,", ["dog"]),
    ],
)
def test_classes_go_by_name_or_number(run, quick, model_file, tmp_path, classes, names):
    photo(tmp_path / "a.png")
    result = run("explain", "a.png", "--model", model_file, "--classes", classes, "--json")
    assert explained(result) == [names]


@pytest.mark.parametrize(("unit", "index"), [("5", 5), ("5,3,2", 5), (" 7 , 0 , 1 ", 7)])
def test_a_unit_of_a_layer(run, quick, model_file, tmp_path, unit, index):
    photo(tmp_path / "a.png")
    arguments = ("--layer", "4", "--unit", unit)
    result = run("explain", "a.png", "--model", model_file, *arguments, "--json")
    assert explained(result) == [[f"4 unit {index}"]]
    assert run("explain", "a.png", "--model", model_file, *arguments)[0] == 0


@pytest.mark.parametrize("choice", [("--top", 2), ("--classes", "cat,dog")])
def test_delta_adds_a_picture(run, quick, model_file, tmp_path, choice):
    photo(tmp_path / "a.png")
    code, _, err = run("explain", "a.png", "--model", model_file, *choice, "--delta")
    assert (code, err) == (0, "")
    assert len([p for p in (tmp_path / "out").iterdir() if p.suffix == ".png"]) == 5
    assert (tmp_path / "out" / "a-delta.png").is_file()


@pytest.mark.parametrize(
    ("size", "expected"), [((), 32), (("--size", 48), 48), (("--size", 0), 32)]
)
def test_images_are_resized_to_the_models_size_or_another(
    run, quick, model_file, tmp_path, size, expected
):
    photo(tmp_path / "a.png")
    assert run("explain", "a.png", "--model", model_file, "--classes", "3", *size)[0] == 0
    with Image.open(tmp_path / "out" / "a-cat.png") as picture:
        assert picture.size == (expected, expected)


def test_without_a_model_the_bundled_one_is_used(run, quick, tmp_path):
    photo(tmp_path / "a.png")
    code, out, err = run("explain", "a.png", "--json")
    assert (code, err) == (0, "")
    names = checkpoint.load(checkpoint.default_name()).classes
    assert json.loads(out)["images"][0]["explained"][0]["name"] in names


def test_styles_differ(run, quick, model_file, tmp_path):
    photo(tmp_path / "a.png")
    pictures = {}
    for style in ("paper", "released"):
        arguments = ("--style", style, "--out", style, "--classes", "3")
        assert run("explain", "a.png", "--model", model_file, *arguments)[0] == 0
        pictures[style] = (tmp_path / style / "a-cat.png").read_bytes()
    assert pictures["paper"] != pictures["released"]


def test_folders_and_globs_are_taken(run, quick, model_file, tmp_path):
    for i, name in enumerate(["x/b.png", "x/deep/a.jpg", "y/c.png", "y/d.png"]):
        photo(tmp_path / name, i)
    result = run("explain", "x", "y/*.png", "--model", model_file, "--json")
    files = [image["file"] for image in json.loads(result[1])["images"]]
    assert files == ["x/b.png", "x/deep/a.jpg", "y/c.png", "y/d.png"]


def test_progress_does_not_disturb_the_output(run, quick, model_file, tmp_path):
    for i in range(10):
        photo(tmp_path / "x" / f"{i}.png", i)
    code, out, _ = run("explain", "x", "--model", model_file, "--json")
    assert code == 0
    assert len(json.loads(out)["images"]) == 10


@pytest.mark.parametrize(
    "name", ["a[b]c.png", "[bold]a.png", "[/bold].png", "[red", "a [1] (2).png"]
)
def test_names_with_brackets_are_shown_as_they_are(run, quick, model_file, tmp_path, name):
    photo(tmp_path / name, format="PNG")
    code, out, err = run("explain", name, "--model", model_file)
    assert (code, err) == (0, "")
    assert name in out


def test_names_that_are_no_text_are_shown_somehow(run, quick, model_file, tmp_path):
    photo(tmp_path / "cat \udcff.png")
    code, out, err = run("explain", "cat \udcff.png", "--model", model_file)
    assert (code, err) == (0, "")
    assert "cat " in out


def test_class_names_with_brackets_are_shown_as_they_are(run, tmp_path):
    model = tb.create_model("cifar9", max_out=1, preset="paper", classes=["[/x]", *CLASSES[1:]])
    tb.save(model, tmp_path / "m.safetensors")
    photo(tmp_path / "a.png")
    code, out, err = run("explain", "a.png", "--model", "m.safetensors", "--classes", "0")
    assert (code, err) == (0, "")
    assert "[/x]" in out


def test_models_without_names_number_their_classes(run, tmp_path):
    model = tb.create_model("cifar9", max_out=1, preset="paper")
    tb.save(model, tmp_path / "m.safetensors")
    photo(tmp_path / "a.png")
    result = run("explain", "a.png", "--model", "m.safetensors", "--classes", "4,1", "--json")
    assert explained(result) == [["class 4", "class 1"]]


def test_the_network_for_cifar_takes_images_of_its_size():
    assert tb.create_model("cifar9").input_size == (32, 32)


# What it refuses.

WRONG_OPTIONS = {
    "--top beyond the classes": (("--top", 11), "`--top` (=11)"),
    "--classes unknown": (("--classes", "fish"), "'fish'"),
    "--classes beyond": (("--classes", "10"), "from 0 to 9"),
    "--classes negative": (("--classes", "-1"), "'-1'"),
    "--layer unknown": (("--layer", "44", "--unit", 0), "did you mean"),
    "--layer alone": (("--layer", "4"), "`--layer` and `--unit` go together"),
    "--unit alone": (("--unit", 3), "`--layer` and `--unit` go together"),
    "--unit of two": (("--layer", "4", "--unit", "1,2"), "`--unit` (='1,2')"),
    "--unit in words": (("--layer", "4", "--unit", "first"), "`--unit` (='first')"),
    "--unit beyond": (("--layer", "4", "--unit", "4096"), "4096"),
    "--unit beyond the map": (("--layer", "4", "--unit", "0,99,0"), "99"),
    "--unit negative": (("--layer", "4", "--unit", "-1"), "-1"),
    "--delta of one class": (("--delta",), "`--delta`"),
    "--delta of one named class": (("--delta", "--classes", "cat"), "`--delta`"),
    "--classes beside --top": (
        ("--delta", "--classes", "cat", "--top", 2),
        "`--top` (=2) and --classes both choose: leave out one.",
    ),
    "--delta of a unit": (
        ("--delta", "--top", 2, "--layer", "4", "--unit", 1),
        "two classes, not units: leave out --delta or --layer.",
    ),
    "--classes of a raised digit": (("--classes", "²"), "²') must be a class"),
    "--style unknown": (("--style", "pretty"), "`--style` (='pretty')"),
    "--out a file": (("--out", "a.png"), "`--out` (='a.png')"),
    "--out within a file": (("--out", "a.png/out"), "`--out` (='a.png/out')"),
    "--device unknown": (("--device", "banana"), "banana"),
}


@pytest.mark.parametrize(("arguments", "part"), WRONG_OPTIONS.values(), ids=WRONG_OPTIONS)
def test_wrong_options_are_refused_in_one_sentence(
    run, quick, model_file, tmp_path, arguments, part
):
    photo(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    assert_one_sentence(run("explain", "a.png", "--model", model_file, *arguments), part)
    assert (tmp_path / "a.png").read_bytes() == content
    assert not (tmp_path / "out" / "page.html").exists()


def test_a_size_that_the_network_cannot_take_is_refused_in_one_sentence(run, tmp_path):
    model = tb.create_model("squeezenet1_1", num_classes=10, max_out=1)
    model.scaling = "custom"
    tb.save(model, tmp_path / "m.safetensors")
    photo(tmp_path / "a.png")
    result = run("explain", "a.png", "--model", "m.safetensors", "--size", 4)
    assert_one_sentence(result, "`--size`", "4×4", "(its own size is 224×224 px).")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_refused_in_one_sentence(run, model_file, tmp_path):
    photo(tmp_path / "a.png")
    assert_one_sentence(run("explain", "a.png", "--model", model_file, "--device", "cuda"), "cuda")


@pytest.mark.parametrize(
    "arguments",
    [("--top", 0), ("--top", "many"), ("--nonsense",), ("--style",), ("--model",)],
    ids=lambda arguments: " ".join(map(str, arguments)),
)
def test_options_that_do_not_parse_end_with_the_usage(run, model_file, arguments):
    arguments = arguments if "--model" in arguments else ("--model", model_file, *arguments)
    code, out, err = run("explain", "a.png", *arguments)
    assert (code, out) == (2, "")
    assert "Error" in err
    assert str(arguments[-1]) in err or str(arguments[-2]) in err


def test_a_file_in_the_folders_place_is_refused(run, tmp_path):
    (tmp_path / "out").write_text("in the way", encoding="utf-8")
    assert_one_sentence(
        run("explain", photo(tmp_path / "a.png")), "`--out` (='out') needs a folder"
    )
    assert (tmp_path / "out").read_text(encoding="utf-8") == "in the way"


def test_images_must_be_named(run):
    code, _, err = run("explain")
    assert code == 2
    assert "Missing argument" in err


MODELS = {
    "missing": (None, "does not exist"),
    "empty": (b"", "no intact safetensors"),
    "text": (b"words" * 100, "no intact safetensors"),
    "a pickle": (b"\x80\x04K\x01.", "no intact safetensors"),
}


@pytest.mark.parametrize(("content", "part"), MODELS.values(), ids=MODELS)
def test_what_is_no_model_is_refused_in_one_sentence(run, tmp_path, content, part):
    photo(tmp_path / "a.png")
    if content is not None:
        (tmp_path / "m.safetensors").write_bytes(content)
    assert_one_sentence(run("explain", "a.png", "--model", "m.safetensors"), "m.safetensors", part)


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.5, 0.999])
def test_a_model_cut_short_is_refused_in_one_sentence(run, model_file, tmp_path, share):
    with open(model_file, "rb") as file:  # noqa: PTH123 (a string)
        content = file.read()
    photo(tmp_path / "a.png")
    (tmp_path / "cut").write_bytes(content[: int(len(content) * share)])
    assert_one_sentence(run("explain", "a.png", "--model", "cut"), "cut is no intact safetensors")


def test_a_folder_is_no_model(run, tmp_path):
    photo(tmp_path / "a.png")
    assert_one_sentence(run("explain", "a.png", "--model", "."), "is a folder")


# Odd image files.


def encoded(kind, size=(40, 36), mode="RGB", **options):
    pixels = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, kind, **options)
    return buffer.getvalue()


def animation(kind, **options):
    frames = [Image.new("RGB", (20, 20), c) for c in ("red", "lime", "blue")]
    buffer = io.BytesIO()
    frames[0].save(buffer, kind, save_all=True, append_images=frames[1:], **options)
    return buffer.getvalue()


def png_chunk(kind, content):
    body = kind + content
    return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))


def bomb(side, palette):
    """A valid PNG of side² pixels of one bit in some hundred kilobytes."""
    line, packer = bytes(1 + (side + 7) // 8), zlib.compressobj(9)
    content = b"".join(packer.compress(line) for _ in range(side)) + packer.flush()
    header = struct.pack(">IIBBBBB", side, side, 1, 3 if palette else 0, 0, 0, 0)
    colours = [(b"PLTE", bytes([255, 0, 0, 0, 0, 255]))] if palette else []
    chunks = [(b"IHDR", header), *colours, (b"IDAT", content), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*c) for c in chunks)


def with_orientation(number):
    exif = Image.Exif()
    exif[0x0112] = number
    return encoded("JPEG", exif=exif)


def floats(value):
    buffer = io.BytesIO()
    Image.fromarray(np.full((8, 8), value, np.float32)).save(buffer, "TIFF")
    return buffer.getvalue()


def sixteen_bits(kind):
    buffer = io.BytesIO()
    Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000).save(buffer, kind)
    return buffer.getvalue()


GOOD, BAD, EITHER = "explained", "refused", "either"
NOISE = np.random.default_rng(2).bytes(5000)
FILES = {
    # name: (content, what must happen)
    "plain.png": (encoded("PNG"), GOOD),
    "plain.jpg": (encoded("JPEG"), GOOD),
    "plain.webp": (encoded("WEBP"), GOOD),
    "plain.gif": (encoded("GIF"), GOOD),
    "plain.tiff": (encoded("TIFF"), GOOD),
    "plain.bmp": (encoded("BMP"), GOOD),
    "grey.png": (encoded("PNG", mode="L"), GOOD),
    "grey-alpha.png": (encoded("PNG", mode="LA"), GOOD),
    "alpha.png": (encoded("PNG", mode="RGBA"), GOOD),
    "alpha.webp": (encoded("WEBP", mode="RGBA"), GOOD),
    "palette.png": (encoded("PNG", mode="P"), GOOD),
    "transparent-palette.png": (encoded("PNG", mode="P", transparency=3), GOOD),
    "bytes-palette.png": (encoded("PNG", mode="P", transparency=bytes(range(256))), GOOD),
    "bits.png": (encoded("PNG", mode="1"), GOOD),
    "bits.tiff": (encoded("TIFF", mode="1"), GOOD),
    "cmyk.jpg": (encoded("JPEG", mode="CMYK"), GOOD),
    "cmyk.tiff": (encoded("TIFF", mode="CMYK"), GOOD),
    "progressive.jpg": (encoded("JPEG", progressive=True), GOOD),
    "sixteen.png": (sixteen_bits("PNG"), GOOD),
    "sixteen.tiff": (sixteen_bits("TIFF"), GOOD),
    "half.tiff": (floats(0.5), GOOD),
    "negative.tiff": (floats(-3.0), BAD),
    "nan.tiff": (floats(np.nan), BAD),
    "huge values.tiff": (floats(1e30), BAD),
    "moving.gif": (animation("GIF"), GOOD),
    "moving.webp": (animation("WEBP"), GOOD),
    "moving.png": (animation("PNG"), GOOD),
    "pages.tiff": (animation("TIFF"), GOOD),
    **{f"turned{n}.jpg": (with_orientation(n), GOOD) for n in range(1, 9)},
    "turned99.jpg": (with_orientation(99), GOOD),
    "one pixel.png": (encoded("PNG", (1, 1)), GOOD),
    "one pixel.gif": (encoded("GIF", (1, 1)), GOOD),
    "line.png": (encoded("PNG", (5000, 1)), GOOD),
    "column.png": (encoded("PNG", (1, 5000)), GOOD),
    "line.jpg": (encoded("JPEG", (5000, 1)), GOOD),
    "bomb.png": (bomb(20_000, palette=False), BAD),
    "palette-bomb.png": (bomb(20_000, palette=True), BAD),
    "lesser-bomb.png": (bomb(12_000, palette=False), BAD),
    "large.png": (bomb(3_000, palette=False), GOOD),
    "no-extension": (encoded("PNG"), GOOD),
    "wrong-extension.jpg": (encoded("PNG"), GOOD),
    "image.txt": (encoded("GIF"), GOOD),
    ".hidden": (encoded("BMP"), GOOD),
    ".png": (encoded("PNG"), GOOD),
    "-dash.png": (encoded("PNG"), GOOD),
    "spaces in the name.png": (encoded("PNG"), GOOD),
    "ünïcödé 猫 🐈.png": (encoded("PNG"), GOOD),
    "not text \udcff\udcfe.png": (encoded("PNG"), GOOD),
    "[brackets] {and} (more).png": (encoded("PNG"), GOOD),
    "[/markup].png": (encoded("PNG"), GOOD),
    "quote ' and \".png": (encoded("PNG"), GOOD),
    "star*.png": (encoded("PNG"), GOOD),
    "new\nline.png": (encoded("PNG"), GOOD),
    "<b>.png": (encoded("PNG"), GOOD),
    "%s %d {0}.png": (encoded("PNG"), GOOD),
    "x" * 251 + ".png": (encoded("PNG"), GOOD),
    "empty.png": (b"", BAD),
    "empty": (b"", BAD),
    "empty\nwith a line break": (b"", BAD),
    "text.png": (b"this is not an image\n" * 20, BAD),
    "page.html": (b"<!doctype html><title>x</title>", BAD),
    "drawing.svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", BAD),
    "noise.png": (NOISE, BAD),
    "noise.jpg": (b"\xff\xd8\xff\xe0" + NOISE, BAD),
    "noise.gif": (b"GIF89a" + NOISE, EITHER),
    "noise.bmp": (b"BM" + NOISE, BAD),
    "noise.tiff": (b"II*\0" + NOISE, BAD),
    "noise.webp": (b"RIFF" + NOISE[:4] + b"WEBP" + NOISE, BAD),
    "noise-inside.png": (encoded("PNG")[:60] + NOISE, BAD),
    "noise-behind.png": (encoded("PNG") + NOISE, GOOD),
    "zeros.png": (bytes(5000), BAD),
    "header-only.png": (b"\x89PNG\r\n\x1a\n", BAD),
    "no-size.png": (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", struct.pack(">IIBBBBB", 0, 0, 8, 2, 0, 0, 0))
        + png_chunk(b"IEND", b""),
        BAD,
    ),
    "archive.png": (b"PK\x03\x04" + NOISE, BAD),
}
for _kind in ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"):
    _content = encoded(_kind)
    for _percent in (1, 10, 40, 70, 95, 99):
        _name = f"cut at {_percent}.{_kind.lower()}"
        FILES[_name] = (_content[: max(len(_content) * _percent // 100, 1)], EITHER)
    FILES[f"cut at 1.{_kind.lower()}"] = (_content[: len(_content) // 100], BAD)


def put(path, content):
    path.parent.mkdir(exist_ok=True)  # a slash in "[/markup].png" makes a folder "["
    path.write_bytes(content)


def test_there_are_enough_odd_files():
    assert len(FILES) >= 100


@pytest.mark.parametrize(
    "name", FILES, ids=[n[:30].encode("ascii", "replace").decode() for n in FILES]
)
def test_an_odd_file_is_explained_or_refused_in_one_sentence(
    run, quick, model_file, tmp_path, name
):
    content, fate = FILES[name]
    put(tmp_path / name, content)
    code, out, err = run("explain", "--model", model_file, "--json", "--", name)
    document = json.loads(out)
    assert (code, len(document["images"])) in ((0, 1), (2, 0))
    assert fate == EITHER or (fate == GOOD) == (code == 0)
    if code == 0:
        assert err == ""
        assert document["images"][0]["file"] == name
        assert (tmp_path / "out" / "page.html").is_file()
    else:
        assert_one_sentence((code, out, err), " ".join(name.split()))
        assert document["page"] is None


def odd_places(folder):
    """Names of things that are no file with content, and what must be said about each."""
    (folder / "empty-folder").mkdir()
    (folder / "folder.png").mkdir()
    (folder / "dangling.png").symlink_to(folder / "nowhere.png")
    (folder / "loop.png").symlink_to(folder / "loop.png")
    (folder / "there").symlink_to(folder / "back")
    (folder / "back").symlink_to(folder / "there")
    return {
        "empty-folder": "folder",
        "folder.png": "folder",
        "dangling.png": "does not exist",
        "loop.png": "loop.png",
        "there": "there",
        "missing.png": "does not exist",
        "no/such/folder/a.png": "does not exist",
        "*.nothing": "matches no file",
        "[[": "[[",
        "empty-fold*": "empty-fold",
        "": "",
        "x" * 300 + ".png": "xxx",
        "/dev/null": "/dev/null",
    }


PLACES = ["empty-folder", "folder.png", "dangling.png", "loop.png", "there", "missing.png",
          "no/such/folder/a.png", "*.nothing", "[[", "empty-fold*", "", "x" * 300 + ".png",
          "/dev/null"]  # fmt: skip


@pytest.mark.parametrize("name", PLACES, ids=lambda n: n[:25])
def test_what_is_no_file_is_refused_in_one_sentence(run, quick, model_file, tmp_path, name):
    part = odd_places(tmp_path)[name]
    assert_one_sentence(run("explain", name, "--model", model_file), part)


def test_an_image_that_may_not_be_read_is_refused_in_one_sentence(
    run, quick, model_file, tmp_path, monkeypatch
):
    good, denied = photo(tmp_path / "good.png"), photo(tmp_path / "secret.png")
    really_open = Image.open

    def open_(path, *arguments):
        if os.path.basename(path) == denied.name:  # noqa: PTH119 (any kind of path)
            raise PermissionError(13, "Permission denied")
        return really_open(path, *arguments)

    monkeypatch.setattr(Image, "open", open_)  # a test may run as root, who may read anything
    result = run("explain", "secret.png", "good.png", "--model", model_file, "--json")
    assert_one_sentence(result, "secret.png may not be read")
    assert [i["file"] for i in json.loads(result[1])["images"]] == [good.name]


def test_a_folder_that_may_not_be_looked_into_is_refused_in_one_sentence(
    run, quick, model_file, tmp_path, monkeypatch
):
    really_look = os.stat

    def look(path, *arguments, **options):
        if str(path).startswith("secret"):
            raise PermissionError(13, "Permission denied", str(path))
        return really_look(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", look)
    code, _, err = run("explain", "secret/a.png", "--model", model_file)
    assert code == 2
    assert "secret/a.png" in sentences(err)[0]


def test_bad_files_among_good_ones_do_not_stop_them(run, quick, model_file, tmp_path):
    for name, (content, _) in FILES.items():
        put(tmp_path / name, content)
    places = [p for p in odd_places(tmp_path) if p]
    names = [*FILES, *places]
    code, out, err = run("explain", "--model", model_file, "--json", "--", *names)
    assert code == 2
    document = json.loads(out)
    done = [image["file"] for image in document["images"]]
    for name, (_, fate) in FILES.items():
        assert fate == EITHER or (name in done) == (fate == GOOD), name
    assert len(done) + len(document["refused"]) == len(names)
    assert len(sentences(err)) == len(document["refused"])
    assert not set(done) & set(places)
    pictures = [p for image in document["images"] for p in image["pictures"]]
    assert len(pictures) == len(set(pictures)) == 2 * len(done)
    page = (tmp_path / "out" / "page.html").read_text(encoding="utf-8")
    assert page.count("<section>") == len(done)


# `convert`.


def test_convert_prints_what_became_of_each_operation(run):
    code, out, err = run("convert", "resnet18", "--num-classes", 10)
    assert (code, err) == (0, "")
    assert "ResNet as a B-cos network" in out
    assert re.search(r"Conv2d +BcosConv2d +20", out)
    assert "Dynamic-linear: W(x)·x + bias is the output." in out
    assert "22.4 million parameters." in out


def test_convert_lists_each_operation(run):
    code, out, _ = run("convert", "cifar9", "--each")
    assert code == 0
    for place, became in (("0", "BcosConv2d"), ("1", "removed"), ("16", "BcosConv2d")):
        assert re.search(rf"│ {place} +│ \w+ +│ {became}", out)


def test_convert_as_json(run):
    code, out, err = run("convert", "cifar9", "--max-out", 1, "--b", 1.5, "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["dynamic_linear"] is True
    assert document["breaks"] == []
    widths = [6, 64, 64, 128, 128, 128, 256, 256, 256]
    expected = sum(9 * a * b for a, b in itertools.pairwise(widths)) + 256 * 10
    assert document["parameters"] == expected
    assert document["changes"][0] == {
        "place": "0",
        "operation": "Conv2d",
        "became": "BcosConv2d",
    }


def test_convert_options_reach_the_conversion(run):
    kept = json.loads(run("convert", "resnet18", "--norm", "uncentred", "--json")[1])
    assert {c["became"] for c in kept["changes"] if c["operation"] == "BatchNorm2d"} == {
        "UncentredBatchNorm2d"
    }
    pooled = json.loads(run("convert", "resnet18", "--head", "pool", "--json")[1])
    assert pooled["changes"][-1]["became"] == "BcosLinear"


def test_convert_refuses_with_the_reason(run):
    result = run("convert", "timm/convit_tiny")
    assert_one_sentence(result, "cannot become dynamic-linear because of", "misses the output by")


def test_convert_allows_what_breaks_the_decomposition_on_demand(run):
    document = json.loads(run("convert", "timm/convit_tiny", "--allow", "--json")[1])
    assert document["dynamic_linear"] is False
    assert document["breaks"]


WRONG_CONVERSIONS = {
    "unknown": (("resnet43",), "did you mean resnet34"),
    "like nothing": (("qqq",), "`name` (='qqq')"),
    "unknown to timm": (("timm/nothing",), "timm"),
    "b below one": (("cifar9", "--b", 0.5), "`b` (=0.5)"),
    "no units": (("cifar9", "--max-out", 0), "`max_out` (=0)"),
    "another norm": (("cifar9", "--norm", "batch"), "`--norm` (='batch')"),
    "another head": (("cifar9", "--head", "top"), "`head` (='top')"),
}


@pytest.mark.parametrize(("arguments", "part"), WRONG_CONVERSIONS.values(), ids=WRONG_CONVERSIONS)
def test_wrong_conversions_are_refused_in_one_sentence(run, arguments, part):
    assert_one_sentence(run("convert", *arguments), part)


# Help.


def test_without_a_command_there_is_help(run):
    _, out, err = run()
    assert "explain" in out + err
    assert "convert" in out + err


@pytest.mark.parametrize("command", [c.callback.__name__ for c in cli.app.registered_commands])
def test_every_commands_help_has_an_example(run, command):
    code, out, err = run(command, "--help")
    assert (code, err) == (0, "")
    assert re.search(rf"Example: +torchbcos {command} ", " ".join(out.split()))


def test_unknown_commands_are_refused(run):
    code, _, err = run("explode")
    assert code == 2
    assert "explode" in err


def test_the_package_can_be_run() -> None:
    command = [sys.executable, "-m", "torchbcos", "--help"]
    assert "Usage: python -m torchbcos" in subprocess.check_output(command, text=True)
