"""Collectives: ``c10d`` (torch/csrc/distributed/c10d/Ops.cpp) and ``_c10d_functional``.

NCCL's kernels work in place, and its own buffers are outside of PyTorch's allocator. A collective
that gets lists of tensors flattens them: ProcessGroupNCCL.cpp, ``allgather``, ``reduce_scatter``.
On the host gloo's threads take and give back what they need, which the allocator of the thread that
asked for the collective does not see.

At the end what gloo (on the CPU) and NCCL refuse of a collective, in their words:
ProcessGroupGloo.cpp, ProcessGroupNCCL.cpp, Utils.hpp.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.operators import elementwise, workspace
from pytest_torchmem.operators.checks import in_cpp
from pytest_torchmem.operators.registry import DEVICES, OperatorKind, Operators, operator
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host
from pytest_torchmem.torch_private import distributed, keys
from pytest_torchmem.torch_private.names import listed

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_FLATTENS = "c10d::reduce_scatter_"
"""What flattens a list of inputs into one tensor for as long as it takes. ``allgather_`` does so
with its outputs, which are its work's (``process_groups.flattened_like``).
"""

_MOVES_SHARD = "_dtensor::shard_dim_alltoall"
"""How a ``DTensor`` is split along another dimension, on GPUs."""
_functional: Any = torch.ops._c10d_functional

_WAITS = "_c10d_functional::wait_tensor"
"""Returns the tensor that it is given (c10d/Functional.cpp); on ``meta`` it makes another one."""

_SENDS = ("_c10d_functional::all_gather", "_c10d_functional::all_to_all")
_REDUCES_PARTS = ("_c10d_functional::reduce_scatter",)
"""Of these gloo sends copies (ProcessGroupGloo.cpp, ``reduce_scatter_tensor_coalesced``); what the
others send is what they make, a clone or what they write to (c10d/Functional.cpp).
"""

_WITHOUT_META = listed("""
    c10d::allgather_into_tensor_coalesced_ c10d::allreduce_coalesced_ c10d::check_for_nan
    c10d::reduce_scatter_tensor_coalesced_
