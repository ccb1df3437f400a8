"""What operators that are made of others make, and hold while they run.

A composite operator, one of higher order (``associative_scan``) and one whose kernel calls others
leave storages, and hold others meanwhile, that fake tensors do not tell. They are run alone, in a
trace, with tensors as the nodes of the graph say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from pytest_torchmem.operators.registry import Kind
from pytest_torchmem.operators.spec import spec_of
from pytest_torchmem.profile.operator_calls import GRAPH_NODE
from pytest_torchmem.profile.profile import MemoryProfile
from pytest_torchmem.profile.timeline import Kind as AllocationKind
from pytest_torchmem.step.trees import replace_tensors, tensors_in
from pytest_torchmem.torch_private.dispatch.operators import (
    HigherOrderOperator,
    OpOverload,
    is_view,
)
from pytest_torchmem.torch_private.tensors.storages import storage_address
from pytest_torchmem.tracing.trace import trace


class Inner(NamedTuple):
    """What one node's operators make, in bytes."""

    made: tuple[int | None, ...]
    """Of each tensor that it returns, the bytes of its storage on the device; None where that is an
    argument's."""
    peak: int = 0
    """The most that tensors which they make hold at once; workspaces are not included."""


def run_alone(
    nodes: Iterable[fx.Node], value: Callable[[fx.Node], Any], device: str
) -> dict[fx.Node, Inner]:
    """Run those of some nodes that are several operators, each with tensors of its own.

    ``value`` gives the fake tensors that a node stands for. Nodes that do not run alone, such as
    those that decide by values, are left out.
    """
    found = [node for node in nodes if _is_several(node, device)]
    made: dict[fx.Node, tuple[int | None, ...]] = {}
    if not found:
        return {}

    def run() -> None:
        for place, node in enumerate(found):
            target: Any = node.target
            try:
                made_of = {one: _fresh(value(one), device) for one in node.all_input_nodes}
            except Exception:  # symbols for sizes
                continue
            given = fx.node.map_arg((node.args, node.kwargs), made_of.__getitem__)
            result = call_alone(str(place), target, *given)
            if result is not _FAILED:
                made[node] = _storages(result, given, device)

    profile = trace(run, device=device, memory="unlimited", values="none")
    peaks = _peaks(profile)
    return {
        node: Inner(made[node], peaks.get(str(place), 0))
        for place, node in enumerate(found)
        if node in made
    }


_FAILED = object()
"""Stands for the result of what raised."""


def call_alone(label: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call an operator in a trace; its calls have a label. What raises has no answer."""
    token = GRAPH_NODE.set(label)
    try:
        with torch.no_grad():
            return function(*args, **kwargs)
    except Exception:
        return _FAILED
    finally:
        GRAPH_NODE.reset(token)


def _is_several(node: fx.Node, device: str) -> bool:
    operator = node.target
    if isinstance(operator, HigherOrderOperator):
        return True
    if not isinstance(operator, OpOverload) or is_view(operator):
        return False
    spec = spec_of(operator)
    return (
        spec.kind is Kind.DECOMPOSED or spec.composite or spec.on(device).decomposition is not None
    )


def _fresh(value: Any, device: str) -> Any:
    def fresh(tensor: Tensor) -> Tensor:
        shape, stride = tuple(tensor.shape), tensor.stride()
        return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=device)

    return replace_tensors(value, fresh)


def _storages(result: Any, given: Any, device: str) -> tuple[int | None, ...]:
    known = {storage_address(tensor) for tensor in tensors_in(given)}
    return tuple(
        (None if storage_address(one) in known else one.untyped_storage().nbytes())
        if one.device.type == device
        else 0
        for one in tensors_in(result)
        if one.layout is torch.strided
    )


def _peaks(profile: MemoryProfile) -> dict[str, int]:
    """Return the bytes of tensors that the calls of each label made and held at once."""
    spans: dict[str, tuple[int, int]] = {}
    for call in profile.calls or ():
        if call.label:
            start, _ = spans.get(call.label, (call.start, 0))
            spans[call.label] = start, call.stop
    timeline = profile.timeline
    peaks = {}
    for label, (start, stop) in spans.items():
        live = most = 0
        for event in timeline.events[start:stop]:
            allocation = timeline.allocations[abs(event) - 1]
            if allocation.kind is not AllocationKind.WORKSPACE:
                live += allocation.nbytes if event > 0 else -allocation.nbytes
                most = max(most, live)
        peaks[label] = most
    return peaks
