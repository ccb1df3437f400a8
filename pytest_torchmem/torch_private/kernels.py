"""An operator's kernel for one dispatch key, run where dispatch would choose another.

On shards of a ``DTensor`` torch before 2.13 lets calls pass by interceptions: there the key
``FAKE`` comes before the key ``Python``, which excludes it (c10/core/DispatchKey.h). For a
``DTensor`` that key calls no ``__torch_dispatch__``, in which it could be let in again, but
operators on the shards (torch/csrc/autograd/python_variable.cpp, ``dispatchDTensorOp``). It reads
the attribute with the shard right before it calls one.

Operators on ``meta`` tensors run in C++ alone, with the geometry that kernels have.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_torchmem.torch_private import keys, modes, names
from pytest_torchmem.torch_private.tensors import has_dispatch

#: What runs an overload's kernel for a key: ``kernel_for(operator)(key, *args, **kwargs)``.
kernel_for: Callable[[keys.OpOverload], Callable[..., Any]] = names.private_attribute(
    "torch._ops.OpOverload._op_dk"
)
#: What an overload's call calls, which a trace on fake cuda has in its own hands.
function_of: Callable[[keys.OpOverload], Callable[..., Any]] = names.private_attribute(
    "torch._ops.OpOverload._op"
)
_PYTHON = names.dispatch_key("Python")
_PYTHON_KERNELS = names.private_name("torch._ops.OperatorBase.py_kernels")
tree_leaves: Callable[[Any], list[Any]] = names.private("torch.utils._pytree.tree_leaves")
tree_map_only: Callable[..., Any] = names.private("torch.utils._pytree.tree_map_only")
_pop_mode: Callable[[], Any] = names.private("torch.utils._python_dispatch._pop_mode_temporarily")


def run_composite_explicit(operator: keys.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run the body of a composite operator, whose inner operators are dispatched as usual."""
    return kernel_for(operator)(keys.composite_key(operator), *args, **kwargs)


def run_composite_implicit(operator: keys.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run the body of an operator that autograd sees through."""
    return kernel_for(operator)(keys.COMPOSITE_IMPLICIT, *args, **kwargs)


def run_torch_dispatch(operator: keys.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run ``__torch_dispatch__`` of the mode that is on, or of the subclasses among the arguments.

    As torch/csrc/autograd/python_variable.cpp and aten/src/ATen/core/PythonFallbackKernel.cpp do,
    but that what it calls is intercepted. C++ has a way of its own for ``DTensor``
    (python_variable.cpp, ``dispatchDTensorOp``), which the key ``Python`` leads to.
    """
    tensors = (one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor))
    types = tuple(dict.fromkeys(type(tensor) for tensor in tensors if has_dispatch(tensor)))
    if not modes.dispatch_modes() and any(is_dispatched_in_cpp(kind) for kind in types):
        with shards_intercepted():
            return kernel_for(operator)(_PYTHON, *args, **kwargs)
    with keys.ExcludeKeys(keys.keys_above_kernels().remove(keys.FAKE)):
        if modes.dispatch_modes():
            with _pop_mode() as mode:
                return mode.__torch_dispatch__(operator, types, args, kwargs)
        for kind in types:
            result = kind.__torch_dispatch__(operator, types, args, kwargs)
            if result is not NotImplemented:
                return result
    raise TypeError(f"no implementation of {operator} for {', '.join(map(str, types))}")


