"""What ``torch.backends.cuda.can_use_flash_attention`` and its like answer for the named GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.torch_private.patches import replaced


@contextmanager
def attention_answers(
    trace: TraceContext, backends: Mapping[str, int], may_use: Callable[[int, Any], bool]
) -> Iterator[None]:
    """Answer by ``may_use`` and the number of an implementation; ``backends`` has those by the
    names that torch gives them (``"flash"``, ``"mem_efficient"``, ``"cudnn"``).
    """

    def answer(name: str, backend: int) -> Callable[..., bool]:
        original: Callable[..., bool] = getattr(torch._C, name)

        def can_use(params: Any, debug: bool = False) -> bool:
            return original(params, debug) if trace.off() else may_use(backend, params)

        return can_use

    names = {f"_can_use_{name}_attention": backend for name, backend in backends.items()}
    with replaced(torch._C, **{name: answer(name, number) for name, number in names.items()}):
        yield
