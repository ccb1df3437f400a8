"""The parts of a trace that those who run its operators share; operators that are not one kernel.

The body of a composite operator runs once for its geometry. Its plan repeats its requests in their
order, with what was given back between them, so that the caching allocator is asked the same by
every call. Where the shape of outputs depends on data, the data decides if it is known.
"""

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pytest_torchmem.interception import plan as plans
from pytest_torchmem.interception.attribution import Attribution, asking_frame
from pytest_torchmem.interception.conversion import Conversion
from pytest_torchmem.interception.ledger import DeviceLedger, Ledger
from pytest_torchmem.interception.phases import EngineOrder, Phases, Streams
from pytest_torchmem.interception.placement import Placement, WrappedNumbers, make_outputs
from pytest_torchmem.interception.sparse import has_compressed, has_sparse
from pytest_torchmem.interception.values.answers import is_same
from pytest_torchmem.interception.values.contents import Values
from pytest_torchmem.interception.values.known import KnownValues
from pytest_torchmem.operators.checks import check_masks
from pytest_torchmem.operators.workspace import Buffer, Workspace, joined
from pytest_torchmem.profile.timeline import Confidence, Kind, Origin
from pytest_torchmem.step.trees import argument_leaves, argument_tensors
from pytest_torchmem.targets.target import Target
from pytest_torchmem.torch_private.patches import having
from pytest_torchmem.torch_private.tensors import storage_address


class Parts:
    """State of a trace: its target, ledger, attribution, known values and placement."""

    def __init__(
        self, target: Target, ledger: Ledger, attribution: Attribution, values: Values
    ) -> None:
        self.target = target
        self.ledger = ledger
        self.attribution = attribution
        self.values = KnownValues(ledger, attribution, values)
        self.streams = tuple(Streams(ledger.on(device)) for device in target.devices)
        """Those of each GPU, by its index; on the CPU there is one."""
        self.order = EngineOrder()
        self.phases = Phases(ledger, attribution, self.streams)
        self.conversion = Conversion(target, ledger, self.values, attribution, self.phases)
        self.numbers = WrappedNumbers(ledger, self.values.contents)
        self.placement = Placement(target, ledger)


class RunMode(NamedTuple):
    """How operators are run at the moment; the default is as the program's own."""

    placed_on: torch.device | None = None
    """Where outputs go, instead of where the inputs are, while a copy between devices runs."""
    makes_graphs: bool = False
    """Whether graphs of the program are made, of tensors that stand for those of the trace."""
    compiles: bool = False
    """Whether that is the program's own compiler: tensors that stand for others say where these
    are, as the program's own do."""
    graph_on_host: bool = False
    """Whether the graph that it works on has tensors on the host alone."""
    aside: bool = False
    """Whether operators are run on known values, and nothing is booked."""


class Intercepts(Protocol):
    """How those who run operators let others come to the interceptor, or go elsewhere."""

    @property
    def mode(self) -> RunMode:
        """How operators are run at the moment."""

    def intercepting(self) -> AbstractContextManager[None]:
        """Let operators that are issued inside come to the interceptor."""

    def placing_on(self, device: torch.device | None) -> AbstractContextManager[None]:
        """Make their outputs on ``device``."""


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
        self.make(plans.Plan((), None), workspace, [], device, origin)

    def make(
        self,
        plan: plans.Plan,
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
        self, body: Callable[..., Any], call: plans.Call, device: DeviceLedger, origin: Origin
    ) -> tuple[Any, plans.Plan | None]:
        """Run the body of a composite operator once; its plan repeats the requests.

        There is no plan of a sparse gradient (``EmbeddingBag(sparse=True)``): its body runs anew.
        So does one in which values decided a shape, since those of the next call are others.
        """
        operator, kwargs = call.operator, call.kwargs
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _CPU}
        args = operator.with_numbers_as_tensors(call.args, "cpu")
        asked, position = [] if device.asked is None else device.asked, len(device.events)
        earlier, own, interceptor = len(asked), list[Workspace](), self._interceptor
        in_body = having(self, _asked=own, _within=(device, origin), by_values=False)
        with having(device, asked=asked), in_body:
            with (
                self.within(operator.name),
                interceptor.placing_on(device.device),
                interceptor.intercepting(),
            ):
                result = body(*args, **kwargs)
            self._numbers.settle()
            by_values = self.by_values
        self.by_values |= by_values
        inner = joined(own)
        if has_sparse((result,), {}) or has_compressed((result,), {}):
            return result, None
        plan = plans.plan_of_result(result, call.tensors)
        plan.repeatable = not by_values
        # The first outputs on each new storage, by the storage's index on the device.
        outputs: dict[int, plans.Output] = {}
        leaves = argument_leaves(plan.outputs, (plans.Output, plans.Same))
        for tensor, output in zip(argument_tensors(result), leaves, strict=True):
            if type(output) is plans.Output and plan.slots[output.slot] >= 0:
                record = self._ledger.records.get(storage_address(tensor))
                if record is not None and record.ledger is device:
                    outputs.setdefault(record.index, output)
        plan.steps = steps_of(device, position, asked[earlier:], outputs)
        for index, output in outputs.items():
            sure = device.entries[index - 1].confidence
            if sure is not Confidence.EXACT:
                plan.confidences[output.slot] = sure
        if not inner.is_nothing:
            plan.workspace = inner
            self._asked.append(inner)
        return result, plan


