"""What stands in for kernels: a call's plan is found or made, its outputs are, and both booked.

In this order: the tensors' storages are looked up, the device is found, the plan is looked up or
made (``plan.py``), outputs are made from it (``placement.py``), what the kernel takes is
booked, and what is known of values is noted.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from pytest_torchmem.interception import decompose, operator_log, placement, sparse
from pytest_torchmem.interception import plan as plans
from pytest_torchmem.interception.decompose import Intercepts, Parts
from pytest_torchmem.interception.layouts import Layouts, QuantizedTensors, is_observed_first
from pytest_torchmem.interception.ledger import DeviceLedger, StorageRecord
from pytest_torchmem.interception.phases import SUM, GradientSums, References
from pytest_torchmem.interception.plan import Call, Output, Plan, Same, geometry_of_arguments
from pytest_torchmem.interception.refusals import REFUSALS, Refusals, in_words_of_kernel
from pytest_torchmem.interception.values.answers import may_be_assumed
from pytest_torchmem.interception.values.computed import workspace_here
from pytest_torchmem.interception.values.contents import NO_MEMORIES
from pytest_torchmem.operators import workspace
from pytest_torchmem.operators.calls import GivenCall
from pytest_torchmem.operators.checks import check_apart, check_written_once, keeps_apart
from pytest_torchmem.operators.layouts import COMPRESSED
from pytest_torchmem.operators.spec import OperatorSpec
from pytest_torchmem.operators.workspace_of import CallWork, library_state, workspace_of
from pytest_torchmem.profile.timeline import Origin, Phase
from pytest_torchmem.step.trees import Args, Kwargs, argument_tensors, replace_tensors
from pytest_torchmem.torch_private.distributed import GATHERS_LISTS, flattened_like, with_work
from pytest_torchmem.torch_private.kernels import LIKE_ANOTHER, kernel_for, run_composite_explicit
from pytest_torchmem.torch_private.patches import having
from pytest_torchmem.torch_private.tensors import ENGINE_CODES, TensorBase, storage_address

_CPU = torch.device("cpu")
_BACKWARD = Phase.BACKWARD
_ledger_of = attrgetter("ledger")
_TO_COPY = "aten::_to_copy"
LONGER: Final = object()
"""What a call gives that has to go the whole way."""
_WITH_BODIES_IN_CPP = ("aten", "prims")
"""Operators whose bodies, where they have any, are torch's own and run below autograd."""


