"""Trainings in several processes, and processes that are killed."""

import json
import random
import shutil
import signal

import pytest
import safetensors
import torch

from small_training import Processes, assert_same_weights, file_weights
from torchbcos.processes import make_fabric

SETTINGS = {"epochs": 6, "ema": 0.5}


@pytest.fixture(scope="module")
def processes():
    return Processes()


@pytest.fixture(scope="module")
def whole(processes, tmp_path_factory):
    """A run that nobody disturbed, and how many function calls it made: (before, in all) steps."""
    out = tmp_path_factory.mktemp("whole")
    assert processes.run(out, SETTINGS, count=str(out / "calls")) == 0
    return out, [int(n) for n in (out / "calls").read_text().split()]


def test_killed_at_ten_random_moments_it_resumes_to_the_same_weights(processes, whole, tmp_path):
    out, (before, total) = whole
    chance = random.Random(7)
    done = []
    for i in range(10):
        done.append(part_done(tmp_path))
        left = (total - before) * (1 - done[-1]) * 0.9
        moment = before + chance.random() * left if i % 3 else before * chance.random()
        assert processes.run(tmp_path, SETTINGS, kill_after=int(moment) + 1) == -signal.SIGKILL
    assert len(set(done)) > 1  # some left a state to go on from
    assert processes.run(tmp_path, SETTINGS) == 0
    assert_same_weights(file_weights(out), file_weights(tmp_path))
    assert metrics(out) == metrics(tmp_path)


def test_machines_that_do_not_know_each_other_are_told_how_to(monkeypatch):
    addresses = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "NODE_RANK": "0"}
    for name, value in addresses.items():
        monkeypatch.setenv(name, value)
    assert make_fabric(nodes=2, accelerator="cpu").world_size == 2
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(ValueError, match="2 machines cannot find each other: MASTER_PORT must"):
        make_fabric(nodes=2, accelerator="cpu")


def part_done(folder):
    """The share of all steps in the state that the next process will begin with."""
    path = folder / "state.safetensors"
    if not path.exists():
        return 0
    with safetensors.safe_open(path, "pt") as file:
        return json.loads(file.metadata()["state"])["step"] / (SETTINGS["epochs"] * 3)


def metrics(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{**json.loads(line), "seconds": 0} for line in lines]


@pytest.fixture(scope="module")
def two(processes, tmp_path_factory):
    out = tmp_path_factory.mktemp("two")
    assert processes.run_two(out, SETTINGS)[0] == (0, 0)
    return out


def test_two_processes_train_as_one(whole, two):
    one, other = file_weights(whole[0]), file_weights(two)
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-3, atol=1e-4)
    for line, its_twin in zip(metrics(whole[0]), metrics(two), strict=True):
        assert line == pytest.approx(its_twin, rel=1e-3, abs=0.07)  # one of 16 images may turn
        assert line["train_loss"] == pytest.approx(its_twin["train_loss"], rel=1e-4)


def test_a_killed_process_ends_the_run_in_a_sentence_and_it_resumes(processes, two, tmp_path):
    codes, seconds = processes.run_two(tmp_path, SETTINGS, kill_at=7)
    assert codes == (2, -signal.SIGKILL)
    assert seconds < 20
    said = (tmp_path / "said-0").read_text()
    assert "process 0 of 2 lost the connection" in said
    assert "--resume" in said
    assert processes.run_two(tmp_path, SETTINGS)[0] == (0, 0)
    assert_same_weights(file_weights(two), file_weights(tmp_path))


def test_sharded_weights_are_saved_resumed_and_put_together(processes, whole, tmp_path):
    codes, _ = processes.run_two(tmp_path / "two", SETTINGS, strategy="fsdp", kill_at=7)
    assert codes == (2, -signal.SIGKILL)
    shutil.copytree(tmp_path / "two", tmp_path / "one")
    assert processes.run_two(tmp_path / "two", SETTINGS, strategy="fsdp")[0] == (0, 0)
    assert processes.run(tmp_path / "one", SETTINGS) == 0  # one process can go on where two were
    expected = file_weights(whole[0])
    for folder in ("two", "one"):
        for name, value in file_weights(tmp_path / folder).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)


def test_a_batch_that_cannot_be_shared_is_refused(processes, tmp_path):
    codes, _ = processes.run_two(tmp_path, {"batch": 15})
    assert codes == (2, 2)
    assert (
        "`batch` (=15) must be a multiple of the 2 processes" in (tmp_path / "said-0").read_text()
    )
