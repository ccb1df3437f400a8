"""Who asks whether there is a GPU: what a fixture makes depends on the answer."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.accelerator

from pytest_torchmem.torch_private.patching.patches import replaced_all

_TORCH = os.path.dirname(torch.__file__) + os.sep
_QUESTIONS = (
    (torch.cuda, ("is_available", "device_count", "is_bf16_supported")),
    (torch.accelerator, ("is_available", "device_count", "current_accelerator")),
)


@contextmanager
def questions_noted() -> Iterator[list[str]]:
    """Yield the names of what is asked meanwhile, by code that is not torch's own."""
    asked: list[str] = []

    def noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def question(*args: Any, **kwargs: Any) -> Any:
            if not sys._getframe(1).f_code.co_filename.startswith(_TORCH):
                asked.append(name)
            return original(*args, **kwargs)

        return question

    replacements = [
        (module, {name: noting(name, getattr(module, name)) for name in names})
        for module, names in _QUESTIONS
    ]
    with replaced_all(replacements):
        yield asked