def steps_of(
    device: DeviceLedger,
    position: int,
    asked: Sequence[tuple[int, Buffer]],
    outputs: Mapping[int, plans.Output],
) -> tuple[plans.Step, ...]:
    """Return what was made and given back on ``device`` since ``position`` events.

    ``asked`` are the workspaces that stay that were asked for meanwhile (``DeviceLedger.asked``),
    and ``outputs`` the first outputs on each new storage, by the storage's index in the ledger.
    What is neither theirs nor given back is taken to be given back at the end. From now on what the
    body made for itself counts as its workspace.
    """
    entries, kept = device.entries, frozenset(device.kept.values())
    buffers = deque(asked)
    steps: list[plans.Step] = []
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
            steps.append(plans.Temporary(made, nbytes, shape, dtype, label, confidence))
    steps += [buffer for _, buffer in buffers]
    steps += [-number for number in numbers.values()]
    return tuple(steps)


INDICES = (torch.int64, torch.int32)
_MASKS = (torch.bool, torch.uint8)
_STATISTICS = os.path.join(os.path.dirname(torch.nn.__file__), "modules", "_functions.py")
"""``SyncBatchNorm`` leaves out the statistics of processes whose batch is empty."""


def plan_from_values(call: plans.Call, values: KnownValues, device: str) -> tuple[plans.Plan, Any]:
    """Return the plan of a call on ``device`` and its outputs with their values.

    Where a tensor that decides the shape has no known values, the plan is that of the outputs that
    an argument says, or of the largest if none will be known; they have no values: None. Raises
    ``UnknownValueError`` where nothing says how large these are.
    """
    contents, operator = values.contents, call.operator
    unknown = _what_is_unknown(call, values)
    if unknown:
        at_most = operator.on(device).at_most
        if at_most is None:
            raise values.unknown(unknown)

        def largest(*args: Any, **kwargs: Any) -> Any:
            outputs = at_most(args, kwargs)
            if outputs is None:
                raise values.unknown(unknown)
            return outputs

        plan = plans.find_plan(operator, call.args, call.kwargs, call.tensors, largest)
        if not _size_given(call):
            values.keep_all(unknown)
        return plan, None
    inputs = [
        contents.value(record, tensor)
        if contents.known(record) is not None
        else torch.zeros(tensor.shape, dtype=tensor.dtype)  # only its geometry matters
        for tensor, record in call.pairs()
    ]
    real = values.run(call, inputs)
    storages = operator.on(device).storages
    if storages is not None:
        real = storages(call.args, call.kwargs, outputs=real)
    return plans.plan_of_result(real, inputs), real


def _what_is_unknown(call: plans.Call, values: KnownValues) -> str:
    """Return what is not known of the shape of a call's outputs, "" where all that decides it is.
    That is also where the program says how large they are at least.
    """
    name, record = call.operator.name, call.operator.record
    decided_by, says = record.decided_by, record.size_argument
    for position in range(len(call.tensors)) if decided_by is None else decided_by:
        known = values.contents.known(call.records[position])
        if known is not None or not call.tensors[position].numel():
            continue
        least = _size_given(call) if record.size_is_least else None
        if not least:
            hint = f", unless {says}= says it" if says else ""
            return f"{name} has an output shape that depends on unknown values{hint}"
        what = f"{name.removeprefix('aten::')} of unknown values"
        values.tell(what, f"assumed to be below {says}={least}")
    return ""


