"""What a training does, as one frozen object."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from torchbcos.augment import AUGMENTATIONS

__all__ = ["TrainConfig"]


#: What `create_model` takes, and a training gets from elsewhere.
_NO_OPTIONS = {
    **dict.fromkeys(("in_channels", "in_chans"), "the setting `channels`"),
    **dict.fromkeys(("classes", "num_classes"), "the data, which have classes"),
    "input_size": "the setting `size`",
    "preset": "the setting `preset`",
}


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides the result.

    Defaults are the paper's for CIFAR-10, but for γ, T and the schedule: see the recipe `cifar10`.
    """

    data: str  # "shapes", or a folder
    arch: str = "cifar9"  # for create_model; "conventional/NAME" for the network as it was
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # for create_model
    preset: str = ""  # "paper", or "" to calibrate on the first batch
    start_from: str = ""  # a checkpoint to fine-tune, with its own arch, options and γ; or ""
    head_only: bool = False  # with start_from: train nothing but the classifier
    size: int = 0  # pixels; 0 for the data's own
    channels: int = 3  # of the images; 1 for grey ones, as radiographs
    train_sizes: tuple[int, ...] = ()  # pixels in training, in equal parts of it; () for `size`
    test_part: float = 1.0  # of a test image's height and width, as read from files
    bad: str = "fail"  # or "skip": what becomes of images that cannot be read
    memory: float = 4.0  # GiB of pixels that are kept in memory; larger sets are streamed
    epochs: float = 100
    batch: int = 64
    optimiser: str = "adam"  # adam, adamw or sgd
    lr: float = 1e-3
    lr_end: float = 1e-5
    schedule: str = "cosine"  # or "quarter-cosine", or "step": ÷10 at each milestone
    milestones: tuple[float, ...] = ()  # epochs
    warmup: float = 0  # epochs of linear increase
    warmup_lr: float = 1e-5  # where it begins
    weight_rms: float = 0.0  # of B-cos weights at the start; 0 for what the layers make
    weight_rms_in: str = ""  # the module whose weights these are; "" for all
    weight_decay: float = 0.0
    momentum: float = 0.9  # of sgd
    augment: tuple[str, ...] = ("flip", "padded_crop")
    crop_area: float = 0.25  # the smallest share of an image that resized_crop keeps
    magnitude: float = 9.0  # of rand_augment, of 30
    operations: int = 2  # of rand_augment, on each image
    cutmix: float = 0.0  # the chance of two neighbours in a batch to exchange a window
    label_smoothing: float = 0.0
    auxiliary_weight: float = 1.0
    ema: float = 0.0  # decay of the averaged weights; 0 for none
    clip: float = 0.0  # largest gradient norm; 0 for none
    adaptive_clip: float = 0.0  # largest ‖gradient‖/‖weight‖ of a row; 0 for none
    accumulate: int = 1
    precision: str = "32-true"  # or bf16-mixed, 16-mixed
    tf32: bool = True
    compile: bool = False
    cuda_graph: bool = True  # capture the step where shapes are fixed and one GPU is used
    test_every: int = 1  # epochs from one test, line of metrics and written state to the next
    seed: int = 0

    def __post_init__(self) -> None:
        def refuse(name: str, rule: str) -> None:
            raise ValueError(f"`{name}` (={getattr(self, name)!r}) must be {rule}.")

        choices = {
            "preset": ("", "paper"),
            "bad": ("fail", "skip"),
            "optimiser": ("adam", "adamw", "sgd"),
            "schedule": ("cosine", "quarter-cosine", "step"),
            "precision": ("32-true", "bf16-mixed", "16-mixed"),
        }
        for name, values in choices.items():
            if getattr(self, name) not in values:
                refuse(name, " or ".join(map(repr, values)))
        for name, kind in get_type_hints(TrainConfig).items():
            fits, words = _KINDS[str(kind)]
            if not fits(getattr(self, name)):
                refuse(name, words)
        if self.channels not in (1, 3):
            refuse("channels", "1 (grey) or 3")
        for name in _NO_OPTIONS.keys() & self.options.keys():
            raise ValueError(f"`options` (with {name}) must leave it to {_NO_OPTIONS[name]}.")
        if self.channels == 1 and "lighting" in self.augment:
            refuse("augment", "without lighting, which varies colours, where `channels` is 1")
        for name in ("batch", "accumulate", "operations", "test_every"):
            if getattr(self, name) < 1:
                refuse(name, "at least 1")
        for name in ("epochs", "lr", "crop_area", "test_part"):
            if not 0 < getattr(self, name) < math.inf:
                refuse(name, "above 0 and finite")
        for name in ("crop_area", "test_part"):
            if getattr(self, name) > 1:
                refuse(name, "at most 1")
        for name in (
            *("size", "lr_end", "warmup", "warmup_lr", "weight_decay", "weight_rms"),
            *("auxiliary_weight", "clip", "adaptive_clip"),
        ):
            if not 0 <= getattr(self, name) < math.inf:
                refuse(name, "0 or more, and finite")
        if not self.memory >= 0:
            refuse("memory", "0 or more")
        if self.operations > 100:
            refuse("operations", "at most 100")
        if not -(2**63) <= self.seed < 2**63:
            refuse("seed", "a number of 64 bits")
        if self.weight_rms_in and not self.weight_rms:
            refuse("weight_rms_in", "empty unless `weight_rms` is set")
        if not 0 <= self.magnitude <= 30:
            refuse("magnitude", "from 0 to 30")
        if not all(size >= 1 for size in self.train_sizes):
            refuse("train_sizes", "pixels, each at least 1")
        for name in ("ema", "label_smoothing", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                refuse(name, "from 0 to below 1")
        for name in self.augment:
            if name not in AUGMENTATIONS:
                refuse("augment", f"names among {', '.join(AUGMENTATIONS)}")
        if not 0 <= self.cutmix <= 1:
            refuse("cutmix", "from 0 to 1")
        if self.batch % self.accumulate:
            refuse("accumulate", f"a divisor of the batch, {self.batch}")
        if self.head_only and not self.start_from:
            refuse("head_only", "false unless `start_from` names a checkpoint")

    @property
    def reading(self) -> dict[str, Any]:
        """How `open_data` reads the images, beside their place."""
        return {
            "size": self.size or None,
            "part": self.test_part,
            "bad": self.bad,
            "memory": self.memory,
            "channels": self.channels,
        }

    def as_json(self) -> dict[str, Any]:
        """The settings as JSON gives them back, with lists for tuples."""
        value: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return value

    def lr_at(self, epoch: float) -> float:
        """The learning rate at a point in time, in epochs."""
        if epoch < self.warmup:
            return self.warmup_lr + (self.lr - self.warmup_lr) * epoch / self.warmup
        if self.schedule == "step":
            return float(self.lr * 0.1 ** sum(epoch >= m for m in self.milestones))
        done = min((epoch - self.warmup) / max(self.epochs - self.warmup, 1e-9), 1)
        if self.schedule == "quarter-cosine":  # slow at first, as in the authors' code
            left = math.cos(math.pi / 2 * done)
        else:
            left = (1 + math.cos(math.pi * done)) / 2
        return self.lr_end + (self.lr - self.lr_end) * left


def _is_int(value: object) -> bool:
    """One that JSON can hold."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_int(value) or isinstance(value, float)


#: For each type of a setting: does a value fit, and how to say what would.
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "<class 'str'>": (lambda v: isinstance(v, str), "a text"),
    "<class 'bool'>": (lambda v: isinstance(v, bool), "true or false"),
    "<class 'int'>": (_is_int, "a whole number"),
    "<class 'float'>": (_is_number, "a number"),
    "tuple[float, ...]": (
        lambda v: isinstance(v, tuple) and all(map(_is_number, v)),
        "a list of numbers",
    ),
    "tuple[int, ...]": (
        lambda v: isinstance(v, tuple) and all(map(_is_int, v)),
        "a list of whole numbers",
    ),
    "tuple[str, ...]": (
        lambda v: isinstance(v, tuple) and all(isinstance(x, str) for x in v),
        """a list of names, as in 'augment=["flip"]', with these quotes""",
    ),
    "collections.abc.Mapping[str, typing.Any]": (
        lambda v: isinstance(v, Mapping),
        "a table, as in options.b=1.5",
    ),
}
