"""Autocast on fake cuda, and composite operators, which take the paths that their records have.

``AutocastCUDA`` is never among the keys of tensors that C++ takes to be on the CPU. A key that no
build uses, ``AutocastHPU``, is included in the thread's dispatch state instead while autocast is on
for cuda, with kernels that cast as those of aten/src/ATen/autocast_mode.cpp do. They are registered
when a trace of the process first switches autocast on, and find the running one's casts.

The lists of operators are those of aten/src/ATen/autocast_mode.h (``AT_FORALL_LOWER_PRECISION_FP``,
``AT_FORALL_FP32``, ``AT_FORALL_FP32_SET_OPT_DTYPE``, ``AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE``,
``AT_FORALL_PROMOTE``) and what autocast_mode.cpp and cudnn/AutocastRNN.cpp add for CUDA. A name
that the installed torch does not have is left out (``linalg_matrix_sqrth`` is from torch 2.15 on).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from pytest_torchmem.interception import attribution, refusals
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.operators.calls import CompositeCall
from pytest_torchmem.operators.registry import generation, read_index, taught_paths
from pytest_torchmem.operators.spec import OperatorSpec, spec_of
from pytest_torchmem.step.trees import argument_tensors
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.torch_private import dispatcher, keys, patches, settings
from pytest_torchmem.torch_private.names import listed
from pytest_torchmem.torch_private.tensors import is_view_of_another

LOWER_PRECISION = listed("""
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum
    mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
    _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention cudnn_convolution
    cudnn_convolution_transpose
""")

FLOAT32 = listed("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm
    group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
    huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss linalg_matrix_sqrth binary_cross_entropy_with_logits
    dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d
    upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
    upsample_bicubic2d _upsample_bicubic2d_aa
""")

FLOAT32_BY_DTYPE_ARGUMENT = listed("""
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
    linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
""")

#: Operators that go to an overload of theirs with a ``dtype`` at the end.
FLOAT32_BY_OVERLOAD = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
}

WIDEST = listed(
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
)

BANNED = ("binary_cross_entropy",)

RECURRENT = ("_cudnn_rnn",)

_FLOATING = (torch.float32, torch.float16, torch.bfloat16)
_BANNED = (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
    "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
    "In this case, combine the two layers using "
    "torch.nn.functional.binary_cross_entropy_with_logits\n"
    "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
    "safe to autocast."
)


class Casts:
    """Casts arguments to what autocast runs an operator in, and keeps the casts of parameters."""

    def __init__(self, trace: TraceContext) -> None:
        self.trace = trace
        self._cache: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    @property
    def lower(self) -> torch.dtype:
        """The dtype of the region that is entered."""
        return torch.get_autocast_dtype("cuda")

    def clear(self) -> None:
        """Forget all casts, as leaving the outermost region does (``clear_cache``)."""
        self._cache.clear()

    def eligible(self, value: Any) -> bool:
        """Return whether a value is ever cast; autocast_mode.h, ``is_eligible``."""
        if not isinstance(value, Tensor) or value.dtype not in _FLOATING:
            return False
        return self.trace.is_on_gpu(value)

    def to(self, dtype: torch.dtype, value: Any) -> Any:
        """Return ``value`` with its eligible tensors cast; autocast_mode.cpp, ``cached_cast``."""
        if type(value) in (list, tuple):
            return [self.to(dtype, item) for item in value]
        if not self.eligible(value) or value.dtype is dtype:
            return value
        if not (
            dtype is self.lower
            and value.dtype is torch.float32
            and value.requires_grad
            and value.is_leaf
            and not is_view_of_another(value)
            and torch.is_autocast_cache_enabled()
            and not torch.is_inference_mode_enabled()
        ):
            return _to(value, dtype)
        known = self._cache.get(id(value))
        if known is not None and known[0]() is value:
            return known[1]
        with torch.enable_grad():  # the cast serves the whole region, whoever was first
            made = _to(value, dtype)
        self._cache[id(value)] = weakref.ref(value), made
        return made

    def widest(self, args: Any) -> torch.dtype:
        """Return the dtype that all arguments are promoted to; autocast_mode.h, ``prioritize``."""
        lower = self.lower
        for value in args:
            if type(value) in (list, tuple):
                if self.widest(value) is torch.float32:
                    return torch.float32
            elif self.eligible(value):
                dtype: torch.dtype = value.dtype
                if dtype is torch.float32:
                    return dtype
                if dtype is not lower:
                    raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
        return lower


def _to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return cast(Tensor, torch.ops.aten.to.dtype(tensor, dtype))


