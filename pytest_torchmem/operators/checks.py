"""What kernels refuse and ``meta`` takes, in the words of the kernel: dtypes, shapes, numbers and
values, and writing to memory that several elements share.

Where no device is named, the CPU and CUDA share the function that refuses.

Values are indices out of range, probabilities that are none. The kernels of the CPU raise, those of
CUDA end the process's context by an assertion on the device: both are told in the CPU's words. What
is known of all of an operator's tensors is given to its kernel; where the numbers are too many to
be known and the positions are, these are looked at here.

As to shared memory, ``meta`` asks structured operators alone, and every tensor there has a storage
of its own. The lists below were found by running each operator of ``torch.testing``'s database on
such tensors.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.registry import EVERY, operator
from pytest_torchmem.operators.spec import OperatorSpec
from pytest_torchmem.operators.workspace import HALVES, is_dense, on_meta, scalar_type
from pytest_torchmem.step.trees import argument_tensors
from pytest_torchmem.torch_private.keys import schema
from pytest_torchmem.torch_private.names import listed

_WRITE_TWICE = listed("""
    addmv_ all amax amin any argmax argmin avg_pool3d baddbmm_ bmm conj_physical_ copy_ cummax
    cummin embedding_renorm_ fill_ fill_diagonal_ histc index_fill_ index_put_ linalg_vector_norm
    linear masked_fill_ mv nansum narrow_copy norm prod std sum threshold_ topk tril tril_ triu
    triu_ var zero_
""")
"""Operators whose kernels write to one place more than once: they ask nothing, or it is the same
(``set_check_mem_overlap(false)`` in ATen/native, as in ``TensorIterator::reduce_op``). What
``copy_`` refuses, its record checks."""
_APART = listed("""
    _logcumsumexp addbmm addmm addmv addr baddbmm bernoulli cat copy_ cumprod cumsum floor_divide
    gather gelu hardshrink index_add index_add_ index_copy index_copy_ index_reduce index_reduce_
    index_select kthvalue linalg_cross logcumsumexp normal renorm scatter scatter_ scatter_add
    scatter_add_ scatter_reduce scatter_reduce_ softplus softshrink sort where
""")
"""Operators that are not pointwise and ask whether an operand overlaps with what is written."""
_WHOLLY_APART = listed("""
    cat gather index_add_ index_copy_ index_reduce_ index_select kthvalue linalg_cross scatter_
    scatter_add_ scatter_reduce_
""")
"""Those that refuse an operand which is the written tensor itself (``assert_no_overlap``)."""
_NOT_ASKED = frozenset({"mvlgamma"})


@cache
def keeps_apart(operator: OperatorSpec) -> bool:
    """Return whether a kernel refuses operands that overlap with what it writes to."""
    name = _family(operator)
    if name is None or name in _NOT_ASKED:
        return False
    return name in _APART or torch.Tag.pointwise in operator.overload.tags


def check_written_once(operator: OperatorSpec, args: Sequence[Any], kwargs: Any) -> None:
    """Raise what a kernel raises for an expanded tensor that it would write to.

    A kernel whose ``out`` is its first argument too is the one in place: ``mv`` with ``out`` is
    such a call of ``addmv`` (native/Blas.cpp, mv_out), which copies nothing first.
    """
    name = _family(operator)
    if name is None or name in _WRITE_TWICE:
        return
    for tensor in argument_tensors(operator.written(tuple(args), kwargs)):
        if not (f"{name}_" in _WRITE_TWICE and args and args[0] is tensor):
            written_once(tensor)


def written_once(tensor: Tensor) -> None:
    """Raise for an expanded tensor; ATen/MemoryOverlap.cpp, assert_no_internal_overlap."""
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    if tensor.numel() and any(size > 1 and stride == 0 for size, stride in sides):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a "
            "single memory location. Please clone() the tensor before performing the operation."
        )


def check_apart(
    operator: OperatorSpec,
    args: tuple[Any, ...],
    kwargs: Any,
    tensors: Sequence[Tensor],
    storages: Sequence[object],
) -> None:
    """Raise the kernel's error where one of ``tensors`` overlaps with its output.

    ``storages`` has one object for each storage, in the order of the tensors on them.
    (ATen/MemoryOverlap.cpp, assert_no_partial_overlap and assert_no_overlap.)
    """
    wholly = _family(operator) in _WHOLLY_APART
    for written in argument_tensors(operator.written(args, kwargs)):
        own = next((on for one, on in zip(tensors, storages, strict=True) if one is written), None)
        beside = [one for one, on in zip(tensors, storages, strict=True) if on is own]
        others = [one for one in beside if one is not written]
        given_too = wholly and len(beside) - len(others) > 1
        if given_too or any(_overlap(written, other, wholly) for other in others):
            raise RuntimeError(
                "unsupported operation: some elements of the input tensor and the written-to "
                "tensor refer to a single memory location. Please clone() the tensor before "
                "performing the operation."
            )


def _overlap(written: Tensor, other: Tensor, wholly: bool) -> bool:
    """Return whether two tensors without gaps on one storage overlap; get_overlap_status."""
    if not (written.numel() and other.numel() and is_dense(written) and is_dense(other)):
        return False
    (begin, end), (first, last) = _reach(written), _reach(other)
    if (begin, end) == (first, last):
        return wholly or written.stride() != other.stride()
    return begin < last and first < end


def _reach(tensor: Tensor) -> tuple[int, int]:
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return begin, begin + tensor.numel() * tensor.element_size()


@cache
def _family(operator: OperatorSpec) -> str | None:
    """Return the name of one of torch's own operators that writes to an argument, else None."""
    namespace, _, name = operator.name.partition(".")[0].partition("::")
    written = any(argument.is_out for argument in schema(operator.overload).arguments) or (
        operator.mutated == (0,) and name.endswith("_") and not name.startswith("_")
    )
    return name if namespace == "aten" and written else None


