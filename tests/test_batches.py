"""Class folders, in memory and streamed: the same batches, and bad files are named or counted."""

import io
import json
import math
import multiprocessing
import os
import re
import shutil
import signal

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from torch import nn

from small_training import QUIET, Processes, assert_same_weights, config, ended, weights
from torchbcos import localise_run, train
from torchbcos.augment import AUGMENTATIONS
from torchbcos.batches import Batches, at_once, find_damaged, in_order
from torchbcos.data import DataError, ImageFiles, Images, open_data, write_packed
from torchbcos.evaluate import evaluate, tally

CPU = torch.device("cpu")


def draw(path, seed, size=(20, 20), **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, **options)


@pytest.fixture
def folder(tmp_path):
    """Two classes, 12 training and 5 test images of 20×20."""
    for i in range(12):
        draw(tmp_path / "data" / "train" / "ab"[i % 2] / f"{i:02}.png", i)
    for i in range(5):
        draw(tmp_path / "data" / "val" / "ab"[i % 2] / f"{i}.png", 100 + i)
    return tmp_path / "data"


def settings(folder, **changes):
    ours = {"data": str(folder), "batch": 4, "augment": ("flip", "padded_crop"), "epochs": 2}
    return config(**{**ours, **changes})


def batches_of(images, c, steps=range(7), **how):
    made = Batches(images, c, CPU, **how)
    following = made.following(steps[0])
    return [next(following) for _ in steps]


def assert_same_batches(some, others):
    for (x, labels), (y, other_labels) in zip(some, others, strict=True):
        assert torch.equal(labels, other_labels)
        assert torch.equal(x, y)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("cutmix", [0.0, 0.7])
def test_streamed_batches_are_those_in_memory(folder, workers, cutmix):
    names = ("flip", "padded_crop", "colour_jitter", "rand_augment", "erase")
    c = settings(folder, augment=names, cutmix=cutmix)
    memory, files = open_data(folder), open_data(folder, memory=0)
    assert isinstance(memory.train, Images)
    assert isinstance(files.train, ImageFiles)
    assert memory.classes == files.classes == ("a", "b")
    expected = batches_of(memory.train, c, classes=2)
    how = {"workers": workers, "classes": 2}
    assert_same_batches(batches_of(files.train, c, **how), expected)
    assert_same_batches(batches_of(files.train, c, range(3, 7), **how), expected[3:])
    assert_same_batches([Batches(files.train, c, CPU, **how).at(i) for i in range(7)], expected)


@pytest.mark.parametrize("memory", [0, 1])
def test_labels_say_how_much_of_each_class_is_in_a_mixed_image(tmp_path, memory):
    """Images that are all black or all white show their labels."""
    for i in range(24):
        path = tmp_path / "train" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20), (255 * (i % 2),) * 3).save(path)
        if i < 2:
            draw(tmp_path / "val" / "ab"[i] / "0.png", i)
    images = open_data(tmp_path, memory=memory).train
    c = settings(tmp_path, augment=(), cutmix=1.0, batch=24)
    how = {"classes": 2, "workers": 0}
    made = batches_of(images, c, range(3), **how)
    for x, labels in made:
        assert torch.allclose(labels[:, 1], x.mean((1, 2, 3)), atol=1e-6)
        assert torch.allclose(labels.sum(1), torch.ones(24))
        assert ((labels > 0.01) & (labels < 0.99)).any()
    halves = [batches_of(images, c, range(3), rank=r, world=2, **how) for r in range(2)]
    joined = [
        tuple(torch.cat(pair) for pair in zip(*both, strict=True))
        for both in zip(*halves, strict=True)
    ]
    assert_same_batches(joined, made)


@pytest.mark.parametrize("world", [1, 2])
def test_draws_of_a_step_come_packed_in_the_order_of_the_augmentations(folder, world):
    names = ("rand_augment", "padded_crop", "lighting", "flip")
    c = settings(folder, augment=names, operations=3, magnitude=20.0)
    made = Batches(open_data(folder).train, c, CPU, rank=world - 1, world=world)
    images, labels = made.images.batch(made._plan(5, made._share)[0])
    for name in names:
        draws = made._draw(5, name)[:, made._share]
        assert len(draws) == {"rand_augment": 6, "padded_crop": 2, "lighting": 3, "flip": 1}[name]
        strength = {"m": 20.0} if name == "rand_augment" else {}
        images = AUGMENTATIONS[name].change(images, draws, **strength)
    assert_same_batches([made.at(5)], [(images, labels)])


