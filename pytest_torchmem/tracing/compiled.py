"""What a program compiles, profiled as compiled.

Dynamo runs as it does outside of a trace, on tensors without memory, and its guards, graph breaks
and recompilations are its own. What the trace has of its own is the end of it: graphs are not
compiled for a machine. At the level ``"aot"`` the graphs of AOTAutograd and its partitioner run,
operator by operator; at the level ``"inductor"`` the output code of Inductor runs, which allocates,
reuses and deletes buffers as it decided, with kernels that do nothing.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from threading import get_ident
from types import CodeType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, fx, nn

from pytest_torchmem.interception.attribution import CALL_MODULES, is_own, place_among, short_path
from pytest_torchmem.interception.interceptor import Interceptor
from pytest_torchmem.profile.timeline import Allocation, Kind, Origin
from pytest_torchmem.step.imports import eager, when_compiler_is_used
from pytest_torchmem.torch_private import compiler, module_calls
from pytest_torchmem.torch_private.patches import having, nothing_replaced
from pytest_torchmem.tracing.passes import Lowering

if TYPE_CHECKING:
    from pytest_torchmem.torch_private import inductor
    from pytest_torchmem.tracing.ahead_of_time import AheadOfTime

Level: TypeAlias = Literal["eager", "aot", "inductor"]
EAGER, AOT, INDUCTOR = LEVELS = ("eager", "aot", "inductor")
_NOT_FOLLOWED = "what torch.compile wraps was traced eagerly: the compiler failed in the trace"
_NOT_LOWERED = (
    "compiled here are the graphs of AOTAutograd, with nothing fused: Inductor did not lower them"
)
_NO_GRAPH = (
    "what torch.compile wraps runs eagerly, as outside of a trace: Dynamo makes no graph of it"
)
_CUDAGRAPHS = "triton.cudagraphs"
_NO_CUDAGRAPHS = (
    "CUDA graphs of torch.compile (triton.cudagraphs) are left out: buffers are those of the same "
    "code without them, and the private pools, which keep what graphs reserve, are not counted"
)
_CPU = torch.device("cpu")


class Compiled:
    """The compiler of one trace."""

    def __init__(self, interceptor: Interceptor, level: str | None, lowering: Lowering) -> None:
        self._interceptor = interceptor
        self._level = level
        self._lowering = lowering
        self._callbacks: dict[int, tuple[Any, compiler.Convert]] = {}
        self._backends: dict[int, _Backend] = {}
        """By the ids of their callbacks."""
        self._converted: set[int] = set()
        """Callbacks that got a frame to convert; others may run what an equal backend compiled."""
        self._codes: dict[int, CodeType] = {}
        """The code that Dynamo met, by its id."""
        self._without_graph: dict[int, str] = {}
        """The lines of calls that no graph was made of yet, by the ids of their callbacks."""
        self._with_graph: set[int] = set()
        self._stack = ExitStack()
        """What ends with the trace."""
        self._options: Callable[[], AbstractContextManager[None]] = nullcontext
        """Inductor's options, from the first graph on that is lowered."""
        self._in_forward = False
        """Whether a graph is lowered that is about to run; a backward's is later."""
        self._whole: AheadOfTime | None = None
        self._numbers: list[Tensor] = []
        """What stands for the numbers that compiled code keeps."""
        self.graphs: list[fx.GraphModule] = []
        """Those that ran at the level ``"aot"``, each forward before its backward."""
        self.levels: dict[str, str] = {}
        """The level of each line that called something compiled."""
        self.reasons: dict[str, None] = {}
        """Why something did not reach the level that was asked for."""

    @property
    def level(self) -> str:
        """The level of what ran: the lowest of what is compiled, ``"eager"`` where nothing is."""
        if self._whole is not None:
            return AOT
        if any(self._run_eagerly()):
            return EAGER
        return min(self.levels.values(), key=LEVELS.index, default=EAGER)

    def _reached(self, line: str, level: str) -> None:
        """Take note of the level of one graph of a line; the lowest of its graphs counts."""
        self.levels[line] = min(self.levels.get(line, level), level, key=LEVELS.index)

    def take(self, module: nn.Module) -> None:
        """Let a module run at the level that was asked for."""
        if isinstance(module, compiler.compiled_modules()):
            return
        if self._level == AOT:
            from pytest_torchmem.tracing.ahead_of_time import run_ahead_of_time

            self._whole = run_ahead_of_time(module, self._interceptor)
            self.graphs = self._whole.graphs
        elif self._level == INDUCTOR:
            module.compile()

    def warnings(self) -> list[str]:
        """Return what the figures of compiled code leave out, or take for something else."""
        return [*self.reasons, *(f"{at(line)}{_NO_GRAPH}" for line in self._run_eagerly())]

    def _run_eagerly(self) -> Iterator[str]:
        """Yield the lines of calls that no graph was made of, nor had been made of before."""
        made = [self._backends[key] for key in self._with_graph]
        for key, line in self._without_graph.items():
            if key in self._converted or self._backends[key] not in made:
                yield line

    @contextmanager
    def following(self) -> Iterator[None]:
        """Compile what the program compiles, on the trace's threads, from its first use on."""
        if self._level == EAGER:
            with eager(self._note_eager):
                yield
            return
        with self._stack as stack:

            def start() -> None:
                with self._interceptor.working():
                    compiler.import_compiler()
                stack.callback(self._forget)
                stack.enter_context(compiler.compiled_calls(self._called, self._compiles))
                stack.enter_context(compiler.backwards_captured(self._making_graphs))

            with when_compiler_is_used(start):
                yield

    # -- calls -------------------------------------------------------------------------------------

    def _note_eager(self, flex_attention: bool) -> None:
        # On the GPU it is told of by what stands in for its kernels.
        gpu = self._interceptor.parts.target.gpu
        if self._interceptor.threads.on_thread() and not (flex_attention and gpu is not None):
            attribution = self._interceptor.parts.attribution
            attribution.compiled.setdefault(attribution.user_line())

    def _called(self, callback: Any, flex_attention: bool) -> Any:
        """Return what converts the frames of a compiled call that begins."""
        interceptor = self._interceptor
        if not interceptor.threads.on_thread() or interceptor.mode.makes_graphs:
            return callback
        if flex_attention:
            self._note_eager(flex_attention)
            return None
        if not self._callbacks:
            with self._interceptor.working(), module_calls.module_calls_as_they_were():
                compiler.prepare()
            self._stack.enter_context(compiler.sizes_forgotten())
            self._stack.enter_context(compiler.originals_seen(*self._classes_on_gpu()))
            self._stack.enter_context(compiler.optimizer_states_made(self._running))
        if (key := id(callback)) not in self._callbacks:
            backend = self._backends[key] = _Backend(self, compiler.backend_of(callback), key)
            by_backend = compiler.with_backend(callback, backend)
            convert = compiler.around(by_backend, partial(self._convert, key))
            self._callbacks[key] = callback, convert
        return self._callbacks[key][1]

    def _compiles(self, callback: Any) -> None:
        """Take note of a call whose frames are to be compiled."""
        key = id(callback)
        if key in self._callbacks and key not in self._with_graph:
            line = self._interceptor.parts.attribution.user_line()
            self._without_graph.setdefault(key, line)

    def _classes_on_gpu(self) -> tuple[tuple[type, ...], tuple[type, ...]]:
        """Return classes of the fake GPU whose objects graphs make, and take as constants."""
        if self._interceptor.parts.target.gpu is None:
            return (), ()
        from pytest_torchmem.fake_cuda.memory import DeviceProperties

        streams: Any = (torch.Stream, torch.Event, torch.cuda.Stream, torch.cuda.Event)
        return streams, (DeviceProperties,)

    def _convert(self, key: int, convert: compiler.Convert, args: Any) -> Any:
        self._converted.add(key)
        code = args[0].f_code
        if is_own(code):
            return compiler.as_it_is(with_calls=code.co_name not in CALL_MODULES)
        if code is module_calls.step_wrapper():  # what notes an optimizer's step is called by it
            return compiler.as_it_is(with_calls=False)
        self._codes[id(code)] = code
        try:
            with compiler.hooks_passed_over(module_calls.own_step_hooks()), self._making_graphs():
                return convert(*args)
        except Exception as error:
            if not isinstance(getattr(error, "inner_exception", None), _RunsAsItIs):
                if not compiler.is_internal(error):
                    raise
                line = self._interceptor.parts.attribution.user_line()
                self._reached(line, EAGER)
                self._without_graph.clear()
                self.reasons.setdefault(f"{at(line)}{_NOT_FOLLOWED} ({_first_sentence(error)})")
            return compiler.as_it_is(with_calls=True)

    @contextmanager
    def _making_graphs(self) -> Iterator[None]:
        interceptor = self._interceptor
        compiling = interceptor.mode._replace(aside=True, makes_graphs=True, compiles=True)
        inside = interceptor.inside
        if interceptor.parts.target.gpu is None:  # tensors are where torch's own functions say
            inside = get_ident()
        # What it allocates is gone when it is done, and no part of a step.
        with (
            having(interceptor, inside=inside, mode=compiling),
            nothing_replaced(nn.Module),
            module_calls.module_calls_as_they_were(),
        ):
            yield

    def _running(self) -> AbstractContextManager[None]:
        """Run operators of the program while its graphs are being made."""
        mode = self._interceptor.mode
        its_own = mode._replace(aside=False, makes_graphs=False, compiles=False)
        return having(self._interceptor, inside=0, mode=its_own)

    def _forget(self) -> None:
        compiler.forget_code(self._codes.values())
        self._codes.clear()
        self._callbacks.clear()
        self._numbers.clear()

    # -- levels ------------------------------------------------------------------------------------

    def compile(self, key: int, original: Any, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Compile a graph of Dynamo that a callback was given."""
        self._with_graph.add(key)
        broken_at = place_among(compiler.frames_of_break(graph))
        self._interceptor.parts.attribution.facts.compiled(compiler.asked_of(original), broken_at)
        self._without_graph.pop(key, None)
        # What C++ makes while a graph is compiled is where tensors of the graph are.
        mode = self._interceptor.mode._replace(graph_on_host=not compiler.is_on_gpu(graph))
        with self._interceptor.in_mode(mode):
            found = self._compile(original, graph, inputs)
        self._keep_numbers(graph)
        return found

    def _compile(self, original: Any, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Compile a graph at the level that the trace reaches."""
        # Few traces compile anything, and no other waits for these modules.
        from pytest_torchmem.advice.changes import change_graph

        change_graph(graph)
        line = self._interceptor.parts.attribution.user_line()
        gpu = self._interceptor.parts.target.gpu
        if gpu is not None and compiler.calls_flex_attention(graph):
            self._reached(line, EAGER)  # what stands in for its kernels is counted
            raise _RunsAsItIs
        if getattr(original, "compiler_name", None) != INDUCTOR:
            if self._level is None:  # the program's own backend, which runs operators
                name = str(getattr(original, "compiler_name", ""))
                self._reached(line, AOT if name.startswith(AOT) else EAGER)
                return original(graph, inputs)
        elif self._level != AOT and self._lowering.reason:
            self._not_lowered(line, self._lowering.reason)
        elif self._level != AOT:
            kept = fx.GraphModule(graph, copy.deepcopy(graph.graph))
            try:
                found = self._by_inductor(original, graph, inputs)
                self._reached(line, INDUCTOR)
                return found
            except compiler.restarts():
                raise
            except Exception as error:
                self._not_lowered(line, _first_sentence(error))
                graph = kept
        self._reached(line, AOT)
        return compiler.ahead_of_time(self._run_as_it_is)(graph, inputs)

    def _not_lowered(self, line: str, why: str) -> None:
        self.reasons.setdefault(f"{at(line)}{_NOT_LOWERED} ({why})")

    def _by_inductor(self, original: Any, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        from pytest_torchmem.torch_private import inductor

        interceptor, stack = self._interceptor, self._stack
        host, on_gpu = interceptor.parts.target.host, interceptor.parts.target.gpu is not None
        if self._options is nullcontext:
            with interceptor.working():
                inductor.prepare()
            if on_gpu:
                stack.enter_context(inductor.gpu_seen())
            hooks = inductor.Hooks(self._allocate, self._written)
            stack.enter_context(inductor.output_code_run(hooks, interceptor.threads.on_thread))
            self._options = partial(inductor.options, host.capability, host.threads, on_gpu)
        for name in filter(original.config.get, inductor.TIMED):
            self.reasons.setdefault(
                f"{name} of torch.compile is left out: the default choices are counted"
            )
        if on_gpu and original.config.get(_CUDAGRAPHS):
            self.reasons.setdefault(_NO_CUDAGRAPHS)
        self._lowering.used = self._in_forward = True
        try:
            with self._options():
                return inductor.compile(graph, inputs, original.config, self._lowers_one, on_gpu)
        finally:
            self._in_forward = False

    @contextmanager
    def _lowers_one(self) -> Iterator[None]:
        # Options are those of a thread, and a backward is compiled on the one that it runs on.
        try:
            with self._making_graphs(), self._options():
                yield
        except Exception as error:
            if not self._in_forward:
                self._lowering.failed(_first_sentence(error))
            raise

    def _keep_numbers(self, graph: fx.GraphModule) -> None:
        """Book the numbers that a graph of Dynamo keeps; its tensors are fake and take nothing."""
        interceptor = self._interceptor
        if interceptor.parts.target.gpu is not None:  # they are on the host
            return
        with interceptor.working():
            numbers = compiler.numbers_kept_for(graph)

        def of_compiler(entry: Allocation) -> Allocation:
            origin = entry.origin._replace(operator="torch.compile")
            return entry._replace(kind=Kind.OTHER, origin=origin)

        with interceptor.parts.ledger.changing(of_compiler), self._running():
            self._numbers += [torch.empty((), dtype=one.dtype) for one in numbers if one.numel()]

    def _run_as_it_is(self, graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        from pytest_torchmem.tracing.ahead_of_time import NamedGraph

        self.graphs.append(graph)

        def run(args: list[Any]) -> Any:
            return NamedGraph(graph).boxed_run(args)

        return compiler.given_a_list(run)

    # -- what output code calls --------------------------------------------------------------------

    def _allocate(
        self,
        buffer: "inductor.OutputBuffer",
        device: str,
        size: Any,
        stride: Any,
        dtype: torch.dtype,
        pinned: bool,
    ) -> Tensor:
        """Make a buffer, which is for the operators that it holds the results of."""
        with self._interceptor.parts.ledger.changing(
            lambda entry: entry._replace(origin=_origin(entry.origin, buffer))
        ):
            return torch.empty_strided(size, stride, dtype=dtype, device=device, pin_memory=pinned)

    def _written(self, kernel: str, tensors: Sequence[Tensor]) -> None:
        self._interceptor.parts.values.forget(tensors)


def at(line: str) -> str:
    """Return what stands before a sentence about a line, which is not always known."""
    return f"{line}: " if line else ""


def _first_sentence(error: Exception) -> str:
    # Dynamo and Inductor put a line about the backend before what it raised
    # (torch/_dynamo/exc.py, ``BackendCompilerFailed``).
    inner: object = getattr(error, "inner_exception", None)
    while isinstance(inner, Exception):
        error, inner = inner, getattr(inner, "inner_exception", None)
    told = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(" :.")
    return f"{told:.200}" if told else type(error).__name__


class _RunsAsItIs(Exception):
    """Raised for a graph whose frame is not to be compiled."""


class _Backend:
    """Compiles the graphs of one trace, instead of a backend of the program."""

    def __init__(self, compiled: Compiled, original: Any, key: int) -> None:
        self._compiled, self._original, self._key = compiled, original, key

    def __eq__(self, other: object) -> bool:
        # Code that one backend has compiled is run for others that are equal to it: layers that are
        # compiled one by one share theirs (torch/csrc/dynamo/extra_state.cpp, ``backend_match``).
        if not isinstance(other, _Backend):
            return NotImplemented
        return bool(self._compiled is other._compiled and self._original == other._original)

    def __hash__(self) -> int:
        return id(self._compiled)

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        return self._compiled.compile(self._key, self._original, graph, inputs)


def _origin(origin: Origin, buffer: "inductor.OutputBuffer") -> Origin:
    """Return the origin of a buffer, where Inductor knows more than the call of the graph tells."""
    if not buffer.name:
        return origin
    return origin._replace(
        operator=buffer.operators or origin.operator,
        line=f"{short_path(buffer.file)}:{buffer.line}" if buffer.file else origin.line,
    )
