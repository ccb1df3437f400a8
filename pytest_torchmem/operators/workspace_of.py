"""What the kernel of a call takes: nothing, by its record, or measured where a library decides; and
its work, floating-point operations and the bytes that it moves.

A calibration is asked for an operator and its geometry, the same text in a trace as on a GPU.

A tensor is its type and shape, with its strides where it is not contiguous::

    float32[8,3,224,224], bfloat16[4,6]@1:4, None, [2,2], False, dim=1

Devices and generators are left out, and so are buffers whose size a library alone decides: it
follows from the other arguments, and a trace may not know it. Settings by which cuDNN chooses
between kernels stand behind, where they are not the default: ``; deterministic``.

An operator that is neither among ``without_workspace`` nor has a workspace function, a
decomposition or a body made of others has an unknown workspace, on the CPU and on CUDA.

On CUDA pointwise kernels read their arguments where they lie and in the type they have
(native/cuda/CUDALoops.cuh, ``gpu_kernel_impl``); kernels on lists of tensors find the addresses in
the launch's own arguments (native/cuda/MultiTensorApply.cuh), as ``cat`` does
(native/cuda/Shape.cu, ``parallel_cat``). On the CPU they read them where they lie, and copy what is
not of the common type (native/TensorIterator.cpp, ``compute_types``). Those that convert have a
function (``losses.py``); the others take nothing where all tensors are of one type.

What stands here for the CPU was compared with its allocator, on torch's own samples and on calls of
single operators.

As to work, ``torch.utils.flop_counter`` has formulas for matrix products, convolutions and
attention on cuda. The operators of that kind that it lacks, what multiplies and adds along a
dimension, have one in their record (``flops``), by the table at the end. As there, pointwise
operators, reductions and normalisations count no operations: they take the time that their bytes
need, which are counted for every operator.

Factorizations and solutions: native/BatchLinearAlgebraKernel.cpp and
native/cuda/linalg/BatchLinearAlgebra.cpp call the routine of LAPACK that is named, or the same of
MAGMA and cuSOLVER. Leading terms of the counts in LAPACK Working Note 41, appendix C; a batch has
them for each of its matrices. What is iterated (eigenvalues, singular values, least squares by
them) has none: values decide how often.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.elementwise import in_common_type
from pytest_torchmem.operators.registry import DEVICES, find_record, operator
from pytest_torchmem.operators.spec import DRAWS_INTO, OperatorSpec
from pytest_torchmem.operators.workspace import Buffer, Workspace, as_workspace, unknown
from pytest_torchmem.profile.timeline import Confidence, KnownWork
from pytest_torchmem.step.trees import argument_tensors, replace_leaves, replace_tensors
from pytest_torchmem.targets.gpus import WorkspaceKey, WorkspaceSize
from pytest_torchmem.targets.target import Target
from pytest_torchmem.torch_private.keys import OpOverload, schema
from pytest_torchmem.torch_private.names import TORCH_SERIES
from pytest_torchmem.torch_private.settings import library_settings


def workspace_of(
    target: Target,
    device: str,
    spec: OperatorSpec,
    outputs: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Workspace | None:
    """Return what a kernel takes beyond its outputs; None where that is nothing."""
    figure = cudnn = None
    if device == "cuda":
        from pytest_torchmem.operators.libraries.nvidia import Cudnn

        if target.calibration is not None:  # what was measured comes before what a library tells
            figure = _measured(target, key_of(spec, args, kwargs))
        cudnn = Cudnn(target, silent=figure is not None)
    function = workspace_function(spec, device)
    besides = {"machine": target.machine(device), "outputs": outputs, "cudnn": cudnn}
    made = unknown() if function is None else function(args, kwargs, **besides)
    found = as_workspace(made, spec.name)
    if cudnn is not None and (found.confidence is not Confidence.EXACT or cudnn.answers):
        key = key_of(spec, args, kwargs)
        if figure is not None:
            requests = (figure.workspace,) if figure.workspace > 0 else ()
            found = Workspace(requests, Confidence.CALIBRATED, found.kept, calibrated=(spec.name,))
        found = found._replace(questions=(key,), answers=tuple(dict.fromkeys(cudnn.answers)))
    return None if found.is_nothing else found


def workspace_function(spec: OperatorSpec, device: str) -> Callable[..., Any] | None:
    """Return what says what a kernel takes, None where nobody knows."""
    function = spec.on(device).workspace
    if function is not None or not takes_nothing(spec.overload, device):
        return function
    if device == "cpu" and is_iterated(spec.overload):
        return partial(in_common_type, spec)
    return lambda *_, **__: 0


def library_output(
    target: Target, spec: OperatorSpec, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[int, int | None] | None:
    """Return the position and the measured size of the output whose size a library decides. The
    size is None where it was not measured; the whole is None for every other operator.
    """
    position = spec.record.library_output
    if position is None or target.gpu is None:
        return None
    figure = _measured(target, key_of(spec, args, kwargs))
    return position, figure.reserve if figure is not None else None


def library_state(target: Target, buffer: Buffer, spec: OperatorSpec) -> Workspace:
    """Return a workspace that stays and that an operator makes, in the size measured if any. That
    is the operator's own output, whose size a library decides.
    """
    key = key_of(spec, (), {})
    figure = _measured(target, key)
    if figure is None or figure.reserve is None:
        found = Workspace((), buffer.confidence, (buffer,), is_estimate=True)
        found = as_workspace(found, spec.name)
        return found._replace(questions=(key,))
    measured = buffer._replace(nbytes=figure.reserve, confidence=Confidence.CALIBRATED)
    return Workspace(
        (), Confidence.CALIBRATED, (measured,), calibrated=(spec.name,), questions=(key,)
    )


def _measured(target: Target, key: WorkspaceKey) -> WorkspaceSize | None:
    if target.calibration is None or target.gpu is None:
        return None
    found = target.calibration.find(key, target.gpu.name, TORCH_SERIES)
    return found[0] if found is not None else None


_NO_GEOMETRY = ("device", "pin_memory", "generator")
_LEFT_OUT = (torch.Generator, torch.device)


def key_of(spec: OperatorSpec, args: Sequence[Any], kwargs: Mapping[str, Any]) -> WorkspaceKey:
    """Return what is to be asked of an operator that is called with these arguments now."""
    left_out = spec.record.not_in_key
    if left_out:
        named = zip(spec.argument_names, args, strict=False)
        args = [value for name, value in named if name not in left_out]
        kwargs = {name: value for name, value in kwargs.items() if name not in left_out}
    geometry = geometry_text(args, kwargs)
    settings = library_settings()
    return WorkspaceKey(spec.name, f"{geometry}; {', '.join(settings)}" if settings else geometry)


def geometry_text(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    named = {name: value for name, value in sorted(kwargs.items()) if name not in _NO_GEOMETRY}
    given = [("", value) for value in args] + [(f"{name}=", value) for name, value in named.items()]
    return ", ".join(
        prefix + _text(value) for prefix, value in given if not isinstance(value, _LEFT_OUT)
    )


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        shape = ",".join(map(str, value.shape))
        dense = value.layout is not torch.strided or value.is_contiguous()
        strides = "" if dense else "@" + ":".join(map(str, value.stride()))
        return f"{str(value.dtype).removeprefix('torch.')}[{shape}]{strides}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_text, value))}]"
    return str(value).removeprefix("torch.")


_ITERATED = """
    elu_backward gelu glu glu_backward glu_jvp hardshrink_backward
    hardsigmoid_backward hardswish hardswish_backward hardtanh_backward leaky_relu_backward
    mish mish_backward silu_backward sigmoid_backward softplus_backward softshrink_backward
    tanh_backward threshold_backward logit_backward mse_loss_backward smooth_l1_loss_backward
    huber_loss_backward _prelu_kernel _prelu_kernel_backward lerp linalg_cross addcdiv addcmul
    floor_divide heaviside rsub __ilshift__ __irshift__
