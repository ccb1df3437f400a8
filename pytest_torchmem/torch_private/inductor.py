"""Inductor's output code: run with its own allocations, and with nothing in the place of kernels.

Inductor lowers and schedules a graph, and writes a function in Python that allocates buffers, calls
kernels, and deletes or reuses buffers (torch/_inductor/codegen/wrapper.py). That function is its
decision about memory. Here it is executed; what it would have compiled is not.
"""

import builtins
import gc
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import compress
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx

from pytest_torchmem.torch_private import names
from pytest_torchmem.torch_private.patches import nothing_replaced, replaced

_graph_lowering = names.private_if_imported("torch._inductor.graph.GraphLowering")
_TO_MODULE = names.private_name_if_imported(
    "torch._inductor.graph.GraphLowering._compile_to_module_lines"
)
_async_compile = names.private_if_imported("torch._inductor.async_compile")
_vector_instructions = names.private_if_imported("torch._inductor.cpu_vec_isa")
_config = names.private_if_imported("torch._inductor.config")
_compile_fx = names.private_if_imported("torch._inductor.compile_fx")
_joint_passes = names.private_if_imported("torch._inductor.fx_passes.joint_graph")
_post_passes = names.private_if_imported("torch._inductor.fx_passes.post_grad")
_overrides = names.private_if_imported("torch._inductor.codegen.common.get_device_op_overrides")
_ahead_of_time = names.private_if_imported("torch._functorch.config")
_device_interface = names.private_if_imported("torch._dynamo.device_interface")
_cuda_interface = names.private_if_imported("torch._dynamo.device_interface.CudaInterface")
_REMEMBERED = ("caching_worker_current_devices", "caching_worker_device_properties")
_utils = names.private_if_imported("torch._inductor.utils")
_triton = names.private_if_imported("torch.utils._triton")
_hints = names.private_if_imported("torch._inductor.runtime.hints")
_MODULES = names.listed("""
    torch._inductor.compile_fx torch._inductor.graph torch._inductor.cpu_vec_isa
    torch._inductor.fx_passes.joint_graph torch._inductor.fx_passes.post_grad
    torch._functorch.config
""")

#: What a trace has of Inductor's options: nothing is written to its caches, or read from them, no
#: process is started, no kernel is compiled or timed, and its output is in Python.
OPTIONS: Mapping[str, Any] = {
    "compile_threads": 1,
    "cpp.vec_isa_ok": True,
    **dict.fromkeys(
        names.listed("""
            autotune_local_cache autotune_remote_cache benchmark_combo_kernel
            benchmark_epilogue_fusion benchmark_fusion benchmark_kernel
            bundled_autotune_remote_cache coordinate_descent_tuning cpp_wrapper fx_graph_cache
            fx_graph_remote_cache max_autotune max_autotune_gemm max_autotune_pointwise
            shape_padding size_asserts triton.autotune_at_compile_time
        """),
        False,
    ),
}
#: The same on a fake GPU. On the CPU the option chooses buffers, and captures nothing.
ON_GPU: Mapping[str, Any] = {"triton.cudagraphs": False}
#: Options that would have Inductor choose by the time that kernels take.
TIMED = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning")

_PACKET = names.private_name("torch._ops.OpOverload._overloadpacket")
_ALLOCATION = re.compile(r"^\s*(\w+) = empty_strided(?:_\w+)?\(")
_FILE = '  File "'
_OUT = re.compile(r"^(in_)?out_ptr|^ws_ptr")
_PARAMETERS = re.compile(r"def \w+\(([^)]*)\)")


@dataclass(frozen=True, slots=True)
class OutputBuffer:
    """A buffer of the output code: what it is made for."""

    name: str
    operators: str
    """The operators whose results it holds, as Inductor names its kernels."""
    module: str
    """The path of the module that they belong to, as Dynamo writes it; "" where unknown."""
    file: str
    line: int
    """The program's line; 0 where unknown."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """What is called by the output code instead of torch's functions that no operator is."""

    allocate: Callable[[OutputBuffer, str, Any, Any, torch.dtype, bool], Tensor]
    """With a buffer, the device's type, size, strides, dtype, and whether it is pinned."""
    written: Callable[[str, Sequence[Tensor]], None]
    """With a kernel's name, and the tensors that it writes to."""


