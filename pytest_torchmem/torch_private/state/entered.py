"""What a program enters on its thread, and leaves open: modes, hooks of saved tensors, dual levels.

Each is entered with ``__enter__`` or a function of its own; what is never left would be in force in
the next trace and in everything else that the thread runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch.autograd import forward_ad
from torch.cpu.amp.autocast_mode import autocast as cpu_autocast
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_torchmem.torch_private.dispatch.modes import dispatch_modes
from pytest_torchmem.torch_private.names import optional, private, private_name
from pytest_torchmem.torch_private.patching.patches import replaced_all

_function_modes: Callable[[], int] = private("torch._C._len_torch_function_stack")
_pop_function_mode: Callable[[], Any] = private("torch.overrides._pop_mode")
_pop_dispatch_mode: Callable[[], Any] = private("torch.utils._python_dispatch._pop_mode")
saved_tensors_hooks: Callable[[bool], Any] = private(
    "torch._C._autograd._top_saved_tensors_default_hooks"
)
_hooks_disabled: Callable[[], str | None] = private(
    "torch._C._autograd._saved_tensors_hooks_get_disabled_error_message"
)
_disable_hooks: Callable[[str], None] = private("torch._C._autograd._saved_tensors_hooks_disable")
_enable_hooks: Callable[[], None] = private("torch._C._autograd._saved_tensors_hooks_enable")
_pop_saved_tensors_hooks: Callable[[], None] = private(
    "torch._C._autograd._pop_saved_tensors_default_hooks"
)
_innermost_transform = optional("torch._C._functorch.peek_interpreter_stack")
_inference_mode: Callable[[bool], Any] = private("torch._C._InferenceMode")
_kept: list[Any] = []
"""Guards that end no more: the end of one brings back what was there when it began."""
_LEVEL = private_name("torch.autograd.forward_ad._current_level")


def is_within_transform() -> bool:
    """Return whether a transform of ``torch.func`` runs on this thread, or was never left."""
    return _innermost_transform is not None and _innermost_transform() is not None


_GUARDS: tuple[Any, ...] = (
    *(torch.autocast, torch.cuda.amp.autocast, cpu_autocast),
    *(torch.no_grad, torch.enable_grad, torch.set_grad_enabled, torch.inference_mode),
    *(torch.autograd.graph.saved_tensors_hooks, forward_ad.dual_level),
    *(TorchFunctionMode, TorchDispatchMode, torch.cuda.device, torch.cuda.StreamContext),
)
"""Contexts whose end brings back what a thread had at their beginning."""


class _Entered:
    """What threads of the running trace have entered and not left, and ``ended`` has of others."""

    on_thread: ClassVar[Callable[[], bool]] = staticmethod(lambda: False)
    open: ClassVar[WeakSet[Any]] = WeakSet()
    ended: ClassVar[WeakSet[Any]] = WeakSet()


@contextmanager
def ends_once(on_thread: Callable[[], bool]) -> Iterator[None]:
    """Let what the body enters and does not leave itself end with it, and not once more.

    A generator that is suspended in ``torch.autocast`` leaves it when it is closed. By then its
    region has been left, and the nesting would be one too small: torch would never forget the
    weights that it has cast (torch/amp/autocast_mode.py, ``__exit__``), and training go on with
    old ones.
    """
    before = staticmethod(_Entered.on_thread), _Entered.open
    _Entered.on_thread, _Entered.open = staticmethod(on_thread), WeakSet()
    try:
        with replaced_all([_followed(kind, kind.__enter__, kind.__exit__) for kind in _GUARDS]):
            yield
    finally:
        left = [*_Entered.open]
        _Entered.on_thread, _Entered.open = before
        _Entered.ended.update(left)
        # These have guards of C++, whose end would bring back the state of the thread.
        _kept.extend(one for one in left if isinstance(one, torch.inference_mode))


@cache
def _followed(kind: Any, begin: Callable[..., Any], end: Callable[..., Any]) -> Any:
    """Return the methods of a class of contexts that follow what is entered.

    They are made once: what else stands in the place of torch's functions stays as long as these.
    """

    def enter(self: Any) -> Any:
        if _Entered.on_thread():
            _Entered.open.add(self)
        return begin(self)

    def leave(self: Any, *error: Any) -> Any:
        if self in _Entered.ended:
            return None
        _Entered.open.discard(self)
        return end(self, *error)

    return kind, {"__enter__": enter, "__exit__": leave}


@contextmanager
def what_is_entered_is_left() -> Iterator[None]:
    """Leave at the end what the body entered and did not leave itself."""
    thread = threading.get_ident()
    function_count, dispatch_count = _function_modes(), dispatch_modes()
    hooks, level = saved_tensors_hooks(False), getattr(forward_ad, _LEVEL)
    inference, disabled = torch.is_inference_mode_enabled(), _hooks_disabled()
    try:
        yield
    finally:
        if threading.get_ident() == thread:  # not in a process that another thread forked
            for _ in range(_function_modes() - function_count):
                _pop_function_mode()
            for _ in range(dispatch_modes() - dispatch_count):
                _pop_dispatch_mode()
            while (now := saved_tensors_hooks(False)) is not None and now != hooks:
                _pop_saved_tensors_hooks()
            if _hooks_disabled() != disabled:
                _enable_hooks() if disabled is None else _disable_hooks(disabled)
            for _ in range(getattr(forward_ad, _LEVEL) - level):
                forward_ad.exit_dual_level()
            if torch.is_inference_mode_enabled() != inference:
                _kept.append(_inference_mode(inference))
                _kept[-1].__enter__()
