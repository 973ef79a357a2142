"""The object that explaining hands over: its parts, its windows, its file."""

import io
import re
from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchbcos as tb
from torchbcos import Explanation


def explanation(n=3, k=4, channels=6, height=5, width=7, *, seed=0, dtype=torch.float32, **extra):
    """Random, with every tensor different; its numbers need not add up."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    return Explanation(
        outputs=draw(n, k),
        targets=torch.randint(0, 10, (n, k), generator=generator),
        weights=draw(n, k, channels, height, width),
        contributions=draw(n, k, height, width),
        bias=draw(n, k),
        residual=draw(n, k) * 1e-6,
        **extra,
    )


def full(**options):
    """With every optional part there is."""
    e = explanation(**options)
    positions = torch.arange(e.outputs.numel() * 2).view(*e.outputs.shape, 2)
    names = ("cat", "dög", "a b", "x", "y", "z", "u", "v", "w", "猫")
    return replace(e, positions=positions, classes=names, layer="layer3.1", statistics="batch")


def tensors(e):
    values = {f.name: getattr(e, f.name) for f in fields(e)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def others(e):
    return {f.name: getattr(e, f.name) for f in fields(e) if f.name not in tensors(e)}


def assert_equal(one, other):
    assert others(one) == others(other)
    assert tensors(one).keys() == tensors(other).keys()
    for name, value in tensors(one).items():
        assert value.dtype == tensors(other)[name].dtype, name
        assert torch.equal(value, tensors(other)[name]), name


def test_it_cannot_be_changed_by_accident():
    with pytest.raises(FrozenInstanceError):
        explanation().outputs = None


def test_delta_is_the_difference_of_two_contribution_maps():
    e = explanation()
    assert torch.equal(e.delta(2, 0), e.contributions[:, 2] - e.contributions[:, 0])
    assert torch.equal(e.delta(-1, 1), e.contributions[:, 3] - e.contributions[:, 1])
    assert e.delta(0, 1).shape == (3, 5, 7)


@pytest.mark.parametrize(("i", "j", "part"), [(4, 0, "`i` (=4)"), (0, -5, "`j` (=-5)")])
def test_delta_of_a_target_that_is_not_there(i, j, part):
    with pytest.raises(IndexError, match=re.escape(part) + ".* beyond 4 targets"):
        explanation().delta(i, j)


@pytest.mark.parametrize("k", [1, 3, 4])
def test_top_takes_the_largest_outputs_of_each_image_with_all_their_parts(k):
    e = full()
    top = e.top(k)
    order = np.argsort(-e.outputs.numpy(), axis=1)[:, :k]
    assert len({tuple(row) for row in order.tolist()}) > 1
    for name, value in tensors(e).items():
        expected = np.stack([value.numpy()[n, row] for n, row in enumerate(order)])
        assert np.array_equal(tensors(top)[name].numpy(), expected), name
    assert others(top) == others(e)


@pytest.mark.parametrize("k", [0, 5, -1])
def test_top_of_more_targets_than_there_are(k):
    with pytest.raises(ValueError, match=rf"`k` \(={k}\) must be from 1 to 4"):
        explanation().top(k)


INDICES = {
    "an integer": (1, [1]),
    "a negative integer": (-1, [2]),
    "a numpy integer": (np.int64(1), [1]),
    "a slice": (slice(1, None), [1, 2]),
    "a list": ([2, 0], [2, 0]),
    "a tensor": (torch.tensor([2, 2, 1]), [2, 2, 1]),
    "a mask": (torch.tensor([True, False, True]), [0, 2]),
}


@pytest.mark.parametrize(("index", "images"), INDICES.values(), ids=INDICES)
def test_indexing_picks_images_and_keeps_the_batch_dimension(index, images):
    e = full()
    picked = e[index]
    assert len(picked) == len(images)
    for name, value in tensors(e).items():
        assert torch.equal(tensors(picked)[name], value[torch.tensor(images)]), name
    assert others(picked) == others(e)


@pytest.mark.parametrize("index", [3, -4, [0, 3]])
def test_an_index_beyond_the_images(index):
    with pytest.raises(IndexError):
        explanation()[index]


@pytest.mark.parametrize("index", [(0, 1), torch.tensor(1), None], ids=repr)
def test_what_would_lose_or_add_a_dimension_is_no_index(index):
    with pytest.raises((TypeError, IndexError)):
        explanation()[index]


def test_it_has_a_length_and_can_be_looped_over():
    e = full()
    each = list(e)
    assert len(e) == len(each) == 3
    for n, one in enumerate(each):
        assert_equal(one, e[n])


def test_to_moves_floats_and_keeps_indices():
    e = full()
    half = e.to(torch.float16)
    for name, value in tensors(e).items():
        expected = value.half() if value.is_floating_point() else value
        assert tensors(half)[name].dtype == expected.dtype
        assert torch.equal(tensors(half)[name], expected)
    assert all(t.device.type == "meta" for t in tensors(e.to("meta")).values())
    both = e.to(device="meta", dtype=torch.float64)
    assert (both.outputs.dtype, both.targets.dtype) == (torch.float64, torch.int64)
    assert others(both) == others(e)


# Files.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("make", [explanation, full])
def test_save_and_load_give_the_same_again(tmp_path, make, dtype):
    e = make(dtype=dtype)
    e.save(tmp_path / "e")  # no .npz is added
    assert [p.name for p in tmp_path.iterdir()] == ["e"]
    assert_equal(Explanation.load(tmp_path / "e"), e)


@pytest.mark.parametrize("classes", [("only",), ("",), ("tail ", " head")], ids=repr)
def test_class_names_survive_the_file(tmp_path, classes):
    e = explanation(classes=classes)
    e.save(str(tmp_path / "e.npz"))
    assert Explanation.load(str(tmp_path / "e.npz")).classes == classes


def test_bfloat16_is_stored_in_float32(tmp_path):
    e = explanation(dtype=torch.bfloat16)
    e.save(tmp_path / "e.npz")
    again = Explanation.load(tmp_path / "e.npz")
    assert_equal(again, e.to(torch.float32))


def test_numpy_reads_the_file(tmp_path):
    e = full()
    e.save(tmp_path / "e.npz")
    with np.load(tmp_path / "e.npz", allow_pickle=False) as stored:
        assert np.array_equal(stored["weights"], e.weights.numpy())
        assert str(stored["layer"]) == "layer3.1"


def test_tensors_that_carry_gradients_are_saved(tmp_path):
    e = explanation()
    replace(e, weights=e.weights.requires_grad_()).save(tmp_path / "e.npz")
    assert not Explanation.load(tmp_path / "e.npz").weights.requires_grad


def assert_refused(path):
    with pytest.raises(ValueError, match=r"no explanation that \.save wrote") as error:
        Explanation.load(path)
    assert str(path) in str(error.value)


def small_file():
    buffer = io.BytesIO()
    e = full(n=1, k=1, channels=2, height=2, width=2)
    arrays = {n: v.numpy() for n, v in tensors(e).items()}
    np.savez_compressed(buffer, **arrays, classes=np.array(e.classes), layer=np.array(e.layer))
    return buffer.getvalue()


def test_a_file_cut_short_anywhere_is_refused(tmp_path):
    content, path = small_file(), tmp_path / "e.npz"
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        assert_refused(path)


def test_a_file_with_a_changed_byte_is_refused_or_read_but_never_fails_otherwise(tmp_path):
    content, path = small_file(), tmp_path / "e.npz"
    refused = 0
    for position in range(0, len(content), 3):
        damaged = bytearray(content)
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        try:
            assert isinstance(Explanation.load(path), Explanation)
        except ValueError as error:
            refused += 1
            assert str(path) in str(error)  # noqa: PT017 (not every change is damage)
    assert refused > len(content) / 3 / 2


def npz(**arrays):
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


STORED = {name: value.numpy() for name, value in tensors(full()).items()}
OTHER_FILES = {
    "text": b"not at all",
    "an array": npy(np.zeros(3)),
    "objects": npz(outputs=np.array([{}], dtype=object)),
    "a part missing": npz(**{k: v for k, v in STORED.items() if k != "weights"}),
    "a part too many": npz(**STORED, more=np.zeros(3)),
    "an empty archive": npz(),
}


@pytest.mark.parametrize("content", OTHER_FILES.values(), ids=OTHER_FILES)
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "e.npz").write_bytes(content)
    assert_refused(tmp_path / "e.npz")


def test_a_folder_is_refused(tmp_path):
    assert_refused(tmp_path)


def test_a_missing_file_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        Explanation.load(tmp_path / "none.npz")


# Windows.

#: (kernel, stride, padding, dilation) of each layer
STACK = [(3, 1, 1, 1), (5, 2, 2, 1), (3, 1, 2, 2), (2, 2, 0, 1)]


def receptive_field(layers, at, size):
    """First and one past the last pixel that position `at` of the last layer's output sees."""
    low = high = at
    for kernel, stride, padding, dilation in reversed(layers):
        low = low * stride - padding
        high = high * stride - padding + dilation * (kernel - 1)
    return max(low, 0), min(high, size - 1) + 1


