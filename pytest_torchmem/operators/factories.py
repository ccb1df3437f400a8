"""Factories of tensors, of numbers alone or of the type and shape of another; copies within a
device, to another one, and into storages that are there; what is asked of tensors: values, checks,
answers from geometry and settings; dropout, distributions whose parameters are tensors, and samples
of them.

Windows of signals (``torch.hann_window``; native/TensorFactories.cpp) are made of positions by
operators in place, or by one kernel. A periodic one is made with one element more, which its
storage keeps.

C++ makes the numbers of composite operators beside their first tensor, which it takes to be on the
CPU: a path that changes nothing tells the trace which device that is.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import CompositeCall, GivenCall
from pytest_torchmem.operators.elementwise import converted, like_first, like_operands
from pytest_torchmem.operators.libraries import cub
from pytest_torchmem.operators.registry import Fills, OperatorKind, UnknownOutputs, operator
from pytest_torchmem.operators.workspace import (
    CONTIGUOUS,
    DOUBLE,
    LONG,
    SCALAR,
    dense_bytes,
    lying_alike,
    made_like,
    passing,
    transpose_scratch,
)
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host

# Of random floating ones, single numbers are worth knowing.
operator(
    """
        arange empty empty_strided eye full full_like new_full new_ones ones ones_like range
        scalar_tensor tril_indices triu_indices prims::empty prims::empty_strided prims::full
        prims::full_like prims::scalar_tensor
    """,
    fills=Fills.NUMBERS,
)
operator("_new_zeros_with_same_feature_meta new_zeros zeros zeros_like", fills=Fills.ZEROS)
# They copy the whole storage that they are given a part of, or make zeros as large
# (native/TensorShape.h, clone_preserve_strides; native/AutogradComposite.cpp).
operator(
    "_new_zeros_with_same_feature_meta as_strided_scatter copy diagonal_scatter",
    "select_scatter slice_scatter",
    also_by=lambda tensors: (*((len(t.untyped_storage()), t.storage_offset()) for t in tensors),),
)
operator("linspace logspace", fills=Fills.STEPS)
operator("arange linspace logspace range", resizes_by_count=True)
operator("bernoulli bernoulli_ rand randint randn random_ randperm", fills=Fills.RANDOM)
operator("aten::fill_", "aten::zero_", overwrites=True)
# One allocation: as well from meta as by their body, and quicker.
operator(
    "empty_like full_like new_empty new_empty_strided new_ones new_zeros ones_like zeros_like",
    kind=OperatorKind.LEAF,
)

# One allocation and one copy: as well from meta as by their body, and quicker.
operator("aten::_unsafe_view", "aten::stack", kind=OperatorKind.LEAF)


@operator("aten::cat", "aten::stack").workspace("cpu")
def parts_converted(outputs: Tensor, tensors: list[Tensor], *, out: Tensor | None = None) -> int:
    """One part after the other, in its own type before that of the result; native/TensorShape.cpp,
    cat_out_cpu, whose iterator casts its output (native/TensorIterator.cpp, ``compute_types``).
    """
    result = outputs if out is None else out
    others = [part for part in tensors if part.dtype is not result.dtype]
    return max((part.numel() * part.element_size() for part in others), default=0)


operator("aten::lift_fresh", kind=OperatorKind.LIFT)
# It maps a file of the host, which the allocator does not know of.
operator("aten::from_file", kind=OperatorKind.NATIVE)
operator("aten::_efficientzerotensor", kind=OperatorKind.ZERO)
# C++ lays no quantized tensor on a storage that is there.
operator(
    """
        _empty_affine_quantized _empty_per_channel_affine_quantized
        _make_per_channel_quantized_tensor _make_per_tensor_quantized_tensor
        quantize_per_channel quantize_per_tensor quantize_per_tensor.tensor_qparams
        quantize_per_tensor.tensors quantize_per_tensor_dynamic quantized_lstm.input
        quantized_lstm.data quantized_gru.input quantized_gru.data quantized_lstm_cell
        quantized_gru_cell quantized_rnn_relu_cell quantized_rnn_tanh_cell
        _fused_moving_avg_obs_fq_helper
    """,
    kind=OperatorKind.QUANTIZED,
)
operator("aten::resize_", "aten::resize_as_", kind=OperatorKind.RESIZE)
operator("aten::set_.source_Tensor", across_devices=True)
operator("aten::cat", unknown_outputs=UnknownOutputs.CARRIED)

clone = operator("aten::clone", kind=OperatorKind.LEAF, unknown_outputs=UnknownOutputs.CARRIED)
# Registered for every backend, and reading and writing data all the same.
copy_ = operator(
    "aten::copy_", kind=OperatorKind.LEAF, overwrites=True, across_devices=True, copies_across=True
)
operator(
    "aten::_to_copy",
    kind=OperatorKind.LEAF,
    across_devices=True,
    copies_across=True,
    unknown_outputs=UnknownOutputs.CARRIED,
)
operator("aten::_foreach_copy_", across_devices=True, copies_across=True)


@operator("prims::device_put", across_devices=True).decomposition()
def put_on_device(call: GivenCall) -> Any:
    """``Tensor.to``: what Inductor calls where it leaves a copy to ATen, as of complex numbers;
    torch/_prims/__init__.py, ``_device_put_aten``.
    """
    tensor, device, *non_blocking = call.args
    return tensor.to(device, non_blocking=bool(non_blocking and non_blocking[0]))


@clone.workspace("cpu")
def cloned(outputs: Tensor, input: Tensor) -> int:
    """The block that a transposed matrix is copied through; native/Copy.cpp."""
    return transpose_scratch(input) if outputs.is_contiguous() else 0


@copy_.workspace("cpu")
def copied_into(input: Tensor, src: Tensor) -> int:
    """The block that a transposed matrix is copied through; Copy.cpp, copy_transpose_valid."""
    if input.dtype != src.dtype or input.shape != src.shape or not input.is_contiguous():
        return 0
    return transpose_scratch(src)


_in_place = operator(
    """
        hann_window hann_window.periodic hamming_window hamming_window.periodic
        hamming_window.periodic_alpha hamming_window.periodic_alpha_beta
    """,
    takes_nothing=frozenset({"cuda"}),
)
_bartlett = operator("bartlett_window bartlett_window.periodic", takes_nothing=frozenset({"cuda"}))


@_in_place.meta()
@_bartlett.meta()
@operator("blackman_window blackman_window.periodic").meta()
@operator("kaiser_window kaiser_window.periodic kaiser_window.beta").meta()
def window(window_length: int, dtype: torch.dtype | None = None, periodic: bool = True) -> Tensor:
    """The positions' own memory, or the like; of one element or none they are not computed."""
    made = torch.empty(_positions(window_length, periodic), dtype=dtype, device="meta")
    return made.narrow(0, 0, window_length)


