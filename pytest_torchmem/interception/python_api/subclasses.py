"""Subclasses of ``torch.Tensor`` that a program calls with sizes or data: ``SubTensor([0.5])``.

C++ makes a tensor and gives it a Python object of that class (torch/csrc/autograd/
python_variable.cpp, ``THPVariable_NewWithVar``). In a trace the tensor comes from Python, and has
an object already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.torch_private.dispatch.dispatcher import reach_past_modes
from pytest_torchmem.torch_private.patching.patches import replaced
from pytest_torchmem.torch_private.tensors.tensors import make_subclass

_OF_TORCH = "torch."


@contextmanager
def subclasses_made(trace: TraceContext) -> Iterator[None]:
    """Make a tensor of a subclass of one that is there, while ``trace`` runs.

    From when a program has such classes: CPython calls a ``__new__`` that was once replaced by
    looking it up, also when it is inherited again, which takes a little longer.
    """
    with ExitStack() as stack:
        if _there_are_others(Tensor):
            stack.enter_context(_made_of_another(trace))
        else:
            stack.enter_context(_noticing(lambda: stack.enter_context(_made_of_another(trace))))
        yield


def _made_of_another(trace: TraceContext) -> AbstractContextManager[None]:
    reach_past_modes()
    original = Tensor.__new__

    def new(cls: type[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if cls is Tensor or trace.off() or (args and isinstance(args[0], Tensor)):
            return original(cls, *args, **kwargs)
        return make_subclass(cls, Tensor(*args, **kwargs), False)  # type: ignore[no-any-return]

    return replaced(Tensor, __new__=staticmethod(new))


def _noticing(begin: Callable[[], object]) -> AbstractContextManager[None]:
    """Call ``begin`` when the first such class is made."""
    begun: list[type[Tensor]] = []

    def noticed(cls: Any, /, **kwargs: Any) -> None:
        super(Tensor, cls).__init_subclass__(**kwargs)
        if not begun and _is_other(cls):
            begun.append(cls)
            begin()

    return replaced(Tensor, __init_subclass__=classmethod(noticed))


def _is_other(kind: type) -> bool:
    return not str(kind.__module__).startswith(_OF_TORCH)


def _there_are_others(kind: type) -> bool:
    """Return whether a class has subclasses that are not torch's own."""
    found: list[type] = type.__subclasses__(kind)
    return any(_is_other(one) or _there_are_others(one) for one in found)