"""
_ITERATED_ON_CPU = frozenset(_ITERATED.split())
"""TensorIterator's without its tag; native/Activation.cpp, Loss.cpp, GatedLinearUnit.cpp, Lerp.cpp,
PointwiseOps.cpp, BinaryOps.cpp.
"""

_TAKE_NOTHING = (
    (DEVICES, _ITERATED),
    (("cuda",), """
        gelu_backward log_sigmoid_forward log_sigmoid_backward binary_cross_entropy_backward
        rrelu_with_noise _masked_scale
    """),
    # native/quantized/FakeQuantPerTensorAffine.cpp, FakeQuantPerChannelAffine.cpp
    (DEVICES, """
        fake_quantize_per_channel_affine_cachemask fake_quantize_per_tensor_affine_cachemask
        _fake_quantize_per_tensor_affine_cachemask_tensor_qparams
    """),
    # Each of its own type; native/TensorAdvancedIndexing.cpp, TensorFactories.cpp
    (DEVICES, "complex masked_fill polar"),
    (("cpu",), "logical_not"),  # native/UnaryOps.cpp
    # Random numbers are made where they go; native/DistributionTemplates.h, Distributions.cpp
    (DEVICES, """
        bernoulli binomial cauchy exponential geometric log_normal normal_ poisson random uniform
        _standard_gamma _standard_gamma_grad _dirichlet_grad
    """),
    (("cuda",), """
        normal rand_like randn_like randint_like _sample_dirichlet _fill_mem_eff_dropout_mask_
        _fused_dropout _philox_normal _philox_uniform
    """),
    # One allocation, filled or copied to; native/TensorFactories.cpp, Copy.cpp, Fill.cpp
    (DEVICES, """
        empty_like zeros_like ones_like full_like new_empty new_empty_strided new_full new_ones
        new_zeros arange linspace logspace range eye _to_copy fill zero set_ _unsafe_view flip
    """),
    (("cuda",), """
        clone copy resize _pack_padded_sequence_backward _pad_packed_sequence constant_pad_nd tril
        triu embedding view_copy select_copy slice_copy narrow_copy expand_copy permute_copy
        as_strided_scatter diagonal_scatter select_scatter slice_scatter select_backward
        slice_backward diagonal_backward diag_embed lift lift_fresh repeat alias_copy
        _conj_physical _cudnn_init_dropout_state _transform_bias_rescale_qkv
        _convert_indices_from_coo_to_csr _convert_indices_from_csr_to_coo
    """),
    # native/cuda/Normalization.cu, int4mm.cu
    (("cuda",), """
        batch_norm_gather_stats_with_counts batch_norm_elemt batch_norm_backward_elemt
        _convert_weight_to_int4pack _weight_int4pack_mm
    """),
    # native/cuda/Shape.cu; on the CPU parts of another type than the result are converted
    (("cuda",), "cat stack"),
    # native/GridSampler.cpp, native/nested/NestedTensorBackward.cpp
    (DEVICES, """
        grid_sampler_2d grid_sampler_3d grid_sampler_3d_backward put
        _jagged_to_padded_dense_forward
    """),
    (("cuda",), """
        addr gather index_select index_fill_ take _pdist_forward native_dropout
        native_dropout_backward _thnn_fused_gru_cell _thnn_fused_lstm_cell
        _thnn_fused_lstm_cell_backward_impl _weight_norm_interface _weight_norm_interface_backward
        grid_sampler_2d_backward upsample_bicubic2d upsample_linear1d upsample_trilinear3d
        value_selecting_reduction_backward channel_shuffle pixel_shuffle pixel_unshuffle
        replication_pad1d replication_pad1d_backward replication_pad2d replication_pad2d_backward
        replication_pad3d replication_pad3d_backward _embedding_bag_per_sample_weights_backward
        reflection_pad3d_backward fractional_max_pool3d_backward
    """),
    # native/AdaptiveAveragePooling3d.cpp, AdaptiveMaxPooling3d.cpp: images where they lie
    (("cpu",), "_adaptive_avg_pool3d adaptive_max_pool3d"),
    # native/ReduceOps.cpp: extremes and sums along a dimension, in the result's memory
    (("cpu",), """
        _cummax_helper _cummin_helper _logcumsumexp std_mean var_mean norm hash_tensor trace
    """),
    # native/cpu/SortingKernel.cpp, TensorCompareKernel.cpp: rows in vectors of C++
    (("cpu",), "topk mode"),
    # native/TensorAdvancedIndexing.cpp, native/cpu/IndexKernel.cpp
    (("cpu",), "take index_copy index_fill nonzero"),
    # native/BatchLinearAlgebra.cpp: factored in the output
    (("cpu",), "linalg_cholesky_ex linalg_lu_factor_ex triangular_solve"),
    # native/Distance.cpp, LossCTC.cpp, ChanelShuffle.cpp, native/sparse/SparseCsrTensorMath.cpp
    (("cpu",), """
        _pdist_forward _pdist_backward _ctc_loss native_channel_shuffle
        _convert_indices_from_coo_to_csr _convert_indices_from_csr_to_coo
    """),
)  # fmt: skip
"""Operators that take nothing on devices, and those in place that go with them."""
for _devices, _names in _TAKE_NOTHING:
    operator(_names, takes_nothing=frozenset(_devices))

_LISTS = ("_foreach_", "_fused_ada", "_fused_sgd", "_amp_")
"""Kernels on lists of tensors; for the CPU native/FusedAdam.cpp, FusedSGD.cpp, FusedAdagrad.cpp and
AmpKernels.cpp."""

_MADE_OF_OTHERS = ("bartlett", "blackman", "hamming", "hann", "kaiser", "fft_", "randperm")
"""Factories that compute with temporaries (native/TensorFactories.cpp, SpectralOps.cpp)."""


def takes_nothing(overload: OpOverload, device: str) -> bool:
    """Return whether the kernel for a device is known to take nothing: of pointwise operators, of
    those named here, and of factories; on the CPU, but for what ``is_iterated`` ones convert.
    """
    if torch.Tag.pointwise in overload.tags:
        return True
    namespace, _, rest = str(overload.name()).partition("::")
    if namespace not in ("aten", "prims"):
        return device in find_record(str(overload.name())).takes_nothing
    name = rest.partition(".")[0]
    if any(_is_named(one, device) for one in (rest, name, name.removesuffix("_"))):
        return True
    if name.startswith(_LISTS):
        return True
    if not any("Tensor" in str(argument.type) for argument in schema(overload).arguments):
        return not name.startswith(_MADE_OF_OTHERS)
    return name.endswith("_") and _is_pointwise(name.removesuffix("_"))


def is_iterated(overload: OpOverload) -> bool:
    """Return whether the CPU's kernel copies tensors that are not of the common type."""
    name = schema(overload).name.removeprefix("aten::")
    names = name, name.removesuffix("_")
    if any(_is_named(one, "cpu") for one in names):
        return not _ITERATED_ON_CPU.isdisjoint(names)
    return torch.Tag.pointwise in overload.tags or _is_pointwise(names[1])


