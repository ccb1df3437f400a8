"""What a program has beside tensors: modules and optimizers, threads and processes, fake modes.

What it is about to change of modules and optimizers that it came with (``Module.to``,
``fully_shard``, ``DTensor`` parameters, hooks, wrappers around parts) is noted before. So each
trace of a function, for several devices or several ranks, begins with the same model. Threads that
a traced program starts are in the trace too.

Programs may start the processes of their world themselves, rather than by ``torchrun``:
``torch.multiprocessing.spawn`` runs a function in so many processes, each of which is told its
number. In a trace with a world one of them is there: the function runs in it, with that number.

What runs in a ``FakeTensorMode`` of the program (``torch.export``, ``DTensor``, ``make_fx``)
allocates nothing, and has fake tensors whose kernels are looked up by keys that the trace's is not
among (torch/csrc/utils/python_dispatch.cpp). So nothing is intercepted while the program is in one.
"""

import _thread
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial, wraps
from multiprocessing.process import BaseProcess
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.distributed
import torch.multiprocessing
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.multiprocessing.spawn import (
    ProcessContext,
    ProcessExitedException,
    ProcessRaisedException,
)
from torch.optim import Optimizer

from pytest_torchmem.errors import UsageError
from pytest_torchmem.interception.context import Functions, TraceContext, instead_of
from pytest_torchmem.journal.journal import variables
from pytest_torchmem.operators.spec import spec_of
from pytest_torchmem.step import imports, trees
from pytest_torchmem.targets.world import World
from pytest_torchmem.torch_private import dispatcher, module_calls, patches, tensors
from pytest_torchmem.torch_private.keys import FAKE, excluded, is_excluded, set_excluded
from pytest_torchmem.torch_private.modes import fakes_of_meta, makes_fake_tensors

_MAKING = ("__init__", "__setstate__")
_CHANGING = (
    module_calls.APPLIES,
    "__delattr__",
    "register_forward_pre_hook",
    "register_forward_hook",
    "register_full_backward_pre_hook",
    "register_full_backward_hook",
)