@contextmanager
def cuda_autocast(trace: TraceContext) -> Iterator[None]:
    """Let ``torch.autocast("cuda")`` cast fake cuda tensors on the trace's thread.
    ``torch.autocast("cpu")`` casts those of the host alone: its kernels, in C++, come after these.
    """
    casts = Casts(trace)
    set_enabled, clear = torch.set_autocast_enabled, torch.clear_autocast_cache
    own: dict[str, Callable[..., Any]] = {}
    registered: set[str] = set()

    def run(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        overload = dispatcher.overload_of(name)
        if torch.is_autocast_enabled("cpu") and not any(
            map(trace.is_on_gpu, argument_tensors((args, kwargs)))
        ):
            with dispatcher.outside_autocast():
                return overload(*args, **kwargs)
        casting = own.get(name)
        if name in _casting_kernels():
            casting = partial(_casting_kernels()[name], casts)
        if casting is None or not torch.is_autocast_enabled("cuda"):
            return dispatcher.run_uncast(overload, *args, **kwargs)
        with dispatcher.outside_autocast(), dispatcher.outside_autocast_of_cpu():
            return casting(*args, **kwargs)

    def set_autocast_enabled(*args: Any, **kwargs: Any) -> None:
        set_enabled(*args, **kwargs)
        if trace.off():
            return
        enabled = {device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)}
        if "cuda" in enabled - registered:
            own.update(dispatcher.own_autocast_kernels())
            register((*_casting_kernels(), *own))
        if "cpu" in enabled - registered:
            register(dispatcher.registered_for("AutocastCPU"))
        registered.update(enabled)
        dispatcher.autocast_key_included(bool(enabled))

    def clear_autocast_cache() -> None:
        clear()
        if not trace.off():
            casts.clear()

    with (
        dispatcher.autocast_kernels(run) as register,
        patches.replaced(
            torch,
            set_autocast_enabled=set_autocast_enabled,
            clear_autocast_cache=clear_autocast_cache,
        ),
        settings.own_keys_are_no_autocast(),
    ):
        try:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):  # the trace stands in a region itself
                    set_autocast_enabled(device, True)
            yield
        finally:
            dispatcher.autocast_key_included(False)
            casts.clear()


@cache
def _casting_kernels() -> dict[str, _Kernel]:
    """Return the casting kernels of torch's operators by name: this torch may have fewer."""
    kernels: dict[str, _Kernel] = {}
    for names, policy in _POLICIES:
        for name in names:
            operator = keys.find_operator(name)
            if operator is None:
                continue
            # That of recurrent layers is in builds with CUDA alone (cudnn/RNN.cpp).
            if names is RECURRENT or keys.has_kernel(operator.name(), "AutocastCUDA"):
                kernels[f"aten::{name}"] = policy(operator)
    return kernels


def _casting(dtype_of: Callable[[Casts, tuple[Any, ...]], torch.dtype]) -> _Policy:
    """Return the policy that casts all arguments to one dtype, the last one first.

    The casts are arguments of one call in autocast_mode.h (``WrapFunction_``), and gcc evaluates
    these from right to left. They go in the reverse order, the first argument first.
    """

    def policy(operator: Any) -> _Kernel:
        def kernel(casts: Casts, *args: Any, **kwargs: Any) -> Any:
            dtype = dtype_of(casts, (*args, *kwargs.values()))
            named = {name: casts.to(dtype, value) for name, value in reversed(kwargs.items())}
            positional = [casts.to(dtype, value) for value in reversed(args)]
            result = operator(*reversed(positional), **named)
            while positional:
                positional.pop()
            return result

        return kernel

    return policy


def _float32_by_dtype_argument(operator: Any) -> _Kernel:
    position = [argument.name for argument in keys.schema(operator).arguments].index("dtype")

    def kernel(casts: Casts, *args: Any, **kwargs: Any) -> Any:
        given = args[position] if len(args) > position else kwargs.get("dtype")
        if given is None and casts.eligible(args[0]):
            args = args[:position]
            kwargs = {**kwargs, "dtype": torch.float32}
        return operator(*args, **kwargs)

    return kernel


def _float32_by_overload(operator: Any) -> _Kernel:
    name = str(operator.name()).removeprefix("aten::")
    target: Any = keys.find_operator(FLOAT32_BY_OVERLOAD[name])
    defaults = [argument.default_value for argument in keys.schema(operator).arguments]

    def kernel(casts: Casts, *args: Any, **kwargs: Any) -> Any:
        dtype = torch.float32 if casts.eligible(args[0]) else args[0].dtype
        return target(*args, *defaults[len(args) :], dtype=dtype, **kwargs)

    return kernel