""")
_LISTS = "c10d::allgather_coalesced_"
"""Operators of which Ops.cpp registers no kernel for ``meta``; they write to what they get."""


def describe() -> None:
    """Make a record of every collective that this torch has."""
    distributed.register_meta_kernels()
    there = frozenset(keys.all_operators())

    def present(*names: str, **aspects: Any) -> Operators:
        return operator(*there.intersection(names), **aspects)

    present(_MOVES_SHARD, source="c10d/Functional.cpp").decomposition()(_moved_shard)
    # It makes a tensor subclass that waits at its first use.
    present("_c10d_functional::_wrap_tensor_autograd", kind=OperatorKind.NATIVE)
    present(_WAITS, kind=OperatorKind.NATIVE, waits=True)
    names = [name for name in there if name.partition("::")[0] in NAMESPACES]
    alone = (_FLATTENS, _WAITS)
    operator(*(name for name in names if name not in alone), takes_nothing=frozenset(DEVICES))
    for name in names:
        if name.startswith(_SENDS + _REDUCES_PARTS):
            on = DEVICES if name.startswith(_SENDS) else ("cuda",)
            operator(name, work_holds=frozenset(on))
        if name.endswith("_tensor_out"):  # torch's own functions make another tensor
            operator(name).meta()(lambda out: out)
        checks = _functional_sent if name.startswith(_FUNCTIONAL) else _OF_GLOO.get(name)
        if checks is not None:
            operator(name).check("cpu")(checks)
    operator(*_OF_TENSORS).check("cuda")(_dense_tensors)
    operator("c10d::allreduce_").sparse()(_sparse_reduced)
    operator(_GATHERS).check("cuda")(_gathered_by_nccl)
    operator(_SCATTERS).check("cuda")(_scattered_by_nccl)
    operator(_EXCHANGES).check("cuda")(_exchanged_by_nccl)
    present(*_WITHOUT_META).meta()(elementwise.in_arguments)
    present(_LISTS).meta()(lambda output_lists: (output_lists, None))  # and work
    flattens = present(
        _FLATTENS, takes_nothing=frozenset({"cpu"}), source="ProcessGroupNCCL.cpp, reduce_scatter"
    )
    flattens.workspace("cuda")(  # all inputs in one tensor; ``newLikeFlat``
        lambda input_tensors: sum(map(workspace.dense_bytes, input_tensors[0]))
    )


def _moved_shard(input: Tensor, gather_dim: int, shard_dim: int, group_name: str) -> Tensor:
    """``shard_dim_alltoall``: what is sent and received is contiguous, others' parts first."""
    size = size_of(group_name)
    split, sizes = list(input.shape), list(input.shape)
    split[shard_dim : shard_dim + 1] = [size, split[shard_dim] // size]
    sizes[shard_dim] //= size
    sizes[gather_dim] *= size
    sent = input.view(split).movedim(shard_dim, 0).contiguous()
    parts = [1] * size
    received = _functional.all_to_all_single(sent, parts, parts, group_name)
    whole: Tensor = _functional.wait_tensor(received).movedim(0, gather_dim).contiguous()
    return whole.view(sizes)


_OF_TENSORS = ("c10d::allreduce_", "c10d::broadcast_", "c10d::reduce_")
_POINT_TO_POINT = ("c10d::recv_", "c10d::recv_any_source_", "c10d::send")
_GATHERS, _SCATTERS = "c10d::_allgather_base_", "c10d::_reduce_scatter_base_"
_EXCHANGES = "c10d::alltoall_base_"

_BITWISE = ("BAND", "BOR", "BXOR")

_FUNCTIONAL = tuple(
    f"_c10d_functional::{kind}"
    for kind in ("all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter")
)

_SENT_BY_GLOO = (
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
"""ProcessGroupGloo.cpp, ``GENERATE_ALL_TYPES``; complex numbers come as pairs of real ones."""


def size_of(process_group: Any) -> int:
    """Return how many processes a group has."""
    place = distributed.place_in_group([process_group])
    return 1 if place is None else place[1]


def _listed(sizes: Iterable[int]) -> str:
    return "(" + ", ".join(map(str, sizes)) + ")"


def _options(tensor: Tensor) -> str:
    """c10/core/TensorOptions.cpp."""
    return (
        f"TensorOptions(dtype={in_cpp(tensor)}, device=cpu, layout=Strided, "
        "requires_grad=false (default), pinned_memory=false (default), memory_format=(nullopt))"
    )


def _sent(*tensors: Tensor) -> None:
    """ProcessGroupGloo.cpp, ``GENERATE_ALL_TYPES``."""
    if any(tensor.dtype not in _SENT_BY_GLOO for tensor in tensors):
        raise RuntimeError("Invalid scalar type")


def _match(name: str, tensors: Sequence[Tensor], sizes: Sequence[int], like: Tensor) -> None:
    """Utils.hpp, ``assertTypeAndSizesMatch``."""
    for index, tensor in enumerate(tensors):
        refused = f"ProcessGroupGloo::{name}: invalid tensor"
        if tensor.dtype is not like.dtype:
            expected = f"(expected {_options(like)}, got {_options(tensor)})"
            raise RuntimeError(f"{refused} type at index {index} {expected}")
        if tuple(tensor.shape) != tuple(sizes):
            expected = f"(expected {_listed(sizes)}, got {_listed(tensor.shape)})"
            raise RuntimeError(f"{refused} size at index {index} {expected}")
    _sent(like)


def _gathered_lists(
    output_tensors: Sequence[Sequence[Tensor]], input_tensors: Sequence[Tensor], process_group: Any
) -> None:
    """ProcessGroupGloo.cpp, ``allgather``."""
    outputs, given, size = output_tensors[0], input_tensors[0], size_of(process_group)
    if len(outputs) != size:
        expected = f"(expected length {size}, got {len(outputs)})"
        refused = "ProcessGroupGloo::allgather: invalid output tensor list at index 0"
        raise RuntimeError(f"{refused} {expected}")
    _match("allgather", outputs, given.shape, given)


def _gathered(output_tensor: Tensor, input_tensor: Tensor, process_group: Any) -> None:
    """ProcessGroupGloo.cpp, ``_allgather_base``: parts of the output are shaped as the input."""
    parts = output_tensor.chunk(size_of(process_group))
    _gathered_lists([parts], [input_tensor], process_group)


def _at_root(
    output_tensors: Sequence[Any], input_tensors: Sequence[Any], process_group: Any, root_rank: int
) -> None:
    """ProcessGroupGloo.cpp, ``gather`` and ``scatter``: the root has a tensor for every process."""
    name, kind, lists, own = "scatter", "input", input_tensors, output_tensors
    if input_tensors and isinstance(input_tensors[0], Tensor):
        name, kind, lists, own = "gather", "output", output_tensors, input_tensors
    place = distributed.place_in_group([process_group])
    if place is not None and place[0] == root_rank:
        if len(lists[0]) != place[1]:
            found = f"Incorrect {kind} list size {len(lists[0])}. {kind.capitalize()} list size"
            size = f"should be {place[1]}, same as size of the process group."
            raise RuntimeError(f"ProcessGroupGloo::{name}: {found} {size}")
        _match(name, lists[0], own[0].shape, own[0])
    _sent(*own)


def _scattered(
    output_tensor: Tensor, input_tensor: Tensor, process_group: Any, reduce_op: Any
) -> None:
    """ProcessGroupGloo.cpp, ``reduce_scatter_tensor_coalesced``."""
    if output_tensor.dtype is not input_tensor.dtype:
        names = " vs. ".join(map(in_cpp, (output_tensor, input_tensor)))
        raise RuntimeError(
            f"Check failed: outputTensors[i].dtype() == inputTensors[i].dtype() ({names})."
        )
    first, last = output_tensor.shape[:1].numel() * size_of(process_group), input_tensor.shape[:1]
    if first != last.numel():
        found = f"outputShape[0] * worldSize == inputShape[0] ({first} vs. {last.numel()})"
        raise RuntimeError(f"Check failed: {found}.")
    _sent(input_tensor)
    _reduced_by(reduce_op, input_tensor)


def _scattered_lists(
    output_tensors: Sequence[Tensor],
    input_tensors: Sequence[Sequence[Tensor]],
    process_group: Any,
    reduce_op: Any,
) -> None:
    """ProcessGroupGloo.cpp, ``reduce_scatter``."""
    output, inputs = output_tensors[0], input_tensors[0]
    if len(inputs) != size_of(process_group):
        raise RuntimeError("invalid input tensor list size, must be world size")
    for one in inputs:
        if one.shape != output.shape:
            found = " vs. ".join(" ".join(map(str, each.shape)) for each in (output, one))
            sizes = "outputs[0].sizes().vec() == inputs[0][i].sizes().vec()"
            raise RuntimeError(f"Check failed: {sizes} ({found}).")
    _sent(output)
    _reduced_by(reduce_op, output)


class Exchange(NamedTuple):
    """What ``alltoall_base_`` is given, by the names of its schema."""

    output: Tensor
    input: Tensor
    process_group: Any
    output_split_sizes: Sequence[int]
    input_split_sizes: Sequence[int]

    def check_splits(self) -> None:
        """Utils.hpp, ``checkSplitSizes``, which is asked where either side is split unevenly."""
        sides = (self.input, self.input_split_sizes), (self.output, self.output_split_sizes)
        uneven, size = any(own for _, own in sides), size_of(self.process_group)
        for tensor, own in sides:
            if own and len(own) != size:
                raise RuntimeError("Number of tensor splits not equal to group size")
            if own and sum(own) != tensor.shape[0]:
                raise RuntimeError("Split sizes doesn't match total dim 0 size")
            if uneven and not own and tensor.shape[0] % size:
                raise RuntimeError("Tensor's dim 0 does not divide equally across group size")


def _exchanged(given: Exchange) -> None:
    """ProcessGroupGloo.cpp, ``alltoall_base``: outputs need not be contiguous."""
    if not given.input.is_contiguous():
        raise ValueError("Tensors must be contiguous")
    given.check_splits()
    uneven = given.output_split_sizes or given.input_split_sizes
    if not uneven and given.output.nbytes != given.input.nbytes:
        raise RuntimeError("[enforce fail at gloo/alltoall.cc] in->size == out->size.")
    _sent(given.output)


def _functional_sent(operands: Sequence[Any]) -> None:
    """ProcessGroupGloo.cpp, ``GENERATE_ALL_TYPES``: of one tensor, or of those of a list."""
    _sent(*([operands[0]] if isinstance(operands[0], Tensor) else operands[0]))


def _tensors_sent(tensors: Sequence[Tensor], reduce_op: Any = None) -> None:
    """ProcessGroupGloo.cpp, ``GENERATE_ALL_TYPES`` and ``toFunction``."""
    _sent(*tensors)
    _reduced_by(reduce_op, tensors[0])


def _reduced_by(reduce_op: Any, tensor: Tensor) -> None:
    """ProcessGroupGloo.cpp, ``toFunction``."""
    reduction = distributed.reduction_among([reduce_op])
    if reduction in _BITWISE and tensor.is_floating_point():
        raise RuntimeError(f"Cannot use ReduceOp.{reduction} with non-integral dtype")


def _sent_in_order(tensors: Sequence[Tensor]) -> None:
    """ProcessGroupGloo.cpp, ``checkSingleTensor``; what is sent are bytes of any type."""
    if not all(map(Tensor.is_contiguous, tensors)):
        raise RuntimeError("input tensor has to be contiguous")


def _dense_tensors(tensors: Sequence[Tensor]) -> None:
    """ProcessGroupNCCL.cpp, ``check_gpu_single_tensor``; of what is sent it only warns."""
    for tensor in tensors:
        if not tensor.is_contiguous(memory_format=workspace.suggested_format(tensor)):
            raise ValueError("Tensors must be contiguous")


def _sparse_reduced(tensors: Sequence[Tensor], machine: Host | Gpu) -> Sequence[Tensor]:
    """ProcessGroupNCCL.cpp, ``allreduce_sparse``. gloo adds up what all processes have, on a thread
    of its own: as many rows as this one has, where all have the same.
    """
    if isinstance(machine, Gpu):
        refused = "NCCL does not support all_reduce with sparse tensors. Please use dense tensors"
        raise RuntimeError(f"{refused} instead.")
    return tensors


def _gathered_by_nccl(output_tensor: Tensor, input_tensor: Tensor, process_group: Any) -> None:
    """ProcessGroupNCCL.cpp, ``_allgather_base``."""
    _dense_tensors((input_tensor, output_tensor))
    if input_tensor.dtype is not output_tensor.dtype:
        raise TypeError("output tensor must have the same type as input tensor")
    if input_tensor.numel() * size_of(process_group) != output_tensor.numel():
        raise ValueError("output tensor size must be equal to world_size times input tensor size")


def _scattered_by_nccl(output_tensor: Tensor, input_tensor: Tensor, process_group: Any) -> None:
    """ProcessGroupNCCL.cpp, ``_reduce_scatter_base``."""
    if input_tensor.dtype is not output_tensor.dtype:
        raise TypeError("input tensor must be the same type as the output tensor.")
    if input_tensor.numel() != output_tensor.numel() * size_of(process_group):
        refused = "input tensor must be the same size as output size times world size"
        raise ValueError(refused)
    _dense_tensors((input_tensor, output_tensor))


def _exchanged_by_nccl(given: Exchange) -> None:
    """ProcessGroupNCCL.cpp, ``alltoall_base``."""
    _dense_tensors((given.output, given.input))
    given.check_splits()


_OF_GLOO: Mapping[str, Callable[..., None]] = {
    "c10d::allgather_": _gathered_lists,
    _GATHERS: _gathered,
    **dict.fromkeys(("c10d::gather_", "c10d::scatter_"), _at_root),
    _SCATTERS: _scattered,
    "c10d::reduce_scatter_": _scattered_lists,
    _EXCHANGES: _exchanged,
    **dict.fromkeys((*_OF_TENSORS, "c10d::allreduce_coalesced_"), _tensors_sent),
    **dict.fromkeys(_POINT_TO_POINT, _sent_in_order),
}
