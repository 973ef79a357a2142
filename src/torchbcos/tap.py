"""Run a network up to one of its submodules, or through it, and hand over what comes out there."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, fx, nn

from torchbcos.convert.tracers import PART_OF, RETURNED_BY

__all__ = [
    "Look",
    "UpTo",
    "is_in_graph",
    "layer_names",
    "name_within",
    "node_of",
    "one_tensor",
    "tap",
    "watch",
]

#: Given a layer's output; what it returns, if anything, goes on in its place.
Look = Callable[[Tensor], Tensor | None]


def tap(network: nn.Module, layer: str, x: Tensor) -> Tensor:
    """The output of the submodule `layer` when `network` is given `x`; nothing after it is run.

    In a converted network the name of a block of the original, which is no module of its own any
    more, stands for the value that the block returned.
    """
    if isinstance(network, fx.GraphModule) and is_in_graph(network, layer):
        return one_tensor(UpTo(network, node_of(network, layer)).run(x), layer)
    return one_tensor(_tap_module(network, layer, x), layer)


def watch(network: nn.Module, x: Tensor, looks: Mapping[str, Look]) -> Any:
    """The output of `network` for `x`; those of the layers named in `looks` are shown on the way.

    Names are those of `tap`; of a layer that is used several times the first use is shown.
    """
    looks = {name: _checked(name, look) for name, look in looks.items()}
    nodes: dict[fx.Node, list[Look]] = {}
    for name in [name for name in looks if is_in_graph(network, name)]:
        nodes.setdefault(node_of(network, name), []).append(looks.pop(name))  # type: ignore[arg-type]
    with _shown(network, looks):
        if isinstance(network, fx.GraphModule):
            return _Watched(network, nodes).run(x)
        return network._call_impl(x)


def layer_names(network: nn.Module) -> list[str]:
    """The names that `tap` takes, in the order of the computation."""
    if not isinstance(network, fx.GraphModule):
        return [name for name, _ in network.named_modules() if name]
    is_marked = _is_marked(network)
    names: dict[str, None] = {}
    for node in network.graph.nodes:
        blocks = node.meta.get(RETURNED_BY if is_marked else "nn_module_stack") or ()
        for name in (*blocks, _target(node)):
            if name:
                names[name] = None
    return list(names)


def name_within(network: nn.Module, layer: str) -> str:
    """The network's own name for `layer`, which may also be named as in the whole model."""
    if not isinstance(layer, str):
        kind = type(layer).__name__
        raise TypeError(
            f"`layer` (of type {kind}) must be a layer's name in the network, a string."
        )
    if not isinstance(network, fx.GraphModule):
        known = {name for name, _ in network.named_modules(remove_duplicate=False)}
    else:
        parts = (node.meta.get(PART_OF, ()) for node in network.graph.nodes)
        known = {*layer_names(network), *itertools.chain(*parts)}
    return layer if layer in known else layer.removeprefix("network.")


def is_in_graph(network: nn.Module, layer: str) -> bool:
    """Whether the network is a graph, and `layer` is no part of a module that is called as one."""
    if not isinstance(network, fx.GraphModule):
        return False
    name = name_within(network, layer)
    called = {_target(node) for node in network.graph.nodes} - {""}
    inside = name not in called and any(name.startswith(f"{whole}.") for whole in called)
    return not (inside and name in dict(network.named_modules()))


def _target(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_module" else ""


def node_of(network: fx.GraphModule, layer: str) -> fx.Node:
    """The operation of the graph whose value is the output of `layer`."""
    layer = name_within(network, layer)
    is_marked = _is_marked(network)
    found: fx.Node | None = None
    for node in network.graph.nodes if layer else ():
        returned = node.meta.get(RETURNED_BY if is_marked else "nn_module_stack") or ()
        if _target(node) == layer:
            return node  # type: ignore[no-any-return]
        if layer in node.meta.get(PART_OF, ()):
            raise _several(layer)
        if layer in returned:
            found = node
    if found is None:
        raise _unknown(network, layer)
    return found


def _is_marked(network: fx.GraphModule) -> bool:
    """Whether the graph knows what blocks return; of others their last operation is taken."""
    return any(RETURNED_BY in node.meta for node in network.graph.nodes)


def one_tensor(value: Any, layer: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise _several(layer)
    return value


def _checked(layer: str, look: Look) -> Look:
    return lambda value: look(one_tensor(value, layer))


def _several(layer: str) -> ValueError:
    return ValueError(
        f"`layer` (={layer!r}) returns several values and not one tensor: give a layer within it."
    )


class UpTo(fx.Interpreter):
    """Runs a graph until it has the value of `last`."""

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


class _Watched(fx.Interpreter):
    def __init__(self, network: fx.GraphModule, looks: Mapping[fx.Node, list[Look]]) -> None:
        super().__init__(network)
        self.extra_traceback = False  # it would be added to what errors say
        self._looks = looks

    def run_node(self, n: fx.Node) -> Any:
        out = super().run_node(n)
        for look in self._looks.get(n, ()):
            changed = look(out)
            out = out if changed is None else changed
        return out


class _Reached(Exception):  # noqa: N818 (no error: it carries the result out)
    def __init__(self, value: Tensor) -> None:
        self.value = value


def _tap_module(network: nn.Module, layer: str, x: Tensor) -> Tensor:
    module = _submodule(network, layer)
    thread = threading.get_ident()

    def stop(_: nn.Module, __: Any, out: Tensor) -> None:
        if threading.get_ident() == thread:
            raise _Reached(out)

    with module.register_forward_hook(stop):
        try:
            network._call_impl(x)  # as it is, even if compiled in place
        except _Reached as reached:
            return reached.value
    raise ValueError(f"`layer` (={layer!r}) is never reached by the network.")


def _submodule(network: nn.Module, layer: str) -> nn.Module:
    layer = name_within(network, layer)
    try:
        if layer:
            return network.get_submodule(layer)
    except AttributeError:
        pass
    raise _unknown(network, layer)


@contextmanager
def _shown(network: nn.Module, looks: Mapping[str, Look]) -> Iterator[None]:
    """The outputs of these modules are shown while this context lasts."""
    thread, unseen = threading.get_ident(), dict(looks)

    def show(name: str, out: Tensor) -> Tensor | None:
        if threading.get_ident() != thread or name not in unseen:
            return None
        return unseen.pop(name)(out)

    with ExitStack() as hooks:
        for name in looks:
            module = _submodule(network, name)
            hook = module.register_forward_hook(lambda _, __, out, name=name: show(name, out))
            hooks.enter_context(hook)
        yield
    if unseen:
        raise ValueError(f"`layer` (={next(iter(unseen))!r}) is never reached by the network.")


def _unknown(network: nn.Module, layer: str) -> ValueError:
    import difflib

    names = layer_names(network)
    close = difflib.get_close_matches(layer, names, 3) or [*names[:2], *names[-1:]]
    return ValueError(
        f"`layer` (={layer!r}) is no layer of the network: did you mean {', '.join(close)}?"
    )
