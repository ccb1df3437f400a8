"""What gloo (on the CPU) and NCCL refuse of a collective, in their words.

torch/csrc/distributed/c10d: ProcessGroupGloo.cpp, ProcessGroupNCCL.cpp, Utils.hpp.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.checks import dtype_in_cpp
from pytest_torchmem.operators.geometry import suggested_format
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host
from pytest_torchmem.torch_private.distributed.process_groups import place_in_group, reduction_among

_OF_TENSORS = ("c10d::allreduce_", "c10d::broadcast_", "c10d::reduce_")
_POINT_TO_POINT = ("c10d::recv_", "c10d::recv_any_source_", "c10d::send")
_GATHERS, _SCATTERS = "c10d::_allgather_base_", "c10d::_reduce_scatter_base_"
_EXCHANGES = "c10d::alltoall_base_"

_BITWISE = ("BAND", "BOR", "BXOR")

_FUNCTIONAL = tuple(
    f"_c10d_functional::{kind}"
    for kind in ("all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter")
)

_SENT_BY_GLOO = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)
"""ProcessGroupGloo.cpp, ``GENERATE_ALL_TYPES``; complex numbers come as pairs of real ones."""


def describe_checks(names: Iterable[str]) -> None:
    """Let groups refuse what their backends do, of the collectives ``names``."""
    for name in names:
        checks = _OF_GLOO.get(name, _of_dtypes(name))
        if checks is not None:
            operator(name).check("cpu")(checks)
    operator(*_OF_TENSORS).check("cuda")(_dense_tensors)
    operator("c10d::allreduce_").sparse()(_sparse_reduced)
    operator(_GATHERS).check("cuda")(_gathered_by_nccl)
    operator(_SCATTERS).check("cuda")(_scattered_by_nccl)
    operator(_EXCHANGES).check("cuda")(_exchanged_by_nccl)


def _of_dtypes(name: str) -> Callable[..., None] | None:
    """Return what refuses the dtypes of a functional collective, which gloo sends by their type."""
    if not name.startswith(_FUNCTIONAL):
        return None
    return _inputs_sent if "_coalesced" in name else _input_sent


def _size_of(process_group: Any) -> int:
    place = place_in_group([process_group])
    return 1 if place is None else place[1]


def _is_root(process_group: Any, root_rank: int) -> bool:
    place = place_in_group([process_group])
    return place is not None and place[0] == root_rank


def _listed(sizes: Iterable[int]) -> str:
    return "(" + ", ".join(map(str, sizes)) + ")"


def _options(tensor: Tensor) -> str:
    """c10/core/TensorOptions.cpp."""
    return (
        f"TensorOptions(dtype={dtype_in_cpp(tensor.dtype)}, device=cpu, layout=Strided, "
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
    outputs, given, size = output_tensors[0], input_tensors[0], _size_of(process_group)
    if len(outputs) != size:
        expected = f"(expected length {size}, got {len(outputs)})"
        refused = "ProcessGroupGloo::allgather: invalid output tensor list at index 0"
        raise RuntimeError(f"{refused} {expected}")
    _match("allgather", outputs, given.shape, given)


def _gathered(output_tensor: Tensor, input_tensor: Tensor, process_group: Any) -> None:
    """ProcessGroupGloo.cpp, ``_allgather_base``: parts of the output are shaped as the input."""
    parts = output_tensor.chunk(_size_of(process_group))
    _gathered_lists([parts], [input_tensor], process_group)


def _gathered_at_root(
    output_tensors: Sequence[Sequence[Tensor]],
    input_tensors: Sequence[Tensor],
    process_group: Any,
    root_rank: int,
) -> None:
    """ProcessGroupGloo.cpp, ``gather``."""
    if _is_root(process_group, root_rank):
        _at_root("gather", "output", output_tensors[0], input_tensors[0], _size_of(process_group))
    _sent(*input_tensors)


def _scattered_from_root(
    output_tensors: Sequence[Tensor],
    input_tensors: Sequence[Sequence[Tensor]],
    process_group: Any,
    root_rank: int,
) -> None:
    """ProcessGroupGloo.cpp, ``scatter``."""
    if _is_root(process_group, root_rank):
        _at_root("scatter", "input", input_tensors[0], output_tensors[0], _size_of(process_group))
    _sent(*output_tensors)


def _at_root(name: str, kind: str, parts: Sequence[Tensor], own: Tensor, size: int) -> None:
    if len(parts) != size:
        found = f"Incorrect {kind} list size {len(parts)}. {kind.capitalize()} list size should be"
        raise RuntimeError(
            f"ProcessGroupGloo::{name}: {found} {size}, same as size of the process group."
        )
    _match(name, parts, own.shape, own)


def _scattered(
    output_tensor: Tensor, input_tensor: Tensor, process_group: Any, reduce_op: Any
) -> None:
    """ProcessGroupGloo.cpp, ``reduce_scatter_tensor_coalesced``."""
    if output_tensor.dtype is not input_tensor.dtype:
        names = " vs. ".join(dtype_in_cpp(one.dtype) for one in (output_tensor, input_tensor))
        raise RuntimeError(
            f"Check failed: outputTensors[i].dtype() == inputTensors[i].dtype() ({names})."
        )
    first, last = output_tensor.shape[:1].numel() * _size_of(process_group), input_tensor.shape[:1]
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
    if len(inputs) != _size_of(process_group):
        raise RuntimeError("invalid input tensor list size, must be world size")
    for one in inputs:
        if one.shape != output.shape:
            found = " vs. ".join(" ".join(map(str, each.shape)) for each in (output, one))
            sizes = "outputs[0].sizes().vec() == inputs[0][i].sizes().vec()"
            raise RuntimeError(f"Check failed: {sizes} ({found}).")
    _sent(output)
    _reduced_by(reduce_op, output)


def _exchanged(
    output: Tensor,
    input: Tensor,
    process_group: Any,
    output_split_sizes: Sequence[int],
    input_split_sizes: Sequence[int],
) -> None:
    """ProcessGroupGloo.cpp, ``alltoall_base``: outputs need not be contiguous."""
    if not input.is_contiguous():
        raise ValueError("Tensors must be contiguous")
    size = _size_of(process_group)
    _split(input, input_split_sizes, output_split_sizes, size)
    _split(output, output_split_sizes, input_split_sizes, size)
    if not (output_split_sizes or input_split_sizes) and output.nbytes != input.nbytes:
        raise RuntimeError("[enforce fail at gloo/alltoall.cc] in->size == out->size.")
    _sent(output)


def _split(tensor: Tensor, own: Sequence[int], others: Sequence[int], size: int) -> None:
    """Utils.hpp, ``checkSplitSizes``, which is asked where either side is split unevenly."""
    if own and len(own) != size:
        raise RuntimeError("Number of tensor splits not equal to group size")
    if own and sum(own) != tensor.shape[0]:
        raise RuntimeError("Split sizes doesn't match total dim 0 size")
    if others and not own and tensor.shape[0] % size:
        raise RuntimeError("Tensor's dim 0 does not divide equally across group size")


def _input_sent(input: Tensor) -> None:
    """ProcessGroupGloo.cpp, ``GENERATE_ALL_TYPES``."""
    _sent(input)


def _inputs_sent(inputs: Sequence[Tensor]) -> None:
    """ProcessGroupGloo.cpp, ``GENERATE_ALL_TYPES``."""
    _sent(*inputs)


def _tensors_sent(tensors: Sequence[Tensor], reduce_op: Any = None) -> None:
    """ProcessGroupGloo.cpp, ``GENERATE_ALL_TYPES`` and ``toFunction``."""
    _sent(*tensors)
    _reduced_by(reduce_op, tensors[0])


def _reduced_by(reduce_op: Any, tensor: Tensor) -> None:
    """ProcessGroupGloo.cpp, ``toFunction``."""
    reduction = reduction_among([reduce_op])
    if reduction in _BITWISE and tensor.is_floating_point():
        raise RuntimeError(f"Cannot use ReduceOp.{reduction} with non-integral dtype")


def _sent_in_order(tensors: Sequence[Tensor]) -> None:
    """ProcessGroupGloo.cpp, ``checkSingleTensor``; what is sent are bytes of any type."""
    if not all(map(Tensor.is_contiguous, tensors)):
        raise RuntimeError("input tensor has to be contiguous")


def _dense_tensors(tensors: Sequence[Tensor]) -> None:
    """ProcessGroupNCCL.cpp, ``check_gpu_single_tensor``; of what is sent it only warns."""
    for tensor in tensors:
        if not tensor.is_contiguous(memory_format=suggested_format(tensor)):
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
    if input_tensor.numel() * _size_of(process_group) != output_tensor.numel():
        raise ValueError("output tensor size must be equal to world_size times input tensor size")


def _scattered_by_nccl(output_tensor: Tensor, input_tensor: Tensor, process_group: Any) -> None:
    """ProcessGroupNCCL.cpp, ``_reduce_scatter_base``."""
    if input_tensor.dtype is not output_tensor.dtype:
        raise TypeError("input tensor must be the same type as the output tensor.")
    if input_tensor.numel() != output_tensor.numel() * _size_of(process_group):
        refused = "input tensor must be the same size as output size times world size"
        raise ValueError(refused)
    _dense_tensors((input_tensor, output_tensor))


def _exchanged_by_nccl(
    output: Tensor,
    input: Tensor,
    process_group: Any,
    output_split_sizes: Sequence[int],
    input_split_sizes: Sequence[int],
) -> None:
    """ProcessGroupNCCL.cpp, ``alltoall_base``."""
    _dense_tensors((output, input))
    size = _size_of(process_group)
    _split(input, input_split_sizes, output_split_sizes, size)
    _split(output, output_split_sizes, input_split_sizes, size)


_OF_GLOO: Mapping[str, Callable[..., None]] = {
    "c10d::allgather_": _gathered_lists,
    _GATHERS: _gathered,
    "c10d::gather_": _gathered_at_root,
    "c10d::scatter_": _scattered_from_root,
    _SCATTERS: _scattered,
    "c10d::reduce_scatter_": _scattered_lists,
    _EXCHANGES: _exchanged,
    **dict.fromkeys((*_OF_TENSORS, "c10d::allreduce_coalesced_"), _tensors_sent),
    **dict.fromkeys(_POINT_TO_POINT, _sent_in_order),
}
