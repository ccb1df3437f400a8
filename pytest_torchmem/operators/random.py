"""Dropout, distributions whose parameters are tensors, and samples of them."""

import math
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import CompositeCall
from pytest_torchmem.operators.elementwise import converted, like_first, like_operands
from pytest_torchmem.operators.libraries import cub
from pytest_torchmem.operators.registry import OperatorKind, UnknownOutputs, aten, operator
from pytest_torchmem.operators.workspace import (
    CONTIGUOUS,
    DOUBLE,
    LONG,
    SCALAR,
    dense_bytes,
    lying_alike,
    made_like,
    passing,
)
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host

# Registered for every backend, and writing data all the same.
operator("aten::_philox_normal", "aten::_philox_uniform", kind=OperatorKind.LEAF)

operator("aten::multinomial", unknown_outputs=UnknownOutputs.POSITIONS)

# native/cuda/Dropout.cu makes the mask first.
native_dropout = operator("aten::native_dropout", order={"cuda": (1, 0)})


@native_dropout.meta("cuda")
def output_and_mask(input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Both like the input; the mask of a short cut is contiguous; native_dropout_cuda."""
    if not input.dtype.is_floating_point:  # torch says what is wrong
        wrong: tuple[Tensor, Tensor] = torch.native_dropout(input, p, train)
        return wrong
    short = train is False or p == 1
    layout = torch.contiguous_format if short else torch.preserve_format
    return lying_alike(input), lying_alike(input, dtype=torch.bool, memory_format=layout)


operator("aten::native_dropout_backward").meta()(like_operands)
# native/Distributions.cpp
operator("aten::_standard_gamma_grad").meta()(made_like(self=CONTIGUOUS))
operator("aten::_dirichlet_grad").meta()(like_first)
operator("aten::_sample_dirichlet", "aten::binomial").meta("cuda")(like_first)
# ``at::zeros`` of the sizes
operator("aten::_sample_dirichlet").meta("cpu")(made_like(self=CONTIGUOUS))
operator("aten::binomial").meta("cpu")(made_like(count=CONTIGUOUS))


@operator("aten::_sample_dirichlet").workspace("cpu")
def gamma_and_its_sums(input: Tensor) -> int:
    """Gamma variables in double, and the sum of each row; _s_dirichlet_cpu."""
    rows = input.numel() // max(1, input.shape[-1]) if input.dim() else 1
    return (input.numel() + rows) * DOUBLE


@operator("aten::dropout").path("cuda")
def dropout(call: CompositeCall, input: Tensor, p: float, train: bool) -> Any:
    """One kernel with a boolean mask in training with 0 < p < 1; native/Dropout.cpp, dropout."""
    if train and 0 < p < 1 and input.numel() > 0:
        return torch.native_dropout(input, p, train)[0]
    return call()


@operator(*aten("bernoulli.p rand_like randint_like randn_like")).unread()
def shape_alone(self: Tensor) -> list[Tensor]:
    """What gives no more than the shape; in ``vmap`` dropout draws so (native/Dropout.cpp)."""
    return [self]


@native_dropout.workspace("cpu")
def mask_as_numbers(input: Tensor) -> int:
    """The mask as numbers, before it is boolean; native/Dropout.cpp, native_dropout_cpu."""
    return dense_bytes(input)


@operator("aten::native_dropout_backward").workspace("cpu")
def scaled_mask(grad_output: Tensor, mask: Tensor) -> int:
    """The mask as numbers, then scaled; native/Dropout.cpp, native_dropout_backward."""
    return mask.numel() * grad_output.element_size() + SCALAR + grad_output.element_size()


@operator("aten::bernoulli_.Tensor").workspace("cuda")
def probabilities(input: Tensor, p: Tensor) -> int:
    """Probabilities in float, or as the output in double; native/cuda/Bernoulli.cu."""
    return converted(p, torch.float64 if input.dtype is torch.float64 else torch.float32)


@operator("aten::normal.Tensor_float", "aten::normal.Tensor_float_out").workspace()
def deviations(outputs: Tensor) -> int:
    """A tensor for the deviation, left empty; DistributionTemplates.h, normal_out_impl."""
    return dense_bytes(outputs)


@operator(
    *(f"aten::normal.{of}{out}" for of in ("Tensor_Tensor", "float_Tensor") for out in ("", "_out"))
).workspace("cpu")
def check_of_deviations(std: Tensor) -> int:
    """The least deviation, and whether it is at least a number, which is wrapped and converted;
    native/DistributionTemplates.h, CHECK_NORMAL_TENSOR_STD.
    """
    return 2 * std.element_size() + LONG + 1 if std.numel() else 0


@operator("aten::randperm").workspace("cpu")
def check_of_number(outputs: Tensor) -> int:
    """The number in the result's type; check_supported_max_int_with_precision."""
    return outputs.element_size()


@operator("aten::multinomial", "aten::multinomial.out").decomposition()
def multinomial(
    machine: Gpu | Host,
    self: Tensor,
    num_samples: int,
    replacement: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """native/Distributions.cpp, multinomial_out: checks, and a race of exponential variables; with
    replacement (native/cpu/MultinomialKernel.cpp) the cumulated distribution of a row, of 16 bits
    in float, on CUDA (cuda/MultinomialKernel.cu) of all rows, from normalized copies.
    """
    shape = (*self.shape[:-1], num_samples)
    result = torch.empty(shape, dtype=torch.int64) if out is None else out.resize_(shape)
    if replacement and num_samples > 1:
        if isinstance(machine, Gpu):
            given, normalized = self.new_empty(self.shape), self.new_empty(self.shape)
            cumulated = torch.cumsum(normalized, -1)
            del cumulated, normalized, given
            return result
        dtype = torch.float32 if self.dtype.itemsize == 2 else self.dtype
        self.new_empty((self.shape[-1],), dtype=dtype)
        return result
    least, most = torch.aminmax(self)
    valid = (least >= 0) & (most < torch.inf)
    total = self.sum(-1)
    impossible = total == 0
    if self.dim() > 1:
        impossible = impossible.any()
    del total
    torch.bitwise_not(impossible)
    race = torch.empty_like(self)
    if num_samples > 1:
        values = self.new_empty(shape)
        if isinstance(machine, Gpu):
            torch.topk(race, num_samples, -1, out=(values, result))
        del values
    del race, impossible, valid, least, most
    return result


@operator("aten::randperm").workspace("cuda")
def randperm(machine: Gpu, outputs: Tensor, n: int) -> tuple[int, ...]:
    """The number in the type of the result; positions, and random keys that sort them, of as many
    bits as make equal ones unlikely. Randperm.cu.
    """
    size = outputs.element_size()
    if n < 1:
        return passing(size)
    bits = min(64, math.ceil(math.log2(n - (6.0 * n * n + 1) / (12 * math.log(0.9)))))
    key = 4 if bits <= 32 else LONG
    sort = cub.radix_sort(machine, n, key, size, bits)
    return (*passing(size), n * size, n * key, n * key, sort)
