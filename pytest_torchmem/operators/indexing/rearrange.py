"""Elements moved or repeated: rolling, triangles, repetitions."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_torchmem.operators.elementwise import converted
from pytest_torchmem.operators.geometry import CONTIGUOUS, contiguous_copy, copied, dense_bytes
from pytest_torchmem.operators.libraries import cub
from pytest_torchmem.operators.reduction.sums import in_type_of_input
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import ALL, Request, Workspace, passing, unknown
from pytest_torchmem.targets.gpus import Gpu

_LONG = 8

rolling = operator("aten::roll")


@rolling.workspace("cpu")
def rolled_on_cpu(input: Tensor, dims: Sequence[int] = ()) -> int:
    """Several dimensions are rolled one after the other, all of them as one;
    native/TensorTransformations.cpp, roll_common.
    """
    return (len(dims) - 1) * dense_bytes(input) if len(dims) > 0 else contiguous_copy(input)


@rolling.workspace("cuda")
def rolled_on_cuda(input: Tensor, dims: Sequence[int] = ()) -> int:
    """A dense copy; of several dimensions one after the other, the result of each but the last.

    TensorTransformations.cu, ``roll_cuda``; native/TensorTransformations.h, ``roll_common``.
    """
    return (len(dims) - 1) * dense_bytes(input) if len(dims) > 1 else contiguous_copy(input)


@operator("aten::tril", "aten::triu").workspace("cpu")
def triangle(input: Tensor) -> int:
    """A copy of batches that do not follow each other; native/TriangularOps.cpp,
    checkTrilTriuBatchContiguous.
    """
    if input.is_contiguous() or input.numel() == 0:
        return 0
    expected = input.shape[-1] * input.shape[-2]
    for dim in range(input.dim() - 3, -1, -1):
        if input.stride(dim) != expected:
            return dense_bytes(input)
        expected *= input.shape[dim]
    return 0


@operator("aten::tril_", "aten::triu_").workspace("cpu")
def triangle_in_place(input: Tensor) -> Workspace | int:
    """Where there would be a copy, perhaps another for the result."""
    return unknown() if triangle(input) else 0


operator("aten::narrow_copy").workspace("cpu")(copied(self=CONTIGUOUS))

repeat_interleave = operator("aten::repeat_interleave")


@operator("aten::repeat_interleave.Tensor", size_argument="output_size").at_most()
def said_by_caller(repeats: Tensor, output_size: int | None = None) -> Tensor | None:
    """What the caller says, if it does; native/Repeat.h, ``repeat_interleave_common``."""
    return None if output_size is None else repeats.new_empty(output_size)


@repeat_interleave.workspace("cpu")
def sums_of_counts(repeats: Tensor) -> int:
    """A prefix sum of the counts, of dense ones; native/Repeat.h, ``repeat_interleave_common``."""
    converted = 0 if repeats.element_size() == _LONG else _LONG * repeats.numel()
    return contiguous_copy(repeats) + _LONG * repeats.numel() + converted


@repeat_interleave.workspace("cuda")
def prefix_sum(
    machine: Gpu, repeats: Tensor, output_size: int | None = None
) -> tuple[Request, ...]:
    """A prefix sum of the counts, and whether one is negative; native/Repeat.h,
    ``repeat_interleave_common``.
    """
    number = repeats.numel()
    copy = converted(repeats, torch.int64) or contiguous_copy(repeats)
    sums = (number * _LONG, *passing(copy, cub.scan(number, _LONG)))
    if output_size is not None:
        return (contiguous_copy(repeats), *sums, ALL)
    signs = torch.empty((number,), dtype=torch.bool, device="meta")
    return (contiguous_copy(repeats), *sums, number, 1, *in_type_of_input(machine, signs))