@cache
def prepare() -> None:
    """Import Inductor, without its processes that compile, and let it make its tables. Its patterns
    are made of torch's functions (torch/_inductor/fx_passes, ``lazy_init``).
    """
    with nothing_replaced():
        import_module("torch._inductor.config")
        with _config().patch(compile_threads=1):
            for name in _MODULES:
                import_module(name)
            _joint_passes().lazy_init(torch.device("cpu"))
            _post_passes().lazy_init()
            # Since torch 2.15 it imports more while it holds a lock that these modules take.
            _overrides()("cpu")


def compile(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    options: Mapping[str, Any],
    compiling: Callable[[], AbstractContextManager[object]],
    on_gpu: bool,
) -> Any:
    """Have Inductor compile a graph, with a program's options as far as a trace has them. A
    backward is compiled when it first runs: each of both is in ``compiling()``.
    """
    module = _compile_fx()

    def inner(*args: Any, **kwargs: Any) -> Any:
        with compiling(), _without_cycles():
            return module.compile_fx_inner(*args, **kwargs)

    patches = {**options, **OPTIONS, **(ON_GPU if on_gpu else {})}
    return module.compile_fx(graph, inputs, inner_compile=inner, config_patches=patches)


@contextmanager
def _without_cycles() -> Iterator[None]:
    """Have what a compilation leaves in cycles of references be gone when it ends.

    Since torch 2.15 it leaves frames that ran then with their variables, the gradients of the
    backward that is compiled among them, until Python collects garbage; what a process has compiled
    before leaves none. What the program has in cycles is left to Python.
    """
    if names.TORCH_VERSION < (2, 15):
        yield
        return
    was_enabled = gc.isenabled()
    gc.disable()  # what is made from now on stays in the youngest generation
    try:
        yield
        gc.collect(0)
    finally:
        if was_enabled:
            gc.enable()


def activations_kept(share: float) -> AbstractContextManager[None]:
    """Have compiled code keep at most a share of the bytes of activations for its backward.

    ``torch._functorch.config.activation_memory_budget``, which the partitioner of AOTAutograd keeps
    to (torch/_functorch/partitioners.py, ``choose_saved_values_set``).
    """
    found: AbstractContextManager[None] = _ahead_of_time().patch(activation_memory_budget=share)
    return found


@contextmanager
def options(vector: str, threads: int, on_gpu: bool) -> Iterator[None]:
    """Have Inductor's options be ``OPTIONS``, for a CPU with such instructions and threads.
    ``vector`` is ATen's name of them: ``"AVX512"``, ``"AVX2"`` or ``"DEFAULT"``.
    """
    found = _vector_instructions()
    kinds = {"AVX512": [found.VecAVX512, found.VecAVX2], "AVX2": [found.VecAVX2]}
    instructions = [kind() for kind in kinds.get(vector, ())]
    caches = dict.fromkeys(("enable_autograd_cache", "enable_remote_autograd_cache"), False)
    with (
        _config().patch({**OPTIONS, **(ON_GPU if on_gpu else {}), "cpp.threads": threads}),
        _ahead_of_time().patch(caches),
        replaced(found, valid_vec_isa_list=lambda: instructions),
        replaced(_joint_passes(), lazy_init=lambda *_: None),  # ``prepare`` has
    ):
        yield


@contextmanager
def gpu_seen() -> Iterator[None]:
    """Have Inductor ask the functions that ``torch.cuda`` has now about the GPU, and forget it. It
    has those that were there when it was imported, and remembers what they said.
    """
    interface = _cuda_interface()
    asked = [name for name, found in vars(interface).items() if isinstance(found, staticmethod)]
    instead = {name: _asking(name) for name in asked if hasattr(torch.cuda, name)}
    remembered = {name: {} for name in _REMEMBERED}  # type: dict[str, dict[str, Any]]
    _forget_gpu()
    try:
        with replaced(interface, **instead), replaced(_device_interface(), **remembered):
            yield
    finally:
        _forget_gpu()


def _asking(name: str) -> Any:
    return staticmethod(lambda *args, **kwargs: getattr(torch.cuda, name)(*args, **kwargs))


def _forget_gpu() -> None:
    caches = [found for module in (_utils(), _triton()) for found in vars(module).values()]
    for one in (*caches, _hints().DeviceProperties.create):
        clear = getattr(one, "cache_clear", None)
        if clear is not None:
            clear()


