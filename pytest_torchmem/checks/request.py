"""What is asked for: by options, ini keys and the environment, by a test's marker, by one check."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_torchmem import checks, figures, units
from pytest_torchmem.checks import MARKER, UPDATE_MODES
from pytest_torchmem.errors import UsageError, meant
from pytest_torchmem.snapshots.location import relative
from pytest_torchmem.snapshots.tolerance import (
    BUILT_IN,
    DEVICES,
    Level,
    Tolerance,
    for_path,
    parse_rules,
    tolerance_in,
)
from pytest_torchmem.targets.gpus import MOST_GPUS, Gpu, WorkspaceKey, WorkspaceSize, find_gpu
from pytest_torchmem.targets.world import World, check_ranks, check_world_size

if TYPE_CHECKING:
    from pytest_torchmem.graphs.scaling import Scaling
    from pytest_torchmem.measurement.device import Device
    from pytest_torchmem.measurement.measured import MeasuredProfile
    from pytest_torchmem.profile.profile import MemoryProfile
    from pytest_torchmem.snapshots.compare import Comparison


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line, the ini file and the environment ask for."""

    devices: tuple[str, ...]
    gpu: str
    gpu_named: bool
    """Somebody named the GPU: traces must fit in its memory."""
    allocator: str
    values: str
    narrowed: bool
    """Devices or GPU were named on the command line: the others' entries are not obsolete."""
    measure: str
    """When checks on cuda run on a real GPU too: one of ``MEASURE_MODES``, or ``STAND_IN``."""
    measure_tolerance: Tolerance
    option_tolerance: Level
    ini_tolerance: Level
    update: frozenset[str]
    update_max: Tolerance | None
    dry_run: bool
    strict: bool
    disabled: bool
    split_by_torch: bool
    in_ci: bool
    on_github: bool
    json_path: Path | None
    markdown_path: Path | None
    proposal_path: Path | None
    html_path: Path | None = None
    world_size: int | None = None
    ranks: tuple[int, ...] = ()
    budget: Level = ()
    """Limits of every memory test, as rules whose allowance is all that a figure may be."""
    fake_cuda: str = ""
    verbose: bool = False

    @property
    def writes(self) -> bool:
        return bool(self.update) and not self.dry_run

    @property
    def fails_on_obsolete(self) -> bool:
        """Whether entries without a test fail the run: in CI nobody reads a line on them."""
        return self.strict or self.in_ci

    @property
    def writes_reports(self) -> bool:
        paths = (self.json_path, self.markdown_path, self.html_path)
        return any(path is not None for path in paths)

    def tolerances(self, path: str) -> list[Level]:
        """Return what holds for a test file where test and entry say nothing, closest first."""
        special, general = for_path(self.ini_tolerance, path)
        return [self.option_tolerance, special, general, BUILT_IN]

    @property
    def mode(self) -> str:
        """What this run does with snapshots, for the header."""
        if self.disabled:
            return "disabled"
        if not self.update:
            return "comparing (strict)" if self.strict else "comparing"
        what = "all" if len(self.update) == len(UPDATE_MODES) else ", ".join(sorted(self.update))
        return f"{'dry run of an update' if self.dry_run else 'updating'} ({what})"


def parse_devices(value: object, source: str) -> tuple[str, ...]:
    """Return the devices in ``value``, a text such as ``"cpu,cuda"`` or a sequence of names."""
    names = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names:
        raise UsageError(f"{source}: {value!r} names no device: write cpu, cuda or cpu,cuda")
    for name in names:
        if name not in DEVICES:
            raise UsageError(f"{source}: {name!r} is not a device: write cpu, cuda or cpu,cuda")
    return tuple(device for device in DEVICES if device in names)