_INDICES = (torch.int32, torch.int64)
Namer = Callable[[Tensor], str]

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


def in_cpp(tensor: Tensor) -> str:
    """Return what C++ calls a tensor's dtype: ``c10::Half``."""
    return _NAMES.get(tensor.dtype, str(tensor.dtype))


def _types(first: Tensor, second: Tensor, says: str, name: Namer = scalar_type) -> str:
    """Return what is said of two tensors of different types, "" for others."""
    differ = first.dtype is not second.dtype
    return says.format(name(first), name(second)) if differ else ""


def _data_of(input: Tensor, *others: Tensor | None) -> str:
    """Return what ``Tensor::data_ptr`` of the type of ``input`` says of others' data."""
    found = [_types(input, other, _DATA) for other in others if other is not None]
    return next(filter(None, found), "") if input.numel() else ""


_DATA = "expected scalar type {} but found {}"
_OPERANDS = "expected {} to have the same dtype, but got: {{}} != {{}}"


def _in_batch_norm(input: Tensor, parameter: Tensor | None) -> str:
    """Return what is said of a parameter: in half precision it may be in single precision."""
    halves = input.dtype in HALVES
    wider = halves and parameter is not None and parameter.dtype is torch.float32
    return "" if wider else _data_of(input, parameter)


def _on_cuda(tensor: Tensor) -> str:
    """Return what ``TensorBase::toString`` says: a legacy type has another name."""
    name = scalar_type(tensor)
    return f"torch.cuda.{name}Tensor" if hasattr(torch, f"{name}Tensor") else f"CUDA{name}Type"


def _samples(input: Tensor, num_samples: int, replacement: bool = False) -> str:
    if num_samples <= 0:
        return "cannot sample n_sample <= 0 samples"
    if replacement or not input.dim() or num_samples <= input.shape[-1]:
        return ""
    return "cannot sample n_sample > prob_dist.size(-1) samples without replacement"


def _fits(number: complex, dtype: torch.dtype | None) -> None:
    """Raise what ``fill_`` does for a number that the type of a tensor does not hold;
    native/cpu/FillKernel.cpp, fill_kernel, and those like it.
    """
    torch.full((), number, dtype=dtype)


def _bias_of_product(input: Tensor, mat1: Tensor, mat2: Tensor) -> None:
    if mat1.dim() == mat2.dim() == 2:
        torch.zeros((), dtype=input.dtype).expand(input.shape).expand(mat1.shape[0], mat2.shape[1])


