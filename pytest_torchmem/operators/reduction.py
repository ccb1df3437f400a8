"""Sums, products, means, norms and moments; extremes, their positions, truth values; histograms.

native/ReduceOps.cpp, native/cpu/ReduceAllOpsKernel.cpp, native/cuda/Reduce*Kernel.cu. Histograms
have edges, and counts for every thread; native/Histogram.cpp and its CPU kernel. Norms and maxima
of lists keep a partial result for every chunk of every tensor: native/cuda/ForeachReduceOp.cu.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.operators.elementwise import (
    Dims,
    converted,
    copied_and_reduced,
    partial_results,
    reduced,
    sum_workspace,
    takes_every_dim,
)
from pytest_torchmem.operators.libraries import cub
from pytest_torchmem.operators.registry import UnknownOutputs, operator
from pytest_torchmem.operators.workspace import (
    ALL,
    CONTIGUOUS,
    HALVES,
    SCALAR,
    Outputs,
    Request,
    accumulation_type,
    ceil_div,
    contiguous_copy,
    copied,
    dense_bytes,
    dense_copy,
    is_dense,
    like,
    on_meta,
    passing,
)
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host


@operator("aten::sum").workspace("cpu")
def added(machine: Host, outputs: Tensor, input: Tensor, dim: Sequence[int] | None = None) -> int:
    """An upcast of the whole input and a result per thread; native/ReduceOps.cpp, sum_out."""
    dims = dim or tuple(range(input.dim()))
    return sum_workspace(machine, input, outputs.dtype, outputs.numel(), dims)


@operator("aten::mean").workspace("cpu")
def mean(machine: Host, outputs: Tensor, input: Tensor) -> int:
    """A sum in the accumulation type, then a division by a wrapped number; mean_out."""
    accumulated = accumulation_type(outputs.dtype)
    result = 0 if accumulated == outputs.dtype else outputs.numel() * accumulated.itemsize
    summed = sum_workspace(machine, input, accumulated, outputs.numel())
    return result + max(summed, SCALAR + accumulated.itemsize)


@operator("aten::nansum", "aten::prod", "aten::amax", "aten::amin").workspace("cpu")
def reduce_in_result_type(machine: Host, outputs: Tensor, input: Tensor) -> int:
    """An upcast of the input and a result per thread; make_reduction."""
    return sum_workspace(machine, input, outputs.dtype, outputs.numel())


@operator("aten::sum", "aten::nansum", "aten::mean", "aten::prod").workspace("cuda")
def summed(machine: Gpu, outputs: Tensor, input: Tensor, dim: Dims = None) -> tuple[int, ...]:
    """``sum_functor``, ``mean_kernel_impl``, ``prod_functor``; ReduceSumProdKernel.cu."""
    as_is = input.dtype in HALVES and outputs.dtype == torch.float32
    return copied_and_reduced(machine, outputs, input, dim, None if as_is else outputs.dtype)


@operator("aten::trace").workspace("cuda")
def trace(machine: Gpu, outputs: Tensor, input: Tensor) -> tuple[int, ...]:
    """The sum of the diagonal; native/cuda/TriangularOps.cu, ``trace_cuda``."""
    return summed(machine, outputs, input.diagonal(), None)


@operator("aten::count_nonzero").workspace("cpu")
def mask_as_numbers(input: Tensor, dim: object = None) -> int:
    """A mask, and the mask as int64, unless all dimensions are counted;
    native/TensorAdvancedIndexing.cpp, count_nonzero.
    """
    counts_all = dim is None or (isinstance(dim, (list, tuple)) and not dim)
    return 0 if counts_all else input.numel() * (torch.bool.itemsize + torch.int64.itemsize)


@operator("aten::count_nonzero", "aten::count_nonzero.dim_IntList").decomposition("cuda")
def mask_and_sum(self: Tensor, dim: Any = None) -> Tensor:
    """A mask, and its sum; native/TensorAdvancedIndexing.cpp, count_nonzero_cuda."""
    mask = self if self.dtype is torch.bool else self != 0
    return mask.sum(dim)


@operator("aten::segment_reduce").decomposition("cuda")
def segments(
    data: Tensor,
    lengths: Tensor | None = None,
    offsets: Tensor | None = None,
    axis: int = 0,
    unsafe: bool = False,
) -> Tensor:
    """Lengths are checked and added up, offsets subtracted; native/SegmentReduce.cpp,
    segment_reduce_kernel, native/cuda/SegmentReduce.cu. Of a vector by CUB, which takes one byte.
    """
    if lengths is not None and not unsafe:
        lengths.min()
        total = lengths.sum(-1)
        equal = total == 1
        equal.all()
        del equal, total
    given = lengths if lengths is not None else offsets
    assert given is not None
    dense, bounds = data.contiguous(), given.contiguous()
    shape = list(data.shape)
    shape[axis] = given.shape[-1] - (lengths is None)
    result = data.new_empty(shape)
    other = _other_bounds(bounds, lengths is not None)
    if data.dim() == 1:
        cub.scratch(1)
    del other, bounds, dense
    return result


@operator("aten::_segment_reduce_backward").decomposition("cuda")
def gradient_of_segments(
    grad: Tensor,
    output: Tensor,
    data: Tensor,
    lengths: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """Dense copies, and the bounds; SegmentReduce.cu, _segment_reduce_backward_kernel."""
    given = lengths if lengths is not None else offsets
    assert given is not None
    dense = [one.contiguous() for one in (grad, output, data, given)]
    result = dense[0].new_empty(data.shape)
    _other_bounds(dense[-1], lengths is not None)
    return result


def _other_bounds(bounds: Tensor, are_lengths: bool) -> Tensor:
    """Where segments end, for lengths, from a zero on; lengths for where they end."""
    *rows, number = bounds.shape
    if not are_lengths:
        return bounds.new_empty((*rows, number - 1))
    zero = bounds.new_empty((*rows, 1))
    ends = bounds.new_empty((*rows, number + 1))
    del zero
    if not rows:
        cub.scratch(cub.scan(number, bounds.element_size()))
    return ends


operator("aten::_segment_reduce_backward").workspace("cpu")(  # native/SegmentReduce.cpp
    copied(grad=CONTIGUOUS)
)


@operator("aten::linalg_vector_norm").workspace("cpu")
def vector_norm_on_cpu(
    machine: Host,
    outputs: Tensor,
    input: Tensor,
    dim: Sequence[int] | None,
    dtype: torch.dtype | None,
) -> int:
    """The kernel converts as it reads unless a type is asked for; native/LinearAlgebra.cpp."""
    copied = converted(input, outputs.dtype) if dtype is not None else 0
    if outputs.numel() == 1 and takes_every_dim(input, dim) and not copied:
        return 0
    return copied + partial_results(machine, input.numel(), outputs.numel(), outputs.element_size())


# ``norm`` calls ``linalg_vector_norm`` in the input's type; native/ReduceOps.cpp, impl_func_norm.
@operator("aten::linalg_vector_norm", "aten::norm").workspace("cuda")
def vector_norm_on_cuda(
    machine: Gpu, outputs: Tensor, input: Tensor, dim: Dims = None, dtype: torch.dtype | None = None
) -> tuple[int, ...]:
    """ReduceNormKernel.cu, ``norm_kernel_cuda_impl``, which reads 16-bit input as it is. Of single
    elements absolute values are taken; linalg_vector_norm_out.
    """
    dims = (dim,) if isinstance(dim, int) else dim or range(input.dim())
    if input.dim() == 0 or (input.numel() and all(input.shape[at] == 1 for at in dims)):
        kept = dtype or input.dtype
        return (converted(input, kept), dense_bytes(input, kept) if kept.is_complex else 0)
    reads = None if input.dtype in HALVES else dtype
    return copied_and_reduced(machine, outputs, input, dim, reads)


@operator("aten::var", "aten::std").workspace("cpu")
def variance(
    machine: Host, outputs: Tensor, input: Tensor, dim: Sequence[int] | None = None
) -> int:
    """Over everything in float: a mean and a sum of squares; std_var_all_cpu. Of complex numbers
    that of both parts, of which the sum is made last; std_var_out.
    """
    size = outputs.element_size()
    floating = outputs.dtype in (torch.float32, torch.float64)
    within = 0
    if outputs.numel() == 1 and takes_every_dim(input, dim) and floating:
        within = size + max(partial_results(machine, input.numel(), 1, size), SCALAR + size)
    if not input.is_complex():
        return within
    part = dense_bytes(outputs)
    return part + max(part, within)


@operator("aten::var_mean", "aten::std_mean").workspace("cpu")
def variance_and_mean(outputs: tuple[Tensor, Tensor], input: Tensor) -> int:
    """Of complex numbers those of both parts; std_var_mean_out."""
    return 4 * dense_bytes(outputs[0]) if input.is_complex() else 0


@operator("aten::var", "aten::std", "aten::var_mean", "aten::std_mean").workspace("cuda")
def moments(machine: Gpu, outputs: Outputs, input: Tensor, dim: Dims = None) -> tuple[int, ...]:
    """``WelfordData``: two accumulators, a count and a fraction; ReduceMomentKernel.cu."""
    result = outputs if isinstance(outputs, Tensor) else outputs[0]
    assert result is not None
    # of complex numbers both parts, one after the other; native/ReduceOps.cpp, std_var_out
    read = torch.view_as_real(on_meta(input))[..., 0] if input.is_complex() else input
    accumulator = accumulation_type(read.dtype).itemsize
    welford = 3 * accumulator + max(4, accumulator)
    buffers = reduced(machine, read, dim, result.element_size(), welford, 2)
    if not input.is_complex():
        return buffers
    part, with_mean = dense_bytes(result), not isinstance(outputs, Tensor)
    last = 3 if with_mean else 1  # made of them when the buffers are gone
    return (part, *((part,) * last if last * part >= sum(buffers) else buffers))


_VALUE_AND_INDEX = 16
"""``std::pair`` of a value of up to 8 bytes and an ``int64_t``."""

operator(
    *(f"aten::{name}{kind}" for name in ("any", "all") for kind in ("", ".dim", ".dims")),
    "aten::_is_all_true",
    "aten::_is_any_true",
    unknown_outputs=UnknownOutputs.ANY_OR_ALL,
)
operator("argmax argmin max.dim min.dim", unknown_outputs=UnknownOutputs.POSITIONS)
operator("amax amin max min", unknown_outputs=UnknownOutputs.CARRIED)


@operator("aten::amax", "aten::amin").workspace("cuda")
def reduced_in_own_type(machine: Gpu, input: Tensor, dim: Dims = ()) -> tuple[int, ...]:
    """``func_wrapper`` of the input's own type; ReduceMaxValuesKernel.cu."""
    return reduced(machine, input, dim, input.element_size(), input.element_size())