def _is_named(name: str, device: str) -> bool:
    return device in find_record(f"aten::{name}").takes_nothing


def _is_pointwise(name: str) -> bool:
    """Whether the operator that one in place goes with is pointwise: only it has the tag."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return False
    overloads = (getattr(packet, overload) for overload in packet.overloads())
    return any(torch.Tag.pointwise in overload.tags for overload in overloads)


_NOTHING_WRITTEN = ("aten::empty", "aten::new_empty", "aten::_efficientzerotensor")


class CallWork:
    """The work of calls of one operator and geometry; operations are counted when first read."""

    def __init__(self, spec: OperatorSpec, args: Any, kwargs: Any, result: Any) -> None:
        self.spec = spec
        self._geometries = replace_tensors((args, dict(kwargs), result), Geometry)
        self.read, self.written = _moved(spec, args, kwargs, result)
        self.inner: tuple[CallWork, ...] | None = None
        """The calls that the operator's body made."""

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, with a ``Geometry`` in the place of each tensor."""
        args, kwargs, _ = self._geometries
        return args, kwargs

    @cached_property
    def flops(self) -> int:
        """Return the floating-point operations; of a body without formula, those of its calls."""
        own = self.spec.flops
        of_torch = None if own is not None else _formula_of_torch(self.spec.overload)
        if own is None and of_torch is None:
            return sum(work.flops for work in self.inner or ())
        args, kwargs, result = replace_leaves(self._geometries, Geometry, Geometry.on_meta)
        if own is not None:
            return int(own(args, kwargs, outputs=result))
        try:
            return int(of_torch(*args, **kwargs, out_val=result)) if of_torch is not None else 0
        except (AssertionError, TypeError, ValueError, IndexError):
            return 0  # called with what torch's formula does not know

    @property
    def has_formula(self) -> bool:
        """Whether a formula counts the operations, of the operator or of one that it is made of."""
        if "flops" in vars(self) or self.spec.flops is not None:
            return True
        if _formula_of_torch(self.spec.overload) is not None:
            return True
        return any(work.has_formula for work in self.inner or ())

    def of_entries(self, flops: int, read: int) -> None:
        """Count what goes by the entries of sparse tensors, which a ``Geometry`` does not tell."""
        self.flops, self.read = flops, read

    def of_body(self, inner: "tuple[CallWork, ...]") -> None:
        """Move the bytes that the calls of the operator's body moved."""
        self.inner = inner
        self.read = sum(work.read for work in inner)
        self.written = sum(work.written for work in inner)

    def __reduce__(self) -> Any:
        return KnownWork, (self.flops, self.read, self.written)


