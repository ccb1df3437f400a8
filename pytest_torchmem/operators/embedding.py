"""Bags of embeddings, and gradients of embeddings.

native/EmbeddingBag.cpp, native/cuda/EmbeddingBag.cu; native/Embedding.cpp, native/cuda/Embedding.cu
and EmbeddingBackwardKernel.cu.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import GivenCall
from pytest_torchmem.operators.libraries import cub
from pytest_torchmem.operators.registry import OperatorKind, operator
from pytest_torchmem.operators.sorting import sort_requests
from pytest_torchmem.operators.workspace import (
    CONTIGUOUS,
    HALVES,
    LONG,
    accumulation_type,
    bounded,
    ceil_div,
    contiguous_copy,
    copied,
    dense_bytes,
    passing,
    round_up,
)
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.torch_private.names import TORCH_VERSION

_aten: Any = torch.ops.aten

_SUM, _MEAN, _MAX = 0, 1, 2

# CUDA makes the bags' sizes first.
_bag = operator("_embedding_bag _embedding_bag_forward_only", order={"cuda": (2, 1, 0, 3)})


class Bags(NamedTuple):
    """What is asked of bags of embeddings, by the names of the schemas' arguments."""

    weight: Tensor
    indices: Tensor
    offsets: Tensor
    scale_grad_by_freq: bool
    mode: int
    sparse: bool
    per_sample_weights: Tensor | None
    include_last_offset: bool
    padding_idx: int

    def promoted(self) -> "Bags":
        """Return the same of positions of one type."""
        indices, offsets = _promoted(self.indices, self.offsets)
        return self._replace(indices=indices, offsets=offsets)


