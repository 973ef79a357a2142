"""Made-up results of experiments, and how a page made of them is read again."""

import json

import numpy as np


def write_result(folder, e, accuracy, medians, **more):
    """Made up, of the experiment `e`; `medians` by method: (label, median, grids)."""
    methods = {
        key: {
            "label": label, "mean": m, "interval": [m, m], "quartiles": [m - 0.1, m, m + 0.1],
            "grids": grids, "first": 20, "mean_of_first": m + 0.02, "median_of_first": m + 0.03,
            "smooth": 15, "seconds": 4.0, "percentiles": list(np.linspace(0, 1, 101)),
        }
        for key, (label, m, grids) in medians.items()
    }  # fmt: skip
    document = {
        "name": e.name,
        "what": e.what,
        "recipe": e.recipe,
        "accuracy": accuracy,
        "loss": 0.2001,
        "images": 3925,
        "parameters": 6_889_856,
        "localisation": {"methods": methods},
        "curve": {"epoch": [1, 2], "train_loss": [0.4, 0.1], "test_loss": [0.5, 0.2]},
        "seconds": {"training": 330.0, "localisation": 12.0},
        "config": {**e.config("data").as_json(), **more.pop("config", {})},
        "evidence": {"hardware": "H200", "torch": "2.10", "seed": 0, "commit": "abc1234"},
        **more,
    }
    path = folder / f"{e.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return path


def section(page, title):
    return page.split(f"# {title}")[1].split("\n## ")[0].split("\n### ")[0]


def rows(page, title):
    """The table of a section, as cells by the first of each row."""
    lines = [x for x in section(page, title).split("\n") if x.startswith("|")]
    cells = [[c.strip() for c in x.split("|")[1:-1]] for x in lines]
    return {first: others for first, *others in cells[2:]}
