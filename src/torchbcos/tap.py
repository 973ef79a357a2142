"""Run a network up to one of its submodules and hand over what comes out there."""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor, fx, nn

__all__ = ["layer_names", "tap"]


def tap(network: nn.Module, layer: str, x: Tensor) -> Tensor:
    """The output of the submodule `layer` when `network` is given `x`; nothing after it is run.

    In a converted network every name of the original works: a block that is no module of its own
    any more stands for the last operation that came from it.
    """
    layer = layer.removeprefix("network.")
    if not layer:
        raise _unknown(network, layer)
    if not isinstance(network, fx.GraphModule):
        return _tap_module(network, layer, x)
    node = _node_of(network, layer)
    if node is None:
        raise _unknown(network, layer)
    return _UpTo(network, node).run(x)  # type: ignore[no-any-return]


def layer_names(network: nn.Module) -> list[str]:
    """The names that `tap` takes, in the order of the computation."""
    if not isinstance(network, fx.GraphModule):
        return [name for name, _ in network.named_modules() if name]
    names: dict[str, None] = {}
    for node in network.graph.nodes:
        for name in (*(node.meta.get("nn_module_stack") or {}), _target(node)):
            if name:
                names[name] = None
    return list(names)


def _target(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_module" else ""


def _node_of(network: fx.GraphModule, layer: str) -> fx.Node | None:
    found = None
    for node in network.graph.nodes:
        if _target(node) == layer:
            return node  # type: ignore[no-any-return]
        if layer in (node.meta.get("nn_module_stack") or {}):
            found = node
    return found


class _UpTo(fx.Interpreter):
    def __init__(self, network: fx.GraphModule, last: fx.Node) -> None:
        super().__init__(network)
        self._last = last

    def run(self, x: Tensor) -> Any:  # type: ignore[override]
        self.args_iter = iter((x,))
        for node in self.graph.nodes:
            self.env[node] = self.run_node(node)
            for used in self.user_to_last_uses.get(node, []):
                if used is not node:
                    self.env.pop(used, None)
            if node is self._last:
                return self.env[node]
        raise AssertionError("the node is in the graph")


class _Reached(Exception):  # noqa: N818 (no error: it carries the result out)
    def __init__(self, value: Tensor) -> None:
        self.value = value


def _tap_module(network: nn.Module, layer: str, x: Tensor) -> Tensor:
    try:
        module = network.get_submodule(layer)
    except AttributeError as error:
        raise _unknown(network, layer) from error
    thread = threading.get_ident()

    def stop(_: nn.Module, __: Any, out: Tensor) -> None:
        if threading.get_ident() == thread:
            raise _Reached(out)

    hook = module.register_forward_hook(stop)
    try:
        network._call_impl(x)  # as it is, even if compiled in place
    except _Reached as reached:
        return reached.value
    finally:
        hook.remove()
    raise ValueError(f"`layer` (={layer!r}) is never reached by the network.")


def _unknown(network: nn.Module, layer: str) -> ValueError:
    import difflib

    names = layer_names(network)
    close = difflib.get_close_matches(layer, names, 3) or [*names[:2], *names[-1:]]
    return ValueError(
        f"`layer` (={layer!r}) is no layer of the network: did you mean {', '.join(close)}?"
    )
