"""Triton kernels: a launch takes nothing; what the kernel writes is computed, or unknown.

Which arguments it writes to is read off its source; labels, lengths and masks that it only reads
keep their known values. Where values are known, triton's own interpreter computes what it writes.
What triton asks of the GPU's driver are its properties, without a CUDA context.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from importlib import import_module
from inspect import signature
from math import prod
from types import FunctionType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pytest_torchmem.cudnn.driver import device_properties
from pytest_torchmem.errors import UnsupportedOperatorError
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.torch_private.patches import ABSENT, having, replaced, replaced_all

_WRITES = ("store", "atomic", "scatter", "copy", "reduce_add", "asm", "extern")
"""Parts of the names of triton's functions that write to the pointer that they are given."""
_CASTS = "pointer_type"
"""By this an integer becomes a pointer, which may have been read from memory."""
_OF_TRITON = ("triton.language", "builtins", "math")
"""Where functions of triton's language, and of Python, are from."""
_NOT_FOLLOWED = (ast.FunctionDef, ast.Lambda, ast.ClassDef, ast.comprehension, ast.withitem)
"""What has variables of its own."""
_VALUES: Mapping[type[ast.AST], str] = {
    **dict.fromkeys((ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr), "value"),
    ast.For: "iter",
}
"""Where assignments have what they assign."""
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
        if any(isinstance(node, _NOT_FOLLOWED) or _node_name(node) == _CASTS for node in body):
            return _EVERY
        before = None
        while before != (before := self._state()):  # a loop may carry a pointer back
            for node in body:  # in any order: until nothing changes
                self._follow(node)
        return frozenset(self._written)

    def _state(self) -> tuple[int, int]:
        return sum(map(len, self._origins.values())), len(self._written)

    def _follow(self, node: Any) -> None:
        """Let targets of an assignment point to where its value does; note what is written."""
        if isinstance(node, ast.Call):
            self._origins_of(node)
        value = getattr(node, _VALUES.get(type(node), ""), None)
        if value is None:
            return
        origins = self._origins_of(value)
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for part in (part for target in targets for part in ast.walk(target)):
            if isinstance(part, ast.Name):
                self._origins.setdefault(part.id, set()).update(origins)
            elif isinstance(part, (ast.Attribute, ast.Subscript)):
                self._written |= self._origins_of(part)

    def _origins_of(self, node: ast.AST) -> set[str]:
        """Return the arguments that the value of an expression may point into."""
        if isinstance(node, ast.Name):
            return self._origins.get(node.id, set())
        if not isinstance(node, ast.Call):
            return set().union(*map(self._origins_of, ast.iter_child_nodes(node)))
        given = [self._origins_of(argument) for argument in node.args]
        named = {keyword.arg: self._origins_of(keyword.value) for keyword in node.keywords}
        every = set().union(*given, *named.values())
        called, known = self._resolve(node.func)
        method = isinstance(node.func, ast.Attribute) and not known
        if method:
            every |= self._origins_of(node.func)
        name = _node_name(node.func)
        if hasattr(called, "fn") and hasattr(called, "run"):
            self._written |= self._written_by(called, node, given, named)
        elif any(part in name for part in _WRITES) or (
            not method and not str(getattr(called, "__module__", None)).startswith(_OF_TRITON)
        ):
            self._written |= every
        elif name == "load":
            return set()
        return every

    def _written_by(
        self, kernel: Any, call: ast.Call, given: list[set[str]], named: dict[str | None, set[str]]
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


def _node_name(node: ast.AST) -> str:
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


def _device_functions_interpreted(interpreter: Any) -> AbstractContextManager[None]:
    """Let the kernel call functions that were compiled by ``triton.jit``, those of triton too."""
    jit = import_module("triton.runtime.jit")

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        rewritten = _rewritten(function.fn)
        scope: Any = interpreter._patch_lang(rewritten)
        try:
            return rewritten(*args, **kwargs)
        finally:
            scope.restore()

    return replaced(jit.JITFunction, __call__=call)


@lru_cache(maxsize=512)
def _rewritten(function: FunctionType) -> Callable[..., Any]:
    """Return a kernel as the interpreter runs it, which adds names to the globals: of a copy."""
    about = function.__name__, function.__defaults__, function.__closure__
    copied = FunctionType(function.__code__, dict(function.__globals__), *about)
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__annotations__ = function.__annotations__
    interpreter = import_module("triton.runtime.interpreter")
    rewritten: Callable[..., Any] = interpreter.FunctionRewriter(copied).rewrite_ast()
    return rewritten


def triton_refused(trace: TraceContext, module: Any) -> AbstractContextManager[None]:
    """Raise an error that says where a kernel can be launched: the fake CPU is not the place."""
    original = module.JITFunction.run

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if not trace.on_thread():
            return original(kernel, *args, **kwargs)
        raise UnsupportedOperatorError(
            f"{trace.user_line()}: the triton kernel {_name_of(kernel)!r} needs a GPU, and this "
            'trace is on cpu. Trace it on cuda: device="cuda", or devices=("cuda",) in a test'
        )

    return replaced_all([(module.JITFunction, {"run": run})])


@contextmanager
def triton_autotuned(trace: TraceContext, module: Any) -> Iterator[None]:
    """Let autotuned kernels run their first configuration that is left after pruning, with the
    hooks of the others; triton/runtime/autotuner.py.

    A real run compares the configurations at the first launch with arguments of a kind, and then
    calls ``pre_hook`` once more with ``reset_only``.
    """
    original = module.Autotuner.run
    seen: set[Any] = set()
    """Of which arguments a real run would have compared the configurations already."""
    before: dict[int, tuple[Any, Any]] = {}
    """Tuners that ran, with the best configuration that they knew, by ``id``."""

    def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        if not trace.on_thread():
            return original(tuner, *args, **kwargs)
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        try:
            configs = tuner.configs
            config = configs[0] if len(configs) == 1 else tuner.prune_configs(kwargs)[0]
            given = {**tuner.nargs, **kwargs, **config.all_kwargs()}
            if len(configs) > 1:
                named = {**tuner.nargs, **kwargs}
                named = {name: one for name, one in named.items() if name in tuner.arg_names}
                keys = tuple(named[name] for name in tuner.keys if name in named)
                dtypes = tuple(str(one.dtype) for one in named.values() if hasattr(one, "dtype"))
                if (id(tuner), keys, dtypes) not in seen:
                    seen.add((id(tuner), keys, dtypes))
                    tuner.pre_hook(given, reset_only=True)
            before.setdefault(id(tuner), (tuner, vars(tuner).get("best_config", ABSENT)))
            tuner.best_config = config
            if config.pre_hook is not None:
                config.pre_hook(given)
            return tuner.fn.run(*args, **kwargs, **config.all_kwargs())
        finally:
            tuner.nargs = None

    try:
        with replaced_all([(module.Autotuner, {"run": run})]):
            yield
    finally:
        for tuner, best in before.values():
            if best is ABSENT:
                del tuner.best_config
            else:
                tuner.best_config = best


def triton_launches(trace: TraceContext, module: Any, kind: str) -> AbstractContextManager[None]:
    """Stand in for ``kernel[grid](...)`` and ``kernel.warmup(...)`` of a kind of kernels:
    ``JITFunction`` of triton/runtime/jit.py, or ``InterpretedFunction``, which TRITON_INTERPRET=1
    runs on the host, where it has no values either.
    """
    kernels = getattr(module, kind)
    original = kernels.run

    def run(kernel: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> Any:
        if not trace.on_thread():
            return original(kernel, *args, grid=grid, warmup=warmup, **kwargs)
        # An operator's geometry may be found by running its body, launches included, on ``meta``.
        if not trace.inside:
            for hook in getattr(kernel, "pre_run_hooks", ()):
                hook(*args, **kwargs)
            if not warmup:
                launch(trace, kernel, args, kwargs, grid)
        return NotCompiled(trace, kernel)

    return replaced_all([(kernels, {"run": run})])


def launch(
    trace: TraceContext, kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any], grid: Any
) -> None:
    """Compute what a kernel writes, or forget what was there."""
    # Raises ``TypeError``, as triton does, for an argument that is missing; options of the launch
    # are none.
    called = signature(kernel.fn)
    named = {name: value for name, value in kwargs.items() if name in called.parameters}
    bound = called.bind(*args, **named)
    bound.apply_defaults()
    given = dict(bound.arguments)
    sizes = grid(given) if callable(grid) else grid
    if any(isinstance(size, int) and size == 0 for size in sizes):
        return  # driver.c of triton's backend launches nothing then
    for position, (name, value) in enumerate(given.items()):
        for tensor in _tensors(value):
            if tensor.device.type == "cpu" and tensor.numel() and not tensor.is_pinned():
                # As triton, of memory that a GPU cannot reach (backends/nvidia/driver.c).
                raise ValueError(
                    f"Pointer argument (at {position}) cannot be accessed from Triton (cpu "
                    f"tensor?): {name} of {_name_of(kernel)} is on {tensor.device}"
                )
    if computed(trace, kernel, given, sizes):
        return
    written = written_arguments(kernel)
    changed = [one for name, one in given.items() if written is None or name in written]
    trace.values.forget(_tensors(changed))


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors that an argument is or holds: tuples, descriptors, reinterpreted ones."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(getattr(value, "base", None), Tensor):
        yield value.base


def _name_of(kernel: Any) -> str:
    return str(getattr(kernel, "__name__", None) or getattr(kernel, "_fn_name", "the kernel"))


class NotCompiled:
    """What a launch or ``kernel.warmup(...)`` returns: a kernel that can be launched again."""

    def __init__(self, trace: TraceContext, kernel: Any) -> None:
        self._trace = trace
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> "Callable[..., NotCompiled]":
        return lambda *args, **kwargs: self._kernel.run(*args, grid=grid, warmup=False, **kwargs)

    def _init_handles(self) -> None:
        """Load nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedOperatorError(
            f"{self._trace.user_line()}: .{name} of the triton kernel {_name_of(self._kernel)!r} "
            "is not known: a trace does not compile kernels. Skip this line while tracing, or "
            "compile with triton.compile(..., target=...), which needs no GPU"
        )


def triton_driver(trace: TraceContext, module: Any) -> AbstractContextManager[None]:
    """Let ``triton.runtime.driver.active`` be that of the trace's GPU; triton/runtime/driver.py."""
    name = "_active" if "_active" in vars(module.driver) else "active"
    return having(module.driver, **{name: Driver(trace)})


class Driver:
    """The driver of a GPU that is not there; triton/backends/nvidia/driver.py, ``CudaDriver``."""

    def __init__(self, trace: TraceContext) -> None:
        self._trace = trace
        self.utils = SimpleNamespace(get_device_properties=partial(_properties, trace))
        # There is one device.
        self.get_current_device = lambda: 0
        self.set_current_device = lambda device: None
        self.get_current_stream = lambda device=0: 0
        self.get_device_capability = lambda device=0: trace.gpu.capability
        self.get_active_torch_device = lambda: torch.device("cuda", 0)
        self.get_device_interface = lambda: torch.cuda

    def get_current_target(self) -> Any:
        major, minor = self._trace.gpu.capability
        return import_module("triton.backends.compiler").GPUTarget("cuda", major * 10 + minor, 32)

    def get_benchmarker(self) -> Callable[..., Any]:
        """Return a benchmark: it runs a function once, in which nothing takes time."""

        def benchmark(function: Callable[[], Any], *, quantiles: Any = None, **_: Any) -> Any:
            function()
            return 1.0 if quantiles is None else [1.0] * len(quantiles)

        return benchmark

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        """Return what is cleared between two runs: 256 MiB, as for every GPU."""
        return torch.empty(256 * 1024 * 1024 // 4, dtype=torch.int, device="cuda")

    def clear_cache(self, cache: torch.Tensor) -> None:
        cache.zero_()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedOperatorError(
            f"{self._trace.user_line()}: triton's driver cannot be asked for {name} in a trace: "
            "no kernel is compiled or loaded. Skip this line while tracing"
        )


def _properties(trace: TraceContext, device: int = 0) -> dict[str, int]:
    known = device_properties(trace.gpu.capability, trace.gpu.multiprocessors)
    return {
        "multiprocessor_count": known["multiProcessorCount"],
        "warpSize": known["warpSize"],
        "max_num_regs": known["maxRegistersPerSM"],
        "max_shared_mem": known["maxSharedMemoryPerBlockOptin"],
    }