def test_the_receptive_field_by_hand():
    # 4: output 1 sees 2..3; 3: taps 0..4 of 2 and 3, less 2: 0..5; 2: -2..12; 1: -3..13
    assert receptive_field(STACK, 1, 40) == (0, 14)
    assert receptive_field(STACK[:1], 5, 40) == (4, 7)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_the_window_of_an_inner_unit_is_its_receptive_field(depth):
    torch.manual_seed(0)
    network = nn.Sequential(
        *(tb.BcosConv2d(6 if i == 0 else 3, 3, k, s, p, d) for i, (k, s, p, d) in enumerate(STACK))
    ).double()
    x = torch.rand(1, 6, 40, 36, dtype=torch.float64)
    last = network[:depth](x)
    places = {(0, 0), (2, 3), (last.shape[2] - 1, last.shape[3] - 1)}
    for y, x_ in sorted(places):
        e = tb.explain(network, x, layer=str(depth - 1), unit=(1, y, x_))
        top, bottom = receptive_field(STACK[:depth], y, 40)
        left, right = receptive_field(STACK[:depth], x_, 36)
        assert e.window() == (top, left, bottom, right)
        cut = e.crop()
        assert cut.weights.shape[-2:] == (bottom - top, right - left)
        assert torch.equal(cut.weights, e.weights[..., top:bottom, left:right])
        assert torch.equal(cut.contributions, e.contributions[..., top:bottom, left:right])
        assert torch.allclose(cut.contributions.sum(), cut.outputs.sum(), rtol=1e-10)