def _banned(operator: Any) -> _Kernel:
    def kernel(casts: Casts, *args: Any, **kwargs: Any) -> Any:
        if any(casts.eligible(value) for value in args):
            raise RuntimeError(_BANNED)
        return operator(*args, **kwargs)

    return kernel


def _recurrent(operator: Any) -> _Kernel:
    """Always float16, whatever the region's dtype is; ``_cudnn_rnn_cast_reflatten``.

    The cast weights are not kept in autocast's cache: they are copied into a new flat buffer at
    every call.
    """

    def kernel(casts: Casts, *args: Any) -> Any:
        input, weight, stride, buffer, hx, cx, mode, hidden_size, *rest = args
        half = torch.float16
        if weight[0].dtype is not half and casts.eligible(weight[0]):
            from pytest_torchmem.operators.recurrent.cudnn import flattened

            buffer, weight = flattened(casts.trace, weight, stride, mode, hidden_size, half)
        # A C++ compiler's order: from the last.
        cx, hx, input = (casts.to(half, one) for one in (cx, hx, input))
        return operator(input, weight, stride, buffer, hx, cx, mode, hidden_size, *rest)

    return kernel


_Kernel: TypeAlias = Callable[..., Any]
"""Casts and calls an operator; it gets the ``Casts`` of the trace first."""
_Policy: TypeAlias = Callable[[Any], _Kernel]
_POLICIES: tuple[tuple[Iterable[str], _Policy], ...] = (
    (LOWER_PRECISION, _casting(lambda casts, args: casts.lower)),
    (FLOAT32, _casting(lambda casts, args: torch.float32)),
    (FLOAT32_BY_DTYPE_ARGUMENT, _float32_by_dtype_argument),
    (FLOAT32_BY_OVERLOAD, _float32_by_overload),
    (WIDEST, _casting(Casts.widest)),
    (BANNED, _banned),
    (RECURRENT, _recurrent),
)


@contextmanager
def cuda_dispatch(gpu: Gpu, trace: TraceContext) -> Iterator[Callable[[str], _Kernel | None]]:
    """Let composite operators on fake cuda tensors of this thread take the GPU's path. Yields what
    returns, by name, what runs those of them that arrive undecomposed.
    """
    names = _with_paths(generation())

    @cache
    def path_of(name: str) -> _Kernel | None:
        # None of an operator that an earlier trace was taught one of.
        return _path(spec_of(dispatcher.overload_of(name)), gpu, trace) if name in names else None

    @cache
    def undecomposed(name: str) -> _Kernel | None:
        arrives = name in names and not spec_of(dispatcher.overload_of(name)).one_kernel_on("cuda")
        return path_of(name) if arrives else None

    def run(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        path = path_of(name)
        tensors = argument_tensors((args, kwargs))
        # For nested tensors composite operators have other bodies.
        if path is None or not tensors or any(tensor.is_nested for tensor in tensors):
            return NotImplemented
        return path(*args, **kwargs)

    with dispatcher.composite_kernels(names, run), cuda_autocast(trace):
        yield undecomposed


@lru_cache(maxsize=1)
def _with_paths(generation: int) -> frozenset[str]:
    """Return the operators that have a path on cuda, in a generation of what users teach."""
    recorded = (f"aten::{name}" for name in read_index()["paths"]["cuda"].split())
    taught = (overload.name() for overload in taught_paths("cuda"))
    return frozenset((*filter(keys.is_dispatched, recorded), *taught))  # those that this torch has


def _path(spec: OperatorSpec, gpu: Gpu, trace: TraceContext) -> Callable[..., Any]:
    path = spec.cuda.path
    assert path is not None
    composite = keys.is_composite_implicit(spec.overload)

    def elsewhere(call: CompositeCall) -> Any:
        return call() if composite else NotImplemented

    def kernel(*args: Any, **kwargs: Any) -> Any:
        first = next(iter(argument_tensors((args, kwargs))), None)
        call = CompositeCall(args, kwargs, spec.overload, trace)
        if first is None:
            return elsewhere(call)
        trace.begin_beside(first)
        if not trace.is_on_gpu(first):
            return elsewhere(call)
        try:
            return path(args, kwargs, machine=gpu, call=call)
        except refusals.REFUSALS as error:
            with trace.working():
                found = refusals.in_words_of_kernel(spec, args, kwargs, error, on_gpu=True)
            try:
                if found is error:
                    raise
                raise found from None
            finally:
                del found  # a frame that holds what it raised is a cycle, and holds the tensors

    return kernel


PATH = attribution.code_made_by(_path, "kernel")
"""The code by which each composite operator takes its path."""
