"""What kernels refuse and ``meta`` takes, in the words of the kernel: dtypes, shapes, numbers.

Where no device is named, the CPU and CUDA share the function that refuses. What is refused by
values is in ``checks_of_values.py``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import on_meta
from pytest_torchmem.operators.overlap import written_once
from pytest_torchmem.operators.registry import aten, operator

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


def dtype_in_cpp(dtype: torch.dtype) -> str:
    """Return what C++ calls a dtype: ``c10::Half``."""
    return _NAMES.get(dtype, str(dtype))


def _scalar_type(tensor: Tensor) -> str:
    """Return what C++ calls a tensor's dtype: ``Half``; c10/core/ScalarType.h."""
    return tensor.type().rpartition(".")[2].removesuffix("Tensor")


def _same_in_product(first: Tensor, second: Tensor, names: str) -> None:
    if first.dtype is not second.dtype:
        of_both = [dtype_in_cpp(one.dtype) for one in (first, second)]
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
        torch.zeros((), dtype=input.dtype).expand(input.shape).expand(mat1.shape[0], mat2.shape[1])


@operator("aten::addbmm", "aten::addbmm_").check()
def operands_of_products(input: Tensor, batch1: Tensor, batch2: Tensor) -> None:
    """The meta function of the addmm of each of them; native/LinearAlgebra.cpp, ADDMM_META."""
    for name, one in (("self", input), ("mat1", batch1)):
        if one.dtype is not batch2.dtype:
            raise RuntimeError(
                f"{name} and mat2 must have the same dtype, but got "
                f"{_scalar_type(one)} and {_scalar_type(batch2)}"
            )


@operator("aten::_cdist_forward").check("cuda")
def points(x1: Tensor, x2: Tensor) -> None:
    """native/cuda/DistanceKernel.cu, cdist_kernel_impl."""
    _data_of(x1, x2)


@operator("aten::convolution", "aten::_convolution", "aten::convolution_overrideable").check("cuda")
def weight_of_convolution(input: Tensor, weight: Tensor) -> None:
    """native/Convolution.cpp, check_input_same_type_as_parameters."""
    if input.dtype is not weight.dtype:
        raise RuntimeError(
            f"Input type ({_on_cuda(input)}) and weight type ({_on_cuda(weight)}) should be the "
            "same"
        )


def _on_cuda(tensor: Tensor) -> str:
    """Return what ``TensorBase::toString`` says: a legacy type has another name."""
    scalar_type = _scalar_type(tensor)
    legacy = hasattr(torch, f"{scalar_type}Tensor")
    return f"torch.cuda.{scalar_type}Tensor" if legacy else f"CUDA{scalar_type}Type"


@operator("aten::native_layer_norm", "aten::native_group_norm").check("cuda")
def weights_of_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    """native/cuda/layer_norm_kernel.cu, LayerNormKernelImpl, and group_norm_kernel.cu: their data
    is asked for as that of the input's type.
    """
    for parameter in (weight, bias):
        _data_of(input, parameter)


@operator(
    *aten("native_batch_norm _native_batch_norm_legit"), "aten::_native_batch_norm_legit.no_stats"
).check("cuda")
def weights_of_batch_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    """native/cuda/Normalization.cu, batch_norm_cuda: those of an input in half precision may be
    in single precision.
    """
    halves = input.dtype in (torch.float16, torch.bfloat16)
    for parameter in (weight, bias):
        if not (halves and parameter is not None and parameter.dtype is torch.float32):
            _data_of(input, parameter)


@operator("aten::nll_loss_forward", "aten::nll_loss2d_forward").check("cuda")
def weight_of_classes(input: Tensor, weight: Tensor | None) -> None:
    """native/cuda/NLLLoss.cu, nll_loss_forward_out_cuda_template, and NLLLoss2d.cu."""
    _data_of(input, weight)


@operator("aten::grid_sampler_2d", "aten::grid_sampler_3d").check("cuda")
def type_of_grid(input: Tensor, grid: Tensor) -> None:
    """native/cuda/GridSampler.cu, launch_grid_sampler_2d_forward_kernel: ``getTensorInfo``."""
    _data_of(input, grid)


def _data_of(input: Tensor, other: Tensor | None) -> None:
    """Raise what ``Tensor::data_ptr`` of the type of ``input`` does of another's data."""
    if other is not None and other.dtype is not input.dtype and input.numel():
        raise RuntimeError(
            f"expected scalar type {_scalar_type(input)} but found {_scalar_type(other)}"
        )


@operator("aten::binary_cross_entropy").check("cuda")
def target_of_cross_entropy(input: Tensor, target: Tensor) -> None:
    """native/cuda/Loss.cu, binary_cross_entropy_out_kernel: one TensorIterator of one type."""
    if input.dtype is not target.dtype:
        raise RuntimeError(f"Found dtype {_scalar_type(target)} but expected {_scalar_type(input)}")


