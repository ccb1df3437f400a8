"""Calls of what ``torch.compile`` wraps, modules and functions alike, and what they leave.

And what torch's functions import of its compiler where they run without it.
"""

import builtins
import ctypes
import logging
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial, reduce
from importlib import import_module
from operator import and_, or_
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from pytest_torchmem.torch_private import function_holders, patches, tensors
from pytest_torchmem.torch_private.names import (
    TORCH_VERSION,
    listed,
    private,
    private_if_imported,
    private_name_if_imported,
)
from pytest_torchmem.torch_private.patches import Instead, Replacements, nothing_replaced, replaced

private("torch.compiler._is_compiling_flag")
_is_stashed: Callable[[str], bool] = private("torch._C._is_key_in_tls")
_eval_frame = private_if_imported("torch._dynamo.eval_frame")
_CALLBACK = private_name_if_imported("torch._dynamo.eval_frame._callback_from_stance")
_CLASSES = "torch._dynamo.variables.user_defined.UserDefinedClassVariable"
_user_defined_class = private_if_imported(_CLASSES)
_IN_GRAPH = private_name_if_imported(f"{_CLASSES}._in_graph_classes")
_COUNT_FRAMES = "set_fullgraph_compiled_frame_count"
_WRAP = private_name_if_imported("torch._dynamo.variables.builder.VariableBuilder._wrap")
_CLONE = private_name_if_imported("torch._dynamo.convert_frame.ConvertFrame._clone_with_backend")
_convert_frame = private_if_imported("torch._dynamo.convert_frame")
_variable_builder = private_if_imported("torch._dynamo.variables.builder.VariableBuilder")
_tracer = private_if_imported("torch._dynamo.output_graph.SubgraphTracer")
_FUNCTIONS = "torch._dynamo.variables.torch.TorchInGraphFunctionVariable"
_function_variable = private_if_imported(_FUNCTIONS)
_HANDLERS = private_name_if_imported(f"{_FUNCTIONS}._get_handlers")
_exceptions = private_if_imported("torch._dynamo.exc")
_optimizer_variable = private_if_imported("torch._dynamo.variables.optimizer.OptimizerVariable")
_constant_types = private_if_imported("torch._dynamo.utils.common_constant_types")
_backward_compiler = private_if_imported("torch._dynamo.compiled_autograd.AutogradCompilerInstance")
_engine_operators = private_if_imported("torch._dynamo.compiled_autograd.Op")
_set_strategy = private("torch._C._dynamo.eval_frame.set_code_exec_strategy")
_strategy = private("torch._C._dynamo.eval_frame._FrameExecStrategy")
_action = private("torch._C._dynamo.eval_frame._FrameAction")
_INIT_GROUP = "_init_group"
_utilities = private_if_imported("torch._dynamo.utils")
_run_node = private_if_imported("torch._dynamo.utils.run_node")
_pgo = private_if_imported("torch._dynamo.pgo")
_tracing_context: Callable[[], Any] = private("torch._guards.TracingContext.try_get")
_rules = private_if_imported("torch._dynamo.trace_rules")
_TABLES = [
    private_name_if_imported(f"torch._dynamo.trace_rules.{name}")
    for name in ("get_torch_obj_rule_map", "get_tensor_method")
]
"""What makes Dynamo's tables of torch's functions, once until they are cleared."""
_PASSED_OVER = "ignore_logging_functions"
_SETTINGS_TO_LOG = "_get_dynamo_config_for_logging"
_BREAK = private_name_if_imported("torch._dynamo.output_graph.OutputGraph.compile_subgraph_reason")
_FLEX_ATTENTION = "torch.nn.attention.flex_attention"
_NOT_COMPILED = (None, False)
"""What ``torch.compiler.disable`` and graph breaks call it with."""
_BACKEND = "_torchdynamo_orig_backend"
"""What leads from a callback to its backend, also for C++, which asks whether compiled code is of
the backend that is to run (torch/csrc/dynamo/extra_state.cpp, ``get_backend``)."""

