"""What the fixture ``torchmem`` is, and the tests whose whole body is traced."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import pytest

from pytest_torchmem.checks import MARKER
from pytest_torchmem.checks.request import CheckTarget, gpu_name, worlds_of
from pytest_torchmem.errors import UsageError, refuse_misspelt
from pytest_torchmem.plugin.checker import Checker
from pytest_torchmem.plugin.failure import MemoryCheckFailed, shown_at_the_call
from pytest_torchmem.reports.layout import MARGIN, wrapped
from pytest_torchmem.targets.world import World

if TYPE_CHECKING:
    from pytest_torchmem.graphs.scaling import Scaling
    from pytest_torchmem.interception.values.contents import ValuesMode
    from pytest_torchmem.journal.contents import ProgramState
    from pytest_torchmem.measurement.device import Device
    from pytest_torchmem.measurement.measured import MeasuredProfile
    from pytest_torchmem.profile.profile import MemoryProfile
    from pytest_torchmem.targets.gpus import Gpu, WorkspaceKey, WorkspaceSize
    from pytest_torchmem.targets.target import DeviceName
    from pytest_torchmem.tracing.compiled import Level

    Figures = dict[WorkspaceKey, WorkspaceSize]

_DISABLED = "not checked: --torchmem-disable"
_OF_TRACES = (
    *("host", "allocator", "memory", "calibration", "cudnn", "gpus"),
    *("values", "world_size", "rank"),
)
"""Options of ``check`` that are meant for its traces alone."""


class Torchmem:
    """Memory checks for one test: the fixture ``torchmem``."""

    def __init__(self, checker: Checker) -> None:
        self._checker = checker

    def check(
        self,
        target: Any,
        *args: Any,
        name: str | None = None,
        device: DeviceName | Literal["cpu,cuda"] | Sequence[DeviceName] | None = None,
        gpu: str | None = None,
        tolerance: Any = None,
        measure: Literal["auto", "never", "require"] | None = None,
        values: ValuesMode | None = None,
        mode: Level | None = None,
        gpus: int | None = None,
        world_size: int | None = None,
        ranks: int | Sequence[int] | None = None,
        scaling: str | None = None,
        growth: int | str | None = None,
        sizes: Mapping[str, Sequence[int]] | None = None,
        **kwargs: Any,
    ) -> dict[str, MemoryProfile]:
        """Trace ``target`` on every configured device and fail the test if it needs too much.

        The judge is the test's ``memory_budget`` marker if it sets a limit, and else the snapshot,
        in which ``name`` tells several checks of one test apart. ``device``, ``gpu``,
        ``tolerance`` and ``measure`` are for this check alone; a ``gpu`` without a device means
        cuda only, and the trace must fit in its memory. ``gpus`` is how many of them the program
        sees; what is judged is ``cuda:0``. ``world_size`` is how many processes a distributed step
        runs in, and ``ranks`` which of them are traced (default: rank 0), each with figures of its
        own. ``scaling`` is how fast the peak may grow with sizes of the input (``"linear in
        sequence"``), and ``sizes`` the values that are traced for that; a function is then called
        with the first of each. ``growth`` is by how much memory may grow from one step to the next
        (``"0"``, ``"1 KiB"``); a module then makes three ``steps``, and a callable is called
        as often as ``steps`` says. All else goes to ``trace``.
        Returns the profiles by device, or of several ranks by device and rank
        (``"cuda rank 63"``).

        On a machine with a GPU, and with cuda among the devices, the step is run there for real as
        well: the check also fails if trace and GPU disagree, or if the measurement grew.
        ``measure`` is ``"auto"`` for this, ``"never"``, or ``"require"``, which fails without one.
        """
        if self._checker.context.settings.disabled:
            self._checker.not_checked(_DISABLED, notice=_DISABLED)
            pytest.skip(_DISABLED)

        checker = self._checker
        own = {"gpus": gpus, "values": values, "mode": mode}
        options = kwargs | {name: value for name, value in own.items() if value is not None}
        with checker.watched(), shown_at_the_call():
            self._refuse_inside_body("check")
            if sizes is not None and not (isinstance(sizes, Mapping) and sizes):
                told = "write sizes by name: {'batch': (1, 2, 4)}"
                raise UsageError(f"check(sizes={sizes!r}): {told}")
            if "rank" in kwargs:
                raise UsageError("check(rank=...): write ranks=, which may be one or several")
            refuse_misspelt(self.check, target, kwargs)
            if _is_module(target) and (growth is not None or checker.budget.growth is not None):
                from pytest_torchmem.diagnosis.diagnose import FEWEST

                options = {"steps": FEWEST, **options}
            if sizes and not _is_module(target):
                asked = _target_of_sizes(checker, target, args, options, sizes)
            else:
                asked = _target(checker, target, nullcontext, args, options, sizes)
            return checker.check(
                asked,
                on_cuda=self._on_cuda(target),
                name=name,
                device=device,
                gpu=gpu,
                tolerance=tolerance,
                measure=measure,
                gpus=gpus,
                world_size=world_size,
                ranks=ranks,
                scaling=scaling,
                growth=growth,
            )

    def trace(
        self,
        target: Any,
        *args: Any,
        device: DeviceName | None = None,
        gpu: str | None = None,
        **kwargs: Any,
    ) -> MemoryProfile:
        """Return the profile of ``target`` on one device; nothing is judged or stored.

        As ``pytest_torchmem.trace``, except that the device and GPU of the marker and the settings
        are the defaults; of several devices it is the first.
        """
        self._refuse_inside_body("trace")
        self._checker.traced = True
        settings, budget = self._checker.context.settings, self._checker.budget
        on_cuda = gpu is not None or self._on_cuda(target)
        where = device or ("cuda" if on_cuda else (budget.devices or settings.devices)[0])
        if where == "cuda" and (gpu is not None or budget.gpu or settings.gpu_named):
            gpu = gpu_name(settings, budget, gpu)
        with shown_at_the_call():
            world = None if "world_size" in kwargs else worlds_of(settings, budget)[0]
            options = self._checker.trace_options(where, gpu, world) | kwargs
            if isinstance(size := options.get("world_size"), int):
                traced = World(size, options.get("rank", 0))
                self._checker.standing.refuse_other_worlds(self._checker.item, [traced])
            return _tracer()(target, *args, **options)

    def _on_cuda(self, target: Any) -> str:
        """Return what a function would find on cuda; a module is moved to each device."""
        checker = self._checker
        return "" if _is_module(target) else checker.standing.on_cuda(checker.item)

    def _refuse_inside_body(self, method: str) -> None:
        if self._checker.in_body:
            raise UsageError(
                f"torchmem.{method} was called in a test whose whole body is traced for its marker "
                f"{MARKER}. Request the fixture to trace only what you check: def test(torchmem)"
            )


@contextmanager
def judged(item: pytest.Item, checker: Checker) -> Iterator[None]:
    """Run the call phase of a marked test, and have it judged.

    A test that does not use the fixture is traced whole, once per device: the function that pytest
    is about to call is replaced for as long as the phase lasts.
    """
    try:
        body = _body_to_trace(item, checker)
    except UsageError as error:
        # No line of the test is to blame, so a traceback would show the plugin's.
        token = MARGIN.set(0)
        try:
            message = f"{wrapped(str(error))}\n\n{checker.place}: UsageError"
        finally:
            MARGIN.reset(token)
        raise pytest.fail.Exception(message, pytrace=False) from None
    if body is not None:
        item.obj = _traced(body, checker)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            item.obj = body  # type: ignore[attr-defined]
        return
    yield
    if checker.context.settings.disabled or checker.swallowed():
        return
    if not checker.checked:
        raise MemoryCheckFailed(
            f"not checked: the test has the marker {MARKER} and the fixture torchmem, but "
            "never called torchmem.check",
            checker.first_line,
        )
    left = [device for device in checker.budget.devices or () if device not in checker.devices]
    if left:
        raise MemoryCheckFailed(
            f"not checked on {' and '.join(left)}: the marker {MARKER} names the device, but "
            "every torchmem.check of the test names another one",
            checker.first_line,
        )


def _body_to_trace(item: pytest.Item, checker: Checker) -> Callable[..., Any] | None:
    """Return what is to be traced as a whole, ``None`` where the test uses the fixture."""
    checker.budget  # noqa: B018
    if "torchmem" in getattr(item, "fixturenames", ()):
        return None
    if checker.context.settings.disabled:
        checker.not_checked(_DISABLED, notice=_DISABLED)
        return None
    if not isinstance(item, pytest.Function):
        raise UsageError(f"{MARKER} works on test functions and methods, not on {item!r}")
    body: Callable[..., Any] = item.obj
    if inspect.iscoroutinefunction(body) or inspect.isasyncgenfunction(body):
        raise UsageError(
            f"{item.nodeid} is asynchronous, so the marker {MARKER} cannot trace its whole body. "
            "Use the fixture: async def test(torchmem), and in it torchmem.check(...)"
        )
    return body


def _traced(body: Callable[..., Any], checker: Checker) -> Callable[..., None]:
    @functools.wraps(body)
    def traced(*args: Any, **kwargs: Any) -> None:
        @contextmanager
        def copied(target: Any) -> Iterator[Callable[[], Any]]:
            from pytest_torchmem.measurement.measured import on_copies
            from pytest_torchmem.step.step import Step

            # A fixture's model is not changed by a trace, and must not be by this either.
            with on_copies(None, body, args, kwargs, Step()):
                yield lambda: body(*args, **kwargs)

        given, item, standing = dict(kwargs), checker.item, checker.standing
        target = _target(checker, lambda: body(*args, **given), copied, (), {})
        trace = target.trace

        def with_new_fixtures(*args: Any, **others: Any) -> MemoryProfile:
            """Trace the body ``given`` anew what can be traced once."""
            if standing.renew(item):
                new = {name: item.funcargs[name] for name in given}  # type: ignore[attr-defined]
                given.update(new)
            with standing.presented(item):
                return trace(*args, **others)

        target = replace(target, trace=with_new_fixtures, scale=None)
        checker.in_body = True
        try:
            with standing.presented(item):
                checker.check(target, on_cuda=standing.on_cuda(item))
        finally:
            checker.in_body = False

    return traced


def _target(
    checker: Checker,
    target: Any,
    real: Callable[[Any], AbstractContextManager[Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    sizes: Mapping[str, Sequence[int]] | None = None,
) -> CheckTarget:
    """Return the target of a check; ``real(target)`` is the context of its real run."""
    of_step = {key: value for key, value in kwargs.items() if key not in _OF_TRACES}
    states: list[ProgramState] = []

    def run(device: str, gpu: str | None, world: World | None, **others: Any) -> MemoryProfile:
        trace = _tracer()
        if states:
            states[0].restore()  # on each device as on the first
        elif not _is_module(target):  # which a trace leaves as it was
            states.append(_state_of(target, args, kwargs))
        options = checker.trace_options(device, gpu, world)
        return trace(target, *args, **{**options, **kwargs, **others})

    def run_for_real() -> MeasuredProfile:
        from pytest_torchmem.measurement.measured import MeasuredProfile, measure

        with real(target) as program:
            profile = measure(program, *args, **of_step, device="cuda")
        assert isinstance(profile, MeasuredProfile)
        return profile

    def calibrate(device: Device, gpu: Gpu, questions: Collection[WorkspaceKey]) -> Figures:
        from pytest_torchmem.measurement.calibrate import record_figures
        from pytest_torchmem.step.step import Step

        step, others = Step.taken_from(of_step)
        with real(target) as program:
            return record_figures(device, gpu, questions, program, args, others, step)

    def scale(device: str, gpu: str | None, world: World | None, names: Sequence[str]) -> Scaling:
        from pytest_torchmem.graphs.scaling import scaling_of

        options = checker.trace_options(device, gpu, world)
        given = {key: value for key, value in kwargs.items() if key in _OF_TRACES}
        return scaling_of(target, args, of_step, names, sizes, **{**options, **given})

    calibrates = None if "calibration" in kwargs else calibrate
    return CheckTarget(run, run_for_real, calibrates, scale)


def _target_of_sizes(
    checker: Checker,
    build: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    sizes: Mapping[str, Sequence[int]],
) -> CheckTarget:
    """Return what is checked of a function of ``sizes``: what it returns for the first of each."""
    from pytest_torchmem.graphs.fitting import built_at

    first = {name: values[0] for name, values in sizes.items()}
    target, own, named = built_at(functools.partial(build, *args), first)
    at_first = _target(checker, target, nullcontext, own, {**named, **kwargs})
    of_sizes = _target(checker, build, nullcontext, args, kwargs, sizes)
    return replace(at_first, scale=of_sizes.scale)


def _state_of(*reached: Any) -> ProgramState:
    from pytest_torchmem.journal.contents import ProgramState, Reached

    return ProgramState(Reached(*reached), keeps=True)


def _is_module(target: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(target, torch.nn.Module)


def _tracer() -> Callable[..., MemoryProfile]:
    """Return ``trace``; raises ``UsageError`` where torch is missing."""
    try:
        from pytest_torchmem.tracing.trace import trace
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UsageError(
            "not checked: torch is not installed in this environment. "
            "Install it, or deselect the memory tests"
        ) from None
    return trace
