"""Composite operators: their bodies, run once, and the plans that repeat them.

A body runs once for its geometry. Its plan repeats its requests in their order, with what was given
back between them, so that the caching allocator is asked the same by every call.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.interception.ledger import DeviceLedger, Ledger
from pytest_torchmem.interception.materialize import make_outputs
from pytest_torchmem.interception.parts import Intercepts
from pytest_torchmem.interception.plan import (
    Call,
    Output,
    Plan,
    Same,
    Step,
    Temporary,
    plan_of_result,
)
from pytest_torchmem.interception.sparse import has_compressed, has_sparse
from pytest_torchmem.interception.wrapped_numbers import WrappedNumbers
from pytest_torchmem.operators.workspace import Buffer, Workspace, joined
from pytest_torchmem.profile.timeline import Confidence, Kind, Origin
from pytest_torchmem.step.trees import argument_leaves, argument_tensors
from pytest_torchmem.torch_private.patches import having
from pytest_torchmem.torch_private.tensors import storage_address

_CPU = torch.device("cpu")


class Decompositions:
    """Runs what operators are made of, and knows which one is running."""

    def __init__(self, interceptor: Intercepts, ledger: Ledger, numbers: WrappedNumbers) -> None:
        self._interceptor = interceptor
        self._ledger = ledger
        self._numbers = numbers
        self._asked: list[Workspace] = []
        """What kernels of the body that is running take and no formula gives."""
        self._within: tuple[DeviceLedger, Origin] | None = None
        """Where the body that is running is, and what its operators' origin is."""
        self.by_values = False
        """Whether values have decided a shape in the body that is running."""
        self.running = ""
        """The outermost operator whose body is running: what it makes is attributed to it."""

    def within(self, name: str) -> AbstractContextManager[None]:
        """Have what is made be attributed to the operator ``name``, or to the one around it."""
        return having(self, running=self.running or name)

    def take(self, workspace: Workspace, device: DeviceLedger, origin: Origin) -> None:
        """Write down what a library takes beside all outputs."""
        self.make(Plan((), None), workspace, [], device, origin)

    def make(
        self,
        plan: Plan,
        workspace: Workspace | None,
        tensors: list[Tensor],
        device: DeviceLedger,
        origin: Origin,
    ) -> Any:
        """Return what a plan that is followed once returns, with what its kernel takes."""
        plan.follow(workspace or Workspace())
        result = make_outputs(self._ledger, plan, tensors, device, origin)
        if plan.workspace is not None:
            self.note(plan.workspace, device, origin)
        return result

    def note(self, workspace: Workspace, device: DeviceLedger, origin: Origin) -> None:
        """Take note of what no formula gives, also for the plan of the body that is running."""
        device.note(workspace, origin.module)
        if self.running and (workspace.unknown or workspace.questions):
            self._asked.append(workspace)

    def take_within(self, workspace: Workspace) -> None:
        """Write down what a library takes in the course of the body that is running."""
        assert self._within is not None
        self.take(workspace, *self._within)

    def run(
        self, body: Callable[..., Any], call: Call, device: DeviceLedger, origin: Origin
    ) -> tuple[Any, Plan | None]:
        """Run the body of a composite operator once; its plan repeats the requests.

        There is no plan of a sparse gradient (``EmbeddingBag(sparse=True)``): its body runs anew.
        So does one in which values decided a shape, since those of the next call are others.
        """
        operator, kwargs = call.operator, call.kwargs
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _CPU}
        args = operator.with_numbers_as_tensors(call.args, "cpu")
        outermost = device.asked is None
        if device.asked is None:
            device.asked = []
        asked, position, earlier = device.asked, len(device.events), len(device.asked)
        outer_asked, self._asked = self._asked, []
        outer_by_values, self.by_values = self.by_values, False
        outer, self._within = self._within, (device, origin)
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
            self._within = outer
            by_values, self.by_values = self.by_values, self.by_values or outer_by_values
            if outermost:
                device.asked = None
        if has_sparse((result,), {}) or has_compressed((result,), {}):
            return result, None
        plan = plan_of_result(result, call.tensors)
        plan.repeatable = not by_values
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


def steps_of(
    device: DeviceLedger,
    position: int,
    asked: Sequence[tuple[int, Buffer]],
    outputs: Mapping[int, Output],
) -> tuple[Step, ...]:
    """Return what was made and given back on ``device`` since ``position`` events.

    ``asked`` are the workspaces that stay that were asked for meanwhile (``DeviceLedger.asked``),
    and ``outputs`` the first outputs on each new storage, by the storage's index in the ledger.
    What is neither theirs nor given back is taken to be given back at the end. From now on what the
    body made for itself counts as its workspace.
    """
    entries, kept = device.entries, frozenset(device.kept.values())
    buffers = deque(asked)
    steps: list[Step] = []
    made = 0
    numbers: dict[int, int] = {}
    """The temporaries so far, from 1 on, by their indices."""
    for place, event in enumerate(device.events[position:], start=position):
        while buffers and buffers[0][0] <= place:
            steps.append(buffers.popleft()[1])
        index = abs(event)
        if event < 0:
            if index in numbers:
                steps.append(-numbers.pop(index))
        elif index in outputs:
            steps.append(outputs[index])
        elif index not in kept:
            entry = entries[index - 1]
            entries[index - 1] = entry._replace(kind=Kind.WORKSPACE)
            made += 1
            numbers[index] = made
            nbytes, _, _, shape, dtype, label, confidence = entry
            steps.append(Temporary(made, nbytes, shape, dtype, label, confidence))
    steps += [buffer for _, buffer in buffers]
    steps += [-number for number in numbers.values()]
    return tuple(steps)