def output_code_run(hooks: Hooks, on_thread: Callable[[], bool]) -> AbstractContextManager[None]:
    """Have the output code of graphs that are lowered on the trace's threads call ``hooks``."""
    original: Any = getattr(_graph_lowering(), _TO_MODULE)

    def to_module(lowering: Any, code: Any) -> Any:
        if not on_thread():
            return original(lowering, code)
        every_one = *lowering.buffers, *lowering.operations
        named = (one for one in every_one if hasattr(one, "get_name"))
        buffers = {one.get_name(): _described(one) for one in named}
        return _executed(code.value, buffers, hooks)

    return replaced(_graph_lowering(), **{_TO_MODULE: to_module})


def _executed(source: str, buffers: Mapping[str, OutputBuffer], hooks: Hooks) -> Any:
    """Return the output code as a module, in which kernels do nothing but say what they write."""
    name = "<compiled by Inductor>"
    made: Any = ModuleType(name)
    made.__file__ = name
    allocated = {
        number: found[1]
        for number, line in enumerate(source.splitlines(), 1)
        if (found := _ALLOCATION.match(line))
    }
    unknown = OutputBuffer("", "", "", "", 0)

    def allocation(device: str, pinned: bool = False) -> Callable[..., Tensor]:
        def empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
            buffer = buffers.get(allocated.get(sys._getframe(1).f_lineno, ""), unknown)
            return hooks.allocate(buffer, device, size, stride, dtype, pinned)

        return empty_strided

    with replaced(_async_compile(), AsyncCompile=lambda: _Kernels(hooks.written)):
        exec(builtins.compile(source, name, "exec"), vars(made))
    made.empty_strided_cpu = allocation("cpu")
    made.empty_strided_cpu_pinned = allocation("cpu", pinned=True)
    made.empty_strided_cuda = allocation("cuda")
    made.reinterpret_tensor = _reinterpreted
    made.assert_size_stride = made.assert_alignment = lambda *_: None
    return made


def _reinterpreted(tensor: Tensor, size: Any, stride: Any, offset: int = 0) -> Tensor:
    """Return a view, as ``_reinterpret_tensor`` of torch/csrc/inductor/inductor_ops.cpp does."""
    with torch.no_grad():
        return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def _described(buffer: Any) -> OutputBuffer:
    nodes = sorted(getattr(buffer, "origins", ()), key=str)
    operators = dict.fromkeys(getattr(node.target, _PACKET, node.target) for node in nodes)
    called = ", ".join(getattr(one, "__name__", str(one)) for one in operators)
    module, file, line = "", "", 0
    for node in nodes:
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        if stack and not module:
            module = str(list(stack.values())[-1][0])
        frames = [row for row in (node.stack_trace or "").splitlines() if row.startswith(_FILE)]
        if frames and not file:
            file, _, rest = frames[-1].removeprefix(_FILE).partition('", line ')
            line = int(rest.partition(",")[0])
    return OutputBuffer(buffer.get_name(), called, module, file, line)


class _Kernels:
    """Stands for ``AsyncCompile``: gives kernels that compute nothing."""

    def __init__(self, written: Callable[[str, Sequence[Tensor]], None]) -> None:
        self._written = written

    def cpp_pybinding(self, argtypes: Sequence[str], source: str) -> Callable[..., None]:
        writes = [not kind.startswith("const ") and "*" in kind for kind in argtypes]
        return self._kernel("a kernel of C++", writes)

    def cpp(self, source: str) -> Callable[..., None]:
        """Return a kernel of C++ that may write to whatever it gets."""
        return self._kernel("a kernel of C++", None)

    def triton(self, name: str, source: str, device_str: str = "cuda") -> Any:
        """Return a kernel of triton, which is launched by its method ``run``."""
        found = _PARAMETERS.search(source)
        outputs = (
            [part.partition(":")[0].strip() for part in found[1].split(",")] if found else None
        )
        writes = None if outputs is None else [bool(_OUT.match(one)) for one in outputs]
        return SimpleNamespace(run=self._kernel(name, writes))

    def __getattr__(self, kind: str) -> Callable[..., Any]:
        def unknown(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"a kernel of {kind} in Inductor's output code")

        return unknown

    def wait(self, scope: dict[str, Any]) -> None:
        """Wait for nothing."""

    def _kernel(self, name: str, writes: Sequence[bool] | None) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            written = args if writes is None else compress(args, writes)
            self._written(name, [one for one in written if isinstance(one, Tensor)])

        return run
