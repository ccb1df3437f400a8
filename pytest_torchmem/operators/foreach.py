"""Operators on lists of tensors, fused optimizers among them.

Their kernels read addresses from the launch's own arguments: native/cuda/MultiTensorApply.cuh;
exact. Norms and maxima keep a partial result for every chunk of every tensor:
native/cuda/ForeachReduceOp.cu.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_torchmem.operators.elementwise import reduced
from pytest_torchmem.operators.registry import aten, operator
from pytest_torchmem.operators.workspace import ALL, Request, accumulation_type, ceil_div, is_dense
from pytest_torchmem.targets.gpus import Gpu

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
    return _reduced(machine, input, kind.itemsize, float(ord) in _NORMS)


@operator("aten::_foreach_max").workspace("cuda")
def foreach_max(machine: Gpu, input: Sequence[Tensor]) -> tuple[Request, ...]:
    """In the tensors' type; ``foreach_tensor_max_cuda``."""
    return _reduced(machine, input, input[0].element_size())


def _reduced(
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


@operator(
    *aten("_fused_adagrad_ _fused_adam_.tensor_lr _fused_adamw_.tensor_lr _fused_sgd_")
).meta()
def fused_optimizer() -> None:
    """Parameters and states are updated where they are; native/cuda/fused_adam_impl.cu, …"""


_BY_SCALARS = "_foreach_addcdiv _foreach_addcmul"
_IN_PLACE = "_foreach_addcdiv_ _foreach_addcmul_"


@operator(
    *aten(f"{_BY_SCALARS} {_IN_PLACE}", ".Tensor"),
    across_devices=True,
    of_host="scalars",
    elsewhere="Expected scalars to be on CPU, got {device} instead.",
).check("cuda")
def as_many_scalars(input: Sequence[Tensor], scalars: Tensor) -> None:
    """native/ForeachUtils.h, convert_tensor_to_scalar_list."""
    if scalars.dim() != 1:
        raise RuntimeError(
            f"Expected packed scalar Tensor to be of dimension 1. Got {scalars.dim()} instead."
        )
    if scalars.numel() != len(input):
        raise RuntimeError(
            f"Expected length of scalars to match input of length {len(input)} but got "
            f"{scalars.numel()} instead."
        )


@operator(*aten(_BY_SCALARS, ".Tensor")).meta("cuda")
def sums(input: Sequence[Tensor]) -> list[Tensor]:
    """One for each tensor, whatever the host's scalars are; native/cuda/ForeachPointwiseOp.cu."""
    return [torch.empty_like(one) for one in input]


@operator(*aten(_IN_PLACE, ".Tensor")).meta("cuda")
def sums_in_place() -> None:
    """The tensors themselves."""


# The gradients of a trace count as finite, so ``GradScaler`` steps.
operator("aten::_amp_foreach_non_finite_check_and_unscale_", keeps_values=("found_inf",))