def run_cpu_kernel(operator: keys.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run the CPU's kernel of an operator that calls others and touches no memory itself."""
    return kernel_for(operator)(keys.CPU, *args, **kwargs)


def run_nested_kernel(operator: keys.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run the kernel of an operator for nested tensors, which calls others on their buffers. Raises
    ``NotImplementedError``, as torch does, where it has none.
    """
    # What makes a nested tensor of others has a kernel for those.
    others = (keys.CPU,) if operator.name().startswith("aten::_nested_") else ()
    possible = *others, keys.COMPOSITE_NESTED, keys.COMPOSITE_EXPLICIT, keys.COMPOSITE_IMPLICIT
    key = keys.first_key(operator, keys.NESTED_CPU, *possible) or keys.NESTED_CPU
    return kernel_for(operator)(key, *args, **kwargs)


def run_sparse_kernel(key: Any, operator: keys.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run the kernel of an operator that takes or makes sparse tensors, of a ``key`` by default.
    Raises ``NotImplementedError``, as torch does, where it has none.
    """
    given = tree_leaves((args, kwargs))
    layouts = {one.layout for one in given if isinstance(one, Tensor)}
    first = key
    if layouts == {torch.strided}:
        first = keys.CPU
    elif torch.sparse_coo in layouts:
        first = keys.SPARSE_CPU
    possible = keys.COMPOSITE_EXPLICIT, keys.COMPOSITE_NON_FUNCTIONAL, keys.COMPOSITE_IMPLICIT
    return kernel_for(operator)(keys.first_key(operator, first, *possible) or key, *args, **kwargs)


def below_interception(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``HigherOrderOperator.dispatch`` for which the Fake key is the CPU's.

    Such operators (flex attention) choose a Python kernel by key, and have none for those of a
    trace. One for GPUs alone (``run_dtensor_rng_op``) has CUDA's.
    """

    def on_cpu(operator: Any, key: Any, /, *args: Any, **kwargs: Any) -> Any:
        if key in keys.OWN_KEYS:
            with keys.ExcludeKeys(keys.own_key_set()):
                return operator(*args, **kwargs)
        if key == keys.FAKE:
            kernels = getattr(operator, _PYTHON_KERNELS)
            key = keys.CUDA if keys.CUDA in kernels and keys.CPU not in kernels else keys.CPU
        return dispatch(operator, key, *args, **kwargs)

    return on_cpu


_dtensor = names.private_if_imported("torch.distributed.tensor.DTensor")
_SHARD = names.private_name_if_imported("torch.distributed.tensor.DTensor._local_tensor")
_thread = threading.local()


class _Shard(property):
    """The attribute that C++ reads, and the one that is there without a trace."""

    def __init__(self, before: Any) -> None:
        super().__init__(self._read, before.__set__, before.__delete__)
        self.before = before

    def _read(self, tensor: Tensor) -> Any:
        if getattr(_thread, "is_in_cpp", False):
            keys.set_excluded(keys.FAKE, False)
        return self.before.__get__(tensor)


def is_dispatched_in_cpp(kind: type[Tensor]) -> bool:
    """Return whether C++ runs the operators of a subclass, and no ``__torch_dispatch__``."""
    dtensor = _dtensor()
    if dtensor is None or not issubclass(kind, dtensor):
        return False
    method: Any = kind.__torch_dispatch__
    return method.__func__ is dtensor.__torch_dispatch__.__func__


@contextmanager
def shards_intercepted() -> Iterator[None]:
    """Let operators be intercepted that C++ calls on this thread, once it has read a shard."""
    before = getattr(_dtensor(), _SHARD)
    if not isinstance(before, _Shard):
        setattr(_dtensor(), _SHARD, _Shard(before))
    nested = getattr(_thread, "is_in_cpp", False)
    _thread.is_in_cpp = True
    try:
        yield
    finally:
        _thread.is_in_cpp = nested


def give_shards_back() -> None:
    """Have the attribute of torch there again, as a trace ends."""
    now = getattr(_dtensor(), _SHARD, None)
    if isinstance(now, _Shard):
        setattr(_dtensor(), _SHARD, now.before)


OnlyCpp = names.private("torch._C._DisablePythonDispatcher")
"""A context without the kernels in Python that ``_to_copy`` and others have where graphs are made:
these return what they are given where nothing is to be converted (torch/_decomp/decompositions.py).
"""


class _OnlyGeometry(TorchDispatchMode):
    """Keeps C++ from what is Python's for ``meta`` once outputs are made: to compute them.

    That is the ``out=`` overload that a structured operator ends in, and what fills a factory's
    tensor. Python's decompositions set other strides where they convert to another type between
    (torch/_meta_registrations.py, activate_meta), take longer than all else, and at their first
    call import the compiler (torch/_prims_common/wrappers.py) and sympy, in seconds.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say that the compiler need not be told, for which it would be imported."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = _outputs_of(func)
        if outputs:
            made = tuple(kwargs[name] for name in outputs)
            return made if len(made) > 1 else made[0]
        if func.name() in _FILLING:
            return args[0]
        if _makes_one_like_another(func):
            with self:
                return kernel_for(func)(keys.COMPOSITE_EXPLICIT, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@cache
def _outputs_of(operator: keys.OpOverload) -> tuple[str, ...]:
    return tuple(argument.name for argument in keys.schema(operator).arguments if argument.is_out)


LIKE_ANOTHER = names.listed("""
    aten::empty_like aten::full_like aten::new_empty aten::new_full aten::new_ones
    aten::new_zeros aten::ones_like aten::rand_like aten::randn_like aten::zeros_like
""")
"""Factories of a tensor like another one, of which they need the geometry alone."""
_FILLING = frozenset({"aten::fill_.Scalar", "aten::normal_", "aten::uniform_", "aten::zero_"})


@cache
def _makes_one_like_another(operator: keys.OpOverload) -> bool:
    """Return whether ``operator`` makes a tensor like another one, and is composite in C++."""
    name = operator.name()
    return name in LIKE_ANOTHER and keys.has_kernel(name, keys.COMPOSITE_EXPLICIT)


def run_on_meta(operator: keys.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on ``meta`` tensors, with the geometry that kernels have where C++ says it.
    It does for a structured operator, and for one that makes a tensor like another one.
    """
    if keys.is_structured(operator):
        key = keys.COMPOSITE_NON_FUNCTIONAL
    elif _makes_one_like_another(operator):
        key = keys.COMPOSITE_EXPLICIT
    else:
        return operator(*args, **kwargs)
    try:
        with cast(Any, _OnlyGeometry)():
            return kernel_for(operator)(key, *args, **kwargs)
    except IndexError:
        # That of ``index_add`` looks at the first row, also where there is none
        # (native/TensorAdvancedIndexing.cpp, index_func_meta_impl).
        return operator(*args, **kwargs)


class Ran(NamedTuple):
    """An operator that ran, with weak references in the place of tensors."""

    operator: keys.OpOverload
    args: Any
    kwargs: Any
    result: Any
    gone: list[ReferenceType[Tensor]]
    """The tensors that were given back before."""


class _Recording(_OnlyGeometry):
    """Notes the operators that run, as they come below autograd."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran: list[Ran] = []
        self._met: list[ReferenceType[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gone = [one for one in self._met if one() is None]
        result = func(*args, **(kwargs or {}))
        given = args, kwargs or {}, result
        args, kwargs, made = tree_map_only(Tensor, self._note, given)
        self.ran.append(Ran(func, args, kwargs, made, gone))
        return result

    def _note(self, tensor: Tensor) -> ReferenceType[Tensor]:
        self._met.append(ref(tensor))  # the same for a tensor as long as it lives
        return self._met[-1]


def recorded(operator: keys.OpOverload, *args: Any, **kwargs: Any) -> tuple[Any, list[Ran]]:
    """Return what an operator returns, and the operators that it called."""
    with cast(Any, _Recording)() as recording:
        result = operator(*args, **kwargs)
    return result, recording.ran
