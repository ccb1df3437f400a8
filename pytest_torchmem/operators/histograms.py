"""Histograms: edges, and counts for every thread; native/Histogram.cpp and its CPU kernel."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_torchmem.operators.reduction import pair_of_values
from pytest_torchmem.operators.registry import UnknownOutputs, aten, operator
from pytest_torchmem.operators.workspace import contiguous_copy, dense_bytes, passing
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host

_SMALL = 2
"""Bytes of a type each of whose numbers may have a bin."""

# Torch has a kernel of them for the CPU alone (as a build with CUDA says of each,
# ``_dispatch_has_kernel_for_dispatch_key``).
operator(
    *aten("_histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors"),
    *aten("histogram.bin_ct histogram.bins_tensor"),
    not_on=frozenset({"cuda"}),
)


def _filled(
    machine: Host, input: Tensor, bins: Sequence[int], *, found: bool = False, density: bool = False
) -> Tensor:
    """A histogram for every thread (``histogramdd_cpu_contiguous``), which the extremes come before
    where its range is to be found (``histogramdd_compute_outer_edges``). A density is divided by
    its sum.
    """
    result = input.new_empty(bins)
    if found and input.numel():
        torch.aminmax(input)
    result.new_zeros((machine.threads, *bins))
    if density:
        total = result.sum()
        result.div_(1)
        del total
    return result


@operator("aten::histc").decomposition("cpu")
def histc(machine: Host, self: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """histogram_histc: edges of its own, and every thread's counts."""
    edges = self.new_empty((bins + 1,))
    result = _filled(machine, self, (bins,), found=min == max)
    del edges
    return result


@operator("aten::histogram.bin_ct").decomposition("cpu")
def histogram(
    machine: Host,
    self: Tensor,
    bins: int = 100,
    *,
    range: Sequence[float] | None = None,
    density: bool = False,
) -> tuple[Tensor, Tensor]:
    """Evenly spaced edges."""
    edges = self.new_empty((bins + 1,))
    return _filled(machine, self, (bins,), found=range is None, density=density), edges


@operator("aten::histogram.bins_tensor").decomposition("cpu")
def histogram_of_edges(
    machine: Host, self: Tensor, bins: Tensor, *, density: bool = False
) -> tuple[Tensor, Tensor]:
    """Edges that are given, and copied."""
    edges = self.new_empty(bins.shape)
    return _filled(machine, self, (bins.shape[0] - 1,), density=density), edges


@operator("aten::_histogramdd_bin_edges").decomposition("cpu")
def histogramdd_edges(
    self: Tensor, bins: Sequence[int], *, range: Sequence[float] | None = None
) -> list[Tensor]:
    """Evenly spaced edges along every dimension; ``histogramdd_bin_edges``."""
    if range is None and self.numel():
        torch.aminmax(self.reshape(-1, self.shape[-1]), dim=0)
    return [torch.linspace(0.0, 1.0, count + 1, dtype=self.dtype) for count in bins]


@operator("aten::_histogramdd_from_bin_cts").decomposition("cpu")
def histogramdd_of_counts(
    machine: Host,
    self: Tensor,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    density: bool = False,
) -> Tensor:
    """Edges are found once more, and copied."""
    edges = histogramdd_edges(self, bins, range=range)
    return histogramdd_of_edges(machine, self, edges, density=density)


@operator("aten::_histogramdd_from_bin_tensors").decomposition("cpu")
def histogramdd_of_edges(
    machine: Host, self: Tensor, bins: Sequence[Tensor], *, density: bool = False
) -> Tensor:
    """Edges that are given are copied."""
    copies = [torch.empty_like(one) for one in bins]
    result = _filled(machine, self, [one.shape[0] - 1 for one in bins], density=density)
    del copies
    return result


# How many tokens an expert gets is counted by these.
operator("aten::bincount", "aten::histc", unknown_outputs=UnknownOutputs.EVEN_COUNTS)
# As many bins as were asked for, or more: native/SummaryOps.cpp, _bincount_cpu_template.
counted = operator("aten::bincount", decided_by=(0,), size_argument="minlength", size_is_least=True)


@counted.at_most()
def bin_for_every_number(
    self: Tensor, weights: Tensor | None = None, minlength: int = 0
) -> Tensor | None:
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
    """Dense copies, and weights that are not single precision in double; exact, SummaryOps.cpp.

    The least and the greatest are gone before there is a result.
    """
    taken = contiguous_copy(self) + contiguous_copy(weights)
    if weights is not None and weights.dtype not in (torch.float32, torch.float64):
        taken += dense_bytes(weights, torch.float64)
    return taken