def _promoted(indices: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """``promoteIndicesAndOffsets``: where one type is not the other, both are ``int64``."""
    if indices.dtype is offsets.dtype:
        return indices, offsets
    return indices.to(torch.int64), offsets.to(torch.int64)


@_bag.workspace("cuda")
def copies_on_cuda(weight: Tensor, indices: Tensor, offsets: Tensor) -> tuple[int, ...]:
    """What is not of the other's type, or not contiguous; _embedding_bag_cuda."""
    given = indices, offsets
    pairs = list(zip(given, _promoted(*given), strict=True))
    types = [made.nbytes for one, made in pairs if made.dtype is not one.dtype]
    return (*types, contiguous_copy(weight), *[contiguous_copy(made) for _, made in pairs])


@_bag.meta("cuda")
def bag_on_cuda(asked: Bags) -> Any:
    """Torch's own, of positions of one type; _embedding_bag_cuda."""
    return _aten._embedding_bag(*asked.promoted())


@_bag.decomposition("cpu")
def embedding_bag(call: GivenCall, asked: Bags) -> tuple[Tensor, ...]:
    """``_embedding_bag_cpu_impl``; native/EmbeddingBag.cpp."""
    asked = asked.promoted()
    weight, indices, offsets, mode = asked.weight, asked.indices, asked.offsets, asked.mode
    bags = offsets.shape[0] - asked.include_last_offset
    output = weight.new_empty((bags, weight.shape[1]))
    # ``is_fast_path``: FBGEMM gathers and adds.
    fast = (
        weight.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and weight.stride(1) == 1
        and (asked.per_sample_weights is None or asked.per_sample_weights.stride(0) == 1)
        and asked.padding_idx < 0
    )
    offset2bag = torch.empty((0,), dtype=offsets.dtype)
    if mode != _SUM or not fast:
        offset2bag = torch.zeros((indices.shape[0] + 1,), dtype=offsets.dtype)
        offset2bag = _bag_of_every_index(offsets[:bags], offset2bag)
        offset2bag.resize_(indices.shape[0])
    sizes = torch.empty(offsets.shape, dtype=offsets.dtype)
    if call.overload is _aten._embedding_bag.default or mode != _SUM:
        _count(sizes, indices, offsets, bags)
    largest = torch.empty(sizes.shape, dtype=offsets.dtype)
    if mode == _MAX:
        largest.resize_((bags, weight.shape[1]))
    if mode != _MAX:
        _gather(weight, output, asked.per_sample_weights, fast)
    if mode == _MEAN and bags:
        ones = torch.ones_like(sizes)
        at_least_one = torch.maximum(sizes, ones)  # temporaries of one expression in C++
        counts = at_least_one.to(output.dtype)
        del counts, at_least_one, ones
    return output, offset2bag, sizes, largest


@_bag.values("cuda")
def embedding_bag_values(asked: Bags) -> Any:
    """The CPU's outputs as CUDA's kernels lay them out; cuda/EmbeddingBag.cu, _embedding_bag_cuda.

    The bag of every index is there in plain sums too, where the CPU leaves it out. There are as
    many sizes as offsets, though the last of these may only end the last bag; its size, which
    nothing writes, counts as none. The positions of the largest are there for them alone.
    """
    asked = asked.promoted()
    output, offset2bag, sizes, largest = _aten._embedding_bag(*asked)
    if asked.mode == _SUM and offset2bag.shape != asked.indices.shape:
        mean = asked._replace(mode=_MEAN, per_sample_weights=None)
        _, offset2bag, sizes, _ = _aten._embedding_bag(*mean)
    if asked.include_last_offset:
        sizes = torch.cat([sizes[: len(asked.offsets) - 1], sizes.new_zeros(1)])
    return output, offset2bag, sizes, largest if asked.mode == _MAX else None


def _bag_of_every_index(offsets: Tensor, offset2bag: Tensor) -> Tensor:
    """``make_offset2bag``: ones where bags begin, added up."""
    offset2bag.index_add_(0, offsets, torch.ones_like(offsets))
    offset2bag[0] -= 1
    return offset2bag.cumsum(0, dtype=offset2bag.dtype)


def _count(sizes: Tensor, indices: Tensor, offsets: Tensor, bags: int) -> None:
    """``make_bag_size_out``: the differences of offsets, and what is left for the last bag."""
    sizes.resize_((bags,))
    if bags > 1:
        difference = offsets[1:bags] - offsets[: bags - 1]
        del difference
    if bags:
        length = torch.empty((), dtype=offsets.dtype).fill_(indices.shape[0])
        rest = length - offsets[bags - 1]
        del rest, length


def _gather(weight: Tensor, output: Tensor, scale: Tensor | None, fast: bool) -> None:
    """``index_select_add`` and ``index_select_scale_add``: 16-bit types are added up in float where
    FBGEMM does not do it, which wants their factors in float.
    """
    half = output.dtype in HALVES
    if not fast:
        if half:
            row = torch.empty(output.shape[1:] if scale is None else (0,), dtype=torch.float32)
            torch.zeros(output.shape, dtype=torch.float32)
            del row
        return
    dense = weight.contiguous()
    if half and scale is not None:
        torch.empty(scale.shape, dtype=torch.float32)
    del dense


def _offset2bag_again(indices: Tensor, offsets: Tensor, offset2bag: Tensor) -> Tensor:
    """What the fast path of the forward did not keep."""
    if not indices.numel() or offset2bag.numel():
        return offset2bag
    made = torch.zeros((indices.shape[0] + 1,), dtype=offsets.dtype)
    return _bag_of_every_index(offsets, made).resize_(indices.shape[0])


class BagGradients(NamedTuple):
    """What is asked of gradients of bags, by the names and in the order of the dense backward."""

    grad: Tensor
    indices: Tensor
    offset2bag: Tensor
    bag_size: Tensor
    maximum_indices: Tensor
    num_weights: int
    scale_grad_by_freq: bool
    mode: int
    per_sample_weights: Tensor | None
    padding_idx: int = -1


@operator("aten::_embedding_bag_backward").decomposition()
def embedding_bag_backward(asked: BagGradients, offsets: Tensor, sparse: bool) -> Any:
    """_embedding_bag_backward_symint."""
    indices, ends = _promoted(asked.indices, offsets)
    offset2bag = _offset2bag_again(indices, ends, asked.offset2bag)
    asked = asked._replace(indices=indices, offset2bag=offset2bag)
    if not sparse:
        return _aten._embedding_bag_dense_backward.default(*asked)
    grad, _, _, bag_size, _, *settings = asked
    return _aten._embedding_bag_sparse_backward.default(
        grad, indices, ends, offset2bag, bag_size, *settings
    )


@operator("aten::_embedding_bag_dense_backward").decomposition("cpu")
def dense_backward_on_cpu(asked: BagGradients) -> Tensor:
    """_embedding_bag_dense_backward_cpu. The maximum leaves out empty bags, of which none is
    counted where the sizes are not known.
    """
    dense = asked.grad.contiguous()
    result = asked.grad.new_zeros((asked.num_weights, dense.shape[1]))
    if asked.mode == _MAX:
        largest = asked.maximum_indices.index_select(0, asked.bag_size.nonzero().view(-1))
        gradients = dense.index_select(0, asked.bag_size.nonzero().view(-1))
        del largest, gradients
        return result
    in_order = asked.indices.sort()
    bags = asked.offset2bag.index_select(0, in_order[1])
    if asked.per_sample_weights is not None:
        weights = asked.per_sample_weights.index_select(0, in_order[1])
        del weights
    del in_order, bags
    return result


@operator("aten::_embedding_bag_dense_backward").decomposition("cuda")
def dense_backward_on_cuda(machine: Gpu, asked: BagGradients) -> Tensor:
    """Sorted as embeddings are, the maximum's scattered; ``_embedding_bag_dense_backward_cuda``."""
    grad, indices, rows = asked.grad, asked.indices, asked.num_weights
    dense = grad.contiguous()
    if asked.mode == _MAX or not indices.numel():
        return grad.new_empty((rows, grad.shape[1]))
    return sorted_sums(machine, dense, indices, rows, asked.scale_grad_by_freq, bags=True)


@operator("aten::_embedding_bag_per_sample_weights_backward").decomposition("cpu")
def embedding_bag_per_sample_weights_backward(
    grad: Tensor, indices: Tensor, offsets: Tensor, offset2bag: Tensor
) -> Tensor:
    """_embedding_bag_per_sample_weights_backward_cpu_template."""
    indices, offsets = _promoted(indices, offsets)
    result = grad.new_zeros((indices.shape[0],))
    bags = _offset2bag_again(indices, offsets, offset2bag)
    del bags
    return result


@operator("aten::_embedding_bag_per_sample_weights_backward").values("cuda")
def per_sample_weights_backward_values(arguments: Mapping[str, Any]) -> Any:
    """The CPU's, whose kernel takes all positions in one type; CUDA's reads the bags in theirs."""
    indices, offsets = _promoted(arguments["indices"], arguments["offsets"])
    offset2bag = arguments["offset2bag"].to(indices.dtype)
    given = {**arguments, "indices": indices, "offsets": offsets, "offset2bag": offset2bag}
    return _aten._embedding_bag_per_sample_weights_backward(**given)


_FEW = 3072
_ROWS_PER_THREAD = 10
_BLOCK = 1024
_ATOMIC_BLOCKS = 4

# Registered for every backend, and reading and writing data all the same.
operator("aten::embedding_renorm", kind=OperatorKind.LEAF)
_backward = operator("aten::embedding_dense_backward")
_backward.workspace("cpu")(copied(grad_output=CONTIGUOUS, indices=CONTIGUOUS))

# The norm of a row, or the factor of one that exceeds it; ``embedding_renorm_cpu_``.
operator("embedding_renorm_").workspace("cpu")(lambda input: bounded(LONG + input.element_size()))


@operator("aten::embedding_renorm_").workspace("cuda")
def distinct_indices(machine: Gpu, indices: Tensor) -> tuple[int, ...]:
    """Indices sorted, then the distinct ones and their count; Embedding.cu,
    ``embedding_renorm_cuda_``. Since torch 2.13 those that count from the end are replaced before
    (pytorch/pytorch#183998).
    """
    number, each = indices.numel(), dense_bytes(indices)
    flat = torch.empty((number,), dtype=indices.dtype, device="meta")
    sorting = passing(number * LONG, *sort_requests(machine, flat, 0))
    distinct = cub.distinct(machine, number, indices.element_size())
    replaced = each if TORCH_VERSION >= (2, 13) else 0
    return (contiguous_copy(indices), replaced, each, *sorting, each, LONG, distinct)


@_backward.decomposition("cuda")
def sums_of_equal_indices(
    machine: Gpu, grad_output: Tensor, indices: Tensor, num_weights: int, scale_grad_by_freq: bool
) -> Tensor:
    """Sums of up to 3,072 indices at once, of more by a sort; ``embedding_dense_backward_cuda``."""
    indices, gradients = indices.contiguous(), grad_output.contiguous()
    if indices.numel() <= _FEW and not scale_grad_by_freq:
        return gradients.new_empty((num_weights, gradients.shape[-1]))
    return sorted_sums(machine, gradients, indices, num_weights, scale_grad_by_freq, bags=False)


def sorted_sums(
    gpu: Gpu, gradients: Tensor, indices: Tensor, weights: int, by_frequency: bool, *, bags: bool
) -> Tensor:
    """Return the gradient of ``weights`` rows: indices are sorted, and parts of equal ones summed.

    EmbeddingBackwardKernel.cu, ``embedding_backward_cuda_kernel``. Since torch 2.13 only bits
    that indices can have are sorted by (pytorch/pytorch#183578).
    """
    number, size, width = indices.numel(), indices.element_size(), gradients.shape[-1]
    in_order, positions = torch.empty_like(indices), torch.empty_like(indices)
    places = torch.empty_like(indices)
    bits = weights.bit_length() if TORCH_VERSION >= (2, 13) else None
    cub.scratch(cub.radix_sort(gpu, number, size, size, bits))
    del places
    counts = torch.empty_like(indices) if by_frequency else None
    for _ in range(2 if by_frequency else 0):
        cub.scratch(cub.scan_by_key(gpu, number, size))
    result = gradients.new_empty((weights, width))
    segments = min(number, weights)
    beginnings, number_of_segments = cub.scratch(number * size), cub.scratch(LONG)
    keys = cub.scratch(number * size)
    cub.scratch(cub.distinct_keys(gpu, number, size))
    del keys
    parts_of_segments, first_parts = cub.scratch(segments * size), cub.scratch(segments * size)
    cub.scratch(cub.scan(segments, size))
    number_of_parts = cub.scratch(LONG)
    parts = number // _ROWS_PER_THREAD + segments
    beginnings_of_parts, segments_of_parts, summed = cub.scratch(parts * size), None, parts
    warped = round_up(width, 32)  # few parts of embeddings are added in place: use_fused_kernel
    grid = ceil_div(segments * warped, min(warped, _BLOCK) or 1)
    if not bags and grid < gpu.multiprocessors * _ATOMIC_BLOCKS and parts > 4 * grid:
        segments_of_parts = cub.scratch(parts * size)
        summed = segments if gradients.dtype in HALVES else 0
    sums = gradients.new_empty((summed, width), dtype=accumulation_type(gradients.dtype))
    del sums, segments_of_parts, beginnings_of_parts, number_of_parts, first_parts
    del parts_of_segments
    del number_of_segments, beginnings, counts, positions, in_order
    return result