def _range(arguments: Mapping[str, Any]) -> str:
    least, most = arguments.get("from", 0.0), arguments.get("to", 1.0)
    if least <= most:
        return ""
    return f"uniform_ expects to return a [from, to) range, but found from={least:g} > to={most:g}"


operator(
    """
        addbmm addbmm_ aminmax.out bucketize.Tensor complex complex.out fill.Scalar fill_.Scalar
        gelu gelu_ gelu_backward index_fill.int_Scalar index_fill_.int_Scalar masked_scatter
        masked_scatter_ max min put_ smooth_l1_loss
    """,
    refuses_types=True,
)

_REFUSALS: Mapping[tuple[str, str], Callable[..., object]] = {
    # native/LinearAlgebra.cpp, addmm_impl_cpu_; native/cuda/Blas.cpp, addmm_out_cuda_impl
    ("mm", "cpu"): lambda input, mat2: _types(input, mat2, _OPERANDS.format("m1 and m2"), in_cpp),
    ("mm", "cuda"): lambda input, mat2: _types(
        input, mat2, _OPERANDS.format("mat1 and mat2"), in_cpp
    ),
    # native/cuda/Blas.cpp, bmm_out_cuda_impl, and native/LinearAlgebra.cpp, baddbmm_cpu_kernel: the
    # second operand's data is asked for as that of the first one's type.
    ("bmm", EVERY): lambda input, mat2: mat2.numel() and _data_of(input, mat2),
    # ``expand_size`` to the product; native/LinearAlgebra.cpp and native/cuda/Blas.cpp
    ("addmm", EVERY): _bias_of_product,
    # native/cuda/DistanceKernel.cu, cdist_kernel_impl
    ("_cdist_forward", "cuda"): lambda x1, x2: _data_of(x1, x2),
    # native/Convolution.cpp, check_input_same_type_as_parameters
    ("convolution _convolution convolution_overrideable", "cuda"): lambda input, weight: _types(
        input, weight, "Input type ({}) and weight type ({}) should be the same", _on_cuda
    ),
    # native/cuda/layer_norm_kernel.cu, LayerNormKernelImpl, and group_norm_kernel.cu
    ("native_layer_norm native_group_norm", "cuda"): lambda input, weight, bias: _data_of(
        input, weight, bias
    ),
    # native/cuda/Normalization.cu, batch_norm_cuda
    (
        "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit.no_stats",
        "cuda",
    ): lambda input, weight, bias: _in_batch_norm(input, weight) or _in_batch_norm(input, bias),
    # native/cuda/NLLLoss.cu, nll_loss_forward_out_cuda_template, and NLLLoss2d.cu
    ("nll_loss_forward nll_loss2d_forward", "cuda"): lambda input, weight: _data_of(input, weight),
    # native/cuda/GridSampler.cu, launch_grid_sampler_2d_forward_kernel: ``getTensorInfo``
    ("grid_sampler_2d grid_sampler_3d", "cuda"): lambda input, grid: _data_of(input, grid),
    # native/cuda/Loss.cu, binary_cross_entropy_out_kernel: one TensorIterator of one type
    ("binary_cross_entropy", "cuda"): lambda input, target: _types(
        target, input, "Found dtype {} but expected {}"
    ),
    # native/transformers/cuda/flash_attn/flash_api.cpp, set_params_fprop
    ("_scaled_dot_product_flash_attention _flash_attention_forward", "cuda"): lambda dropout_p: (
        dropout_p >= 1
        and "Expected p_dropout < 1.f to be true, but got false.  (Could this error message be "
        "improved?  If so, please report an enhancement request to PyTorch.)"
    ),
    ("_scaled_dot_product_cudnn_attention", "cuda"): lambda dropout_p=0.0: (
        dropout_p >= 1
        and "cuDNN Frontend error: Dropout probability cannot be 1 as corresponding scale wont be "
        "well formed."
    ),
    # native/Distributions.cpp, multinomial_out
    ("multinomial", EVERY): _samples,
    # native/TensorAdvancedIndexing.cpp, index_select_out_cpu_; native/cuda/Indexing.cu,
    # index_select_out_cuda_impl: not asked where nothing is selected.
    ("index_select", "cpu"): lambda index: (
        index.dtype not in _INDICES and "index_select(): Expected dtype int32 or int64 for index"
    ),
    ("index_select", "cuda"): lambda input, index: (
        index.dtype not in _INDICES
        and index.numel()
        and input.numel()
        and f"\"index_select_out_cuda_impl\" not implemented for '{scalar_type(index)}'"
    ),
    # dest/register_dispatch_key.py, resize_out
    ("linalg_cross.out", EVERY): lambda input, out: _types(
        input, out, "Expected out tensor to have dtype {}, but got {} instead", in_cpp
    ),
    # native/ReduceOps.cpp, std_var_out
    ("var.correction std.correction", EVERY): lambda input: (
        not (input.is_floating_point() or input.is_complex())
        and "std and var only support floating point and complex dtypes"
    ),
    # native/DistributionTemplates.h, uniform_impl_
    ("uniform_", EVERY): _range,
    # native/cpu/HistogramKernel.cpp, histogram_histc: also where the values would say both.
    ("histc", "cpu"): lambda min=0, max=0: min > max and "torch.histc: max must be larger than min",
    # What fills a tensor; a pad begins with one that is filled (native/ConstantPadNd.cpp).
    ("constant_pad_nd", EVERY): lambda input, value=0: _fits(value, input.dtype),
    ("full", EVERY): lambda fill_value, dtype=None: _fits(fill_value, dtype),
    ("scalar_tensor", EVERY): lambda s, dtype=None: _fits(s, dtype),
    ("full_like new_full", EVERY): lambda input, fill_value, dtype=None: _fits(
        fill_value, dtype or input.dtype
    ),
}
"""What a kernel says of arguments, of operators on devices; what is false is said of none."""


