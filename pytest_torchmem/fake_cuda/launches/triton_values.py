"""Which arguments a triton kernel writes to, as its source says, and what it writes, computed by
triton's own interpreter where values are known.

Labels, lengths and masks that a kernel only reads keep their known values.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from math import prod
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.torch_private.patches import replaced

_WRITES = ("store", "atomic", "scatter", "copy", "reduce_add", "asm", "extern")
"""Parts of the names of triton's functions that write to the pointer that they are given."""
_CASTS = "pointer_type"
"""By this an integer becomes a pointer, which may have been read from memory."""
_OF_TRITON = ("triton.language", "builtins", "math")
_NOT_FOLLOWED = (ast.FunctionDef, ast.Lambda, ast.ClassDef, ast.comprehension, ast.withitem)
"""What has variables of its own."""
_EVERY: frozenset[str] | None = None
_known: WeakKeyDictionary[Any, frozenset[str] | None] = WeakKeyDictionary()


def written_arguments(kernel: Any) -> frozenset[str] | None:
    """Return the names of the arguments whose memory a kernel may write to; ``None`` for all.

    ``kernel`` is what ``triton.jit`` returned. An argument counts as written to if a pointer made
    of it may get to a function that writes, or to one that is not known.
    """
    function = kernel.fn
    if function not in _known:
        _known[function] = _EVERY  # of a kernel that calls itself
        _known[function] = _find(function)
    return _known[function]


def _find(function: Any) -> frozenset[str] | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return _EVERY
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        return _EVERY
    return _Pointers(function, definition).written()


class _Pointers:
    """Follows pointers from the arguments of a kernel through its local variables."""

    def __init__(self, function: Any, definition: ast.FunctionDef) -> None:
        self._definition = definition
        arguments = definition.args
        names = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
        names += [one.arg for one in arguments.kwonlyargs]
        self._origins: dict[str, set[str]] = {name: {name} for name in names}
        """The arguments that a variable may point into."""
        self._globals = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
        self._written: set[str] = set()

    def written(self) -> frozenset[str] | None:
        """Return the names of the arguments that are written to, ``None`` for all."""
        body = [node for line in self._definition.body for node in ast.walk(line)]
        if any(isinstance(node, _NOT_FOLLOWED) or _name_of(node) == _CASTS for node in body):
            return _EVERY
        before = None
        while before != (before := self._state()):  # a loop may carry a pointer back
            for statement in self._definition.body:
                self._follow(statement)
        return frozenset(self._written)

    def _state(self) -> tuple[int, int]:
        return sum(map(len, self._origins.values())), len(self._written)

    def _follow(self, node: ast.AST) -> None:
        """Let the targets of assignments point to where their values do, and note what is written.

        Both are noted again and again until nothing changes, so the order does not matter.
        """
        if isinstance(node, ast.Assign):
            origins = self._origins_of(node.value)
            for target in node.targets:
                self._point(target, origins)
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr)):
            if node.value is not None:
                self._point(node.target, self._origins_of(node.value))
        elif isinstance(node, ast.For):
            self._point(node.target, self._origins_of(node.iter))
        elif isinstance(node, ast.Call):
            self._origins_of(node)
        for child in ast.iter_child_nodes(node):
            self._follow(child)

    def _point(self, target: ast.expr, origins: set[str]) -> None:
        if isinstance(target, ast.Name):
            self._origins.setdefault(target.id, set()).update(origins)
            return
        if not isinstance(target, (ast.Tuple, ast.List, ast.Starred)):
            self._written |= self._origins_of(target)  # an element or attribute
        for child in ast.iter_child_nodes(target):
            if isinstance(child, ast.expr):
                self._point(child, origins)

    def _origins_of(self, node: ast.AST) -> set[str]:
        """Return the arguments that the value of an expression may point into."""
        if isinstance(node, ast.Name):
            return self._origins.get(node.id, set())
        if isinstance(node, ast.Call):
            return self._origins_of_call(node)
        return set().union(*map(self._origins_of, ast.iter_child_nodes(node)))

    def _origins_of_call(self, call: ast.Call) -> set[str]:
        given = [self._origins_of(argument) for argument in call.args]
        named = {keyword.arg: self._origins_of(keyword.value) for keyword in call.keywords}
        every = set().union(*given, *named.values())
        called, known = self._resolve(call.func)
        method = isinstance(call.func, ast.Attribute) and not known
        if method:
            every |= self._origins_of(call.func)
        name = _name_of(call.func)
        if hasattr(called, "fn") and hasattr(called, "run"):
            self._written |= self._written_by(called, call, given, named)
        elif (not method and not _is_of_triton(called)) or any(part in name for part in _WRITES):
            self._written |= every
        elif name == "load":
            return set()
        return every

    def _written_by(
        self,
        kernel: Any,
        call: ast.Call,
        given: list[set[str]],
        named: Mapping[str | None, set[str]],
    ) -> set[str]:
        """Return the arguments that another kernel, which this one calls, writes to."""
        writes = written_arguments(kernel)
        starred = any(isinstance(argument, ast.Starred) for argument in call.args)
        if writes is None or starred or None in named:
            return set().union(*given, *named.values())
        parameters = list(inspect.signature(kernel.fn).parameters)
        by_name: dict[str | None, set[str]] = dict(zip(parameters, given, strict=False))
        by_name.update(named)
        return set().union(*(by_name.get(name, set()) for name in writes))

    def _resolve(self, node: ast.AST) -> tuple[Any, bool]:
        """Return what a global name or an attribute of one means, and whether it is known."""
        if isinstance(node, ast.Name):
            if node.id in self._origins:
                return None, False
            builtins: Any = vars(__builtins__) if inspect.ismodule(__builtins__) else __builtins__
            found = self._globals.get(node.id, builtins.get(node.id))
            return found, found is not None
        if isinstance(node, ast.Attribute):
            owner, known = self._resolve(node.value)
            found = getattr(owner, node.attr, None) if known else None
            return found, found is not None
        return None, False


def _is_of_triton(called: Any) -> bool:
    """Return whether a function is one of triton's language, or of Python."""
    module = getattr(called, "__module__", None)
    return isinstance(module, str) and module.startswith(_OF_TRITON)


def _name_of(node: ast.AST) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))


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