@operator("argmax argmin max min aminmax").workspace("cpu")
def contiguous_input(input: Tensor, dim: int | None = None, other: Tensor | None = None) -> int:
    """A dense copy to reduce all dimensions; ReduceAllOpsKernel.cpp, argmax_argmin."""
    return dense_copy(input) if dim is None and other is None else 0


def _of_all_or_along(
    gpu: Gpu, input: Tensor, dim: int | None, out_size: int, accumulator: int, vector: int = 4
) -> tuple[int, ...]:
    """What a reduction takes along a dimension, or of all elements from a dense copy."""
    read, copy = (
        (on_meta(input).contiguous(), contiguous_copy(input)) if dim is None else (input, 0)
    )
    return (copy, *reduced(gpu, read, dim, out_size, accumulator, vector))


@operator("aten::max", "aten::min").workspace("cuda")
def largest_or_smallest(machine: Gpu, input: Tensor, dim: int | None = None) -> tuple[int, ...]:
    """Of all elements: a dense copy and their own type. Along a dimension: value and index;
    ReduceMaxValuesKernel.cu, ``max_all_launch_kernel`` and ``max_launch_kernel``.
    """
    own, vector = input.element_size(), 8 if input.dtype.itemsize == 2 else 4
    if dim is not None:
        return _of_all_or_along(machine, input, dim, own, _VALUE_AND_INDEX)
    return _of_all_or_along(machine, input, dim, own, own, vector)


