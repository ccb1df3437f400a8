"""What options, ini keys and the environment ask for, as one frozen value."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_torchmem.checks.defaults import MEASURE_MODES, UPDATE_MODES, VALUES_MODES
from pytest_torchmem.errors import UsageError
from pytest_torchmem.snapshots.tolerance import BUILT_IN, DEVICES, Level, Tolerance, for_path
from pytest_torchmem.targets.gpus import MOST_GPUS


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line, the ini file and the environment ask for."""

    devices: tuple[str, ...]
    gpu: str
    """The GPU's name in the catalogue."""
    gpu_named: bool
    """Somebody named the GPU: traces must fit in its memory."""
    allocator: str
    """Options of the caching allocator, as for ``PYTORCH_ALLOC_CONF``."""
    values: str
    """Which values of tensors traces compute: one of ``VALUES_MODES``."""
    narrowed: bool
    """Devices or GPU were named on the command line: the others' entries are not obsolete."""
    measure: str
    """When checks on cuda run on a real GPU too: one of ``MEASURE_MODES``, or ``STAND_IN``."""
    measure_tolerance: Tolerance
    """By how much a trace may differ from a measurement on a real GPU."""
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
    """The directory for pages of the checks that failed."""
    world_size: int | None = None
    """How many processes distributed steps run in, for checks that do not say it."""
    ranks: tuple[int, ...] = ()
    """Which of them are traced; rank 0 if there is none."""
    budget: Level = ()
    """Limits of every memory test, as rules whose allowance is all that a figure may be."""
    fake_cuda: str = ""
    """The GPU that the whole suite sees although it is not there, "" for none."""
    verbose: bool = False
    """Failures show everything that is known."""

    @property
    def writes(self) -> bool:
        """Whether this run may write snapshot files."""
        return bool(self.update) and not self.dry_run

    @property
    def fails_on_obsolete(self) -> bool:
        """Whether entries without a test fail the run: in CI nobody reads a line on them."""
        return self.strict or self.in_ci

    @property
    def writes_reports(self) -> bool:
        """Whether files are asked for that report the run."""
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


def parse_measure(value: object, source: str) -> str:
    """Return when to measure on a real GPU, one of ``MEASURE_MODES``."""
    return parse_choice(value, MEASURE_MODES, source)


def parse_values(value: object, source: str) -> str:
    """Return which values of tensors traces compute, one of ``VALUES_MODES``."""
    return parse_choice(value, VALUES_MODES, source)


def parse_gpus(value: object, source: str) -> int:
    """Return how many GPUs a program sees."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_GPUS:
        raise UsageError(f"{source}: {value!r}: write how many GPUs, from 1 to {MOST_GPUS}")
    return value


def parse_choice(value: object, choices: Sequence[str], source: str) -> str:
    """Return ``value`` where it is one of ``choices``; raises ``UsageError`` for any other."""
    if not isinstance(value, str) or value not in choices:
        written = f"{', '.join(choices[:-1])} or {choices[-1]}"
        raise UsageError(f"{source}: {value!r}: write {written}")
    return value