class Geometry:
    """What a formula may ask of a tensor."""

    __slots__ = ("dtype", "shape", "stride")

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.stride = tensor.stride() if tensor.layout is torch.strided else None
        """None where the tensor has no strides (sparse)."""

    def on_meta(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def _formula_of_torch(overload: OpOverload) -> Callable[..., Any] | None:
    """Return torch's own formula of an operator, which is called as the operator is, or None."""
    # Imported when first asked: it imports triton, where there is one.
    from torch.utils.flop_counter import flop_registry

    found: Callable[..., Any] | None = flop_registry.get(overload.overloadpacket)
    return found


def _moved(spec: OperatorSpec, args: Any, kwargs: Any, result: Any) -> tuple[int, int]:
    """Return the bytes that a kernel reads and writes, each tensor once."""
    written = {id(one): one for one in argument_tensors(spec.written(args, kwargs))}
    given = {id(one): one for one in argument_tensors((args, kwargs))}
    made = {id(one): one for one in argument_tensors(result) if id(one) not in given}
    family = spec.name.partition(".")[0]
    if family.startswith(_NOTHING_WRITTEN):
        return 0, 0
    only_written = family in DRAWS_INTO or spec.shared.overwrites or spec.name.endswith("out")
    unread = set(written) if only_written else set()
    read = sum(_bytes(tensor) for name, tensor in given.items() if name not in unread)
    return read, sum(map(_bytes, {**written, **made}.values()))


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements; an expanded one has each but once."""
    try:
        return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
    except (RuntimeError, NotImplementedError):  # a sparse tensor has no storage of its own
        return 0


def _sizes(matrix: Tensor) -> tuple[int, int, int]:
    *batch, rows, columns = matrix.shape
    return math.prod(batch), rows, columns


def _lu(A: Tensor) -> float:
    """GETRF; GEQRF has twice as many."""
    batch, rows, columns = _sizes(A)
    less, more = sorted((rows, columns))
    return batch * less**2 * (more - less / 3)


def _orthogonal(made: Tensor, vectors: int) -> float:
    """ORGQR: the first columns of the product of so many reflections."""
    batch, rows, columns = _sizes(made)
    both = (rows + columns) * vectors
    return batch * vectors * (4 * rows * columns - 2 * both + 4 * vectors**2 / 3)


def _qr(A: Tensor, outputs: tuple[Tensor, Tensor]) -> int:
    """GEQRF, and ORGQR where Q is asked for."""
    q = outputs[0]
    return int(2 * _lu(A)) + (int(_orthogonal(q, min(A.shape[-2:]))) if q.numel() else 0)


def _trilinear(operands: list[Any]) -> int:
    """Two multiplications and an addition for each element of the expanded product, which is made
    over all dimensions and then summed; native/Linear.cpp.
    """
    tensors, expanded = operands[:3], operands[3:6]
    sizes = [1] * (tensors[0].dim() + len(expanded[0]))
    for tensor, missing in zip(tensors, expanded, strict=True):
        kept = [at for at in range(len(sizes)) if at not in missing]
        for at, size in zip(kept, tensor.shape, strict=True):
            sizes[at] = max(sizes[at], size)
    return 3 * math.prod(sizes)


def _recurrent(input: Tensor, weight: Sequence[Tensor]) -> int:
    """The products of every step with every matrix of weights."""
    return 2 * input.shape[:-1].numel() * sum(one.numel() for one in weight if one.dim() > 1)


def _attention(query: Tensor, key: Tensor, numbers: int) -> int:
    """So many numbers for each pair of a query and a key."""
    return 2 * query.shape[:-1].numel() * key.shape[-2] * numbers


def _distances(x1: Tensor, x2: Tensor) -> int:
    """A difference, its power and the sum of them, for every pair and element."""
    batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    return 3 * math.prod((*batch, *x1.shape[-2:], x2.shape[-2]))


def _transform(self: Tensor, dim: Sequence[int], outputs: Tensor) -> float:
    """5 N log2 N for each transform of N complex numbers, half of it where one side is real: the
    usual count for radix 2 (Van Loan, Computational Frameworks for the FFT, 1.4).
    """
    larger = max(self, outputs, key=lambda tensor: tensor.numel())
    length = math.prod(larger.shape[at] for at in dim)
    count = 5 * larger.numel() * math.log2(max(length, 2))
    return count if self.is_complex() and outputs.is_complex() else count / 2


_FORMULAS: Mapping[str, Callable[..., float]] = {
    "_int_mm": lambda input, mat2: 2 * input.numel() * mat2.shape[-1],
    "addmm_ _addmm_activation": lambda mat1, mat2: 2 * mat1.numel() * mat2.shape[-1],
    "addbmm addbmm_ baddbmm_": lambda batch1, batch2: 2 * batch1.numel() * batch2.shape[-1],
    # Their weight has a row for each element of the output, or 8 for each tile.
    "_weight_int8pack_mm": lambda input, mat2: 2 * input.numel() * mat2.shape[0],
    "_weight_int4pack_mm": lambda input, mat2: 2 * input.numel() * mat2.shape[0] * 8,
    "mkldnn_linear": lambda input, weight: 2 * input.numel() * weight.shape[0],
    # What ``offs`` cuts is cut into groups, of which each number is in one.
    "_grouped_mm": lambda input, mat2: (
        2 * input.shape[-3 if mat2.dim() == 3 else -2 :].numel() * mat2.shape[-1]
    ),
    # Each element of a matrix or a vector is multiplied and added once.
    "addmv addmv_": lambda mat: 2 * mat.numel(),
    "mv dot vdot": lambda input: 2 * input.numel(),
    "addr addr_": lambda vec1, vec2: 2 * vec1.numel() * vec2.numel(),
    "_trilinear": _trilinear,
    # ``conv_flop_count`` of torch/utils/flop_counter.py: filters go over the output, or the input.
    "cudnn_convolution_relu cudnn_convolution_add_relu slow_conv3d_forward slow_conv_dilated2d "
    "slow_conv_dilated3d": lambda weight, outputs: 2 * outputs.numel() * weight[0].numel(),
    "cudnn_convolution_transpose slow_conv_transpose2d slow_conv_transpose3d": (
        lambda input, weight: 2 * input.numel() * weight[0].numel()
    ),
    # Scores and the weighted sum, causal or not, as torch counts attention on cuda; then scores
    # again, and the gradients of scores, value, query and key.
    "_scaled_dot_product_flash_attention_for_cpu": lambda query, key, value: _attention(
        query, key, query.shape[-1] + value.shape[-1]
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda query, key, value: _attention(
        query, key, 3 * query.shape[-1] + 2 * value.shape[-1]
    ),
    "_cudnn_rnn": _recurrent,
    "_cudnn_rnn_backward": lambda input, weight: 2 * _recurrent(input, weight),
    "mkldnn_rnn_layer": lambda input, weight0, weight1: _recurrent(input, [weight0, weight1]),
    "mkldnn_rnn_layer_backward": lambda input, weight1, weight2: (
        2 * _recurrent(input, [weight1, weight2])
    ),
    "_cdist_forward": _distances,
    "_fft_c2c _fft_r2c _fft_c2r": _transform,
    # POTRF; GETRF, of determinants too, beside which the product of the diagonal does not count;
    # GETRF and GETRS for each column of the result; GETRF and GETRI.
    "linalg_cholesky_ex": lambda input: _sizes(input)[0] * input.shape[-2] ** 3 // 3,
    "linalg_lu_factor_ex _linalg_det _linalg_slogdet": _lu,
    "_linalg_solve_ex": lambda A, outputs: int(_lu(A)) + 2 * A.shape[-1] * outputs[0].numel(),
    "linalg_inv_ex": lambda A: 2 * _sizes(A)[0] * A.shape[-2] ** 3,
    # GETRS and POTRS: two triangles; TRTRS: one.
    "linalg_lu_solve": lambda LU, outputs: 2 * LU.shape[-1] * outputs.numel(),
    "_cholesky_solve_helper": lambda A, outputs: 2 * A.shape[-1] * outputs.numel(),
    "linalg_solve_triangular": lambda input, outputs: input.shape[-1] * outputs.numel(),
    # GEQRF and ORGQR.
    "geqrf": lambda input: 2 * _lu(input),
    "linalg_qr": _qr,
    "linalg_householder_product": lambda input, tau: _orthogonal(input, tau.shape[-1]),
}
"""Of an operator's arguments and ``outputs``; those without a comment are products."""

for _names, _formula in _FORMULAS.items():
    _formula.__doc__ = _formula.__doc__ or "A row of the table of formulas."
    operator(_names).flops()(_formula)
