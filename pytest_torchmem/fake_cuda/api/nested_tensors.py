"""Nested tensors of one buffer that are made on the GPU of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.targets.device_index import as_device
from pytest_torchmem.torch_private.patching import replaceable
from pytest_torchmem.torch_private.patching.patches import Replacements


def nested_tensors(trace: TraceContext) -> Replacements:
    """Let ``torch.nested`` make tensors of the strided layout on the GPU that is named.

    Its functions in C++ are given the device, and their kernels hand it on.
    """
    of_list: Any = replaceable.nested_from_list.original
    constructor: Any = replaceable.nested_constructor.original

    def from_list(
        tensors: Sequence[Tensor],
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: Any = None,
        pin_memory: bool | None = None,
    ) -> Any:
        if device is None or trace.off() or trace.in_fake_tensor_mode():
            return of_list(tensors, dtype, layout, device, pin_memory)
        # The buffer is copied as a whole: native/nested/NestedTensorUtils.h, wrap_tensor_node.
        made: Tensor = of_list(tensors, dtype, layout, None, pin_memory)
        return made.to(trace.device(as_device(device)))

    def construct(
        data: Sequence[Any],
        *,
        dtype: torch.dtype | None = None,
        device: Any = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> Any:
        options: dict[str, Any] = {"requires_grad": requires_grad, "pin_memory": pin_memory}
        if device is None or trace.off() or trace.in_fake_tensor_mode():
            return constructor(data, dtype=dtype, device=device, **options)
        # Each part is copied to the device: csrc/utils/nested.cpp, nested_tensor_ctor.
        target = trace.device(as_device(device))
        parts = [
            part.detach().to(target, dtype or part.dtype, copy=True)
            if isinstance(part, Tensor)
            else torch.tensor(part, dtype=dtype, device=target)
            for part in data
        ]
        return of_list(parts, None, None, None, None).requires_grad_(requires_grad)

    return [
        replaceable.nested_from_list.by(from_list),
        replaceable.nested_constructor.by(construct),
    ]