class Kernels:
    """Runs the operators that are one kernel, or a body of others, on hollow tensors."""

    def __init__(
        self, interceptor: Intercepts, parts: Parts, layouts: Layouts, alone: References | None
    ) -> None:
        self.sums = GradientSums(alone)
        self._interceptor = interceptor
        self._parts = parts
        self._phases, self._placement = parts.phases, parts.placement
        self._attribution, self._values = parts.attribution, parts.values
        self._conversion, self._target = parts.conversion, parts.target
        self._on_gpu = parts.target.gpu is not None
        self._ledger = parts.ledger
        self._layouts = layouts
        self._plans = plans.Plans(parts.target)
        self._refusals = Refusals()
        self._quantized = QuantizedTensors(parts)
        self.in_flight = InFlight()
        self._log = operator_log.OperatorLog(parts.attribution, parts.ledger)
        self.decompositions = decompose.Decompositions(interceptor, parts.ledger, parts.numbers)

    # -- one operator ------------------------------------------------------------------------------

    def run(self, spec: OperatorSpec, args: Args, kwargs: Kwargs) -> Any:
        """Run an operator on whatever tensors it is called with."""
        if kwargs:
            layout = kwargs.get("layout")
            if layout in COMPRESSED:
                self._phases.find()
                return self._layouts.run_compressed(spec, args, kwargs)
            if layout is torch.sparse_coo and not (
                args and isinstance(args[0], Tensor) and args[0].layout is torch.strided
            ):
                self._phases.find()
                return self._layouts.run_sparse(spec, args, kwargs)
        tensors: list[Tensor] = []
        try:
            key: Any = geometry_of_arguments(args, tensors)
            if kwargs:
                key = (key, *kwargs, geometry_of_arguments((*kwargs.values(),), tensors))
        except RuntimeError:  # of a tensor that has no strides
            if any(map(is_lazy, argument_tensors((args, kwargs)))):
                return self._run_on_lazy(spec, args, kwargs)
            run = self._layouts.find(spec, args, kwargs)
            if run is None:
                raise
            self._phases.find()
            return self._run_layout(run, spec, args, kwargs)
        records = self._records(tensors)
        if records is None:
            return self._run_unrecorded(spec, args, kwargs)
        frame = sys._getframe(2)
        if spec.is_plain and records:
            result = self._run_plain(spec, args, kwargs, key, tensors, records, frame)
            if result is not LONGER:
                return result
        call = Call(spec, args, kwargs, tensors, records)
        device = self._placement.device_of(call, self._interceptor.mode.placed_on)
        if device is None:
            return spec.overload(*args, **kwargs)
        call.device = device
        if kwargs and kwargs.get("generator") is not None:
            placement.check_generator(kwargs["generator"], device.device)
        self._phases.find()
        if spec.masks and device.device != _CPU:
            call = self._with_indices_on_gpu(call, device)
        if self._quantized.are_there and any(one.is_quantized for one in tensors):
            return self._quantized.run(call, device, frame)
        if spec.holds:
            self._ledger.note_kinds(spec.held(args, kwargs))
        if self._ledger.phase is _BACKWARD and self._sums_in_place(call, device, frame):
            return tensors[0]
        if not (spec.dynamic or spec.makes_work or spec.leaves_work):
            return self._run_planned(call, key, device, frame)
        if spec.dynamic and self._plans.own_meta(spec, device.device.type) is None:
            return self._run_dynamic(call, device, frame)
        on_gpu = device.device.type == "cuda"
        if spec.leaves_work:
            result = self._run_planned(call, key, device, frame)
            held = tensors if device.device.type in spec.record.work_holds else ()
            self.in_flight.begin(argument_tensors(result), held, stashes=on_gpu)
            return result
        if not spec.makes_work:
            return self._run_planned(call, key, device, frame)
        lists = args[0] if on_gpu and spec.name == GATHERS_LISTS else ()
        with self._interceptor.intercepting():
            flattened = [flat for one in lists if (flat := flattened_like(one)) is not None]
        self._run_planned(call, key, device, frame)
        return with_work(spec.overload, args, tensors, flattened, waits=on_gpu)

    def _run_plain(
        self,
        spec: OperatorSpec,
        args: Args,
        kwargs: Kwargs,
        key: Any,
        tensors: list[Tensor],
        records: list[StorageRecord],
        frame: Any,
    ) -> Any:
        """Run a call of an operator that ``is_plain`` the shortest way; a step of Python counts.

        Its plan is known, its values are not computed, or by its own tensors, and it writes to
        nothing that was there before: its outputs, and what its kernel takes, are all that there is
        to book. Returns ``LONGER`` where that is not so.
        """
        ledger, contents = self._ledger, self._values.contents
        if contents.are_unwritten and contents.settle(records):
            return LONGER
        for position, record in enumerate(records):  # most often the first ends it
            if record.content is None and tensors[position].numel():
                computes = False
                break
        else:
            computes = True
            if not (spec.reads_in_place and self._values.computes) or contents.are_of_ranks:
                return LONGER
        if spec.checks_values and not computes:
            return LONGER
        device = records[0].ledger
        if spec.has_body and torch.is_autocast_enabled(device.device.type):
            return LONGER
        if len(ledger.devices) > 1 and [*map(_ledger_of, records)].count(device) < len(records):
            return LONGER
        if (
            self._interceptor.mode.placed_on is not None
            or device.routes
            or self._values.recordings
            or self._quantized.are_there
            or (self._placement.has_guessed and placement.are_guesses(records))
            or (spec.reads_conjugates and True in map(Tensor.is_conj, tensors))
        ):
            return LONGER
        phase, node = self._phases.find(), None
        if phase is _BACKWARD:
            if spec.name == SUM:
                return LONGER
            node = self.sums.operator_in_backward(device.booked)
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
        self._placement.last = device
        name = self.decompositions.running or spec.name
        origin = self._attribution.origin(phase, name, frame, node)
        start = len(device.events)
        if plan.takes_more:
            result = self._make_more(spec, args, tensors, plan, device, frame, origin, memories)
        else:
            result = placement.make_outputs(ledger, plan, tensors, device, origin, memories)
        if computes:
            self._values.show(plan, result, memories)
        self._log.note(tensors, records, plan.work, device, origin, start)
        return result

    def _make_more(
        self,
        spec: OperatorSpec,
        args: Args,
        tensors: list[Tensor],
        plan: Plan,
        device: DeviceLedger,
        frame: Any,
        origin: Origin,
        memories: Mapping[int, Tensor],
    ) -> Any:
        """Return what a plan returns, whose numbers were wrapped in tensors before."""
        if plan.broadcast:
            self._attribution.facts.broadcasts.setdefault(origin, plan.broadcast)
        numbers = plan.numbers
        wrapped: tuple[int, ...] = ()
        if numbers is None:  # of a body, which is followed for the first time
            numbers = plan.numbers = _numbers_of(spec, args, tensors, device)
        if numbers and frame.f_code not in ENGINE_CODES:  # what the engine issues, a node has saved
            wrapped = self._parts.numbers.book(args, numbers, device, origin)
        result = placement.make_outputs(self._ledger, plan, tensors, device, origin, memories)
        if plan.workspace is not None:
            self.decompositions.note(plan.workspace, device, origin)
        if wrapped:
            recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
            kept = result if recorded else None
            self._parts.numbers.release(spec, numbers, wrapped, device, kept)
        return result

    def _with_indices_on_gpu(self, call: Call, device: DeviceLedger) -> Call:
        """Return a call whose indices, and a number that is written, are copies on the GPU where
        they are on the host; native/TensorAdvancedIndexing.cpp, _index_put_impl_ and make_info.
        Sums begin with indices where they are (native/cuda/Indexing.cu, computeLinearIndex).
        """
        on_host = {id(tensor) for tensor, record in call.pairs() if record.ledger.device == _CPU}
        if not on_host or decompose.fills_mask(call):
            return call

        def on_gpu(tensor: Any, *, is_index: bool = False) -> Any:
            if id(tensor) not in on_host or (is_index and tensor.dtype not in decompose.INDICES):
                return tensor
            with (
                self.decompositions.within(call.operator.name),
                self._interceptor.placing_on(device.device),
                self._interceptor.intercepting(),
            ):
                copied = torch.ops.aten._to_copy.default(tensor)
                return copied.long() if is_index else copied

        input, indices, *others = call.args
        others[:1] = [on_gpu(value) if value.dim() == 0 else value for value in others[:1]]
        if True not in others[1:2]:
            indices = [on_gpu(index, is_index=True) for index in indices]
        args = (input, indices, *others)
        tensors = argument_tensors((args, call.kwargs))
        records = [self._ledger.records[storage_address(tensor)] for tensor in tensors]
        return replace(call, args=args, tensors=tensors, records=records)

    def _run_on_lazy(self, spec: OperatorSpec, args: Args, kwargs: Kwargs) -> Any:
        """Run an operator on parameters without a shape, which refuse to be asked for one. In C++
        they are tensors of nothing (``UninitializedTensorMixin`` in torch/nn/parameter.py).
        """
        given: dict[int, Tensor] = {}

        def plain(tensor: Tensor) -> Tensor:
            if not is_lazy(tensor):
                return tensor
            as_it_is = TensorBase.as_subclass(tensor, Tensor)
            given[id(as_it_is)] = tensor
            return as_it_is  # type: ignore[no-any-return]

        result = self.run(spec, *replace_tensors((args, kwargs), plain))
        return given.get(id(result), result)

    def _run_planned(self, call: Call, key: Any, device: DeviceLedger, frame: Any) -> Any:
        """Run a call whose outputs' geometry follows from that of its arguments."""
        spec, planned = call.operator, None
        if (spec.mutated or spec.mutated_names) and call.may_overlap() and keeps_apart(spec):
            check_apart(spec, call.args, call.kwargs, call.tensors, call.records)
        if spec.masks:
            plain = decompose.without_masks(call, self._values)
            if plain is None:
                nothing_made = Plan((), Same(0))
                computed = self._values.compute(call, nothing_made)
                self._values.note(call, nothing_made, call.args, computed)
                return call.args[0]
            planned = (plain, call.kwargs)
            key = (key, plans.geometry_of(plain, []))
        if spec.reads_conjugates and any(map(Tensor.is_conj, call.tensors)):
            key = (key, *map(Tensor.is_conj, call.tensors))
        if spec.record.also_by is not None:
            key = (key, spec.record.also_by(call.tensors))
        if spec.has_body and torch.is_autocast_enabled(device.device.type):
            key = (key, torch.get_autocast_dtype(device.device.type))
        key = (spec.cpu, device.device, key)  # as the overload does, and is the same for a spec
        captured = False
        if device.routes:
            captured = self._values.is_captured(call)
            if captured and spec.on(device.device.type).host_outputs:
                key = (*key, "captured")
        plan = self._plans.remembered(key)
        unwritten = spec.composite and self._values.contents.are_unwritten
        # A body writes to copies of what nobody has written to: so its outputs come to be known.
        if plan is not None and not (unwritten and self._values.contents.settle(call.records)):
            return self._follow(call, plan, device, frame)
        check, on_gpu = spec.on(device.device.type).check, device.device != _CPU
        self._refusals.check(spec, call.args, call.kwargs, on_gpu=on_gpu)
        if check is not None:
            check(call.args, call.kwargs)
        check_written_once(spec, call.args, call.kwargs)
        body = self._body(spec, device.device.type) if call.tensors else None
        shapes = [tensor.shape for tensor in call.tensors]
        try:
            if body is not None:
                result, plan = self._run_body(body, call, device, frame)
            else:
                given = planned or (call.args, call.kwargs)
                plan = self._plans.make(call, given, device.device, captured=captured)
        except (*REFUSALS, AssertionError) as error:
            # An author's own function for ``meta`` may assert that tensors are on a GPU.
            shows = body is None and isinstance(error, (RuntimeError, AssertionError))
            if shows and self._values.can_show_geometry(spec):
                return self._run_dynamic(call, device, frame)
            found = in_words_of_kernel(spec, call.args, call.kwargs, error, on_gpu=on_gpu)
            try:
                if found is error:
                    raise
                raise found from None
            finally:
                del found  # a frame that holds what it raised is a cycle, and holds the tensors
        if body is None:
            assert plan is not None
            self._learn_more(call, plan, device)
            self._plans.remember(key, plan)
            return self._follow(call, plan, device, frame)
        # A body in Python may be differentiated through: only by running it is it recorded. Nor is
        # there a plan of one that resizes what it is given (``out=``).
        of_torch = spec.overload.namespace in _WITH_BODIES_IN_CPP
        resized = shapes != [tensor.shape for tensor in call.tensors]
        if plan is not None and plan.repeatable and of_torch and not resized:
            plan.tells_values = may_be_assumed(spec, call.tensors, result)
            plan.is_plain = spec.is_plain and not plan.on_host
            self._plans.remember(key, plan)
        return result

    def _run_body(
        self, body: Callable[..., Any], call: Call, device: DeviceLedger, frame: Any
    ) -> tuple[Any, Plan | None]:
        """Run the body of a composite operator; return its result, and its plan if it has one."""
        start, origin = len(device.events), self._origin(call.operator, frame)
        of_torch = call.operator.on(device.device.type).decomposition is None
        ahead = self._values.ahead_of_body(call, of_torch=of_torch)
        with self._log.body() as inner, having(self._placement, in_cpp=of_torch):
            result, plan = self.decompositions.run(body, call, device, origin)
        if torch.is_autocast_enabled(device.device.type) and any(
            work.spec.name == _TO_COPY for work in inner
        ):  # it calls what autocast lowers, as ``_trilinear`` does ``bmm``
            if device.device != _CPU:
                ahead = None  # the CPU's kernel does not lower what CUDA's does
            if plan is not None:
                plan.repeatable = False
        work = CallWork(call.operator, call.args, call.kwargs, result)
        work.of_body(tuple(inner))
        if plan is not None:
            plan.work = work
            self._values.note_body(call, plan, result, ahead, of_torch=of_torch)
        self._log.note(call.tensors, call.records, work, device, origin, start)
        return result, plan

    def _follow(self, call: Call, plan: Plan, device: DeviceLedger, frame: Any) -> Any:
        """Make what a plan says a kernel returns, and book what it takes."""
        spec, ledger, values = call.operator, self._ledger, self._values
        name = self.decompositions.running or spec.name
        origin = self._attribution.origin(ledger.phase, name, frame, call.node)
        start = len(device.events)
        memories = values.compute(call, plan)
        if memories is None and spec.checks_values:
            values.check(call)
        memory, tensors = memories or NO_MEMORIES, call.tensors
        if plan.takes_more:
            result = self._make_more(spec, call.args, tensors, plan, device, frame, origin, memory)
        else:
            result = placement.make_outputs(ledger, plan, tensors, device, origin, memory)
        guesses = self._on_gpu and (self._placement.has_guessed or not call.records)
        guesses = guesses and self._interceptor.mode.placed_on is None
        if guesses and placement.are_guesses(call.records):
            self._placement.guess(result)
        if spec.record.copies_across and len(ledger.devices) > 1:
            self._stage(call, result, device)
        if memories is not None or plan.tells_values or values.recordings:
            values.note(call, plan, result, memories)
        if plan.work is not None:
            self._log.note(call.tensors, call.records, plan.work, device, origin, start)
        return result

    def _learn_more(self, call: Call, plan: Plan, device: DeviceLedger) -> None:
        """Find out what the kernel of a new plan takes, and when it makes its outputs."""
        spec, args, tensors = call.operator, call.args, call.tensors
        plan.numbers = numbers = _numbers_of(spec, args, tensors, device)
        given, where, result = list(args), device.device.type, plan.on_meta(tensors)
        for position in numbers:  # which are wrapped in tensors without data
            dtype = workspace.type_of_number(args[position])
            given[position] = torch.empty((), dtype=dtype, device="meta")
        taken = workspace_of(self._target, where, spec, result, tuple(given), call.kwargs)
        is_estimate = where == "cpu" and taken is not None and taken.is_estimate
        if is_estimate and self._target.host.is_this_machine:
            taken = workspace_here(call, plan, result) or taken
        plan.follow(taken or workspace.Workspace(), spec.on(where).order)
        plan.work = CallWork(spec, args, call.kwargs, result)
        plan.broadcast = plans.broadcast_of(spec.overload, tensors, plan)
        plan.takes_more = bool(numbers or plan.broadcast or plan.workspace is not None)
        plan.tells_values = may_be_assumed(spec, tensors, result)
        plan.is_plain = spec.is_plain and not plan.on_host

    def _body(
        self, spec: OperatorSpec, device: str, outputs: Any = None
    ) -> Callable[..., Any] | None:
        """Return the runner of a composite operator; None for a leaf. One whose outputs' shape
        depends on data is shown ``outputs`` of the shape that they have.
        """
        decomposition = spec.on(device).decomposition
        if decomposition is not None:
            take = self.decompositions.take_within
            given: dict[str, Any] = {"machine": self._target.machine(device), "outputs": outputs}
            given["take"] = lambda found: take(workspace.as_workspace(found, spec.name))
            return lambda *args, **kwargs: decomposition(
                args, kwargs, call=GivenCall(args, kwargs, spec.overload), **given
            )
        if spec.composite and not spec.one_kernel_on(self._target.device.type):
            return partial(run_composite_explicit, spec.overload)
        key = spec.on(device).python_kernel
        return None if key is None else partial(kernel_for(spec.overload), key)

    def _sums_in_place(self, call: Call, device: DeviceLedger, frame: Any) -> bool:
        """Whether this is a sum of two gradients that the engine would make in the first."""
        call.node = self.sums.operator_in_backward(device.booked)
        tensors, records = call.tensors, call.records
        by_engine = call.operator.name == SUM and frame.f_code in ENGINE_CODES
        if not by_engine or len(tensors) != 2:
            return False
        if self.sums.in_place(tensors[0], tensors[1], records[0], sys.getrefcount(tensors[0])):
            self._values.add_in_place(call)
            return True
        streams = self._parts.streams[device.device.index or 0]
        if streams.several and self.sums.is_sum(records[0]):
            streams.enter_sum(tensors[0].shape)
        return False

    def _stage(self, call: Call, result: Any, device: DeviceLedger) -> None:
        """Write down the temporaries of copies between host and GPU."""
        given = call.kwargs.get("non_blocking", call.args[2] if len(call.args) > 2 else False)
        interceptor = self._interceptor
        if not given:  # CUDA waits for such a copy
            self._values.refuse_captured(call)
        with self.decompositions.within(call.operator.name):
            for destination, source, origin in placement.staged_pairs(call, result, device):
                devices = (device.device, origin.device)
                with interceptor.intercepting():
                    placement.stage(
                        destination, source, *devices, bool(given), interceptor.placing_on
                    )

    # -- shapes that depend on data ----------------------------------------------------------------

    def _run_dynamic(self, call: Call, device: DeviceLedger, frame: Any) -> Any:
        """Run an operator whose outputs' shape depends on data, which has to be known."""
        spec, where = call.operator, device.device.type
        body = None if spec.on(where).decomposition else self._body(spec, where)
        if body is not None:
            return self._run_body(body, call, device, frame)[0]
        self._values.refuse_captured(call)
        if spec.name == "aten::equal":
            answer = decompose.equal_without_values(call, self._values)
            if answer is not None:
                return answer
        origin, values = self._origin(spec, frame), self._values
        start = len(device.events)
        self.decompositions.by_values = True
        plan, real = decompose.plan_from_values(call, values, where)
        # Where the outputs' values decide what a kernel takes, they are known here.
        shown = plan.on_meta(call.tensors) if real is None else real
        body = self._body(spec, where, outputs=shown)
        if body is not None:
            result = self.decompositions.run(body, call, device, origin)[0]
            values.forget(argument_tensors(result))  # a body computes other values
        else:
            on_host = spec.on(where).host_outputs
            plan.on_host = frozenset(plan.outputs[position].slot for position in on_host)
            taken = workspace_of(self._target, where, spec, shown, call.args, call.kwargs)
            result = self.decompositions.make(plan, taken, call.tensors, device, origin)
            for position in on_host if real is not None else ():
                values.take(result[position], real[position])
        values.note_outputs(call, result, real)
        work = CallWork(spec, call.args, call.kwargs, result)
        self._log.note(call.tensors, call.records, work, device, origin, start)
        return result

    # -- tensors that have no storage of the ledger ------------------------------------------------

    def _records(self, tensors: list[Tensor]) -> list[StorageRecord] | None:
        """Return the ledger's records of ``tensors``; None where torch's own kernel has to run."""
        get, conversion = self._ledger.records.get, self._conversion
        try:
            found = [*map(get, map(storage_address, tensors))]
        except (RuntimeError, NotImplementedError):  # a tensor without storage: sparse, …
            return None
        if None in found:
            for position, tensor in enumerate(tensors):
                record = get(storage_address(tensor))  # it may be the same as one before
                if record is None:
                    if tensor.device.type == "meta":
                        return None
                    if self._placement.nested is not None and tensor.dim() == 0:
                        # of a number, made by C++ just now
                        record = conversion.meet(tensor, _CPU, sys._getframe(2))
                    else:
                        record = conversion.borrow(tensor)
                found[position] = record
        return found  # type: ignore[return-value]  # a cast would be a call

    def _run_unrecorded(self, spec: OperatorSpec, args: Args, kwargs: Kwargs) -> Any:
        """Run an operator among whose tensors one has no storage of the ledger: meta or sparse."""
        asked = self._interceptor.mode.placed_on or kwargs.get("device")
        if spec.name.startswith(LIKE_ANOTHER) and asked and asked.type != "meta":
            # Like one on ``meta``, on another device (``Module.to_empty``).
            device, values = self._ledger.on(self._target.normalise(asked)), self._values
            self._phases.find()
            own = self._plans.own_meta(spec, device.device.type)
            plan = plans.find_plan(spec, args, kwargs, [], own)
            call = Call(spec, args, kwargs, [], [], device)
            origin = self._attribution.origin(self._ledger.phase, spec.name, sys._getframe(3))
            memories = values.compute(call, plan)
            made = placement.make_outputs(self._ledger, plan, [], device, origin, memories or {})
            values.note(call, plan, made, memories)
            return made
        if not spec.shared.sparse_metadata and sparse.has_sparse(args, kwargs):
            self._phases.find()
            result = self._run_layout(self._layouts.run_sparse, spec, args, kwargs)
            return with_work(spec.overload, args, ()) if spec.makes_work else result
        return spec.overload(*args, **kwargs)

    def _run_layout(
        self, run: Callable[..., Any], spec: OperatorSpec, args: Args, kwargs: Kwargs
    ) -> Any:
        """Run an operator on tensors made of others; a sparse product is logged as one call."""
        entry_flops = spec.on("cpu").entry_flops
        tensors = argument_tensors((args, kwargs))
        if entry_flops is None or all(one.layout is torch.strided for one in tensors):
            return run(spec, args, kwargs)
        device = self._layouts.device_of(args, kwargs)
        start, origin = len(device.events), self._origin(spec, sys._getframe(4))
        with self._log.body():
            result = run(spec, args, kwargs)
        parts = [part for one in tensors for part in sparse.parts_of(one)]
        work = CallWork(spec, args, kwargs, result)
        read = sum(part.untyped_storage().nbytes() for part in parts)
        work.of_entries(int(entry_flops(args, kwargs)), read)
        records = self._records(parts) or []
        self._log.note(list(tensors), records, work, device, origin, start)
        return result

    # -- other kinds -------------------------------------------------------------------------------

    def item(self, spec: OperatorSpec, tensor: Tensor) -> Any:
        if not isinstance(tensor, Tensor):  # one that a number is wrapped in comes as that number
            return tensor
        records = self._records([tensor])
        if records is None:
            return TensorBase.item(tensor)
        self._values.refuse_captured(Call(spec, (tensor,), {}, [tensor], records))
        return self._values.item(tensor, records[0])

    def resize(self, spec: OperatorSpec, args: Args, kwargs: Kwargs) -> Tensor:
        """Give a tensor another shape, and a larger storage where its own is too small."""
        tensor: Tensor = args[0]
        records = self._records([tensor])
        if records is None:
            return cast(Tensor, spec.overload(*args, **kwargs))
        given = [workspace.on_meta(one) if isinstance(one, Tensor) else one for one in args]
        resized = spec.overload(*given, **kwargs)
        shape = tuple(resized.shape)
        origin = self._attribution.origin(self._phases.find(), spec.name, sys._getframe(3))
        output = Output(0, tensor.dtype, shape, resized.stride(), int(tensor.storage_offset()))
        contents = self._values.contents
        contents.begin_writing(records[0])
        known = contents.known(records[0])
        placement.grow(self._ledger, tensor, output, records[0].ledger, origin)
        if known is not None:
            self._values.keep_resized(tensor, known)
        return tensor

    def zero_tensor(self, spec: OperatorSpec, args: Args, kwargs: Any) -> Tensor:
        """Make a tensor that the dispatcher knows to be all zero; it has no memory anywhere.
        (ATen/ZeroTensorFallback.cpp; ``ZeroTensorAllocator`` gives a null pointer.) Forward
        derivatives use them, and operators that meet one take other paths, in C++.
        """
        call = Call(spec, args, kwargs, [], [])
        device = self._placement.device_of(call, self._interceptor.mode.placed_on)
        if device is None:
            return cast(Tensor, spec.overload(*args, **kwargs))
        made: Tensor = spec.overload(*args, **{**kwargs, "device": _CPU})
        frame, on = sys._getframe(3), device.device
        record = self._conversion.meet(made, on, frame, hollow=True, taken=0)
        if self._values.worth_knowing(made.dtype, made.numel()):
            self._values.contents.show(record, made.untyped_storage().nbytes())
        return made

    def quantized(self, spec: OperatorSpec, args: Args, kwargs: Any) -> Any:
        """Run an operator that makes quantized tensors, or works on packed ones."""
        if not is_observed_first(spec, args):
            return self.run(spec, args, kwargs)
        tensors = argument_tensors((args, kwargs))
        records = self._records(tensors)
        if records is None:
            return spec.overload(*args, **kwargs)
        call = Call(spec, args, kwargs, tensors, records)
        device = self._placement.device_of(call, self._interceptor.mode.placed_on)
        if device is None:
            return spec.overload(*args, **kwargs)
        call.device = device
        self._phases.find()
        return self._quantized.run(call, device, sys._getframe(3))

    # -- what kernels take -------------------------------------------------------------------------

    def keep(self, buffer: workspace.Buffer, spec: OperatorSpec, frame: Any) -> None:
        """Book a library's workspace that stays and that an operator makes on its first use."""
        device = self._ledger.on(self._target.device)
        origin = self._attribution.origin(self._phases.find(), spec.name, frame)
        self.decompositions.take(library_state(self._target, buffer, spec), device, origin)

    def _origin(self, spec: OperatorSpec, frame: Any) -> Origin:
        running = self.decompositions.running
        return self._attribution.origin(self._ledger.phase, running or spec.name, frame)


