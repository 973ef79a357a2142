"""What is told of a training: live on a terminal, line by line elsewhere, and for TensorBoard."""

import io
import json
import re
import sys
import types

import pytest
from rich.console import Console

from small_training import QUIET, config
from torchbcos import progress, train

pytestmark = pytest.mark.usefixtures("little_data")


def test_elsewhere_there_is_one_plain_line_for_each_epoch(tmp_path):
    said = io.StringIO()
    train.train(config(epochs=2), tmp_path, console=Console(file=said))
    lines = said.getvalue().splitlines()
    assert len(lines) == 2
    form = r"epoch +{}\.0  loss 0\.\d{{4}}  train \d+\.\d\d%  test \d+\.\d\d%  \d+ s"
    for number, line in enumerate(lines, 1):
        assert re.fullmatch(form.format(number), line)


def test_a_terminal_sees_where_the_training_is(tmp_path, monkeypatch):
    seconds = iter(range(100_000))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(seconds)))
    said = io.StringIO()
    console = Console(file=said, force_terminal=True, width=140)
    train.train(config(epochs=4), tmp_path, console=console)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.getvalue())
    form = r"epoch \d\.\d .* step \d+/12 +loss 0\.\d{4} +accuracy \d+\.\d% +[\d,]+ images/s +left"
    assert re.search(form, text)
    assert len(re.findall(r"epoch +\d\.0  loss", text)) == 4  # the lines stay above it


def test_tensorboard_gets_every_metric_if_it_is_installed(tmp_path, monkeypatch):
    written = []

    class Writer:
        def __init__(self, folder, purge_step):
            written.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            written.append((name, value, step))

        def flush(self):
            pass

    module = types.SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    train.train(config(epochs=2), tmp_path, console=QUIET)
    assert written[0] == (str(tmp_path), 1)
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    for name in ("train_loss", "train_accuracy", "test_loss", "test_accuracy", "lr"):
        assert (name, line[name], line["step"]) in written


def test_without_tensorboard_the_metrics_are_still_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    train.train(config(epochs=1), tmp_path, console=QUIET)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_an_unfinished_last_line_does_not_stand_in_the_way(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    path = tmp_path / "metrics.jsonl"
    first = json.dumps({"step": 3}) + "\n"
    for content in (first + '{"step": 6, "tra', first.strip(), first):
        path.write_text(content)
        progress.Journal(tmp_path, 3).write({"step": 6})
        assert path.read_text() == first + json.dumps({"step": 6}) + "\n"