_aot_autograd = private_if_imported("torch._dynamo.backends.common.aot_autograd")
_partition = private_if_imported(
    "torch._functorch.partitioners.min_cut_rematerialization_partition"
)
_FAKES = "torch._subclasses.fake_tensor"
#: What is raised where a graph would depend on what fake tensors do not have.
DECIDES_BY_VALUES: tuple[type[Exception], ...] = (
    private(f"{_FAKES}.DataDependentOutputException"),
    private(f"{_FAKES}.DynamicOutputShapeException"),
)
_STRUCTURED = logging.getLogger("torch.__trace")
"""What of a compilation is for torch's own tools; pytest would print all of it with a failure."""

Convert = Callable[..., Any]
Backend = Callable[..., Any]
_Within = Callable[[], AbstractContextManager[object]]


def given_a_list(graph: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Return a graph's function, which AOTAutograd will hand a list to be emptied.

    torch/_functorch/_aot_autograd/utils.py, ``call_func_at_runtime_with_args``: it looks for the
    mark, and otherwise holds the arguments until the graph has run.
    """
    graph._boxed_call = True  # type: ignore[attr-defined]
    return graph


def taken_for_compiling(compiling: bool = True) -> AbstractContextManager[None]:
    """Let ``torch.compiler.is_compiling()`` be true, as it is where ``torch.export`` makes a graph.
    Libraries ask it before they decide by the values of tensors.
    """
    return replaced(torch.compiler, _is_compiling_flag=compiling)


def compiled_calls(
    when_called: Callable[[Any, bool], Any], when_compiled: Callable[[Any], None] = lambda _: None
) -> AbstractContextManager[None]:
    """Call ``when_called`` at every call of what is compiled, which the stance decides about;
    torch/_dynamo/eval_frame.py, ``_callback_from_stance``. The compiler has to be imported.

    It gets what converts frames, and whether that is of ``flex_attention``, which runs itself so if
    nobody has compiled it; it returns what converts them instead, or None to run them as they are.
    ``when_compiled`` gets it too, where the stance does not have the call run as it is.
    """
    module: Any = _eval_frame()
    original: Any = getattr(module, _CALLBACK)

    def from_stance(callback: Any) -> Any:
        found = original(callback)
        if callback in _NOT_COMPILED:
            return found
        compiled = sys._getframe(1).f_locals.get("fn")  # of ``compile_wrapper``
        instead = when_called(callback, getattr(compiled, "__module__", None) == _FLEX_ATTENTION)
        if found in _NOT_COMPILED:
            return found
        when_compiled(callback)
        return instead

    def count_frames(count: int) -> int:
        before: int = counted(count)
        return before or int(count < 0)

    functions: dict[str, Any] = {_CALLBACK: from_stance}
    counted: Any = getattr(module, _COUNT_FRAMES, None)
    if counted is not None:
        # Since torch 2.12 a call with ``fullgraph=True`` raises in which no frame was compiled;
        # some run as they are.
        functions[_COUNT_FRAMES] = count_frames
    return replaced(module, **functions)


def own_module_calls_followed() -> AbstractContextManager[None]:
    """Have Dynamo follow a program through torch's own calls of modules, whatever stands there.

    The compiler has to be imported. What it follows leaves variables in cycles of references, which
    hold the modules that a replaced ``nn.Module.__call__`` is given in a list.
    """
    module: Any = _eval_frame()
    original: Any = getattr(module, _CALLBACK)

    def convert(own: Convert, args: Any) -> Any:
        with nothing_replaced(torch.nn.Module):
            return own(*args)

    followed = cache(lambda found: around(found, convert))

    def from_stance(callback: Any) -> Any:
        found = original(callback)
        return found if found in _NOT_COMPILED else followed(found)

    return replaced(module, **{_CALLBACK: from_stance})


def compiled_modules() -> tuple[type, ...]:
    """Return the classes of modules that ``torch.compile`` returns; none without the compiler."""
    module = _eval_frame()
    return () if module is None else (module.OptimizedModule,)


def calls_flex_attention(graph: fx.GraphModule) -> bool:
    """Return whether a graph, or one within it, calls ``flex_attention``."""
    return any(
        getattr(node.target, "__name__", "") == "flex_attention"
        for part in graph.modules()
        if isinstance(part, fx.GraphModule)
        for node in part.graph.nodes
    )


def examples_of(graph: fx.GraphModule) -> list[Tensor]:
    """Return the fake tensors that the nodes of a graph of Dynamo gave when it was made.

    They stay in ``meta["example_value"]`` (torch/_dynamo/variables/builder.py, ``wrap_fx_proxy``)
    as long as the compiled code.
    """
    examples = [node.meta.get("example_value") for node in graph.graph.nodes]
    return [one for one in tree_leaves(examples) if isinstance(one, Tensor)]


def numbers_kept_for(graph: fx.GraphModule) -> list[Tensor]:
    """Return the numbers on the host that stay alive with the fake tensors of a graph of Dynamo.

    Autograd saves a Python number in the tensor that it is wrapped in, and a fake tensor that
    stands for a constant number has it as ``constant`` (torch/_subclasses/fake_tensor.py).
    """
    examples = examples_of(graph)
    found = tensors.numbers_saved_by(examples)
    for one in examples:
        constant = getattr(one, "constant", None)
        if constant is not None:
            found[constant.untyped_storage().data_ptr()] = constant
    return list(found.values())


def is_on_gpu(graph: fx.GraphModule) -> bool:
    return any(one.device.type == "cuda" for one in examples_of(graph))


def backend_of(callback: Any) -> Backend:
    """Return what compiles graphs for a callback of Dynamo."""
    while hasattr(callback, _BACKEND):
        callback = getattr(callback, _BACKEND)
    return callback  # type: ignore[no-any-return]


def asked_of(backend: Any) -> dict[str, str]:
    """Return how ``torch.compile`` is asked for a backend, where that is not the default."""
    name = getattr(backend, "compiler_name", "inductor")
    options = getattr(backend, "config", None) or getattr(backend, "kwargs", {})
    asked = {**({} if name == "inductor" else {"backend": name}), **options}
    plain = {key: one for key, one in asked.items() if type(one) in (bool, int, float, str)}
    return {f"torch.compile({key}=)": str(one) for key, one in plain.items()}


def frames_of_break(graph: fx.GraphModule) -> list[tuple[str, int]]:
    """Return the files and lines at which Dynamo broke off a graph, outermost first."""
    why = getattr(graph, _BREAK, None)
    frames = why.user_stack if why is not None and why.graph_break else ()
    return [(frame.filename, frame.lineno) for frame in frames]


def with_backend(callback: Any, backend: Backend) -> Convert:
    """Return a callback that has graphs compiled by another backend, and is otherwise the same. As
    Dynamo does for DDP (torch/_dynamo/convert_frame.py, ``CatchErrorsWrapper.__call__``).
    """
    inner = getattr(getattr(callback, _BACKEND), _CLONE)(backend)
    made: Convert = _convert_frame().catch_errors_wrapper(inner, callback.hooks)
    return made


@cache
def interpreters() -> frozenset[CodeType]:
    """Return the code of what runs the nodes of graphs, Dynamo's own and those of ``torch.fx``."""
    found = fx.Interpreter.call_function, fx.Interpreter.call_method, _run_node()
    return frozenset(one.__code__ for one in found if one is not None)


def engine_operators() -> CodeType | None:
    """Return the code by which graphs of compiled autograd call the engine's nodes, in C++."""
    operators = _engine_operators()
    code: CodeType | None = None if operators is None else operators.__call__.__code__
    return code


def node_run_in(frame: FrameType) -> tuple[Any, tuple[Any, ...]]:
    """Return the callee and arguments of the node that one of ``interpreters()`` is running."""
    local = frame.f_locals
    target = local["target"] if "target" in local else local["node"].target
    return target, (local["args"], local["kwargs"])


def restarts() -> type[Exception]:
    """Return what is raised to have Dynamo follow a frame again, in another way."""
    kind: type[Exception] = _exceptions().RestartAnalysis
    return kind


def is_internal(error: Exception) -> bool:
    """Return whether a compiler failed, or the program did, which fails again without it."""
    kinds = _exceptions()
    failures = kinds.InternalTorchDynamoError, kinds.BackendCompilerFailed, kinds.TorchRuntimeError
    return isinstance(error, failures)


@contextmanager
def hooks_passed_over(hooks: Iterable[Callable[..., Any]]) -> Iterator[None]:
    """Have Dynamo, on this thread, pass over calls of some functions instead of breaking its graph.

    ``torch._dynamo.config.ignore_logging_functions`` (torch/_dynamo/variables/builder.py). Where a
    graph breaks within a loop over hooks, Dynamo's variables of the loop hold the frame, and with
    it the optimizer, until Python collects garbage.
    """
    config = import_module("torch._dynamo.config")
    known = getattr(config, _PASSED_OVER, None)
    if known is None:
        yield
        return
    with config.patch({_PASSED_OVER: {*known, *hooks}}), ExitStack() as stack:
        if not _settings_can_be_logged():
            nothing: dict[str, Any] = {_SETTINGS_TO_LOG: lambda: None}
            stack.enter_context(replaced(import_module("torch._dynamo.utils"), **nothing))
        yield


@cache
def _settings_can_be_logged() -> bool:
    """Return whether Dynamo can log its settings while it passes functions over.

    torch 2.11 cannot: the error of each compilation is logged, and keeps the frames with their
    tensors (torch/_dynamo/utils.py, ``clean_for_json``).
    """
    log = getattr(import_module("torch._dynamo.utils"), _SETTINGS_TO_LOG, None)
    try:
        if log is not None:
            log()
    except TypeError:
        return False
    return True


def run_uncompiled(code: CodeType) -> None:
    """Have Dynamo run a frame of some code as it is, and follow what it calls.

    Of torch's own files it does so anyway (torch/_dynamo/trace_rules.py); what stands in the place
    of ``Module.__call__`` would be compiled instead of the module's forward.
    """
    _set_strategy(code, _strategy(_action.SKIP, _action.DEFAULT))


def as_it_is(*, with_calls: bool) -> Any:
    """Return the callback result that runs a frame, and ``with_calls`` all below it, eagerly."""
    module = _convert_frame()
    if not with_calls:
        return module.ConvertFrameReturn()
    skip = module.FrameAction.SKIP
    return module.ConvertFrameReturn(frame_exec_strategy=module.FrameExecStrategy(skip, skip))


def around(convert: Convert, call: Callable[[Convert, Any], Any]) -> Convert:
    """Return a callback that ``call`` runs; it gets what converts a frame, and its arguments."""

    def converting(*args: Any) -> Any:
        return call(convert, args)

    setattr(converting, _BACKEND, convert)
    return converting


def makes_graph() -> bool:
    """Return whether this thread compiles a graph: AOTAutograd runs the autograd engine for it."""
    return _tracing_context() is not None


def import_compiler() -> None:
    """Import Dynamo while torch's functions, which it keeps in tables, are torch's own."""
    if "torch._dynamo" not in sys.modules:
        with nothing_replaced():
            import_module("torch._dynamo")


@contextmanager
def tables_of_originals() -> Iterator[None]:
    """Have Dynamo's tables of functions be made while these are torch's own; it is imported.

    ``torch.func.linearize`` looks a function up, ``init_process_group`` clears the tables
    (torch/_dynamo/trace_rules.py, ``clear_lru_cache``), and what is made then stays: compiled code
    would not know ``torch.cuda.is_available`` afterwards.
    """
    rules, function = _rules(), _function_variable()
    makers = {name: getattr(rules, name, None) for name in _TABLES}
    tables = {name: _of_originals(one) for name, one in makers.items() if one}
    handlers = staticmethod(_of_originals(getattr(function, _HANDLERS)))
    with replaced(rules, **tables), replaced(function, **{_HANDLERS: handlers}):
        yield


def _of_originals(maker: Any) -> Callable[[], Any]:
    def table() -> Any:
        if maker.cache_info().currsize:
            return maker()
        with nothing_replaced():
            return maker()

    table.cache_clear = maker.cache_clear  # type: ignore[attr-defined]
    table.cache_info = maker.cache_info  # type: ignore[attr-defined]
    return table


class _First(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Without drawing numbers, which the program would not get then.
        self.inner = torch.nn.utils.skip_init(torch.nn.Linear, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


@cache
def prepare() -> None:
    """Let Dynamo make its tables of torch's functions, while these are torch's own.

    It would ask a real GPU for its random numbers (torch/_dynamo/convert_frame.py,
    ``preserve_global_state``), which makes a context there.
    """
    with nothing_replaced(), patches.replaced_all([patches.cuda_is_compiled.by(lambda: False)]):
        torch.compile(_First(), backend="eager", dynamic=False)(torch.zeros(1))
        _eval_frame().reset_code(_First.forward.__code__)


@contextmanager
def originals_seen(made: Iterable[type] = (), constants: Iterable[type] = ()) -> Iterator[None]:
    """Let Dynamo take what stands in the place of a function of torch for that function, and its
    graphs call what stands there; and Dynamo itself, for what it takes as a constant.

    Quietly: torch's log for its own tools is off.
    Its guards ask for what stands there now (torch/_dynamo/variables/builder.py,
    ``VariableBuilder``: they are of the source, not of the value). Classes of streams and events,
    ``made``, are themselves: graphs make objects of them (variables/user_defined.py,
    ``UserDefinedClassVariable._in_graph_classes``). ``constants`` are what no graph changes.
    """
    builder = _variable_builder()
    wrap: Any = getattr(builder, _WRAP)

    tracer, standing = _tracer(), patches.standing_functions()
    create: Any = tracer.create_proxy

    made = frozenset(made)

    def of_original(self: Any, value: Any) -> Any:
        kept = isinstance(value, type) and value in made
        return wrap(self, value if kept else function_holders.HOLDERS.original(value))

    def create_proxy(self: Any, kind: str, target: Any, *args: Any, **kwargs: Any) -> Any:
        return create(self, kind, standing.get(id(target), target), *args, **kwargs)

    function = _function_variable()
    call: Any = function.call_function

    def call_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Such as torch.cuda.is_available() (torch/_dynamo/variables/torch.py,
        # constant_fold_functions).
        stands = standing.get(id(self.value))
        if stands is None or not self.can_constant_fold_through():
            return call(self, *args, **kwargs)
        self.as_python_constant = lambda: stands
        try:
            return call(self, *args, **kwargs)
        finally:
            del self.as_python_constant

    # What compiled code gets streams and events by takes C++'s own classes: these take the ones
    # that ``torch`` has now (torch/_dynamo/utils.py).
    builders: dict[str, Callable[..., Any]] = {
        "build_stream": lambda args, kwargs: torch.Stream(*args, **kwargs),
        "build_event": lambda args, kwargs: torch.Event(*args, **kwargs),
        "get_current_stream": lambda device: torch.accelerator.current_stream(device),
    }
    builders = {name: one for name, one in builders.items() if hasattr(_utilities(), name)}
    with (
        replaced(builder, **{_WRAP: of_original}),
        replaced(tracer, create_proxy=create_proxy),
        replaced(function, call_function=call_function),
        replaced(_STRUCTURED, disabled=True),
        _added(getattr(_user_defined_class(), _IN_GRAPH)(), made),
        _added(_constant_types(), constants),
        replaced(_utilities(), **builders),
    ):
        yield


@contextmanager
def _added(known: set[type], more: Iterable[type]) -> Iterator[None]:
    new = set(more) - known
    known |= new
    try:
        yield
    finally:
        known -= new


def optimizer_states_made(within: _Within) -> AbstractContextManager[None]:
    """Have the state of optimizers, which Dynamo makes when it first meets a step, be made
    ``within()``: it is the program's (torch/_dynamo/variables/optimizer.py, ``call_method``).
    """
    variable = _optimizer_variable()
    call: Any = variable.call_method
    move: Any = variable.move_step_if_cpu

    def call_method(self: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if name != _INIT_GROUP:
            return call(self, tx, name, *args, **kwargs)
        optimizer = self.value
        init_group = getattr(optimizer, _INIT_GROUP)

        def made(*given: Any, **named: Any) -> Any:
            with within():
                return init_group(*given, **named)

        vars(optimizer)[_INIT_GROUP] = made
        try:
            return call(self, tx, name, *args, **kwargs)
        finally:
            del vars(optimizer)[_INIT_GROUP]

    def moved(self: Any) -> None:
        with within():
            move(self)

    return replaced(variable, call_method=call_method, move_step_if_cpu=moved)


def backwards_captured(within: _Within) -> AbstractContextManager[None]:
    """Have compiled autograd make the graph of a backward ``within()``.

    The engine runs the backward once with fake tensors between ``begin_capture`` and
    ``end_capture``, which closes the stack of the compiler that is made for each capture, as the
    engine does after an exception (torch/csrc/dynamo/python_compiled_autograd.cpp,
    ``ClosingTHPObjectPtr``).
    """
    import_module("torch._dynamo.compiled_autograd")
    instance = _backward_compiler()
    begin: Any = instance.begin_capture

    def begin_capture(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.stack.enter_context(within())
        return begin(self, *args, **kwargs)

    return replaced(instance, begin_capture=begin_capture)


def ahead_of_time(
    run: Callable[[fx.GraphModule, Any], Callable[..., Any]],
) -> Callable[[fx.GraphModule, Any], Any]:
    """Return a backend that has AOTAutograd and its min-cut partitioner make graphs for ``run``."""
    for name in ("torch._dynamo.backends.common", "torch._functorch.partitioners"):
        import_module(name)
    autograd, partition = _aot_autograd(), _partition()
    made: Callable[[fx.GraphModule, Any], Any] = autograd(
        fw_compiler=run, partition_fn=partition, keep_inference_input_mutations=True
    )
    return made


def sizes_forgotten() -> AbstractContextManager[None]:
    """Hide the sizes seen before, by which Dynamo makes shapes dynamic; forget those seen meanwhile
    (torch/_dynamo/pgo.py, ``get_code_state``).
    """
    state: Any = defaultdict(_pgo().CodeState)
    return replaced(_pgo(), _CODE_STATE=state, _INIT_CODE_STATE=None)


def forget_code(codes: Iterable[CodeType]) -> None:
    """Drop the compiled code of these functions; code compiled before the trace is compiled again.
    There is no way to take away one of several entries: what is invalidated stays, and counts.
    """
    for code in codes:
        _eval_frame().reset_code(code)


def keep_stashed(held: Mapping[str, object]) -> None:
    """Let what a thread holds by name outlive the thread, for which it was also stashed in C++.

    Before torch 2.12 ``_stash_obj_in_tls`` (torch/csrc/Module.cpp) gives back a reference at the
    thread's end that it never took; the next use of the object would end the process.
    """
    for name, value in held.items() if TORCH_VERSION < (2, 12) else ():
        if _is_stashed(name):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


COMPILER = "torch._dynamo"
"""The compiler's package."""
LOWERING = "torch._inductor"
"""Its second half."""
INDUCTOR = os.path.join("torch", "_inductor", "")
"""What the files of that have in their paths."""
_SYMBOLS = "torch.fx.experimental.symbolic_shapes"
_ALGEBRA = "sympy"
_ASK_COMPILER = frozenset(
    {f"torch.{private_name_if_imported('torch._compile')}", "torch.optim.optimizer"}
)
_ASKS_ALGEBRA = f"torch.{private_name_if_imported('torch._prims_common')}"
_DISABLED = "__dynamo_disable"
"""Where ``_disable_dynamo`` keeps what it calls (torch/_compile.py)."""

_NO_ALGEBRA = SimpleNamespace(Basic=type("Basic", (), {}))
"""Stands in for sympy where numbers are asked whether they are of it, which none is."""


def _disable(noted: list[Any], function: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return what calls a function, and from when there is a compiler has that leave it."""

    def disabled(*given: Any, **named: Any) -> Any:
        if COMPILER not in sys.modules:
            return function(*given, **named)
        compiler: Any = sys.modules[COMPILER]
        return compiler.disable(function, *args, **kwargs)(*given, **named)

    noted.append(function)
    return disabled


def _beside(module: str, **own: Any) -> Instead:
    """Return what has some attributes of its own, and the others of a module."""
    return Instead(lambda name: own[name] if name in own else getattr(import_module(module), name))


class NotNeeded:
    """Stands in for the compiler and for sympy, where torch's functions run without either.

    Python's shape functions, decompositions and optimizers import ``torch._dynamo`` to say that it
    is not to compile them, and ``symbolic_shapes``, with sympy, to ask whether a number is a
    symbol. That takes 1.1 and 0.3 seconds where a process does so first, and 5 ms are what the rest
    of such a first call takes. As long as neither is there nothing is compiled and no number is a
    symbol, so these imports get what says just that.
    """

    def __init__(self) -> None:
        self._disabled: list[Any] = []
        """The functions that the compiler was asked not to compile."""
        # A graph is not broken where there is none. ``import torch._dynamo`` gives ``torch``.
        disable = partial(_disable, self._disabled)
        compiler = _beside(COMPILER, disable=disable, graph_break=lambda msg="": None)
        self._torch = _beside("torch", _dynamo=compiler)

    def stand_in(self, name: str, variables: Mapping[str, Any] | None, names: Any) -> Any:
        """Return what a function gets that imports ``names`` of a module, or None for its own.
        ``variables`` are the importing module's. A function keeps nothing of what it imports.
        """
        importer = str((variables or {}).get("__name__"))
        if importer.partition(".")[0] != "torch":
            return None
        if name == COMPILER and importer in _ASK_COMPILER:
            return self._torch
        if name == _ALGEBRA and importer == _ASKS_ALGEBRA:
            return _NO_ALGEBRA
        if name == _SYMBOLS and names and all(one in _ON_NUMBERS for one in names):
            return _SYMBOLS_OF_NUMBERS
        return None

    def replacements(self, is_here: Callable[[], bool]) -> Replacements:
        """Return what gives stand-ins where ``is_here()`` is true, until the compiler is imported,
        and with it all that it imports.
        """
        if COMPILER in sys.modules:
            return []
        original = builtins.__import__

        # Its parameters have the names of those of ``__import__``: some give them by name.
        def import_(
            name: str,
            globals: Mapping[str, Any] | None = None,
            locals: Any = None,
            fromlist: Any = (),
            level: int = 0,
        ) -> Any:
            __tracebackhide__ = True  # an import that fails is the program's own
            if locals is None and name not in sys.modules:
                instead = self.stand_in(name, globals, fromlist) if is_here() else None
                if instead is not None:
                    return instead
            return original(name, globals, locals, fromlist, level)

        return [(builtins, {"__import__": import_})]

    def forget(self) -> None:
        """Let functions that were called meanwhile ask the compiler when they are called again."""
        while self._disabled:
            vars(self._disabled.pop()).pop(_DISABLED, None)


def _on_numbers(name: str, kinds: tuple[type, ...], plain: Callable[..., Any]) -> Any:
    """Return ``plain`` for numbers of these types, and torch's own function for anything else."""

    def function(*given: Any, **named: Any) -> Any:
        if not named and all(type(one) in kinds for one in given):
            return plain(*given)
        return getattr(import_module(_SYMBOLS), name)(*given, **named)

    return function


def _equal(one: Any, other: Any) -> Any:
    """Return whether two sizes, or shapes, are the same; ``sym_eq``."""
    shapes = isinstance(one, tuple | list) and isinstance(other, tuple | list)
    sizes = [*one, *other] if shapes else [one, other]
    if all(type(size) is int for size in sizes):
        return [*one] == [*other] if shapes else one == other
    return import_module(_SYMBOLS).sym_eq(one, other)


def _itself(given: Any) -> Any:
    return given


_NUMBERS = (bool, int, float)
#: As they are in torch/fx/experimental/symbolic_shapes.py for what is no symbol.
_ON_NUMBERS: dict[str, Any] = {
    **{
        name: _on_numbers(name, (bool,), _itself)
        for name in listed("""
            expect_true guard_or_false guard_or_true guard_size_oblivious statically_known_true
        """)
    },
    "guard_int": _on_numbers("guard_int", (int,), _itself),
    "guarding_hint_or_throw": _on_numbers("guarding_hint_or_throw", (bool, int), _itself),
    "has_guarding_hint": _on_numbers("has_guarding_hint", _NUMBERS, lambda given: True),
    "is_nested_int": _on_numbers("is_nested_int", _NUMBERS, lambda given: False),
    "sym_eq": _equal,
    "sym_and": _on_numbers("sym_and", (bool,), lambda *given: reduce(and_, given)),
    "sym_or": _on_numbers("sym_or", (bool,), lambda *given: reduce(or_, given)),
}
_SYMBOLS_OF_NUMBERS = SimpleNamespace(**_ON_NUMBERS)