def _computed(parts: int, number: float | None = None) -> Callable[..., int | tuple[int, ...]]:
    def taken(outputs: Tensor, window_length: int, periodic: bool = True) -> int | tuple[int, ...]:
        """What a window is computed of, and perhaps a number."""
        if window_length <= 1:
            return ()
        sizes = (_positions(window_length, periodic) * outputs.element_size(),) * parts
        return sizes if number is None else sum(sizes) + converted(number, outputs.dtype)

    return taken


# A number that all are multiplied by; hamming_window.
_in_place.workspace("cpu")(_computed(0, 1.0))
# The second half is multiplied by a whole number; bartlett_window.
_bartlett.workspace("cpu")(_computed(0, -1))
# The positions, two cosines of them and their difference, all until the sum is made; on the CPU a
# number, which is added last.
operator("blackman_window blackman_window.periodic").workspace("cpu")(_computed(4, 1.0))
operator("blackman_window blackman_window.periodic").workspace("cuda")(_computed(4))
# What one kernel computes the window of.
operator("kaiser_window kaiser_window.periodic kaiser_window.beta").workspace()(_computed(1))


def _positions(window_length: int, periodic: bool) -> int:
    return window_length + (1 if periodic and window_length > 1 else 0)


@operator(
    # native/Sorting.cpp, quantile and nanquantile: the quantile, and what follows from it.
    "quantile.scalar quantile.scalar_out nanquantile.scalar nanquantile.scalar_out",
    # native/LinearAlgebraUtils.h and native/LinearAlgebra.cpp, get_atol_rtol: tolerances.
    """
        linalg_matrix_rank linalg_matrix_rank.out linalg_matrix_rank.tol_tensor
        linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.atol_rtol_tensor_out
        linalg_matrix_rank.out_tol_tensor linalg_matrix_rank.atol_rtol_float
        linalg_matrix_rank.atol_rtol_float_out linalg_pinv linalg_pinv.out linalg_pinv.rcond_tensor
        linalg_pinv.out_rcond_tensor linalg_pinv.atol_rtol_float linalg_pinv.atol_rtol_float_out
    """,
    # native/Itertools.cpp, native/TensorFactories.cpp (vander), native/PackedSequence.cpp, and
    # native/Dropout.cpp (make_feature_noise): results, and what they are picked by.
    """
        combinations feature_alpha_dropout feature_alpha_dropout_ feature_dropout feature_dropout_
        linalg_matrix_power linalg_vander pad_sequence vander
    """,
    # native/SpectralOps.cpp: windows.
    "istft stft stft.center",
    # native/quantized/FakeQuantPerTensorAffine.cpp: whether it is enabled.
    "aten::fake_quantize_per_tensor_affine.tensor_qparams",
).path("cuda")
def beside_first_tensor(call: CompositeCall) -> Any:
    """As on the CPU."""
    return call()