def _size_given(call: plans.Call) -> int | None:
    """Return the argument that says how large the outputs are, where it is given."""
    return call.named.get(call.operator.record.size_argument)


def fills_mask(call: plans.Call) -> bool:
    """Return whether a number on the host is written where a mask is true: nothing is made;
    native/TensorAdvancedIndexing.cpp, ``canDispatchToMaskedFill``.
    """
    if not call.operator.mutated or True in call.args[3:4] or call.args[2].numel() != 1:
        return False
    places = {id(one): record.ledger.device for one, record in call.pairs()}
    given, value = call.args[0], places.get(id(call.args[2]))
    masks = [index for index in call.args[1] if index is not None]
    return (
        value == _CPU
        and len(masks) == 1
        and masks[0].dtype in _MASKS
        and places.get(id(masks[0])) == places.get(id(given))
    )


def _rows_written(call: plans.Call, mask: Tensor) -> int:
    """Return how many rows a mask has, all that it can have but where what is written says less.
    That is broadcast to the shape of what is indexed, where a mask has one dimension
    (native/TensorAdvancedIndexing.cpp, ``index_put_``).
    """
    given, indices = call.args[0], call.args[1]
    if len(call.args) < 3 or sum(index is not None for index in indices) > 1:
        return int(mask.numel())
    behind = given.dim() - mask.dim() - [index is None for index in indices].index(False)
    written = call.args[2]
    rows = written.shape[written.dim() - behind - 1] if written.dim() > behind else 1
    return int(mask.numel() if rows == 1 else rows)


def equal_without_values(call: plans.Call, values: KnownValues) -> bool | None:
    """Return what ``aten::equal`` gives where no values are needed for it, else None.

    native/ReduceOps.cpp, ``cpu_equal``, looks at sizes first, and at whether both are one tensor;
    of floating ones, which may hold NaN, at the elements, as cuda/Equal.cpp does not. Numbers stand
    here for tensors that C++ made of them (constants of a TorchScript graph).
    """
    first, second = call.args[:2]
    if not call.tensors:
        return bool(first == second)
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return None
    if first.shape != second.shape:
        return False
    if not is_same(first, second):
        return None
    on_cpu = call.device is not None and call.device.device.type == "cpu"
    looked_at = on_cpu and (first.is_floating_point() or first.is_complex())
    return None if looked_at and values.contents.are_known(call.records) else True


def without_masks(call: plans.Call, values: KnownValues) -> tuple[Any, ...] | None:
    """Return the arguments of an indexing with boolean masks made indices of known length.

    None where a mask is filled with a number, and where one value is written to every row of an
    unknown mask: how many there are decides nothing. What is written to the rows of a mask says
    otherwise how many they are, and of what is read all rows count as kept. Raises
    ``UnknownValueError`` where a later pass may know them.
    """
    contents = values.contents
    indices = call.args[1]
    if not any(index is not None and index.dtype in _MASKS for index in indices):
        return call.args
    check_masks(call.args[0], indices)
    if fills_mask(call):
        return None
    known = {id(tensor): record for tensor, record in call.pairs()}
    plain: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in _MASKS:
            plain.append(index)
            continue
        record = known[id(index)]
        unknown = contents.known(record) is None or values.is_captured(call)
        if unknown and call.operator.mutated and call.args[2].numel() == 1:
            return None
        values.refuse_captured(call)
        if contents.known(record) is not None:
            count = int(contents.value(record, index).count_nonzero())
        elif asking_frame().f_code.co_filename == _STATISTICS:
            count = index.numel()  # a mask of the processes that have a batch: all of them
        else:
            values.keep_all("a tensor is indexed with a mask of unknown values")
            count = _rows_written(call, index)
        plain.extend([torch.empty(count, dtype=torch.int64, device="meta")] * index.dim())
    return (call.args[0], plain, *call.args[2:])
