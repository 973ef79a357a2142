"""The paper's Fig. 2, against its formula and its claim."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from torchbcos import cli, toy


def test_the_toy_losses_are_the_papers_formula():
    """BCE of ‖x‖·|cos|^B·sgn(cos), computed with angles."""
    solved = toy.solve((1.0, 3.0), count=7, steps=36, seed=4)
    for p, problem in enumerate(solved.problems):
        for row, b in enumerate((1.0, 3.0)):
            for a in (0, 11, 29):
                x, y = problem.points.numpy().T
                between = np.arctan2(y, x) - np.deg2rad(float(solved.angles[a]))
                out = np.hypot(x, y) * np.abs(np.cos(between)) ** b * np.sign(np.cos(between))
                label = problem.labels.numpy()
                loss = np.log1p(np.exp(-out)) * label + np.log1p(np.exp(out)) * (1 - label)
                assert solved.losses[p, row, a].item() == pytest.approx(loss.mean())


def test_with_growing_b_both_problems_have_the_weights_that_point_at_red():
    solved = toy.solve()
    left, right = solved.best
    assert abs(left[0] - right[0]) > 90  # a linear unit turns away from blue
    assert abs(left[-1] - right[-1]) < 2
    assert abs(left[-1] - toy.RED_ANGLE) < 3
    spread = (left - right).abs()
    assert (spread[1:] <= spread[:-1]).all()


def test_the_two_problems_share_their_red_cluster():
    one, two = toy.problems(count=20, seed=3)
    assert torch.equal(one.points[one.labels == 1], two.points[two.labels == 1])
    assert not torch.equal(one.points[one.labels == 0], two.points[two.labels == 0])


def test_the_toy_command_writes_data_numbers_and_plot(tmp_path):
    result = CliRunner().invoke(
        cli.app,
        ["toy", "--out", str(tmp_path), "--b", "1,2", "--points", "5", "--json"],
        catch_exceptions=False,
    )
    assert json.loads(result.stdout)["exponents"] == [1.0, 2.0]
    written = json.loads((tmp_path / "toy.json").read_text())
    assert len(written["data"]["blue on the left"]["points"]) == 10
    assert np.array(written["losses"]["blue on the right"]).shape == (2, 3600)
    assert (tmp_path / "toy.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="`--b`"):
        CliRunner().invoke(cli.app, ["toy", "--b", "x"], catch_exceptions=False)
