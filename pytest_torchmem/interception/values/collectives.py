"""What collectives give, where this process alone says it: small values, such as sizes and counts.

torch/csrc/distributed/c10d/Ops.cpp. In a group of one process the outputs are its own inputs. Of
other processes nothing is known: they are taken to have what this one has, and to send to it what
it sends to them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.interception.call import Call
from pytest_torchmem.interception.values.policy import worth_knowing
from pytest_torchmem.torch_private.distributed import place_in_group, reduction_among


class Copy(NamedTuple):
    """A tensor that is written, and what it is made of."""

    output: Tensor
    source: Tensor
    made: Callable[[Tensor], Tensor] = lambda value: value


_FEW = 16
"""Elements of floating tensors that are statistics, which all processes have alike."""


class Place(NamedTuple):
    """A process in its group."""

    rank: int
    size: int
    reduction: str = ""
    """What is made of all processes' values, as ``ReduceOp`` names it; "" for nothing."""

    def reduced(self, value: Tensor) -> Tensor:
        """Return what is made of so many values that are the same."""
        if self.reduction == "SUM":
            return value * self.size
        if self.reduction == "PRODUCT":
            return value**self.size
        if self.reduction == "BXOR":
            return value * (self.size % 2)
        return value  # the mean, the least, the greatest

    def repeated(self, value: Tensor) -> Tensor:
        """Return what all processes have, one after the other."""
        return torch.cat([value.reshape(-1)] * self.size)

    def gathered(self, value: Tensor) -> Tensor:
        """Return what all processes have of a tensor whose parts they are, one after the other.

        Those of a parameter are alike, and not the same: a router whose experts' weights are split
        would else choose the same of each process's.
        """
        if not value.is_floating_point() or value.numel() <= _FEW:
            return self.repeated(value)
        own, parts = value.reshape(-1), []
        for rank in range(self.size):
            generator = torch.Generator().manual_seed(rank)
            factors = torch.rand(own.numel(), generator=generator).mul_(0.2).add_(0.9)
            parts.append(own if rank == self.rank else own * factors.to(own.dtype))
        return torch.cat(parts)

    def own_part(self, value: Tensor) -> Tensor:
        """Return what is this process's of what lies one after the other."""
        return value.reshape(-1).chunk(self.size)[self.rank]

    def reduced_part(self, value: Tensor) -> Tensor:
        """Return what is this process's of what all have reduced."""
        return self.reduced(self.own_part(value))


Copies = Iterable[Copy]


def _nothing(*_: Any) -> Copies:
    return ()


def _gather(place: Place, output: Tensor, input: Tensor, *_: Any) -> Copies:
    return (Copy(output, input, place.gathered),)


def _scatter(place: Place, output: Tensor, input: Tensor, *_: Any) -> Copies:
    return (Copy(output, input, place.reduced_part),)


def _reduce(place: Place, tensors: Sequence[Tensor], *_: Any) -> Copies:
    return (Copy(tensor, tensor, place.reduced) for tensor in tensors)


def _reduce_to_one(
    place: Place, tensors: Sequence[Tensor], group: Any, reduction: Any, root: int, *_: Any
) -> Copies:
    return _reduce(place, tensors) if place.rank == root else ()


def _exchange(place: Place, output: Tensor, input: Tensor, *_: Any) -> Copies:
    return (Copy(output, input),) if output.numel() == input.numel() else ()


def _exchange_lists(place: Place, outputs: Any, inputs: Any, *_: Any) -> Iterator[Copy]:
    for output, input in zip(outputs, inputs, strict=True):
        yield from _exchange(place, output, input)


def _gather_each(place: Place, outputs: Any, inputs: Any, *_: Any) -> Copies:
    pairs = zip(outputs, inputs, strict=True)
    return (Copy(output, input, place.gathered) for output, input in pairs)


def _scatter_each(place: Place, outputs: Any, inputs: Any, *_: Any) -> Copies:
    pairs = zip(outputs, inputs, strict=True)
    return (Copy(output, input, place.reduced_part) for output, input in pairs)


def _to_lists(place: Place, lists: Any, inputs: Any, *_: Any) -> Iterator[Copy]:
    for outputs, input in zip(lists, inputs, strict=bool(lists)):
        for output in outputs:
            yield from _exchange(place, output, input)  # uneven ones are not known


