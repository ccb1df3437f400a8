"""What kernels refuse and ``meta`` takes, in the words of the kernel: dtypes, shapes, numbers.

Where no device is named, the CPU and CUDA share the function that refuses. What is refused by
values is in ``checks_of_values.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.overlap import written_once
from pytest_torchmem.operators.registry import operator

_INDICES = (torch.int32, torch.int64)

_NAMES = {
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.float32: "float",
    torch.float64: "double",
    torch.int64: "long int",
    torch.int32: "int",
    torch.int16: "short int",
    torch.int8: "signed char",
    torch.uint8: "unsigned char",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
"""What ``caffe2::TypeMeta`` calls a dtype, with gcc."""


def _scalar_type(tensor: Tensor) -> str:
    """Return what C++ calls a tensor's dtype: ``Half``; c10/core/ScalarType.h."""
    return tensor.type().rpartition(".")[2].removesuffix("Tensor")


def _same_in_product(first: Tensor, second: Tensor, names: str) -> None:
    if first.dtype is not second.dtype:
        of_both = [_NAMES.get(one.dtype, str(one.dtype)) for one in (first, second)]
        raise RuntimeError(
            f"expected {names} to have the same dtype, but got: {of_both[0]} != {of_both[1]}"
        )


@operator("aten::mm").check("cpu")
def operands_on_cpu(input: Tensor, mat2: Tensor) -> None:
    """native/LinearAlgebra.cpp, addmm_impl_cpu_."""
    _same_in_product(input, mat2, "m1 and m2")


@operator("aten::mm").check("cuda")
def operands_on_cuda(input: Tensor, mat2: Tensor) -> None:
    """native/cuda/Blas.cpp, addmm_out_cuda_impl."""
    _same_in_product(input, mat2, "mat1 and mat2")


@operator("aten::bmm").check()
def operands_of_batch(input: Tensor, mat2: Tensor) -> None:
    """native/cuda/Blas.cpp, bmm_out_cuda_impl, and native/LinearAlgebra.cpp, baddbmm_cpu_kernel:
    the second operand's data is asked for as that of the first one's type.
    """
    if input.dtype is not mat2.dtype and input.numel() and mat2.numel():
        raise RuntimeError(
            f"expected scalar type {_scalar_type(input)} but found {_scalar_type(mat2)}"
        )


@operator("aten::addmm").check()
def bias_of_product(input: Tensor, mat1: Tensor, mat2: Tensor) -> None:
    """``expand_size`` to the product; native/LinearAlgebra.cpp and native/cuda/Blas.cpp."""
    if mat1.dim() == mat2.dim() == 2:
        torch.empty((), device="meta").expand(input.shape).expand(mat1.shape[0], mat2.shape[1])


@operator("aten::gelu", "aten::gelu_", "aten::gelu_backward").check()
def approximation(approximate: str = "none") -> None:
    """native/Activation.h, get_gelutype_enum."""
    if approximate not in ("none", "tanh"):
        raise RuntimeError("approximate argument must be either none or tanh.")


@operator("aten::_fused_rms_norm").check()
def normalized(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None) -> None:
    """native/layer_norm.h, _check_rms_norm_inputs_symint."""
    shape = list(normalized_shape)
    if not shape:
        raise RuntimeError(
            "Expected normalized_shape to be at least 1-dimensional, i.e., containing at least one "
            "element, but got normalized_shape = []"
        )
    if weight is not None and list(weight.shape) != shape:
        raise RuntimeError(
            "Expected weight to be of same shape as normalized_shape, but got weight of shape "
            f"{list(weight.shape)} and normalized_shape = {shape}"
        )
    if list(input.shape[-len(shape) :]) != shape:
        expected = ", ".join(map(str, shape))
        raise RuntimeError(
            f"Given normalized_shape={shape}, expected input with shape [*{expected}], but got "
            f"input of size{list(input.shape)}"
        )


@operator("aten::bucketize.Tensor").check()
def boundaries_of_buckets(boundaries: Tensor) -> None:
    """native/Bucketization.cpp."""
    if boundaries.dim() != 1:
        raise RuntimeError(
            f"boundaries tensor must be 1 dimension, but got dim({boundaries.dim()})"
        )


