"""Operators on ``meta`` tensors in C++ alone, with the geometry that kernels have."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, cast

from pytest_torchmem.torch_private.dispatch.kernels import kernel_for
from pytest_torchmem.torch_private.dispatch.keys import COMPOSITE_EXPLICIT, COMPOSITE_NON_FUNCTIONAL
from pytest_torchmem.torch_private.dispatch.operators import (
    OpOverload,
    has_kernel,
    is_structured,
    schema,
)
from pytest_torchmem.torch_private.names import private

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    from pytest_torchmem.torch_private.dispatch.modes import TorchDispatchMode

OnlyCpp = private("torch._C._DisablePythonDispatcher")
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

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        outputs = _outputs_of(function)
        if outputs:
            made = tuple(kwargs[name] for name in outputs)
            return made if len(made) > 1 else made[0]
        if function.name() in _FILLING:
            return args[0]
        if _makes_one_like_another(function):
            with self:
                return kernel_for(function)(COMPOSITE_EXPLICIT, *args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


@cache
def _outputs_of(operator: OpOverload) -> tuple[str, ...]:
    """Return the names of an ``out=`` overload's outputs."""
    return tuple(argument.name for argument in schema(operator).arguments if argument.is_out)


LIKE_ANOTHER = (
    "aten::empty_like",
    "aten::full_like",
    "aten::new_empty",
    "aten::new_full",
    "aten::new_ones",
    "aten::new_zeros",
    "aten::ones_like",
    "aten::rand_like",
    "aten::randn_like",
    "aten::zeros_like",
)
"""Factories of a tensor like another one, of which they need the geometry alone."""
_FILLING = frozenset({"aten::fill_.Scalar", "aten::normal_", "aten::uniform_", "aten::zero_"})


@cache
def _makes_one_like_another(operator: OpOverload) -> bool:
    """Return whether ``operator`` makes a tensor like another one, and is composite in C++."""
    return operator.name() in LIKE_ANOTHER and has_kernel(operator.name(), COMPOSITE_EXPLICIT)


def run_on_meta(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on ``meta`` tensors, with the geometry that kernels have where C++ says it.

    It does for a structured operator, and for one that makes a tensor like another one.
    """
    if is_structured(operator):
        key = COMPOSITE_NON_FUNCTIONAL
    elif _makes_one_like_another(operator):
        key = COMPOSITE_EXPLICIT
    else:
        return operator(*args, **kwargs)
    try:
        with cast(Any, _OnlyGeometry)():
            return kernel_for(operator)(key, *args, **kwargs)
    except IndexError:
        # That of ``index_add`` looks at the first row, also where there is none
        # (native/TensorAdvancedIndexing.cpp, index_func_meta_impl).
        return operator(*args, **kwargs)