def _from_lists(place: Place, outputs: Any, lists: Any, *_: Any) -> Copies:
    if not lists:  # only the process that scatters has any
        return ()
    return (Copy(out, inputs[place.rank]) for out, inputs in zip(outputs, lists, strict=True))


def _reduce_lists(place: Place, outputs: Any, lists: Any, *_: Any) -> Copies:
    pairs = zip(outputs, lists, strict=True)
    return (Copy(out, inputs[place.rank], place.reduced) for out, inputs in pairs)


def _of_processes(place: Place, lists: Any, inputs: Any, *_: Any) -> Iterator[Copy]:
    for outputs in lists:
        for output, input in zip(outputs, inputs, strict=True):
            yield from _exchange(place, output, input)


_COLLECTIVES: dict[str, Callable[..., Copies]] = {
    "c10d::allgather_": _to_lists,
    "c10d::_allgather_base_": _gather,
    "c10d::allgather_coalesced_": _of_processes,
    "c10d::allgather_into_tensor_coalesced_": _gather_each,
    "c10d::allreduce_": _reduce,
    "c10d::allreduce_coalesced_": _reduce,
    "c10d::alltoall_": _exchange_lists,
    "c10d::alltoall_base_": _exchange,
    "c10d::barrier": _nothing,
    "c10d::broadcast_": _nothing,
    "c10d::gather_": _to_lists,
    "c10d::reduce_": _reduce_to_one,
    "c10d::reduce_scatter_": _reduce_lists,
    "c10d::_reduce_scatter_base_": _scatter,
    "c10d::reduce_scatter_tensor_coalesced_": _scatter_each,
    "c10d::scatter_": _from_lists,
}


_SCATTERS = "c10d::scatter_"
"""What the process that sends gives itself is its own."""
_EXCHANGES = frozenset({"c10d::alltoall_", "c10d::alltoall_base_"})
"""What processes exchange counts of tokens by, which ``torch.histc`` gives as floating numbers."""


def includes_others(call: Call) -> bool:
    """Whether a collective that returns its outputs makes these of what several processes have."""
    found = place_in_group([*call.args, *call.kwargs.values()])
    return found is not None and found[1] > 1


def is_taken_to_be_same(call: Call, tensor: Tensor) -> bool:
    """Whether what others have of a tensor matters: sizes, counts, bytes of objects."""
    integral = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
    counts = integral or call.operator.name in _EXCHANGES
    return counts and worth_knowing(tensor.dtype, tensor.numel())


def copies_of_collective(call: Call) -> tuple[list[Copy], bool] | None:
    """Return what a collective copies, and whether other processes have a part in that; None for
    others.
    """
    copies = _COLLECTIVES.get(call.operator.name)
    arguments = [*call.args, *call.kwargs.values()]
    found = copies and place_in_group(arguments)
    if not copies or found is None:
        return None
    place = Place(*found, reduction_among(arguments))
    return list(copies(place, *call.args)), place.size > 1 and call.operator.name != _SCATTERS


SUMS = "_c10d_functional::all_reduce"
"""What begins the names of those that reduce."""


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
    reduces = name.startswith(_REDUCING)
    place = Place(*found, str(args[1]).upper() if reduces else "")
    if "out" in kwargs:
        return kwargs["out"].copy_(_functional(place, name, given).view_as(kwargs["out"]))
    if name.endswith("_"):
        for one in [given] if isinstance(given, Tensor) else given:
            one.copy_(place.reduced(one))
        return given
    if isinstance(given, Tensor):
        return _functional(place, name, given)
    return [_functional(place, name, one) for one in given]


def _is_even(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a process receives as much as it sends, or the collective is none that exchanges."""
    if name != "all_to_all_single":
        return name in _SHAPED or name.startswith(("all_reduce", "broadcast"))
    return bool(sum(args[1]) == sum(args[2]))


_REDUCING = ("all_reduce", "reduce_scatter")
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
        rows, *columns = value.shape or (1,)
        return place.gathered(value).reshape(rows * place.size, *columns)
    if name.startswith("reduce_scatter"):
        value = value.chunk(place.size)[place.rank]
    return place.reduced(value).to(value.dtype, copy=True)
