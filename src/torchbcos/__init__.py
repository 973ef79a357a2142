"""Vision networks that explain themselves.

A B-cos network is, for each input, one linear map W(x); the gradient in `explanation_mode` is a
row of it.
"""

from torchbcos import encoding, functional, neurons, norms, render
from torchbcos._version import __version__ as __version__
from torchbcos.calibrate import calibrate, signal
from torchbcos.checkpoint import load, save
from torchbcos.explain import explain
from torchbcos.explanation import Explanation
from torchbcos.functional import explanation_mode
from torchbcos.layers import BcosConv1d, BcosConv2d, BcosConv3d, BcosLinear
from torchbcos.models import BcosModel, convert, create_model, list_models

__all__ = [
    "BcosConv1d",
    "BcosConv2d",
    "BcosConv3d",
    "BcosLinear",
    "BcosModel",
    "Explanation",
    "calibrate",
    "convert",
    "create_model",
    "encoding",
    "explain",
    "explanation_mode",
    "functional",
    "list_models",
    "load",
    "neurons",
    "norms",
    "render",
    "save",
    "signal",
]
