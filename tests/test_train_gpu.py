"""Training on a GPU: the captured step, the watch that never waits, and streams."""

import gc
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import torchbcos as tb
from small_training import QUIET, config, few_shapes, weights
from torchbcos import train
from torchbcos._cuda import cuda_settings
from torchbcos.augment import AUGMENTATIONS
from torchbcos.batches import Batches
from torchbcos.captured import as_graph, capture
from torchbcos.data import open_data

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ema": 0.5, "optimiser": "adamw", "warmup": 1, "cutmix": 0.5},
        # With norms Adam makes steps of rounding: of 1e-6 in the weights they become 4e-2. So the
        # steps are small here, and what the norms track is compared.
        {
            "train_sizes": (12, 16, 24),
            "options": {"width": 4, "norm": "uncentred"},
            "lr": 1e-6,
            "lr_end": 1e-6,
        },
        {"arch": "conventional/mini", "options": {"width": 4}, "lr": 1e-6, "lr_end": 1e-6},
    ],
)
def test_the_captured_step_does_what_the_plain_one_does(
    little_data, tmp_path, changes, monkeypatch
):
    graphs = []
    capture = train.capture
    monkeypatch.setattr(train, "capture", lambda *a: (graphs.append(1), capture(*a))[1])
    plain, captured = (
        train.train(
            config(**changes, tf32=False, cuda_graph=graph), tmp_path / str(graph), console=QUIET
        )
        for graph in (False, True)
    )
    assert graphs
    for name, value in weights(plain).items():
        torch.testing.assert_close(value, weights(captured)[name], rtol=1e-3, atol=1e-4)


def test_a_loop_of_ones_own_is_captured():
    """As docs/training.md has it."""
    data = few_shapes().train
    images, labels = data.pixels.cuda() / 255, F.one_hot(data.labels.cuda()).float()

    def trained(captured):
        torch.manual_seed(0)
        model = tb.create_model("mini", num_classes=labels.shape[1], width=4, input_size=24)
        tb.calibrate(model, images[:8].cpu()).cuda()
        rate = torch.tensor(1e-4, device="cuda")
        optimiser = torch.optim.Adam(model.parameters(), rate, capturable=True)

        def step(x, y):
            with torch.autograd.set_multithreading_enabled(False):
                loss = F.binary_cross_entropy_with_logits(model(x), y)
                loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            return loss

        if captured:
            tensors = [*model.parameters(), *model.buffers()]
            step = capture(step, images[:16], labels[:16], tensors, optimiser)
        losses = [step(images[i:][:16], labels[i:][:16]).item() for i in (16, 0, 32)]
        return losses, weights(model)

    with cuda_settings(tf32=False):
        (plain, right), (losses, found) = trained(False), trained(True)
    assert losses == pytest.approx(plain, rel=1e-4)
    for name, value in right.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("graph", [False, True])
def test_a_broken_step_leaves_the_weights_as_they_were(little_data, tmp_path, monkeypatch, graph):
    kept = {}
    advance = train._Run.advance

    def poison(run, *batch):
        layers = dict(run.state.model.bcos_layers())
        if run.state.step == 2:
            with torch.no_grad():
                nn.init.constant_(layers["0"].weight, math.nan)
            kept["layer"], kept["before"] = layers["12"], layers["12"].weight.clone()
        advance(run, *batch)

    monkeypatch.setattr(train._Run, "advance", poison)
    with pytest.raises(train.TrainError, match="at step 3: the weights of 0 are not finite"):
        train.train(config(epochs=20, cuda_graph=graph), tmp_path, console=QUIET)
    assert torch.equal(kept["layer"].weight, kept["before"])


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_half_precision_trains(little_data, tmp_path, precision):
    model = train.train(config(precision=precision), tmp_path, console=QUIET)
    assert all(torch.isfinite(v).all() for v in weights(model).values())


def test_streamed_batches_are_those_in_memory(tmp_path):
    for i in range(16):
        path = tmp_path / ("train" if i < 12 else "val") / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(i).integers(0, 256, (20, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    c = config(data=str(tmp_path), batch=4, augment=("flip", "padded_crop", "rand_augment"))
    device = torch.device("cuda")
    made = [Batches(open_data(tmp_path, memory=m).train, c, device, workers=2) for m in (0, 1)]
    streams = [b.following(0) for b in made]
    for _ in range(7):
        (x, labels), (y, other) = next(streams[0]), next(streams[1])
        assert x.is_cuda
        assert torch.equal(x, y)
        assert torch.equal(labels, other)


def test_a_graph_that_is_garbage_does_not_disturb_a_capture():
    x = torch.ones(4, device="cuda")
    old = [as_graph(torch.neg, x)]
    old.append(old)  # what only itself refers to waits for a collection

    def function(x):
        nonlocal old
        if torch.cuda.is_current_stream_capturing():
            old = None
            if gc.isenabled():  # then it may happen anywhere
                gc.collect()
        return 2 * x

    double = as_graph(function, x)
    assert gc.isenabled()
    assert double(torch.full_like(x, 3)).tolist() == [6] * 4


@pytest.mark.parametrize(
    "augment", [(), *((name,) for name in AUGMENTATIONS), tuple(AUGMENTATIONS)]
)
@pytest.mark.parametrize("sizes", [(), (12, 24)])
@pytest.mark.parametrize("cutmix", [0.0, 0.5])
def test_captured_batches_are_the_plain_ones(augment, sizes, cutmix):
    data, device = few_shapes(), torch.device("cuda")
    settings = config(augment=augment, train_sizes=sizes, cutmix=cutmix)
    made, plain = (
        Batches(
            data.train,
            replace(settings, cuda_graph=captured),
            device,
            classes=len(data.classes),
        )
        for captured in (True, False)
    )
    start = made.total_steps // 2 - 4  # where the size changes
    for step, (x, labels) in zip(range(start, start + 8), made.following(start), strict=False):
        for y, others in (made.at(step), plain.at(step)):
            assert torch.equal(x, y)
            assert torch.equal(labels, others)
        assert x.is_contiguous(memory_format=torch.channels_last)
    assert made._graph is not None
    assert plain._graph is None


@pytest.mark.parametrize("sizes", [(), (12, 24)])
def test_a_stopped_run_resumes_with_the_captured_step(little_data, tmp_path, monkeypatch, sizes):
    settings = config(tf32=False, cuda_graph=True, train_sizes=sizes)
    whole = train.train(settings, tmp_path / "whole", console=QUIET)
    advance = train._Run.advance

    def stop(run, *batch):
        advance(run, *batch)
        if run.state.step == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train._Run, "advance", stop)
        with pytest.raises(KeyboardInterrupt):
            train.train(settings, tmp_path / "x", console=QUIET)
    again = train.train(settings, tmp_path / "x", console=QUIET, resume=True)
    for name, value in weights(whole).items():
        torch.testing.assert_close(value, weights(again)[name], rtol=1e-3, atol=1e-4)
