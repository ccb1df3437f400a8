"""What a kernel takes on this machine, found by running it: oneDNN was not checked on every CPU.

Each geometry is run once, on tensors of zeros of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.autograd.profiler import profile

from pytest_torchmem.interception.call import Call
from pytest_torchmem.interception.plan import Plan, plan_of_result
from pytest_torchmem.interception.values.policy import zeros
from pytest_torchmem.journal.process import environment
from pytest_torchmem.operators.workspace import Workspace
from pytest_torchmem.step.trees import argument_tensors, replace_tensors
from pytest_torchmem.torch_private.dispatch.keys import at_kernels
from pytest_torchmem.torch_private.tensors.recording import EventType, profiler_runs
from pytest_torchmem.torch_private.tensors.storages import tensor_on

LARGEST = 64 * 2**20
"""Bytes of a call's arguments and outputs up to which it is run: a second or less of work."""


def workspace_here(call: Call, plan: Plan, result: Any) -> Workspace | None:
    """Return what the kernel of a call takes at its peak beyond its outputs, and let the plan have
    the outputs that it made.

    ``result`` shows those that the plan has. None for a call of more than ``LARGEST`` bytes, beside
    another profiler, and where the kernel raises.
    """
    tensors = [*call.tensors, *argument_tensors(result)]
    if sum(map(_extent, tensors)) > LARGEST or profiler_runs():
        return None
    real = replace_tensors((call.args, call.kwargs), _zeros_like)
    # Kineto reads its log level at a process' first recording, and else logs every one.
    level = os.environ.get("KINETO_LOG_LEVEL", "99")
    try:
        with (
            environment("KINETO_LOG_LEVEL", level),
            profile(profile_memory=True) as profiler,
            at_kernels(),
        ):
            made = call.operator.overload(*real[0], **real[1])
    except RuntimeError:
        return None
    ran = plan_of_result(made, argument_tensors(real))
    plan.slots, plan.outputs = ran.slots, ran.outputs
    taken = _peak(profiler) - sum(nbytes for nbytes in ran.slots if nbytes > 0)
    return Workspace((taken,) if taken else ())


def _extent(tensor: Tensor) -> int:
    """Return the bytes from a tensor's first element to its last."""
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def _zeros_like(tensor: Tensor) -> Tensor:
    storage = zeros(_extent(tensor)).untyped_storage()
    return tensor_on(storage, tensor.dtype, tuple(tensor.shape), tensor.stride(), 0)


def _peak(profiler: profile) -> int:
    """Return the most bytes that the allocator's recorded requests had at once."""
    live = peak = 0
    results: Any = profiler.kineto_results
    for _, nbytes in sorted(_requests(results.experimental_event_tree())):
        live += nbytes
        peak = max(peak, live)
    return peak


def _requests(events: list[Any]) -> Iterator[tuple[int, int]]:
    """Yield the time and the bytes of every request, below 0 where they are given back."""
    for event in events:
        if event.tag == EventType.Allocation:
            yield event.start_time_ns, event.extra_fields.alloc_size
        yield from _requests(event.children)
