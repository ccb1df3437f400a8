"""What a triton kernel writes, computed by triton's own interpreter where values are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from math import prod
from types import FunctionType
from typing import Any

from torch import Tensor

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.torch_private.patching.patches import replaced

#: What one program of a grid counts as: the interpreter runs its lines in Python and numpy.
OPERATIONS_OF_PROGRAM = 5_000_000
_PLAIN = (int, float, bool, str, type(None))


def computed(
    trace: TraceContext, kernel: Any, given: Mapping[str, Any], grid: Sequence[int]
) -> bool:
    """Run a kernel on what its tensors hold; return whether that was known, and not too much."""
    tensors = [value for value in given.values() if isinstance(value, Tensor)]
    if any(not isinstance(value, (Tensor, *_PLAIN)) for value in given.values()):
        return False

    def run(values: list[Tensor]) -> None:
        real = {id(tensor): value for tensor, value in zip(tensors, values, strict=True)}
        _interpret(kernel, {name: real.get(id(one), one) for name, one in given.items()}, grid)

    operations = prod(grid) * OPERATIONS_OF_PROGRAM
    with trace.working():
        return trace.values.compute_launch(str(kernel.fn.__name__), tensors, operations, run)


def _interpret(kernel: Any, given: Mapping[str, Any], grid: Sequence[int]) -> None:
    """Run a kernel as ``TRITON_INTERPRET=1`` does (triton/runtime/interpreter.py)."""
    numpy = import_module("numpy")
    interpreter = import_module("triton.runtime.interpreter")
    function = _rewritten(kernel.fn)
    names = list(kernel.fn.__code__.co_varnames[: kernel.fn.__code__.co_argcount])
    spans = [
        (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
        for storage in (one.untyped_storage() for one in given.values() if isinstance(one, Tensor))
    ]
    within = _WithinTensors(interpreter._interpreter, spans)
    with (
        _device_functions_interpreted(interpreter),
        replaced(interpreter, _interpreter=within),
        numpy.errstate(all="ignore"),
    ):
        interpreter.GridExecutor(function, names, tuple(grid))(**given)


class _WithinTensors:
    """The interpreter's access to memory by address, for those of a kernel's tensors alone.

    Beyond a tensor a GPU has other blocks of the allocator, and a process nothing that it may read.
    """

    def __init__(self, original: Any, spans: Sequence[tuple[int, int]]) -> None:
        self._original = original
        self._spans = spans

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def load(self, addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._check(addresses, mask, dtype.itemsize)
        return self._original.load(addresses, mask, other, dtype)

    def store(self, addresses: Any, value: Any, mask: Any) -> Any:
        self._check(addresses, mask, value.dtype.itemsize)
        return self._original.store(addresses, value, mask)

    def atomic_cas(self, addresses: Any, compared: Any, value: Any, *rest: Any) -> Any:
        self._check(addresses, True, value.dtype.itemsize)
        return self._original.atomic_cas(addresses, compared, value, *rest)

    def atomic_rmw(self, what: Any, addresses: Any, value: Any, mask: Any, *rest: Any) -> Any:
        self._check(addresses, mask, value.dtype.itemsize)
        return self._original.atomic_rmw(what, addresses, value, mask, *rest)

    def _check(self, addresses: Any, mask: Any, itemsize: int) -> None:
        inside = addresses != addresses
        for start, end in self._spans:
            inside = inside | ((addresses >= start) & (addresses <= end - itemsize))
        if not (inside | ~(mask == True)).all():  # noqa: E712 (an array)
            raise ValueError("it reads or writes beyond its tensors")


@contextmanager
def _device_functions_interpreted(interpreter: Any) -> Iterator[None]:
    """Let the kernel call functions that were compiled by ``triton.jit``, those of triton too."""
    jit = import_module("triton.runtime.jit")

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        rewritten = _rewritten(function.fn)
        scope: Any = interpreter._patch_lang(rewritten)
        try:
            return rewritten(*args, **kwargs)
        finally:
            scope.restore()

    with replaced(jit.JITFunction, __call__=call):
        yield


@lru_cache(maxsize=512)
def _rewritten(function: FunctionType) -> Callable[..., Any]:
    """Return a kernel as the interpreter runs it, which adds names to the globals: of a copy."""
    copied = FunctionType(
        function.__code__,
        dict(function.__globals__),
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__annotations__ = function.__annotations__
    interpreter = import_module("triton.runtime.interpreter")
    rewritten: Callable[..., Any] = interpreter.FunctionRewriter(copied).rewrite_ast()
    return rewritten