def _numbers_of(
    spec: OperatorSpec, args: Args, tensors: list[Tensor], device: DeviceLedger
) -> tuple[int, ...]:
    """Return the positions of Python numbers that C++ wrapped in tensors of the host's."""
    if len(tensors) >= len(spec.tensors) or device.device != _CPU:
        return ()
    return spec.numbers(args)


class _Work(NamedTuple):
    """What is held as long as one of the outputs was not waited for."""

    outputs: list[Tensor]
    given: list[Tensor]
    stashes: bool
    """Whether what it was given is let go by the first that is waited for."""


class InFlight:
    """What was begun and not waited for, by the storages of the outputs.

    As ``WorkRegistry`` in torch/csrc/distributed/c10d/ProcessGroup.cpp: what nobody waits for
    stays. The work of NCCL holds what it was given until it is waited for, that of gloo as long as
    it is in the registry (``with_work``).
    """

    def __init__(self) -> None:
        self._works: dict[int, list[_Work]] = {}

    def begin(self, outputs: Iterable[Tensor], given: Sequence[Tensor], *, stashes: bool) -> None:
        """Take note of a collective that makes ``outputs``, or writes to them."""
        work = _Work(list(outputs), list(given), stashes)
        for output in work.outputs:
            self._works.setdefault(storage_address(output), []).append(work)

    def wait(self, tensor: Tensor) -> None:
        """Let go of what the collectives hold that make ``tensor``."""
        for work in self._works.pop(storage_address(tensor), ()):
            if work.stashes:
                work.given.clear()
