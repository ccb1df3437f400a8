"""Calls of what ``torch.compile`` wraps, modules and functions alike."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pytest_torchmem.torch_private.names import private, private_if_imported
from pytest_torchmem.torch_private.patches import replaced

private("torch.compiler._is_compiling_flag")
_eval_frame: Callable[[], Any] = private_if_imported("torch._dynamo.eval_frame")
_FLEX_ATTENTION = "torch.nn.attention.flex_attention"
_NOT_COMPILED = (None, False)
"""What ``torch.compiler.disable`` and graph breaks call it with."""


def given_a_list(graph: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Return a graph's function, which AOTAutograd will hand a list to be emptied.

    torch/_functorch/_aot_autograd/utils.py, ``call_func_at_runtime_with_args``: it looks for the
    mark, and otherwise holds the arguments until the graph has run.
    """
    graph._boxed_call = True  # type: ignore[attr-defined]
    return graph


@contextmanager
def taken_for_compiling(compiling: bool = True) -> Iterator[None]:
    """Let ``torch.compiler.is_compiling()`` be true, as it is where ``torch.export`` makes a graph.

    Libraries ask it before they decide by the values of tensors.
    """
    with replaced(torch.compiler, _is_compiling_flag=compiling):
        yield


@contextmanager
def compiled_calls(when_called: Callable[[bool], None]) -> Iterator[None]:
    """Call ``when_called`` at every call of what is compiled, which the stance decides about;
    torch/_dynamo/eval_frame.py, ``_callback_from_stance``. The compiler has to be imported.

    It is told whether that is ``flex_attention``, which runs itself so if nobody has compiled it.
    """
    module = _eval_frame()
    original: Any = getattr(module, "_callback_from_stance", None)
    if original is None:
        yield
        return

    def from_stance(callback: Any) -> Any:
        if callback not in _NOT_COMPILED:
            compiled = sys._getframe(1).f_locals.get("fn")  # of ``compile_wrapper``
            when_called(getattr(compiled, "__module__", None) == _FLEX_ATTENTION)
        return original(callback)

    with replaced(module, _callback_from_stance=from_stance):
        yield
