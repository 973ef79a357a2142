"""Run the experiments of a study side by side, keep their results, and make the page of them."""

from torchbcos.reproduce.experiments import EXPERIMENTS, Experiment, choose_experiments
from torchbcos.reproduce.packed import pack
from torchbcos.reproduce.page import write_page
from torchbcos.reproduce.runner import Ended, run_all
from torchbcos.reproduce.trial import Trial

__all__ = [
    "EXPERIMENTS",
    "Ended",
    "Experiment",
    "Trial",
    "choose_experiments",
    "pack",
    "run_all",
    "write_page",
]