def test_an_epoch_has_every_image_once_and_the_next_another_order(folder):
    c = settings(folder, augment=())
    images = open_data(folder).train
    seen = torch.cat([x for x, _ in batches_of(images, c, range(6))])
    first, second = seen[:12], seen[12:]
    rows = {tuple(x.flatten()[:6].tolist()) for x in first}
    assert rows == {tuple(x.flatten()[:6].tolist()) for x in second}
    assert len(rows) == 12
    assert not torch.equal(first, second)


@pytest.mark.parametrize("workers", [0, 2])
def test_streamed_batches_follow_the_schedule_of_sizes(folder, workers):
    # 12 images, 4 a step and 2 epochs are 6 steps: two of each size.
    c = settings(folder, augment=("resized_crop", "flip"), train_sizes=(8, 12, 16))
    sizes = [8, 8, 12, 12, 16, 16, 16]
    for memory in (0, 1):
        made = batches_of(open_data(folder, memory=memory).train, c, workers=workers)
        assert [tuple(x.shape) for x, _ in made] == [(4, 3, s, s) for s in sizes]
        later = batches_of(open_data(folder, memory=memory).train, c, range(3, 7), workers=workers)
        assert_same_batches(later, made[3:])


def test_smaller_training_images_show_the_whole_where_nothing_is_cut(folder):
    images = open_data(folder).train
    (small, _), (whole, _) = (
        Batches(images, settings(folder, augment=(), train_sizes=sizes), CPU).at(0)
        for sizes in ((8,), ())
    )
    for x, image in zip(small.flatten(0, 1), whole.flatten(0, 1), strict=True):
        by_pillow = Image.fromarray(image.numpy()).resize((8, 8), Image.Resampling.BILINEAR)
        assert np.allclose(x, np.asarray(by_pillow), atol=1e-5)


@pytest.mark.parametrize("memory", [0, 1])
def test_two_processes_share_each_batch(folder, memory):
    c = settings(folder, augment=("resized_crop", "flip", "lighting"))
    images = open_data(folder, memory=memory).train
    whole = batches_of(images, c, workers=0)
    shares = [batches_of(images, c, rank=r, world=2, workers=0) for r in (0, 1)]
    for (x, labels), one, two in zip(whole, *shares, strict=True):
        torch.testing.assert_close(torch.cat([one[0], two[0]]), x)
        assert torch.equal(torch.cat([one[1], two[1]]), labels)


def test_a_streamed_crop_sees_the_part_that_its_numbers_say(tmp_path):
    # Red grows from left to right, green from top to bottom, so colours tell the place.
    width, height = 600, 400
    x, y = np.meshgrid(np.arange(width) / width, np.arange(height) / height)
    pixels = np.stack([x, y, np.full_like(x, 0.5)], 2) * 255
    for name in ("train/a", "train/b", "val/a"):
        path = tmp_path / name / "1.png"
        path.parent.mkdir(parents=True)
        Image.fromarray(pixels.round().astype(np.uint8)).save(path)
    images = open_data(tmp_path, size=64, memory=0).train
    area, ratio, left, top = 0.25, 1.2, 0.3, 0.8
    seen, _ = images.batch(torch.tensor([0]), torch.tensor([[area, ratio, left, top]]))
    w = math.sqrt(area * width * height * ratio) / width
    h = math.sqrt(area * width * height / ratio) / height
    x0, y0 = left * (1 - w), top * (1 - h)
    expected = x0 + w * (np.arange(64) + 0.5) / 64
    assert np.allclose(seen[0, 0].mean(0).numpy(), expected, atol=0.006)
    expected = y0 + h * (np.arange(64) + 0.5) / 64
    assert np.allclose(seen[0, 1].mean(1).numpy(), expected, atol=0.006)


def test_images_of_any_shape_become_squares_from_their_centre(tmp_path):
    for i, size in enumerate([(50, 30), (30, 50), (31, 31), (200, 90)]):
        for part in ("train", "val"):
            draw(tmp_path / part / "ab"[i % 2] / f"{i}.jpg", i, size)
    for memory in (0, 1):
        data = open_data(tmp_path, size=24, memory=memory)
        x, _ = data.train.batch(torch.arange(4))
        assert x.shape == (4, 3, 24, 24)