def _raising(says: Callable[..., object]) -> Callable[..., None]:
    @wraps(says)
    def check(**operands: Any) -> None:
        __tracebackhide__ = True
        found = says(**operands)
        if found:
            raise RuntimeError(found)

    check.__doc__ = "A row of the table of refusals."
    return check


for (_names, _device), _says in _REFUSALS.items():
    operator(_names).check(_device)(_raising(_says))


@operator("index_put index_put_ _index_put_impl_").check()
def values_at_positions(
    input: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> None:
    """native/TensorAdvancedIndexing.cpp, make_index_put_iterator."""
    if any(index is not None and not index.dtype.is_signed for index in indices):
        return  # masks, whose shapes are counted elsewhere
    if input.dtype is not values.dtype and not accumulate:
        raise RuntimeError(
            "Index put requires the source and destination dtypes match, got "
            f"{scalar_type(input)} for the destination and {scalar_type(values)} for the source."
        )
    hollow = [None if one is None else on_meta(one) for one in indices]
    shape = torch.ops.aten.index(on_meta(input), hollow).shape
    try:
        torch.empty((), device="meta").expand(values.shape).expand(shape)
    except RuntimeError:
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to "
            f"indexing result of shape {list(shape)}"
        ) from None


@operator("aten::_fused_rms_norm").check()
def normalized(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None) -> None:
    """native/layer_norm.h, _check_rms_norm_inputs_symint, which the composite asks everywhere."""
    of_meta = None if weight is None else on_meta(weight)
    torch.rms_norm(on_meta(input), list(normalized_shape), of_meta)


@operator("aten::copy_").check()
def destination(input: Tensor, src: Tensor | complex) -> None:
    """native/Copy.cpp, copy_impl: a copy of what lies alike may be one of a tensor to itself. A
    number that C++ wrapped in a tensor without sides arrives as the number.
    """
    source = (src.shape, src.stride()) if isinstance(src, Tensor) else ((), ())
    if input.numel() and (input.shape, input.stride()) != source:
        written_once(input)


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


Known = Callable[[Tensor], Tensor | None]
"""Returns the values of a tensor, where they are known."""

operator(
    """
        _ctc_loss _dirichlet_grad _embedding_bag _embedding_bag_forward_only _sample_dirichlet
        _standard_gamma bernoulli bernoulli_ binary_cross_entropy binomial bincount
        cross_entropy_loss embedding gather index_add index_add_ index_copy index_copy_
        index_reduce index_reduce_ index_select max_unpool2d max_unpool3d multi_margin_loss
        multilabel_margin_loss_forward multinomial nll_loss2d_forward nll_loss_forward normal
        poisson put_ scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ take
    """,
    refuses_values=True,
)


