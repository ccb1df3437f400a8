"""Collectives of a group of one process, whose outputs are its own inputs.

torch/csrc/distributed/c10d/Ops.cpp. Where others would have to be there, nothing is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from pytest_torchmem.interception.call import Call
from pytest_torchmem.torch_private.process_groups import processes_of

Copies = Iterable[tuple[Tensor, Tensor]]
"""What is written, and the tensor that it is a copy of."""


def _nothing(*_: Any) -> Copies:
    return ()


def _single(output: Tensor, input: Tensor, *_: Any) -> Copies:
    return ((output, input),)


def _lists(outputs: list[Tensor], inputs: list[Tensor], *_: Any) -> Copies:
    return zip(outputs, inputs, strict=True)


def _to_first(outputs: list[list[Tensor]], inputs: list[Tensor], *_: Any) -> Copies:
    return ((of_all[0], input) for of_all, input in zip(outputs, inputs, strict=True))


def _of_first(outputs: list[Tensor], inputs: list[list[Tensor]], *_: Any) -> Copies:
    return ((output, of_all[0]) for output, of_all in zip(outputs, inputs, strict=True))


def _first_list(outputs: list[list[Tensor]], inputs: list[Tensor], *_: Any) -> Copies:
    return zip(outputs[0], inputs, strict=True)


_COLLECTIVES: dict[str, Callable[..., Copies]] = {
    "c10d::allgather_": _to_first,
    "c10d::_allgather_base_": _single,
    "c10d::allgather_coalesced_": _first_list,
    "c10d::allgather_into_tensor_coalesced_": _lists,
    "c10d::allreduce_": _nothing,
    "c10d::allreduce_coalesced_": _nothing,
    "c10d::alltoall_": _lists,
    "c10d::alltoall_base_": _single,
    "c10d::barrier": _nothing,
    "c10d::broadcast_": _nothing,
    "c10d::gather_": _to_first,
    "c10d::reduce_": _nothing,
    "c10d::reduce_scatter_": _of_first,
    "c10d::_reduce_scatter_base_": _single,
    "c10d::scatter_": _of_first,
}


def copies_of_one_process(call: Call) -> list[tuple[Tensor, Tensor]] | None:
    """Return what a collective copies in a group of one process, None for any other operator."""
    copies = _COLLECTIVES.get(call.operator.name)
    if copies is None or processes_of([*call.args, *call.kwargs.values()]) != 1:
        return None
    return list(copies(*call.args))


FUNCTIONAL = "_c10d_functional"
"""The namespace of collectives that return their outputs; c10d/Functional.cpp."""


def run_functional(operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a collective that returns its outputs gives of real tensors, in a group of one.

    Raises ``NotImplementedError`` for a larger group.
    """
    given, name = args[0], operator.partition("::")[2].partition(".")[0]
    if name == "wait_tensor":
        return given
    if processes_of([*args, *kwargs.values()]) != 1:
        raise NotImplementedError("other processes would have to be there")
    if "out" in kwargs:
        return kwargs["out"].copy_(given)
    if name.endswith("_"):
        return given
    return given.clone() if isinstance(given, Tensor) else [one.clone() for one in given]
