"""What a plan makes that asks for more than its steps."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.interception.decompose import Decompositions
from pytest_torchmem.interception.ledger import DeviceLedger
from pytest_torchmem.interception.materialize import make_outputs
from pytest_torchmem.interception.parts import Parts
from pytest_torchmem.interception.plan import Plan
from pytest_torchmem.operators.spec import OperatorSpec
from pytest_torchmem.profile.timeline import Origin
from pytest_torchmem.torch_private.tensors.tensors import ENGINE_CODES

_CPU = torch.device("cpu")


class BesideOutputs:
    """Makes the outputs of plans with extra allocations, and books those."""

    def __init__(self, parts: Parts, decompositions: Decompositions) -> None:
        self._ledger = parts.ledger
        self._attribution = parts.attribution
        self._numbers = parts.numbers
        self._decompositions = decompositions

    def make(
        self,
        spec: OperatorSpec,
        args: tuple[Any, ...],
        tensors: list[Tensor],
        plan: Plan,
        device: DeviceLedger,
        frame: Any,
        origin: Origin,
        memories: Mapping[int, Tensor],
    ) -> Any:
        """Return what a plan returns, whose numbers were wrapped in tensors before; ``frame`` is
        where the call comes from.
        """
        if plan.broadcast:
            self._attribution.facts.broadcasts.setdefault(origin, plan.broadcast)
        numbers = plan.numbers
        wrapped: tuple[int, ...] = ()
        if numbers is None:  # of a body, which is followed for the first time
            numbers = plan.numbers = numbers_of(spec, args, tensors, device)
        if numbers and frame.f_code not in ENGINE_CODES:  # what the engine issues, a node has saved
            wrapped = self._numbers.book(args, numbers, device, origin)
        result = make_outputs(self._ledger, plan, tensors, device, origin, memories)
        if plan.workspace is not None:
            self._decompositions.note(plan.workspace, device, origin)
        if wrapped:
            recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
            kept = result if recorded else None
            self._numbers.release(spec, numbers, wrapped, device, kept)
        return result


def numbers_of(
    spec: OperatorSpec, args: tuple[Any, ...], tensors: list[Tensor], device: DeviceLedger
) -> tuple[int, ...]:
    """Return the positions of Python numbers that C++ wrapped in tensors of the host's."""
    if len(tensors) >= len(spec.tensors) or device.device != _CPU:
        return ()
    return spec.numbers(args)
