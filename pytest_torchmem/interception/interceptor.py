"""The interception of every operator that would reach a kernel.

A hollow tensor is an ordinary CPU tensor whose storage has its true size and no memory. Operators
arrive here below autograd, and each is handed to whoever runs its kind: ``kernels.py`` stands in
for kernels, ``layouts/`` runs operators on tensors that are not strided, ``conversion.py`` brings
real tensors in.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.interception import kernels, layouts, phases, plan, sparse
from pytest_torchmem.interception.attribution import Attribution, runs_profiler
from pytest_torchmem.interception.decompose import Parts, RunMode
from pytest_torchmem.interception.ledger import Ledger
from pytest_torchmem.interception.placement import run_on_host
from pytest_torchmem.interception.values.contents import Values
from pytest_torchmem.interception.values.known import NotKnown
from pytest_torchmem.journal.journal import seed_what_is_imported
from pytest_torchmem.operators.registry import OperatorKind
from pytest_torchmem.operators.spec import OperatorSpec, spec_of
from pytest_torchmem.step.imports import imports_within
from pytest_torchmem.step.trees import Args, Kwargs, argument_tensors, replace_tensors
from pytest_torchmem.targets.target import Target
from pytest_torchmem.torch_private import keys, modes, patches
from pytest_torchmem.torch_private.dispatcher import interception, run_outside
from pytest_torchmem.torch_private.kernels import run_composite_implicit
from pytest_torchmem.torch_private.keys import FAKE, OpOverload, is_excluded, set_excluded
from pytest_torchmem.torch_private.tensors import nowhere, storage_address

_CPU = torch.device("cpu")
_LEAF = OperatorKind.LEAF
_WRAPS = "_c10d_functional::_wrap_tensor_autograd"
"""Makes a subclass that waits for a collective of a tensor, and no storage
(torch/distributed/_functional_collectives.py)."""
_LOADS_LIBRARY = frozenset({"bitsandbytes"})
"""Packages that load a library for the GPU as they are imported: they see the true machine."""
_COMES_WITH_CUDA = {
    "triton": ". torch for CUDA brings triton; a trace needs it installed, but no GPU: on Linux, "
    "pip install triton"
}
"""What to do about a package that is missing, by its name."""


class _Working:
    """A context in which the profiler itself is at work; entered for every tensor of a model."""

    __slots__ = ("_before", "_interceptor", "_lock", "_modes")

    def __init__(self, interceptor: "Interceptor") -> None:
        self._interceptor = interceptor

    def __enter__(self) -> None:
        interceptor = self._interceptor
        self._lock = interceptor.threads.begin_turn()
        self._before = interceptor.inside, is_excluded(FAKE)
        interceptor.inside = get_ident()
        set_excluded(FAKE, True)
        self._modes = modes.NoFunctionModes()
        self._modes.__enter__()

    def __exit__(self, *error: object) -> None:
        interceptor, (inside, excluded) = self._interceptor, self._before
        try:
            self._modes.__exit__(*error)
        finally:
            set_excluded(FAKE, excluded)
            interceptor.inside = inside
            self._lock.release()


class _Placing:
    """A context in which outputs are made on a device; entered for each tensor made of nothing."""

    __slots__ = ("_before", "_device", "_interceptor", "_lock")

    def __init__(self, interceptor: "Interceptor", device: torch.device | None) -> None:
        self._interceptor, self._device = interceptor, device

    def __enter__(self) -> None:
        interceptor = self._interceptor
        self._lock = interceptor.threads.begin_turn()
        self._before = interceptor.mode
        interceptor.mode = self._before._replace(placed_on=self._device)

    def __exit__(self, *_: object) -> None:
        self._interceptor.mode = self._before
        self._lock.release()


class Interceptor:
    """Runs operators on hollow tensors; the fallback of the Fake key for one trace."""

    def __init__(
        self,
        target: Target,
        ledger: Ledger,
        attribution: Attribution,
        alone: phases.References | None,
        values: Values = Values.GUESSED,
        *,
        real_host: bool = False,
    ) -> None:
        self.parts = Parts(target, ledger, attribution, values)
        self.real_host = real_host
        """Whether the host's tensors are real: only what is on the GPU, or comes from there, is
        hollow."""
        self.path_of: Callable[[str], Callable[..., Any] | None] = lambda name: None
        """Returns what runs a composite operator as the GPU does, by its name."""
        self.threads = phases.TraceThreads()
        self.mode = RunMode()
        self.arrived: dict[int, Any] = {}
        """Signals that wait for the end of an operator (``HandlersDeferred``)."""
        self.inside = 0
        """The thread on which the profiler itself is at work, and tensors answer as torch made
        them; 0 for none."""
        self._importing: set[int] = set()
        """Threads that are importing a module."""
        self._specs: dict[int, OperatorSpec] = {}
        """By the ids of their overloads, which they hold; an overload's own hash is Python's."""
        self._layouts = layouts.Layouts(self, self.parts)
        self.kernels = kernels.Kernels(self, self.parts, self._layouts, alone)
        self._let_pass: Callable[[OpOverload], None]
        parts = self.parts
        self._numbers = parts.numbers
        self.threads.swap(parts.attribution, parts.numbers, parts.placement, parts.phases)
        self.threads.swap(*parts.streams, *ledger.devices.values(), self.kernels.sums)
        leaving = parts.numbers.settle, parts.phases.leave, ledger.give_handles_back
        self.threads.when_leaving += leaving

    # -- entry -------------------------------------------------------------------------------------

    def __call__(self, overload: OpOverload, *args: Any, **kwargs: Any) -> Any:
        """Run one operator that would have reached a kernel."""
        if modes.function_modes():
            # Below the dispatcher torch has none: a default device is not for what is made here.
            with modes.NoFunctionModes():
                return self(overload, *args, **kwargs)
        if modes.jit_tracing() is not None:
            if overload is modes.CONVOLUTION:
                return modes.convolution_for_jit(args)
            # It has written the operator down; what is asked of tensors here is not its business.
            with modes.not_jit_tracing():
                return self(overload, *args, **kwargs)
        thread, threads = get_ident(), self.threads
        lock = threads.locks.get(thread) or threads.adopt(thread)
        if lock is None:
            return run_outside(overload, args, kwargs)
        lock.acquire()
        if thread != threads.last and not threads.switch(thread):
            lock.release()
            return run_outside(overload, args, kwargs)
        set_excluded(FAKE, True)
        was_inside, self.inside = self.inside, thread
        try:
            if self.mode.aside:
                return self._run_aside(overload, args, kwargs)
            if (
                self.real_host or (self._importing and thread in self._importing)
            ) and self._is_of_the_host(args, kwargs):
                return run_on_host(overload, args, kwargs)
            spec = self._specs.get(id(overload))
            if spec is None:
                if keys.is_view(overload) or keys.is_only_python(overload):
                    # Numbers do not settle: autograd makes views before the node of an operator in
                    # place stands.
                    self._let_pass(overload)
                    with self.intercepting():
                        return overload(*args, **kwargs)
                spec = self._specs[id(overload)] = self._spec(overload)
            numbers = self._numbers
            if numbers.pending or numbers.are_hidden:
                numbers.settle()
            if self.real_host:
                return self._run_beside_host(spec, args, kwargs)
            if spec.kind is _LEAF:
                return self.kernels.run(spec, args, kwargs)
            with modes.DisableTorchFunctionSubclass():
                return self._run_specially(spec, args, kwargs)
        except plan.SubclassAsked:
            with modes.DisableTorchFunctionSubclass():
                return self.kernels.run(self._specs[id(overload)], args, kwargs)
        finally:
            self.inside = was_inside
            set_excluded(FAKE, False)
            lock.release()
            while self.arrived and not was_inside:
                number, (handler, _) = self.arrived.popitem()
                handler(number, sys._getframe(1))

    def _run_aside(self, overload: OpOverload, args: Any, kwargs: Kwargs) -> Any:
        """Run an operator on the host, on what is known; raise ``NotKnown`` where it is not. A
        compiler's own tensors, of constants that it folds, are real. It waits for the program's.
        """
        if self.mode.compiles:
            if spec_of(overload).record.waits:
                self.kernels.in_flight.wait(args[0])
            args = tuple(map(_on_host, args))
            return overload(*args, **{name: _on_host(value) for name, value in kwargs.items()})
        args, kwargs = replace_tensors((args, kwargs), self.parts.values.known_value)
        if kwargs.get("device") is not None:
            kwargs["device"] = _CPU
        return overload(*args, **kwargs)

    def _spec(self, overload: OpOverload) -> OperatorSpec:
        """Return what is to be known of an operator on this target."""
        spec, device = spec_of(overload), self.parts.target.device.type
        if spec.name == _WRAPS:
            return spec.of_kind(OperatorKind.NATIVE)
        taught = spec.on(device).taught
        if taught is not None and taught.describes_kernel:
            return spec.of_kind(OperatorKind.LEAF, opaque=True)
        if self.path_of(spec.name) is not None:
            return spec.of_kind(OperatorKind.DECOMPOSED)
        if spec.kind is OperatorKind.DECOMPOSED and spec.one_kernel_on(device):
            return spec.of_kind(OperatorKind.LEAF)
        return spec

    def _run_specially(self, spec: OperatorSpec, args: Args, kwargs: Any) -> Any:
        kind, parts = spec.kind, self.parts
        run = self._layouts.find(spec, args, kwargs)
        if run is not None:
            parts.phases.find()
            return run(spec, args, kwargs)
        if kind is OperatorKind.DECOMPOSED:
            path = self.path_of(spec.name)
            if path is not None and not keys.is_composite_implicit(spec.overload):
                own, tensors = spec_of(spec.overload), argument_tensors((args, kwargs))
                if own.kind is _LEAF and tensors:  # the kernel of the host, if the first is there
                    record = parts.ledger.records.get(storage_address(tensors[0]))
                    if record is None or record.ledger.device == _CPU:
                        return self.kernels.run(own, args, kwargs)
            with self.intercepting():
                if path is not None:
                    return path(*args, **kwargs)
                return run_composite_implicit(spec.overload, *args, **kwargs)
        if kind is OperatorKind.NATIVE:
            if spec.record.waits:
                self.kernels.in_flight.wait(args[0])
            return spec.overload(*args, **kwargs)
        if kind is OperatorKind.PASS:
            with suppress(NotKnown):  # it raises or makes nothing, where the values are known
                given = replace_tensors((args, kwargs), parts.values.known_value)
                spec.overload(*given[0], **given[1])
            made_of = spec.cpu.decomposition  # of both devices
            if made_of is not None and not args[0].is_meta:
                with self.intercepting():
                    made_of(args, kwargs)
            return None
        if kind is OperatorKind.ZERO:
            return self.kernels.zero_tensor(spec, args, kwargs)
        if kind is OperatorKind.QUANTIZED:
            return self.kernels.quantized(spec, args, kwargs)
        if kind is OperatorKind.SCALAR:
            return self.kernels.item(spec, args[0])
        if kind is OperatorKind.LIFT:
            if nowhere().touched():  # where no tensor has memory: C++ made this one of such data
                nowhere().forget()
                raise parts.values.unknown("a tensor is made of tensors of unknown values")
            lifted = parts.conversion.lift(args[0], self.mode.placed_on or _CPU, sys._getframe(2))
            if self.mode.placed_on is None and parts.target.gpu is not None:
                parts.placement.guess(lifted)
            return lifted
        return self.kernels.resize(spec, args, kwargs)

    def _run_beside_host(self, spec: OperatorSpec, args: Args, kwargs: Kwargs) -> Any:
        """Run an operator that has to do with the GPU, among tensors of the host that are real.

        These are met anew by each operator: between two, the program may write to their memory. One
        that another is made of, or copies by, leaves it what it has met.
        """
        conversion = self.parts.conversion
        met = len(conversion.met)
        try:
            if spec.kind is OperatorKind.LEAF:
                result = self.kernels.run(spec, args, kwargs)
            else:
                result = self._run_specially(spec, args, kwargs)
            if spec.writes:
                for tensor in argument_tensors(spec.all_written(args, kwargs)):
                    for part in sparse.parts_of(tensor):
                        conversion.write_back(part)
            return result
        finally:
            conversion.part(met)

    def forget_kernels(self) -> None:
        """Let a trace that is over be freed at once: these refer back to it. The garbage collector
        would find thousands of objects that the first refers to.
        """
        if self.threads.were_one:  # no other thread is at an operator
            del self.kernels, self._layouts

    # -- what comes here, and what does not --------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run every operator of the trace's threads that would reach a kernel."""
        threads = self.threads
        with (
            interception(self) as self._let_pass,
            imports_within(self._importing_a_module, seed_what_is_imported),
        ):
            threads.begin()
            try:
                yield
            finally:
                threads.end()

    @contextmanager
    def intercepting(self) -> Iterator[None]:
        """Let operators issued inside of this one come here again."""
        was_inside, self.inside = self.inside, 0
        set_excluded(FAKE, False)
        try:
            yield
        finally:
            self.inside = was_inside
            set_excluded(FAKE, True)
            if self.threads.last != was_inside:  # it started others, and waited for them
                self.threads.switch(was_inside)

    def is_at_work(self, frame: FrameType | None) -> bool:
        """Return whether a signal that arrives in a frame would break into the profiler."""
        return self.inside == get_ident() or runs_profiler(frame)

    def working(self) -> AbstractContextManager[None]:
        """Let the profiler itself use tensors: nothing is intercepted, devices are torch's own."""
        return _Working(self)

    def placing_on(self, device: torch.device | None) -> AbstractContextManager[None]:
        """Make outputs on ``device`` rather than where their inputs are."""
        return _Placing(self, device)

    def in_mode(self, mode: RunMode) -> AbstractContextManager[None]:
        return patches.having(self, mode=mode)

    @contextmanager
    def _importing_a_module(self, name: str) -> Iterator[None]:
        """Let a module make real tensors on the host: it keeps them when the trace is over."""
        thread = get_ident()
        was_importing = thread in self._importing
        self._importing.add(thread)
        loads_library = name.partition(".")[0] in _LOADS_LIBRARY
        try:
            with self.working() if loads_library else nullcontext():
                yield
        except ModuleNotFoundError as error:
            if error.name in _COMES_WITH_CUDA and self.parts.target.gpu is not None:
                error.msg += _COMES_WITH_CUDA[error.name]
            raise
        finally:
            if not was_importing:
                self._importing.discard(thread)

    def _is_of_the_host(self, args: Args, kwargs: Kwargs) -> bool:
        """Whether an operator works on real tensors alone, and makes more of them on the host."""
        if self.mode.placed_on is not None and self.mode.placed_on != _CPU:
            return False
        tensors = argument_tensors((args, kwargs))
        if not self.real_host:
            try:
                return not any(self._is_hollow(tensor) for tensor in tensors)
            except (RuntimeError, NotImplementedError):  # a tensor without storage: sparse, …
                return False
        if self.kernels.decompositions.running:  # a part of an operator on what is on the GPU
            return False
        placement = self.parts.placement
        if not tensors:
            asked = kwargs.get("device") if self.mode.placed_on is None else None
            on_host = placement.last is None or placement.last.device == _CPU
            return asked is None or (asked.type == "cpu" and on_host)
        asked = kwargs.get("device")
        if asked is not None and asked.type != "cpu":
            return False
        if any(map(self._has_hollow_part, tensors)):
            return False
        placement.last = self.parts.ledger.on(_CPU)
        return True

    def _is_hollow(self, tensor: Tensor) -> bool:
        record = self.parts.ledger.records.get(storage_address(tensor))
        return record is not None and (record.hollow or record.ledger.device != _CPU)

    def _has_hollow_part(self, tensor: Tensor) -> bool:
        """Whether a tensor, or what it is made of, is on the GPU or comes from there."""
        try:
            if tensor.layout is torch.strided:
                return self._is_hollow(tensor)
            return any(self._is_hollow(part) for part in sparse.parts_of(tensor))
        except (RuntimeError, NotImplementedError):
            return False


def _on_host(argument: Any) -> Any:
    """Return an argument of an operator, the host for a GPU."""
    is_gpu = isinstance(argument, torch.device) and argument.type == "cuda"
    return _CPU if is_gpu else argument
