"""Every kind of image file becomes the same tensor, or is refused in one sentence."""

import io
import os
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from torchbcos import images
from torchbcos.images import ImageError, find_images, read_image

RGB = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
GREY = RGB[:, :, 0]


def picture(mode="RGB"):
    return Image.fromarray(RGB).convert(mode)


def read(image, tmp_path, name="x.png", channels=3, size=None, **options):
    """`image` through a file, as integers [H, W, channels]."""
    image.save(tmp_path / name, **options)
    return as_bytes(read_image(tmp_path / name, size, channels))


def as_bytes(tensor):
    assert tensor.dtype == torch.float32
    assert tensor.is_contiguous()
    values = tensor.permute(1, 2, 0).numpy() * 255
    assert np.allclose(values, values.round(), atol=1e-3)
    return values.round().astype(int)


# Lossless formats give the same pixels.


def test_threads_that_overlap_leave_warnings_as_they_were():
    before = list(warnings.filters)
    first, second = images._naming("a"), images._naming("b")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert warnings.filters != before  # the second is still in
    second.__exit__(None, None, None)
    assert warnings.filters == before


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("x.png", {}),
        ("x.bmp", {}),
        ("x.tiff", {}),
        ("x.webp", {"lossless": True}),
        ("x.ppm", {}),
        ("x.PNG", {}),
        ("photo", {"format": "PNG"}),
        ("photo.txt", {"format": "BMP"}),
        ("näme with [brackets] & 'quotes'.png", {}),
    ],
)
def test_colour_files_are_read_whatever_their_name(tmp_path, name, options):
    assert np.array_equal(read(picture(), tmp_path, name, **options), RGB)


def test_a_photograph_is_read(tmp_path):
    smooth = Image.fromarray(RGB).resize((64, 48), Image.Resampling.BICUBIC)
    found = read(smooth, tmp_path, "x.jpg", quality=95)
    assert found.shape == (48, 64, 3)
    assert np.abs(found - np.asarray(smooth, int)).mean() < 6


def upright_as_stored(upright, orientation):
    """The array to store so that a viewer that obeys EXIF shows `upright`."""
    return {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.swapaxes(0, 1),
        6: np.rot90(upright, 1),  # to be turned clockwise when shown
        7: upright[::-1, ::-1].swapaxes(0, 1),
        8: np.rot90(upright, -1),
    }[orientation]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["x.png", "x.tiff"])