@operator("aten::one_hot").path("cuda")
def unchecked(call: CompositeCall, input: Tensor, num_classes: int = -1) -> Any:
    """Zeros, and ones scattered to them: only the CPU looks at the range; native/Onehot.cpp."""
    if not input.numel() or input.dtype is not torch.int64:
        return call()
    classes = int(input.max()) + 1 if num_classes == -1 else num_classes
    return input.new_zeros((*input.shape, classes)).scatter_(-1, input.unsqueeze(-1), 1)


operator("aten::_local_scalar_dense", kind=OperatorKind.SCALAR)
# Asked by C++ composites; no data is read.
operator(
    """
        _assert_tensor_metadata _debug_has_internal_overlap _has_same_storage_numel
        _use_cudnn_ctc_loss _version is_pinned is_same_size is_set_to sym_numel sym_size.int
        sym_storage_offset sym_stride.int
    """,
    kind=OperatorKind.NATIVE,
)
# They ask something of data, make nothing and raise where it is wrong.
operator(
    "_assert_async _assert_async.msg _validate_compressed_sparse_indices", kind=OperatorKind.PASS
)

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


# What gives no more than the shape; in ``vmap`` dropout draws so (native/Dropout.cpp).
operator(
    "bernoulli.Tensor bernoulli.p cauchy copy exponential fill geometric log_normal",
    "normal_functional rand_like randint_like randn_like random uniform zero",
).unread()(lambda self: [self])
# The mask as numbers, before it is boolean; native/Dropout.cpp, native_dropout_cpu.
native_dropout.workspace("cpu")(lambda input: dense_bytes(input))
# The mask as numbers, then scaled; native/Dropout.cpp, native_dropout_backward.
operator("aten::native_dropout_backward").workspace("cpu")(
    lambda grad_output, mask: (mask.numel() + 1) * grad_output.element_size() + SCALAR
)
# Probabilities in float, or as the output in double; native/cuda/Bernoulli.cu.
operator("aten::bernoulli_.Tensor").workspace("cuda")(
    lambda input, p: converted(p, torch.float64 if input.dtype is torch.float64 else torch.float32)
)
# A tensor for the deviation, left empty; DistributionTemplates.h, normal_out_impl.
operator("aten::normal.Tensor_float", "aten::normal.Tensor_float_out").workspace()(
    lambda outputs: dense_bytes(outputs)
)
# The least deviation, and whether it is at least a number, which is wrapped and converted;
# native/DistributionTemplates.h, CHECK_NORMAL_TENSOR_STD.
operator(
    "normal.Tensor_Tensor normal.Tensor_Tensor_out", "normal.float_Tensor normal.float_Tensor_out"
).workspace("cpu")(lambda std: 2 * std.element_size() + LONG + 1 if std.numel() else 0)
# The number in the result's type; check_supported_max_int_with_precision.
operator("aten::randperm").workspace("cpu")(lambda outputs: outputs.element_size())


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
