"""The interception of every operator that would reach a kernel.

A hollow tensor is an ordinary CPU tensor whose storage has its true size and no memory. Operators
arrive here below autograd, and each is handed to whoever runs its kind: ``kernels.py`` stands in
for kernels, ``layouts/`` runs operators on tensors that are not strided, ``conversion.py`` brings
real tensors in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.interception.attribution import Attribution
from pytest_torchmem.interception.gradient_accumulation import References
from pytest_torchmem.interception.kernels import Kernels
from pytest_torchmem.interception.layouts.layouts import Layouts
from pytest_torchmem.interception.ledger import Ledger
from pytest_torchmem.interception.parts import Parts
from pytest_torchmem.operators.registry import Kind
from pytest_torchmem.operators.spec import OperatorSpec, spec_of
from pytest_torchmem.operators.workspace import Buffer
from pytest_torchmem.step.global_state import seed_what_is_imported
from pytest_torchmem.step.imports import imports_within
from pytest_torchmem.step.trees import argument_tensors
from pytest_torchmem.targets.target import Target
from pytest_torchmem.torch_private.dispatcher import interception
from pytest_torchmem.torch_private.kernels import run_composite_implicit
from pytest_torchmem.torch_private.keys import FAKE, set_excluded
from pytest_torchmem.torch_private.modes import NoFunctionModes, function_modes
from pytest_torchmem.torch_private.operators import OpOverload, is_view
from pytest_torchmem.torch_private.storages import storage_address

_CPU = torch.device("cpu")


class Interceptor:
    """Runs operators on hollow tensors; the fallback of the Fake key for one trace."""

    def __init__(
        self,
        target: Target,
        ledger: Ledger,
        attribution: Attribution,
        alone: References | None,
    ) -> None:
        self.parts = Parts(target, ledger, attribution)
        self.paths: Mapping[str, Callable[..., Any]] = {}
        """What runs composite operators as the GPU does, by name."""
        self.placed_on: torch.device | None = None
        """Where outputs go, instead of where the inputs are, while a copy between devices runs."""
        self.inside = False
        """Whether the profiler itself is at work, and tensors answer as torch made them."""
        self._importing = False
        self._specs: dict[OpOverload, OperatorSpec] = {}
        self._layouts = Layouts(self, self.parts)
        self.kernels = Kernels(self, self.parts, self._layouts, alone)
        self._let_pass: Callable[[OpOverload], None]

    # -- entry -------------------------------------------------------------------------------------

    def __call__(self, overload: OpOverload, *args: Any, **kwargs: Any) -> Any:
        """Run one operator that would have reached a kernel."""
        __tracebackhide__ = True
        if function_modes():
            # Below the dispatcher torch has none: a default device is not for what is made here.
            with NoFunctionModes():
                return self(overload, *args, **kwargs)
        set_excluded(FAKE, True)
        was_inside, self.inside = self.inside, True
        try:
            if self._importing and self._is_of_the_host(args, kwargs):
                return overload(*args, **kwargs)
            spec = self._specs.get(overload)
            if spec is None:
                if is_view(overload):
                    return self._pass(overload, args, kwargs)
                spec = self._specs[overload] = self._spec(overload)
            self.parts.numbers.settle()
            if spec.kind is Kind.LEAF:
                return self.kernels.run(spec, args, kwargs)
            return self._run_specially(spec, args, kwargs)
        finally:
            self.inside = was_inside
            set_excluded(FAKE, False)

    def _pass(self, view: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a view operator as it will run from now on, when it does not come here again.

        Numbers do not settle: autograd makes views before the node of an operator in place stands.
        """
        self._let_pass(view)
        with self.intercepting():
            return view(*args, **kwargs)

    def _spec(self, overload: OpOverload) -> OperatorSpec:
        """Return what is to be known of an operator on this target."""
        spec, device = spec_of(overload), self.parts.target.device.type
        taught = spec.on(device).taught
        if taught is not None and taught.describes_kernel:
            return replace(spec, kind=Kind.LEAF, composite=False, opaque=True)
        if spec.name in self.paths:
            return replace(spec, kind=Kind.DECOMPOSED)
        if spec.kind is Kind.DECOMPOSED and spec.one_kernel_on(device):
            return replace(spec, kind=Kind.LEAF)
        return spec

    def _run_specially(self, spec: OperatorSpec, args: tuple[Any, ...], kwargs: Any) -> Any:
        __tracebackhide__ = True
        kind, parts = spec.kind, self.parts
        run = self._layouts.find(spec, args, kwargs)
        if run is not None:
            parts.phases.find()
            return run(spec, args, kwargs)
        if kind is Kind.DECOMPOSED:
            path = self.paths.get(spec.name)
            with self.intercepting():
                if path is not None:
                    return path(*args, **kwargs)
                return run_composite_implicit(spec.overload, *args, **kwargs)
        if kind is Kind.NATIVE:
            return spec.overload(*args, **kwargs)
        if kind is Kind.PASS:
            return None
        if kind is Kind.SCALAR:
            return self.kernels.item(args[0])
        if kind is Kind.LIFT:
            return parts.conversion.lift(args[0], self.placed_on or _CPU, sys._getframe(2))
        return self.kernels.resize(spec, args, kwargs)

    # -- what comes here, and what does not --------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run every operator of this thread that would reach a kernel."""
        with (
            interception(self) as self._let_pass,
            imports_within(self._importing_a_module, seed_what_is_imported),
        ):
            yield

    @contextmanager
    def intercepting(self) -> Iterator[None]:
        """Let operators issued inside of this one come here again."""
        was_inside, self.inside = self.inside, False
        set_excluded(FAKE, False)
        try:
            yield
        finally:
            self.inside = was_inside
            set_excluded(FAKE, True)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Let the profiler itself use tensors: nothing is intercepted, devices are torch's own."""
        was_inside, self.inside = self.inside, True
        set_excluded(FAKE, True)
        try:
            with NoFunctionModes():
                yield
        finally:
            self.inside = was_inside
            set_excluded(FAKE, was_inside)

    @contextmanager
    def placing_on(self, device: torch.device | None) -> Iterator[None]:
        """Make outputs on ``device`` rather than where their inputs are."""
        before, self.placed_on = self.placed_on, device
        try:
            yield
        finally:
            self.placed_on = before

    @contextmanager
    def _importing_a_module(self) -> Iterator[None]:
        """Let a module make real tensors on the host: it keeps them when the trace is over."""
        was_importing, self._importing = self._importing, True
        try:
            yield
        finally:
            self._importing = was_importing

    def _is_of_the_host(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an operator works on real tensors alone, and makes more of them on the host."""
        if self.placed_on is not None and self.placed_on != _CPU:
            return False
        get = self.parts.ledger.records.get
        try:
            records = [get(storage_address(one)) for one in argument_tensors((args, kwargs))]
        except (RuntimeError, NotImplementedError):  # a tensor without storage: sparse, …
            return False
        return not any(record is not None and record.hollow for record in records)

    # -- what happens without an operator ----------------------------------------------------------

    def enter_optimizer(self) -> None:
        """Begin an optimizer's step."""
        self.parts.numbers.settle()
        self.parts.phases.enter_optimizer()

    def meet(self, tensor: Tensor, device: torch.device = _CPU) -> None:
        """Book a real tensor that C++ made just now on ``device`` without an operator."""
        with self.working():
            self.parts.conversion.meet(tensor, device, sys._getframe(1))

    def keep(self, buffer: Buffer, overload: OpOverload) -> None:
        """Book a library's workspace that stays and that ``overload`` makes on its first use."""
        self.kernels.keep(buffer, spec_of(overload), sys._getframe(1))