def test_test_images_may_be_cut_closer(tmp_path):
    for part in ("train", "val"):
        for name in "ab":
            draw(tmp_path / part / name / "1.png", 0, (64, 64))
    data = open_data(tmp_path, size=56, memory=0, part=0.875)
    with Image.open(data.test.files[0]) as image:
        centre = np.asarray(image)[4:60, 4:60]
    assert np.array_equal(data.test.decode(torch.tensor([0]))[0][0].permute(1, 2, 0), centre)
    assert data.train.part == 1.0


@pytest.mark.parametrize("memory", [0, 1])
def test_evaluation_counts_each_image_once_however_shared(folder, memory):
    data = open_data(folder, memory=memory)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(1200, 2))
    shares = [tally(model, data.test, 2, rank=r, world=3, workers=1) for r in range(3)]
    right, loss, count = sum(shares).tolist()
    assert count == 5
    assert evaluate(model, data.test) == pytest.approx((right / 5, loss / 5))
    assert model.training
    x, labels = data.test.batch(torch.arange(5))
    assert right == (model(x).argmax(1) == labels).sum()
    assert len(list(in_order(data.test, 2, CPU, workers=1))) == 3


# Training from a stream.


def test_a_streamed_training_resumes_to_the_same_weights_and_draws(folder, tmp_path, monkeypatch):
    c = settings(folder, memory=0, augment=("resized_crop", "flip"), size=16)
    whole = train.train(c, tmp_path / "whole", console=QUIET, workers=2, pictures=2)
    assert (tmp_path / "whole" / "epoch-002.png").stat().st_size > 1000
    advance = train._Run.advance

    def stop(run, *batch):
        advance(run, *batch)
        if run.state.step == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train._Run, "advance", stop)
        with pytest.raises(KeyboardInterrupt):
            train.train(c, tmp_path / "stopped", console=QUIET, workers=1)
    again = train.train(c, tmp_path / "stopped", console=QUIET, workers=1, resume=True)
    assert_same_weights(weights(whole), weights(again))


def _train_with_killed_readers(settings, out):
    multiprocessing.set_start_method("fork", force=True)  # as usual; this one came from a server
    advance = train._Run.advance

    def kill_readers(run, *batch):
        if run.state.step == 2:
            for process in multiprocessing.active_children():
                os.kill(process.pid, signal.SIGKILL)
        advance(run, *batch)

    train._Run.advance = kill_readers
    try:
        train.train(settings, out, console=QUIET, workers=1)
    except train.TrainError as error:
        out.with_name("said").write_text(str(error))


def test_a_reader_that_is_killed_ends_the_run_in_a_sentence(folder, tmp_path):
    """In another process: torch raises from a signal handler, which may leave a lock locked."""
    c = settings(folder, memory=0, epochs=90)
    arguments = (c, tmp_path / "run")
    process = Processes().context.Process(target=_train_with_killed_readers, args=arguments)
    process.start()
    ended(process)
    assert re.search(r"read images was killed.*--resume", (tmp_path / "said").read_text())


def test_resuming_on_other_data_is_refused(folder, tmp_path):
    c = settings(folder, epochs=1)
    train.train(c, tmp_path / "run", console=QUIET)
    draw(folder / "train" / "a" / "new.png", 5)
    with pytest.raises(ValueError, match="holds 13 images for training, but had 12"):
        train.train(c, tmp_path / "run", console=QUIET, resume=True)


# Bad data.