@operator("aten::aminmax", "aten::_aminmax").workspace("cuda")
def pair_of_values(machine: Gpu, input: Tensor, dim: int | None = None) -> tuple[int, ...]:
    """A pair of the input's type, of all elements from a dense copy; ReduceAMinMaxKernel.cu."""
    own = input.element_size()
    return _of_all_or_along(machine, input, dim, own, 2 * own)


@operator("aten::_aminmax").meta()
def aminmax(input: Tensor, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """native/ReduceOps.cpp."""
    found = torch.any(input) if dim is None else torch.any(input, dim, keepdim)
    return like(input, found.shape), like(input, found.shape)


@operator("aten::argmax", "aten::argmin").workspace("cuda")
def position(machine: Gpu, input: Tensor, dim: int | None = None) -> tuple[int, ...]:
    """A value and an index; a dense copy where all elements are asked. ReduceArgMaxKernel.cu."""
    return _of_all_or_along(machine, input, dim, 8, _VALUE_AND_INDEX)


@operator("aten::any", "aten::all").workspace("cpu")
def as_booleans(machine: Host, outputs: Tensor, input: Tensor) -> int:
    """A boolean copy of what is not boolean; native/ReduceOps.cpp, allany_meta."""
    kept = input.dtype in (torch.bool, torch.uint8)
    copied = 0 if kept else input.numel()
    return copied + partial_results(machine, input.numel(), outputs.numel(), 1)


@operator("aten::any", "aten::all").workspace("cuda")
def in_type_of_input(machine: Gpu, input: Tensor, dim: Dims = None) -> tuple[int, ...]:
    """Without a copy, in the input's type; ReduceLogicKernel.cu, ``get_allany_iter``. One element
    is converted to a boolean; native/ReduceOps.cpp, allany_impl.
    """
    if input.numel() == 1:
        return (0 if input.dtype is torch.bool else torch.bool.itemsize,)
    return reduced(machine, input, dim, 1, input.element_size(), 4)


@operator("aten::equal").workspace("cuda")
def equal(machine: Gpu, input: Tensor, other: Tensor) -> tuple[int, ...]:
    """Where the elements are equal, whether all are, and the reduction; cuda/Equal.cpp."""
    if input.shape != other.shape or not input.numel():
        return ()
    same = torch.empty((input.numel(),), dtype=torch.bool, device="meta")
    return (input.numel(), 1, *reduced(machine, same, None, 1, 1, 4))


_SMALL = 2
"""Bytes of a type each of whose numbers may have a bin."""

# Torch has a kernel of them for the CPU alone (as a build with CUDA says of each,
# ``_dispatch_has_kernel_for_dispatch_key``).
operator(
    "_histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors",
    "histogram.bin_ct histogram.bins_tensor",
    not_on=frozenset({"cuda"}),
)


class Histogram(NamedTuple):
    """What is asked of histograms, by the names of the schemas' arguments."""

    machine: Host
    input: Tensor
    range: Sequence[float] | None = None
    density: bool = False

    def filled(self, *bins: int, found: bool = False) -> Tensor:
        """A histogram for every thread (``histogramdd_cpu_contiguous``), which the extremes come
        before where its range is to be ``found`` (``histogramdd_compute_outer_edges``). A density
        is divided by its sum.
        """
        result = self.input.new_empty(bins)
        if found and self.input.numel():
            torch.aminmax(self.input)
        result.new_zeros((self.machine.threads, *bins))
        if self.density:
            total = result.sum()
            result.div_(1)
            del total
        return result


@operator("aten::histc").decomposition("cpu")
def histc(asked: Histogram, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """histogram_histc: edges of its own, and every thread's counts."""
    edges = asked.input.new_empty((bins + 1,))
    result = asked.filled(bins, found=min == max)
    del edges
    return result


@operator("aten::histogram.bin_ct").decomposition("cpu")
def histogram(asked: Histogram, bins: int = 100) -> tuple[Tensor, Tensor]:
    """Evenly spaced edges."""
    edges = asked.input.new_empty((bins + 1,))
    return asked.filled(bins, found=asked.range is None), edges


@operator("aten::histogram.bins_tensor").decomposition("cpu")
def histogram_of_edges(asked: Histogram, bins: Tensor) -> tuple[Tensor, Tensor]:
    """Edges that are given, and copied."""
    edges = asked.input.new_empty(bins.shape)
    return asked.filled(bins.shape[0] - 1), edges


@operator("aten::_histogramdd_bin_edges").decomposition("cpu")
def histogramdd_edges(asked: Histogram, bins: Sequence[int]) -> list[Tensor]:
    """Evenly spaced edges along every dimension; ``histogramdd_bin_edges``."""
    input = asked.input
    if asked.range is None and input.numel():
        torch.aminmax(input.reshape(-1, input.shape[-1]), dim=0)
    return [torch.linspace(0.0, 1.0, count + 1, dtype=input.dtype) for count in bins]


@operator("aten::_histogramdd_from_bin_cts").decomposition("cpu")
def histogramdd_of_counts(asked: Histogram, bins: Sequence[int]) -> Tensor:
    """Edges are found once more, and copied."""
    return histogramdd_of_edges(asked, histogramdd_edges(asked, bins))


@operator("aten::_histogramdd_from_bin_tensors").decomposition("cpu")
def histogramdd_of_edges(asked: Histogram, bins: Sequence[Tensor]) -> Tensor:
    """Edges that are given are copied."""
    copies = [torch.empty_like(one) for one in bins]
    result = asked.filled(*(one.shape[0] - 1 for one in bins))
    del copies
    return result


# How many tokens an expert gets is counted by these.
operator("aten::bincount", "aten::histc", unknown_outputs=UnknownOutputs.EVEN_COUNTS)
# As many bins as were asked for, or more: native/SummaryOps.cpp, _bincount_cpu_template.
counted = operator("aten::bincount", decided_by=(0,), size_argument="minlength", size_is_least=True)


@counted.at_most()
def most_bins(self: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor | None:
    """One for each number that a small type has; native/SummaryOps.cpp."""
    if self.element_size() > _SMALL:
        return None
    bins = max(minlength, torch.iinfo(self.dtype).max + 1)
    if weights is None:
        return self.new_empty(bins, dtype=torch.int64)
    single = weights.dtype == torch.float32
    return self.new_empty(bins, dtype=torch.float32 if single else torch.float64)


@operator("aten::histc", "aten::histc.out").workspace("cuda")
def bounds_and_counts(
    machine: Gpu,
    input: Tensor,
    bins: int = 100,
    min: float = 0,
    max: float = 0,
    out: Tensor | None = None,
) -> tuple[int, ...]:
    """The least element and the greatest, where no range is given; counts, which are copied to
    where they shall go; SummaryOps.cu, _histc_cuda_template.
    """
    counts = () if out is None else (bins * input.element_size(),)
    if min != max or not input.numel():
        return counts
    extremes = (input.element_size(), input.element_size(), *pair_of_values(machine, input))
    return (*passing(*extremes), *counts)


@counted.decomposition("cuda")
def bincount(outputs: Tensor, self: Tensor, weights: Tensor | None = None) -> Tensor:
    """The extremes, and weights of other types as double; _bincount_cuda_template."""
    if not self.numel():
        return torch.empty(outputs.shape, dtype=outputs.dtype)
    if weights is not None and weights.dtype not in (torch.float32, torch.float64):
        weights = weights.to(torch.float64)
    least, most = torch.aminmax(self)
    counts = torch.empty(outputs.shape, dtype=outputs.dtype)
    del least, most
    return counts


@counted.workspace("cpu")
def bincount_on_cpu(self: Tensor, weights: Tensor | None = None) -> int:
    """Dense copies, and weights that are not single precision in double; exact, SummaryOps.cpp. The
    least and the greatest are gone before there is a result.
    """
    taken = contiguous_copy(self) + contiguous_copy(weights)
    if weights is not None and weights.dtype not in (torch.float32, torch.float64):
        taken += dense_bytes(weights, torch.float64)
    return taken


_CHUNK = 65_536
_NORMS = (1.0, 2.0, float("inf"))


@operator("aten::_foreach_norm", "aten::_foreach_powsum").workspace("cuda")
def foreach_norm(
    machine: Gpu, input: Sequence[Tensor], ord: float = 2, dtype: torch.dtype | None = None
) -> tuple[Request, ...]:
    """In the type that is added up in; ``foreach_tensor_norm_cuda``, of which sums of powers are
    norms without the root.
    """
    kind = accumulation_type(dtype or input[0].dtype)
    return _by_chunks(machine, input, kind.itemsize, float(ord) in _NORMS)


@operator("aten::_foreach_max").workspace("cuda")
def foreach_max(machine: Gpu, input: Sequence[Tensor]) -> tuple[Request, ...]:
    """In the tensors' type; ``foreach_tensor_max_cuda``."""
    return _by_chunks(machine, input, input[0].element_size())


def _by_chunks(
    gpu: Gpu, tensors: Sequence[Tensor], size: int, taken: bool = True
) -> tuple[Request, ...]:
    """A partial result of every chunk; what the kernel does not take (``can_use_fast_route``: one
    type, and every tensor dense) goes one tensor after the other through a kernel for one.
    """
    dtype = tensors[0].dtype
    if not taken or not all(
        one.dtype == dtype and one.layout is torch.strided and is_dense(one) for one in tensors
    ):
        return max((reduced(gpu, one, None, one.element_size()) for one in tensors), key=sum)
    chunks = max(ceil_div(tensor.numel(), _CHUNK) for tensor in tensors)
    return (len(tensors) * chunks * size, ALL)