def test_exif_orientation_is_obeyed(tmp_path, name, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = Image.fromarray(np.ascontiguousarray(upright_as_stored(RGB, orientation)))
    assert np.array_equal(read(stored, tmp_path, name, exif=exif), RGB)


@pytest.mark.parametrize("orientation", [3, 6, 8])
def test_exif_orientation_of_a_photograph_is_obeyed(tmp_path, orientation):
    block = np.zeros((16, 32, 3), np.uint8)
    block[:8, :8] = 255  # white at the top left
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = Image.fromarray(np.ascontiguousarray(upright_as_stored(block, orientation)))
    found = read(stored, tmp_path, "x.jpg", exif=exif, quality=100)
    assert found.shape == (16, 32, 3)
    assert np.abs(found - block).max() < 30


def on_white(rgb, alpha):
    share = alpha[..., None] / 255
    return rgb * share + 255 * (1 - share)


@pytest.mark.parametrize("name", ["x.png", "x.tiff", "x.webp"])
def test_transparent_images_lie_on_white(tmp_path, name):
    alpha = np.tile(np.array([0, 255, 128, 7], np.uint8), (6, 2))
    image = Image.fromarray(np.dstack([RGB, alpha]))
    options = {"lossless": True, "exact": True} if name == "x.webp" else {}
    found = read(image, tmp_path, name, **options)
    assert np.abs(found - on_white(RGB, alpha)).max() <= 1
    assert np.array_equal(found[:, 0], np.full((6, 3), 255))
    assert np.array_equal(found[:, 1], RGB[:, 1])


def test_grey_with_alpha_lies_on_white(tmp_path):
    alpha = np.tile(np.array([0, 255, 100, 255], np.uint8), (6, 2))
    image = Image.fromarray(np.dstack([GREY, alpha]))
    assert image.mode == "LA"
    expected = on_white(np.dstack([GREY] * 3), alpha)
    assert np.abs(read(image, tmp_path) - expected).max() <= 1


@pytest.mark.parametrize("name", ["x.png", "x.gif"])
@pytest.mark.parametrize("transparent", [None, 2])
def test_palettes_are_looked_up(tmp_path, name, transparent):
    colours = [(10, 20, 30), (200, 0, 0), (1, 2, 3), (0, 255, 99)]
    numbers = np.arange(48, dtype=np.uint8).reshape(6, 8) % 4
    image = Image.frombytes("P", (8, 6), numbers.tobytes())
    image.putpalette([v for colour in colours for v in colour])
    expected = np.array(colours)[numbers]
    options = {}
    if transparent is not None:
        options["transparency"] = transparent
        expected[numbers == transparent] = 255
    assert np.array_equal(read(image, tmp_path, name, **options), expected)


def test_a_palette_with_an_alpha_for_each_colour(tmp_path):
    numbers = np.arange(48, dtype=np.uint8).reshape(6, 8) % 3
    image = Image.frombytes("P", (8, 6), numbers.tobytes())
    image.putpalette([0, 0, 0, 100, 100, 100, 0, 0, 255])
    found = read(image, tmp_path, transparency=bytes([0, 128, 255]))
    colours = np.array([(255, 255, 255), (177, 177, 177), (0, 0, 255)])
    assert np.abs(found - colours[numbers]).max() <= 1


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_one_colour_can_be_the_transparent_one(tmp_path, mode):
    key = int(GREY[2, 3]) if mode == "L" else tuple(map(int, RGB[2, 3]))
    image = Image.fromarray(GREY if mode == "L" else RGB)
    found = read(image, tmp_path, transparency=key)
    assert found[2, 3].tolist() == [255, 255, 255]
    expected = np.dstack([GREY] * 3) if mode == "L" else RGB
    others = (expected != expected[2, 3]).any(2)
    assert np.array_equal(found[others], expected[others])


@pytest.mark.parametrize("name", ["x.png", "x.bmp", "x.tiff", "x.gif"])
def test_grey_images_are_grey_in_three_channels(tmp_path, name):
    found = read(Image.fromarray(GREY), tmp_path, name)
    assert np.array_equal(found, np.dstack([GREY] * 3))


def test_images_of_one_bit_are_black_and_white(tmp_path):
    bits = GREY > 100
    found = read(Image.fromarray(bits), tmp_path)
    assert np.array_equal(found[:, :, 1], bits * 255)


@pytest.mark.parametrize("name", ["x.tiff", "x.jpg"])
def test_cmyk_is_converted(tmp_path, name):
    image = Image.new("CMYK", (16, 16), (0, 255, 255, 0))  # magenta and yellow: red
    found = read(image, tmp_path, name)
    assert np.abs(found - np.array([255, 0, 0])).max() <= 3


@pytest.mark.parametrize("mode", ["YCbCr", "LAB", "HSV"])
def test_other_colour_spaces_are_read_or_refused_in_a_sentence(tmp_path, mode):
    path = tmp_path / "x.tiff"
    if mode == "HSV":
        Image.new("HSV", (4, 4), (0, 255, 255)).convert("RGB").save(path)
    else:
        Image.new(mode, (4, 4)).save(path)
    try:
        assert read_image(path).shape == (3, 4, 4)
    except ImageError as error:
        assert str(path) in str(error)  # noqa: PT017 (either is right)


SIXTEEN = (np.arange(48, dtype=np.uint16) * 1394).reshape(6, 8)  # up to 65518


@pytest.mark.parametrize("name", ["x.png", "x.tiff"])
def test_sixteen_bits_are_scaled_to_one(tmp_path, name):
    image = Image.fromarray(SIXTEEN)
    assert image.mode == "I;16"
    found = read(image, tmp_path, name)
    assert np.array_equal(found[:, :, 0], np.round(SIXTEEN / 65535 * 255))


def png_chunk(kind, content):
    body = kind + content
    return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))


