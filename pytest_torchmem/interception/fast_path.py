"""The shortest way of a call, which most calls of a step can go.

Its plan is known, its values are not computed, or by its own tensors, and it writes to nothing that
was there before: its outputs, and what its kernel takes, are all that there is to book.
``kernels.py`` runs every call, and says what is left out here; both write down the same. Here a
step of Python counts.
"""

from operator import attrgetter
from typing import Any, Final

from torch import Tensor

from pytest_torchmem.interception.beside_outputs import BesideOutputs
from pytest_torchmem.interception.decompose import Decompositions
from pytest_torchmem.interception.gradient_accumulation import SUM, GradientSums
from pytest_torchmem.interception.layouts.quantized import QuantizedTensors
from pytest_torchmem.interception.ledger import StorageRecord
from pytest_torchmem.interception.materialize import make_outputs
from pytest_torchmem.interception.operator_log import OperatorLog
from pytest_torchmem.interception.parts import Intercepts, Parts
from pytest_torchmem.interception.plan_cache import Plans
from pytest_torchmem.interception.values.policy import NO_MEMORIES
from pytest_torchmem.operators.spec import OperatorSpec
from pytest_torchmem.profile.timeline import Phase

#: What a call gives that has to go the whole way.
LONGER: Final = object()

_BACKWARD = Phase.BACKWARD
_ledger_of = attrgetter("ledger")


class FastPath:
    """Follows plans that are known to be no more than outputs and a workspace."""

    def __init__(
        self,
        interceptor: Intercepts,
        parts: Parts,
        plans: Plans,
        quantized: QuantizedTensors,
        sums: GradientSums,
        log: OperatorLog,
        decompositions: Decompositions,
        beside: BesideOutputs,
    ) -> None:
        self._interceptor = interceptor
        self._ledger = parts.ledger
        self._phases, self._placement = parts.phases, parts.placement
        self._attribution, self._values = parts.attribution, parts.values
        self._known = parts.values.contents.by_address
        self._plans = plans
        self._quantized = quantized
        self._sums = sums
        self._log = log
        self._decompositions = decompositions
        self._beside = beside

    def run(
        self,
        spec: OperatorSpec,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: Any,
        tensors: list[Tensor],
        records: list[StorageRecord],
        frame: Any,
    ) -> Any:
        """Run a call of an operator that ``is_plain``; return ``LONGER`` if it is not as short."""
        known, ledger = self._known, self._ledger
        contents = self._values.contents
        if contents.unwritten and contents.settle(records):
            return LONGER
        for position, record in enumerate(records):  # most often the first ends it
            if record.address not in known and tensors[position].numel():
                computes = False
                break
        else:
            computes = True
            if not spec.reads_in_place or not self._values.computes_shown:
                return LONGER
        if spec.checks_values and not computes:
            return LONGER
        device = records[0].ledger
        if len(ledger.devices) > 1 and [*map(_ledger_of, records)].count(device) < len(records):
            return LONGER
        if (
            self._interceptor.mode.placed_on is not None
            or device.routes
            or self._values.recordings
            or self._quantized.are_there
            or (self._placement.guessed and self._placement.are_guesses(records))
            or (spec.reads_conjugates and True in map(Tensor.is_conj, tensors))
        ):
            return LONGER
        phase, node = self._phases.find(), None
        if phase is _BACKWARD:
            if spec.name == SUM:
                return LONGER
            node = self._sums.operator_in_backward(device.booked)
        plan = self._plans.remembered((spec.cpu, device.device, key))
        if plan is None or not plan.is_plain or plan.work is None:
            return LONGER
        if plan.tells_values and not computes:
            return LONGER
        memories = NO_MEMORIES
        if computes:
            found = self._values.compute_shown(spec, args, kwargs, tensors, records, plan, device)
            if found is None:
                return LONGER
            memories = found
        self._placement.begin_on(device)
        name = self._decompositions.running or spec.name
        origin = self._attribution.origin(phase, name, frame, node)
        start = len(device.events)
        if plan.takes_more:
            beside = self._beside.make
            result = beside(spec, args, tensors, plan, device, frame, origin, memories)
        else:
            result = make_outputs(ledger, plan, tensors, device, origin, memories)
        if computes:
            self._values.show(plan, result, memories)
        self._log.note(tensors, records, plan.work, device, origin, start)
        return result
