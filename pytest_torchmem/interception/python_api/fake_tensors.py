"""``FakeTensorMode`` of torch in the traced program: ``torch.export``, ``DTensor``, ``make_fx``.

What runs in such a mode allocates nothing, and has fake tensors whose kernels are looked up by keys
that the trace's is not among (torch/csrc/utils/python_dispatch.cpp). So nothing is intercepted
while the program is in one.
"""

from collections.abc import Callable
from typing import Any

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.operators.spec import spec_of
from pytest_torchmem.step.trees import argument_tensors
from pytest_torchmem.torch_private.dispatch.dispatcher import reach_past_modes
from pytest_torchmem.torch_private.dispatch.keys import FAKE, is_excluded, set_excluded
from pytest_torchmem.torch_private.dispatch.modes import fakes_of_meta, makes_fake_tensors
from pytest_torchmem.torch_private.patching.patches import (
    Replacements,
    fallback_kernel,
    pop_mode,
    print_tensor,
    push_mode,
    set_mode,
    unset_mode,
)


class FakeTensors:
    """Leaves a trace alone while its thread is in a ``FakeTensorMode``."""

    def __init__(self, trace: TraceContext) -> None:
        self._trace = trace
        self._before: list[bool] = []
        """Whether the trace's key was excluded when each of the modes was entered."""

    def replacements(self) -> Replacements:
        """Return what takes the place of the functions that enter and leave modes."""
        return [
            push_mode.by(self._entering(push_mode.original)),
            pop_mode.by(self._leaving(pop_mode.original)),
            set_mode.by(self._setting(set_mode.original)),
            unset_mode.by(self._unsetting(unset_mode.original)),
            print_tensor.by(self._printing(print_tensor.original)),
            fallback_kernel.by(self._falling_back(fallback_kernel.original)),
        ]

    def begin(self) -> None:
        """Forget modes that the trace before did not leave."""
        self._before.clear()

    def _entering(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def push(mode: Any) -> Any:
            result = original(mode)
            if not self._trace.on_thread():
                return result
            if makes_fake_tensors(mode):
                self._before.append(is_excluded(FAKE))
                set_excluded(FAKE, True)
            elif not self._trace.inside:  # a mode of the program, not one of the profiler's own
                reach_past_modes()
            return result

        return push

    def _leaving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def pop(*args: Any) -> Any:
            mode = original(*args)
            if makes_fake_tensors(mode) and self._trace.on_thread() and self._before:
                set_excluded(FAKE, self._before.pop())
            return mode

        return pop

    def _setting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def set_to(mode: Any) -> Any:
            result = original(mode)
            if makes_fake_tensors(mode) and self._trace.on_thread():
                set_excluded(FAKE, True)
            return result

        return set_to

    def _unsetting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def unset(kind: Any) -> Any:
            mode = original(kind)
            if makes_fake_tensors(mode) and self._trace.on_thread():
                set_excluded(FAKE, self._trace.inside)
            return mode

        return unset

    def _printing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        # Modes are left while a tensor is printed, also for an error that C++ then drops (the next
        # overload is tried). A guard that is made meanwhile ends after they are entered again, and
        # puts back the keys that were excluded when it began (torch/_tensor_str.py, ``_str``).
        def text(*args: Any, **kwargs: Any) -> Any:
            if not self._trace.on_thread():
                return original(*args, **kwargs)
            before = is_excluded(FAKE)
            try:
                return original(*args, **kwargs)
            finally:
                set_excluded(FAKE, before)

        return text

    def _falling_back(self, original: Callable[..., Any]) -> Callable[..., Any]:
        # The device's kernel would run on zeros: a GPU's is not there.
        def run(mode: Any, func: Any, flat_args: Any, args_spec: Any, error: Exception) -> Any:
            first = next(iter(argument_tensors(flat_args)), None)
            if first is None or not self._trace.on_thread():
                return original(mode, func, flat_args, args_spec, error)
            geometry = spec_of(func).on(first.device.type).meta
            if geometry is None:
                return original(mode, func, flat_args, args_spec, error)
            return fakes_of_meta(mode, func, geometry, flat_args, args_spec)

        return run