@operator("aten::multinomial").check()
def number_of_samples(input: Tensor, num_samples: int, replacement: bool = False) -> None:
    """native/Distributions.cpp, multinomial_out."""
    if num_samples <= 0:
        raise RuntimeError("cannot sample n_sample <= 0 samples")
    if not replacement and input.dim() and num_samples > input.shape[-1]:
        raise RuntimeError(
            "cannot sample n_sample > prob_dist.size(-1) samples without replacement"
        )


@operator("aten::index_select").check("cpu")
def index_of_rows(index: Tensor) -> None:
    """native/TensorAdvancedIndexing.cpp, index_select_out_cpu_."""
    if index.dtype not in _INDICES:
        raise RuntimeError("index_select(): Expected dtype int32 or int64 for index")


@operator("aten::index_select").check("cuda")
def index_of_rows_on_cuda(input: Tensor, index: Tensor) -> None:
    """native/cuda/Indexing.cu, index_select_out_cuda_impl: not asked where nothing is selected."""
    if index.dtype not in _INDICES and index.numel() and input.numel():
        raise RuntimeError(
            f"\"index_select_out_cuda_impl\" not implemented for '{_scalar_type(index)}'"
        )


@operator("aten::put_").check()
def source_of_elements(input: Tensor, source: Tensor) -> None:
    """native/TensorAdvancedIndexing.cpp, put_."""
    if input.dtype is not source.dtype:
        raise RuntimeError(
            "put_(): self and source expected to have the same dtype, but got self.dtype = "
            f"{_scalar_type(input)} and source.dtype = {_scalar_type(source)}"
        )


@operator("aten::copy_").check()
def destination(input: Tensor, src: Tensor | complex) -> None:
    """native/Copy.cpp, copy_impl: a copy of what lies alike may be one of a tensor to itself.

    A number that C++ wrapped in a tensor without sides arrives as the number.
    """
    source = (src.shape, src.stride()) if isinstance(src, Tensor) else ((), ())
    if input.numel() and (input.shape, input.stride()) != source:
        written_once(input)


@operator("aten::complex").check()
def parts_of_complex(real: Tensor, imag: Tensor) -> None:
    """native/TensorFactories.cpp, complex_check_dtype."""
    if real.dtype is not imag.dtype:
        raise RuntimeError(
            f"Expected object of scalar type {_scalar_type(real)} but got scalar type "
            f"{_scalar_type(imag)} for second argument"
        )


@operator("aten::var.correction", "aten::std.correction").check()
def deviating(input: Tensor) -> None:
    """native/ReduceOps.cpp, std_var_out."""
    if not (input.dtype.is_floating_point or input.dtype.is_complex):
        raise RuntimeError("std and var only support floating point and complex dtypes")


@operator("aten::smooth_l1_loss").check()
def turning_point(beta: float = 1.0) -> None:
    """native/BinaryOps.cpp, the meta function of smooth_l1_loss."""
    if beta < 0:
        raise RuntimeError("smooth_l1_loss does not support negative values for beta.")


@operator("aten::clamp", "aten::clamp_").check()
def limits(min: Any = None, max: Any = None) -> None:
    """native/TensorCompare.cpp, the meta functions of clamp."""
    if min is None and max is None:
        raise RuntimeError("torch.clamp: At least one of 'min' or 'max' must not be None")


@operator("aten::uniform_").check()
def range_of_numbers(arguments: Mapping[str, Any]) -> None:
    """native/DistributionTemplates.h, uniform_impl_."""
    least, most = arguments.get("from", 0.0), arguments.get("to", 1.0)
    if least > most:
        raise RuntimeError(
            f"uniform_ expects to return a [from, to) range, but found from={least:g} > to={most:g}"
        )


@operator("aten::histc").check("cpu")
def range_of_bins(min: float = 0, max: float = 0) -> None:
    """native/cpu/HistogramKernel.cpp, histogram_histc: also where the values would say both."""
    if min > max:
        raise RuntimeError("torch.histc: max must be larger than min")


@operator("aten::max").check()
def elements_for_greatest(tensors: list[Tensor]) -> None:
    """native/ReduceAllOps.cpp, max."""
    _elements_for("max", tensors)


@operator("aten::min").check()
def elements_for_least(tensors: list[Tensor]) -> None:
    """native/ReduceAllOps.cpp, min."""
    _elements_for("min", tensors)


def _elements_for(name: str, tensors: list[Tensor]) -> None:
    if len(tensors) == 1 and not tensors[0].numel():
        raise RuntimeError(
            f"{name}(): Expected reduction dim to be specified for input.numel() == 0. Specify the "
            "reduction dim with the 'dim' argument."
        )
