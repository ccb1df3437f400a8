"""Functions of extensions in CUDA C++ that packages compile when they find a GPU.

They are no operators of torch: pybind11 hands them to Python, and no dispatcher calls them. What
stands for one is a function of torch's operators that allocates and computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

Function = Callable[..., Any]

_DESCRIBED_IN = {"fbd_cuda": "pytest_torchmem.operators.third_party.peft"}
"""Modules by the name of the extension, the first argument of ``torch.utils.cpp_extension.load``.
Their ``EXTENSIONS`` has the functions by the names that the extension gives them."""


def extension_function(extension: str, name: str) -> Function | None:
    """Return what stands for a function of an extension, or None if nobody has described it."""
    if extension not in _DESCRIBED_IN:
        return None
    extensions: Mapping[str, Mapping[str, Function]]
    extensions = import_module(_DESCRIBED_IN[extension]).EXTENSIONS
    return extensions[extension].get(name)