@pytest.fixture
def damaged(folder):
    """A cut JPEG and a text that calls itself an image, among good ones."""
    draw(folder / "train" / "a" / "cut.jpg", 0, (90, 90), quality=95)
    content = (folder / "train" / "a" / "cut.jpg").read_bytes()
    (folder / "train" / "a" / "cut.jpg").write_bytes(content[: len(content) // 2])
    (folder / "val" / "b" / "text.png").write_text("no image")
    return folder


@pytest.mark.parametrize("memory", [0, 1])
def test_a_damaged_image_is_named_before_training(damaged, tmp_path, memory):
    with pytest.raises(DataError, match=r"1 of 13 images cannot be read: .*cut\.jpg.*bad='skip'"):
        train.train(settings(damaged, memory=memory), tmp_path / "run", console=QUIET, workers=1)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("memory", [0, 1])
def test_damaged_images_are_skipped_with_a_count(damaged, tmp_path, memory):
    console = Console(record=True, width=200, file=io.StringIO())
    c = settings(damaged, memory=memory, bad="skip", epochs=1)
    train.train(c, tmp_path / "run", console=console, workers=1)
    said = console.export_text()
    assert "skipped 2, the first:" in said
    assert "cut.jpg" in said
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["step"] == 3  # 12 good images in batches of 4


def test_what_was_found_is_kept_for_the_next_start(damaged, tmp_path, monkeypatch):
    images = open_data(damaged, memory=0).train
    record = tmp_path / "record.json"
    found = find_damaged(images, record, workers=2)
    assert [images.files[i] for i in found] == [str(damaged / "train" / "a" / "cut.jpg")]
    monkeypatch.setattr("torchbcos.batches.check_image", lambda _: pytest.fail("searched again"))
    assert find_damaged(images, record, workers=0) == found
    monkeypatch.undo()
    draw(damaged / "train" / "a" / "cut.jpg", 3)  # mended
    assert find_damaged(images, record, workers=0) == {}


@pytest.mark.parametrize("memory", [4.0, 0.0])
def test_the_size_is_that_of_the_first_image_that_can_be_read(folder, memory):
    (folder / "train" / "a" / "00.png").write_bytes(b"no image")
    split = open_data(folder, bad="skip", memory=memory)
    assert split.train.size == (20, 20)
    if memory:
        assert len(split.train) == 11
        with pytest.raises(DataError, match=r"1 of 12 images cannot be read.*00\.png"):
            open_data(folder)
    for file in folder.rglob("*.png"):
        file.write_bytes(b"no image")
    with pytest.raises(DataError, match="none of 12 images can be read"):
        open_data(folder, bad="skip", memory=memory)


def test_a_file_that_breaks_during_training_is_named(folder):
    images = open_data(folder, memory=0).train
    (folder / "train" / "a" / "00.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"00\.png"):
        batches_of(images, settings(folder), range(3), workers=1)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("train/c", r"train/c holds no images: fill it or remove the class, or set bad='skip'"),
        ("val/c", r"val has the class 'c', which train lacks"),
    ],
)
def test_classes_that_do_not_fit_are_named_or_skipped(folder, place, words):
    (folder / place).mkdir()
    if place.startswith("val"):
        draw(folder / place / "1.png", 1)
    with pytest.raises(DataError, match=words):
        open_data(folder)
    data = open_data(folder, bad="skip")
    assert data.classes == ("a", "b")
    assert len(data.skipped) == 1
    assert (len(data.train), len(data.test)) == (12, 5)


def test_what_is_hidden_is_not_looked_at(folder):
    for place in ("train/.cache", "train/a/.ipynb_checkpoints", "val/a"):
        (folder / place).mkdir(exist_ok=True)
        draw(folder / place / "._1.png", 1)
        if place != "val/a":
            draw(folder / place / "1.png", 1)
    data = open_data(folder)
    assert (data.classes, len(data.train), len(data.test)) == (("a", "b"), 12, 5)


def test_links_are_followed_once(folder, tmp_path):
    for i in range(3):
        draw(tmp_path / "more" / f"{i}.png", i)
    for link in ("train/a/more", "train/a/again"):
        (folder / link).symlink_to(tmp_path / "more")
    (tmp_path / "more" / "up").symlink_to(folder / "train" / "a")
    assert len(open_data(folder).train) == 12 + 3


def test_only_what_is_asked_for_must_be_there(folder):
    (folder / "train" / "c").mkdir()
    assert open_data(folder, only="test").classes == ("a", "b", "c")
    for only in ("", "test"):  # the classes that a training on it has
        assert open_data(folder, only=only, bad="skip").classes == ("a", "b")
    (folder / "val" / "c").mkdir()
    with pytest.raises(DataError, match=r"remove the class\.$"):  # a setting is no advice here
        open_data(folder, only="test")


def test_a_class_without_test_images_is_named(folder):
    for file in (folder / "val" / "b").iterdir():
        file.unlink()
    with pytest.raises(DataError, match="val/b holds no images"):
        open_data(folder)
    assert set(open_data(folder, bad="skip").test.labels.tolist()) == {0}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: None, "is no folder"),
        (lambda p: p.mkdir(), "must hold the folders train and val"),
        (lambda p: draw(p / "train" / "a" / "1.png", 0), "must hold the folders train and val"),
        (
            lambda p: [draw(p / s / "a" / "1.png", 0) for s in ("train", "val")],
            "at least two classes",
        ),
    ],
)
def test_folders_without_a_data_set_are_refused(tmp_path, make, words):
    make(tmp_path / "data")
    with pytest.raises(DataError, match=words):
        open_data(tmp_path / "data")


