"""The storages that the values of graphs lie on, from their fake tensors and their operators.

Fake tensors share storages where the real ones will, but for a few things. Where the partitioner
put one node in the place of another that computes the same, a view lies on the fake storage of the
one that is gone (torch/_functorch/compile_utils.py, ``fx_graph_cse``). Each graph has constants of
its own, which are one for fake tensors. Some kernels leave more than their result needs: a loss
that is reduced lies on a storage of all of its elements (aten/src/ATen/native/BinaryOps.cpp,
``TORCH_META_FUNC(smooth_l1_loss)``); those that call other operators are run alone. And some
outputs of kernels of the GPU are on the host, which a fake tensor does not say.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from pytest_torchmem.errors import UsageError
from pytest_torchmem.fake_cuda.api.fake_tensors import device_said
from pytest_torchmem.graphs.inner import Inner, run_alone
from pytest_torchmem.interception.plan import Output, Plan, Same
from pytest_torchmem.interception.plans import find_plan, geometry_of_arguments
from pytest_torchmem.operators.spec import spec_of
from pytest_torchmem.step.trees import argument_leaves, argument_tensors, tensors_in
from pytest_torchmem.torch_private.dispatch.operators import OpOverload, is_view
from pytest_torchmem.torch_private.tensors.storages import storage_address


class Storages:
    """The storages of some graphs, whose values have the same names in all of them, by address."""

    def __init__(self, graphs: Iterable[fx.GraphModule]) -> None:
        nodes = [node for graph in graphs for node in graph.graph.nodes]
        said = [one for node in nodes for one in _devices(node)]
        self._device = "cuda" if any(device == "cuda" for _, device in said) else "cpu"
        self._same: dict[int, int] = {}
        """Storages that are another one, by their addresses."""
        self._nbytes: dict[int, int] = {}
        """The bytes of those that fake tensors do not tell; 0 of those that are elsewhere."""
        self._plans: dict[Any, Plan | None] = {}
        for tensor, device in said:
            if device != self._device:
                self._nbytes[storage_address(tensor)] = 0
        self._inner = run_alone(nodes, _value, self._device)
        for node in nodes:
            inner = self._inner.get(node)
            if inner is not None:
                self._take_from(inner, _values(node))
            elif node.op == "call_function" and isinstance(node.target, OpOverload):
                self._look_at(node, node.target)

    def of(self, node: fx.Node) -> list[tuple[int, int]]:
        """Return the storages of a node's result on the graphs' device, by address, with bytes.

        Raises ``UsageError`` for a node that is read and says nothing of its result.
        """
        if _value(node) is None and "val" not in node.meta and node.op != "output" and node.users:
            raise UsageError(
                f"node {node.name!r} has no tensors in meta['val']: pass graphs of AOTAutograd, "
                'such as trace(model, x, mode="aot").graphs'
            )
        found = []
        for tensor in _values(node):
            address = self._address(tensor)
            nbytes = self._nbytes.get(address, tensor.untyped_storage().nbytes())
            found.append((address, int(nbytes)))  # of symbols: what they stand for
        return found

    def inner_peak(self, node: fx.Node) -> int:
        """Return the bytes that a node of several operators makes and holds at once, or 0."""
        found = self._inner.get(node)
        return 0 if found is None else found.peak

    def _address(self, tensor: Tensor) -> int:
        address = storage_address(tensor)
        return self._same.get(address, address)

    def _look_at(self, node: fx.Node, operator: OpOverload) -> None:
        results = _values(node)
        if is_view(operator):
            for base in _values(node.args[0])[:1] if node.args else ():
                self._lie_on(base, results)
            return
        plan = self._plan(node, operator)
        outputs = [] if plan is None else argument_leaves(plan.outputs, (Output, Same))
        if plan is None or len(outputs) != len(results):
            return
        on_host = spec_of(operator).on(self._device).host_outputs
        for place, (output, result) in enumerate(zip(outputs, results, strict=True)):
            if isinstance(output, Output) and plan.slots[output.slot] >= 0:
                nbytes = 0 if place in on_host else plan.slots[output.slot]
                self._nbytes.setdefault(self._address(result), nbytes)

    def _take_from(self, inner: Inner, results: list[Tensor]) -> None:
        if len(inner.made) == len(results):
            for result, nbytes in zip(results, inner.made, strict=True):
                if nbytes is not None:
                    self._nbytes.setdefault(self._address(result), nbytes)

    def _lie_on(self, base: Tensor, views: list[Tensor]) -> None:
        address = self._address(base)
        for view in views:
            if self._address(view) != address:
                self._same[storage_address(view)] = address
                self._nbytes.setdefault(address, base.untyped_storage().nbytes())

    def _plan(self, node: fx.Node, operator: OpOverload) -> Plan | None:
        """Return the plan of a node's call; ``None`` where it has none before it is run."""
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: one.meta.get("val"))
        tensors: list[Tensor] = []
        spec = spec_of(operator)
        try:
            key = operator, geometry_of_arguments((*args, *kwargs.values()), tensors), (*kwargs,)
            if key not in self._plans:
                own = spec.on(self._device).meta
                found = argument_tensors((args, kwargs))
                self._plans[key] = find_plan(spec, args, dict(kwargs), found, own)
            return self._plans[key]
        except Exception:  # symbols for sizes, data that decides, a device without a kernel
            return None


def _devices(node: fx.Node) -> list[tuple[Tensor, str]]:
    """Return the tensors of a node's result, each with the type of its device.

    A constant that a trace left behind does not say that it was on the GPU; the fake tensor of its
    node does.
    """
    values, fakes = _values(node), list(tensors_in(node.meta.get("val")))
    saying = fakes if node.op == "get_attr" and len(fakes) == len(values) else values
    return [(one, device_said(said).type) for one, said in zip(values, saying, strict=True)]


def _value(node: fx.Node) -> Any:
    """Return the fake tensors of a node's result, or what of its module a node stands for.

    That is a constant, of which each graph has its own, or a graph for an operator of higher order.
    """
    held = _held(node) if node.op == "get_attr" else None
    return node.meta.get("val") if held is None else held


def _held(node: fx.Node) -> Any:
    found: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        found = getattr(found, name, None)
    return found


def _values(node: Any) -> list[Tensor]:
    """Return the fake tensors of a node's result that have a storage, or the real constant."""
    value = _value(node) if isinstance(node, fx.Node) else None
    return [tensor for tensor in tensors_in(value) if tensor.layout is torch.strided]
