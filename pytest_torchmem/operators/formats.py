"""Memory formats: what kernels copy to have it in one, and outputs that lie in one.

Mostly of gradients: autograd hands kernels the expanded gradient of a sum, or one that was
transposed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import (
    contiguous_copy,
    laid_out,
    suggested_format,
    transpose_scratch,
)
from pytest_torchmem.operators.workspace import ALL, Request
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host

CONTIGUOUS = torch.contiguous_format
SUGGESTED = torch.preserve_format
"""The format that a tensor's own strides suggest: channels last stays so."""

Wanted = torch.memory_format | str
"""A format, or the name of the argument whose suggested format is meant."""


def dense_copy(tensor: Tensor, memory_format: torch.memory_format = CONTIGUOUS) -> int:
    """Bytes of a copy on the CPU where one is needed, with the block that a transpose goes
    through; native/Copy.cpp, copy_same_type_transpose_.
    """
    copied = contiguous_copy(tensor, memory_format)
    return copied + transpose_scratch(tensor) if copied and memory_format == CONTIGUOUS else copied


def copied(*, first: bool = False, **formats: Wanted) -> Callable[..., int | tuple[Request, ...]]:
    """Return the workspace of a kernel that copies what does not lie as it wants it.

    ``formats`` are the arguments that it copies, with what it wants of each; ``outputs`` are made
    in that format and copied into those that lie in another one. Copies may come ``first``.
    """

    def copies(machine: Host | Gpu, **operands: Any) -> int | tuple[Request, ...]:
        on_cpu = isinstance(machine, Host)
        copy = dense_copy if on_cpu else contiguous_copy
        requests = [
            copy(tensor, _meant(wanted, tensor, operands))
            for name, wanted in formats.items()
            for tensor in _tensors(operands[name])
        ]
        return sum(requests) if on_cpu else (*requests, ALL) if first else tuple(requests)

    names = [*formats, *(one for one in formats.values() if isinstance(one, str))]
    _set_parameters(copies, "machine", *dict.fromkeys(names))
    copies.__doc__ = f"Copies of {', '.join(formats)} where they do not lie as wanted."
    return copies


def _meant(wanted: Wanted, tensor: Tensor, operands: Mapping[str, Any]) -> torch.memory_format:
    if wanted == CONTIGUOUS:
        return CONTIGUOUS
    like = operands[wanted] if isinstance(wanted, str) else tensor
    return suggested_format(like) if like.dim() == tensor.dim() else CONTIGUOUS


def _tensors(operand: Any) -> list[Tensor]:
    """Return an argument's tensors: it may be none, a number, or several outputs."""
    given = operand if isinstance(operand, (tuple, list)) else [operand]
    return [tensor for tensor in given if isinstance(tensor, Tensor)]


def _set_parameters(function: Any, *names: str) -> None:
    """Make a function take arguments by these names, as if it were written with them."""
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    function.__signature__ = inspect.Signature(
        [inspect.Parameter(name, keyword_only) for name in names]
    )


def made_like(**formats: Wanted) -> Callable[..., Any]:
    """Return a meta function: outputs of the shapes and types of these arguments, in formats."""

    def made(**operands: Any) -> Any:
        outputs = tuple(
            laid_out(operands[name], _meant(wanted, operands[name], operands))
            for name, wanted in formats.items()
        )
        return outputs if len(outputs) > 1 else outputs[0]

    _set_parameters(made, *formats)
    dense = set(formats.values()) == {CONTIGUOUS}
    how = "contiguous" if dense else "in the format that the strides suggest"
    made.__doc__ = f"Like {' and '.join(formats)}, {how}."
    return made


def shaped_by(overload: Any, memory_format: torch.memory_format) -> Callable[..., Tensor]:
    """Return a meta function: the shape that ``overload`` has there, in a format of the kernel's.

    ``SUGGESTED`` is what the first argument suggests, where it has as many dimensions.
    """

    def made(arguments: Mapping[str, Any]) -> Tensor:
        first: Tensor = next(iter(arguments.values()))
        result: Tensor = overload(**arguments)
        if memory_format == SUGGESTED and first.dim() == result.dim():
            return laid_out(result, suggested_format(first))
        return result if memory_format == SUGGESTED else first.new_empty(result.shape)

    made.__doc__ = f"The shape that meta gives {overload}, in another format."
    return made