def _out_of(known: Known, tensor: Tensor, low: int, high: int) -> int | None:
    """Return the first of a tensor's positions, if they are known, that is not in a range."""
    positions = known(tensor)
    if positions is None or not positions.numel():
        return None
    least, most = positions.aminmax()
    if int(least) >= low and int(most) < high:
        return None
    flat = positions.reshape(-1)
    return int(flat[(flat < low) | (flat >= high)][0])


@operator("aten::embedding").check_values()
def rows(known: Known, weight: Tensor, indices: Tensor) -> None:
    """native/cpu/IndexKernel.cpp, index_select_out_cpu_ of the weight."""
    selected(known, weight, 0, indices)


@operator("aten::_embedding_bag", "aten::_embedding_bag_forward_only").check_values()
def rows_of_bags(known: Known, weight: Tensor, indices: Tensor) -> None:
    """native/EmbeddingBag.cpp, which looks at every index before it adds up rows."""
    wrong, found = _out_of(known, indices, 0, weight.shape[0]), known(indices)
    if found is not None and wrong is not None:
        position = int((found.reshape(-1) == wrong).nonzero()[0])
        raise RuntimeError(
            f"Index {position} of input takes value {wrong} which is not in the valid range [0, "
            f"{weight.shape[0]})"
        )


@operator("aten::index_select").check_values()
def selected(known: Known, input: Tensor, dim: int, index: Tensor) -> None:
    """native/TensorAdvancedIndexing.cpp, index_select_out_cpu_."""
    if input.dim() and _out_of(known, index, 0, input.shape[dim]) is not None:
        raise IndexError("index out of range in self")


@operator(
    "gather scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_"
).check_values()
def along_dimension(known: Known, input: Tensor, dim: int, index: Tensor) -> None:
    """native/cpu/ScatterGatherKernel.cpp."""
    wrong = _out_of(known, index, 0, input.shape[dim]) if input.dim() else None
    if wrong is not None:
        raise RuntimeError(
            f"index {wrong} is out of bounds for dimension {dim % input.dim()} with size "
            f"{input.shape[dim]}"
        )


@operator("aten::nll_loss_forward", "aten::nll_loss2d_forward").check_values()
def classes(known: Known, input: Tensor, target: Tensor, ignore_index: int = -100) -> None:
    """native/LossNLL.cpp, nll_loss_out_frame, and native/LossNLL2d.cpp."""
    found = known(target)
    if found is None:
        return
    size = input.shape[1 if input.dim() > 1 else 0]
    wrong = _out_of(lambda classes: classes, found[found != ignore_index], 0, size)
    if wrong is not None:
        raise IndexError(f"Target {wrong} is out of bounds.")


@operator("aten::index.Tensor", "aten::index_put_").check_values()
def indexed(known: Known, input: Tensor, indices: Sequence[Tensor | None]) -> None:
    """native/cpu/IndexKernelUtils.h, Indexer::get."""
    dimension = 0
    for index in indices:
        if index is not None and not index.dtype.is_signed:  # a mask
            dimension += index.dim()
            continue
        size = input.shape[dimension]
        wrong = None if index is None else _out_of(known, index, -size, size)
        if wrong is not None:
            raise IndexError(
                f"index {wrong} is out of bounds for dimension {dimension} with size {size}"
            )
        dimension += 1


def check_masks(input: Tensor, indices: Sequence[Tensor | None]) -> None:
    """Raise what expandTensors does for a mask of another shape; native/IndexingUtils.h."""
    dimension = 0
    for index in indices:
        if index is None or index.dtype.is_signed:
            dimension += 1
            continue
        for side, size in enumerate(index.shape):
            place = dimension + side
            if place < input.dim() and size != input.shape[place]:
                raise IndexError(
                    f"The shape of the mask {list(index.shape)} at index {side} does not match the "
                    f"shape of the indexed tensor {list(input.shape)} at index {place}"
                )
        dimension += index.dim()
