"""What a call takes beside its outputs, as its plan says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.interception.decompose import Decompositions
from pytest_torchmem.interception.ledger import DeviceLedger
from pytest_torchmem.interception.parts import Parts
from pytest_torchmem.interception.plan import Plan
from pytest_torchmem.operators.spec import OperatorSpec
from pytest_torchmem.profile.timeline import Origin
from pytest_torchmem.torch_private.tensors.autograd import ENGINE_CODE

_CPU = torch.device("cpu")


class BesideOutputs:
    """Books what kernels take beside their outputs, for one trace."""

    def __init__(self, parts: Parts, decompositions: Decompositions) -> None:
        self._attribution = parts.attribution
        self._numbers = parts.numbers
        self._decompositions = decompositions

    def take(
        self,
        spec: OperatorSpec,
        args: tuple[Any, ...],
        tensors: list[Tensor],
        plan: Plan,
        device: DeviceLedger,
        frame: Any,
        origin: Origin,
        result: Any,
    ) -> None:
        """Book what a call's kernel takes, and the tensors that its numbers were wrapped in.

        ``result`` is what the call returns, ``frame`` where it comes from.
        """
        __tracebackhide__ = True
        if plan.broadcast:
            self._attribution.facts.broadcasts.setdefault(origin, plan.broadcast)
        numbers = plan.numbers
        wrapped: tuple[int, ...] = ()
        if numbers is None:  # of a body, which is followed for the first time
            numbers = plan.numbers = numbers_of(spec, args, tensors, device)
        if numbers and frame.f_code is not ENGINE_CODE:  # what the engine issues, a node has saved
            wrapped = self._numbers.book(args, numbers, device, origin)
        if plan.workspace is not None:
            self._decompositions.take(plan.workspace, device, origin)
        if wrapped:
            recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
            kept = result if recorded else None
            self._numbers.release(spec, numbers, wrapped, device, kept)


def numbers_of(
    spec: OperatorSpec, args: tuple[Any, ...], tensors: list[Tensor], device: DeviceLedger
) -> tuple[int, ...]:
    """Return the positions of Python numbers that C++ wrapped in tensors of the host's."""
    if len(tensors) >= len(spec.tensors) or device.device != _CPU:
        return ()
    return spec.numbers(args)