@pytest.mark.parametrize("only", ["train", "test"])
def test_only_one_set_is_read(folder, only):
    """A damaged image of the other is not noticed."""
    other = {"train": "val", "test": "train"}[only]
    (folder / other / "a" / "text.png").write_text("no image")
    whole, data = open_data(folder, bad="skip"), open_data(folder, only=only)
    assert torch.equal(getattr(data, only).pixels, getattr(whole, only).pixels)
    assert isinstance(getattr(data, {"train": "test", "test": "train"}[only]), ImageFiles)
    assert data.classes == whole.classes


@pytest.mark.parametrize("place", ["", "val"])
def test_test_images_need_no_training_images(folder, place):
    whole = open_data(folder).test
    shutil.rmtree(folder / "train")
    data = open_data(folder / place, only="test")
    assert torch.equal(data.test.pixels, whole.pixels)
    assert (data.classes, len(data.train)) == (("a", "b"), 0)
    (folder / "val" / "c").mkdir()
    with pytest.raises(DataError, match="val/c holds no images: fill it or remove"):
        open_data(folder / place, only="test")
    data = open_data(folder / place, only="test", bad="skip")
    assert data.classes == ("a", "b")
    assert len(data.skipped) == 1


def test_the_wrong_folder_for_test_images_is_refused(folder):
    with pytest.raises(DataError, match="must hold folders of images of at least two classes"):
        open_data(folder / "val" / "a", only="test")
    with pytest.raises(DataError, match=r"`only` \(='val'\) must be 'train', 'test' or ''"):
        open_data(folder, only="val")


@pytest.mark.parametrize("form", ["bin", "py"])
def test_cifar_has_one_size(tmp_path, form):
    (tmp_path / f"cifar-10-batches-{form}").mkdir()
    with pytest.raises(DataError, match="holds images of 32×32 pixels, not of 64: ask for 32"):
        open_data(tmp_path, 64)


def test_a_full_disk_is_named_when_decoded_images_are_written(folder, tmp_path):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    split = open_data(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # Python ignores its signal
    try:
        with pytest.raises(DataError, match=r"packed cannot hold the decoded .* disk full\?"):
            write_packed(split, tmp_path / "packed")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    write_packed(split, tmp_path / "packed")
    assert torch.equal(open_data(tmp_path / "packed").train.pixels, split.train.pixels)


def test_cifar_in_its_binary_form(tmp_path):
    generator = np.random.default_rng(0)
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    tables = {}
    for name in names:
        table = generator.integers(0, 256, (10_000, 3073), dtype=np.uint8)
        table[:, 0] %= 10
        (tmp_path / name).write_bytes(table.tobytes())
        tables[name] = table
    data = open_data(tmp_path)
    assert data.train.pixels.shape == (50_000, 3, 32, 32)
    assert data.classes[3] == "cat"
    row = tables["data_batch_2.bin"][17]
    assert data.train.labels[10_017] == row[0]
    assert np.array_equal(data.train.pixels[10_017].flatten(), row[1:])
    (tmp_path / "test_batch.bin").write_bytes(b"short")
    with pytest.raises(DataError, match="has 5 bytes"):
        open_data(tmp_path)


def test_a_terminal_shows_how_far_an_evaluation_is(folder):
    model, images = nn.Sequential(nn.Flatten(), nn.Linear(1200, 2)), open_data(folder).test
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=80)
    assert evaluate(model, images, 2, console=terminal) == evaluate(model, images, 2)
    assert "100%" in shown.getvalue()
    quiet = io.StringIO()
    evaluate(model, images, 2, console=Console(file=quiet))
    assert not quiet.getvalue()


@pytest.mark.parametrize(
    ("side", "cpu", "cuda"), [(32, 64, 500), (112, 64, 500), (224, 16, 167), (5000, 1, 1)]
)
def test_large_images_are_looked_at_few_at_a_time(side, cpu, cuda):
    for device, count in (("cpu", cpu), ("cuda", cuda), ("mps", cuda)):
        assert at_once((side, side), torch.device(device)) == count


def test_a_cpu_evaluates_and_predicts_few_large_images_at_a_time():
    seen = []

    class Mean(nn.Linear):
        def forward(self, x):
            seen.append(len(x))
            return super().forward(x.mean((2, 3)))

    pixels = torch.zeros(20, 3, 224, 224, dtype=torch.uint8)
    images = Images(pixels, torch.arange(20) % 4)
    evaluate(Mean(3, 4), images)
    assert seen == [16, 4]
    seen.clear()
    localise_run._predict(Mean(3, 4), images, 18, QUIET)
    assert seen == [16, 4]
