"""Vision networks that explain themselves.

A B-cos network is, for each input, one linear map W(x); the gradient in `explanation_mode` is a
row of it.
"""

from torchbcos import encoding, functional, norms
from torchbcos.functional import explanation_mode
from torchbcos.layers import BcosConv1d, BcosConv2d, BcosConv3d, BcosLinear

__version__ = "0.1.0"

__all__ = [
    "BcosConv1d",
    "BcosConv2d",
    "BcosConv3d",
    "BcosLinear",
    "encoding",
    "explanation_mode",
    "functional",
    "norms",
]