class Changes(Functions):
    """What is about to be changed of what the program came with."""

    def __init__(self, trace: TraceContext) -> None:
        super().__init__(trace)
        changing, making = partial(_seen_by, self._note), partial(_seen_by, self._making)
        self._methods = module_calls.ModuleMethods(
            {**dict.fromkeys(_CHANGING, changing), **dict.fromkeys(_MAKING, making)}
        )
        """What has to be seen of modules: how they are made, hooked, moved and converted."""
        self._all_applied = False
        """Whether there was none before the trace."""
        self._made: dict[int, ReferenceType[nn.Module]] = {}
        """The trace's own modules, by their ids; some are gone."""
        self._applied: dict[int, ReferenceType[Any]] = {}
        """What stands in the tables of modules to which composable functions were applied."""
        self._tables: dict[str, module_calls.Hooks] = {}

    def begin(self) -> None:
        """Forget what the trace before has made."""
        self._made, self._applied = {}, {}
        for hooks in self._tables.values():
            hooks.clear()

    def replacements(self) -> patches.Replacements:
        """Return what sees that optimizers are made, composable functions applied, and parameters
        and modules registered.
        """
        applied = patches.applied_item()
        self._all_applied = applied is None
        found = [] if applied is None else [(applied, {"__init__": self._applying})]
        owner, self._tables = module_calls.registration_tables(self._note, self._note)
        data = property(tensors.TensorBase.data.__get__, self._give_data)
        return [*super().replacements(), *found, (owner, self._tables), (Tensor, {"data": data})]

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Take note of changes, in a trace that gives back what the program came with."""
        if self._trace.own is None:
            yield
            return
        told = patches.having(self._trace.own.gone, tell=self._trace.strike_unless_used)
        with patches.having(self._trace, note_module=self._whole), told, self._methods:
            yield

    # -- what is seen ------------------------------------------------------------------------------

    @instead_of(Optimizer, "__init__")
    def make_optimizer(
        self, original: Any, optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> None:
        """Make an optimizer, which is the trace's own."""
        self._note_new(optimizer)
        original(optimizer, *args, **kwargs)

    @instead_of(Optimizer, "__setstate__")
    def restore_optimizer(self, original: Any, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Make one of a copy or a pickle, or load into one that is there."""
        if not vars(optimizer):
            self._note_new(optimizer)
        original(optimizer, state)

    def _note_new(self, optimizer: Optimizer) -> None:
        if self._trace.own is not None and self._trace.on_thread():
            self._trace.own.optimizers.add(optimizer)

    def _applying(self, item: Any) -> None:
        """Note that a composable function is applied, such as ``fully_shard``."""
        if self._trace.on_thread():
            self._applied[id(item)] = ref(item)

    def _making(self, module: nn.Module) -> None:
        if self._trace.on_thread():
            self._made[id(module)] = ref(module)

    def _is_brought(self, module: nn.Module) -> bool:
        """Whether a module was there before the trace, on whose thread the caller is. Dynamo
        follows the hooks of a module that is made in compiled code, such as a slice of a
        ``ModuleList``; its graph would break at what they ask for.
        """
        if is_dynamo_compiling() or self._trace.off():
            return False
        made = self._made.get(id(module))
        return made is None or made() is not module

    # -- what is noted -----------------------------------------------------------------------------

    def _give_data(self, tensor: Tensor, data: Tensor) -> None:
        """Give a tensor other data (``p.data = ...``, ``Module.to``)."""
        before = None
        if not self._trace.off() and self._trace.own is not None and self._trace.brought(tensor):
            before = self._trace.own.note(tensor)
        tensors.TensorBase.data.__set__(tensor, data)
        if before is not None:
            self._trace.strike_unless_used(before.own, 1)

    def _whole(self, module: nn.Module) -> None:
        """Note a module and all inside it, whose parameters are about to be replaced."""
        for one in module.modules():
            self._note(one)

    def _note(self, module: nn.Module, *_: Any) -> None:
        """Note a module that is about to be changed, and could not be reached before."""
        own = self._trace.own
        if own is not None and self._is_brought(module) and not own.knows(module):
            own.note_other(module, dict(self._applied_before(vars(module))))

    def _applied_before(self, own: dict[str, Any]) -> Iterator[tuple[str, dict[Any, Any]]]:
        """Yield the tables of composable functions, without what was applied in the trace."""
        names, states = patches.name_table(), patches.state_table()
        if names not in own:
            return
        new = {
            name
            for name, item in own[names].items()
            if self._all_applied
            or ((applied := self._applied.get(id(item))) is not None and applied() is item)
        }
        yield names, {name: item for name, item in own[names].items() if name not in new}
        kept = {key: state for key, state in own[states].items() if key.__name__ not in new}
        yield states, kept


def _seen_by(see: Callable[[nn.Module], None], original: Any) -> Callable[..., Any]:
    @wraps(original)
    def method(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        see(module)
        return original(module, *args, **kwargs)

    return method


_RUN = "run"
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Threads(Functions):
    """Runs threads and submitted calls of the trace's threads inside of the trace."""

    @instead_of(threading.Thread)
    def start(self, original: Any, thread: threading.Thread) -> None:
        if self._trace.off() or isinstance(thread, imports.ThreadApart):
            original(thread)
            return
        attributes = vars(thread)
        own = attributes.get(_RUN)
        run = self._in_trace(thread.run)

        def once() -> None:
            give_back()
            run()

        def give_back() -> None:
            attributes.pop(_RUN, None)
            if own is not None:
                attributes[_RUN] = own

        attributes[_RUN] = once
        try:
            original(thread)
        except BaseException:
            give_back()
            raise

    @instead_of(_thread, "start_new_thread")
    def start_bare(self, original: Any, function: Callable[..., Any], *args: Any) -> int:
        if not self._trace.off():
            function = self._in_trace(function)
        number: int = original(function, *args)
        return number

    @instead_of(ThreadPoolExecutor)
    def submit(
        self,
        original: Any,
        pool: ThreadPoolExecutor,
        function: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Future[Any]:
        """Have a thread of a pool, which may be there since before the trace, run a call in it."""
        if not self._trace.off():
            function = self._in_trace(function)
        made: Future[Any] = original(pool, function, *args, **kwargs)
        return made

    @instead_of(queue.Queue)
    def put(
        self, original: Any, to: queue.Queue[Any], item: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Take note of tensors that a thread which is there since before the trace hands over."""
        if not self._trace.on_thread():
            for tensor in trees.tensors_in(item):
                if type(tensor) in _PLAIN and tensor.layout is torch.strided:
                    storage = tensor.untyped_storage()
                    self._trace.handed[storage._cdata] = storage
        original(to, item, *args, **kwargs)

    def _in_trace(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return partial(_run, self._trace.joined_by_new(), function)


def _run(joined: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with joined():
        return function(*args, **kwargs)


class FakeTensors(Functions):
    """Leaves a trace alone while its thread is in a ``FakeTensorMode``."""

    def __init__(self, trace: TraceContext) -> None:
        super().__init__(trace)
        self._before: list[bool] = []
        """Whether the trace's key was excluded when each of the modes was entered."""

    @instead_of(patches.push_mode)
    def enter(self, original: Any, mode: Any) -> Any:
        """Make a mode the thread's innermost one."""
        result = original(mode)
        if not self._trace.on_thread():
            return result
        if makes_fake_tensors(mode):
            self._before.append(is_excluded(FAKE))
            set_excluded(FAKE, True)
        elif not self._trace.inside:  # a mode of the program, not one of the profiler's own
            dispatcher.reach_past_modes()
        return result

    @instead_of(patches.pop_mode)
    def leave(self, original: Any, *args: Any) -> Any:
        """Take a mode away."""
        mode = original(*args)
        if makes_fake_tensors(mode) and self._trace.on_thread() and self._before:
            set_excluded(FAKE, self._before.pop())
        return mode

    @instead_of(patches.set_mode)
    def put(self, original: Any, mode: Any) -> Any:
        """Put back a mode that was taken away for a while."""
        result = original(mode)
        if makes_fake_tensors(mode) and self._trace.on_thread():
            set_excluded(FAKE, True)
        return result

    @instead_of(patches.unset_mode)
    def take(self, original: Any, kind: Any) -> Any:
        """Take a mode away for a while."""
        mode = original(kind)
        if makes_fake_tensors(mode) and self._trace.on_thread():
            set_excluded(FAKE, self._trace.inside)
        return mode

    @instead_of(patches.print_tensor)
    def text(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what a tensor is printed as.

        Modes are left meanwhile, also for an error that C++ then drops (the next overload is
        tried). A guard that is made meanwhile ends after they are entered again, and puts back the
        keys that were excluded when it began (torch/_tensor_str.py, ``_str``).
        """
        if not self._trace.on_thread():
            return original(*args, **kwargs)
        with excluded(FAKE, is_excluded(FAKE)):
            return original(*args, **kwargs)

    @instead_of(patches.fallback_kernel)
    def run(
        self, original: Any, mode: Any, func: Any, flat_args: Any, args_spec: Any, error: Exception
    ) -> Any:
        """Run an operator without a kernel for ``meta``: the device's would run on zeros."""
        first = next(iter(trees.argument_tensors(flat_args)), None)
        geometry = None
        if first is not None and self._trace.on_thread():
            geometry = spec_of(func).on(first.device.type).meta
        if geometry is None:
            return original(mode, func, flat_args, args_spec, error)
        return fakes_of_meta(mode, func, geometry, flat_args, args_spec)


LAUNCHER = "torch.distributed.launcher.api"
_WORKERS = "torch.utils.data."


class Processes(Functions):
    """What starts the processes of a world."""

    # The second module calls its own, whoever has imported ``spawn`` by name.
    @instead_of(torch.multiprocessing)
    @instead_of(sys.modules["torch.multiprocessing.spawn"])
    def start_processes(
        self,
        original: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        nprocs: int = 1,
        join: bool = True,
        *rest: Any,
        **others: Any,
    ) -> ProcessContext | None:
        """Run the function as the traced process; without a world start processes."""
        trace = self._trace
        world = None if trace.off() else trace.target.world
        if world is None:
            try:
                return original(fn, args, nprocs, join, *rest, **others)  # type: ignore[no-any-return]
            except (ProcessExitedException, ProcessRaisedException) as error:
                if trace.off():
                    raise
                raise UsageError(
                    f"{trace.user_line()}: a process that the program started has failed, and the "
                    "trace sees nothing of it. To trace one of them give "
                    f"world_size={max(nprocs, 2)}: the function then runs as that rank, in this "
                    "process"
                ) from error
        number = _number(trace, world, nprocs)
        with _as_process():
            fn(number, *args)
        return None if join else ProcessContext([], [])

    @instead_of(BaseProcess)
    def start(self, original: Any, process: Any) -> Any:
        """Warn of a process that the trace does not see."""
        trace, target = self._trace, getattr(process, "_target", None)
        of_loader = str(getattr(target, "__module__", "")).startswith(_WORKERS)
        if trace.target.world is not None and not trace.off() and not of_loader:
            trace.values.warn(
                "starts a process, and what that takes is not in this profile; "
                "torch.multiprocessing.spawn runs its function as the rank that is traced"
            )
        return original(process)


def launch_agent(
    trace: TraceContext,
    original: Any,
    config: Any,
    entrypoint: Any,
    args: Any,
    *rest: Any,
    **others: Any,
) -> Any:
    """Run the function of an ``elastic_launch``, as launchers of notebooks do, as this process."""
    world = None if trace.off() else trace.target.world
    if world is None or not callable(entrypoint):
        return original(config, entrypoint, args, *rest, **others)
    _number(trace, world, config.nproc_per_node)
    result = None
    with _as_process():
        result = entrypoint(*args)
    return {world.rank: result}


def _number(trace: TraceContext, world: World, processes: int) -> int:
    """Return which of the processes that a program starts the traced one is. They are those of a
    node, or all of a world.
    """
    node = int(world.environment["LOCAL_WORLD_SIZE"])
    if processes == node:
        return world.local_rank
    if processes == world.size:
        return world.rank
    each = f" ({node} on its node)" if node != world.size else ""
    raise UsageError(
        f"{trace.user_line()}: the program starts {processes} processes in a trace of "
        f"{world}{each}: trace with world_size={processes}, or let it start as many"
    )


@contextmanager
def _as_process() -> Iterator[None]:
    """End what a process leaves behind: its variables, its process group, its exit."""
    had_group = torch.distributed.is_initialized()
    try:
        with variables({}):
            yield
    except SystemExit as ended:
        if ended.code:
            raise
    finally:
        if torch.distributed.is_initialized() and not had_group:
            torch.distributed.destroy_process_group()
