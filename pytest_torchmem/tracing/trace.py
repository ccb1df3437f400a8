"""One trace: the layers switched on, the step run, the layers switched off."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from pytest_torchmem.allocator.device_memory import parse_options
from pytest_torchmem.errors import NoCudaError, TorchmemError, UsageError, add_note, refuse_misspelt
from pytest_torchmem.interception import context, operator_log, placement, split_modules
from pytest_torchmem.interception.attribution import Attribution
from pytest_torchmem.interception.conversion import give_back, give_survivors_data
from pytest_torchmem.interception.interceptor import Interceptor
from pytest_torchmem.interception.ledger import DeviceLedger, Ledger
from pytest_torchmem.interception.values import answers, messages
from pytest_torchmem.interception.values.contents import Values, ValuesMode, ValuesNeeded
from pytest_torchmem.interception.values.known import KnownValues
from pytest_torchmem.interception.world import world_entered
from pytest_torchmem.journal.contents import WHOLE, ProgramState, Reached
from pytest_torchmem.journal.in_place import InPlace
from pytest_torchmem.journal.journal import (
    HandlersDeferred,
    process_kept,
    run_alone,
    settings_kept,
    undisturbed,
)
from pytest_torchmem.profile.profile import MemoryProfile, Suggest, figures_of, host_peak_of
from pytest_torchmem.profile.timeline import Later, Phase, Timeline, without_collections
from pytest_torchmem.step.generators import is_alone, own_generators
from pytest_torchmem.step.step import Step
from pytest_torchmem.step.trees import Args, Kwargs, tensors_in
from pytest_torchmem.targets.gpus import DEFAULT_GPU, MOST_GPUS, Calibration, Gpu, find_gpu
from pytest_torchmem.targets.host import REFERENCE, Host, this_machine
from pytest_torchmem.targets.target import (
    MODELLED,
    NOT_LINKED,
    DeviceName,
    HostName,
    Selected,
    Target,
)
from pytest_torchmem.targets.world import GPUS_OF_A_NODE, World, check_ranks, check_world_size
from pytest_torchmem.torch_private import devices, distributed, self_test, settings, tensors
from pytest_torchmem.tracing import layers
from pytest_torchmem.tracing.compiled import LEVELS, Compiled, Level, at
from pytest_torchmem.tracing.passes import Lowering, run_passes
from pytest_torchmem.units import parse_size

if TYPE_CHECKING:
    from pytest_torchmem.fake_cuda.memory import DeviceMemory

WATCH: ContextVar[Any] = ContextVar("watch", default=None)
"""The ``Watch`` of ``watch.py`` that sees more of a trace than its profile has, if there is one."""
_NOT_STORED = (
    "no answer is stored; pytest --torchmem-update stores them where the extra cudnn of "
    "pytest-torchmem is installed (docs/cudnn.md)"
)
_HOSTS: dict[str, Callable[[], Host]] = {"reference": lambda: REFERENCE, "here": this_machine}
_PASSES = {
    "auto": (Values.ASKED_FOR, Values.WITHIN_BUDGET),
    "real": (Values.REAL,),
    "none": (Values.GUESSED,),
}
"""The passes of a trace; each but the last ends where a value is needed."""
_CPU = torch.device("cpu")


def trace(
    target: Any,
    *args: Any,
    device: DeviceName = "cpu",
    gpu: str | None = None,
    host: HostName = "reference",
    loss_fn: Callable[[Any], Any] | None = None,
    backward: bool = True,
    optimizer: Callable[..., Any] | None = None,
    steps: int = 1,
    allocator: str = "",
    memory: int | str | None = None,
    calibration: Calibration | None = None,
    cudnn: Literal["auto", "stored"] = "auto",
    values: ValuesMode = "auto",
    gpus: int | None = None,
    world_size: int | None = None,
    rank: int | None = None,
    mode: Level | None = None,
    **kwargs: Any,
) -> MemoryProfile:
    """Trace one training step of ``target`` on a fake device, and return its memory in bytes.

    The step of a module is its forward with ``args`` and ``kwargs``, a loss, ``backward()`` and,
    with ``optimizer``, the optimizer's ``step()``. A callable runs as it is. What is traced is
    afterwards as it was. ``torch.compile`` is profiled as compiled: ``MemoryProfile.level``.

    Args:
        target: An ``nn.Module``, also with parameters on ``meta``, or a callable that runs a step.
        *args: The arguments of ``target``.
        device: ``"cpu"`` or ``"cuda"``.
        gpu: The GPU to model on cuda, by its name in the catalogue; by default ``"a100-80gb"``.
        host: ``"reference"``, the same on every machine, or ``"here"``, this machine's CPU; a
            warning says if that was never compared with its allocator.
        loss_fn: From the output to a scalar. Without it the loss is the output's ``.loss``, or else
            the sum of its floating-point tensors that require grad.
        backward: Whether the backward runs.
        optimizer: A class or function of the parameters, such as ``torch.optim.AdamW``.
        steps: How often the step runs, or a callable is called.
        allocator: Options of cuda's caching allocator, as in ``PYTORCH_ALLOC_CONF``. The variable
            itself is not read, so that a trace is the same everywhere.
        memory: The GPU's memory, such as ``"20 GiB"``, or ``"unlimited"``; by default that of the
            named ``gpu``, and unlimited if none is named. A step that needs more raises
            ``torch.OutOfMemoryError`` at the operator at which the GPU would.
        calibration: Workspaces that were measured on GPUs (``calibrate``, ``read_calibration``).
        cudnn: ``"auto"`` asks the cuDNN that is installed for its workspaces, and takes the answers
            stored in ``calibration`` if there is none; ``"stored"`` takes only these.
        values: ``"real"`` computes all values on the CPU, so that a program decides as in reality.
            ``"none"`` computes only small integer and boolean tensors; an unknown value counts as 1
            where the program decides by it, with a warning for the line. ``"auto"`` begins like
            that, and runs the program again with real values, up to a budget, if it decides by one.
        gpus: How many GPUs the program sees, 1 by default; ``MemoryProfile.devices`` has them all.
        world_size: How many processes a distributed program has. ``torch.distributed`` is as in one
            of them, and nothing is sent. A node has 8 GPUs, or ``gpus``.
        rank: Which of the processes is traced, 0 by default.
        mode: ``"eager"``, ``"aot"`` (the graphs of AOTAutograd, operator by operator) or
            ``"inductor"`` (the buffers of Inductor's output code): the level at which modules and
            compiled code run; by default as the program says.
        **kwargs: The keyword arguments of ``target``.

    Raises ``UsageError`` for invalid arguments, ``UnknownValueError`` if the program needs a value
    that is not known, ``UnsupportedOperatorError`` for an operator of unknown output shapes,
    ``UnsupportedTorchError`` if this torch is not supported, and whatever ``target`` raises.
    """
    options = {k: v for k, v in locals().items() if k not in ("target", "args", "kwargs")}
    if mode is not None:
        _check_one_of("mode", mode, LEVELS)
    machine = _machine(device, gpu, gpus, host, calibration, _world(world_size, rank, gpus))
    limit = layers.Memory(parse_options(allocator), *_limit(memory, gpu))
    step = Step(loss_fn, backward, optimizer, steps)
    step.check(target)
    refuse_misspelt(trace, target, kwargs)
    advised = partial(_advised, partial(trace, target, *args, **kwargs), options)
    profiled = partial(_profile, target, args, kwargs, step, advised)
    run = partial(_trace, limit=limit, profiled=profiled, mode=mode)
    with without_collections():  # of what the first trace imports and makes, which is kept
        machine = _with_cudnn(machine, cudnn)
        self_test.check_torch(cuda=machine.gpu is not None)
        _check_one_of("values", values, _PASSES)
        return _in_passes(run, machine, _PASSES[values], target, args, kwargs, loss_fn)


def _in_passes(
    run: Callable[..., MemoryProfile],
    machine: Target,
    passes: tuple[Values, ...],
    target: Any,
    *inputs: Any,
) -> MemoryProfile:
    """Run a step as often as its values need it; what it was given is afterwards as before."""
    reached, lowering = Reached(target, *inputs), Lowering()
    is_module = isinstance(target, nn.Module)
    in_place = InPlace(reached, target, *inputs) if is_module else InPlace(reached)
    if machine.gpu is not None and devices.has_gpu():
        in_place.note_on_gpu(reached.every_tensor())
    state = ProgramState(reached, in_place.references(), keeps=is_module)

    def giving_back(ledger: Ledger) -> Callable[[], None]:
        return partial(give_back, ledger, state, *((WHOLE,) if is_module else ()))

    run = partial(run, in_place, giving_back, lowering=lowering)
    return run_passes(run, machine, passes, state.restore, lowering)


def _advised(again: Callable[..., MemoryProfile], options: Mapping[str, Any], *about: Any) -> Any:
    # Few traces are asked for suggestions, and no other waits for these modules.
    from pytest_torchmem.advice.suggest import suggest

    # What does not fit is what one asks for changes of.
    unlimited = partial(again, **{**options, "memory": "unlimited"})
    return suggest(unlimited, options["allocator"], *about)


def _check_one_of(name: str, given: str, known: Collection[str]) -> None:
    if given not in known:
        raise UsageError(f"{name}={given!r}: expected one of {', '.join(map(repr, known))}")


def _limit(memory: int | str | None, gpu: str | None) -> tuple[bool, int | None]:
    """Return whether the GPU's memory is limited, and its size unless it is the catalogue's."""
    if memory is None:
        return gpu is not None, None
    if memory == "unlimited":
        return False, None
    try:
        return True, parse_size(memory)
    except UsageError as error:
        raise UsageError(f"memory={memory!r}: {error}, or 'unlimited'") from None


def _trace(
    in_place: InPlace,
    giving_back: Callable[[Ledger], Callable[[], None]],
    machine: Target,
    values: Values,
    mailbox: messages.Mailbox | None,
    *,
    limit: layers.Memory,
    profiled: Callable[..., MemoryProfile],
    mode: str | None,
    lowering: Lowering,
) -> MemoryProfile:
    """Run one pass; what ``giving_back`` returns is called when tensors lie as they did.

    Raises ``ValuesNeeded`` if it cannot go on without values to compute, and ``MessageNeeded``
    without what another process sends; ``MessageSent`` if it has sent what it was run for.
    """
    ledger = Ledger()
    ledgers = [ledger.on(device) for device in machine.devices]
    gpu = machine.gpu
    memories = () if gpu is None else tuple(limit.of(one, gpu) for one in ledgers)
    attribution = Attribution()
    interceptor = Interceptor(
        machine, ledger, attribution, layers.gradient_held_by_engine_alone(), values
    )
    interceptor.parts.conversion.lender = layers.lent_by_standing_gpus
    interceptor.parts.conversion.own = in_place
    interceptor.parts.values.mailbox = mailbox
    compiled = Compiled(interceptor, mode, lowering)

    def switch_on(stack: ExitStack) -> None:
        stack.callback(interceptor.threads.released)
        stack.callback(tensors.nowhere().forget)
        beside_others = not is_alone()
        stack.enter_context(process_kept(compiled.following(), interceptor.threads.on_thread))
        if beside_others:
            stack.enter_context(own_generators(interceptor.threads.on_thread))
        stack.enter_context(world_entered(machine.world, interceptor.threads.on_thread, mailbox))
        stack.callback(give_survivors_data, ledger, interceptor.parts.values.contents)
        stack.callback(interceptor.parts.values.end)
        if machine.world is not None:
            stack.callback(distributed.forget_meshes)
        stack.callback(giving_back(ledger))
        stack.callback(in_place.restore)
        stack.callback(ledger.give_back_outgrown)
        stack.enter_context(settings_kept(settings.entered_settings(), of_thread=True))
        stack.enter_context(settings.ends_once(interceptor.threads.on_thread))
        stack.enter_context(layers.layers(interceptor, context.TraceContext(interceptor), memories))

    def run() -> MemoryProfile:
        with HandlersDeferred(interceptor.arrived, interceptor.is_at_work):
            return profiled(interceptor, compiled, memories, in_place)

    def end_if_ended() -> None:  # the program, or C++, may have caught what ended it
        if interceptor.parts.values.needed:
            raise ValuesNeeded from None
        if mailbox is not None and mailbox.ended is not None:
            raise mailbox.ended from None

    # The step in a function of its own: when it returns, nothing of it is alive but what the
    # program keeps for itself.
    try:
        profile = run_alone(switch_on, run)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        end_if_ended()
        if lowering.ends_by(error):
            raise ValuesNeeded from None
        if isinstance(error, TypeError) and answers.UnknownNumber.__name__ in str(error):
            what, line = answers.UnknownNumber.AS_SIZE, attribution.line_of(error)
            raise interceptor.parts.values.unknown(what, line) from error
        if gpu is None and isinstance(error, _OF_NO_CUDA) and str(error).startswith(_NO_CUDA):
            line = attribution.line_of(error) or "the traced program"
            raise NoCudaError(layers.asked_for_cuda(line)) from error
        _note_what_helps(error, gpu, interceptor.parts.values)
        raise
    end_if_ended()
    interceptor.forget_kernels()
    return profile


def _profile(
    target: Any,
    args: Args,
    kwargs: Kwargs,
    step: Step,
    advised: Suggest,
    interceptor: Interceptor,
    compiled: Compiled,
    memories: tuple[DeviceMemory, ...],
    in_place: InPlace,
) -> MemoryProfile:
    ledger, machine = interceptor.parts.ledger, interceptor.parts.target
    facts = interceptor.parts.attribution.facts
    facts.device = machine.device.type
    facts.settings()
    program = operator_log.Program(ledger, facts)
    interceptor.parts.attribution.on_optimizer_step = operator_log.OptimizerStates(ledger).stepped
    fingerprint = ""
    watch = WATCH.get()
    if watch is not None:
        watch.at_begin(ledger)
    if isinstance(target, nn.Module):
        split_modules.refuse_wrapped(target)
        ledger.begin(Phase.BASELINE)
        facts.model(target)
        facts.called_with(type(target).__name__, args, kwargs)
        for position, tensor in enumerate(tensors_in(args)):
            facts.given(f"input {position}", (tensor,))
        for name, value in kwargs.items():
            facts.given(name, tensors_in(value))
        interceptor.parts.values.expect(in_place.own_bytes())
        interceptor.parts.attribution.traced = in_place.modules
        _lay(interceptor, in_place, target)
        fingerprint = operator_log.fingerprint_of_step(ledger, machine.device)
        compiled.take(target)
        ledger.enter(Phase.FORWARD)
    else:
        interceptor.parts.attribution.on_outermost_call = program.called
        interceptor.parts.conversion.names = program.names
        _expect_what_stands(interceptor, in_place, target)
    outcome = step.run(target, args, kwargs, interceptor.parts.phases.begin_step)
    with interceptor.working():
        interceptor.parts.numbers.settle()
    interceptor.threads.close()
    if watch is not None:
        watch.at_end(ledger)
    for memory in memories:
        memory.close()
    warnings = _warnings(interceptor, compiled)
    calls = ledger.on(machine.device).calls or []
    seen: dict[str, Any] = {
        "workload": fingerprint or program.fingerprint(),
        "values": interceptor.parts.values.known_are,
        "facts": Later(lambda: facts.facts((call[2], call[3]) for call in calls)),
        "broadcasts": tuple(facts.broadcasts.items()),
        "callers": tuple(facts.callers.items()),
        "library_lines": {place: line for place, line in facts.library_lines.items() if line},
        "functions": Later(lambda: tuple(operator_log.functions_called(facts.sites.items()))),
        "level": compiled.level,
        "graphs": tuple(compiled.graphs),
    }
    reported = [
        (ledger.on(device), memory) for device, memory in zip_longest(machine.devices, memories)
    ]
    own = reported.pop(machine.device.index or 0)
    others = tuple(_profile_of(machine, warnings, seen, *other) for other in reported)
    profile = _profile_of(machine, warnings, seen, *own, others, advised, ledger.on(_CPU))
    del outcome
    return profile


def _lay(interceptor: Interceptor, in_place: InPlace, target: object) -> None:
    conversion, device = interceptor.parts.conversion, interceptor.parts.target.device
    with undisturbed(), interceptor.working():
        in_place.lay(layers.HollowTensors(conversion, device, target))


def _expect_what_stands(interceptor: Interceptor, in_place: InPlace, target: object) -> None:
    """Begin with what stands on a fake or a real GPU, as a step of a module with its parameters."""
    ledger = interceptor.parts.ledger
    ledger.begin(Phase.BASELINE)
    if interceptor.parts.target.gpu is not None:
        with interceptor.working():
            for lent, storage in layers.present_on_standing_gpus():
                interceptor.parts.conversion.expect(lent, storage)
    if any(given.moves for given in in_place.given.values()):
        _lay(interceptor, in_place, target)
    ledger.enter(Phase.FORWARD)


#: Of which types errors for want of a GPU are; ProcessGroupNCCL.cpp has the latter.
_OF_NO_CUDA = (RuntimeError, ValueError)
#: What a build without CUDA says where nothing that was replaced has noticed before.
_NO_CUDA = (
    f"{NOT_LINKED} cuda",
    "Could not run 'aten::empty_strided' with arguments from the 'CUDA' backend",
    # torch/distributed/distributed_c10d.py, ``_new_process_group_helper``; ProcessGroupNCCL.cpp
    "Distributed package doesn't have NCCL built in",
    "nccl2 requires at least one CUDA device",  # of torch 2.15
    "ProcessGroupNCCL is only supported with GPUs",
)
#: What builds for the CPU and for CUDA say about the GPUs of Apple and Intel.
_OTHER_DEVICES = (f"{NOT_LINKED} mps", f"{NOT_LINKED} xpu", "Torch not compiled with XPU")
#: torch/distributed/rendezvous.py, ``_env_error``.
_NO_RANK = "environment variable RANK expected"
_NO_WORLD = (
    "(The program runs in several processes: say in how many with world_size=2, or --world-size 2)"
)
_OF_SIZES = (RuntimeError, ValueError, IndexError, AssertionError)
_KEPT_ALL = (
    "(Sizes that unknown values decide count as the largest that they can be, which may not fit "
    "together: pass values='real', or trace a smaller model)"
)
_CHOSE_ON_IMPORT = (
    "(What chose its device while a module was imported found no GPU, and took the CPU: choose it "
    "in the traced function, or run pytest with --torchmem-fake-cuda)"
)
_GUESSED = (
    "(Before that, the program went by values that are not known, and that values='none' guesses: "
    "pass values='auto' or values='real')"
)
_MOST_GUESSES = 5


def _note_what_helps(error: BaseException, gpu: Gpu | None, values: KnownValues) -> None:
    if str(error).startswith(_OTHER_DEVICES) and MODELLED not in str(error):
        add_note(error, MODELLED)
    if gpu is not None and isinstance(error, RuntimeError):
        # A trace of the body begins when its module is there, and with it what the module decided.
        text = str(error)
        if text.startswith(placement.ON_TWO_DEVICES) and "cpu" in text and "cuda" in text:
            add_note(error, _CHOSE_ON_IMPORT)
    if _NO_RANK in str(error):
        add_note(error, _NO_WORLD)
    # what was guessed before the error may be its cause
    told = values.warnings[:_MOST_GUESSES]
    if values.keeps_all and isinstance(error, _OF_SIZES):
        add_note(error, "\n".join((_KEPT_ALL, *told)))
    elif told and not values.mode.computes and not isinstance(error, TorchmemError):
        add_note(error, "\n".join((_GUESSED, *told)))


def _profile_of(
    machine: Target,
    warnings: tuple[str, ...],
    seen: Mapping[str, Any],
    ledger: DeviceLedger,
    memory: DeviceMemory | None,
    others: tuple[MemoryProfile, ...] = (),
    advised: Suggest | None = None,
    host: DeviceLedger | None = None,
) -> MemoryProfile:
    """Return the profile of one device, whose own warnings stand last; ``seen`` is what it has of
    the step beside its memory, by the names of its fields.
    """
    (timeline, calls), device = ledger.finish(), ledger.device
    on_host = Timeline()
    if host is not None and (host is not ledger or host.foreign):
        on_host = host.with_foreign(timeline if host is ledger else host.finish()[0])
    found = sorted(ledger.library_answers.items(), key=lambda item: item[0].question)
    return MemoryProfile(
        device=device.type if device == machine.device else str(device),
        gpu=machine.gpu.name if machine.gpu else None,
        host=machine.host.name,
        torch_version=torch.__version__,
        warnings=(*warnings, *_unknown(ledger, machine), *_elsewhere(ledger, machine, others)),
        unknown_workspaces=tuple(sorted(ledger.unknown_workspaces)),
        calibrated_workspaces=tuple(sorted(ledger.calibrated_workspaces)),
        library_workspaces=tuple(sorted(ledger.library_workspaces)),
        library_answers=tuple(answer._replace(modules=tuple(modules)) for answer, modules in found),
        questions=tuple(sorted(ledger.questions)),
        timeline=timeline,
        host_peak=host_peak_of(on_host),
        host_timeline=on_host,
        calls=cast(Any, Later(calls)),
        replay=memory.peaks if memory is not None else None,
        others=others,
        advised=advised,
        world_size=machine.world.size if machine.world else None,
        rank=machine.world.rank if machine.world else None,
        **seen,
        **figures_of(timeline),
    )


def _warnings(interceptor: Interceptor, compiled: Compiled) -> tuple[str, ...]:
    parts = interceptor.parts
    found = list(parts.values.warnings)
    if tensors.nowhere().touched():
        found.append(
            "something other than an operator of torch read or wrote the memory of a traced "
            "tensor, which has none: a C++ extension, or a thread that ran before the trace; it "
            "read zeros"
        )
    found += [
        f"{line or 'the traced program'}: a tensor comes from a thread that was there before the "
        "trace; what is made and freed on that thread is not counted. Start it in the test"
        for line in parts.conversion.from_threads
    ]
    if parts.attribution.compiled:
        first, *others = [*filter(None, parts.attribution.compiled)] or [""]
        more = f" (and at {len(others)} other lines)" if others else ""
        found.append(
            f"{at(first)}what torch.compile wraps was traced eagerly{more}; compiled, it may need "
            "more or less memory"
        )
    found += compiled.warnings()
    found += [
        f"{line or 'the traced program'}: {name}, compiled, is counted as its fused kernel, "
        "without a matrix of scores"
        for name, line in parts.attribution.fused.items()
    ]
    return tuple(found)


def _unknown(device: DeviceLedger, machine: Target) -> tuple[str, ...]:
    """Return one warning of all workspaces that are missing or estimates."""
    estimated = device.estimated_workspaces
    on_host = device.device.type == "cpu"
    why = machine.host.unchecked if on_host else "cuDNN was asked for its size on an H100 alone"
    parts = [
        f"the workspace of {', '.join(sorted(operators))} is {what}"
        for operators, what in (
            (device.unknown_workspaces - estimated, "unknown and not included"),
            (estimated, f"an estimate: {why}"),
        )
        if operators
    ]
    reasons = {
        f"cuDNN {answer.version or 'was not asked'}: {answer.why}"
        for answer in device.library_answers
        if answer.nbytes is None and answer.why
    }
    parts += sorted(reasons)
    return ("; ".join(parts),) if parts else ()


def _elsewhere(
    device: DeviceLedger, machine: Target, others: tuple[MemoryProfile, ...]
) -> tuple[str, ...]:
    is_first = machine.gpu is not None and device.device == machine.device
    if not is_first or device.events or any(other.timeline.allocations for other in others):
        return ()
    return (
        "nothing was allocated on cuda, so every figure is 0: a function makes its tensors itself "
        'and has to make them on "cuda", since only those of an nn.Module are moved',
    )


def _world(world_size: int | None, rank: int | None, gpus: int | None) -> World | None:
    if world_size is None:
        if rank is not None:
            check_ranks(rank, None, "rank=")
        return None
    size = check_world_size(world_size, "world_size=")
    if rank is not None and type(rank) is not int:
        raise UsageError(f"rank={rank!r}: expected one rank, from 0 to {size - 1}")
    (own,) = check_ranks(0 if rank is None else rank, size, "rank=")
    return World(size, own, gpus if type(gpus) is int and gpus > 0 else min(GPUS_OF_A_NODE, size))


def _machine(
    device: str,
    gpu: str | None,
    gpus: int | None,
    host: str,
    calibration: Calibration | None,
    world: World | None,
) -> Target:
    _check_one_of("device", device, ("cpu", "cuda"))
    _check_one_of("host", host, _HOSTS)
    if gpus is None:
        gpus = 1 if world is None else world.per_node
    if not isinstance(gpus, int) or isinstance(gpus, bool) or not 1 <= gpus <= MOST_GPUS:
        raise UsageError(
            f"gpus={gpus!r}: expected how many GPUs the program sees, from 1 to {MOST_GPUS}"
        )
    modelled = find_gpu(DEFAULT_GPU if gpu is None else gpu)
    if device == "cpu":
        return Target(_HOSTS[host](), world=world)
    if calibration is not None and not isinstance(calibration, Calibration):
        raise UsageError(
            f"calibration={calibration!r}: expected a Calibration, as read_calibration() returns"
        )
    if calibration is not None and not calibration.covers(modelled.name):
        calibration = None  # plans are then those of every other trace
    own = Selected(0 if world is None else world.local_rank)
    return Target(_HOSTS[host](), modelled, calibration, gpus, world, selected=own)


def _with_cudnn(machine: Target, cudnn: str) -> Target:
    """Return a machine whose cuDNN can be asked, if ``cudnn`` allows it and there is one."""
    _check_one_of("cudnn", cudnn, ("auto", "stored"))
    if machine.gpu is None:
        return machine
    if cudnn != "auto":
        return replace(machine, why_no_cudnn=_NOT_STORED)
    from pytest_torchmem.cudnn.library import library

    asked = library()
    if isinstance(asked, str):
        return replace(machine, why_no_cudnn=asked)
    return replace(machine, cudnn=asked)
