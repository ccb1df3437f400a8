"""Operators that are made of others: their bodies, run once, and the plans that repeat them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pytest_torchmem.interception.call import Call
from pytest_torchmem.interception.layouts.sparse import has_sparse
from pytest_torchmem.interception.ledger import DeviceLedger, Ledger
from pytest_torchmem.interception.parts import Intercepts
from pytest_torchmem.interception.plan import Output, Plan, Same, plan_of_result
from pytest_torchmem.interception.requests import steps_of
from pytest_torchmem.interception.wrapped_numbers import WrappedNumbers
from pytest_torchmem.operators.workspace import Workspace, joined
from pytest_torchmem.profile.timeline import Confidence
from pytest_torchmem.step.trees import argument_leaves, argument_tensors
from pytest_torchmem.torch_private.storages import storage_address

_CPU = torch.device("cpu")


class Decompositions:
    """Runs what operators are made of, and knows which one is running."""

    def __init__(self, interceptor: Intercepts, ledger: Ledger, numbers: WrappedNumbers) -> None:
        self._interceptor = interceptor
        self._ledger = ledger
        self._numbers = numbers
        self._asked: list[Workspace] = []
        """What kernels of the body that is running take and no formula gives."""
        self.running = ""
        """The outermost operator whose body is running: what it makes is attributed to it."""

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Have what is made be attributed to the operator ``name``, or to the one around it."""
        outer, self.running = self.running, self.running or name
        try:
            yield
        finally:
            self.running = outer

    def note(self, workspace: Workspace) -> None:
        """Keep for the plan of the body that is running what no formula gives."""
        if self.running and (workspace.unknown or workspace.questions):
            self._asked.append(workspace)

    def run(
        self, body: Callable[..., Any], call: Call, device: DeviceLedger
    ) -> tuple[Any, Plan | None]:
        """Run the operators that one is made of once; its plan repeats what they asked for.

        There is no plan of a sparse gradient (``EmbeddingBag(sparse=True)``): its body runs anew.
        """
        __tracebackhide__ = True
        operator, kwargs = call.operator, call.kwargs
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _CPU}
        args = operator.with_numbers_as_tensors(call.args, "cpu")
        outermost = device.asked is None
        if device.asked is None:
            device.asked = []
        asked, position, earlier = device.asked, len(device.events), len(device.asked)
        outer_asked, self._asked = self._asked, []
        interceptor = self._interceptor
        try:
            with (
                self.within(operator.name),
                interceptor.placing_on(device.device),
                interceptor.intercepting(),
            ):
                result = body(*args, **kwargs)
            self._numbers.settle()
        finally:
            inner, self._asked = joined(self._asked), outer_asked
            if outermost:
                device.asked = None
        if has_sparse((result,), {}):
            return result, None
        plan = plan_of_result(result, call.tensors)
        outputs = self._made(plan, result, device)
        plan.steps = steps_of(device, position, asked[earlier:], outputs)
        for index, output in outputs.items():
            sure = device.entries[index - 1].confidence
            if sure is not Confidence.EXACT:
                plan.confidences[output.slot] = sure
        if not inner.is_nothing:
            plan.workspace = inner
            self._asked.append(inner)
        return result, plan

    def _made(self, plan: Plan, result: Any, device: DeviceLedger) -> dict[int, Output]:
        """Return the first outputs on each new storage by the storage's index on ``device``."""
        found: dict[int, Output] = {}
        for tensor, output in zip(
            argument_tensors(result), argument_leaves(plan.outputs, (Output, Same)), strict=True
        ):
            if type(output) is Output and plan.slots[output.slot] >= 0:
                record = self._ledger.records.get(storage_address(tensor))
                if record is not None and record.ledger is device:
                    found.setdefault(record.index, output)
        return found
