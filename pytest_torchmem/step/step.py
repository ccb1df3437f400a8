"""The training step itself, and its phases: a trace and a measurement both run it and go by them.

What a name keeps alive here is part of the result, so the step is written the way a training loop
usually is: ``output`` and ``loss`` are alive until their step ends, and the optimizer is made
before the first forward and outlives the last step.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pytest_torchmem.errors import UsageError
from pytest_torchmem.profile.timeline import Phase
from pytest_torchmem.step.imports import when_compiler_is_used
from pytest_torchmem.step.trees import Args, tensors_in
from pytest_torchmem.torch_private import compiler, module_calls
from pytest_torchmem.torch_private.patches import Instead, engine, replaced, replaced_all


@dataclass(slots=True, eq=False, repr=False)
class Step:
    """What is done with a module: its forward, ``backward()`` and the optimizer's step, ``steps``
    times over. A callable does its whole step itself, and is called ``steps`` times.
    """

    loss_fn: Callable[[Any], Any] | None = None
    backward: bool = True
    optimizer: Callable[..., Any] | None = None
    steps: int = 1

    @classmethod
    def taken_from(cls, kwargs: Mapping[str, Any]) -> tuple["Step", dict[str, Any]]:
        """Return the step that keyword arguments describe, and those that are the target's own."""
        names = {option.name for option in fields(cls)}
        options = {name: value for name, value in kwargs.items() if name in names}
        return cls(**options), {name: kwargs[name] for name in kwargs if name not in names}

    def options(self) -> dict[str, Any]:
        """Return the step as keyword arguments of ``trace`` and ``measure``."""
        return {option.name: getattr(self, option.name) for option in fields(self)}

    def check(self, target: Any) -> None:
        """Raise ``UsageError`` where these options contradict each other or ``target``."""
        if not callable(target):
            raise UsageError(f"expected an nn.Module or a callable, not {type(target).__name__}")
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise UsageError(f"steps={self.steps!r}: expected a whole number of at least 1")
        if not isinstance(target, nn.Module):
            names = ", ".join(
                f"{option.name}="
                for option in fields(self)
                if option.name != "steps" and getattr(self, option.name) != option.default
            )
            if names:
                raise UsageError(
                    f"{names} only applies to an nn.Module; a callable does its whole step itself"
                )
        elif self.optimizer is not None:
            if not callable(self.optimizer):
                raise UsageError(
                    f"optimizer={type(self.optimizer).__name__} object: expected a class or "
                    "function that makes an optimizer from parameters, such as torch.optim.AdamW"
                )
            if not self.backward:
                raise UsageError(
                    "an optimizer steps on gradients: leave backward=True with optimizer="
                )

    def run(
        self,
        target: Any,
        args: Args,
        kwargs: Mapping[str, Any],
        begins: Callable[[], None] | None = None,
    ) -> object:
        """Run the steps of a module or a callable, and return what outlives them.

        That is what the callable returned, or the optimizer if there is one; without ``backward``
        the last output, which is then what the forward is for. Whoever wants to know what is live
        at the end holds it until then. Without an optimizer the gradients of several steps
        accumulate. ``begins`` is called before each step but the first where no backward of a
        module's tells that one begins.
        """
        self.check(target)
        if not isinstance(target, nn.Module) or not self.backward:
            for index in range(self.steps):
                if index and begins is not None:
                    begins()
                output: object = target(*args, **kwargs)
            return output
        optimizer = self.optimizer(target.parameters()) if self.optimizer is not None else None
        for index in range(self.steps):
            if index and optimizer is not None:
                optimizer.zero_grad()
            self._run_once(target, args, kwargs, optimizer)
        return optimizer

    def _run_once(
        self, model: nn.Module, args: Args, kwargs: Mapping[str, Any], optimizer: Optimizer | None
    ) -> None:
        output = model(*args, **kwargs)
        loss = self._loss_of(output)
        if not torch.is_grad_enabled() and not getattr(loss, "requires_grad", True):
            raise UsageError(_NO_GRADIENTS)
        loss.backward()
        if optimizer is not None:
            optimizer.step()

    def _loss_of(self, output: Any) -> torch.Tensor:
        if self.loss_fn is None:
            return reduce_to_scalar(output)
        try:
            return self.loss_fn(output)  # type: ignore[no-any-return]
        except RuntimeError as error:
            if str(error).startswith(_SEVERAL_DEVICES):
                error.args = (f"{error}. {_CLOSED_OVER}",)
            raise


#: What torch raises for it (ATen/native/TensorIterator.cpp, compute_types; ATen/TensorUtils.cpp).
_SEVERAL_DEVICES = "Expected all tensors to be on the same device"
_CLOSED_OVER = (
    "The model, its inputs and a loss_fn that is a module are moved to the device, and a tensor "
    "that another loss_fn brings with it is not: write target.to(output.device) in loss_fn"
)


_NO_GRADIENTS = (
    "there is nothing to call backward() on, since gradients are off around the step: leave "
    "torch.no_grad() or torch.inference_mode() first, or pass backward=False"
)


