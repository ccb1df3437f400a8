"""What collectives give where this process alone says it, and what other processes of a world send.

torch/csrc/distributed/c10d/Ops.cpp. In a group of one process the outputs of a collective are its
own inputs. Of other processes nothing is known: small values, such as sizes and counts, are taken
to be what this one has, and to be sent to it as it sends to them.

A trace has one process at a time. Where its program asks for a value that came from another (sizes,
flags, objects as bytes), the trace ends, that process is traced until it has sent it, and the first
one begins again. What nobody asks for is not looked for: parameters that are broadcast when a model
is wrapped, activations.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from pytest_torchmem.errors import PassEnded, UnknownValueError, UnsupportedOperatorError
from pytest_torchmem.interception.plan import Call
from pytest_torchmem.interception.values.contents import Contents, is_floating, worth_knowing
from pytest_torchmem.step.trees import Args, Kwargs
from pytest_torchmem.torch_private.distributed import group_of, place_in_group, reduction_among


class Copy(NamedTuple):
    """A tensor that is written, and what it is made of."""

    output: Tensor
    source: Tensor
    made: Callable[[Tensor], Tensor] = lambda value: value


_FEW = 16
"""Elements of floating tensors that are flags and statistics, which all processes have alike."""


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

    def gathered(self, value: Tensor) -> Tensor:
        """Return what all processes have of a tensor whose parts they are, one after the other.
        Those of a parameter are alike, and not the same: a router whose experts' weights are split
        would else choose the same of each process's.
        """
        own, parts = value.reshape(-1), []
        if not value.is_floating_point() or value.numel() <= _FEW:
            return torch.cat([own] * self.size)
        for rank in range(self.size):
            generator = torch.Generator().manual_seed(rank)
            factors = torch.rand(own.numel(), generator=generator).mul_(0.2).add_(0.9)
            parts.append(own if rank == self.rank else own * factors.to(own.dtype))
        return torch.cat(parts)

    def reduced_part(self, value: Tensor) -> Tensor:
        """Return what is this process's of what all have reduced."""
        return self.reduced(value.reshape(-1).chunk(self.size)[self.rank])


Copies = Iterable[Copy]


def _nothing(*_: Any) -> Copies:
    return ()


def _gather(place: Place, output: Tensor, input: Tensor, *_: Any) -> Copies:
    return (Copy(output, input, place.gathered),)


def _scattered(place: Place, output: Tensor, input: Tensor, *_: Any) -> Copies:
    return (Copy(output, input, place.reduced_part),)


def _reduce(place: Place, tensors: Sequence[Tensor], *_: Any) -> Copies:
    return (Copy(tensor, tensor, place.reduced) for tensor in tensors)


def _reduce_to_one(
    place: Place, tensors: Sequence[Tensor], group: Any, reduction: Any, root: int, *_: Any
) -> Copies:
    return _reduce(place, tensors) if place.rank == root else ()


def _exchange(place: Place, output: Tensor, input: Tensor, *_: Any) -> Copies:
    return (Copy(output, input),) if output.numel() == input.numel() else ()


def _each(
    copies: Callable[..., Copies], place: Place, outputs: Any, inputs: Any, *_: Any
) -> Copies:
    for output, input in zip(outputs, inputs, strict=True):
        yield from copies(place, output, input)


def _to_lists(place: Place, lists: Any, inputs: Any, *_: Any) -> Iterator[Copy]:
    for outputs, input in zip(lists, inputs, strict=bool(lists)):
        for output in outputs:
            yield from _exchange(place, output, input)  # uneven ones are not known


def _from_lists(place: Place, outputs: Any, lists: Any, *_: Any) -> Copies:
    pairs = zip(outputs, lists, strict=bool(lists))  # only the process that scatters has any
    return (Copy(out, inputs[place.rank], place.reduced) for out, inputs in pairs)


def _of_processes(place: Place, lists: Any, inputs: Any, *_: Any) -> Iterator[Copy]:
    for outputs in lists:
        yield from _each(_exchange, place, outputs, inputs)


