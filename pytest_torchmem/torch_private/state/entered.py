"""Contexts that a program enters in a trace and leaves open: they end with it, and only once."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import BuiltinMethodType, GeneratorType
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch.autograd import forward_ad
from torch.cpu.amp.autocast_mode import autocast as cpu_autocast
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_torchmem.torch_private.names import optional
from pytest_torchmem.torch_private.patching.patches import Patch
from pytest_torchmem.torch_private.state.all_settings import KEPT_GUARDS, function_modes

_innermost_transform = optional("torch._C._functorch.peek_interpreter_stack")


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
    open: ClassVar[WeakKeyDictionary[Any, int]] = WeakKeyDictionary()
    """How often each was entered: a mode that is called enters itself again."""
    ended: ClassVar[WeakSet[Any]] = WeakSet()
    patch: ClassVar[Patch | None] = None
    """What follows them: the same for every trace, unless another stands in torch's place."""


@contextmanager
def ends_once(on_thread: Callable[[], bool]) -> Iterator[None]:
    """Let what the body enters and does not leave itself end with it, and not once more.

    A generator that is suspended in ``torch.autocast`` leaves it when it is closed. By then its
    region has been left, and the nesting would be one too small: torch would never forget the
    weights that it has cast (torch/amp/autocast_mode.py, ``__exit__``), and training go on with
    old ones. One in ``torch.device``, whose end takes the thread's innermost mode away, is closed.
    """
    before, modes = (staticmethod(_Entered.on_thread), _Entered.open), function_modes()
    patch = _Entered.patch
    if patch is None or not patch.fits():
        followed = [_followed(kind, kind.__enter__, kind.__exit__) for kind in _GUARDS]
        patch = _Entered.patch = Patch(followed)
    _Entered.on_thread, _Entered.open = staticmethod(on_thread), WeakKeyDictionary()
    patch.put_in_place()
    try:
        yield
    finally:
        if not modes and function_modes():
            _close_suspended()
        patch.put_back()
        left = [*_Entered.open]
        _Entered.on_thread, _Entered.open = before
        for one in left:
            _end(one)
        # These have guards of C++, whose end would bring back the state of the thread.
        KEPT_GUARDS.extend(one for one in left if isinstance(one, torch.inference_mode))


@cache
def _followed(kind: Any, begin: Callable[..., Any], end: Callable[..., Any]) -> Any:
    """Return the methods of a class of contexts that follow what is entered.

    They are made once: what else stands in the place of torch's functions stays as long as these.
    """

    def enter(self: Any) -> Any:
        _Entered.ended.discard(self)
        if _Entered.on_thread():
            _Entered.open[self] = _Entered.open.get(self, 0) + 1
        return begin(self)

    def leave(self: Any, *error: Any) -> Any:
        if self in _Entered.ended:
            return _Entered.ended.discard(self)
        if (times := _Entered.open.pop(self, 0)) > 1:
            _Entered.open[self] = times - 1
        return end(self, *error)

    return kind, {"__enter__": enter, "__exit__": leave}


def _end(one: Any) -> None:
    """Have the next end of a context do nothing, which others may look up by then."""
    context = ref(one)

    def end(*_: Any) -> None:
        _Entered.ended.discard(context())
        vars(context()).pop("__exit__", None)

    _Entered.ended.add(one)
    vars(one)["__exit__"] = end


def _close_suspended() -> None:
    for one in gc.get_objects():
        if type(one) is GeneratorType and any(map(_ends_device, gc.get_referents(one))):
            with suppress(Exception):  # of the program, which ends
                one.close()


def _ends_device(one: Any) -> bool:
    """Return whether something is the end of a ``torch.device``, which waits in a frame for it."""
    is_end = type(one) is BuiltinMethodType and one.__name__ == "__exit__"
    return is_end and isinstance(one.__self__, torch.device)
