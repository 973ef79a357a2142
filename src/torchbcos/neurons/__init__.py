"""What every unit of a network responds to, over a whole data set.

`collect` passes over the data once and writes a file; `Neurons` reads it, sorts and searches;
`sheets` explains the best images of a unit; `unit_contributions` goes on from a unit to a logit.
"""

from torchbcos.neurons.collecting import collect, fingerprint, memory_bound
from torchbcos.neurons.contributions import (
    UnitContributions,
    most_active_for,
    most_contributing,
    unit_contributions,
)
from torchbcos.neurons.page import build_page
from torchbcos.neurons.sheet import Sheet, Sight, sheets
from torchbcos.neurons.skew import Skew
from torchbcos.neurons.table import Layer, Neurons, NeuronsError, Ranked, Units

__all__ = [
    "Layer",
    "Neurons",
    "NeuronsError",
    "Ranked",
    "Sheet",
    "Sight",
    "Skew",
    "UnitContributions",
    "Units",
    "build_page",
    "collect",
    "fingerprint",
    "memory_bound",
    "most_active_for",
    "most_contributing",
    "sheets",
    "unit_contributions",
]