def spot(height=9, width=11):
    """Weights that are zero but for a box: rows 2..4, columns 6..9 of target 1 of image 1."""
    e = explanation(2, 2, height=height, width=width)
    weights = torch.zeros_like(e.weights)
    weights[1, 1, 0, 2, 6] = 1.0
    weights[1, 1, 5, 4, 9] = -2.0
    return replace(e, weights=weights)


def test_the_window_is_the_smallest_box_with_any_weight():
    e = spot()
    assert e.window(1, 1) == e.window(-1, -1) == (2, 6, 5, 10)
    assert e.window(0, 0) == (0, 0, 9, 11)  # nothing anywhere: the whole image


def test_crop_takes_one_target_of_one_image():
    e = spot()
    for cut in (e.crop(1, 1), e.crop(-1, -1)):
        assert cut.weights.shape == (1, 1, 6, 3, 4)
        assert torch.equal(cut.weights[0, 0], e.weights[1, 1, :, 2:5, 6:10])
        assert torch.equal(cut.contributions[0, 0], e.contributions[1, 1, 2:5, 6:10])
        assert torch.equal(cut.outputs, e.outputs[1:, 1:])
        assert torch.equal(cut.targets, e.targets[1:, 1:])


@pytest.mark.parametrize(
    ("size", "rows", "columns"),
    [(1, (3, 4), (7, 8)), (3, (2, 5), (6, 9)), (5, (1, 6), (5, 10)), (9, (0, 9), (2, 11))],
)
def test_crop_of_a_given_size_is_centred_as_far_as_the_border_allows(size, rows, columns):
    e = spot()
    cut = e.crop(1, 1, size=size)
    expected = e.contributions[1, 1, slice(*rows), slice(*columns)]
    assert torch.equal(cut.contributions[0, 0], expected)


@pytest.mark.parametrize("size", [0, 10])
def test_crop_of_an_impossible_size(size):
    with pytest.raises(ValueError, match=rf"`size` \(={size}\) must be from 1 to 9"):
        spot().crop(1, 1, size=size)


# Text.


def test_repr_says_what_was_explained_and_how_well():
    e = explanation(1, 1)
    e = replace(e, outputs=torch.tensor([[-4.0]]), residual=torch.tensor([[1e-3]]))
    assert repr(e) == (
        "Explanation of logits: 1 image × 1 target, W(x) of 6×5×7, residual at most 2.5e-04 of "
        "the largest output"
    )
    text = repr(full())
    assert text.startswith("Explanation of layer 'layer3.1': 3 images × 4 targets, W(x) of 6×5×7")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_repr_of_zeros_is_no_division_by_zero(dtype):
    zeros = explanation(dtype=dtype)._each(torch.zeros_like)
    assert "residual at most 0.0e+00" in repr(zeros)


def test_of_no_images_it_prints_no_residual():
    assert repr(full()[0:0]).startswith("Explanation of ")
    assert "residual" not in repr(full()[0:0])
    assert "0 images × 4 targets" in repr(full()[0:0])