def parse_gpus(value: object, source: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_GPUS:
        raise UsageError(f"{source}: {value!r}: write how many GPUs, from 1 to {MOST_GPUS}")
    return value


def parse_choice(value: object, source: str, choices: Sequence[str]) -> str:
    """Return ``value`` where it is one of ``choices``; raises ``UsageError`` for any other."""
    if not isinstance(value, str) or value not in choices:
        written = f"{', '.join(choices[:-1])} or {choices[-1]}"
        raise UsageError(f"{source}: {value!r}: write {written}")
    return value


T = TypeVar("T")
Mark = tuple[tuple[Any, ...], Mapping[str, Any]]
"""The positional and named arguments of a marker."""
Worlds = tuple[World | None, ...]
"""The processes of a distributed step; ``(None,)`` for any other step."""
POWERS = {"constant": 0, "linear": 1, "quadratic": 2, "cubic": 3}
_BOUND = re.compile(r"\s*(\w+)\s+in\s+([A-Za-z_]\w*)\s*")


@dataclass(frozen=True, slots=True)
class Bound:
    """The highest power of one size that a peak may grow with."""

    size: str
    power: int


def word_of(power: int) -> str:
    return next((word for word, known in POWERS.items() if known == power), f"of power {power}")


def parse_bounds(value: object, source: str) -> tuple[Bound, ...]:
    """Return the bounds that a text names: ``"linear in sequence, linear in batch"``."""
    if not isinstance(value, str):
        raise UsageError(f"{source}: {value!r}: {_EXPECTED}")
    found = []
    for part in re.split(r",|\band\b", value):
        match = _BOUND.fullmatch(part)
        if match is None or match[1].lower() not in POWERS:
            raise UsageError(f"{source}: {value!r}: {_EXPECTED}")
        found.append(Bound(match[2], POWERS[match[1].lower()]))
    return tuple(found)


_EXPECTED = (
    f"expected one of {', '.join(POWERS)} and a size, such as 'linear in sequence' or "
    "'linear in batch and quadratic in sequence'"
)


@dataclass(frozen=True, slots=True)
class Limit:
    """A figure's limit in bytes, and how the user wrote it."""

    figure: str
    nbytes: int
    text: str


@dataclass(frozen=True, slots=True)
class Budget:
    """What the ``memory_budget`` markers of one test say together."""

    limits: tuple[Limit, ...] = ()
    devices: tuple[str, ...] | None = None
    gpu: str | None = None
    gpus: int | None = None
    tolerance: Level = ()
    measure: str | None = None
    values: str | None = None
    world_size: int | None = None
    ranks: tuple[int, ...] | None = None
    name: str | None = None
    """The name of the check of a test whose whole body is traced, or that names none itself."""
    growth: Tolerance | None = None
    """By how much memory may grow from one step to the next."""
    bounds: tuple[Bound, ...] = ()
    """How fast the peak may grow with sizes of the input."""

    @property
    def judges(self) -> bool:
        """Whether there is a limit to keep to; a GPU named alone means "fits on it"."""
        return bool(self.limits or self.bounds or self.growth) or self.gpu is not None

    @property
    def of_cuda(self) -> tuple[str, ...]:
        """What of it can be checked on cuda alone, as it is written."""
        peaks = (limit for limit in self.limits if limit.figure in figures.ALLOCATOR_PEAKS)
        limits = (f"{peak.figure.removesuffix('_peak')}={peak.text!r}" for peak in peaks)
        return (*((f"gpu={self.gpu!r}",) if self.gpu else ()), *limits)

    @property
    def of_any_device(self) -> bool:
        """Whether something of it can be checked on the CPU too."""
        limits = [limit for limit in self.limits if limit.figure not in figures.ALLOCATOR_PEAKS]
        return bool(limits or self.tolerance or self.bounds or self.growth)


@dataclass(frozen=True, slots=True)
class CheckTarget:
    """What is checked: how it is traced, and how it is run for real."""

    trace: Callable[..., MemoryProfile]
    """Takes a device, the GPU that it has to fit on, and the process that it is, if any; and
    options of the trace by their names.
    """
    measure: Callable[[], MeasuredProfile]
    """Runs on the real GPU of this machine."""
    calibrate: (
        Callable[[Device, Gpu, Collection[WorkspaceKey]], dict[WorkspaceKey, WorkspaceSize]] | None
    ) = None
    """Measures workspaces there; ``None`` where the test has a calibration of its own."""
    scale: Callable[[str, str | None, World | None, Sequence[str]], Scaling] | None = None
    """Traces other sizes, by their names; ``None`` where none are known."""


@dataclass(frozen=True, slots=True)
class CheckedTest:
    """What a check has to know of its test, and what it calls in between."""

    id: str
    """The id within the module, parameters included."""
    module: Path
    root: Path
    """The directory that paths in reports are relative to."""
    accepts: frozenset[str]
    """The kinds of changes that an update writes for this test: some of ``UPDATE_MODES``."""
    is_gone: Callable[[str], bool]
    """Tells whether the module certainly has no test of that id any more."""
    orphans: Callable[[], Iterable[Path]]
    """Returns the snapshot files of modules that do not exist any more, as far as is known."""
    functions: tuple[Any, ...]
    """The test's own and its fixtures', its parameters, and what its class has for it."""
    on_profile: Callable[..., object]
    """Called with the ``name`` of the check and every ``profile``."""
    on_comparison: Callable[..., Comparison | None]
    """Called with the entry ``before``, the one of ``now`` and their ``comparison``; returns
    another one to replace it.
    """

    @property
    def name(self) -> str:
        """The file, relative to the root, and the id within it."""
        return f"{self.relative(self.module)}::{self.id}"

    def relative(self, path: Path) -> str:
        """Return ``path`` relative to the root, with ``/``."""
        return relative(path, self.root)


@dataclass(frozen=True, slots=True)
class Request:
    """What one check asks for, once marker, arguments and settings are put together."""

    test: CheckedTest
    name: str
    devices: tuple[str, ...]
    devices_named: bool
    """The test itself names its devices; else they are those of the settings."""
    gpu: str
    gpu_named: bool
    budget: Budget
    tolerances: tuple[Level, ...]
    """Closest first, without that of the snapshot's entry."""
    uses_snapshot: bool
    """Whether a snapshot judges it; a budget's only explains, where an update stored one."""
    measure: str
    worlds: Worlds = (None,)
    """The processes of a distributed step that are traced, one after the other."""
    growth: Tolerance | None = None
    bounds: tuple[Bound, ...] = ()
    is_stored: bool = True
    """Whether an update stores what it allocates: its test has an id that is found again."""


def make_request(
    test: CheckedTest, settings: Settings, budget: Budget, **arguments: Any
) -> Request:
    """Return what a check asks for by its ``arguments``, its test's markers, and the settings."""
    given = {name: value for name, value in arguments.items() if value is not None}
    own = _read_arguments(given, "check")
    devices = own.devices or budget.devices
    if devices is None and (own.gpu or budget.of_cuda):
        devices = ("cuda",)
    _refuse_contradictions(budget, devices, given)
    worlds = worlds_of(settings, budget, given.get("world_size"), given.get("ranks"))
    several = (own.gpus or budget.gpus) not in (None, 1)
    # A machine may have fewer; only who asks for it knows that this one has as many.
    default = "never" if several or worlds != (None,) else settings.measure
    tolerances = (budget.tolerance, own.tolerance)
    return Request(
        test=test,
        name=own.name or budget.name or "",
        devices=devices or settings.devices,
        devices_named=devices is not None,
        gpu=own.gpu or gpu_name(settings, budget, None),
        gpu_named=bool(own.gpu or budget.gpu or settings.gpu_named),
        budget=budget,
        tolerances=(*tolerances, *settings.tolerances(test.relative(test.module))),
        # A budget replaces the snapshot, unless a tolerance, which only a snapshot has, is named.
        uses_snapshot=not budget.judges or any(tolerances),
        measure=own.measure or budget.measure or default,
        worlds=worlds,
        growth=own.growth or budget.growth,
        bounds=own.bounds or budget.bounds,
    )


def worlds_of(
    settings: Settings, budget: Budget, world_size: object = None, ranks: object = None
) -> Worlds:
    """Return the processes that arguments, marker or settings ask for; ``(None,)`` for none."""
    if world_size is not None:
        size: int | None = check_world_size(world_size, "check(world_size=)")
    else:
        size = budget.world_size or settings.world_size
    if ranks is not None:
        asked = check_ranks(ranks, size, "check(ranks=)")
    elif size is None:
        return (None,)
    elif budget.ranks is not None:
        asked = check_ranks(budget.ranks, size, f"{MARKER}(ranks=)")
    else:
        asked = check_ranks(settings.ranks or (0,), size, "torchmem_ranks")
    assert size is not None
    return tuple(World(size, rank) for rank in asked)


def _refuse_contradictions(
    budget: Budget, devices: tuple[str, ...] | None, given: Mapping[str, Any]
) -> None:
    """Raise ``UsageError`` where a marker and a check, or a device and a GPU, do not go together.

    One of them would silently not be checked.
    """
    here, gpu = "name it in one place", given.get("gpu")
    others = [d for d in devices or () if budget.devices is not None and d not in budget.devices]
    if others:
        named = ", ".join(budget.devices or ())
        raise UsageError(
            f"check(device={others[0]!r}): the marker {MARKER} says device={named!r}: {here}"
        )
    if gpu is not None and budget.gpu and find_gpu(gpu).name != budget.gpu:
        raise UsageError(f"check(gpu={gpu!r}): the marker {MARKER} says gpu={budget.gpu!r}: {here}")
    for name in ("gpus", "world_size"):
        asked_for, written = given.get(name), getattr(budget, name)
        if None not in (asked_for, written) and asked_for != written:
            said = f"the marker {MARKER} says {name}={written}"
            raise UsageError(f"check({name}={asked_for!r}): {said}: {here}")
    asked = budget.of_cuda if gpu is None else (f"gpu={gpu!r}", *budget.of_cuda)
    if asked and devices is not None and "cuda" not in devices:
        raise UsageError(
            f"{asked[0]} is checked on cuda alone, and device='cpu' leaves cuda out. Leave out "
            "one of them"
        )
    if budget.of_cuda and "cpu" in (devices or ()) and not budget.of_any_device:
        raise UsageError(
            f"{MARKER}({budget.of_cuda[0]}) says what must fit on a GPU, and nothing about the "
            'cpu. Give it a limit, such as "2 GiB", or leave out the device'
        )


def gpu_name(settings: Settings, budget: Budget, name: str | None) -> str:
    """Return the catalogue's name of the GPU that ``name``, marker or settings ask for."""
    return find_gpu(budget.gpu or settings.gpu if name is None else name).name


def read_budget(levels: Iterable[Iterable[Mark]], rules: Iterable[Level] = ()) -> Budget:
    """Return what markers say together: for each argument the closest wins, which comes first.

    ``levels`` are the positional and named arguments of those at each place. Raises ``UsageError``
    where an argument is unknown or cannot be read, where two at one place disagree, and where
    nothing in any of them can be judged, nor by ``rules`` of the ini file.
    """
    written = [_at_one_place(level) for level in levels]
    if not written:
        return Budget()
    given: dict[str, Any] = {}
    for arguments in reversed(written):
        given.update({name: value for name, value in arguments.items() if value is not None})
    limits = tuple(
        Limit(figures.SELECTORS[name], _size(name, given[name]), str(given[name]))
        for name in checks.LIMITS
        if name in given
    )
    judged = limits or any(rules) or {"gpu", "tolerance", "scaling", "growth"} & set(given)
    if not judged:
        raise UsageError(
            f"the marker {MARKER} has no limit, so there is nothing to check. Give it one, such as "
            f'{MARKER}("2 GiB") or {MARKER}(backward="1.5 GiB"), or a GPU that the test must fit '
            f'on: {MARKER}(gpu="t4")'
        )
    return replace(_read_arguments(given, MARKER), limits=limits, **_world(given))


def _read_arguments(given: Mapping[str, Any], where: str) -> Budget:
    """Return arguments of a check or its marker as they are read, without limits and worlds."""

    def read(name: str, parse: Callable[[Any, str], T]) -> T | None:
        return parse(given[name], f"{where}({name}=)") if name in given else None

    named = f"the marker {where}" if where == MARKER else where
    return Budget(
        devices=read("device", parse_devices),
        gpu=find_gpu(given["gpu"]).name if "gpu" in given else None,
        gpus=read("gpus", parse_gpus),
        tolerance=parse_rules(given.get("tolerance"), f"{named}(tolerance=)"),
        measure=read("measure", partial(parse_choice, choices=checks.MEASURE_MODES)),
        values=read("values", partial(parse_choice, choices=checks.VALUES_MODES)),
        name=read("name", _name),
        growth=read("growth", parse_growth),
        bounds=read("scaling", parse_bounds) or (),
    )


def _at_one_place(marks: Iterable[Mark]) -> dict[str, Any]:
    together: dict[str, Any] = {}
    for args, kwargs in marks:
        try:
            given = checks.ARGUMENTS.bind(*args, **kwargs).arguments
        except TypeError as error:
            own = checks.ARGUMENTS.parameters
            guesses = "".join(meant(name, own) for name in kwargs if name not in own)
            text = f"the marker cannot be read: {error}.{guesses} It is {checks.SIGNATURE}"
            raise UsageError(text) from None
        for name, value in given.items():
            if value is not None and together.setdefault(name, value) != value:
                raise UsageError(
                    f"two markers {MARKER} at one place disagree: {name}={together[name]!r} and "
                    f"{name}={value!r}. Write one marker there"
                )
    return together


def _world(given: Mapping[str, Any]) -> dict[str, Any]:
    size, ranks = given.get("world_size"), given.get("ranks")
    if size is not None:
        check_world_size(size, f"{MARKER}(world_size=)")
    if ranks is None:
        return {"world_size": size}
    # Without a world size, that of the settings holds.
    several = (ranks,) if isinstance(ranks, int) else tuple(ranks)
    if size is not None:
        several = check_ranks(several, size, f"{MARKER}(ranks=)")
    return {"world_size": size, "ranks": several}


def parse_growth(value: object, source: str) -> Tolerance:
    """Return by how much memory may grow between steps; ``"0"`` is not at all."""
    return tolerance_in(0 if str(value).strip() == "0" else value, source)


def _name(value: object, source: str) -> str:
    if isinstance(value, str) and value and value.isprintable():
        return value
    is_text = isinstance(value, str) and value
    why = "one line without control characters" if is_text else "a non-empty string"
    raise UsageError(f"{source.removesuffix(')')}{value!r}): expected {why}")


def _size(name: str, value: Any) -> int:
    try:
        return units.parse_size(value)
    except UsageError as error:
        raise UsageError(f"{MARKER}({name}=): {error}") from None