_COLLECTIVES: dict[str, Callable[..., Copies]] = {
    "c10d::allgather_": _to_lists,
    "c10d::_allgather_base_": _gather,
    "c10d::allgather_coalesced_": _of_processes,
    "c10d::allgather_into_tensor_coalesced_": partial(_each, _gather),
    "c10d::allreduce_": _reduce,
    "c10d::allreduce_coalesced_": _reduce,
    "c10d::alltoall_": partial(_each, _exchange),
    "c10d::alltoall_base_": _exchange,
    "c10d::barrier": _nothing,
    "c10d::broadcast_": _nothing,
    "c10d::gather_": _to_lists,
    "c10d::reduce_": _reduce_to_one,
    "c10d::reduce_scatter_": _from_lists,
    "c10d::_reduce_scatter_base_": _scattered,
    "c10d::reduce_scatter_tensor_coalesced_": partial(_each, _scattered),
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
    counts = not is_floating(tensor.dtype) or call.operator.name in _EXCHANGES
    return counts and worth_knowing(tensor.dtype, tensor.numel())


def copies_of_collective(call: Call) -> tuple[list[Copy], bool] | None:
    """Return what a collective copies, and whether other processes have a part in it, or None."""
    copies = _COLLECTIVES.get(call.operator.name)
    arguments = [*call.args, *call.kwargs.values()]
    found = copies and place_in_group(arguments)
    if not copies or found is None:
        return None
    place = Place(*found, reduction_among(arguments))
    return list(copies(place, *call.args)), place.size > 1 and call.operator.name != _SCATTERS


SUMS = "_c10d_functional::all_reduce"
"""What begins the names of those that reduce."""


def run_functional(operator: str, args: Args, kwargs: Kwargs) -> Any:
    """Return what a collective that returns its outputs gives of real tensors. Raises
    ``NotImplementedError`` where that is not known.
    """
    given, name = args[0], operator.partition("::")[2].partition(".")[0]
    if name == "wait_tensor":
        return given
    found = place_in_group([*args, *kwargs.values()])
    # Whether a process receives as much as it sends, or the collective is none that exchanges.
    is_even = name.startswith(_EVEN)
    if name == "all_to_all_single":
        is_even = sum(args[1]) == sum(args[2])
    if found is None or (found[1] > 1 and not is_even):
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


_REDUCING = ("all_reduce", "reduce_scatter")
_EVEN = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")


def _functional(place: Place, name: str, value: Tensor) -> Tensor:
    """One output, of the shape that it has (c10d/Functional.cpp)."""
    if name.startswith("all_gather"):
        rows, *columns = value.shape or (1,)
        return place.gathered(value).reshape(rows * place.size, *columns)
    if name.startswith("reduce_scatter"):
        value = value.chunk(place.size)[place.rank]
    return place.reduced(value).to(value.dtype, copy=True)


_LARGEST_OBJECT = 1 << 26
"""Elements of other tensors: an object's bytes, the state of an optimizer say."""
_EVERYBODY = -1
_CAUSES = 32
"""Errors behind an error that are looked at."""


class Message(NamedTuple):
    """What was sent, so that both sides call it the same."""

    kind: str
    group: tuple[int, ...]
    name: str
    """Of the group, or the key of a store."""
    source: int
    receiver: int
    tag: int = 0
    number: int = 0
    """How many such messages there were before."""


FILES = Message("files", (), "", 0, _EVERYBODY)
"""Stands for all files that the first process writes."""
FILE, AWAITED_FILE, AWAITED_CHANGE = "file", "awaited file", "awaited change"
"""Kinds of messages that say whether a file is there, which is their name: when as many collectives
as their number were called, or as soon as it is. A change of a directory is never said to be there:
the process runs to its end, and the one that waits looks itself.
"""
OF_FILES = (FILE, AWAITED_FILE, AWAITED_CHANGE)
_LOOKS = 4
"""How often the first process is asked about files that the program only looks for."""
_POINT_TO_POINT = ("c10d::send", "c10d::recv_", "c10d::recv_any_source_")
Messages = dict[Message, tuple[Any, ...]]
"""Values of the tensors of messages, None for those that the sender does not know."""


class MessageNeeded(PassEnded):
    """Ends a pass whose program asks for what another process has sent."""

    def __init__(self, message: Message) -> None:
        super().__init__(message)
        self.message = message
        self.failure = ""
        """The error by which the program has failed meanwhile, if it has."""


class MessageSent(PassEnded):
    """Ends a pass of a rank that was traced for its message, once that is sent."""


End = TypeVar("End", MessageNeeded, MessageSent)


def is_there(message: Message) -> bool:
    return message.kind != AWAITED_CHANGE and os.path.exists(message.name)


class Mailbox:
    """What the process of one pass has sent and was sent."""

    def __init__(
        self, messages: Messages, rank: int, awaited: Message | None = None, *, looks: bool = True
    ) -> None:
        """``awaited``: the pass is run for a message, and ends soon after that was sent. ``looks``:
        another process is asked about files that the program only looks for.
        """
        self._messages, self._rank, self._awaited = messages, rank, awaited
        self._looks = looks
        self._collectives: Counter[tuple[int, ...]] = Counter()
        """How many were called so far, by the processes that call them together."""
        self._numbers: dict[Message, int] = {}
        self._received: dict[Message, None] = {}
        """Messages that are not there yet, in order."""
        self.ended: MessageNeeded | MessageSent | None = None
        """What has ended the pass: the program, or C++, may have caught it."""

    # -- tensors -----------------------------------------------------------------------------------

    def deliver(self, call: Call, contents: Contents) -> bool:
        """Take note of what a collective sends, or let it receive; return whether that was all."""
        read = _MESSAGES.get(call.operator.name)
        try:
            found = group_of([*call.args, *call.kwargs.values()])
        except LookupError:
            raise UnsupportedOperatorError(
                f"{call.operator.name} is called with a process group from before the trace, of "
                "other processes than those of world_size=. Make the group, and what was wrapped "
                "with it (DistributedDataParallel, a mesh), in the function that is traced"
            ) from None
        if found and call.operator.name not in _POINT_TO_POINT:
            self._collectives[found[1]] += 1
            self._say_whether_file_is_there()
        parts = tuple(read(*found[1:], *call.args)) if read and found else ()
        if not found or len(found[1]) < 2 or not parts:
            if self._awaited in self._messages:  # one was often of several: sizes, then bytes
                raise self._end(MessageSent())
            return False
        name, ranks, _ = found
        received = False
        for kind, source, receiver, tag, tensors in parts:
            message = self._counted(Message(kind, ranks, name, source, receiver, tag))
            if source == self._rank:
                self._send(message, tensors, call, contents)
            elif receiver in (self._rank, _EVERYBODY):
                received |= self._receive(message, tensors, call, contents)
        return received

    def _counted(self, message: Message) -> Message:
        number = self._numbers[message] = self._numbers.get(message, -1) + 1
        return message._replace(number=number)

    def _send(
        self, message: Message, tensors: Sequence[Tensor], call: Call, contents: Contents
    ) -> None:
        values = []
        for tensor in tensors:
            known = contents.find(_record(call, tensor), tensor) if _is_small(tensor) else None
            values.append(None if known is None else known.clone())
        self._messages[message] = tuple(values)

    def _receive(
        self, message: Message, tensors: Sequence[Tensor], call: Call, contents: Contents
    ) -> bool:
        if not all(map(_is_small, tensors)):
            return False
        values = self._messages.get(message)
        if values is None:
            self._received[message] = None
            values = (None,) * len(tensors)
        for tensor, value in zip(tensors, values, strict=True):
            record = _record(call, tensor)
            if value is None and (before := contents.find(record, tensor)) is not None:
                # What C++ reads without an operator (the state of a generator, which is none then)
                # is not what was there before.
                before.zero_()
            contents.write(record, tensor, value)
        return True

    def pass_on(self, call: Call, contents: Contents) -> tuple[Tensor | None, ...] | None:
        """Return the values that outputs of a functional broadcast have where this process receives
        them, ``None`` for each that is not known; or ``None`` where it sends them.
        """
        name, ranks, _ = group_of([*call.args, *call.kwargs.values()]) or ("", (), 0)
        if len(ranks) < 2:
            return None
        source = ranks[call.args[1]]
        message = self._counted(Message("broadcast", ranks, name, source, _EVERYBODY))
        if source == self._rank:
            self._send(message, call.tensors, call, contents)
            return None
        values: tuple[Tensor | None, ...] = (None,) * len(call.tensors)
        if all(map(_is_small, call.tensors)):
            if message not in self._messages:
                self._received[message] = None
            values = self._messages.get(message, values)
        return values

    # -- stores ------------------------------------------------------------------------------------

    def write(self, key: str, value: bytes) -> None:
        self._messages[Message("store", (), key, self._rank, _EVERYBODY)] = (value,)

    def read(self, key: str) -> bytes | None:
        """Return what the first process writes to a store; None where it is this one."""
        if self._rank == 0:
            return None
        message = Message("store", (), key, 0, _EVERYBODY)
        if message not in self._messages:
            raise self._end(MessageNeeded(message))
        return bytes(self._messages[message][0])

    # -- files -------------------------------------------------------------------------------------

    def look_for(self, path: str) -> None:
        """Ask the first process about a file that the program looks for and that is not there.
        Without a collective before, nothing says that the program expects another to have written
        it.
        """
        number, own = self._called_with(0), self._rank
        asked = [one for one in self._messages if one.kind == FILE and one.receiver == own]
        if not (self._looks and own and number) or len(asked) >= _LOOKS:
            return
        # It has done what it did until then, whatever it was asked about.
        if all(one.number < number for one in asked):
            raise self._end(MessageNeeded(Message(FILE, (), path, 0, own, number=number)))

    def wait_for(self, path: str, processes: int, kind: str = AWAITED_FILE) -> None:
        """Ask the other ranks, one by one, for a file or directory that the program waits for."""
        awaited = self._awaited
        if awaited is not None and (awaited.kind, awaited.name) == (kind, path):
            self._messages[awaited] = (False,)
            raise self._end(MessageSent())
        for source in range(processes):
            message = Message(kind, (), path, source, self._rank)
            if self._messages.get(message, (False,))[0]:
                return
            if source != self._rank and message not in self._messages:
                raise self._end(MessageNeeded(message))

    def hides(self, path: str) -> bool:
        """Return whether a file that is there now is to be written later, by another process."""
        there = [
            one.number
            for one, said in self._messages.items()
            if one.kind == FILE and (one.name, one.receiver) == (path, self._rank) and said[0]
        ]
        return bool(there) and min(there) > self._called_with(0)

    def is_read_by_other(self, path: str) -> bool:
        """Return whether this process, traced for another, has written a file for it before."""
        return self._awaited is not None and any(
            one.kind == FILE and one.name == path and said[0]
            for one, said in self._messages.items()
        )

    def _called_with(self, other: int) -> int:
        return sum(number for ranks, number in self._collectives.items() if other in ranks)

    def _say_whether_file_is_there(self) -> None:
        awaited = self._awaited
        if awaited is None or awaited.kind not in OF_FILES:
            return
        found = is_there(awaited)
        if awaited.kind == FILE:
            is_time = 0 < awaited.number <= self._called_with(awaited.receiver)
        else:
            is_time = found
        if is_time:
            self._messages[awaited] = (found,)
            raise self._end(MessageSent())

    # -- the end -----------------------------------------------------------------------------------

    def needed(self) -> MessageNeeded | None:
        """Return what ends the pass now that a value is not known: the last message, if any."""
        if not self._received:
            return None
        return self._end(MessageNeeded(next(reversed(self._received))))

    def needed_after(self, lacks: FileNotFoundError | None) -> MessageNeeded | None:
        """Return the message whose absence made the program fail; None where none is missing.
        ``lacks`` is why it has failed, if it is for a file.
        """
        if lacks is not None and self._rank:
            number, path = self._called_with(0), lacks.filename
            message = FILES
            if number and isinstance(path, (str, os.PathLike)):
                path = os.path.abspath(path)
                message = Message(FILE, (), path, 0, self._rank, number=number)
            for one in (message, FILES):
                if one not in self._messages:
                    return self._end(MessageNeeded(one))
        return self.needed()

    def _end(self, end: End) -> End:
        self.ended = end
        return end


def _record(call: Call, tensor: Tensor) -> Any:
    return next(r for one, r in call.pairs() if one is tensor)


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() <= (_FEW if is_floating(tensor.dtype) else _LARGEST_OBJECT)


_Parts = Iterator[tuple[str, int, int, int, Sequence[Tensor]]]
"""Kind, source, receiver and tag of messages, with the tensors that are sent or received."""

_Ranks = tuple[int, ...]


def _member(ranks: _Ranks, place: int, operation: str) -> int:
    """Return the rank in a place of a group, or raise (assertRootRank, c10d/Utils.hpp)."""
    if not 0 <= place < len(ranks):
        raise RuntimeError(f"{operation}: invalid root rank: {place}")
    return ranks[place]


def _broadcast(
    ranks: _Ranks, own: int, tensors: Any, group: Any, root: int, *others: Any
) -> _Parts:
    yield "broadcast", _member(ranks, root, "broadcast"), _EVERYBODY, 0, tensors


def _send(ranks: _Ranks, own: int, tensors: Any, group: Any, to: int, tag: int) -> _Parts:
    yield "send", own, _member(ranks, to, "send"), tag, tensors


def _receive(ranks: _Ranks, own: int, tensors: Any, group: Any, source: int, tag: int) -> _Parts:
    yield "send", _member(ranks, source, "recv"), own, tag, tensors


def _scatter(
    ranks: _Ranks, own: int, outputs: Any, lists: Any, group: Any, root: int, *others: Any
) -> _Parts:
    source = _member(ranks, root, "scatter")
    if lists:
        for rank, tensor in zip(ranks, lists[0], strict=True):
            yield "scatter", source, rank, 0, (tensor,)
    else:
        yield "scatter", source, own, 0, outputs


#: torch/csrc/distributed/c10d/Ops.cpp
_MESSAGES: dict[str, Callable[..., _Parts]] = {
    "c10d::broadcast_": _broadcast,
    "c10d::recv_": _receive,
    "c10d::scatter_": _scatter,
    "c10d::send": _send,
}


def lacks_file(error: BaseException) -> FileNotFoundError | None:
    """Return the error of a missing file, if that made the program fail."""
    seen: list[BaseException | None] = [error]
    for one in seen:
        if isinstance(one, FileNotFoundError):
            return one
        if one is None or len(seen) > _CAUSES:
            continue
        failures = getattr(one, "failures", None)  # torch.distributed.checkpoint's, by rank
        if isinstance(failures, dict):
            pairs = [failure for failure in failures.values() if isinstance(failure, tuple)]
            seen += [part for pair in pairs for part in pair if isinstance(part, BaseException)]
        seen += [one.__cause__, one.__context__]
    return None


def never_sent(message: Message, why: str, failure: str = "") -> UnknownValueError:
    """Return the error for a message that its sender does not send. ``failure``: the error by which
    the program fails without.
    """
    failure = f". Without it the program fails ({failure})" if failure else ""
    named = {"store": f"the key {message.name!r} of a store", AWAITED_FILE: f"file {message.name}"}
    what = named.get(message.kind, message.kind)
    return UnknownValueError(
        f"the program asks for what rank {message.source} sends ({what}), and {why}{failure}. "
        "Trace the program with the same arguments that its processes have, or skip this line "
        "while tracing"
    )
