"""Image files as tensors in 0..1, whatever Pillow can read; and why not, where it cannot."""

from __future__ import annotations

import glob
import math
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

__all__ = [
    "ImageError",
    "check_image",
    "find_images",
    "image_size",
    "image_suffixes",
    "read_image",
    "read_pixels",
]

MOST = 89_000_000  # pixels; Pillow's own bound for what it opens
DARK = (
    "images of 16 bits are read as 0 to 65535, and this one has no value above 4095: if such ones "
    "are of 10 or 12 bits, scale them up, or nearly all is black."
)


class ImageError(ValueError):
    """A file that is no usable image; the message is one sentence with the file's name."""


def image_suffixes() -> frozenset[str]:
    """Of all files that Pillow reads, as in ".jpg"; not those that it only writes, as ".pdf"."""
    known = Image.registered_extensions().items()
    return frozenset(suffix for suffix, kind in known if kind in Image.OPEN)


def find_images(paths: Iterable[str], out: Path | None = None) -> list[Path]:
    """Files, the images in folders (by their suffix), and what globs match, each once, in order.

    Of a folder that contains the folder `out`, what lies in `out` is no image: it was made.
    """
    suffixes = image_suffixes()
    found: dict[Path, None] = {}
    for text in paths:
        path = Path(text)
        try:
            is_folder, exists = path.is_dir(), path.exists()
        except OSError as error:
            raise ImageError(f"{path} cannot be looked at: {error.strerror}.") from error
        if not text:
            raise ImageError("an empty name was given: name a file, a folder or a pattern.")
        if is_folder:
            inside = sorted(
                p for p in path.rglob("*") if p.suffix.lower() in suffixes and not p.is_dir()
            )
            if out is not None and path.resolve() in out.resolve().parents:
                inside = [p for p in inside if not p.parent.resolve().is_relative_to(out.resolve())]
            if not inside:
                raise ImageError(f"{path} is a folder without images: name a file or another one.")
            found.update(dict.fromkeys(inside))
        elif exists or not glob.has_magic(text):
            found[path] = None  # a missing file is reported when it is read
        else:
            matches = [Path(p) for p in sorted(glob.glob(text, recursive=True))]  # noqa: PTH207
            files = [p for p in matches if p.is_file()]
            if not files:
                raise ImageError(f"{text} matches no file: check the pattern.")
            found.update(dict.fromkeys(files))
    return list(found)


def read_image(
    path: Path | str, size: tuple[int, int] | None = None, channels: int = 3
) -> Tensor:  # [channels, H, W]
    """An image in 0..1, upright, on white where transparent, its first frame if it has several.

    With `size` = (height, width) the largest centred part of that shape is cut out and resized.
    """
    return read_pixels(path, size, channels).float() / 255


def read_pixels(
    path: Path | str,
    size: tuple[int, int] | None = None,
    channels: int = 3,
    *,
    part: float = 1.0,
    crop: Sequence[float] | None = None,
) -> Tensor:  # [channels, H, W] uint8
    """As `read_image`, in bytes.

    `part` is how much of the centred part's height and width stays; 0.875 is usual for ImageNet.
    `crop` takes another part: its share of the image's area, its width over its height, and in 0..1
    where it lies between left and right, top and bottom.
    """
    if channels not in (1, 3):
        raise ImageError(f"{path}: this model takes {channels} channels, image files give 1 or 3.")
    if size is not None and size[0] * size[1] > MOST:
        raise ImageError(f"{path} cannot be made {size[0]}×{size[1]} pixels: ask for fewer.")
    with _naming(path), Image.open(path) as file:
        if crop is not None and size is not None:  # a JPEG need not be decoded finer than this
            left, top, right, bottom = _box(file.size, crop)
            finest = max(size[1] / (right - left), size[0] / (bottom - top), 1e-9)
            file.draft(None, (int(file.width * finest), int(file.height * finest)))
        image = _to_rgb(ImageOps.exif_transpose(file), channels, path, file.format)
        if size is not None:
            shape = (size[1], size[0])
            image = (
                ImageOps.fit(image, shape, Image.Resampling.BILINEAR, bleed=(1 - part) / 2)
                if crop is None
                else image.resize(shape, Image.Resampling.BILINEAR, _box(image.size, crop))
            )
        pixels = np.array(image)
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    # By NumPy: torch would wake all cores for each small image, in every thread that reads one.
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def check_image(path: Path | str) -> None:
    """Raise what reading the image would raise; quicker, as a JPEG is decoded coarsely."""
    with _naming(path), Image.open(path) as file:
        file.draft(None, (1, 1))
        _to_rgb(file, 3, path, file.format)