@operator(*aten("index_put index_put_ _index_put_impl_")).check()
def values_at_positions(
    input: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> None:
    """native/TensorAdvancedIndexing.cpp, make_index_put_iterator."""
    if any(index is not None and not index.dtype.is_signed for index in indices):
        return  # masks, whose shapes are counted elsewhere
    if input.dtype is not values.dtype and not accumulate:
        raise RuntimeError(
            "Index put requires the source and destination dtypes match, got "
            f"{_scalar_type(input)} for the destination and {_scalar_type(values)} for the source."
        )
    shape = torch.ops.aten.index(on_meta(input), [_meta_or_none(one) for one in indices]).shape
    try:
        torch.empty((), device="meta").expand(values.shape).expand(shape)
    except RuntimeError:
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to "
            f"indexing result of shape {list(shape)}"
        ) from None


def _meta_or_none(index: Tensor | None) -> Tensor | None:
    return None if index is None else on_meta(index)


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


@operator("aten::complex.out").check()
def output_of_complex(real: Tensor, imag: Tensor, out: Tensor) -> None:
    """native/TensorFactories.cpp, complex_out."""
    parts_of_complex(real, imag)
    made = torch.complex(torch.zeros((), dtype=real.dtype), torch.zeros((), dtype=imag.dtype))
    if out.dtype is not made.dtype:
        raise RuntimeError(
            f"Expected object of scalar type {_scalar_type(made)} but got scalar type "
            f"{_scalar_type(out)} for argument 'out'"
        )


@operator(*aten("index_fill index_fill_", ".int_Scalar"), *aten("fill fill_", ".Scalar")).check()
def number_that_fills(input: Tensor, value: complex) -> None:
    """native/cpu/FillKernel.cpp, fill_kernel, and those like it: the tensor's type holds it."""
    torch.full((), value, dtype=input.dtype)


@operator("aten::constant_pad_nd").check()
def number_around(input: Tensor, value: complex = 0) -> None:
    """native/ConstantPadNd.cpp, which begins with a tensor that is filled."""
    number_that_fills(input, value)


@operator("aten::full").check()
def number_of_factory(fill_value: complex, dtype: torch.dtype | None = None) -> None:
    """native/TensorFactories.cpp, full, which fills."""
    torch.full((), fill_value, dtype=dtype)


@operator("aten::scalar_tensor").check()
def number_in_tensor(s: complex, dtype: torch.dtype | None = None) -> None:
    """native/TensorFactories.cpp, scalar_tensor, which fills."""
    torch.full((), s, dtype=dtype)


@operator("aten::full_like", "aten::new_full").check()
def number_like_another(
    input: Tensor, fill_value: complex, dtype: torch.dtype | None = None
) -> None:
    """native/TensorFactories.cpp, full_like and new_full, which fill."""
    torch.full((), fill_value, dtype=dtype or input.dtype)


@operator("aten::ormqr").check()
def reflectors(input: Tensor, input2: Tensor, input3: Tensor, left: bool = True) -> None:
    """native/BatchLinearAlgebra.cpp, ormqr; the other sizes ``meta`` compares."""
    tau, other = input2, input3
    if min(input.dim(), other.dim()) < 2 or not tau.dim():
        return
    side = -2 if left else -1
    size, most = tau.shape[-1], min(other.shape[side], input.shape[-1])
    if other.shape[side] == input.shape[-2] and size < most:
        raise RuntimeError(
            f"torch.ormqr: tau.shape[-1] must be equal to min(other.shape[{side}], input.shape[-1])"
        )


@operator("aten::aminmax.out").check()
def outputs_of_extremes(input: Tensor, min: Tensor, max: Tensor) -> None:
    """The outputs of a structured kernel; torchgen/dest/register_dispatch_key.py, resize_out."""
    _output_of_type(input, min)
    _output_of_type(input, max)


@operator("aten::linalg_cross.out").check()
def output_of_cross(input: Tensor, out: Tensor) -> None:
    """The same."""
    _output_of_type(input, out)


def _output_of_type(input: Tensor, out: Tensor) -> None:
    if out.dtype is not input.dtype:
        raise RuntimeError(
            f"Expected out tensor to have dtype {dtype_in_cpp(input.dtype)}, but got "
            f"{dtype_in_cpp(out.dtype)} instead"
        )


@operator("aten::masked_scatter", "aten::masked_scatter_").check()
def mask_of_elements(mask: Tensor) -> None:
    """native/cuda/IndexKernel.cpp and native/TensorAdvancedIndexing.cpp, masked_scatter_."""
    if mask.dtype is not torch.bool:
        raise RuntimeError(
            "masked_scatter_ only supports boolean masks, but got mask with dtype "
            f"{_scalar_type(mask)}"
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
