"""What a grid pointing game is: its grids, setting and smoothing."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from torchbcos.localise import check_kernel, check_preset, default_kernel
from torchbcos.posthoc import Method, by_colours

__all__ = ["Game"]

SETTINGS = ("grid", "difull", "dipart")
DERIVED = ("channels", "colours")


@dataclass(frozen=True)
class Game:
    """Everything that decides the scores, beside model, images and method."""

    grids: int = 500
    n: int = 3
    preset: str = "paper"  # or "released"
    setting: str = "grid"  # or "difull", "dipart"
    smooth: int | None = None  # pixels of the window, 0 for none; None: by the cells' size
    seed: int = 42
    derive: str = "channels"  # or "colours": by what post-hoc methods derive B-cos models

    def __post_init__(self) -> None:
        if self.setting not in SETTINGS:
            raise ValueError(f"`setting` (={self.setting!r}) must be of: {', '.join(SETTINGS)}.")
        if self.derive not in DERIVED:
            raise ValueError(f"`derive` (={self.derive!r}) must be 'channels' or 'colours'.")
        check_preset(self.preset)
        check_kernel(self.smooth or 0)

    def kernel(self, method: Method, cell: int) -> int:
        """What maps are smoothed with: those of perturbation methods never are."""
        if method.perturbs:
            return 0
        return default_kernel(cell) if self.smooth is None else self.smooth

    def given(self, model: nn.Module, method: Method) -> nn.Module:
        """The model as this method gets it."""
        whole = method.inherent or self.derive == "channels"
        return model if whole else by_colours(model)
