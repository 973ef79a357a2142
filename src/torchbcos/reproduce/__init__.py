"""Run the experiments of a study side by side, keep their results, and make the page of them."""

from torchbcos.reproduce.experiments import Experiment, Study
from torchbcos.reproduce.packed import pack
from torchbcos.reproduce.runner import MISTAKE, Ended, run_all
from torchbcos.reproduce.studies import STUDIES, choose_study
from torchbcos.reproduce.trial import Trial

__all__ = [
    "MISTAKE",
    "STUDIES",
    "Ended",
    "Experiment",
    "Study",
    "Trial",
    "choose_study",
    "pack",
    "run_all",
]