def image_size(path: Path | str) -> tuple[int, int]:
    """(width, height) as the file says."""
    with _naming(path), Image.open(path) as file:
        return file.size


def _box(size: tuple[int, int], crop: Sequence[float]) -> tuple[float, float, float, float]:
    """(left, top, right, bottom) in pixels."""
    (width, height), (area, ratio, x, y) = size, crop
    w = min(math.sqrt(area * width * height * ratio), width)
    h = min(math.sqrt(area * width * height / ratio), height)
    left, top = x * (width - w), y * (height - h)
    return left, top, left + w, top + h


class _Filters:
    """Pillow's warnings as we want them while any thread is in here.

    Filters are the whole process's: the first thread in sets them, and the last one out puts back
    what was there.
    """

    def __init__(self) -> None:
        self.lock, self.threads = threading.Lock(), 0
        self.before = warnings.catch_warnings()

    def __enter__(self) -> None:
        with self.lock:
            self.threads += 1
            if self.threads == 1:
                self.before = warnings.catch_warnings()
                self.before.__enter__()
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                warnings.filterwarnings("ignore", category=UserWarning, module="PIL")

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.threads -= 1
            if self.threads == 0:
                self.before.__exit__(None, None, None)


_filters = _Filters()


@contextmanager
def _naming(path: Path | str) -> Iterator[None]:
    """Whatever goes wrong with a file becomes an `ImageError` with its name."""
    try:
        with _filters:
            yield
    except FileNotFoundError as error:
        raise ImageError(f"{path} does not exist: check the name.") from error
    except IsADirectoryError as error:
        raise ImageError(f"{path} is a folder, not an image.") from error
    except PermissionError as error:
        raise ImageError(f"{path} may not be read: check its permissions.") from error
    except UnidentifiedImageError as error:
        raise ImageError(f"{path} is no image that Pillow can read.") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError(
            f"{path} is too large: reduce it to less than 89 million pixels."
        ) from error
    except ImageError:
        raise
    except Exception as error:  # damaged files raise nearly anything in Pillow's decoders
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ImageError(f"{path} is damaged and cannot be decoded ({reason}).") from error


_told: set[str] = set()


def _tell_once(path: Path | str, words: str) -> None:
    """Of the first file alone."""
    if words not in _told:
        _told.add(words)
        warnings.warn(f"{path}: {words}", stacklevel=2)


def _to_rgb(image: Image.Image, channels: int, path: Path | str, kind: str | None) -> Image.Image:
    """8-bit RGB or grey, from any mode; `kind` is the file's, as "TIFF"."""
    if image.mode.startswith("I") or image.mode == "F":
        values = np.asarray(image, dtype=np.float64)
        low, high = float(values.min()), float(values.max())  # NaN if there is one
        if not (low >= 0 and high <= 65535):
            raise ImageError(
                f"{path} has values from {low:g} to {high:g}: scale them to 0..1, 8 or 16 bits."
            )
        if image.mode == "I" and kind == "TIFF":  # 32 bits; others keep 16 bits in this mode
            unit = 65535 if high > 255 else 255
        else:
            unit = 65535 if image.mode.startswith("I") or high > 255 else 255 if high > 1 else 1
        if unit == 65535 and 255 < high < 4096:
            _tell_once(path, DARK)
        image = Image.fromarray((values / unit * 255).round().astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB" if channels == 3 else "L")
