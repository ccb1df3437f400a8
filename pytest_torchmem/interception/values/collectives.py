"""What collectives give, where this process alone says it: small values, such as sizes and counts.

torch/csrc/distributed/c10d/Ops.cpp. In a group of one process the outputs are its own inputs. Of
other processes nothing is known: they are taken to have what this one has, and to send to it what
it sends to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.interception.call import Call
from pytest_torchmem.interception.values.memory import worth_knowing
from pytest_torchmem.torch_private.distributed.process_groups import place_in_group


class Copy(NamedTuple):
    """A tensor that is written, and what it is made of."""

    output: Tensor
    source: Tensor
    made: Callable[[Tensor], Tensor] = lambda value: value


class Place(NamedTuple):
    """A process in its group."""

    rank: int
    size: int

    def repeated(self, value: Tensor) -> Tensor:
        """Return what all processes have, one after the other."""
        return torch.cat([value.reshape(-1)] * self.size)

    def own_part(self, value: Tensor) -> Tensor:
        """Return what is this process's of what lies one after the other."""
        return value.reshape(-1).chunk(self.size)[self.rank]


Copies = Iterable[Copy]


def _nothing(*_: Any) -> Copies:
    return ()


def _gather(place: Place, output: Tensor, input: Tensor, *_: Any) -> Copies:
    return (Copy(output, input, place.repeated),)


def _scatter(place: Place, output: Tensor, input: Tensor, *_: Any) -> Copies:
    return (Copy(output, input, place.own_part),)


def _exchange(place: Place, output: Tensor, input: Tensor, *_: Any) -> Copies:
    return (Copy(output, input),) if output.numel() == input.numel() else ()


def _exchange_lists(place: Place, outputs: Any, inputs: Any, *_: Any) -> Iterator[Copy]:
    for output, input in zip(outputs, inputs, strict=True):
        yield from _exchange(place, output, input)


def _gather_each(place: Place, outputs: Any, inputs: Any, *_: Any) -> Copies:
    pairs = zip(outputs, inputs, strict=True)
    return (Copy(output, input, place.repeated) for output, input in pairs)


def _scatter_each(place: Place, outputs: Any, inputs: Any, *_: Any) -> Copies:
    pairs = zip(outputs, inputs, strict=True)
    return (Copy(output, input, place.own_part) for output, input in pairs)


def _to_lists(place: Place, lists: Any, inputs: Any, *_: Any) -> Iterator[Copy]:
    for outputs, input in zip(lists, inputs, strict=bool(lists)):
        for output in outputs:
            yield from _exchange(place, output, input)  # uneven ones are not known


def _from_lists(place: Place, outputs: Any, lists: Any, *_: Any) -> Copies:
    if not lists:  # only the process that scatters has any
        return ()
    return (Copy(out, inputs[place.rank]) for out, inputs in zip(outputs, lists, strict=True))


def _of_processes(place: Place, lists: Any, inputs: Any, *_: Any) -> Iterator[Copy]:
    for outputs in lists:
        for output, input in zip(outputs, inputs, strict=True):
            yield from _exchange(place, output, input)


_COLLECTIVES: dict[str, Callable[..., Copies]] = {
    "c10d::allgather_": _to_lists,
    "c10d::_allgather_base_": _gather,
    "c10d::allgather_coalesced_": _of_processes,
    "c10d::allgather_into_tensor_coalesced_": _gather_each,
    "c10d::allreduce_": _nothing,
    "c10d::allreduce_coalesced_": _nothing,
    "c10d::alltoall_": _exchange_lists,
    "c10d::alltoall_base_": _exchange,
    "c10d::barrier": _nothing,
    "c10d::broadcast_": _nothing,
    "c10d::gather_": _to_lists,
    "c10d::reduce_": _nothing,
    "c10d::reduce_scatter_": _from_lists,
    "c10d::_reduce_scatter_base_": _scatter,
    "c10d::reduce_scatter_tensor_coalesced_": _scatter_each,
    "c10d::scatter_": _from_lists,
}


_EXCHANGES = frozenset({"c10d::alltoall_", "c10d::alltoall_base_"})
"""What processes exchange counts of tokens by, which ``torch.histc`` gives as floating numbers."""


def is_taken_to_be_same(call: Call, tensor: Tensor) -> bool:
    """Whether what others have of a tensor matters: sizes, counts, bytes of objects."""
    integral = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
    counts = integral or call.operator.name in _EXCHANGES
    return counts and worth_knowing(tensor.dtype, tensor.numel())


def copies_of_collective(call: Call) -> tuple[list[Copy], bool] | None:
    """Return what a collective copies, and whether other processes take part; None for others."""
    copies = _COLLECTIVES.get(call.operator.name)
    found = copies and place_in_group([*call.args, *call.kwargs.values()])
    if not copies or found is None:
        return None
    place = Place(*found)
    return list(copies(place, *call.args)), place.size > 1


FUNCTIONAL = "_c10d_functional"
"""The namespace of collectives that return their outputs; c10d/Functional.cpp."""


def run_functional(operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a collective that returns its outputs gives of real tensors.

    Raises ``NotImplementedError`` where that is not known.
    """
    given, name = args[0], operator.partition("::")[2].partition(".")[0]
    if name == "wait_tensor":
        return given
    found = place_in_group([*args, *kwargs.values()])
    if found is None or (found[1] > 1 and not _is_even(name, args)):
        raise NotImplementedError("other processes would have to be there")
    place = Place(*found)
    if "out" in kwargs:
        return kwargs["out"].copy_(_functional(place, name, given).view_as(kwargs["out"]))
    if name.endswith("_"):
        return given
    if isinstance(given, Tensor):
        return _functional(place, name, given)
    return [_functional(place, name, one) for one in given]


def _is_even(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a process receives as much as it sends, or the collective is none that exchanges."""
    if name != "all_to_all_single":
        return name in _SHAPED or name.startswith(("all_reduce", "broadcast"))
    return bool(sum(args[1]) == sum(args[2]))


_SHAPED = frozenset(
    {
        "all_gather_into_tensor",
        "all_gather_into_tensor_coalesced",
        "all_gather_into_tensor_out",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
        "reduce_scatter_tensor_out",
    }
)


def _functional(place: Place, name: str, value: Tensor) -> Tensor:
    """One output, of the shape that it has (c10d/Functional.cpp)."""
    if name.startswith("all_gather"):
        return torch.cat([value] * place.size)
    if name.startswith("reduce_scatter"):
        return value.chunk(place.size)[place.rank].clone()
    return value.clone()
