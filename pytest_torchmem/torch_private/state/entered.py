"""What a program enters on its thread, and leaves open: modes, hooks of saved tensors, dual levels.

Each is entered with ``__enter__`` or a function of its own; what is never left would be in force in
the next trace and in everything else that the thread runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import forward_ad

from pytest_torchmem.torch_private.dispatch.modes import dispatch_modes
from pytest_torchmem.torch_private.names import optional, private, private_name

_function_modes: Callable[[], int] = private("torch._C._len_torch_function_stack")
_pop_function_mode: Callable[[], Any] = private("torch.overrides._pop_mode")
_pop_dispatch_mode: Callable[[], Any] = private("torch.utils._python_dispatch._pop_mode")
saved_tensors_hooks: Callable[[bool], Any] = private(
    "torch._C._autograd._top_saved_tensors_default_hooks"
)
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


@contextmanager
def what_is_entered_is_left() -> Iterator[None]:
    """Leave at the end what the body entered and did not leave itself."""
    thread = threading.get_ident()
    function_count, dispatch_count = _function_modes(), dispatch_modes()
    hooks, level = saved_tensors_hooks(False), getattr(forward_ad, _LEVEL)
    inference = torch.is_inference_mode_enabled()
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
            for _ in range(getattr(forward_ad, _LEVEL) - level):
                forward_ad.exit_dual_level()
            if torch.is_inference_mode_enabled() != inference:
                _kept.append(_inference_mode(inference))
                _kept[-1].__enter__()
