"""``FakeTensorMode`` of torch in the traced program: ``torch.export``, ``DTensor``, ``make_fx``.

What runs in such a mode allocates nothing, and has fake tensors whose kernels are looked up by keys
that the trace's is not among (torch/csrc/utils/python_dispatch.cpp). So nothing is intercepted
while the program is in one.
"""

from typing import Any

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.interception.lasting import Functions, instead_of
from pytest_torchmem.operators.spec import spec_of
from pytest_torchmem.step.trees import argument_tensors
from pytest_torchmem.torch_private.dispatcher import reach_past_modes
from pytest_torchmem.torch_private.keys import FAKE, excluded, is_excluded, set_excluded
from pytest_torchmem.torch_private.modes import fakes_of_meta, makes_fake_tensors
from pytest_torchmem.torch_private.patches import (
    fallback_kernel,
    pop_mode,
    print_tensor,
    push_mode,
    set_mode,
    unset_mode,
)


class FakeTensors(Functions):
    """Leaves a trace alone while its thread is in a ``FakeTensorMode``."""

    def __init__(self, trace: TraceContext) -> None:
        super().__init__(trace)
        self._before: list[bool] = []
        """Whether the trace's key was excluded when each of the modes was entered."""

    def begin(self) -> None:
        """Forget modes that the trace before did not leave."""
        self._before.clear()

    @instead_of(push_mode)
    def enter(self, original: Any, mode: Any) -> Any:
        """Make a mode the thread's innermost one."""
        result = original(mode)
        if not self._trace.on_thread():
            return result
        if makes_fake_tensors(mode):
            self._before.append(is_excluded(FAKE))
            set_excluded(FAKE, True)
        elif not self._trace.inside:  # a mode of the program, not one of the profiler's own
            reach_past_modes()
        return result

    @instead_of(pop_mode)
    def leave(self, original: Any, *args: Any) -> Any:
        """Take a mode away."""
        mode = original(*args)
        if makes_fake_tensors(mode) and self._trace.on_thread() and self._before:
            set_excluded(FAKE, self._before.pop())
        return mode

    @instead_of(set_mode)
    def put(self, original: Any, mode: Any) -> Any:
        """Put back a mode that was taken away for a while."""
        result = original(mode)
        if makes_fake_tensors(mode) and self._trace.on_thread():
            set_excluded(FAKE, True)
        return result

    @instead_of(unset_mode)
    def take(self, original: Any, kind: Any) -> Any:
        """Take a mode away for a while."""
        mode = original(kind)
        if makes_fake_tensors(mode) and self._trace.on_thread():
            set_excluded(FAKE, self._trace.inside)
        return mode

    @instead_of(print_tensor)
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

    @instead_of(fallback_kernel)
    def run(
        self, original: Any, mode: Any, func: Any, flat_args: Any, args_spec: Any, error: Exception
    ) -> Any:
        """Run an operator without a kernel for ``meta``; the device's would run on zeros, and a
        GPU's is not there.
        """
        first = next(iter(argument_tensors(flat_args)), None)
        geometry = None
        if first is not None and self._trace.on_thread():
            geometry = spec_of(func).on(first.device.type).meta
        if geometry is None:
            return original(mode, func, flat_args, args_spec, error)
        return fakes_of_meta(mode, func, geometry, flat_args, args_spec)