def reduce_to_scalar(output: Any) -> torch.Tensor:
    """Return ``output.loss``, or else the sum of the output's floating tensors that require grad. A
    tensor that the output holds twice (a last hidden state, also in a tuple of all of them) counts
    once.
    """
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    seen: set[int] = set()
    total: torch.Tensor | None = None
    for tensor in tensors_in(output):
        if id(tensor) in seen or not tensor.is_floating_point() or not tensor.requires_grad:
            continue
        seen.add(id(tensor))
        part = tensor.sum()
        total = part if total is None else total + part
    if total is None and not torch.is_grad_enabled():
        raise UsageError(_NO_GRADIENTS)
    if total is None:
        raise UsageError(
            f"the model's output ({type(output).__name__}) holds no floating tensor that requires "
            "grad, so there is nothing to call backward() on: pass loss_fn= or backward=False"
        )
    return total


_Within = Callable[[], AbstractContextManager[object]]
_Around = Callable[[Callable[..., Any]], Callable[..., Any]]


class StepPhases:
    """Which phase it is, from what begins and ends.

    Backward is while the autograd engine runs, and optimizer while a ``step`` does; of one in the
    other, such as a closure's backward, the inner one counts. Outside of both it is forward at
    first, and between from a backward on until a module is called that no other module calls. A
    ``step`` that calls one, in its closure, is forward until what runs next begins or ends.
    """

    def __init__(self) -> None:
        self._outside = Phase.FORWARD
        self._running: list[Phase] = []
        self._in_closure = False

    @property
    def phase(self) -> Phase:
        if self._in_closure:
            return Phase.FORWARD
        return self._running[-1] if self._running else self._outside

    def begin(self, phase: Phase) -> None:
        """Begin a backward or an optimizer's step."""
        self._in_closure = False
        self._running.append(phase)
        if phase is Phase.BACKWARD:
            self._outside = Phase.BETWEEN

    def end(self, phase: Phase | None = None) -> None:
        """End what began last, of phases of that name."""
        self._in_closure = False
        if phase is None:
            self._running.pop()
            return
        last = len(self._running) - 1 - self._running[::-1].index(phase)
        del self._running[last]

    def module_called(self) -> None:
        """Take note of a call of a module that no other module makes."""
        self._in_closure = self._running[-1:] == [Phase.OPTIMIZER]
        if not self._running:
            self._outside = Phase.FORWARD


def asked_engine(around: _Around, is_here: Callable[[], bool]) -> tuple[Any, Mapping[str, Any]]:
    """Return what calls ``around(run)`` before each run of the autograd engine where ``is_here()``
    is true, one of ``Replacements``; the engine is run by what it returns.

    Every run that Python starts goes through ``Variable._execution_engine`` (autograd/graph.py,
    ``_engine_run_backward``), of which it asks ``run_backward``.
    """
    original = engine.original

    def attribute(name: str) -> Any:
        found = getattr(original, name)
        return around(found) if name == "run_backward" and is_here() else found

    return engine.by(Instead(attribute))


def engine_runs(within: _Within) -> AbstractContextManager[None]:
    """Run the autograd engine within ``within()`` where this thread starts it, for no graph that
    is compiled.
    """

    def around(run: Callable[..., Any]) -> Callable[..., Any]:
        def run_within(*args: Any, **kwargs: Any) -> Any:
            with nullcontext() if compiler.makes_graph() else within():
                return run(*args, **kwargs)

        return run_within

    return replaced_all([asked_engine(around, _on_this_thread())])


def _on_this_thread() -> Callable[[], bool]:
    thread = threading.get_ident()
    return lambda: threading.get_ident() == thread


@contextmanager
def outermost_module_calls(within: _Within) -> Iterator[None]:
    """Run this thread's calls of modules that no other module makes within ``within()``."""
    original = nn.Module.__call__
    thread, depth = threading.get_ident(), 0

    # torch's Python tracer reads this frame's module as its local ``self``, and ends the process
    # where there is none (torch/csrc/autograd/profiler_python.cpp, recordPyCall).
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        # Where Dynamo follows a program it takes this for true: its graph is what it would be.
        if torch.compiler.is_compiling() or depth or threading.get_ident() != thread:
            return original(self, *args, **kwargs)
        depth += 1
        try:
            with within():
                return original(self, *args, **kwargs)
        finally:
            depth -= 1

    compiler.run_uncompiled(call.__code__)
    stack, followed = ExitStack(), compiler.own_module_calls_followed
    follows = when_compiler_is_used(lambda: stack.enter_context(followed()))
    with stack, replaced(nn.Module, __call__=call), follows:
        yield


def steps_seen(
    begin: Callable[[Optimizer], object],
    end: Callable[[Optimizer], object],
    is_here: Callable[[], bool],
) -> tuple[Any, Mapping[str, Any]]:
    """Return what calls ``begin`` and ``end`` around optimizers' steps, where ``is_here()``."""

    def here(then: Callable[[Optimizer], object]) -> Callable[..., None]:
        def hook(optimizer: Optimizer, *_: Any) -> None:
            if is_here():
                then(optimizer)

        return hook

    return module_calls.step_tables(here(begin), here(end))


def optimizer_steps(
    begin: Callable[[Optimizer], object], end: Callable[[Optimizer], object]
) -> AbstractContextManager[None]:
    """Call ``begin`` and ``end`` with each optimizer around its steps on this thread."""
    return replaced_all([steps_seen(begin, end, _on_this_thread())])