def test_sixteen_bits_of_colour_are_scaled_to_one(tmp_path):
    values = np.stack([SIXTEEN, SIXTEEN[::-1], SIXTEEN // 2], 2)
    lines = b"".join(b"\0" + line.astype(">u2").tobytes() for line in values)
    header = struct.pack(">IIBBBBB", 8, 6, 16, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")]
    path = tmp_path / "x.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*c) for c in chunks))
    assert np.abs(as_bytes(read_image(path)) - values / 65535 * 255).max() <= 1


def test_thirty_two_bit_integers_are_read_as_sixteen(tmp_path):
    found = read(Image.fromarray(SIXTEEN.astype(np.int32)), tmp_path, "x.tiff")
    assert np.array_equal(found[:, :, 2], np.round(SIXTEEN / 65535 * 255))


def test_thirty_two_bit_integers_up_to_255_are_read_as_eight(tmp_path):
    found = read(Image.fromarray(GREY.astype(np.int32)), tmp_path, "x.tiff")
    assert np.array_equal(found[:, :, 1], GREY)


def test_dark_images_of_sixteen_bits_stay_dark(tmp_path):
    for name in ("x.png", "y.tiff"):
        assert read(Image.fromarray(SIXTEEN // 300), tmp_path, name).max() <= 1
    (tmp_path / "z.pgm").write_bytes(b"P5 8 6 65535\n" + (SIXTEEN // 300).astype(">u2").tobytes())
    assert as_bytes(read_image(tmp_path / "z.pgm")).max() <= 1


@pytest.mark.parametrize("largest", [1.0, 255.0, 65535.0])
def test_fractions_are_scaled_by_what_they_look_like(tmp_path, largest):
    values = (np.arange(48, dtype=np.float32) / 47 * largest).reshape(6, 8)
    found = read(Image.fromarray(values), tmp_path, "x.tiff")
    assert np.array_equal(found[:, :, 0], np.round(values.astype(float) / largest * 255))


@pytest.mark.parametrize("value", [-1.0, 70000.0, np.nan, np.inf])
@pytest.mark.parametrize("everywhere", [False, True])
def test_fractions_beyond_any_scale_are_refused(tmp_path, value, everywhere):
    values = np.full((6, 8), value if everywhere else 0.5, np.float32)
    values[2, 2] = value
    Image.fromarray(values).save(tmp_path / "x.tiff")
    with pytest.raises(ImageError, match=r"x\.tiff.* has values from .*: scale them"):
        read_image(tmp_path / "x.tiff")


@pytest.mark.parametrize("name", ["x.gif", "x.webp", "x.png", "x.tiff"])
def test_of_an_animation_the_first_frame_is_taken(tmp_path, name):
    frames = [Image.new("RGB", (8, 6), c) for c in ((200, 30, 40), (0, 0, 0), (9, 250, 9))]
    options = {"lossless": True} if name == "x.webp" else {}
    found = read(frames[0], tmp_path, name, save_all=True, append_images=frames[1:], **options)
    with Image.open(tmp_path / name) as image:
        assert image.n_frames == 3
    assert np.abs(found - np.array([200, 30, 40])).max() <= 2


# One channel, and sizes.


def test_sizes_beyond_memory_are_refused(tmp_path):
    picture().save(tmp_path / "x.png")
    with pytest.raises(ImageError, match=r"x.png cannot be made 100000×100000 pixels"):
        read_image(tmp_path / "x.png", (100_000, 100_000))


def test_models_of_one_channel_get_grey(tmp_path):
    assert np.array_equal(read(Image.fromarray(GREY), tmp_path, channels=1)[:, :, 0], GREY)
    found = read(picture(), tmp_path, channels=1)
    expected = RGB @ np.array([0.299, 0.587, 0.114])
    assert found.shape == (6, 8, 1)
    assert np.abs(found[:, :, 0] - expected).max() <= 1


@pytest.mark.parametrize("channels", [2, 4, 12])
def test_models_of_other_channels_take_no_files(tmp_path, channels):
    picture().save(tmp_path / "x.png")
    with pytest.raises(ImageError, match=f"x.png: this model takes {channels} channels"):
        read_image(tmp_path / "x.png", channels=channels)


@pytest.mark.parametrize("size", [(4, 4), (6, 2), (2, 6), (32, 20), (1, 1)])
@pytest.mark.parametrize("shape", [(6, 8), (1, 1), (1, 500), (500, 1)])
def test_images_are_cut_and_resized_to_any_size(tmp_path, shape, size):
    image = Image.fromarray(np.full((*shape, 3), 77, np.uint8))
    found = read(image, tmp_path, size=size)
    assert found.shape == (*size, 3)
    assert (found == 77).all()


def test_the_largest_centred_part_is_taken(tmp_path):
    wide = np.zeros((4, 12, 3), np.uint8)
    wide[:, 4:8] = 200
    assert (read(Image.fromarray(wide), tmp_path, size=(4, 4)) == 200).all()
    tall = np.ascontiguousarray(wide.swapaxes(0, 1))
    assert (read(Image.fromarray(tall), tmp_path, size=(4, 4)) == 200).all()


def test_without_a_size_an_image_keeps_its_own(tmp_path):
    assert read(picture(), tmp_path).shape == (6, 8, 3)


def test_turned_images_are_cut_after_turning(tmp_path):
    wide = np.zeros((4, 12, 3), np.uint8)
    wide[:, :4] = 200
    exif = Image.Exif()
    exif[0x0112] = 6
    stored = Image.fromarray(np.ascontiguousarray(np.rot90(wide)))
    assert stored.size == (4, 12)
    found = read(stored, tmp_path, size=(2, 6), exif=exif)
    assert (found[:, 0] == 200).all()
    assert (found[:, -1] == 0).all()


# Refusals.


def assert_refused(path, *parts):
    with pytest.raises(ImageError) as error:
        read_image(path)
    text = str(error.value)
    assert str(path) in text
    assert "\n" not in text
    assert text.endswith(".")
    for part in parts:
        assert part in text


def test_what_is_no_image_is_refused(tmp_path):
    assert_refused(tmp_path / "none.png", "does not exist")
    assert_refused(tmp_path, "is a folder")
    for content in (b"", b"words", bytes(1000), b"\x89PNG\r\n\x1a\n"):
        (tmp_path / "x.png").write_bytes(content)
        assert_refused(tmp_path / "x.png")


def test_what_may_not_be_read_is_refused(tmp_path, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    picture().save(tmp_path / "x.png")
    monkeypatch.setattr("PIL.Image.open", denied)  # a test may run as root, who may read anything
    assert_refused(tmp_path / "x.png", "permissions")


def encoded(name, **options):
    buffer = io.BytesIO()
    Image.fromarray(RGB).resize((64, 48)).save(buffer, name, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"])
def test_files_cut_short_are_read_or_refused(tmp_path, kind):
    content, path = encoded(kind), tmp_path / "x"
    refused = 0
    for part in range(20):
        path.write_bytes(content[: len(content) * part // 20])
        try:
            assert read_image(path).shape == (3, 48, 64)
        except ImageError as error:
            refused += 1
            assert str(path) in str(error)  # noqa: PT017 (some formats forgive a missing end)
            assert "\n" not in str(error)  # noqa: PT017
    assert refused > 5


@pytest.mark.parametrize("side", [13_000, 20_000])
def test_images_of_far_too_many_pixels_are_refused_unread(tmp_path, side):
    line = bytes(1 + (side + 7) // 8)  # one bit for each pixel
    packer = zlib.compressobj(9)
    content = b"".join(packer.compress(line) for _ in range(side)) + packer.flush()
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", content), (b"IEND", b"")]
    path = tmp_path / "x.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*c) for c in chunks))
    assert path.stat().st_size < 200_000
    assert_refused(path, "too large", "89 million")


def test_pillows_limit_is_not_changed_for_others(tmp_path):
    limit = Image.MAX_IMAGE_PIXELS
    picture().save(tmp_path / "x.png")
    read_image(tmp_path / "x.png")
    assert limit == Image.MAX_IMAGE_PIXELS


# Finding.


@pytest.fixture
def folder(tmp_path):
    for name in ("b.png", "a.jpg", "deep/er/c.webp", "deep/D.PNG", "notes.txt", "paper.pdf"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"content does not matter")
    return tmp_path / "photos"


def found(folder, *arguments):
    return [os.path.relpath(p, folder) for p in find_images(str(folder / a) for a in arguments)]


def test_folders_give_their_images_in_order(folder):
    assert found(folder, ".") == ["a.jpg", "b.png", "deep/D.PNG", "deep/er/c.webp"]
    assert found(folder, "deep") == ["deep/D.PNG", "deep/er/c.webp"]


def test_a_folder_with_an_images_name_is_no_image(folder):
    (folder / "deep" / "trap.png").mkdir()
    assert found(folder, "deep") == ["deep/D.PNG", "deep/er/c.webp"]


def test_files_are_taken_as_they_are_in_the_order_given(folder):
    assert found(folder, "notes.txt", "b.png", "missing.png") == [
        "notes.txt",
        "b.png",
        "missing.png",
    ]


@pytest.mark.parametrize(
    ("pattern", "files"),
    [
        ("*.png", ["b.png"]),
        ("*", ["a.jpg", "b.png", "notes.txt", "paper.pdf"]),
        ("[ab].*", ["a.jpg", "b.png"]),
        ("**/*.webp", ["deep/er/c.webp"]),
        ("?.png", ["b.png"]),
    ],
)
def test_globs_give_the_files_they_match(folder, pattern, files):
    assert found(folder, pattern) == files


def test_each_file_comes_once(folder):
    assert found(folder, "b.png", "*.png", ".", "b.png")[0] == "b.png"
    assert len(found(folder, "b.png", "*.png", ".", "b.png")) == 4


def test_a_file_that_looks_like_a_glob_is_a_file(folder):
    (folder / "x[1].png").write_bytes(b"")
    (folder / "x1.png").write_bytes(b"")
    assert found(folder, "x[1].png") == ["x[1].png"]


def test_paths_may_be_relative(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert find_images(["b.png", "deep/*.PNG"]) == [Path("b.png"), Path("deep/D.PNG")]


def test_files_of_twelve_bits_in_sixteen_are_told_of(tmp_path):
    images._told.clear()
    values = np.linspace(0, 4095, 64).astype(np.uint16).reshape(8, 8)
    for i in range(2):
        Image.fromarray(values).save(tmp_path / f"{i}.png")
    with pytest.warns(UserWarning, match="10 or 12 bits"):
        pixels = images.read_pixels(tmp_path / "0.png")
    assert pixels.max() == 16
    images.read_pixels(tmp_path / "1.png")  # once is enough: here it would be an error
