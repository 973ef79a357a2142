"""What becomes of pools: those that take maxima take means, as in the paper."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import fx, nn

from torchbcos import functional
from torchbcos.convert import twins
from torchbcos.convert.rewriter import Rewriter, Value, name_of

__all__ = ["adaptive_max_pool", "average_pool", "max_pool"]


def max_pool(r: Rewriter, node: fx.Node, module: Any) -> Value:
    r.doubt_unless_images_lead(node.all_input_nodes[0])
    if module is not None:
        new = twins.average_pool(module)
        if new is None:
            return r.as_factor(node)
        r.put_module(node, new)
        return r.joined(node)
    names = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode")
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if given.pop("dilation", 1) not in (1, [1, 1], (1, 1)) or given.pop("return_indices", False):
        return r.as_factor(node)
    name = f"avg_pool{name_of(node)[-2:]}"
    average = getattr(functional, name, None) or getattr(F, name)
    r.put_function(node, average, (given.pop("input"),), "average pool")
    node.kwargs = given
    return r.joined(node)


def adaptive_max_pool(r: Rewriter, node: fx.Node, module: Any) -> Value:
    if module is not None:
        return max_pool(r, node, module)
    r.doubt_unless_images_lead(node.all_input_nodes[0])
    names = ("input", "output_size", "return_indices")
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if given.get("return_indices"):
        return r.as_factor(node)
    average = getattr(F, f"adaptive_avg_pool{name_of(node)[-2:]}")
    r.put_function(node, average, (given["input"], given["output_size"]), "average pool")
    return r.joined(node)


def average_pool(r: Rewriter, node: fx.Node, module: Any) -> Value:
    if type(module) is not nn.AvgPool2d:
        return r.keep_over_places(node)
    new = twins.average_pool(module)
    assert new is not None
    r.doubt_unless_images_lead(node.all_input_nodes[0])
    r.put_module(node, new, "kept")
    return r.joined(node)
