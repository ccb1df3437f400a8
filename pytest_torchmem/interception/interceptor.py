"""Hollow tensors and the interception of every operator that would reach a kernel.

A hollow tensor is an ordinary CPU tensor whose storage has its true size and no memory. Operators
arrive here below autograd; outputs get the geometry the operator has on ``meta``, as new hollow
tensors whose storages the ledger books.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from pytest_torchmem.interception.attribution import Attribution
from pytest_torchmem.interception.call import Call
from pytest_torchmem.interception.conversion import Border
from pytest_torchmem.interception.decompose import Composites
from pytest_torchmem.interception.find_plan import find_plan, geometry_of, with_types
from pytest_torchmem.interception.gradient_accumulation import GradientSums, References
from pytest_torchmem.interception.layouts.compressed import LAYOUTS
from pytest_torchmem.interception.layouts.layouts import Layouts
from pytest_torchmem.interception.layouts.sparse import has_sparse, reads_no_data, run_sparse
from pytest_torchmem.interception.ledger import DeviceLedger, Ledger, StorageRecord
from pytest_torchmem.interception.materialize import grow, make_hollow, make_outputs
from pytest_torchmem.interception.output_order import steps_in_order
from pytest_torchmem.interception.phases import Phases
from pytest_torchmem.interception.placement import Placement, check_generator
from pytest_torchmem.interception.plan import Output, Plan, Same, remembered_plans
from pytest_torchmem.interception.staging import COPIES, stage, staged_pairs
from pytest_torchmem.interception.streams import Streams
from pytest_torchmem.interception.values.data_dependent import (
    equal_without_values,
    plan_from_values,
    without_masks,
)
from pytest_torchmem.interception.values.known import KnownValues
from pytest_torchmem.interception.wrapped_numbers import WrappedNumbers
from pytest_torchmem.operators.calls import GivenCall
from pytest_torchmem.operators.registry import Kind, generation
from pytest_torchmem.operators.spec import OperatorSpec, spec_of
from pytest_torchmem.operators.workspace import Buffer, Workspace, environment_settings
from pytest_torchmem.operators.workspace_of import library_output, library_state, workspace_of
from pytest_torchmem.profile.timeline import Origin, Phase
from pytest_torchmem.step.imports import imports_within
from pytest_torchmem.step.trees import argument_tensors
from pytest_torchmem.targets.target import Target
from pytest_torchmem.torch_private.autograd import ENGINE_CODE, in_engine_thread
from pytest_torchmem.torch_private.dispatcher import interception
from pytest_torchmem.torch_private.kernels import run_composite_explicit, run_composite_implicit
from pytest_torchmem.torch_private.keys import FAKE, set_excluded
from pytest_torchmem.torch_private.meta import LIKE_ANOTHER
from pytest_torchmem.torch_private.modes import NoFunctionModes, function_modes
from pytest_torchmem.torch_private.operators import OpOverload, is_view
from pytest_torchmem.torch_private.settings import host_settings, kernel_settings
from pytest_torchmem.torch_private.storages import storage_address

_CPU = torch.device("cpu")


class Interceptor:
    """Runs operators on hollow tensors; the fallback of the Fake key for one trace."""

    def __init__(
        self,
        machine: Target,
        ledger: Ledger,
        attribution: Attribution,
        alone: References | None,
    ) -> None:
        self.machine = machine
        self.ledger = ledger
        self.attribution = attribution
        self.values = KnownValues(ledger, attribution)
        self.streams = Streams(ledger.on(machine.device))
        self.phases = Phases(ledger, attribution, self.streams)
        self.border = Border(machine, ledger, attribution, self.phases)
        self.target: torch.device | None = None
        """Where outputs go, instead of where the inputs are, while a copy between devices runs."""
        self.inside = False
        """Whether the profiler itself is at work, and tensors answer as torch made them."""
        self._importing = False
        self.paths: Mapping[str, Callable[..., Any]] = {}
        """What runs composite operators as the GPU does, by name."""
        self._operators: dict[OpOverload, OperatorSpec] = {}
        self._settings: tuple[Any, ...] = ()
        self._find_settings = host_settings if machine.gpu is None else kernel_settings
        self._environment = environment_settings()
        self._plans = remembered_plans(
            machine.host, machine.gpu, machine.calibration, (generation(),)
        )
        self.sums = GradientSums(alone)
        self.numbers = WrappedNumbers(ledger)
        self._placement = Placement(machine, ledger)
        self._layouts = Layouts(self, machine, ledger, self.values, self._placement)
        self._composites = Composites(self, ledger, self.numbers)
        self._let_pass: Callable[[OpOverload], None]

    # -- entry -------------------------------------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run every operator of this thread that would reach a kernel."""
        with interception(self) as self._let_pass, imports_within(self._importing_a_module):
            yield

    @contextmanager
    def _importing_a_module(self) -> Iterator[None]:
        """Let a module make real tensors on the host: it keeps them when the trace is over."""
        was_importing, self._importing = self._importing, True
        try:
            yield
        finally:
            self._importing = was_importing

    def _is_of_the_host(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an operator works on real tensors alone, and makes more of them on the host."""
        if self.target is not None and self.target != _CPU:
            return False
        try:
            records = [
                self.ledger.records.get(storage_address(tensor))
                for tensor in argument_tensors((args, kwargs))
            ]
        except (RuntimeError, NotImplementedError):  # a tensor without storage: sparse, …
            return False
        return not any(record is not None and record.hollow for record in records)

    def __call__(self, overload: OpOverload, *args: Any, **kwargs: Any) -> Any:
        """Run one operator that would have reached a kernel."""
        __tracebackhide__ = True
        if function_modes():
            # Below the dispatcher torch has none: a default device is not for what is made here.
            with NoFunctionModes():
                return self(overload, *args, **kwargs)
        set_excluded(FAKE, True)
        was_inside, self.inside = self.inside, True
        try:
            if self._importing and self._is_of_the_host(args, kwargs):
                return overload(*args, **kwargs)
            operator = self._operators.get(overload)
            if operator is None:
                if is_view(overload):
                    return self._pass(overload, args, kwargs)
                operator = self._operators[overload] = self._operator(overload)
            self.numbers.settle()
            if operator.kind is Kind.LEAF:
                return self._run(operator, args, kwargs)
            return self._run_specially(operator, args, kwargs)
        finally:
            self.inside = was_inside
            set_excluded(FAKE, False)

    def _pass(self, view: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a view operator as it will run from now on, when it does not come here again.

        Numbers do not settle: autograd makes views before the node of an operator in place stands.
        """
        self._let_pass(view)
        with self.intercepting():
            return view(*args, **kwargs)

    def _operator(self, overload: OpOverload) -> OperatorSpec:
        """Return what is to be known of an operator on this machine."""
        spec, device = spec_of(overload), self.machine.device.type
        if spec.on(device).custom is not None:
            return replace(spec, kind=Kind.LEAF, composite=False, opaque=True)
        if spec.name in self.paths:
            return replace(spec, kind=Kind.DECOMPOSED)
        if spec.kind is Kind.DECOMPOSED and spec.one_kernel_on(device):
            return replace(spec, kind=Kind.LEAF)
        return spec

    def _run_specially(self, operator: OperatorSpec, args: tuple[Any, ...], kwargs: Any) -> Any:
        __tracebackhide__ = True
        kind = operator.kind
        run = self._layouts.find(operator, args, kwargs)
        if run is not None:
            self.phases.find()
            return run(operator, args, kwargs)
        if kind is Kind.DECOMPOSED:
            kernel = self.paths.get(operator.name)
            with self.intercepting():
                if kernel is not None:
                    return kernel(*args, **kwargs)
                return run_composite_implicit(operator.overload, *args, **kwargs)
        if kind is Kind.NATIVE:
            return operator.overload(*args, **kwargs)
        if kind is Kind.PASS:
            return None
        if kind is Kind.SCALAR:
            return self._item(args[0])
        if kind is Kind.LIFT:
            return self.border.lift(args[0], self.target or _CPU, sys._getframe(2))
        return self._resize(operator, args, kwargs)

    @contextmanager
    def intercepting(self) -> Iterator[None]:
        """Let operators issued inside of this one come here again."""
        was_inside, self.inside = self.inside, False
        set_excluded(FAKE, False)
        try:
            yield
        finally:
            self.inside = was_inside
            set_excluded(FAKE, True)

    @contextmanager
    def placing_on(self, device: torch.device | None) -> Iterator[None]:
        """Make outputs on ``device`` rather than where their inputs are."""
        before, self.target = self.target, device
        try:
            yield
        finally:
            self.target = before

    @contextmanager
    def working(self) -> Iterator[None]:
        """Let the profiler itself use tensors: nothing is intercepted, devices are torch's own."""
        was_inside, self.inside = self.inside, True
        set_excluded(FAKE, True)
        try:
            with NoFunctionModes():
                yield
        finally:
            self.inside = was_inside
            set_excluded(FAKE, was_inside)

    def enter_optimizer(self) -> None:
        """Begin an optimizer's step."""
        self.numbers.settle()
        self.phases.enter_optimizer()

    def meet(self, tensor: Tensor, device: torch.device = _CPU) -> None:
        """Book a real tensor that C++ made just now on ``device`` without an operator."""
        with self.working():
            self.border.meet(tensor, device, sys._getframe(1))

    def keep(self, buffer: Buffer, overload: OpOverload) -> None:
        """Book a library's workspace that stays and that ``overload`` makes on its first use."""
        device = self.ledger.on(self.machine.device)
        self.phases.find()
        operator = spec_of(overload)
        origin = self.attribution.origin(self.ledger.phase, operator.name, sys._getframe(1))
        self._take(library_state(self.machine, buffer, operator), device, origin)

    # -- one operator ------------------------------------------------------------------------------

    def _run(self, operator: OperatorSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        __tracebackhide__ = True
        if kwargs and kwargs.get("layout") in LAYOUTS:
            self.phases.find()
            return self._layouts.run_compressed(operator, args, kwargs)
        tensors: list[Tensor] = []
        try:
            key: Any = geometry_of(args, tensors)
            if kwargs:
                key = (key, geometry_of(tuple(kwargs.items()), tensors))
        except RuntimeError:  # of a tensor that has no strides
            run = self._layouts.find(operator, args, kwargs)
            if run is None:
                raise
            self.phases.find()
            return run(operator, args, kwargs)
        records = self._records(tensors)
        if records is None:
            return self._run_unrecorded(operator, args, kwargs)
        call = Call(operator, args, kwargs, tensors, records)
        device = self._placement.device_of(call, self.target)
        if device is None:
            return operator.overload(*args, **kwargs)
        if kwargs and kwargs.get("generator") is not None:
            check_generator(kwargs["generator"], device.device)
        frame = sys._getframe(2)
        self.phases.find()
        if self.ledger.phase is Phase.BACKWARD and self._sums_in_place(call, device, frame):
            return tensors[0]
        if operator.dynamic and self._own_meta(operator, device.device) is None:
            body = self._body(operator, device.device.type)
            if body is not None:
                return self._composites.run(body, call, device)[0]
            return self._run_dynamic(call, device, self._origin(operator, frame))
        planned = (args, kwargs)
        if operator.masks:
            plain = without_masks(call, self.values)
            if plain is None:
                self.values.know(call, Plan((), Same(0)), args)
                return args[0]
            planned = (plain, kwargs)
            key = (key, geometry_of(plain, []))
        key = (operator.overload, device.device, key)
        self._follow_settings()
        numbers: tuple[int, ...] = ()
        if len(tensors) < len(operator.tensors) and device.device == _CPU:
            numbers = operator.numbers(args)
        plan = self._plans.get(key)
        is_new = plan is None
        if plan is None:
            body = self._body(operator, device.device.type) if tensors else None
            if body is not None:
                result, plan = self._composites.run(body, call, device)
                if plan is not None:
                    self._plans[key] = plan
                    self.values.know(call, plan, result)
                return result
            plan = self._plans[key] = self._new_plan(call, planned, device.device)
        origin = self._origin(operator, frame)
        result = make_outputs(self.ledger, plan, tensors, device, origin)
        if is_new:
            given = with_types(args, numbers)
            plan.workspace = workspace_of(
                self.machine, device.device.type, operator, result, given, kwargs
            )
        wrapped: tuple[int, ...] = ()
        if numbers and frame.f_code is not ENGINE_CODE:  # what the engine issues, a node has saved
            wrapped = self.numbers.book(args, numbers, device, origin)
        if plan.workspace is not None:
            self._take(plan.workspace, device, origin)
        if wrapped:
            recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
            self.numbers.release(operator, numbers, wrapped, device, result if recorded else None)
        if self.machine.gpu is not None and self.target is None:
            self._placement.note_guess(call, result)
        if len(self.ledger.devices) > 1 and operator.name in COPIES:
            self._stage(call, result, device)
        self.values.know(call, plan, result)
        return result

    def _run_unrecorded(
        self, operator: OperatorSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator among whose tensors one has no storage of the ledger: meta or sparse."""
        __tracebackhide__ = True
        asked = self.target or kwargs.get("device")
        if operator.name.startswith(LIKE_ANOTHER) and asked and asked.type != "meta":
            return self._from_geometry(operator, args, kwargs, self.machine.normalise(asked))
        if has_sparse(args, kwargs) and not reads_no_data(operator):
            self.phases.find()
            with self.intercepting():
                return run_sparse(operator, args, kwargs)
        return operator.overload(*args, **kwargs)

    def _sums_in_place(self, call: Call, device: DeviceLedger, frame: Any) -> bool:
        """Whether this is a sum of two gradients that the engine would make in the first."""
        self.sums.operator_in_backward(len(device.entries))
        tensors, records = call.tensors, call.records
        by_engine = call.operator.name == "aten::add.Tensor" and frame.f_code is ENGINE_CODE
        if not by_engine or len(tensors) != 2:
            return False
        if self.sums.in_place(tensors[0], tensors[1], records[0], sys.getrefcount(tensors[0])):
            return True
        if self.streams.several and self.sums.is_sum(records[0]):
            self.streams.enter_sum(tensors[0].shape)
        return False

    def _new_plan(
        self, call: Call, given: tuple[tuple[Any, ...], dict[str, Any]], device: torch.device
    ) -> Plan:
        """Return the plan of a call that is seen for the first time, asked with what is ``given``.

        Its workspace is found when the outputs are there.
        """
        __tracebackhide__ = True
        operator = call.operator
        plan = find_plan(operator, *given, call.tensors, self._own_meta(operator, device))
        on_device = operator.on(device.type)
        plan.on_host = frozenset(plan.outputs[at].slot for at in on_device.host_outputs)
        plan.steps = steps_in_order(on_device.order, plan)
        reserve = library_output(self.machine, operator, call.args, call.kwargs)
        if reserve is not None:
            plan.resize(*reserve)
        return plan

    def _stage(self, call: Call, result: Any, device: DeviceLedger) -> None:
        """Write down the temporaries of copies between host and GPU."""
        __tracebackhide__ = True
        given = call.kwargs.get("non_blocking", call.args[2] if len(call.args) > 2 else False)
        with self._composites.within(call.operator.name):
            for destination, source, origin in staged_pairs(call, result, device):
                devices = (device.device, origin.device)
                with self.intercepting():
                    stage(destination, source, *devices, bool(given), self.placing_on)

    def _follow_settings(self) -> None:
        """Let plans be those of the settings by which dtypes and kernels are chosen now."""
        settings = self._find_settings()
        if settings != self._settings:
            self._settings = settings
            machine = self.machine
            self._plans = remembered_plans(
                machine.host,
                machine.gpu,
                machine.calibration,
                (generation(), *settings, *self._environment),
            )

    def _origin(self, operator: OperatorSpec, frame: Any) -> Origin:
        return self.attribution.origin(
            self.ledger.phase, self._composites.running or operator.name, frame
        )

    def _own_meta(self, operator: OperatorSpec, device: torch.device) -> Callable[..., Any] | None:
        on_device = operator.on(device.type)
        if on_device.is_missing:
            raise NotImplementedError(
                f"Could not run '{operator.name}' with arguments from the "
                f"'{device.type.upper()}' backend: torch has no kernel of it for "
                f"{device.type.upper()}"
            )
        return on_device.meta

    def _body(self, operator: OperatorSpec, device: str) -> Callable[..., Any] | None:
        """Return what runs an operator as the sequence of others that it is; None for a leaf."""
        decomposition = operator.on(device).decomposition
        if decomposition is not None:
            machine = self.machine.machine(device)
            return lambda *args, **kwargs: decomposition(
                args, kwargs, machine=machine, call=GivenCall(args, kwargs)
            )
        if operator.composite and not operator.one_kernel_on(self.machine.device.type):
            return partial(run_composite_explicit, operator.overload)
        return None

    def _from_geometry(
        self,
        operator: OperatorSpec,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device,
    ) -> Any:
        """Make a tensor like one on ``meta`` on another device (``Module.to_empty``)."""
        self.phases.find()
        plan = find_plan(operator, args, kwargs, [], self._own_meta(operator, device))
        origin = self.attribution.origin(self.ledger.phase, operator.name, sys._getframe(4))
        return make_outputs(self.ledger, plan, [], self.ledger.on(device), origin)

    def _records(self, tensors: list[Tensor]) -> list[StorageRecord] | None:
        """Return the ledger's records of ``tensors``; None where torch's own kernel has to run."""
        get = self.ledger.records.get
        found: list[StorageRecord] = []
        for tensor in tensors:
            try:
                record = get(storage_address(tensor))
            except (RuntimeError, NotImplementedError):  # a tensor without storage: sparse, …
                return None
            if record is None:
                if tensor.device.type == "meta":
                    return None
                if (
                    self._placement.nested is not None and tensor.dim() == 0
                ):  # of a number, made by C++ just now
                    record = self.border.meet(tensor, _CPU, sys._getframe(2))
                else:
                    record = self.border.borrow(tensor)
            found.append(record)
        return found

    def _take(self, workspace: Workspace, device: DeviceLedger, origin: Origin) -> None:
        """Write down what a kernel takes."""
        if workspace.kept:
            in_engine = in_engine_thread()
            for buffer in workspace.kept:
                self.ledger.keep(buffer, in_engine, device, origin)
        if workspace.questions:
            device.questions.update(workspace.questions)
            device.calibrated_workspaces.update(workspace.calibrated)
        if workspace.unknown:
            device.unknown_workspaces.update(workspace.unknown)
        if workspace.requests:
            self.ledger.workspace(workspace.requests, device, origin, workspace.confidence)
        self._composites.note(workspace)

    def _item(self, tensor: Tensor) -> Any:
        __tracebackhide__ = True
        records = self._records([tensor])
        return tensor.item() if records is None else self.values.item(tensor, records[0])

    # -- shapes that depend on data --------------------------------------------------------------

    def _run_dynamic(self, call: Call, device: DeviceLedger, origin: Origin) -> Any:
        """Run an operator whose outputs' shape depends on data, which has to be known."""
        __tracebackhide__ = True
        operator = call.operator
        if operator.name == "aten::equal":
            answer = equal_without_values(call)
            if answer is not None:
                return answer
        plan, real = plan_from_values(call, self.values, device.device.type)
        on_host = operator.on(device.device.type).host_outputs
        host_outputs = {position: plan.outputs[position] for position in on_host}
        if on_host:
            plan.outputs = tuple(
                None if position in on_host else output
                for position, output in enumerate(plan.outputs)
            )
        result = make_outputs(self.ledger, plan, call.tensors, device, origin)
        outputs = list(result) if on_host else []
        for position, output in host_outputs.items():
            nbytes = plan.slots[output.slot]
            outputs[position] = make_hollow(
                self.ledger, output, nbytes, self.ledger.on(_CPU), origin
            )
            self.values.take(outputs[position], real[position])
        # Where the outputs' values decide what a kernel takes, they are known here.
        workspace = workspace_of(
            self.machine, device.device.type, operator, real, call.args, call.kwargs
        )
        if workspace is not None:
            self._take(workspace, device, origin)
        if all(record.known is not None for record in call.records):
            self.values.take(result, real)
        return tuple(outputs) if on_host else result

    def _resize(
        self, operator: OperatorSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        tensor: Tensor = args[0]
        records = self._records([tensor])
        if records is None:
            return cast(Tensor, operator.overload(*args, **kwargs))
        shape = tuple(args[1])
        twin = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
        ).resize_(shape, memory_format=kwargs.get("memory_format"))
        self.phases.find()
        origin = self.attribution.origin(self.ledger.phase, operator.name, sys._getframe(3))
        output = Output(0, tensor.dtype, shape, twin.stride(), int(tensor.storage_offset()))
        grow(self.ledger, tensor, output, records[0].ledger, origin)
        return tensor
